//! Policies, entities and the audit: what administrators change, with its entry in the same transaction.

use std::collections::BTreeMap;

use rusqlite::{Connection, OptionalExtension};
use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version};
use tidegate_core::time::Stamp;

use super::listing;
use super::trouble::Trouble;
use super::work::Work;
use crate::codec;
use crate::error::StoreError;
use crate::policies::{PolicyChange, check_actor, check_changes};
use crate::tables::{Key, column, number, scope};

/// Policies to be written or removed, and by whom.
pub(super) struct Apply {
    pub(super) namespace: i64,
    pub(super) changes: Vec<PolicyChange>,
    pub(super) actor: String,
}

/// An entity to be written, and by whom.
pub(super) struct Put {
    pub(super) namespace: i64,
    pub(super) entity: Entity,
    pub(super) expect: Expect,
    pub(super) actor: String,
}

/// An entity to be removed, and by whom.
pub(super) struct Remove {
    pub(super) namespace: i64,
    pub(super) id: EntityId,
    pub(super) expect: Expect,
    pub(super) actor: String,
}

pub(super) fn apply(work: &mut Work<'_>, asked: &Apply) -> Result<Version, Trouble> {
    check_actor(&asked.actor)?;
    let (connection, namespace) = (work.connection, asked.namespace);
    let mut before = BTreeMap::new();
    for change in &asked.changes {
        let there = listing::policy(connection, namespace, &change.scope)?;
        before.insert(&change.scope, there);
    }
    let made = check_changes(&asked.changes, |scope| {
        Ok(before.get(scope).and_then(|there| there.as_ref().map(|there| there.version)))
    })?;
    if made.is_empty() {
        return listing::version(connection, namespace);
    }
    let mut log = Log::begin(work, namespace, &asked.actor)?;
    for change in made {
        let before = before.remove(&change.scope).flatten();
        let before = before.map(|before| Policy::clone(&before.value));
        log.write_policy(&change.scope, before, change.policy.clone())?;
    }
    log.end()
}

pub(super) fn put(work: &mut Work<'_>, asked: &Put) -> Result<Version, Trouble> {
    let Put { namespace, entity, expect, actor } = asked;
    check_actor(actor)?;
    entity.check().map_err(StoreError::from)?;
    let (connection, id) = (work.connection, entity.id());
    let before = listing::entity(connection, *namespace, id)?;
    let current = before.as_ref().map(|before| before.version);
    if !expect.holds(current) {
        return Err(StoreError::Stale { what: format!("the entity `{id}`"), current }.into());
    }
    // Found beforehand: whoever looks for the parent of an entity cannot say that the file is damaged.
    let mut above = BTreeMap::new();
    let mut next = entity.parent_id().cloned();
    while let Some(parent) = next.filter(|parent| !above.contains_key(parent)) {
        let Some(found) = listing::entity(connection, *namespace, &parent)? else { break };
        next = found.value.parent_id().cloned();
        above.insert(parent, next.clone());
    }
    entity.check_parent(|id| above.get(id).cloned()).map_err(StoreError::from)?;
    let mut log = Log::begin(work, *namespace, actor)?;
    let mut write = connection.prepare_cached(
        "INSERT INTO entities (namespace, id, version, parent, body) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (namespace, id) DO UPDATE SET version = ?3, parent = ?4, body = ?5",
    )?;
    let parent = entity.parent_id().map(EntityId::as_str);
    let version = column(log.version.number());
    write.execute((namespace, id.as_str(), version, parent, codec::entity_to_text(entity)))?;
    let change = Change::Entity { before: before.map(|before| before.value), after: Some(entity.clone()) };
    log.note(&Filed::entity(id), &change)?;
    log.end()
}

pub(super) fn remove(work: &mut Work<'_>, asked: &Remove) -> Result<Version, Trouble> {
    let Remove { namespace, id, expect, actor } = asked;
    check_actor(actor)?;
    let connection = work.connection;
    let before = listing::entity(connection, *namespace, id)?;
    let current = before.as_ref().map(|before| before.version);
    if !expect.holds(current) {
        return Err(StoreError::Stale { what: format!("the entity `{id}`"), current }.into());
    }
    let Some(before) = before else { return Err(StoreError::NoEntity { entity: id.clone() }.into()) };
    let mut children =
        connection.prepare_cached("SELECT COUNT(*) FROM entities WHERE namespace = ?1 AND parent = ?2")?;
    let children: i64 = children.query_row((namespace, id.as_str()), |row| row.get(0))?;
    if children > 0 {
        let children = number(children, "a count")?;
        return Err(StoreError::HasChildren { entity: id.clone(), children }.into());
    }
    // All of them are read before any is removed: one that cannot be read leaves all as they are.
    let mut own = Vec::new();
    for scope in own_scopes(connection, *namespace, id)? {
        let there = listing::policy(connection, *namespace, &scope)?;
        own.push((scope, there.map(|there| Policy::clone(&there.value))));
    }
    let mut log = Log::begin(work, *namespace, actor)?;
    for (scope, there) in own {
        log.write_policy(&scope, there, None)?;
    }
    let mut delete = connection.prepare_cached("DELETE FROM entities WHERE namespace = ?1 AND id = ?2")?;
    delete.execute((namespace, id.as_str()))?;
    log.note(&Filed::entity(id), &Change::Entity { before: Some(before.value), after: None })?;
    log.end()
}

