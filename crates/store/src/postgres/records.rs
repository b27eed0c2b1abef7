//! Records in the tables of policies, entities, tokens and the audit. One statement writes a change with its
//! audit entries.

use std::borrow::Cow;

use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Version;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::Inner;
use super::errors::{get, server_error};
use crate::error::StoreError;
use crate::record::{Key, Kind, Of, Record, RecordChange, RecordWrite, Records, Scan};
use crate::tables::{column, number, stamp};

// Each table with the columns of a record: the three of its key, its link, version and body. `ORDER BY
// number` refers to the table's column because no result column has that name.
const POLICIES: &str = "SELECT kind, entity, resource, NULL::text, version, body FROM @.policies";
const ENTITIES: &str = "SELECT 4::bigint, id, '', parent, version, body FROM @.entities";
const TOKENS: &str = "SELECT 5::bigint, id, '', encode(hash, 'hex'), version, body FROM @.tokens";
const ENTRIES: &str = "SELECT 6::bigint, number::text AS first, '', filed, version,
    at::text || chr(10) || actor || chr(10) || change FROM @.audit";

/// The records with these keys, the namespace's version, its count of audit entries and the time, in one
/// statement.
pub(super) async fn read(inner: &Inner, namespace: i64, keys: &[Key]) -> Result<Records, StoreError> {
    let statement = format!(
        "SELECT space.version, space.audited, (SELECT @.now($2::bigint)), found.* FROM @.namespaces space
        LEFT JOIN unnest($3::bigint[], $4::text[], $5::text[]) WITH ORDINALITY AS asked (kind, first, second, place)
            ON true
        LEFT JOIN LATERAL (
            {POLICIES} WHERE namespace = $1 AND kind = asked.kind AND entity = asked.first AND resource = asked.second
            UNION ALL {ENTITIES} WHERE asked.kind = 4 AND namespace = $1 AND id = asked.first
            UNION ALL {TOKENS} WHERE asked.kind = 5 AND namespace = $1 AND id = asked.first
            UNION ALL {ENTRIES} WHERE asked.kind = 6 AND namespace = $1
                AND number = CASE asked.kind WHEN 6 THEN asked.first::bigint END
        ) AS found ON true
        WHERE space.id = $1 ORDER BY asked.place"
    );
    let columns = KeyArrays::of(keys.iter());
    let KeyArrays { kinds, firsts, seconds } = &columns;
    let rows = inner.query(&statement, &[&namespace, &inner.wall(), kinds, firsts, seconds]).await?;
    let space = rows.first().ok_or_else(|| missing_namespace(namespace))?;
    // Without keys there is one row, that of the namespace.
    let records = rows.iter().take(keys.len()).map(|row| record(row, 3));
    Ok(Records {
        version: version(space, 0)?,
        entries: number(get(space, 1)?, "the count of audit entries")?,
        at: stamp(get(space, 2)?)?,
        records: records.collect::<Result<_, _>>()?,
    })
}

pub(super) async fn scan(inner: &Inner, namespace: i64, scan: &Scan) -> Result<Vec<Record>, StoreError> {
    // The rows, the columns of their keys, those of the first key to leave out, and the condition of a link.
    let (rows, key, after, by_link) = match scan.kind {
        Kind::Policy => (POLICIES, "kind, entity, resource", "$5, $3, $6", "kind = 3 AND resource = $4"),
        Kind::Entity => (ENTITIES, "id", "$3", "parent = $4"),
        Kind::Token => (TOKENS, "id", "$3", "hash = decode($4, 'hex')"),
        Kind::Entry => (ENTRIES, "number", "$3::text::bigint", "filed = $4"),
    };
    let (of, value) = match &scan.of {
        Of::All => ("$4::text IS NULL", None),
        Of::Link(link) => (by_link, Some(link.as_str())),
        Of::Entity(entity) => ("kind = 3 AND entity = $4", Some(entity.as_str())),
    };
    let statement =
        format!("{rows} WHERE namespace = $1 AND {of} AND ({key}) > ({after}) ORDER BY {key} LIMIT $2");
    let (kind, first, second) = match &scan.after {
        Some(after) => key_columns(after),
        // Before all keys.
        None if scan.kind == Kind::Entry => (-1, "-1".into(), ""),
        None => (-1, "".into(), ""),
    };
    let max = column(scan.max as u64);
    let parameters: [&(dyn ToSql + Sync); 6] = [&namespace, &max, &first, &value, &kind, &second];
    let used = if scan.kind == Kind::Policy { 6 } else { 4 };
    let rows = inner.query(&statement, &parameters[..used]).await?;
    rows.iter().filter_map(|row| record(row, 0).transpose()).collect()
}

