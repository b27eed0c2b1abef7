//! Records as items: read by key, and listed by the indexes.
//!
//! Indexes lag behind the table, so records found by them are read again from the table.

use std::collections::HashMap;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{DEFAULT, EntityId};
use tidegate_core::limit::policy::{Scope, Version};
use tidegate_core::limit::token::TokenId;

use super::DynamoDb;
use super::bucket_view::{number_of, text_of};
use super::client::{Action, Range};
use super::expression::UpdateExpression;
use super::keys::{GSI1, GSI2, GSI3, Item, Key, PART, PK, SK, padded, scope_order};
use super::ledger::{EntryPage, PRUNED};
use super::lifecycle::set_namespace_header;
use crate::error::StoreError;
use crate::record::{self, Kind, Of, Record, RecordChange, RecordWrite, Records, Scan, Value};
use crate::tables::subject;

/// Records per reading transaction, besides the version.
const READ_BATCH: usize = 99;
/// The most items of a writing transaction, by the engine.
const ACTIONS_MAX: usize = 100;
/// The current schema. Since version 2 leases are marks in the item of their home only; a program of version
/// 1 would not return the units of their other levels.
pub(super) const SCHEMA: u64 = 2;
/// The attribute with the number of children of an entity.
const CHILDREN: &str = "children";
/// The prefix of the sort keys of tokens.
const TOKENS: &str = "#TOKEN#";
/// The prefix of the sort keys of an entity's policies.
const CONFIGS: &str = "#CONFIG#";
/// The prefix of the sort keys of children in the index.
const CHILD: &str = "CHILD#";

impl DynamoDb {
    /// The namespace's version and its count of audit entries.
    async fn header(&self) -> Result<Option<(u64, u64)>, StoreError> {
        let found = self.inner.client.get(&self.inner.keys.version()).await?;
        found.map(|item| Ok((number_of(&item, "version")?, number_of(&item, "audited")?))).transpose()
    }

