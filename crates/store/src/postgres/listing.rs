//! Reading: balances, buckets, leases, policies, entities, usage and audit, each in one statement, in pages.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::audit::{Entry, Filed};
use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::lease::{Ended, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName};
use tidegate_core::limit::policy::{Scope, Version, Versioned};
use tidegate_core::limit::usage::{Tally, Usage};
use tidegate_core::time::Stamp;
use tokio_postgres::Row;

use super::Inner;
use super::trouble::{first, get};
use crate::buckets::{Bucket, Held, Lookup, Seen, Standing};
use crate::codec;
use crate::cursor::{
    UsagePlace, entity_cursor, number_cursor, parse_entity, parse_number, parse_scope, scope_cursor,
};
use crate::error::StoreError;
use crate::ledger::{AuditQuery, UsageOf, UsageQuery};
use crate::page::{Page, Paging};
use crate::policies::{CHANGED_MAX, Changed, Listing, Written};
use crate::tables::{
    Key, MeterRow, WrittenPolicy, column, ending, more_than, number, on_expiry, scope, stamp, subject,
    written_policy,
};

pub(super) async fn version(inner: &Inner, namespace: i64) -> Result<Version, StoreError> {
    let rows = inner.query("SELECT version FROM @.namespaces WHERE id = $1", &[&namespace]).await?;
    let gone = || StoreError::Corrupt { what: format!("the namespace {namespace} has gone") };
    Ok(Version::new(number(get(rows.first().ok_or_else(gone)?, 0)?, "the version of a namespace")?))
}

/// The changes after `since`, in one snapshot.
pub(super) async fn changed(
    inner: &Inner,
    namespace: i64,
    since: Version,
) -> Result<Option<Changed>, StoreError> {
    let statement = "
        SELECT space.version, audit.version, audit.change FROM @.namespaces space
        JOIN @.audit audit ON audit.namespace = space.id AND audit.number >= space.audited - $2
        WHERE space.id = $1 ORDER BY audit.number";
    let rows = inner.query(statement, &[&namespace, &column(CHANGED_MAX as u64)]).await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let version =
        |row: &Row, place| Ok::<_, StoreError>(Version::new(number(get(row, place)?, "the audit")?));
    let entry = |row: &Row| Ok((version(row, 1)?, codec::change_from_text(get(row, 2)?)?.0));
    let entries = rows.iter().map(entry).collect::<Result<Vec<_>, StoreError>>()?;
    Ok(Changed::since(since, version(first, 0)?, entries))
}

pub(super) async fn read(inner: &Inner, namespace: i64, scopes: &[Scope]) -> Result<Written, StoreError> {
    let keys: Vec<Key<'_>> = scopes.iter().map(Key::of).collect();
    let kinds: Vec<i64> = keys.iter().map(|key| key.kind).collect();
    let entities: Vec<&str> = keys.iter().map(|key| key.entity).collect();
    let resources: Vec<&str> = keys.iter().map(|key| key.resource).collect();
    if scopes.is_empty() {
        return Ok(Written { version: version(inner, namespace).await?, policies: Vec::new() });
    }
    // The version and the policies as of one moment.
    let statement = "
        SELECT n.version, p.version, p.body
        FROM @.namespaces n
        CROSS JOIN unnest($2::bigint[], $3::text[], $4::text[]) WITH ORDINALITY AS asked (kind, entity, resource, place)
        LEFT JOIN @.policies p ON p.namespace = n.id AND p.kind = asked.kind AND p.entity = asked.entity
            AND p.resource = asked.resource
        WHERE n.id = $1 ORDER BY asked.place";
    let rows = inner.query(statement, &[&namespace, &kinds, &entities, &resources]).await?;
    let version = first(&rows)?;
    let policy = |row: &Row| {
        let there: (Option<i64>, Option<&str>) = (get(row, 1)?, get(row, 2)?);
        there.0.zip(there.1).map(|(version, body)| written_policy(version, body)).transpose()
    };
    let policies = rows.iter().map(policy).collect::<Result<_, _>>()?;
    Ok(Written { version: Version::new(number(version, "the version of a namespace")?), policies })
}

