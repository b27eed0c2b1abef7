//! Reads of buckets and usage.

use std::ops::Range;

use rusqlite::{Connection, OptionalExtension, named_params};
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::errors::CallError;
use super::meter_rows;
use crate::buckets::{Bucket, Lookup};
use crate::cursor::UsagePlace;
use crate::ledger::{UsageOf, UsageQuery};
use crate::tables::{column, subject, usage_line};

pub(super) fn balances(
    connection: &Connection,
    namespace: i64,
    lookup: &Lookup,
    at: Stamp,
) -> Result<Vec<Bucket>, CallError> {
    let mut buckets = Vec::new();
    match lookup {
        Lookup::Subjects(subjects) => {
            let mut find = connection.prepare_cached(
                "SELECT id FROM subjects WHERE namespace = ?1 AND entity = ?2 AND resource = ?3",
            )?;
            for subject in subjects {
                let key = (namespace, subject.entity.as_str(), subject.resource.as_str());
                if let Some(id) = find.query_row(key, |row| row.get(0)).optional()? {
                    let meters = meter_rows::meters_of(connection, id)?;
                    buckets.push(Bucket { subject: subject.clone(), at, meters });
                }
            }
        }
        Lookup::Entities(entities) => {
            for entity in entities {
                buckets.extend(buckets_of_entity(connection, namespace, entity, at)?);
            }
        }
        Lookup::Lineage(entity) => buckets = buckets_of_entity(connection, namespace, entity, at)?,
    }
    Ok(buckets)
}

fn buckets_of_entity(
    connection: &Connection,
    namespace: i64,
    entity: &EntityId,
    at: Stamp,
) -> Result<Vec<Bucket>, CallError> {
    let mut found = connection.prepare_cached(
        "SELECT id, resource FROM subjects WHERE namespace = ?1 AND entity = ?2 ORDER BY resource",
    )?;
    let mut rows = found.query((namespace, entity.as_str()))?;
    let mut buckets = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, resource): (i64, String) = (row.get(0)?, row.get(1)?);
        let meters = meter_rows::meters_of(connection, id)?;
        buckets.push(Bucket { subject: subject(entity.as_str(), &resource)?, at, meters });
    }
    Ok(buckets)
}

pub(super) fn buckets(
    connection: &Connection,
    namespace: i64,
    (resource, at): (&ResourceName, Stamp),
    after: Option<&EntityId>,
    max: usize,
) -> Result<Vec<Bucket>, CallError> {
    let after = after.map_or("", EntityId::as_str);
    let mut found = connection.prepare_cached(
        "SELECT id, entity FROM subjects WHERE namespace = ?1 AND resource = ?2 AND entity > ?3
         ORDER BY entity LIMIT ?4",
    )?;
    let mut rows = found.query((namespace, resource.as_str(), after, column(max as u64)))?;
    let mut buckets = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, entity): (i64, String) = (row.get(0)?, row.get(1)?);
        let meters = meter_rows::meters_of(connection, id)?;
        buckets.push(Bucket { subject: subject(&entity, resource.as_str())?, at, meters });
    }
    Ok(buckets)
}

pub(super) fn usage(
    connection: &Connection,
    namespace: i64,
    query: &UsageQuery,
    after: Option<UsagePlace<'_>>,
    max: usize,
) -> Result<Vec<Usage>, CallError> {
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
        ":max": column(max as u64),
    })?;
    let mut lines = Vec::new();
    while let Some(row) = rows.next()? {
        let names: [String; 3] = [row.get(0)?, row.get(1)?, row.get(2)?];
        let numbers = [row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?];
        lines.push(usage_line(query.window, names.each_ref().map(String::as_str), numbers)?);
    }
    Ok(lines)
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

/// Whether any lease is past its deadline.
pub(super) fn is_any_due(connection: &Connection, namespace: i64, now: Stamp) -> Result<bool, CallError> {
    let mut due = connection.prepare_cached(
        "SELECT EXISTS (SELECT 1 FROM leases WHERE namespace = ?1 AND how IS NULL AND deadline <= ?2)",
    )?;
    Ok(due.query_row((namespace, column(now.as_micros())), |row| row.get(0))?)
}