/// The scopes of an entity that have a policy, its own first.
fn own_scopes(connection: &Connection, namespace: i64, id: &EntityId) -> Result<Vec<Scope>, Trouble> {
    let mut found = connection.prepare_cached(
        "SELECT kind, resource FROM policies WHERE namespace = ?1 AND kind IN (2, 3) AND entity = ?2
         ORDER BY kind, resource",
    )?;
    let mut rows = found.query((namespace, id.as_str()))?;
    let mut scopes = Vec::new();
    while let Some(row) = rows.next()? {
        let (kind, resource): (i64, String) = (row.get(0)?, row.get(1)?);
        scopes.push(scope(kind, id.as_str(), &resource)?);
    }
    Ok(scopes)
}

/// The changes of one version, and their entries.
pub(super) struct Log<'a> {
    connection: &'a Connection,
    namespace: i64,
    actor: &'a str,
    now: Stamp,
    version: Version,
    /// The number of the next entry.
    next: i64,
}

impl<'a> Log<'a> {
    pub(super) fn begin(work: &Work<'a>, namespace: i64, actor: &'a str) -> Result<Self, Trouble> {
        let connection = work.connection;
        let mut read = connection.prepare_cached("SELECT version, audited FROM namespaces WHERE id = ?1")?;
        let (version, next): (i64, i64) =
            read.query_row([namespace], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let version = Version::new(number(version, "the version of a namespace")?).next();
        Ok(Self { connection, namespace, actor, now: work.now, version, next })
    }

    fn write_policy(
        &mut self,
        scope: &Scope,
        before: Option<Policy>,
        after: Option<Policy>,
    ) -> Result<(), Trouble> {
        let Key { kind, entity, resource } = Key::of(scope);
        if let Some(policy) = &after {
            let mut write = self.connection.prepare_cached(
                "INSERT INTO policies (namespace, kind, entity, resource, version, body)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT (namespace, kind, entity, resource) DO UPDATE SET version = ?5, body = ?6",
            )?;
            let (version, body) = (column(self.version.number()), codec::policy_to_text(policy));
            write.execute((self.namespace, kind, entity, resource, version, body))?;
        } else {
            let mut delete = self.connection.prepare_cached(
                "DELETE FROM policies WHERE namespace = ?1 AND kind = ?2 AND entity = ?3 AND resource = ?4",
            )?;
            delete.execute((self.namespace, kind, entity, resource))?;
        }
        self.note(&Filed::scope(scope), &Change::Policy { scope: scope.clone(), before, after })
    }

    pub(super) fn note(&mut self, filed: &Filed, change: &Change) -> Result<(), Trouble> {
        let mut write = self.connection.prepare_cached(
            "INSERT INTO audit (namespace, number, version, at, actor, filed, change)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?;
        let (version, at) = (column(self.version.number()), column(self.now.as_micros()));
        let change = codec::change_to_text(change);
        write.execute((self.namespace, self.next, version, at, self.actor, filed.as_str(), change))?;
        self.next += 1;
        Ok(())
    }

    /// The version that the changes are made at.
    pub(super) const fn version(&self) -> Version {
        self.version
    }

    pub(super) fn end(self) -> Result<Version, Trouble> {
        let mut write = self
            .connection
            .prepare_cached("UPDATE namespaces SET version = ?2, audited = ?3 WHERE id = ?1")?;
        write.execute((self.namespace, column(self.version.number()), self.next))?;
        Ok(self.version)
    }
}

/// A namespace's number; it is made if it is not there.
pub(super) fn namespace(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    let mut find = connection.prepare_cached("SELECT id FROM namespaces WHERE name = ?1")?;
    if let Some(id) = find.query_row([name], |row| row.get(0)).optional()? {
        return Ok(id);
    }
    // Another process may make it at the same time.
    let make = "INSERT INTO namespaces (name) VALUES (?1) ON CONFLICT DO NOTHING";
    connection.prepare_cached(make)?.execute([name])?;
    find.query_row([name], |row| row.get(0))
}