/// An entity and its ancestors, at most `max`, in one statement.
pub(super) async fn chain(
    inner: &Inner,
    namespace: i64,
    id: &EntityId,
    max: usize,
) -> Result<Vec<Record>, StoreError> {
    let statement = "
        WITH RECURSIVE chain AS (
            SELECT id, parent, version, body, 1::bigint AS place FROM @.entities WHERE namespace = $1 AND id = $2
            UNION ALL
            SELECT above.id, above.parent, above.version, above.body, chain.place + 1
            FROM chain JOIN @.entities above ON above.namespace = $1 AND above.id = chain.parent
            WHERE chain.place < $3
        )
        SELECT 4::bigint, id, '', parent, version, body FROM chain ORDER BY place LIMIT $3";
    let rows = inner.query(statement, &[&namespace, &id.as_str(), &column(max as u64)]).await?;
    rows.iter().filter_map(|row| record(row, 0).transpose()).collect()
}

/// Makes the changes and announces them; `false` if the namespace's version has changed. It is a single
/// statement, which waits for other writers of the namespace.
pub(super) async fn write(inner: &Inner, namespace: i64, write: &RecordWrite) -> Result<bool, StoreError> {
    // A record without a body is removed. Audit entries are only added.
    let statement = "
        WITH raised AS (
            UPDATE @.namespaces SET version = $3, audited = $4 WHERE id = $1 AND version = $2 RETURNING id
        ), changed AS (
            SELECT change.* FROM raised CROSS JOIN unnest($7::bigint[], $8::text[], $9::text[], $10::text[], $11::text[])
                AS change (kind, first, second, link, body)
        ), written AS (SELECT * FROM changed WHERE body IS NOT NULL
        ), removed AS (SELECT * FROM changed WHERE body IS NULL
        ), written_policies AS (
            INSERT INTO @.policies (namespace, kind, entity, resource, version, body)
            SELECT $1, kind, first, second, $3, body FROM written WHERE kind < 4
            ON CONFLICT (namespace, kind, entity, resource)
            DO UPDATE SET version = excluded.version, body = excluded.body
        ), removed_policies AS (
            DELETE FROM @.policies USING removed WHERE policies.namespace = $1 AND policies.kind = removed.kind
                AND entity = first AND resource = second
        ), written_entities AS (
            INSERT INTO @.entities (namespace, id, version, parent, body)
            SELECT $1, first, $3, link, body FROM written WHERE kind = 4
            ON CONFLICT (namespace, id)
            DO UPDATE SET version = excluded.version, parent = excluded.parent, body = excluded.body
        ), removed_entities AS (
            DELETE FROM @.entities USING removed WHERE kind = 4 AND namespace = $1 AND id = first
        ), written_tokens AS (
            INSERT INTO @.tokens (namespace, id, hash, version, body)
            SELECT $1, first, decode(link, 'hex'), $3, body FROM written WHERE kind = 5
            ON CONFLICT (namespace, id)
            DO UPDATE SET hash = excluded.hash, version = excluded.version, body = excluded.body
        ), removed_tokens AS (
            DELETE FROM @.tokens USING removed WHERE kind = 5 AND namespace = $1 AND id = first
        ), written_entries AS (
            INSERT INTO @.audit (namespace, number, version, at, actor, filed, change)
            SELECT $1, first::bigint, $3, split_part(body, chr(10), 1)::bigint, split_part(body, chr(10), 2), link,
                split_part(body, chr(10), 3)
            FROM written WHERE kind = 6
        )
        SELECT pg_notify($5, $6) FROM raised";
    let columns = KeyArrays::of(write.changes.iter().map(|change| &change.key));
    let KeyArrays { kinds, firsts, seconds } = &columns;
    let after = |change: &RecordChange| change.after.as_ref().map(|after| (after.link(), after.body()));
    let (links, bodies): (Vec<Option<String>>, Vec<Option<String>>) = write
        .changes
        .iter()
        .map(|change| after(change).map_or((None, None), |(link, body)| (link, Some(body))))
        .unzip();
    let (seen, version) = (column(write.seen.number()), column(write.version().number()));
    let (entries, channel) = (column(write.entries_after()), inner.sql.channel());
    let payload = format!("{namespace} {version}");
    let parameters: [&(dyn ToSql + Sync); 11] =
        [&namespace, &seen, &version, &entries, &channel, &payload, kinds, firsts, seconds, &links, &bodies];
    let rows = inner.query_once(statement, &parameters).await?;
    Ok(!rows.map_err(|error| server_error(&inner.place, error))?.is_empty())
}

