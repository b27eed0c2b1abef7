//! Housekeeping: ends leases past their deadline, deletes ended ones, and deletes usage and audit past their
//! retention.
//!
//! It runs in small statements, so that draws do not wait for it, and in every process for the leases of all.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::time::Stamp;
use tokio::time::sleep;

use super::batch::lease_id;
use super::call::{Call, Status};
use super::errors::{first, get};
use super::{Inner, Postgres};
use crate::codec::levels_from_text;
use crate::error::StoreError;
use crate::ledger::Prune;
use crate::retention::before;
use crate::store::SweepReport;
use crate::tables::{column, ended_by, number, stamp};

/// The most leases that are ended at a time before a read.
const DUE_BATCH: usize = 1_000;
/// The most leases that a background sweep ends, and the most sweeps in a row while each reaches that limit.
const BACKGROUND_SWEEP_MAX: usize = 500;
const SWEEPS_MAX: usize = 20;
/// Rows per deleting statement: the longest that a caller waits for.
const BATCH: i64 = 1_000;
/// The most statements of each kind in a sweep, while each deletes a full batch. That is more than a process
/// can add between two background sweeps, so that tables do not grow with the rate of calls.
const BATCHES_MAX: u64 = 50;
/// The interval of background sweeps, and how many of them an idle store skips.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(1);
const IDLE_INTERVALS: u32 = 30;

/// Open leases past their deadline, the time, and the reading of the wall clock.
struct DueLeases {
    now: Stamp,
    wall: Stamp,
    leases: Vec<(Vec<u8>, Option<String>)>,
}

impl Postgres {
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<SweepReport, StoreError> {
        let due = self.due(max).await?;
        let mut swept = self.expire(&due).await?;
        swept.forgotten = self.delete_ended_leases(due.now).await?;
        self.inner.apply_retention(&due).await?;
        self.evict().await?;
        Ok(swept)
    }

    /// Ends all leases past their deadline, so that a following read includes them.
    pub(super) async fn sweep_all_due(&self) -> Result<(), StoreError> {
        let mut before = None;
        loop {
            let due = self.due(DUE_BATCH).await?;
            let first = due.leases.first().map(|(id, _)| id.clone());
            // The same lease again means that it is not due by the server's time under lock.
            if first.is_none() || first == before {
                return Ok(());
            }
            before = first;
            self.expire(&due).await?;
        }
    }

    async fn due(&self, max: usize) -> Result<DueLeases, StoreError> {
        let statement = "
            WITH time AS MATERIALIZED (SELECT * FROM @.look($2::bigint))
            SELECT time.now, lease.id, lease.levels, time.now - time.ahead FROM time LEFT JOIN LATERAL (
                SELECT id, levels FROM @.leases
                WHERE namespace = $1 AND how IS NULL AND deadline <= time.now ORDER BY deadline LIMIT $3
            ) AS lease ON true";
        let max = column(max as u64);
        let rows = self.inner.query(statement, &[&self.namespace, &self.inner.wall(), &max]).await?;
        let now = stamp(first(&rows)?)?;
        let wall = rows.first().map_or(Ok(now), |row| stamp(get(row, 3)?))?;
        let mut leases = Vec::with_capacity(rows.len());
        for row in &rows {
            // Without leases there is one row, with the time.
            if let Some(id) = get(row, 1)? {
                leases.push((id, get(row, 2)?));
            }
        }
        Ok(DueLeases { now, wall, leases })
    }