    pub(super) async fn read_all(&self, keys: &[record::Key]) -> Result<Records, StoreError> {
        let at = self.now();
        if keys.is_empty() {
            let (version, entries) = self.header().await?.unwrap_or((0, 0));
            return Ok(Records { version: Version::new(version), entries, at, records: Vec::new() });
        }
        let places: Vec<Option<Key>> = keys.iter().map(|key| self.item_key(key)).collect();
        let header = self.inner.keys.version();
        let mut wanted: Vec<Key> = places.iter().flatten().cloned().collect();
        wanted.sort_unstable();
        wanted.dedup();
        'changed: loop {
            let (mut found, mut seen) = (HashMap::new(), None);
            for wanted in wanted.chunks(READ_BATCH) {
                let wanted_items: Vec<Key> = wanted.iter().cloned().chain([header.clone()]).collect();
                let mut items = self.inner.client.get_at_once(&wanted_items).await?;
                let header = items.remove(&header);
                let number = |name| header.as_ref().map_or(Ok(0), |item| number_of(item, name));
                let now_seen: (u64, u64) = (number("version")?, number("audited")?);
                // Several reads form one snapshot if the version is the same in all of them.
                if *seen.get_or_insert(now_seen) != now_seen {
                    continue 'changed;
                }
                found.extend(items);
            }
            let (version, entries) = seen.unwrap_or((0, 0));
            let mut records = Vec::with_capacity(keys.len());
            for (key, place) in keys.iter().zip(&places) {
                let item = place.as_ref().and_then(|place| found.get(place));
                records.push(match (key, item) {
                    (record::Key::Entry(number), _) => self.entry_at(*number).await?,
                    (key, Some(item)) => Some(read(key.clone(), item)?),
                    (_, None) => None,
                });
            }
            return Ok(Records { version: Version::new(version), entries, at, records });
        }
    }

    /// The key of a record's item. That of an audit entry also depends on what it is filed under.
    fn item_key(&self, key: &record::Key) -> Option<Key> {
        let keys = &self.inner.keys;
        match key {
            record::Key::Policy(scope) => Some(keys.policy(scope)),
            record::Key::Entity(id) => Some(keys.entity(id)),
            record::Key::Token(id) => Some(keys.token(id)),
            record::Key::Entry(_) => None,
        }
    }

    async fn entry_at(&self, number: u64) -> Result<Option<Record>, StoreError> {
        let key = record::Key::Entry(number);
        let after = number.checked_sub(1).map(record::Key::Entry);
        let found = self.scan(&Scan { kind: Kind::Entry, of: Of::All, after, max: 1 }).await?;
        Ok(found.into_iter().find(|record| record.key == key))
    }

    pub(super) async fn scan(&self, scan: &Scan) -> Result<Vec<Record>, StoreError> {
        match (scan.kind, &scan.of) {
            (Kind::Entry, _) => return self.scan_entries(scan).await,
            (Kind::Token, Of::Link(hash)) => return self.token_of(hash).await,
            _ => {}
        }
        let range = self.listing(scan);
        let mut after = name_in_listing(scan).map(|name| format!("{}{name}", range.prefix));
        let sort = range.index.map_or_else(|| SK.to_owned(), |index| format!("{index}SK"));
        let mut found = Vec::new();
        while found.len() < scan.max {
            let items = self.inner.client.range(&range.clone().after(after), scan.max).await?;
            let is_last = items.len() < scan.max;
            after = items.last().and_then(|item| item.get(&sort)?.as_s().ok().cloned());
            let mut keys = Vec::with_capacity(items.len());
            for item in &items {
                let place = text_of(item, &sort)?;
                keys.extend(key_in_listing(scan, place.strip_prefix(&range.prefix).unwrap_or(place))?);
            }
            let places: Vec<Key> = keys.iter().filter_map(|key| self.item_key(key)).collect();
            let stored = self.inner.client.get_all(&places).await?;
            for (key, place) in keys.into_iter().zip(&places) {
                let Some(item) = stored.get(place) else { continue };
                let record = read(key, item)?;
                // It may have moved to another parent.
                if scan.lists(&record) {
                    found.push(record);
                }
            }
            if is_last {
                break;
            }
        }
        found.truncate(scan.max);
        Ok(found)
    }

    /// The range that lists the records of a scan.
    fn listing(&self, scan: &Scan) -> Range {
        let keys = &self.inner.keys;
        let (index, pk, prefix) = match (scan.kind, &scan.of) {
            (Kind::Policy, Of::Link(resource)) => (Some(GSI3), keys.custom_of(resource), ""),
            (Kind::Policy, Of::Entity(entity)) => (None, keys.entity_pk(entity), CONFIGS),
            (Kind::Policy, Of::All) => (Some(GSI2), keys.all("CONFIGS"), ""),
            (Kind::Entity, Of::Link(parent)) => (Some(GSI1), keys.children_of(parent), CHILD),
            (Kind::Token, _) => (None, keys.tokens_pk(), TOKENS),
            _ => (Some(GSI2), keys.all("ENTITIES"), ""),
        };
        Range::new(index, pk, prefix.to_owned())
    }

    /// The token whose secret has this hash.
    async fn token_of(&self, hash: &str) -> Result<Vec<Record>, StoreError> {
        let Some(item) = self.inner.client.get(&self.inner.keys.secret(hash)).await? else {
            return Ok(Vec::new());
        };
        let id = TokenId::new(text_of(&item, "token")?).map_err(|error| corrupt(&error))?;
        let found = self.inner.client.get(&self.inner.keys.token(&id)).await?;
        found.map(|item| read(record::Key::Token(id), &item)).into_iter().collect()
    }

    async fn scan_entries(&self, scan: &Scan) -> Result<Vec<Record>, StoreError> {
        let filed = match &scan.of {
            Of::Link(filed) => Some(filed.as_str()),
            Of::All | Of::Entity(_) => None,
        };
        let mut after = match scan.after {
            Some(record::Key::Entry(number)) => Some(number),
            _ => None,
        };
        let mut found = Vec::new();
        while found.len() < scan.max {
            let EntryPage { items, next } = self.entries(filed, after, scan.max).await?;
            for item in &items {
                found.push(read(record::Key::Entry(number_of(item, "number")?), item)?);
            }
            after = next;
            if after.is_none() {
                break;
            }
        }
        found.truncate(scan.max);
        Ok(found)
    }

    /// An entity and the ancestors that it cascades to.
    pub(super) async fn ancestors(&self, id: &EntityId, max: usize) -> Result<Vec<Record>, StoreError> {
        let (mut chain, mut next) = (Vec::new(), Some(id.clone()));
        while let Some(id) = next.take().filter(|_| chain.len() < max) {
            let Some(item) = self.inner.client.get(&self.inner.keys.entity(&id)).await? else { break };
            let record = read(record::Key::Entity(id), &item)?;
            next = record.entity()?.next().cloned();
            chain.push(record);
        }
        Ok(chain)
    }

    /// Makes the changes in one transaction; `false` if the namespace's version has changed.
    pub(super) async fn write_changes(&self, write: &RecordWrite) -> Result<bool, StoreError> {
        let mut actions = Vec::new();
        for change in &write.changes {
            self.check_children(change).await?;
            self.append_actions(change, &mut actions)?;
        }
        let mut header = UpdateExpression::new(self.inner.keys.version());
        if write.seen == Version::ZERO && self.header().await?.is_none() {
            header.only_without(PK);
            set_namespace_header(&mut header, &self.inner.keys);
            header.set(PRUNED, 0_u64);
        } else {
            header.only_if("version", "=", write.seen.number());
        }
        header.set("version", write.version().number());
        header.set("audited", write.entries_after());
        actions.push(Action::Update(header));
        if actions.len() > ACTIONS_MAX {
            let what = format!(
                "a change of {} items, more than {ACTIONS_MAX} in one transaction: split it",
                actions.len()
            );
            return Err(StoreError::Invalid { what });
        }
        self.inner.client.commit(Some(&self.inner.epochs.next()), &actions).await
    }

    /// Refuses to delete an entity with children, even if the index does not show them yet.
    async fn check_children(&self, change: &RecordChange) -> Result<(), StoreError> {
        let (record::Key::Entity(entity), None) = (&change.key, &change.after) else { return Ok(()) };
        let Some(item) = self.inner.client.get(&self.inner.keys.entity(entity)).await? else { return Ok(()) };
        let children = if item.contains_key(CHILDREN) { number_of(&item, CHILDREN)? } else { 0 };
        if children > 0 {
            return Err(StoreError::HasChildren { entity: entity.clone(), children });
        }
        Ok(())
    }

    /// Appends the actions of a change.
    fn append_actions(&self, change: &RecordChange, actions: &mut Vec<Action>) -> Result<(), StoreError> {
        let keys = &self.inner.keys;
        if let record::Key::Entity(_) = &change.key {
            let parent = |record: &Option<Record>| -> Result<Option<EntityId>, StoreError> {
                Ok(record.as_ref().map(Record::entity).transpose()?.and_then(Entity::parent_id).cloned())
            };
            let (was, is) = (parent(&change.before)?, parent(&change.after)?);
            if was != is {
                for (parent, more) in [(was, -1_i64), (is, 1)] {
                    if let Some(parent) = parent {
                        let mut write = UpdateExpression::new(keys.entity(&parent));
                        write.add(CHILDREN, more);
                        actions.push(Action::Update(write));
                    }
                }
            }
        }
        let Some(record) = &change.after else {
            actions.extend(self.item_key(&change.key).map(|at| Action::Delete(UpdateExpression::new(at))));
            return Ok(());
        };
        let place = match (&record.key, &record.value) {
            (record::Key::Entry(number), Value::Entry(entry)) => Some(keys.audit(&entry.filed, *number)),
            (key, _) => self.item_key(key),
        };
        let Some(place) = place else { return Ok(()) };
        let mut write = UpdateExpression::new(place);
        write.set("version", record.version.number());
        if let Value::Entry(entry) = &record.value {
            write.set("at", entry.at.as_micros());
            write.set("actor", entry.actor.as_str());
            write.set("change", crate::codec::change_to_text(&entry.change));
        } else {
            write.set("body", record.body());
        }
        match &record.key {
            record::Key::Entry(number) => {
                write.set("number", *number);
                write.set_in_index(GSI2, keys.all("AUDITS"), padded(*number));
            }
            record::Key::Policy(scope) => {
                write.set_in_index(GSI2, keys.all("CONFIGS"), scope_order(scope));
                if let Scope::Subject(subject) = scope {
                    let pk = keys.custom_of(subject.resource.as_str());
                    write.set_in_index(GSI3, pk, subject.entity.as_str());
                }
            }
            record::Key::Entity(id) => {
                write.set_in_index(GSI2, keys.all("ENTITIES"), id.as_str());
                if let Some(parent) = record.link() {
                    write.set_in_index(GSI1, keys.children_of(&parent), format!("{CHILD}{id}"));
                } else {
                    write.remove("GSI1PK");
                    write.remove("GSI1SK");
                }
            }
            record::Key::Token(id) => {
                if let Some(hash) = record.link() {
                    let mut secret = UpdateExpression::new(keys.secret(&hash));
                    secret.set("token", id.as_str());
                    actions.push(Action::Update(secret));
                    write.set("hash", hash);
                }
            }
        }
        actions.push(Action::Update(write));
        Ok(())
    }
}

