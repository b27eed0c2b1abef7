//! Reads of buckets, leases and usage, each in one statement.

use std::ops::Range;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, Shortfall};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::usage::Usage;
use tokio_postgres::Row;

use super::Inner;
use super::errors::{first, get};
use crate::buckets::{Bucket, BucketSnapshot, LeaseStatus, Lookup};
use crate::cursor::UsagePlace;
use crate::error::StoreError;
use crate::ledger::{UsageOf, UsageQuery};
use crate::tables::{Holding, LeaseRow, MeterRow, column, in_lease, number, stamp, subject, usage_line};

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
    let columns = LeaseRow {
        levels: get(row, 1)?,
        step: u32::try_from(get::<i64>(row, 3)?).unwrap_or(u32::MAX),
        times: [get(row, 4)?, get(row, 5)?, get(row, 6)?],
        on_expiry: get::<i16>(row, 7)?.into(),
        how: get::<Option<i16>>(row, 8)?.map(i64::from),
        ended_at: get(row, 9)?,
        digest: get(row, 10)?,
    };
    let state = columns.state(|levels| holding(row, levels)).map_err(|error| in_lease(lease, error))?;
    state.status(lease, stamp(get(row, 0)?)?)
}

/// What a lease holds: units by name, and a shortfall per line.
fn holding(row: &Row, levels: &Levels) -> Result<Option<Holding>, StoreError> {
    let Some(held) = get::<Option<Vec<Option<i64>>>>(row, 2)? else { return Ok(None) };
    let held =
        held.into_iter().map(|units| units.map(|units| number(units, "the units it holds")).transpose());
    let lines = levels.levels().iter().zip(0..).flat_map(|(level, number)| {
        level.limits.iter().map(move |line| (number, u8::try_from(line.name).unwrap_or(u8::MAX)))
    });
    let shorts = get::<Option<Vec<i64>>>(row, 11)?.unwrap_or_default();
    let shortfalls = lines
        .zip(shorts)
        .map(|((level, name), units)| Ok(Shortfall { level, name, units: number(units, "a shortfall")? }))
        .filter(|short| short.as_ref().map_or(true, |short| short.units > 0));
    Ok(Some((held.collect::<Result<_, _>>()?, shortfalls.collect::<Result<_, StoreError>>()?)))
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
        let numbers = [get(row, 3)?, get(row, 4)?, get(row, 5)?, get(row, 6)?];
        usage_line(query.window, [get(row, 0)?, get(row, 1)?, get(row, 2)?], numbers)
    };
    rows.iter().map(line).collect()
}
