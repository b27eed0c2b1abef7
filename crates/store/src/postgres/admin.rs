//! Policies, entities and the audit: what administrators change, with its entry in the same transaction.
//!
//! Whoever changes something holds the row of its namespace, so that changes are made one after the other; others are told of
//! them when they are written.

use std::collections::BTreeMap;

use deadpool_postgres::Transaction;
use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::time::Stamp;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::listing::written_entity;
use super::trouble::{first, get, of_server};
use super::{Inner, Postgres};
use crate::codec;
use crate::error::StoreError;
use crate::policies::{PolicyChange, check_actor, check_changes};
use crate::tables::{Key, WrittenPolicy, column, number, scope, stamp, written_policy};

/// A transaction that holds its namespace.
pub(super) struct Work<'a> {
    inner: &'a Inner,
    transaction: Transaction<'a>,
    namespace: i64,
    pub(super) now: Stamp,
    /// The version that is there, and the number of the next entry.
    version: i64,
    audited: i64,
    /// By whom.
    actor: &'a str,
    /// Whether anything was changed.
    is_changed: bool,
}

impl Work<'_> {
    pub(super) async fn query(
        &self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, StoreError> {
        let of_place = |error| of_server(&self.inner.place, error);
        let statement =
            self.transaction.prepare_cached(&self.inner.sql.text(statement)).await.map_err(of_place)?;
        self.transaction.query(&statement, parameters).await.map_err(of_place)
    }

    pub(super) const fn namespace(&self) -> i64 {
        self.namespace
    }

    /// The version that changes are made at.
    pub(super) fn version(&self) -> Version {
        Version::new(self.version.unsigned_abs()).next()
    }

    /// Writes an entry of the audit.
    pub(super) async fn note(&mut self, filed: &Filed, change: &Change) -> Result<(), StoreError> {
        let statement = "INSERT INTO @.audit (namespace, number, version, at, actor, filed, change)
                         VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let (version, at) = (column(self.version().number()), column(self.now.as_micros()));
        let change = codec::change_to_text(change);
        let (number, actor) = (self.audited, self.actor);
        let parameters: [&(dyn ToSql + Sync); 7] =
            [&self.namespace, &number, &version, &at, &actor, &filed.as_str(), &change];
        self.query(statement, &parameters).await?;
        self.audited += 1;
        self.is_changed = true;
        Ok(())
    }

    /// Writes it all, tells others, and answers the version that is there now.
    async fn end(self) -> Result<Version, StoreError> {
        if !self.is_changed {
            return Ok(Version::new(self.version.unsigned_abs()));
        }
        let (version, audited) = (self.version(), self.audited);
        let statement =
            "WITH written AS (UPDATE @.namespaces SET version = $2, audited = $3 WHERE id = $1 RETURNING id)
                         SELECT pg_notify($4, $5) FROM written";
        let payload = format!("{} {}", self.namespace, version.number());
        let parameters: [&(dyn ToSql + Sync); 5] =
            [&self.namespace, &column(version.number()), &audited, &self.inner.sql.channel(), &payload];
        self.query(statement, &parameters).await?;
        self.transaction.commit().await.map_err(|error| of_server(&self.inner.place, error))?;
        Ok(version)
    }

    async fn policy(&self, scope: &Scope) -> Result<Option<WrittenPolicy>, StoreError> {
        let Key { kind, entity, resource } = Key::of(scope);
        let statement = "SELECT version, body FROM @.policies
                         WHERE namespace = $1 AND kind = $2 AND entity = $3 AND resource = $4";
        let rows = self.query(statement, &[&self.namespace, &kind, &entity, &resource]).await?;
        rows.first().map(|row| written_policy(get(row, 0)?, get(row, 1)?)).transpose()
    }

    async fn write_policy(
        &mut self,
        scope: &Scope,
        before: Option<Policy>,
        after: Option<Policy>,
    ) -> Result<(), StoreError> {
        let Key { kind, entity, resource } = Key::of(scope);
        if let Some(policy) = &after {
            let statement = "INSERT INTO @.policies (namespace, kind, entity, resource, version, body)
                             VALUES ($1, $2, $3, $4, $5, $6)
                             ON CONFLICT (namespace, kind, entity, resource) DO UPDATE SET version = $5, body = $6";
            let (version, body) = (column(self.version().number()), codec::policy_to_text(policy));
            self.query(statement, &[&self.namespace, &kind, &entity, &resource, &version, &body]).await?;
        } else {
            let statement = "DELETE FROM @.policies
                             WHERE namespace = $1 AND kind = $2 AND entity = $3 AND resource = $4";
            self.query(statement, &[&self.namespace, &kind, &entity, &resource]).await?;
        }
        self.note(&Filed::scope(scope), &Change::Policy { scope: scope.clone(), before, after }).await
    }

    /// An entity, if it is as expected.
    async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, StoreError> {
        let statement = "SELECT version, body FROM @.entities WHERE namespace = $1 AND id = $2";
        let rows = self.query(statement, &[&self.namespace, &id.as_str()]).await?;
        rows.first().map(written_entity).transpose()
    }

    async fn expected(&self, id: &EntityId, expect: Expect) -> Result<Option<Versioned<Entity>>, StoreError> {
        let before = self.entity(id).await?;
        let current = before.as_ref().map(|before| before.version);
        if expect.holds(current) {
            return Ok(before);
        }
        Err(StoreError::Stale { what: format!("the entity `{id}`"), current })
    }
}