pub(super) async fn list(
    inner: &Inner,
    namespace: i64,
    listing: &Listing,
    paging: &Paging,
) -> Result<Page<(Scope, WrittenPolicy)>, StoreError> {
    let after = paging.cursor().map(parse_scope).transpose()?;
    let after = after.as_ref().map(Key::of);
    let (first, last, entity, resource) = match listing {
        Listing::All => (0_i64, 3_i64, None, None),
        Listing::Entity(entity) => (2, 3, Some(entity.as_str()), None),
        Listing::Custom(resource) => (3, 3, None, Some(resource.as_str())),
    };
    let statement = "
        SELECT kind, entity, resource, version, body FROM @.policies
        WHERE namespace = $1 AND kind BETWEEN $2 AND $3
            AND ($4::text IS NULL OR entity = $4) AND ($5::text IS NULL OR resource = $5)
            AND ($6::bigint IS NULL OR (kind, entity, resource) > ($6, $7::text, $8::text))
        ORDER BY kind, entity, resource LIMIT $9";
    let (kind, after_entity, after_resource) = (
        after.as_ref().map(|after| after.kind),
        after.as_ref().map(|after| after.entity),
        after.as_ref().map(|after| after.resource),
    );
    let max = more_than(paging);
    let rows = inner
        .query(
            statement,
            &[&namespace, &first, &last, &entity, &resource, &kind, &after_entity, &after_resource, &max],
        )
        .await?;
    let policies = rows.iter().map(|row| {
        let scope = scope(get(row, 0)?, get(row, 1)?, get(row, 2)?)?;
        Ok((scope, written_policy(get(row, 3)?, get(row, 4)?)?))
    });
    let policies = policies.collect::<Result<_, StoreError>>()?;
    Ok(Page::cut(policies, paging, |(scope, _)| scope_cursor(scope)))
}

pub(super) fn written_entity(row: &Row) -> Result<Versioned<Entity>, StoreError> {
    let version = Version::new(number(get(row, 0)?, "the version of an entity")?);
    Ok(Versioned { version, value: codec::entity_from_text(get(row, 1)?)? })
}

pub(super) async fn entity(
    inner: &Inner,
    namespace: i64,
    id: &EntityId,
) -> Result<Option<Versioned<Entity>>, StoreError> {
    let statement = "SELECT version, body FROM @.entities WHERE namespace = $1 AND id = $2";
    let rows = inner.query(statement, &[&namespace, &id.as_str()]).await?;
    rows.first().map(written_entity).transpose()
}

/// Whom an entity draws from too, as `chain` with each id and how far up it is: that of the parameter `id`, and no more than
/// `levels` up. Whether one cascades is in its body.
fn chain(id: &str, levels: &str) -> String {
    format!(
        r#"chain AS (
            SELECT {id}::text COLLATE "C" AS id, 0 AS up
            UNION ALL
            SELECT e.parent, chain.up + 1 FROM chain JOIN @.entities e ON e.namespace = $1 AND e.id = chain.id
            WHERE e.parent IS NOT NULL AND (e.body::jsonb ->> 'cascade')::boolean AND chain.up < {levels}
        )"#
    )
}

pub(super) async fn lineage(
    inner: &Inner,
    namespace: i64,
    id: &EntityId,
) -> Result<Vec<Versioned<Entity>>, StoreError> {
    let statement = format!(
        "WITH RECURSIVE {}
        SELECT e.version, e.body FROM chain JOIN @.entities e ON e.namespace = $1 AND e.id = chain.id ORDER BY chain.up",
        chain("$2", "$3")
    );
    let levels = i32::try_from(LEVELS_MAX).unwrap_or(i32::MAX);
    let rows = inner.query(&statement, &[&namespace, &id.as_str(), &levels]).await?;
    rows.iter().map(written_entity).collect()
}

/// Those directly below `parent`, or all.
pub(super) async fn entities(
    inner: &Inner,
    namespace: i64,
    parent: Option<&EntityId>,
    paging: &Paging,
) -> Result<Page<Versioned<Entity>>, StoreError> {
    let after = paging.cursor().map(parse_entity).transpose()?;
    let after = after.as_ref().map_or("", EntityId::as_str);
    let max = more_than(paging);
    let rows = if let Some(parent) = parent.map(EntityId::as_str) {
        let statement =
            "SELECT version, body FROM @.entities WHERE namespace = $1 AND parent = $4 AND id > $2
                         ORDER BY id LIMIT $3";
        inner.query(statement, &[&namespace, &after, &max, &parent]).await?
    } else {
        let statement =
            "SELECT version, body FROM @.entities WHERE namespace = $1 AND id > $2 ORDER BY id LIMIT $3";
        inner.query(statement, &[&namespace, &after, &max]).await?
    };
    let entities = rows.iter().map(written_entity).collect::<Result<_, _>>()?;
    Ok(Page::cut(entities, paging, |entity| entity_cursor(entity.value.id())))
}

