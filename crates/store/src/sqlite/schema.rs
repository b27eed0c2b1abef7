//! The tables, and their migrations.
//!
//! The application id marks a file as ours, and the user version is its schema version. Opening an older
//! file, or an explicit upgrade, migrates it in one transaction; a newer one is refused.

use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use super::errors::{CallError, file_error};
use crate::error::StoreError;
use crate::lifecycle::other_version;

/// "tide" in ASCII.
const APPLICATION: i64 = 0x7469_6465;

/// Migrations from each version to the next. Released ones never change.
const MIGRATIONS: [&str; 5] = [
    "
    -- The latest time that anything was decided at, and how far the clock was set back by then.
    CREATE TABLE clock (
        id INTEGER PRIMARY KEY CHECK (id = 1), latest INTEGER NOT NULL, ahead INTEGER NOT NULL
    ) STRICT;
    INSERT INTO clock VALUES (1, 0, 0);
    -- `version` counts administrative changes, `audited` the entries they made.
    CREATE TABLE namespaces (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
        version INTEGER NOT NULL DEFAULT 0, audited INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE subjects (
        id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, entity TEXT NOT NULL, resource TEXT NOT NULL,
        UNIQUE (namespace, entity, resource)
    ) STRICT;
    CREATE UNIQUE INDEX subjects_by_resource ON subjects (namespace, resource, entity);
    -- A limit: its rule, and the time at which it is full, in microseconds and parts of `amount`.
    CREATE TABLE meters (
        subject INTEGER NOT NULL, row TEXT NOT NULL,
        amount INTEGER NOT NULL, period INTEGER NOT NULL, burst INTEGER NOT NULL,
        full_at INTEGER NOT NULL, part INTEGER NOT NULL,
        version INTEGER NOT NULL, consumed INTEGER NOT NULL,
        PRIMARY KEY (subject, row)
    ) STRICT, WITHOUT ROWID;
    -- A lease is open until `how` tells how it ended; then `step`, `ended_at` and `digest` are what is remembered.
    CREATE TABLE leases (
        namespace INTEGER NOT NULL, id BLOB NOT NULL, levels TEXT, held TEXT,
        step INTEGER NOT NULL, drawn_at INTEGER NOT NULL, stepped_at INTEGER NOT NULL,
        deadline INTEGER NOT NULL, on_expiry INTEGER NOT NULL,
        how INTEGER, ended_at INTEGER, digest INTEGER,
        PRIMARY KEY (namespace, id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX leases_due ON leases (namespace, deadline) WHERE how IS NULL;
    CREATE INDEX leases_ended ON leases (namespace, ended_at) WHERE how IS NOT NULL;
    CREATE TABLE usage (
        subject INTEGER NOT NULL, name TEXT NOT NULL, span INTEGER NOT NULL, start INTEGER NOT NULL,
        units INTEGER NOT NULL, own INTEGER NOT NULL, leases INTEGER NOT NULL,
        PRIMARY KEY (subject, name, span, start)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE entities (
        namespace INTEGER NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, parent TEXT, body TEXT NOT NULL,
        PRIMARY KEY (namespace, id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX entities_by_parent ON entities (namespace, parent, id) WHERE parent IS NOT NULL;
    -- `kind` is 0 for the system's, 1 for a resource's, 2 for an entity's, 3 for that of an entity for a resource.
    CREATE TABLE policies (
        namespace INTEGER NOT NULL, kind INTEGER NOT NULL, entity TEXT NOT NULL, resource TEXT NOT NULL,
        version INTEGER NOT NULL, body TEXT NOT NULL,
        PRIMARY KEY (namespace, kind, entity, resource)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX policies_custom ON policies (namespace, resource, entity) WHERE kind = 3;
    CREATE TABLE audit (
        namespace INTEGER NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL, at INTEGER NOT NULL,
        actor TEXT NOT NULL, filed TEXT NOT NULL, change TEXT NOT NULL,
        PRIMARY KEY (namespace, number)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX audit_filed ON audit (namespace, filed, number);
    ",
    "
    -- What is too old to be kept is found without reading what is not.
    CREATE INDEX usage_by_age ON usage (span, start);
    CREATE INDEX audit_by_age ON audit (at);
    ",
    "
    -- `hash` is that of a token's secret; the body has no trace of it.
    CREATE TABLE tokens (
        namespace INTEGER NOT NULL, id TEXT NOT NULL, hash BLOB NOT NULL,
        version INTEGER NOT NULL, body TEXT NOT NULL,
        PRIMARY KEY (namespace, id)
    ) STRICT, WITHOUT ROWID;
    CREATE UNIQUE INDEX tokens_by_hash ON tokens (namespace, hash);
    ",
    "
    -- No lease that drew from a subject is open after its `kept_until`, or the `held_until` of leases that were there before.
    ALTER TABLE subjects ADD COLUMN kept_until INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE clock ADD COLUMN held_until INTEGER NOT NULL DEFAULT 0;
    UPDATE clock SET held_until = (
        SELECT COALESCE(MAX(deadline), 0) FROM leases WHERE how IS NULL AND deadline < 9223372036854775807);
    ",
    "
    -- Policies, entities, tokens and the audit are records of one table. `at` is when an audit entry was written.
    CREATE TABLE records (
        namespace INTEGER NOT NULL, kind INTEGER NOT NULL, first TEXT NOT NULL, second TEXT NOT NULL,
        link TEXT, version INTEGER NOT NULL, at INTEGER, body TEXT NOT NULL,
        PRIMARY KEY (namespace, kind, first, second)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX records_by_link ON records (namespace, kind, link, first, second) WHERE link IS NOT NULL;
    CREATE INDEX records_by_age ON records (at) WHERE at IS NOT NULL;
    INSERT INTO records SELECT namespace, kind, entity, resource, iif(kind = 3, resource, NULL), version, NULL, body
        FROM policies;
    INSERT INTO records SELECT namespace, 4, id, '', parent, version, NULL, body FROM entities;
    INSERT INTO records SELECT namespace, 5, id, '', lower(hex(hash)), version, NULL, body FROM tokens;
    INSERT INTO records SELECT namespace, 6, printf('%020d', number), '', filed, version, at,
        at || char(10) || actor || char(10) || change FROM audit;
    DROP TABLE policies; DROP TABLE entities; DROP TABLE tokens; DROP TABLE audit;
    ",
];

/// The first version that has the table of records.
pub(super) const RECORDS: u64 = 5;
/// The current version.
pub(super) const CURRENT: i64 = 5;

/// Checks that a file may be written to: one of another program or of a newer version is not touched.
pub(super) fn check(connection: &Connection, place: &str) -> Result<(), CallError> {
    // In one snapshot, because another process may be creating it.
    check_within(&*connection.unchecked_transaction()?, place)
}

/// The error for a file that a newer version has migrated.
pub(super) fn newer(connection: &Connection, place: &str) -> rusqlite::Result<Option<String>> {
    let (_, version) = read(connection)?;
    let what =
        || other_version(&format!("`{place}`"), version.unsigned_abs(), CURRENT.unsigned_abs()).to_string();
    Ok((version > CURRENT).then(what))
}

/// The version of a file, zero if it is empty, or why it may not be used. Read in one snapshot.
pub(super) fn version(connection: &Connection, place: &str) -> Result<u64, CallError> {
    let moment = connection.unchecked_transaction()?;
    check_within(&moment, place)?;
    Ok(read(&moment)?.1.unsigned_abs())
}

fn check_within(connection: &Connection, place: &str) -> Result<(), CallError> {
    let (application, version) = read(connection)?;
    let has_tables = "SELECT 1 FROM sqlite_schema LIMIT 1";
    let is_empty = connection.query_row(has_tables, [], |_| Ok(())).optional()?.is_none();
    if application != APPLICATION && !(is_empty && application == 0) {
        let what = format!("`{place}` is a database of another program: its application id is {application}");
        return Err(StoreError::Invalid { what }.into());
    }
    if version < 0 {
        let what = format!("`{place}` has schema version {version}, below zero");
        return Err(StoreError::Corrupt { what }.into());
    }
    match newer(connection, place)? {
        Some(what) => Err(StoreError::Invalid { what }.into()),
        None => Ok(()),
    }
}

/// Migrates a file to the current version. Returns the version that it had.
pub(super) fn prepare(connection: &mut Connection, place: &str) -> Result<u64, StoreError> {
    if read(connection).map_err(|error| file_error(place, &error))? == (APPLICATION, CURRENT) {
        return Ok(CURRENT.unsigned_abs());
    }
    migrate(connection, place).map_err(|error| error.into_error(place))
}

fn migrate(connection: &mut Connection, place: &str) -> Result<u64, CallError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Read again within the transaction: another process may have migrated it.
    check_within(&transaction, place)?;
    let (_, version) = read(&transaction)?;
    for migration in &MIGRATIONS[usize::try_from(version).unwrap_or(0)..] {
        transaction.execute_batch(migration)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    transaction.pragma_update(None, "user_version", CURRENT)?;
    transaction.commit()?;
    Ok(version.unsigned_abs())
}

fn read(connection: &Connection) -> rusqlite::Result<(i64, i64)> {
    let pragma = |name: &str| connection.pragma_query_value(None, name, |row| row.get(0));
    Ok((pragma("application_id")?, pragma("user_version")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_has_its_migration() {
        assert_eq!(usize::try_from(CURRENT), Ok(MIGRATIONS.len()));
    }

    #[test]
    fn older_file_is_migrated_with_its_data() {
        let mut connection = Connection::open_in_memory().unwrap();
        connection.execute_batch(MIGRATIONS[0]).unwrap();
        connection.pragma_update(None, "application_id", APPLICATION).unwrap();
        connection.pragma_update(None, "user_version", 1).unwrap();
        connection.execute("INSERT INTO usage VALUES (1, 'rpm', 0, 3600, 7, 7, 1)", []).unwrap();
        assert_eq!(prepare(&mut connection, "old.db").unwrap(), 1);
        assert_eq!(read(&connection).unwrap(), (APPLICATION, CURRENT));
        let units: i64 = connection
            .query_row("SELECT units FROM usage INDEXED BY usage_by_age WHERE span = 0", [], |row| row.get(0))
            .unwrap();
        assert_eq!(units, 7);
        assert_eq!(prepare(&mut connection, "old.db").unwrap(), CURRENT.unsigned_abs());
    }

    #[test]
    fn newer_file_is_refused_and_unchanged() {
        let mut connection = Connection::open_in_memory().unwrap();
        prepare(&mut connection, "new.db").unwrap();
        connection.pragma_update(None, "user_version", 9).unwrap();
        let error = prepare(&mut connection, "new.db").unwrap_err().to_string();
        assert_eq!(error, "`new.db` has schema version 9, newer than 5: use a newer tidegate");
        assert_eq!(read(&connection).unwrap(), (APPLICATION, 9));
    }

    #[test]
    fn foreign_database_is_refused() {
        let mut connection = Connection::open_in_memory().unwrap();
        connection.execute_batch("CREATE TABLE theirs (x)").unwrap();
        let error = prepare(&mut connection, "theirs.db").unwrap_err().to_string();
        assert_eq!(error, "`theirs.db` is a database of another program: its application id is 0");
    }
}
