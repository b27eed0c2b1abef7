//! Policies, entities, tokens and the audit of every engine, written once over its records.
//!
//! A change reads the namespace's version with the records it depends on, decides, and writes if the version
//! is still the same (optimistic locking). If another writer was faster, it starts over.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use tidegate_core::limit::audit::{AuditKey, Change, Entry};
use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use crate::cursor::{
    UsagePlace, entity_cursor, number_cursor, parse_entity, parse_number, parse_scope, parse_token,
    scope_cursor, token_cursor,
};
use crate::engine::Engine;
use crate::entities::Entities;
use crate::error::StoreError;
use crate::ledger::{AuditQuery, Ledger, Prune, UsageQuery};
use crate::page::{Page, Paging};
use crate::policies::{
    CHANGED_MAX, ChangesSince, Listing, Policies, PolicyChange, PolicySnapshot, check_actor, check_changes,
    check_pools,
};
use crate::record::{
    Key, Kind, Of, Record, RecordChange, RecordWrite, Records, Scan, Value, filed_link, hash_link,
    parent_link, resource_link,
};
use crate::reply::Reply;
use crate::tokens::{Tokens, is_anothers, is_taken, is_to_be_revoked};

/// The maximum number of attempts of a change after conflicts with other writers.
const TRIES: usize = 64;
/// The number of ancestors read to check a parent: more than the allowed levels.
pub(crate) const ANCESTORS_MAX: usize = LEVELS_MAX + 8;
/// Records per read when all of them are needed.
const CHUNK: usize = 1_000;

type WrittenPolicy = Versioned<Arc<Policy>>;

impl<E: Engine> Policies for E {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, PolicySnapshot> {
        reply(self, async move {
            let keys: Vec<Key> = scopes.iter().cloned().map(Key::Policy).collect();
            let Records { version, records, .. } = self.read_records(&keys).await?;
            let policies = records.into_iter().map(|record| record.map(Record::policy).transpose());
            Ok(PolicySnapshot { version, policies: policies.collect::<Result<_, _>>()? })
        })
    }

    fn version(&self) -> Reply<'_, Version> {
        self.newest_version()
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<ChangesSince>> {
        reply(self, async move {
            let Records { version, entries, .. } = self.read_records(&[]).await?;
            let first = entries.saturating_sub(CHANGED_MAX as u64);
            let after = first.checked_sub(1).map(Key::Entry);
            let scan = Scan { kind: Kind::Entry, of: Of::All, after, max: CHANGED_MAX };
            let mut last = Vec::new();
            for record in self.scan_records(&scan).await? {
                // Skip entries written after the version was read.
                if record.version <= version {
                    let entry = record.entry()?;
                    last.push((entry.version, entry.change));
                }
            }
            // A lagging index may lack the newest entries.
            let is_whole = since == version || last.last().is_some_and(|(newest, _)| *newest == version);
            Ok(if is_whole { ChangesSince::since(since, version, last) } else { None })
        })
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, WrittenPolicy)>> {
        reply(self, async move {
            let after = paging.cursor().map(parse_scope).transpose()?;
            let max = paging.max() + 1;
            let mut found = Vec::new();
            let of = match listing {
                Listing::All => Of::All,
                Listing::Custom(resource) => resource_link(resource),
                Listing::Entity(entity) => {
                    // Its policy for all resources comes first.
                    let own = Scope::Entity(entity.clone());
                    if after.as_ref().is_none_or(|after| *after < own) {
                        found.extend(record_at(self, Key::Policy(own)).await?);
                    }
                    Of::Entity(entity.clone())
                }
            };
            let scan = Scan { kind: Kind::Policy, of, after: after.map(Key::Policy), max };
            found.extend(self.scan_records(&scan).await?);
            let policies: Result<Vec<_>, StoreError> = found.into_iter().map(scoped_policy).collect();
            Ok(Page::cut(policies?, paging, |(scope, _)| scope_cursor(scope)))
        })
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        reply(self, async move {
            check_pools(changes, |across| self.pool_refusal(across))?;
            let keys: Vec<Key> = changes.iter().map(|change| Key::Policy(change.scope.clone())).collect();
            let mut tries = 0;
            loop {
                let (mut draft, read) = Draft::begin(self, actor, &keys, &mut tries).await?;
                let before: BTreeMap<&Key, Option<Record>> = keys.iter().zip(read).collect();
                let there = |scope: &Scope| before.get(&Key::Policy(scope.clone())).cloned().flatten();
                let made = check_changes(changes, |scope| Ok(there(scope).map(|record| record.version)))?;
                for change in made {
                    draft.policy(&change.scope, there(&change.scope), change.policy.clone())?;
                }
                if let Some(version) = draft.commit(self).await? {
                    return Ok(version);
                }
            }
        })
    }
}

