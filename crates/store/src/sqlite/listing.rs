//! Reading: balances, buckets, policies, entities, usage and audit, in pages.

use std::ops::Range;

use rusqlite::{Connection, OptionalExtension, Row, named_params};
use tidegate_core::limit::audit::{Entry, Filed};
use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName};
use tidegate_core::limit::policy::{Scope, Version, Versioned};
use tidegate_core::limit::usage::{Tally, Usage};
use tidegate_core::time::Stamp;

use super::rows;
use super::trouble::Trouble;
use crate::buckets::{Bucket, Lookup};
use crate::codec;
use crate::cursor::{
    UsagePlace, entity_cursor, number_cursor, parse_entity, parse_number, parse_scope, scope_cursor,
};
use crate::error::StoreError;
use crate::ledger::{AuditQuery, UsageOf, UsageQuery};
use crate::page::{Page, Paging};
use crate::policies::{CHANGED_MAX, Changed, Listing, Written};
use crate::tables::{Key, WrittenPolicy, column, more_than, number, scope, subject, written_policy};

pub(super) fn version(connection: &Connection, namespace: i64) -> Result<Version, Trouble> {
    let mut read = connection.prepare_cached("SELECT version FROM namespaces WHERE id = ?1")?;
    let version = read.query_row([namespace], |row| row.get(0))?;
    Ok(Version::new(number(version, "the version of a namespace")?))
}

/// The changes after `since`.
pub(super) fn changed(
    connection: &Connection,
    namespace: i64,
    since: Version,
) -> Result<Option<Changed>, Trouble> {
    let now = version(connection, namespace)?;
    let mut found = connection.prepare_cached(
        "SELECT version, change FROM audit WHERE namespace = ?1
             AND number >= (SELECT audited FROM namespaces WHERE id = ?1) - ?2 ORDER BY number",
    )?;
    let mut rows = found.query((namespace, column(CHANGED_MAX as u64)))?;
    let mut entries = Vec::new();
    while let Some(row) = rows.next()? {
        let (change, _) = codec::change_from_text(&row.get::<_, String>(1)?)?;
        entries.push((Version::new(number(row.get(0)?, "the audit")?), change));
    }
    Ok(Changed::since(since, now, entries))
}

