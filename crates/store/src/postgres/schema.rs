//! The tables and functions, and their migrations.
//!
//! A store is one schema with a table of versions. Opening it, or an explicit upgrade, migrates an older one
//! in one transaction, under an advisory lock of its name, so that concurrent migrations run in turn. A newer
//! schema is refused.

use tokio_postgres::Client;

use super::errors::{get, server_error};
use super::sql::Sql;
use crate::error::StoreError;
use crate::lifecycle::other_version;

/// Migrations from each version to the next. Released ones never change.
const MIGRATIONS: [&str; 6] = [
    include_str!("sql/tables.sql"),
    // Adds the time of each migration.
    "ALTER TABLE @.versions ADD COLUMN at timestamptz; ALTER TABLE @.versions ALTER COLUMN at SET DEFAULT now()",
    // No lease that drew from a limit is open after `kept_until`. Existing limits are kept for all open
    // leases. `tick` returns another type.
    "
    DROP FUNCTION IF EXISTS @.tick(bigint, bigint);
    DO $$ BEGIN
        EXECUTE 'ALTER TABLE @.meters ADD COLUMN kept_until bigint NOT NULL DEFAULT '
            || (SELECT coalesce(max(deadline), 0) FROM @.leases WHERE how IS NULL AND deadline < 9223372036854775807);
    END $$;
    ALTER TABLE @.meters ALTER COLUMN kept_until SET DEFAULT 0",
    // Adds the shortfalls of leases, a number per line. `steps` takes one more parameter.
    "
    ALTER TABLE @.leases ADD COLUMN shorts bigint[];
    DO $$ DECLARE old regprocedure; BEGIN
        FOR old IN SELECT oid FROM pg_proc WHERE proname = 'steps' AND pronamespace = '@'::regnamespace LOOP
            EXECUTE 'DROP FUNCTION ' || old;
        END LOOP;
    END $$",
    // `steps` repairs buckets; the tables stay.
    "SELECT 1",
    // `steps` counts usage by the minute too.
    "SELECT 1",
];

/// The functions of the current version. Every upgrade replaces them.
const FUNCTIONS: &str = include_str!("sql/steps.sql");

/// The current version.
pub(super) const CURRENT: i64 = 6;

/// "tide" in ASCII: the first half of the keys of our advisory locks, which separates them from other
/// programs'.
const LOCKS: i32 = 0x7469_6465;

/// The time limit of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MigrationTimeout {
    /// The timeout of any call: for opening a store.
    Default,
    /// None, after a lock timeout of a minute: for an explicit upgrade.
    Unlimited,
}

/// Migrates the schema to the current version. Returns the version that it had.
pub(super) async fn prepare(
    client: &mut Client,
    sql: &Sql,
    place: &str,
    timeout: MigrationTimeout,
) -> Result<i64, StoreError> {
    if version(client, sql, place).await? == CURRENT {
        return Ok(CURRENT);
    }
    let of_place = |error| server_error(place, error);
    let transaction = client.transaction().await.map_err(of_place)?;
    if timeout == MigrationTimeout::Unlimited {
        let unlimited = "SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = '60s'";
        transaction.batch_execute(unlimited).await.map_err(of_place)?;
    }
    let lock = "SELECT pg_advisory_xact_lock($1, hashtext($2))";
    transaction.execute(lock, &[&LOCKS, &sql.schema()]).await.map_err(of_place)?;
    // Read again under the lock: another process may have migrated it.
    let from = version_within(&transaction, sql, place).await?;
    let mut version = from;
    if version == 0 {
        let make = "CREATE SCHEMA IF NOT EXISTS @; CREATE TABLE @.versions (version bigint NOT NULL)";
        transaction.batch_execute(&sql.text(make)).await.map_err(of_place)?;
    }
    for migration in MIGRATIONS.iter().skip(usize::try_from(version).unwrap_or(usize::MAX)) {
        transaction.batch_execute(&sql.text(migration)).await.map_err(of_place)?;
        version += 1;
        transaction
            .batch_execute(&sql.text(&format!("INSERT INTO @.versions (version) VALUES ({version})")))
            .await
            .map_err(of_place)?;
    }
    if from < CURRENT {
        transaction.batch_execute(&sql.text(FUNCTIONS)).await.map_err(of_place)?;
    }
    transaction.commit().await.map_err(of_place)?;
    Ok(from)
}

/// The version of a schema; zero if there is none.
pub(super) async fn version(client: &mut Client, sql: &Sql, place: &str) -> Result<i64, StoreError> {
    let reading = client.build_transaction().read_only(true).start().await;
    version_within(&reading.map_err(|error| server_error(place, error))?, sql, place).await
}

pub(super) async fn version_within(
    client: &tokio_postgres::Transaction<'_>,
    sql: &Sql,
    place: &str,
) -> Result<i64, StoreError> {
    let of_place = |error| server_error(place, error);
    let schema = sql.schema();
    // Other programs have tables of this name too. These four together identify ours; one transaction creates
    // them.
    let tables = "SELECT count(*), count(*) FILTER (WHERE c.relkind = 'r'
                      AND c.relname IN ('versions', 'namespaces', 'leases', 'meters'))
                  FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid WHERE n.nspname = $1";
    let row = &client.query_one(tables, &[&schema]).await.map_err(of_place)?;
    match (get::<i64>(row, 0)?, get::<i64>(row, 1)?) {
        (0, _) => return Ok(0),
        (_, 4) => {}
        _ => {
            let what = format!("the schema `{schema}` at {place} has tables of another program");
            return Err(StoreError::Invalid { what });
        }
    }
    let newest = "SELECT coalesce(max(version), 0) FROM @.versions";
    let version: i64 = get(&client.query_one(&sql.text(newest), &[]).await.map_err(of_place)?, 0)?;
    if version > CURRENT {
        let place = format!("`{schema}` at {place}");
        return Err(other_version(&place, version.unsigned_abs(), CURRENT.unsigned_abs()));
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_has_its_migration() {
        assert_eq!(usize::try_from(CURRENT), Ok(MIGRATIONS.len()));
    }
}