impl<E: Engine> Entities for E {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        reply(self, async move {
            entity.check()?;
            let (id, key) = (entity.id(), Key::Entity(entity.id().clone()));
            let mut tries = 0;
            loop {
                let (mut draft, before) = Draft::begin_one(self, actor, &key, &mut tries).await?;
                check_expected(id, before.as_ref(), expect)?;
                let (mut above, mut next) = (BTreeMap::new(), entity.parent_id().cloned());
                while let Some(id) = next.take().filter(|_| above.len() < ANCESTORS_MAX) {
                    let found = record_at(self, Key::Entity(id)).await?;
                    let Some(record) = found else { break };
                    let ancestor = record.entity()?;
                    next = ancestor.parent_id().cloned();
                    above.insert(ancestor.id().clone(), next.clone());
                }
                entity.check_parent(|id| above.get(id).cloned())?;
                let was = before.as_ref().map(|before| before.entity().cloned()).transpose()?;
                draft.write(key.clone(), before, Some(Value::Entity(entity.clone())));
                draft.note(AuditKey::entity(id), Change::Entity { before: was, after: Some(entity.clone()) });
                if let Some(version) = draft.commit(self).await? {
                    return Ok(version);
                }
            }
        })
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        reply(self, async move {
            record_at(self, Key::Entity(id.clone())).await?.map(Record::versioned_entity).transpose()
        })
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        reply(self, async move {
            let mut lineage: Vec<Versioned<Entity>> = Vec::new();
            for record in self.chain(id, LEVELS_MAX + 1).await? {
                let entity = record.versioned_entity()?;
                // Records read at different moments may form a cycle.
                if lineage.iter().any(|below| below.value.id() == entity.value.id()) {
                    break;
                }
                let is_last = entity.value.next().is_none();
                lineage.push(entity);
                if is_last {
                    break;
                }
            }
            Ok(lineage)
        })
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        reply(self, async move {
            let own = Key::Policy(Scope::Entity(id.clone()));
            let keys = [Key::Entity(id.clone()), own];
            let mut tries = 0;
            loop {
                let (mut draft, read) = Draft::begin(self, actor, &keys, &mut tries).await?;
                let mut read = read.into_iter();
                let (before, own) = (read.next().flatten(), read.next().flatten());
                check_expected(id, before.as_ref(), expect)?;
                let Some(before) = before else { return Err(StoreError::NoEntity { entity: id.clone() }) };
                let children = all(self, Kind::Entity, &parent_link(id)).await?.len() as u64;
                if children > 0 {
                    return Err(StoreError::HasChildren { entity: id.clone(), children });
                }
                let subjects = all(self, Kind::Policy, &Of::Entity(id.clone())).await?;
                for record in own.into_iter().chain(subjects) {
                    let Key::Policy(scope) = record.key.clone() else { continue };
                    draft.policy(&scope, Some(record), None)?;
                }
                let was = before.entity()?.clone();
                draft.write(keys[0].clone(), Some(before), None);
                draft.note(AuditKey::entity(id), Change::Entity { before: Some(was), after: None });
                if let Some(version) = draft.commit(self).await? {
                    return Ok(version);
                }
            }
        })
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        reply(self, entity_page(self, parent_link(parent), paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        reply(self, entity_page(self, Of::All, paging))
    }
}

impl<E: Engine> Tokens for E {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        reply(self, async move {
            let key = Key::Token(token.id.clone());
            let mut tries = 0;
            loop {
                let (mut draft, before) = Draft::begin_one(self, actor, &key, &mut tries).await?;
                token.check(draft.at)?;
                if let Some(there) = before {
                    return Err(is_taken(&token.id, there.version));
                }
                if token_of(self, hash).await?.is_some() {
                    return Err(is_anothers(&token.id));
                }
                let made = Token::made(token, draft.at, actor);
                draft.write(key.clone(), None, Some(Value::Token(*hash, made.clone())));
                draft.note(AuditKey::token(&made.id), Change::Token { before: None, after: made.clone() });
                if let Some(version) = draft.commit(self).await? {
                    return Ok(Versioned { version, value: made });
                }
            }
        })
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        reply(
            self,
            async move { record_at(self, Key::Token(id.clone())).await?.map(Record::token).transpose() },
        )
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        reply(self, token_of(self, hash))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        reply(self, async move {
            let after = paging.cursor().map(parse_token).transpose()?.map(Key::Token);
            let scan = Scan { kind: Kind::Token, of: Of::All, after, max: paging.max() + 1 };
            let found = self.scan_records(&scan).await?;
            let tokens: Result<Vec<_>, StoreError> =
                found.into_iter().map(|record| Ok(record.token()?.1)).collect();
            Ok(Page::cut(tokens?, paging, |token| token_cursor(&token.value.id)))
        })
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        reply(self, async move {
            let key = Key::Token(id.clone());
            let mut tries = 0;
            loop {
                let (mut draft, before) = Draft::begin_one(self, actor, &key, &mut tries).await?;
                let Some(before) = before else { return Err(StoreError::NoToken { token: id.clone() }) };
                let (hash, there) = before.clone().token()?;
                if !is_to_be_revoked(&there, expect)? {
                    return Ok(there.version);
                }
                let after = Token { revoked_at: Some(draft.at), ..there.value.clone() };
                draft.write(key.clone(), Some(before), Some(Value::Token(hash, after.clone())));
                draft.note(AuditKey::token(id), Change::Token { before: Some(there.value), after });
                if let Some(version) = draft.commit(self).await? {
                    return Ok(version);
                }
            }
        })
    }
}

