//! Records in one table. A change and its audit entries are written in one transaction.

use rusqlite::types::Value as Column;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};
use tidegate_core::limit::policy::Version;
use tidegate_core::time::Stamp;

use super::errors::CallError;
use super::transaction::Transaction;
use crate::record::{Key, Of, Record, RecordWrite, Records, Scan, Value};
use crate::tables::{column, number};

const COLUMNS: &str = "kind, first, second, link, version, body";

pub(super) fn read(
    connection: &Connection,
    namespace: i64,
    keys: &[Key],
    at: Stamp,
) -> Result<Records, CallError> {
    let (version, entries) = version(connection, namespace)?;
    let mut read = connection.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM records WHERE namespace = ?1 AND kind = ?2 AND first = ?3 AND second = ?4"
    ))?;
    let mut records = Vec::with_capacity(keys.len());
    for key in keys {
        let key = key.columns();
        let mut rows = read.query((namespace, key.kind, key.first, key.second))?;
        records.push(rows.next()?.map(record).transpose()?);
    }
    Ok(Records { version, entries, at, records })
}

/// The namespace's version, and how many audit entries were written.
pub(super) fn version(connection: &Connection, namespace: i64) -> Result<(Version, u64), CallError> {
    let mut read = connection.prepare_cached("SELECT version, audited FROM namespaces WHERE id = ?1")?;
    let (version, entries): (i64, i64) = read.query_row([namespace], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let version = Version::new(number(version, "the version of a namespace")?);
    Ok((version, number(entries, "the count of audit entries")?))
}

pub(super) fn scan(connection: &Connection, namespace: i64, scan: &Scan) -> Result<Vec<Record>, CallError> {
    let (sql, values) = statement(namespace, scan);
    let mut found = connection.prepare_cached(&sql)?;
    let mut rows = found.query(params_from_iter(values))?;
    let mut records = Vec::new();
    while let Some(row) = rows.next()? {
        records.push(record(row)?);
    }
    Ok(records)
}

/// The statement of a scan and its parameters. Each seeks to its first row, and reads no row that it does not
/// return.
fn statement(namespace: i64, scan: &Scan) -> (String, Vec<Column>) {
    let (first, last) = scan.kind.columns();
    let mut values: Vec<Column> = vec![namespace.into(), last.into()];
    let after = scan.after.as_ref().map(Key::columns);
    // Only policies have several kinds, and of these only the last has a link.
    let (index, mut condition, order) = match &scan.of {
        Of::All => ("", "kind <= ?".to_owned(), "kind, first, second"),
        Of::Link(link) => {
            values.push(link.clone().into());
            ("INDEXED BY records_by_link", "kind = ? AND link = ?".to_owned(), "first, second")
        }
        Of::Entity(entity) => {
            values.push(entity.to_string().into());
            ("", "kind = ? AND first = ?".to_owned(), "second")
        }
    };
    match (&scan.of, after) {
        (Of::All, None) => {
            condition += " AND kind >= ?";
            values.push(first.into());
        }
        (Of::All, Some(after)) => {
            condition += " AND (kind, first, second) > (?, ?, ?)";
            values.extend([
                after.kind.into(),
                after.first.into_owned().into(),
                after.second.to_owned().into(),
            ]);
        }
        (Of::Link(_), Some(after)) => {
            condition += " AND (first, second) > (?, ?)";
            values.extend([after.first.into_owned().into(), after.second.to_owned().into()]);
        }
        (Of::Entity(_), Some(after)) => {
            condition += " AND second > ?";
            values.push(after.second.to_owned().into());
        }
        (Of::Link(_) | Of::Entity(_), None) => {}
    }
    values.push(column(scan.max as u64).into());
    let sql = format!(
        "SELECT {COLUMNS} FROM records {index} WHERE namespace = ? AND {condition} ORDER BY {order} LIMIT ?"
    );
    (sql, values)
}

pub(super) fn write(
    transaction: &mut Transaction<'_>,
    (namespace, write): &(i64, RecordWrite),
) -> Result<bool, CallError> {
    let connection = transaction.connection;
    let mut raise = connection
        .prepare_cached("UPDATE namespaces SET version = ?3, audited = ?4 WHERE id = ?1 AND version = ?2")?;
    let (seen, version) = (column(write.seen.number()), column(write.version().number()));
    if raise.execute((namespace, seen, version, column(write.entries_after())))? == 0 {
        return Ok(false);
    }
    let mut put = connection.prepare_cached(
        "INSERT INTO records (namespace, kind, first, second, link, version, at, body)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
         ON CONFLICT DO UPDATE SET link = ?5, version = ?6, at = ?7, body = ?8",
    )?;
    let mut delete = connection.prepare_cached(
        "DELETE FROM records WHERE namespace = ?1 AND kind = ?2 AND first = ?3 AND second = ?4",
    )?;
    for change in &write.changes {
        let key = change.key.columns();
        if let Some(record) = &change.after {
            let at = match &record.value {
                Value::Entry(entry) => Some(column(entry.at.as_micros())),
                _ => None,
            };
            let (link, body) = (record.link(), record.body());
            put.execute((namespace, key.kind, key.first, key.second, link, version, at, body))?;
        } else {
            delete.execute((namespace, key.kind, key.first, key.second))?;
        }
    }
    Ok(true)
}

fn record(row: &Row<'_>) -> Result<Record, CallError> {
    let (kind, first, second): (i64, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
    let (link, version, body): (Option<String>, i64, String) = (row.get(3)?, row.get(4)?, row.get(5)?);
    let version = Version::new(number(version, "the version of a record")?);
    let key = Key::from_columns(kind, &first, &second)?;
    Ok(Record::from_text(key, link.as_deref(), version, &body)?)
}

/// The id of a namespace, which is created if it does not exist.
pub(super) fn namespace(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    let mut find = connection.prepare_cached("SELECT id FROM namespaces WHERE name = ?1")?;
    if let Some(id) = find.query_row([name], |row| row.get(0)).optional()? {
        return Ok(id);
    }
    // Another process may create it concurrently.
    let make = "INSERT INTO namespaces (name) VALUES (?1) ON CONFLICT DO NOTHING";
    connection.prepare_cached(make)?.execute([name])?;
    find.query_row([name], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::name::EntityId;

    use super::*;
    use crate::record::Kind;
    use crate::sqlite::schema;

    /// Without statistics, as in production files: no scan reads more rows than it returns.
    #[test]
    fn every_scan_seeks_to_its_first_row() {
        let mut connection = Connection::open_in_memory().unwrap();
        schema::prepare(&mut connection, "plans.db").unwrap();
        let entity = EntityId::new("acme").unwrap();
        let after = [None, Some(Key::Entry(7)), Some(Key::Entity(entity.clone()))];
        for kind in [Kind::Policy, Kind::Entity, Kind::Token, Kind::Entry] {
            for of in [Of::All, Of::Link("x".to_owned()), Of::Entity(entity.clone())] {
                for after in &after {
                    let scan = Scan { kind, of: of.clone(), after: after.clone(), max: 10 };
                    let (sql, values) = statement(1, &scan);
                    let mut plan = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
                    let steps = plan.query_map(params_from_iter(values), |row| row.get::<_, String>(3));
                    let steps: Vec<String> = steps.unwrap().collect::<Result<_, _>>().unwrap();
                    let [step] = &steps[..] else { panic!("{scan:?}: {steps:?}") };
                    let seek = match (&of, after) {
                        (Of::All, None) => "(namespace=? AND kind>? AND kind<?)",
                        (Of::All, Some(_)) => "(namespace=? AND (kind,first,second)>(?,?,?) AND kind<?)",
                        (Of::Link(_), None) => "(namespace=? AND kind=? AND link=?)",
                        (Of::Link(_), Some(_)) => {
                            "(namespace=? AND kind=? AND link=? AND (first,second)>(?,?))"
                        }
                        (Of::Entity(_), None) => "(namespace=? AND kind=? AND first=?)",
                        (Of::Entity(_), Some(_)) => "(namespace=? AND kind=? AND first=? AND second>?)",
                    };
                    assert!(step.ends_with(seek), "{scan:?}: {step}");
                }
            }
        }
    }
}