impl Postgres {
    /// Makes a change, all of it or nothing, and answers what `change` does and the version that is there then.
    pub(super) async fn change<T>(
        &self,
        actor: &str,
        change: impl AsyncFnOnce(&mut Work<'_>) -> Result<T, StoreError>,
    ) -> Result<(T, Version), StoreError> {
        check_actor(actor)?;
        let inner = &*self.inner;
        let of_place = |error| of_server(&inner.place, error);
        let mut client = inner.reader().await?;
        let made = inner.in_time(async {
            let transaction = client.get_mut().transaction().await.map_err(of_place)?;
            let statement =
                "SELECT version, audited, @.now($2::bigint) FROM @.namespaces WHERE id = $1 FOR UPDATE";
            let statement = transaction.prepare_cached(&inner.sql.text(statement)).await.map_err(of_place)?;
            let row = &transaction
                .query_one(&statement, &[&self.namespace, &inner.wall()])
                .await
                .map_err(of_place)?;
            number(get(row, 0)?, "the version of a namespace")?;
            let mut work = Work {
                inner,
                transaction,
                namespace: self.namespace,
                now: stamp(get(row, 2)?)?,
                version: get(row, 0)?,
                audited: get(row, 1)?,
                actor,
                is_changed: false,
            };
            let made = change(&mut work).await?;
            Ok((made, work.end().await?))
        });
        let made = made.await?;
        // What was not committed is undone when it is dropped, and the connection is as good as before.
        if !made.as_ref().is_err_and(StoreError::is_transient) {
            client.is_done();
        }
        made
    }

    pub(super) async fn apply_all(
        &self,
        changes: &[PolicyChange],
        actor: &str,
    ) -> Result<Version, StoreError> {
        let made = self.change(actor, async |work| {
            let mut before = BTreeMap::new();
            for change in changes {
                before.insert(&change.scope, work.policy(&change.scope).await?);
            }
            let made = check_changes(changes, |scope| {
                Ok(before.get(scope).and_then(|there| there.as_ref().map(|there| there.version)))
            })?;
            for change in made {
                let before = before.remove(&change.scope).flatten();
                let before = before.map(|before| Policy::clone(&before.value));
                work.write_policy(&change.scope, before, change.policy.clone()).await?;
            }
            Ok(())
        });
        Ok(made.await?.1)
    }

    pub(super) async fn put_entity(
        &self,
        entity: &Entity,
        expect: Expect,
        actor: &str,
    ) -> Result<Version, StoreError> {
        check_actor(actor)?;
        entity.check()?;
        let made = self.change(actor, async |work| {
            let id = entity.id();
            let before = work.expected(id, expect).await?;
            // Found beforehand: whoever looks for the parent of an entity cannot ask the server.
            let mut above = BTreeMap::new();
            let mut next = entity.parent_id().cloned();
            while let Some(parent) = next.filter(|parent| !above.contains_key(parent)) {
                let Some(found) = work.entity(&parent).await? else { break };
                next = found.value.parent_id().cloned();
                above.insert(parent, next.clone());
            }
            entity.check_parent(|id| above.get(id).cloned())?;
            let statement =
                "INSERT INTO @.entities (namespace, id, version, parent, body) VALUES ($1, $2, $3, $4, $5)
                             ON CONFLICT (namespace, id) DO UPDATE SET version = $3, parent = $4, body = $5";
            let parent = entity.parent_id().map(EntityId::as_str);
            let (version, body) = (column(work.version().number()), codec::entity_to_text(entity));
            work.query(statement, &[&work.namespace, &id.as_str(), &version, &parent, &body]).await?;
            let before = before.map(|before| before.value);
            work.note(&Filed::entity(id), &Change::Entity { before, after: Some(entity.clone()) }).await
        });
        Ok(made.await?.1)
    }

    pub(super) async fn remove_entity(
        &self,
        id: &EntityId,
        expect: Expect,
        actor: &str,
    ) -> Result<Version, StoreError> {
        let made = self.change(actor, async |work| {
            let Some(before) = work.expected(id, expect).await? else {
                return Err(StoreError::NoEntity { entity: id.clone() });
            };
            let count = "SELECT count(*) FROM @.entities WHERE namespace = $1 AND parent = $2";
            let rows = work.query(count, &[&work.namespace, &id.as_str()]).await?;
            let children = number(first(&rows)?, "a count")?;
            if children > 0 {
                return Err(StoreError::HasChildren { entity: id.clone(), children });
            }
            let own = "SELECT kind, resource FROM @.policies WHERE namespace = $1 AND kind IN (2, 3) AND entity = $2
                       ORDER BY kind, resource";
            for row in &work.query(own, &[&work.namespace, &id.as_str()]).await? {
                let scope = scope(get(row, 0)?, id.as_str(), get(row, 1)?)?;
                let there = work.policy(&scope).await?.map(|there| Policy::clone(&there.value));
                work.write_policy(&scope, there, None).await?;
            }
            let delete = "DELETE FROM @.entities WHERE namespace = $1 AND id = $2";
            work.query(delete, &[&work.namespace, &id.as_str()]).await?;
            work.note(&Filed::entity(id), &Change::Entity { before: Some(before.value), after: None }).await
        });
        Ok(made.await?.1)
    }
}

/// A namespace's number and its version; it is made if it is not there.
pub(super) async fn namespace(inner: &Inner, name: &str) -> Result<(i64, Version), StoreError> {
    let make = "INSERT INTO @.namespaces (name) SELECT $1
                WHERE NOT EXISTS (SELECT 1 FROM @.namespaces WHERE name = $1) ON CONFLICT DO NOTHING";
    inner.query(make, &[&name]).await?;
    let rows = inner.query("SELECT id, version FROM @.namespaces WHERE name = $1", &[&name]).await?;
    let gone = || StoreError::Corrupt { what: format!("the namespace `{name}` was made and is not there") };
    let row = rows.first().ok_or_else(gone)?;
    Ok((get(row, 0)?, Version::new(number(get(row, 1)?, "the version of a namespace")?)))
}