/// Buckets as they are, and whether a lease is past its deadline.
pub(super) async fn balances(
    inner: &Inner,
    namespace: i64,
    lookup: &Lookup,
) -> Result<(Seen, bool), StoreError> {
    let wall = inner.wall();
    let rows = match lookup {
        Lookup::Subjects(subjects) => {
            let entities: Vec<&str> = subjects.iter().map(|subject| subject.entity.as_str()).collect();
            let resources: Vec<&str> = subjects.iter().map(|subject| subject.resource.as_str()).collect();
            let asked = "asked AS (SELECT * FROM unnest($3::text[], $4::text[]) WITH ORDINALITY AS asked (entity, resource, place))";
            let statement = balances_of(asked, "AND m.resource = asked.resource");
            inner.query(&statement, &[&namespace, &wall, &entities, &resources]).await?
        }
        Lookup::Entities(entities) => {
            let entities: Vec<&str> = entities.iter().map(EntityId::as_str).collect();
            let asked =
                "asked AS (SELECT * FROM unnest($3::text[]) WITH ORDINALITY AS asked (entity, place))";
            inner.query(&balances_of(asked, ""), &[&namespace, &wall, &entities]).await?
        }
        Lookup::Lineage(entity) => {
            let asked =
                format!("{}, asked AS (SELECT id AS entity, up AS place FROM chain)", chain("$3", "$4"));
            let levels = i32::try_from(LEVELS_MAX + 1).unwrap_or(i32::MAX);
            inner.query(&balances_of(&asked, ""), &[&namespace, &wall, &entity.as_str(), &levels]).await?
        }
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
    Ok((Seen { at, clock_offset, buckets }, is_any_due))
}

/// One row at least, with the time, whether any lease is due, and the clock's offset.
fn balances_of(asked: &str, and: &str) -> String {
    format!(
        "WITH RECURSIVE time AS MATERIALIZED (SELECT * FROM @.look($2::bigint)), {asked},
            due AS MATERIALIZED (SELECT EXISTS (SELECT 1 FROM @.leases
                WHERE namespace = $1 AND how IS NULL AND deadline <= (SELECT now FROM time)) AS is_any)
        SELECT time.now, due.is_any, time.ahead, found.* FROM time CROSS JOIN due LEFT JOIN LATERAL (
            SELECT asked.place::bigint, m.line, m.entity, m.resource, m.amount, m.period, m.burst, m.full_at, m.part,
                m.version, m.consumed
            FROM asked JOIN @.meters m ON m.namespace = $1 AND m.entity = asked.entity {and}
        ) AS found ON true ORDER BY found.place, found.resource, found.line"
    )
}

/// The limit whose columns begin at `begin`: its row, whose it is, and what it is.
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
    paging: &Paging,
) -> Result<Page<Bucket>, StoreError> {
    let after = paging.cursor().map(parse_entity).transpose()?;
    let after = after.as_ref().map_or("", EntityId::as_str);
    let statement = "
        SELECT @.now($2::bigint), m.line, m.entity, m.resource, m.amount, m.period, m.burst, m.full_at, m.part,
            m.version, m.consumed
        FROM (SELECT DISTINCT entity FROM @.meters WHERE namespace = $1 AND resource = $3 AND entity > $4
            ORDER BY entity LIMIT $5) AS page
        JOIN @.meters m ON m.namespace = $1 AND m.resource = $3 AND m.entity = page.entity
        ORDER BY m.entity, m.line";
    let max = more_than(paging);
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
    Ok(Page::cut(buckets, paging, |bucket| entity_cursor(&bucket.subject.entity)))
}

