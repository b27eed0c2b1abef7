//! Reads of buckets, leases and usage, each in one statement.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::lease::{EndRecord, LeaseId, Record, Shortfall};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName};
use tidegate_core::limit::usage::{Tally, Usage};
use tokio_postgres::Row;

use super::Inner;
use super::errors::{first, get};
use crate::buckets::{Bucket, BucketSnapshot, LeaseSnapshot, LeaseStatus, Lookup};
use crate::codec;
use crate::cursor::UsagePlace;
use crate::error::StoreError;
use crate::ledger::{UsageOf, UsageQuery};
use crate::tables::{MeterRow, column, ending, number, on_expiry, stamp, subject};

/// Buckets, and whether any lease is past its deadline.
pub(super) async fn balances(
    inner: &Inner,
    namespace: i64,
    lookup: &Lookup,
) -> Result<(BucketSnapshot, bool), StoreError> {
    let rows = match lookup {
        Lookup::Subjects(subjects) => {
            let entities: Vec<&str> = subjects.iter().map(|subject| subject.entity.as_str()).collect();
            let resources: Vec<&str> = subjects.iter().map(|subject| subject.resource.as_str()).collect();
            let asked = "asked AS (SELECT * FROM unnest($3::text[], $4::text[]) WITH ORDINALITY AS asked (entity, resource, place))";
            let statement = balances_of(asked, "AND m.resource = asked.resource");
            inner.query(&statement, &[&namespace, &inner.wall(), &entities, &resources]).await?
        }
        Lookup::Entities(entities) => entities_at(inner, namespace, entities).await?,
        Lookup::Lineage(entity) => entities_at(inner, namespace, std::slice::from_ref(entity)).await?,
    };
    let at = stamp(first(&rows)?)?;
    let (is_any_due, offset) = rows
        .first()
        .map_or(Ok((false, 0)), |row| Ok::<_, StoreError>((get(row, 1)?, get::<i64>(row, 2)?)))?;
    let mut buckets: Vec<(i64, Bucket)> = Vec::new();
    for row in &rows {
        let Some(place) = get::<Option<i64>>(row, 3)? else { continue };
        let (meter, subject) = (meter(row, 4)?, subject(get(row, 5)?, get(row, 6)?)?);
        match buckets.last_mut() {
            Some((last, bucket)) if *last == place && bucket.subject == subject => bucket.meters.push(meter),
            _ => buckets.push((place, Bucket { subject, at, meters: vec![meter] })),
        }
    }
    let buckets = buckets.into_iter().map(|(_, bucket)| bucket).collect();
    let clock_offset = Duration::from_micros(offset.unsigned_abs());
    Ok((BucketSnapshot { at, clock_offset, buckets }, is_any_due))
}

async fn entities_at(inner: &Inner, namespace: i64, entities: &[EntityId]) -> Result<Vec<Row>, StoreError> {
    let entities: Vec<&str> = entities.iter().map(EntityId::as_str).collect();
    let asked = "asked AS (SELECT * FROM unnest($3::text[]) WITH ORDINALITY AS asked (entity, place))";
    inner.query(&balances_of(asked, ""), &[&namespace, &inner.wall(), &entities]).await
}

/// Always returns a row with the time, whether any lease is due, and the clock's offset.
fn balances_of(asked: &str, and: &str) -> String {
    format!(
        "WITH time AS MATERIALIZED (SELECT * FROM @.look($2::bigint)), {asked},
            due AS MATERIALIZED (SELECT EXISTS (SELECT 1 FROM @.leases
                WHERE namespace = $1 AND how IS NULL AND deadline <= (SELECT now FROM time)) AS is_any)
        SELECT time.now, due.is_any, time.ahead, found.* FROM time CROSS JOIN due LEFT JOIN LATERAL (
            SELECT asked.place::bigint, m.line, m.entity, m.resource, m.amount, m.period, m.burst, m.full_at, m.part,
                m.version, m.consumed
            FROM asked JOIN @.meters m ON m.namespace = $1 AND m.entity = asked.entity {and}
        ) AS found ON true ORDER BY found.place, found.resource, found.line"
    )
}

/// Decodes the limit whose columns begin at `begin`.
fn meter(row: &Row, begin: usize) -> Result<Meter, StoreError> {
    let read = |place: usize| get::<i64>(row, begin + place);
    let columns = MeterRow {
        row: get(row, begin)?,
        shape: [read(3)?, read(4)?, read(5)?],
        full_at: read(6)?,
        part: read(7)?,
        version: read(8)?,
        consumed: read(9)?,
    };
    columns.meter()
}

pub(super) async fn buckets(
    inner: &Inner,
    namespace: i64,
    resource: &ResourceName,
    after: Option<&EntityId>,
    max: usize,
) -> Result<Vec<Bucket>, StoreError> {
    let after = after.map_or("", EntityId::as_str);
    let statement = "
        SELECT @.now($2::bigint), m.line, m.entity, m.resource, m.amount, m.period, m.burst, m.full_at, m.part,
            m.version, m.consumed
        FROM (SELECT DISTINCT entity FROM @.meters WHERE namespace = $1 AND resource = $3 AND entity > $4
            ORDER BY entity LIMIT $5) AS page
        JOIN @.meters m ON m.namespace = $1 AND m.resource = $3 AND m.entity = page.entity
        ORDER BY m.entity, m.line";
    let max = column(max as u64);
    let rows = inner.query(statement, &[&namespace, &inner.wall(), &resource.as_str(), &after, &max]).await?;
    let mut buckets: Vec<Bucket> = Vec::new();
    for row in &rows {
        let (at, meter, subject) =
            (stamp(get(row, 0)?)?, meter(row, 1)?, subject(get(row, 2)?, get(row, 3)?)?);
        match buckets.last_mut() {
            Some(bucket) if bucket.subject == subject => bucket.meters.push(meter),
            _ => buckets.push(Bucket { subject, at, meters: vec![meter] }),
        }
    }
    Ok(buckets)
}