impl<E: Engine> Ledger for E {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        reply(self, async move {
            let after = paging.cursor().map(UsagePlace::parse).transpose()?;
            let found = self.scan_usage(query, after, paging.max() + 1).await?;
            Ok(Page::cut(found, paging, |line| UsagePlace::of(&query.of, line)))
        })
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        reply(self, async move {
            let after = paging.cursor().map(parse_number).transpose()?.map(Key::Entry);
            let of = query.filed.as_ref().map_or(Of::All, filed_link);
            // Entries outside the range are read and left out.
            let is_all = query.range == (Stamp::ZERO..Stamp::MAX);
            let max = if is_all { paging.max() + 1 } else { CHUNK.max(paging.max() + 1) };
            let mut scan = Scan { kind: Kind::Entry, of, after, max };
            let mut found: Vec<(u64, Entry)> = Vec::new();
            while found.len() <= paging.max() {
                let records = self.scan_records(&scan).await?;
                let is_last = records.len() < scan.max;
                scan.after = records.last().map(|record| record.key.clone());
                for record in records {
                    let Key::Entry(number) = record.key else { continue };
                    let entry = record.entry()?;
                    if query.range.contains(&entry.at) {
                        found.push((number, entry));
                    }
                }
                if is_last {
                    break;
                }
            }
            let Page { items, next } = Page::cut(found, paging, |(number, _)| number_cursor(*number));
            Ok(Page { items: items.into_iter().map(|(_, entry)| entry).collect(), next })
        })
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.prune_ledger(prune, max)
    }
}

/// Changes to commit together.
struct Draft {
    actor: String,
    /// The time of the changes: the engine's time when it was read.
    at: Stamp,
    write: RecordWrite,
}

impl Draft {
    /// Reads the records that a change depends on, and the version it is based on. Fails after [`TRIES`]
    /// attempts.
    async fn begin<E: Engine>(
        engine: &E,
        actor: &str,
        keys: &[Key],
        tries: &mut usize,
    ) -> Result<(Self, Vec<Option<Record>>), StoreError> {
        check_actor(actor)?;
        *tries += 1;
        if *tries > TRIES {
            return Err(StoreError::unavailable(format!(
                "gave up after {TRIES} conflicts with other writers"
            )));
        }
        let Records { version, entries, at, records } = engine.read_records(keys).await?;
        let write = RecordWrite { seen: version, entries, changes: Vec::new() };
        Ok((Self { actor: actor.to_owned(), at, write }, records))
    }

    /// Like [`begin`](Self::begin), for one record.
    async fn begin_one<E: Engine>(
        engine: &E,
        actor: &str,
        key: &Key,
        tries: &mut usize,
    ) -> Result<(Self, Option<Record>), StoreError> {
        let (draft, mut read) = Self::begin(engine, actor, std::slice::from_ref(key), tries).await?;
        Ok((draft, read.pop().flatten()))
    }