pub(super) fn policy(
    connection: &Connection,
    namespace: i64,
    scope: &Scope,
) -> Result<Option<WrittenPolicy>, Trouble> {
    let Key { kind, entity, resource } = Key::of(scope);
    let mut read = connection.prepare_cached(
        "SELECT version, body FROM policies WHERE namespace = ?1 AND kind = ?2 AND entity = ?3 AND resource = ?4",
    )?;
    let key = (namespace, kind, entity, resource);
    let found: Option<(i64, String)> =
        read.query_row(key, |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    Ok(found.map(|(version, body)| written_policy(version, &body)).transpose()?)
}

pub(super) fn read(connection: &Connection, namespace: i64, scopes: &[Scope]) -> Result<Written, Trouble> {
    let policies: Result<_, Trouble> =
        scopes.iter().map(|scope| policy(connection, namespace, scope)).collect();
    Ok(Written { version: version(connection, namespace)?, policies: policies? })
}

pub(super) fn list(
    connection: &Connection,
    namespace: i64,
    listing: &Listing,
    paging: &Paging,
) -> Result<Page<(Scope, WrittenPolicy)>, Trouble> {
    let after = paging.cursor().map(parse_scope).transpose()?;
    let after = after.as_ref().map(Key::of);
    let (kinds, entity, resource) = match listing {
        Listing::All => (0..=3, None, None),
        Listing::Entity(entity) => (2..=3, Some(entity.as_str()), None),
        Listing::Custom(resource) => (3..=3, None, Some(resource.as_str())),
    };
    let mut found = connection.prepare_cached(
        "SELECT kind, entity, resource, version, body FROM policies
         WHERE namespace = :namespace AND kind BETWEEN :first AND :last
             AND (:entity IS NULL OR entity = :entity) AND (:resource IS NULL OR resource = :resource)
             AND (:after IS NULL OR (kind, entity, resource) > (:after, :after_entity, :after_resource))
         ORDER BY kind, entity, resource LIMIT :max",
    )?;
    let mut rows = found.query(named_params! {
        ":namespace": namespace,
        ":first": kinds.start(),
        ":last": kinds.end(),
        ":entity": entity,
        ":resource": resource,
        ":after": after.as_ref().map(|after| after.kind),
        ":after_entity": after.as_ref().map(|after| after.entity),
        ":after_resource": after.as_ref().map(|after| after.resource),
        ":max": more_than(paging),
    })?;
    let mut policies = Vec::new();
    while let Some(row) = rows.next()? {
        let (kind, entity, resource): (i64, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let (version, body): (i64, String) = (row.get(3)?, row.get(4)?);
        policies.push((scope(kind, &entity, &resource)?, written_policy(version, &body)?));
    }
    Ok(Page::cut(policies, paging, |(scope, _)| scope_cursor(scope)))
}

pub(super) fn entity(
    connection: &Connection,
    namespace: i64,
    id: &EntityId,
) -> Result<Option<Versioned<Entity>>, Trouble> {
    let mut read =
        connection.prepare_cached("SELECT version, body FROM entities WHERE namespace = ?1 AND id = ?2")?;
    let mut rows = read.query((namespace, id.as_str()))?;
    rows.next()?.map(written_entity).transpose()
}

fn written_entity(row: &Row<'_>) -> Result<Versioned<Entity>, Trouble> {
    let (version, body): (i64, String) = (row.get(0)?, row.get(1)?);
    let version = Version::new(number(version, "the version of an entity")?);
    Ok(Versioned { version, value: codec::entity_from_text(&body)? })
}

pub(super) fn lineage(
    connection: &Connection,
    namespace: i64,
    id: &EntityId,
) -> Result<Vec<Versioned<Entity>>, Trouble> {
    let mut lineage: Vec<Versioned<Entity>> = Vec::new();
    let mut next = Some(id.clone());
    while let Some(id) = next.filter(|_| lineage.len() <= LEVELS_MAX) {
        let Some(found) = entity(connection, namespace, &id)? else { break };
        next = found.value.next().cloned();
        lineage.push(found);
    }
    Ok(lineage)
}

/// Those directly below `parent`, or all.
pub(super) fn entities(
    connection: &Connection,
    namespace: i64,
    parent: Option<&EntityId>,
    paging: &Paging,
) -> Result<Page<Versioned<Entity>>, Trouble> {
    let after = paging.cursor().map(parse_entity).transpose()?;
    let after = after.as_ref().map_or("", EntityId::as_str);
    let max = more_than(paging);
    let sql = match parent {
        Some(_) => {
            "SELECT version, body FROM entities WHERE namespace = ?1 AND parent = ?4 AND id > ?2
             ORDER BY id LIMIT ?3"
        }
        None => {
            "SELECT version, body FROM entities WHERE namespace = ?1 AND id > ?2 AND ?4 IS NULL
             ORDER BY id LIMIT ?3"
        }
    };
    let mut found = connection.prepare_cached(sql)?;
    let mut rows = found.query((namespace, after, max, parent.map(EntityId::as_str)))?;
    let mut entities = Vec::new();
    while let Some(row) = rows.next()? {
        entities.push(written_entity(row)?);
    }
    Ok(Page::cut(entities, paging, |entity| entity_cursor(entity.value.id())))
}

pub(super) fn balances(
    connection: &Connection,
    namespace: i64,
    lookup: &Lookup,
    at: Stamp,
) -> Result<Vec<Bucket>, Trouble> {
    let mut buckets = Vec::new();
    match lookup {
        Lookup::Subjects(subjects) => {
            let mut find = connection.prepare_cached(
                "SELECT id FROM subjects WHERE namespace = ?1 AND entity = ?2 AND resource = ?3",
            )?;
            for subject in subjects {
                let key = (namespace, subject.entity.as_str(), subject.resource.as_str());
                if let Some(id) = find.query_row(key, |row| row.get(0)).optional()? {
                    let meters = rows::meters_of(connection, id)?;
                    buckets.push(Bucket { subject: subject.clone(), at, meters });
                }
            }
        }
        Lookup::Entities(entities) => {
            for entity in entities {
                buckets.extend(buckets_of_entity(connection, namespace, entity, at)?);
            }
        }
        Lookup::Lineage(entity) => {
            buckets.extend(buckets_of_entity(connection, namespace, entity, at)?);
            for above in lineage(connection, namespace, entity)? {
                if let Some(next) = above.value.next() {
                    buckets.extend(buckets_of_entity(connection, namespace, next, at)?);
                }
            }
        }
    }
    Ok(buckets)
}

fn buckets_of_entity(
    connection: &Connection,
    namespace: i64,
    entity: &EntityId,
    at: Stamp,
) -> Result<Vec<Bucket>, Trouble> {
    let mut found = connection.prepare_cached(
        "SELECT id, resource FROM subjects WHERE namespace = ?1 AND entity = ?2 ORDER BY resource",
    )?;
    let mut rows = found.query((namespace, entity.as_str()))?;
    let mut buckets = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, resource): (i64, String) = (row.get(0)?, row.get(1)?);
        let meters = rows::meters_of(connection, id)?;
        buckets.push(Bucket { subject: subject(entity.as_str(), &resource)?, at, meters });
    }
    Ok(buckets)
}

pub(super) fn buckets(
    connection: &Connection,
    namespace: i64,
    (resource, at): (&ResourceName, Stamp),
    paging: &Paging,
) -> Result<Page<Bucket>, Trouble> {
    let after = paging.cursor().map(parse_entity).transpose()?;
    let after = after.as_ref().map_or("", EntityId::as_str);
    let mut found = connection.prepare_cached(
        "SELECT id, entity FROM subjects WHERE namespace = ?1 AND resource = ?2 AND entity > ?3
         ORDER BY entity LIMIT ?4",
    )?;
    let mut rows = found.query((namespace, resource.as_str(), after, more_than(paging)))?;
    let mut buckets = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, entity): (i64, String) = (row.get(0)?, row.get(1)?);
        let meters = rows::meters_of(connection, id)?;
        buckets.push(Bucket { subject: subject(&entity, resource.as_str())?, at, meters });
    }
    Ok(Page::cut(buckets, paging, |bucket| entity_cursor(&bucket.subject.entity)))
}

