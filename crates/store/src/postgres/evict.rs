//! Eviction of idle subjects, which are the same as new ones.
//!
//! A subject is evicted if all of its limits are full, it has no usage, no open lease drew from it, and its
//! rules are older than the time for which ended leases are remembered, so that no caller brings older ones.
//! Sweeps cycle through all limits by key, and scan more of them than were added since.

use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_core::limit::lease::REMEMBERED;
use tokio::sync::Mutex;
use tokio_postgres::Row;

use super::Postgres;
use super::batch::ROWS_MAX;
use super::errors::get;
use crate::error::StoreError;
use crate::tables::column;

/// Limits per statement: more than a subject has.
const PAGE: usize = 500;
const _: () = assert!(PAGE > 2 * ROWS_MAX as usize);

/// The position of a process in its search for idle subjects.
#[derive(Default)]
pub(super) struct EvictionCursor {
    /// The last subject that was scanned.
    after: Mutex<(String, String)>,
    /// Limits that may have been added since.
    added: AtomicUsize,
}

impl EvictionCursor {
    pub(super) fn add(&self, limits: usize) {
        self.added.fetch_add(limits, Ordering::Relaxed);
    }
}

/// Limits of idle subjects, as they were read.
#[derive(Default)]
struct IdleLimits {
    entities: Vec<String>,
    resources: Vec<String>,
    lines: Vec<String>,
    /// The time of the last change, `kept_until`, and the level: the time may not differ between changes.
    seen: [Vec<i64>; 5],
}

impl Postgres {
    /// Evicts some idle subjects.
    pub(super) async fn evict(&self) -> Result<(), StoreError> {
        let cursor = self.steps.eviction_cursor();
        // Another sweep is running.
        let Ok(mut after) = cursor.after.try_lock() else { return Ok(()) };
        let pages = 1 + (2 * cursor.added.swap(0, Ordering::Relaxed)).div_ceil(PAGE);
        for _ in 0..pages {
            let rows = self.page_of_limits(&after).await?;
            let is_last = rows.len() < PAGE;
            // The last subject may have more limits after the page.
            let last = rows.last().filter(|_| !is_last).map(subject).transpose()?;
            let mut idle = IdleLimits::default();
            for row in &rows {
                let subject = subject(row)?;
                if last.as_ref() == Some(&subject) {
                    break;
                }
                if get(row, 3)? {
                    idle.push(subject, row)?;
                }
                *after = self::subject(row)?;
            }
            if !idle.lines.is_empty() {
                self.evict_unchanged(&idle).await?;
            }
            if is_last {
                *after = Default::default();
                break;
            }
        }
        Ok(())
    }

    /// A page of limits after a subject, by key, each with whether its subject is idle.
    async fn page_of_limits(&self, (entity, resource): &(String, String)) -> Result<Vec<Row>, StoreError> {
        let statement = "
            WITH time AS MATERIALIZED (SELECT @.now($2::bigint) AS now),
            bounds AS MATERIALIZED (
                SELECT now, coalesce(
                    (SELECT min(version) - 1 FROM @.audit WHERE namespace = $1 AND at > now - $5),
                    (SELECT version FROM @.namespaces WHERE id = $1)) AS settled, coalesce(
                    (SELECT min(deadline) FROM @.leases WHERE namespace = $1 AND how IS NULL),
                    9223372036854775807) AS held
                FROM time
            ), page AS MATERIALIZED (
                SELECT entity, resource, line, full_at, part, version, at, kept_until, consumed FROM @.meters
                WHERE namespace = $1 AND (entity, resource) > ($3, $4) ORDER BY entity, resource, line LIMIT $6
            ), idle AS MATERIALIZED (
                SELECT entity, resource FROM page, bounds GROUP BY entity, resource
                HAVING bool_and((full_at < now OR full_at = now AND part = 0) AND version <= settled AND kept_until < held)
            )
            SELECT entity, resource, line, EXISTS (
                    SELECT 1 FROM idle WHERE idle.entity = page.entity AND idle.resource = page.resource
                ) AND NOT EXISTS (
                    SELECT 1 FROM @.usage u
                    WHERE u.namespace = $1 AND u.entity = page.entity AND u.resource = page.resource
                ), at, kept_until, full_at, part, consumed
            FROM page ORDER BY entity, resource, line";
        let (remembered, page) = (column(REMEMBERED.as_secs() * 1_000_000), column(PAGE as u64));
        let wall = self.inner.wall();
        self.inner.query(statement, &[&self.namespace, &wall, entity, resource, &remembered, &page]).await
    }

    /// Deletes limits that have not changed since. Locked ones are skipped.
    async fn evict_unchanged(&self, idle: &IdleLimits) -> Result<(), StoreError> {
        let IdleLimits {
            entities,
            resources,
            lines,
            seen: [changed_at, kept_until, full_at, part, consumed],
        } = idle;
        let statement = "
            DELETE FROM @.meters WHERE ctid = ANY (ARRAY(
                SELECT m.ctid FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[], $7::bigint[],
                        $8::bigint[], $9::bigint[])
                    AS seen (entity, resource, line, at, kept_until, full_at, part, consumed)
                JOIN @.meters m ON m.namespace = $1 AND m.entity = seen.entity AND m.resource = seen.resource
                    AND m.line = seen.line AND m.at = seen.at AND m.kept_until = seen.kept_until
                    AND m.full_at = seen.full_at AND m.part = seen.part AND m.consumed = seen.consumed
                ORDER BY m.entity, m.resource, m.line FOR UPDATE OF m SKIP LOCKED))";
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 9] =
            [&self.namespace, entities, resources, lines, changed_at, kept_until, full_at, part, consumed];
        self.inner.query(statement, &parameters).await.map(drop)
    }
}

impl IdleLimits {
    fn push(&mut self, (entity, resource): (String, String), row: &Row) -> Result<(), StoreError> {
        self.entities.push(entity);
        self.resources.push(resource);
        self.lines.push(get(row, 2)?);
        for (column, place) in self.seen.iter_mut().zip(4..) {
            column.push(get(row, place)?);
        }
        Ok(())
    }
}

fn subject(row: &Row) -> Result<(String, String), StoreError> {
    Ok((get(row, 0)?, get(row, 1)?))
}