/// Decodes the record of an item.
pub(super) fn read(key: record::Key, item: &Item) -> Result<Record, StoreError> {
    let version = Version::new(number_of(item, "version")?);
    if let record::Key::Entry(_) = key {
        let (at, actor) = (number_of::<u64>(item, "at")?, text_of(item, "actor")?);
        let body = format!("{at}\n{actor}\n{}", text_of(item, "change")?);
        return Record::from_text(key, None, version, &body);
    }
    let hash = matches!(key, record::Key::Token(_)).then(|| text_of(item, "hash")).transpose()?;
    Record::from_text(key, hash, version, text_of(item, "body")?)
}

/// The name in the listing after which a scan begins.
fn name_in_listing(scan: &Scan) -> Option<String> {
    match (scan.after.as_ref()?, &scan.of) {
        (record::Key::Policy(scope), Of::All) => Some(scope_order(scope)),
        (record::Key::Policy(Scope::Subject(subject)), Of::Link(_)) => Some(subject.entity.to_string()),
        (record::Key::Policy(Scope::Subject(subject)), Of::Entity(_)) => Some(subject.resource.to_string()),
        (record::Key::Entity(id), _) => Some(id.to_string()),
        (record::Key::Token(id), _) => Some(id.to_string()),
        (record::Key::Policy(_) | record::Key::Entry(_), _) => None,
    }
}