/// The state of a lease.
pub(super) async fn standing(
    inner: &Inner,
    namespace: i64,
    lease: LeaseId,
) -> Result<LeaseStatus, StoreError> {
    let statement = "
        SELECT @.now($3::bigint), levels, held, step, drawn_at, stepped_at, deadline, on_expiry, how, ended_at, digest, shorts
        FROM @.leases WHERE namespace = $1 AND id = $2";
    let id = lease.number().to_be_bytes().to_vec();
    let rows = inner.query(statement, &[&namespace, &id, &inner.wall()]).await?;
    let row = rows.first().ok_or(StoreError::NoLease { lease })?;
    read_standing(row).map_err(|error| match error {
        StoreError::Corrupt { what } => StoreError::Corrupt { what: format!("the lease {lease}: {what}") },
        other => other,
    })
}

fn read_standing(row: &Row) -> Result<LeaseStatus, StoreError> {
    let step = u32::try_from(get::<i64>(row, 3)?).unwrap_or(u32::MAX);
    if let Some(how) = get::<Option<i16>>(row, 8)? {
        let at = stamp(get::<Option<i64>>(row, 9)?.unwrap_or(0))?;
        let digest = get::<Option<i64>>(row, 10)?.unwrap_or(0).cast_unsigned();
        return Ok(LeaseStatus::Ended(EndRecord { how: ending(i64::from(how))?, step, at, digest }));
    }
    let corrupt = |what: &str| StoreError::Corrupt { what: what.to_owned() };
    let (levels, held): (Option<&str>, Option<Vec<Option<i64>>>) = (get(row, 1)?, get(row, 2)?);
    let (levels, held) = levels.zip(held).ok_or_else(|| corrupt("it is open without levels or units"))?;
    let levels = codec::levels_from_text(levels)?;
    if held.len() != levels.names().len() {
        return Err(corrupt(&format!("it holds {} of {} limits", held.len(), levels.names().len())));
    }
    let held =
        held.into_iter().map(|units| units.map(|units| number(units, "the units it holds")).transpose());
    let (drawn_at, stepped_at, deadline) = (stamp(get(row, 4)?)?, stamp(get(row, 5)?)?, stamp(get(row, 6)?)?);
    let on_expiry = on_expiry(i64::from(get::<i16>(row, 7)?))?;
    let held = held.collect::<Result<_, _>>()?;
    let shorts = get::<Option<Vec<i64>>>(row, 11)?.unwrap_or_default();
    let lines = levels.levels().iter().zip(0..).flat_map(|(level, number)| {
        level.limits.iter().map(move |line| (number, u8::try_from(line.name).unwrap_or(u8::MAX)))
    });
    let shortfalls = lines
        .zip(shorts)
        .map(|((level, name), units)| Ok(Shortfall { level, name, units: number(units, "a shortfall")? }));
    let shortfalls = shortfalls.filter(|short| short.as_ref().map_or(true, |short| short.units > 0));
    let record = Record::restored(step, held, drawn_at, stepped_at, deadline, on_expiry)
        .with_shortfalls(shortfalls.collect::<Result<_, StoreError>>()?);
    Ok(LeaseStatus::Open(LeaseSnapshot { at: stamp(get(row, 0)?)?, levels: Arc::new(levels), record }))
}

pub(super) async fn usage(
    inner: &Inner,
    namespace: i64,
    query: &UsageQuery,
    after: Option<UsagePlace<'_>>,
    max: usize,
) -> Result<Vec<Usage>, StoreError> {
    let (whose, other, key) = match &query.of {
        UsageOf::Entity(entity) => ("entity", "resource", entity.as_str()),
        UsageOf::Resource(resource) => ("resource", "entity", resource.as_str()),
    };
    let statement = format!(
        "SELECT entity, resource, name, start, units, own, leases FROM @.usage
        WHERE namespace = $1 AND {whose} = $2 AND span = $3 AND start >= $4 AND start < $5
            AND ($6::text IS NULL OR ({other}, name, start) > ($6, $7::text, $8::bigint))
        ORDER BY {other}, name, start LIMIT $9"
    );
    let Range { start, end } = &query.range;
    let (start, end) = (column(start.as_micros()), column(end.as_micros()));
    let (name, limit) = (after.map(|place| place.name), after.map(|place| place.limit));
    let begun = after.map(|place| column(place.start.as_micros()));
    let (span, max) = (query.window as i16, column(max as u64));
    let rows = inner
        .query(&statement, &[&namespace, &key, &span, &start, &end, &name, &limit, &begun, &max])
        .await?;
    let line = |row: &Row| {
        let count = |place: usize| number(get(row, place)?, "a sum of usage");
        let tally = Tally { units: count(4)?, own: count(5)?, leases: count(6)? };
        let limit = LimitName::new(get::<&str>(row, 2)?);
        let limit = limit.map_err(|error| StoreError::Corrupt { what: error.to_string() })?;
        let (subject, start) = (subject(get(row, 0)?, get(row, 1)?)?, stamp(get(row, 3)?)?);
        Ok(Usage { subject, limit, window: query.window, start, tally })
    };
    rows.iter().map(line).collect()
}