    /// Commits the changes, if any, and returns the version of the namespace. `None` if another writer was
    /// faster.
    async fn commit<E: Engine>(self, engine: &E) -> Result<Option<Version>, StoreError> {
        if self.write.changes.is_empty() {
            return Ok(Some(self.write.seen));
        }
        Ok(engine.write_records(&self.write).await?.then(|| self.write.version()))
    }

    fn write(&mut self, key: Key, before: Option<Record>, after: Option<Value>) {
        let version = self.write.version();
        let after = after.map(|value| Record { key: key.clone(), version, value });
        self.write.changes.push(RecordChange { key, before, after });
    }

    fn policy(
        &mut self,
        scope: &Scope,
        before: Option<Record>,
        after: Option<Policy>,
    ) -> Result<(), StoreError> {
        let was = before.clone().map(Record::policy).transpose()?.map(|was| Policy::clone(&was.value));
        let value = after.clone().map(|policy| Value::Policy(Arc::new(policy)));
        self.write(Key::Policy(scope.clone()), before, value);
        self.note(AuditKey::scope(scope), Change::Policy { scope: scope.clone(), before: was, after });
        Ok(())
    }

    fn note(&mut self, filed: AuditKey, change: Change) {
        let (version, number) = (self.write.version(), self.write.entries_after());
        let entry = Entry { version, at: self.at, actor: self.actor.clone(), filed, change };
        self.write(Key::Entry(number), None, Some(Value::Entry(entry)));
    }
}

/// Writes an audit entry of a change that is no record, and returns its version.
pub(crate) async fn note_change<E: Engine>(
    engine: &E,
    filed: AuditKey,
    change: Change,
    actor: &str,
) -> Result<Version, StoreError> {
    let mut tries = 0;
    loop {
        let (mut draft, _) = Draft::begin(engine, actor, &[], &mut tries).await?;
        draft.note(filed.clone(), change.clone());
        if let Some(version) = draft.commit(engine).await? {
            return Ok(version);
        }
    }
}

/// The reply of a future over the engine.
fn reply<'a, E: Engine, T>(
    engine: &E,
    answer: impl Future<Output = Result<T, StoreError>> + Send + 'a,
) -> Reply<'a, T> {
    Reply::after(engine.about().is_immediate, answer)
}

async fn record_at<E: Engine>(engine: &E, key: Key) -> Result<Option<Record>, StoreError> {
    Ok(engine.read_records(&[key]).await?.records.pop().flatten())
}

/// All records of a kind.
async fn all<E: Engine>(engine: &E, kind: Kind, of: &Of) -> Result<Vec<Record>, StoreError> {
    let mut scan = Scan { kind, of: of.clone(), after: None, max: CHUNK };
    let mut found = Vec::new();
    loop {
        let records = engine.scan_records(&scan).await?;
        let is_last = records.len() < CHUNK;
        scan.after = records.last().map(|record| record.key.clone());
        found.extend(records);
        if is_last {
            return Ok(found);
        }
    }
}

async fn entity_page<E: Engine>(
    engine: &E,
    of: Of,
    paging: &Paging,
) -> Result<Page<Versioned<Entity>>, StoreError> {
    let after = paging.cursor().map(parse_entity).transpose()?.map(Key::Entity);
    let scan = Scan { kind: Kind::Entity, of, after, max: paging.max() + 1 };
    let found = engine.scan_records(&scan).await?;
    let entities: Result<Vec<_>, StoreError> = found.into_iter().map(Record::versioned_entity).collect();
    Ok(Page::cut(entities?, paging, |entity| entity_cursor(entity.value.id())))
}

async fn token_of<E: Engine>(engine: &E, hash: &TokenHash) -> Result<Option<Versioned<Token>>, StoreError> {
    let scan = Scan { kind: Kind::Token, of: hash_link(hash), after: None, max: 1 };
    let found = engine.scan_records(&scan).await?.pop();
    Ok(found.map(Record::token).transpose()?.map(|(_, token)| token))
}

fn scoped_policy(record: Record) -> Result<(Scope, WrittenPolicy), StoreError> {
    match &record.key {
        Key::Policy(scope) => Ok((scope.clone(), record.policy()?)),
        other => Err(StoreError::Corrupt { what: format!("{other} among the policies") }),
    }
}

fn check_expected(id: &EntityId, there: Option<&Record>, expect: Expect) -> Result<(), StoreError> {
    let current = there.map(|there| there.version);
    if expect.holds(current) {
        return Ok(());
    }
    Err(StoreError::Stale { what: format!("the entity `{id}`"), current })
}
