//! Entities: each has an item, and knows how many are below it.

use std::collections::BTreeMap;

use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Version, Versioned};

use super::DynamoDb;
use super::expression::Write;
use super::keys::{GSI1, GSI2, Item, Key};
use super::link::{Action, Range};
use super::log::{Log, Plan, Planned};
use super::view::{number_of, text_of};
use crate::codec;
use crate::cursor::{entity_cursor, parse_entity};
use crate::entities::Entities;
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

/// As far up as is ever looked: more than there may be levels.
const CHAIN_MAX: usize = LEVELS_MAX + 8;
/// How many are directly below an entity.
const CHILDREN: &str = "children";

impl Entities for DynamoDb {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Put { entity, expect }).await })
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        Reply::later(self.within(async move { Ok(self.entity(id).await?.map(|found| found.entity)) }))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        Reply::later(self.within(self.chain(id, false)))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Remove { id, expect }).await })
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        let range = Range::new(Some(GSI1), self.inner.keys.children(parent), "CHILD#".to_owned());
        Reply::later(self.listed(range, paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        let range = Range::new(Some(GSI2), self.inner.keys.all("ENTITIES"), String::new());
        Reply::later(self.listed(range, paging))
    }
}

/// An entity as it was found.
struct Found {
    entity: Versioned<Entity>,
    children: u64,
}

impl DynamoDb {
    async fn entity(&self, id: &EntityId) -> Result<Option<Found>, StoreError> {
        self.inner.link.get(&self.inner.keys.entity(id)).await?.as_ref().map(read).transpose()
    }

    /// An entity and those above it: all of them, or as far as each cascades.
    pub(super) async fn chain(
        &self,
        id: &EntityId,
        is_whole: bool,
    ) -> Result<Vec<Versioned<Entity>>, StoreError> {
        let (mut chain, mut next) = (Vec::new(), Some(id.clone()));
        let max = if is_whole { CHAIN_MAX } else { LEVELS_MAX + 1 };
        while let Some(id) = next.take().filter(|_| chain.len() < max) {
            let Some(found) = self.entity(&id).await? else { break };
            let entity = found.entity;
            next = if is_whole { entity.value.parent_id().cloned() } else { entity.value.next().cloned() };
            chain.push(entity);
        }
        Ok(chain)
    }

    async fn listed(&self, range: Range, paging: &Paging) -> Result<Page<Versioned<Entity>>, StoreError> {
        let after = paging.cursor().map(parse_entity).transpose()?;
        let mut after = after.map(|entity| format!("{}{entity}", range.prefix));
        let mut found = Vec::new();
        while found.len() <= paging.max() {
            let items = self.inner.link.range(&range.clone().after(after), paging.max() + 1).await?;
            let is_last = items.len() <= paging.max();
            let sort = format!("{}SK", range.index.unwrap_or_default());
            after = items.last().and_then(|item| item.get(&sort)?.as_s().ok().cloned());
            let keys: Vec<Key> = items.iter().filter_map(Key::of).collect();
            let there = self.inner.link.get_all(&keys).await?;
            for item in keys.iter().filter_map(|key| there.get(key)) {
                found.push(read(item)?.entity);
            }
            if is_last {
                break;
            }
        }
        Ok(Page::cut(found, paging, |entity| entity_cursor(entity.value.id())))
    }
}

fn read(item: &Item) -> Result<Found, StoreError> {
    let value = codec::entity_from_text(text_of(item, "body")?)?;
    let entity = Versioned { version: Version::new(number_of(item, "version")?), value };
    let children = if item.contains_key(CHILDREN) { number_of(item, CHILDREN)? } else { 0 };
    Ok(Found { entity, children })
}

/// An entity that is to be written.
struct Put<'a> {
    entity: &'a Entity,
    expect: Expect,
}

impl Plan for Put<'_> {
    type Answer = Version;

    async fn plan(&self, store: &DynamoDb, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let (entity, id, keys) = (self.entity, self.entity.id(), &store.inner.keys);
        entity.check()?;
        let before = store.entity(id).await?.map(|found| found.entity);
        let current = before.as_ref().map(|before| before.version);
        if !self.expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the entity `{id}`"), current });
        }
        let mut above: BTreeMap<EntityId, Option<EntityId>> = BTreeMap::new();
        if let Some(parent) = entity.parent_id() {
            for found in store.chain(parent, true).await? {
                above.insert(found.value.id().clone(), found.value.parent_id().cloned());
            }
        }
        entity.check_parent(|id| above.get(id).cloned())?;
        let was = before.as_ref().and_then(|before| before.value.parent_id());
        if was != entity.parent_id() {
            for (parent, more) in [(was, -1_i64), (entity.parent_id(), 1)] {
                if let Some(parent) = parent {
                    let mut write = Write::new(keys.entity(parent));
                    write.add(CHILDREN, more);
                    log.push(Action::Update(write));
                }
            }
        }
        let mut write = Write::new(keys.entity(id));
        write.set("version", log.version.number());
        write.set("body", codec::entity_to_text(entity));
        write.set("GSI2PK", keys.all("ENTITIES"));
        write.set("GSI2SK", id.as_str());
        if let Some(parent) = entity.parent_id() {
            write.set("GSI1PK", keys.children(parent));
            write.set("GSI1SK", format!("CHILD#{id}"));
        } else {
            write.remove("GSI1PK");
            write.remove("GSI1SK");
        }
        log.push(Action::Update(write));
        let change =
            Change::Entity { before: before.map(|before| before.value), after: Some(entity.clone()) };
        log.note(store, &Filed::entity(id), &change);
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}

/// An entity that is to be removed.
struct Remove<'a> {
    id: &'a EntityId,
    expect: Expect,
}

impl Plan for Remove<'_> {
    type Answer = Version;

    async fn plan(&self, store: &DynamoDb, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let (id, keys) = (self.id, &store.inner.keys);
        let found = store.entity(id).await?;
        let current = found.as_ref().map(|found| found.entity.version);
        if !self.expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the entity `{id}`"), current });
        }
        let Some(Found { entity: before, children }) = found else {
            return Err(StoreError::NoEntity { entity: id.clone() });
        };
        if children > 0 {
            return Err(StoreError::HasChildren { entity: id.clone(), children });
        }
        let scopes = store.scopes_of(id).await?;
        for (scope, there) in scopes.iter().zip(store.policies_at(&scopes).await?) {
            let there = there.map(|there| Policy::clone(&there.value));
            log.write_policy(store, scope, there, None);
        }
        if let Some(parent) = before.value.parent_id() {
            let mut write = Write::new(keys.entity(parent));
            write.add(CHILDREN, -1_i64);
            log.push(Action::Update(write));
        }
        log.push(Action::Delete(Write::new(keys.entity(id))));
        log.note(store, &Filed::entity(id), &Change::Entity { before: Some(before.value), after: None });
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}