/// The key of the record with this name in the listing; `None` if the scan does not include it.
fn key_in_listing(scan: &Scan, name: &str) -> Result<Option<record::Key>, StoreError> {
    Ok(Some(match (scan.kind, &scan.of) {
        (Kind::Policy, Of::All) => record::Key::Policy(scope_in(name)?),
        (Kind::Policy, Of::Link(resource)) => record::Key::Policy(Scope::Subject(subject(name, resource)?)),
        // The entity's policy for all resources.
        (Kind::Policy, Of::Entity(_)) if name == DEFAULT => return Ok(None),
        (Kind::Policy, Of::Entity(entity)) => {
            record::Key::Policy(Scope::Subject(subject(entity.as_str(), name)?))
        }
        (Kind::Token, _) => record::Key::Token(TokenId::new(name).map_err(|error| corrupt(&error))?),
        _ => record::Key::Entity(EntityId::stored(name).map_err(|error| corrupt(&error))?),
    }))
}

fn corrupt(error: &dyn std::error::Error) -> StoreError {
    StoreError::Corrupt { what: error.to_string() }
}

/// Decodes the scope of a policy from its sort key.
fn scope_in(order: &str) -> Result<Scope, StoreError> {
    let corrupt = || StoreError::Corrupt { what: format!("the place of a policy {order:?}") };
    let mut parts = order.split(PART);
    let (kind, entity, resource) = (parts.next(), parts.next(), parts.next());
    let kind = kind.and_then(|kind| kind.parse().ok()).ok_or_else(corrupt)?;
    crate::tables::scope(kind, entity.ok_or_else(corrupt)?, resource.ok_or_else(corrupt)?)
}