/// The id and version of a namespace, which is created if it does not exist.
pub(super) async fn namespace(inner: &Inner, name: &str) -> Result<(i64, Version), StoreError> {
    let make = "INSERT INTO @.namespaces (name) SELECT $1
                WHERE NOT EXISTS (SELECT 1 FROM @.namespaces WHERE name = $1) ON CONFLICT DO NOTHING";
    inner.query(make, &[&name]).await?;
    let rows = inner.query("SELECT id, version FROM @.namespaces WHERE name = $1", &[&name]).await?;
    let gone =
        || StoreError::Corrupt { what: format!("the namespace `{name}` is missing after it was created") };
    let row = rows.first().ok_or_else(gone)?;
    Ok((get(row, 0)?, version(row, 1)?))
}

/// Keys in columns.
struct KeyArrays<'a> {
    kinds: Vec<i64>,
    firsts: Vec<Cow<'a, str>>,
    seconds: Vec<&'a str>,
}

impl<'a> KeyArrays<'a> {
    fn of(keys: impl Iterator<Item = &'a Key>) -> Self {
        let mut arrays = Self { kinds: Vec::new(), firsts: Vec::new(), seconds: Vec::new() };
        for (kind, first, second) in keys.map(key_columns) {
            arrays.kinds.push(kind);
            arrays.firsts.push(first);
            arrays.seconds.push(second);
        }
        arrays
    }
}

/// The columns of a key. The number of an audit entry fits a `bigint`.
fn key_columns(key: &Key) -> (i64, Cow<'_, str>, &str) {
    let columns = key.columns();
    match key {
        Key::Entry(number) => (columns.kind, column(*number).to_string().into(), columns.second),
        _ => (columns.kind, columns.first, columns.second),
    }
}

/// The record whose columns begin at `begin`; `None` if there is none.
fn record(row: &Row, begin: usize) -> Result<Option<Record>, StoreError> {
    let Some(kind) = get::<Option<i64>>(row, begin)? else { return Ok(None) };
    let key = Key::from_columns(kind, get(row, begin + 1)?, get(row, begin + 2)?)?;
    let version = version(row, begin + 4)?;
    Record::from_text(key, get(row, begin + 3)?, version, get(row, begin + 5)?).map(Some)
}

fn version(row: &Row, place: usize) -> Result<Version, StoreError> {
    Ok(Version::new(number(get(row, place)?, "a version")?))
}

fn missing_namespace(namespace: i64) -> StoreError {
    StoreError::Corrupt { what: format!("the namespace {namespace} does not exist") }
}