pub(super) fn usage(
    connection: &Connection,
    namespace: i64,
    query: &UsageQuery,
    paging: &Paging,
) -> Result<Page<Usage>, Trouble> {
    let after = paging.cursor().map(UsagePlace::parse).transpose()?;
    let (sql, key) = match &query.of {
        UsageOf::Entity(entity) => (USAGE_OF_ENTITY, entity.as_str()),
        UsageOf::Resource(resource) => (USAGE_OF_RESOURCE, resource.as_str()),
    };
    let mut found = connection.prepare_cached(sql)?;
    let Range { start, end } = &query.range;
    let mut rows = found.query(named_params! {
        ":namespace": namespace,
        ":key": key,
        ":span": query.window as i64,
        ":start": column(start.as_micros()),
        ":end": column(end.as_micros()),
        ":after": after.map(|place| place.name),
        ":after_limit": after.map(|place| place.limit),
        ":after_start": after.map(|place| column(place.start.as_micros())),
        ":max": more_than(paging),
    })?;
    let mut lines = Vec::new();
    while let Some(row) = rows.next()? {
        let (entity, resource, limit): (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let count = |place: usize| -> Result<u64, Trouble> { Ok(number(row.get(place)?, "a sum of usage")?) };
        let tally = Tally { units: count(4)?, own: count(5)?, leases: count(6)? };
        let limit =
            LimitName::new(&limit).map_err(|error| StoreError::Corrupt { what: error.to_string() })?;
        let (subject, start) = (subject(&entity, &resource)?, Stamp::from_micros(count(3)?));
        lines.push(Usage { subject, limit, window: query.window, start, tally });
    }
    Ok(Page::cut(lines, paging, |line| UsagePlace::of(&query.of, line)))
}

const USAGE_OF_ENTITY: &str = "
    SELECT entity, resource, name, start, units, own, leases FROM subjects JOIN usage ON subject = id
    WHERE namespace = :namespace AND entity = :key AND span = :span AND start >= :start AND start < :end
        AND (:after IS NULL OR (resource, name, start) > (:after, :after_limit, :after_start))
    ORDER BY resource, name, start LIMIT :max";
const USAGE_OF_RESOURCE: &str = "
    SELECT entity, resource, name, start, units, own, leases FROM subjects JOIN usage ON subject = id
    WHERE namespace = :namespace AND resource = :key AND span = :span AND start >= :start AND start < :end
        AND (:after IS NULL OR (entity, name, start) > (:after, :after_limit, :after_start))
    ORDER BY entity, name, start LIMIT :max";

pub(super) fn audit(
    connection: &Connection,
    namespace: i64,
    query: &AuditQuery,
    paging: &Paging,
) -> Result<Page<Entry>, Trouble> {
    let after = paging.cursor().map(parse_number).transpose()?;
    let sql = match query.filed {
        None => {
            "SELECT number, version, at, actor, change FROM audit
             WHERE namespace = ?1 AND number > ?2 AND at >= ?3 AND at < ?4 AND ?6 IS NULL
             ORDER BY number LIMIT ?5"
        }
        Some(_) => {
            "SELECT number, version, at, actor, change FROM audit
             WHERE namespace = ?1 AND filed = ?6 AND number > ?2 AND at >= ?3 AND at < ?4
             ORDER BY number LIMIT ?5"
        }
    };
    let mut found = connection.prepare_cached(sql)?;
    let after = after.map_or(-1, column);
    let (start, end) = (column(query.range.start.as_micros()), column(query.range.end.as_micros()));
    let filed = query.filed.as_ref().map(Filed::as_str);
    let mut rows = found.query((namespace, after, start, end, more_than(paging), filed))?;
    let mut entries = Vec::new();
    while let Some(row) = rows.next()? {
        let read = |place: usize| -> Result<u64, Trouble> { Ok(number(row.get(place)?, "the audit")?) };
        let change: String = row.get(4)?;
        let (change, filed) = codec::change_from_text(&change)?;
        let (version, at, actor) = (Version::new(read(1)?), Stamp::from_micros(read(2)?), row.get(3)?);
        entries.push((read(0)?, Entry { version, at, actor, filed, change }));
    }
    let page = Page::cut(entries, paging, |(number, _)| number_cursor(*number));
    let items = page.items.into_iter().map(|(_, entry)| entry).collect();
    Ok(Page { items, next: page.next })
}

/// Whether a lease is past its deadline.
pub(super) fn is_any_due(connection: &Connection, namespace: i64, now: Stamp) -> Result<bool, Trouble> {
    let mut due = connection.prepare_cached(
        "SELECT EXISTS (SELECT 1 FROM leases WHERE namespace = ?1 AND how IS NULL AND deadline <= ?2)",
    )?;
    Ok(due.query_row((namespace, column(now.as_micros())), |row| row.get(0))?)
}
