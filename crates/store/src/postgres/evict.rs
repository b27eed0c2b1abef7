//! Eviction of idle subjects, which are the same as new ones.
//!
//! A subject is evicted if all of its limits are full, it has no usage, no open lease drew from it, and its
//! rules are older than the time for which ended leases are remembered, so that no caller brings older ones.
//! Sweeps cycle through all limits by key, and scan more of them than were added since.

use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_core::limit::lease::REMEMBERED;
use tokio::sync::Mutex;

use super::Postgres;
use super::errors::get;
use crate::error::StoreError;
use crate::tables::column;

/// Subjects per statement.
const PAGE: usize = 500;

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

impl Postgres {
    /// Evicts some idle subjects.
    pub(super) async fn evict(&self) -> Result<(), StoreError> {
        let cursor = self.steps.eviction_cursor();
        // Another sweep is running.
        let Ok(mut after) = cursor.after.try_lock() else { return Ok(()) };
        let pages = 1 + (2 * cursor.added.swap(0, Ordering::Relaxed)).div_ceil(PAGE);
        for _ in 0..pages {
            let last = self.evict_page(&after).await?;
            let is_last = last.is_none();
            *after = last.unwrap_or_default();
            if is_last {
                break;
            }
        }
        Ok(())
    }

    /// Evicts the idle ones of the next subjects by name, and returns the last of these; `None` at the end.
    ///
    /// Limits that are locked or have changed since the statement began are skipped: they are found by the place
    /// of the row that it sees.
    async fn evict_page(&self, after: &(String, String)) -> Result<Option<(String, String)>, StoreError> {
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
                SELECT DISTINCT entity, resource FROM @.meters
                WHERE namespace = $1 AND (entity, resource) > ($3, $4) ORDER BY entity, resource LIMIT $6
            ), idle AS MATERIALIZED (
                SELECT entity, resource FROM bounds, page JOIN @.meters m USING (entity, resource)
                WHERE m.namespace = $1 AND NOT EXISTS (
                    SELECT 1 FROM @.usage u
                    WHERE u.namespace = $1 AND u.entity = page.entity AND u.resource = page.resource)
                GROUP BY entity, resource
                HAVING bool_and((full_at < now OR full_at = now AND part = 0) AND m.version <= settled AND kept_until < held)
            ), evicted AS (
                DELETE FROM @.meters WHERE ctid = ANY (ARRAY(
                    SELECT m.ctid FROM idle JOIN @.meters m USING (entity, resource) WHERE m.namespace = $1
                    ORDER BY entity, resource, line FOR UPDATE OF m SKIP LOCKED))
            )
            SELECT entity, resource FROM page ORDER BY entity, resource OFFSET $6 - 1";
        let (entity, resource) = after;
        let (remembered, page) = (column(REMEMBERED.as_secs() * 1_000_000), column(PAGE as u64));
        let wall = self.inner.wall();
        let rows = self
            .inner
            .query(statement, &[&self.namespace, &wall, entity, resource, &remembered, &page])
            .await?;
        rows.first().map(|row| Ok((get(row, 0)?, get(row, 1)?))).transpose()
    }
}