/// What is known of a lease.
pub(super) async fn standing(inner: &Inner, namespace: i64, lease: LeaseId) -> Result<Standing, StoreError> {
    let statement = "
        SELECT @.now($3::bigint), levels, held, step, drawn_at, stepped_at, deadline, on_expiry, how, ended_at, digest
        FROM @.leases WHERE namespace = $1 AND id = $2";
    let id = lease.number().to_be_bytes().to_vec();
    let rows = inner.query(statement, &[&namespace, &id, &inner.wall()]).await?;
    let row = rows.first().ok_or(StoreError::NoLease { lease })?;
    read_standing(row).map_err(|error| match error {
        StoreError::Corrupt { what } => StoreError::Corrupt { what: format!("the lease {lease}: {what}") },
        other => other,
    })
}

fn read_standing(row: &Row) -> Result<Standing, StoreError> {
    let step = u32::try_from(get::<i64>(row, 3)?).unwrap_or(u32::MAX);
    if let Some(how) = get::<Option<i16>>(row, 8)? {
        let at = stamp(get::<Option<i64>>(row, 9)?.unwrap_or(0))?;
        let digest = get::<Option<i64>>(row, 10)?.unwrap_or(0).cast_unsigned();
        return Ok(Standing::Ended(Ended { how: ending(i64::from(how))?, step, at, digest }));
    }
    let corrupt = |what: &str| StoreError::Corrupt { what: what.to_owned() };
    let (levels, held): (Option<&str>, Option<Vec<Option<i64>>>) = (get(row, 1)?, get(row, 2)?);
    let (levels, held) = levels.zip(held).ok_or_else(|| corrupt("it is open and holds nothing"))?;
    let levels = codec::levels_from_text(levels)?;
    if held.len() != levels.names().len() {
        return Err(corrupt(&format!("it holds {} of {} limits", held.len(), levels.names().len())));
    }
    let held = held.into_iter().map(|units| units.map(|units| number(units, "what it holds")).transpose());
    let (drawn_at, stepped_at, deadline) = (stamp(get(row, 4)?)?, stamp(get(row, 5)?)?, stamp(get(row, 6)?)?);
    let on_expiry = on_expiry(i64::from(get::<i16>(row, 7)?))?;
    let held = held.collect::<Result<_, _>>()?;
    let record = Record::restored(step, held, drawn_at, stepped_at, deadline, on_expiry);
    Ok(Standing::Open(Held { at: stamp(get(row, 0)?)?, levels: Arc::new(levels), record }))
}

pub(super) async fn usage(
    inner: &Inner,
    namespace: i64,
    query: &UsageQuery,
    paging: &Paging,
) -> Result<Page<Usage>, StoreError> {
    let after = paging.cursor().map(UsagePlace::parse).transpose()?;
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
    let (span, max) = (query.window as i16, more_than(paging));
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
    let lines = rows.iter().map(line).collect::<Result<_, StoreError>>()?;
    Ok(Page::cut(lines, paging, |line| UsagePlace::of(&query.of, line)))
}

pub(super) async fn audit(
    inner: &Inner,
    namespace: i64,
    query: &AuditQuery,
    paging: &Paging,
) -> Result<Page<Entry>, StoreError> {
    let after = paging.cursor().map(parse_number).transpose()?.map_or(-1, column);
    let statement = "
        SELECT number, version, at, actor, change FROM @.audit
        WHERE namespace = $1 AND number > $2 AND at >= $3 AND at < $4 AND ($6::text IS NULL OR filed = $6)
        ORDER BY number LIMIT $5";
    let (start, end) = (column(query.range.start.as_micros()), column(query.range.end.as_micros()));
    let (filed, max) = (query.filed.as_ref().map(Filed::as_str), more_than(paging));
    let rows = inner.query(statement, &[&namespace, &after, &start, &end, &max, &filed]).await?;
    let entry = |row: &Row| {
        let read = |place: usize| number(get(row, place)?, "the audit");
        let (change, filed) = codec::change_from_text(get(row, 4)?)?;
        let (version, at) = (Version::new(read(1)?), Stamp::from_micros(read(2)?));
        Ok((read(0)?, Entry { version, at, actor: get(row, 3)?, filed, change }))
    };
    let entries = rows.iter().map(entry).collect::<Result<_, StoreError>>()?;
    let page = Page::cut(entries, paging, |(number, _)| number_cursor(*number));
    let items = page.items.into_iter().map(|(_, entry)| entry).collect();
    Ok(Page { items, next: page.next })
}