    /// Ends these leases, unless another process has.
    async fn expire(&self, due: &DueLeases) -> Result<SweepReport, StoreError> {
        let (mut answers, mut swept) = (Vec::new(), SweepReport::default());
        let now = column(due.now.as_micros());
        for (id, levels) in &due.leases {
            let levels = levels.as_deref().map(levels_from_text);
            match (lease_id(id), levels) {
                (Some(lease), Some(Ok(levels))) => {
                    answers.push((id, self.steps.submit(Call::expire(lease, &Arc::new(levels)))?));
                }
                // It cannot be decoded, which reading it reports. It must not block the others.
                _ => self.set_aside(id, now).await?,
            }
        }
        for (id, answer) in answers {
            match answer.await.unwrap_or_else(|_| Err(StoreError::unavailable("the runtime has shut down"))) {
                Ok(answer) => match (answer.status, answer.extra) {
                    (Status::Done, 0) => swept.settled += 1,
                    (Status::Done, _) => swept.returned += 1,
                    // It has ended, was renewed, or is not due by the time under lock.
                    (Status::NoLease, _) => {}
                    _ => self.set_aside(id, now).await?,
                },
                Err(StoreError::Corrupt { .. } | StoreError::Invalid { .. }) => {
                    self.set_aside(id, now).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(swept)
    }

    /// Removes the deadline of a lease that cannot be decoded, so that it is not due again and an operator
    /// can inspect it. A lease that was ended or renewed since is not changed.
    async fn set_aside(&self, id: &[u8], now: i64) -> Result<(), StoreError> {
        let statement = "
            UPDATE @.leases SET deadline = $3 WHERE namespace = $1 AND id = $2 AND how IS NULL AND deadline <= $4";
        self.inner.query(statement, &[&self.namespace, &id, &i64::MAX, &now]).await.map(drop)
    }

    /// Deletes leases that ended long ago.
    async fn delete_ended_leases(&self, now: Stamp) -> Result<u64, StoreError> {
        let Some(before) = before(now, Some(REMEMBERED)) else { return Ok(0) };
        let statement = "
            DELETE FROM @.leases WHERE namespace = $1 AND id = ANY (ARRAY(
                SELECT id FROM @.leases WHERE namespace = $1 AND how IS NOT NULL AND ended_at < $2
                ORDER BY ended_at LIMIT $3 FOR UPDATE SKIP LOCKED))";
        self.inner.delete(statement, &[&self.namespace, &column(before.as_micros()), &BATCH]).await
    }

    /// Deletes up to `max` of the oldest lines of the ledger.
    pub(super) async fn prune_up_to(&self, prune: &Prune, max: usize) -> Result<u64, StoreError> {
        // Expired leases are settled first, so that their usage is pruned too.
        self.sweep_all_due().await?;
        let max = column(max as u64);
        match prune {
            Prune::Usage { window, before } => {
                let statement = "
                    WITH old AS (
                        SELECT entity, resource, name, start FROM @.usage
                        WHERE namespace = $1 AND span = $2 AND start < $3
                        ORDER BY start, entity, resource, name LIMIT $4 FOR UPDATE
                    )
                    DELETE FROM @.usage u USING old WHERE u.namespace = $1 AND u.span = $2 AND u.entity = old.entity
                        AND u.resource = old.resource AND u.name = old.name AND u.start = old.start";
                let (span, start) = (*window as i16, ended_by(*window, *before));
                self.inner.delete_once(statement, &[&self.namespace, &span, &start, &max]).await
            }
            Prune::Audit { through } => {
                let statement = "
                    DELETE FROM @.audit WHERE namespace = $1 AND number IN (
                        SELECT number FROM @.audit WHERE namespace = $1 AND version <= $2 ORDER BY number LIMIT $3)";
                self.inner.delete_once(statement, &[&self.namespace, &column(through.number()), &max]).await
            }
        }
    }

    /// Sweeps until nothing is left, within bounds. Returns whether something may be left. An unavailable
    /// server is cleaned up later.
    async fn clean_up(&self) -> bool {
        for _ in 0..SWEEPS_MAX {
            let Ok(swept) = self.sweep_up_to(BACKGROUND_SWEEP_MAX).await else { return false };
            if swept.settled + swept.returned < BACKGROUND_SWEEP_MAX as u64 {
                return swept.forgotten >= BATCHES_MAX * BATCH.unsigned_abs();
            }
        }
        true
    }

    /// Cleans up the namespace at intervals while the store is in use.
    pub(super) fn clean_up_in_background(&self) {
        if self.inner.clock.is_some() {
            return;
        }
        let (inner, steps, guard) =
            (Arc::downgrade(&self.inner), Arc::downgrade(&self.steps), Arc::downgrade(&self.guard));
        let (namespace, changes) = (self.namespace, self.changes.clone());
        self.inner.handle.spawn(async move {
            let (mut calls, mut idle) = (0, 0);
            loop {
                sleep(CLEANUP_INTERVAL).await;
                let (Some(inner), Some(steps), Some(guard)) =
                    (inner.upgrade(), steps.upgrade(), guard.upgrade())
                else {
                    return;
                };
                if inner.check_open().is_err() {
                    return;
                }
                let store = Self { inner, namespace, steps, changes: changes.clone(), guard };
                let is_idle = std::mem::replace(&mut calls, store.stats().calls) == store.stats().calls;
                idle = if is_idle { (idle + 1) % IDLE_INTERVALS } else { 0 };
                if idle <= 1 && store.clean_up().await {
                    idle = 0;
                }
            }
        });
    }
}

impl Inner {
    /// Deletes usage and audit past their retention, in all namespaces.
    async fn apply_retention(&self, due: &DueLeases) -> Result<(), StoreError> {
        for (window, before) in self.retention.usage_before(due.wall) {
            let statement = "
                DELETE FROM @.usage WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM @.usage WHERE span = $1 AND start < $2 ORDER BY start LIMIT $3
                    FOR UPDATE SKIP LOCKED))";
            self.delete(statement, &[&(window as i16), &ended_by(window, before), &BATCH]).await?;
        }
        if let Some(before) = self.retention.audit_before(due.now) {
            let statement = "
                DELETE FROM @.audit WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM @.audit WHERE at < $1 ORDER BY at LIMIT $2 FOR UPDATE SKIP LOCKED))";
            self.delete(statement, &[&column(before.as_micros()), &BATCH]).await?;
        }
        Ok(())
    }

    /// Deletes batches of [`BATCH`] rows until one is not full, at most [`BATCHES_MAX`]. Returns the number
    /// of rows.
    async fn delete(
        &self,
        statement: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<u64, StoreError> {
        let mut deleted = 0;
        for _ in 0..BATCHES_MAX {
            let batch = self.delete_once(statement, parameters).await?;
            deleted += batch;
            if batch < BATCH.unsigned_abs() {
                break;
            }
        }
        Ok(deleted)
    }

    /// Runs a `DELETE`, and returns the number of rows.
    async fn delete_once(
        &self,
        statement: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<u64, StoreError> {
        let statement = format!("WITH gone AS ({statement} RETURNING 1) SELECT count(*) FROM gone");
        let rows = self.query(&statement, parameters).await?;
        number(first(&rows)?, "a count")
    }
}
