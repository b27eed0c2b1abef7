//! What is past its time: leases that are due end, those that ended long ago are forgotten, and so is what is too old to be kept.
//!
//! All of it a little at a time, so that nobody who draws waits for it, and by whoever is there: the leases of others too.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::time::Stamp;
use tokio::time::sleep;

use super::batch::lease_id;
use super::call::{Call, Status};
use super::trouble::{first, get};
use super::{Inner, Postgres};
use crate::codec::levels_from_text;
use crate::error::StoreError;
use crate::ledger::Prune;
use crate::retention::before;
use crate::store::Swept;
use crate::tables::{column, ended_by, number, stamp};

/// Leases that are ended at a time before something is read.
const SWEPT_BEFORE_READING: usize = 1_000;
/// Leases that one sweep in the background ends, and how many sweeps it makes at a time while each ends that many.
const SWEPT_IN_PASSING: usize = 500;
const SWEEPS_MAX: usize = 20;
/// Rows that one statement deletes. Callers do not wait longer than for one of them.
const BATCH: i64 = 1_000;
/// Statements of each kind in one sweep, while each deletes a full batch. This is more than a process can add between two sweeps
/// in the background, so tables do not grow with the rate of calls.
const BATCHES_MAX: u64 = 50;
/// How often that is, and how often where nobody asks for anything.
const TIDIED_EVERY: Duration = Duration::from_secs(1);
const TIDIED_IDLE: u32 = 30;

/// Open leases that are due, what time it is, and what the clock reads.
struct Due {
    now: Stamp,
    wall: Stamp,
    leases: Vec<(Vec<u8>, Option<String>)>,
}

impl Postgres {
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<Swept, StoreError> {
        let due = self.due(max).await?;
        let mut swept = self.expire(&due).await?;
        swept.forgotten = self.forget(due.now).await?;
        self.inner.retain(&due).await?;
        self.evict().await?;
        Ok(swept)
    }

    /// Ends the leases that are past their deadline: whoever looks at balances and usage means theirs too.
    pub(super) async fn sweep_what_is_due(&self) -> Result<(), StoreError> {
        let mut before = None;
        loop {
            let due = self.due(SWEPT_BEFORE_READING).await?;
            let first = due.leases.first().map(|(id, _)| id.clone());
            // The same lease again is not due by the time that decides.
            if first.is_none() || first == before {
                return Ok(());
            }
            before = first;
            self.expire(&due).await?;
        }
    }

    async fn due(&self, max: usize) -> Result<Due, StoreError> {
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
            // One row tells the time where there is no lease.
            if let Some(id) = get(row, 1)? {
                leases.push((id, get(row, 2)?));
            }
        }
        Ok(Due { now, wall, leases })
    }

    /// Ends these leases, unless somebody was faster.
    async fn expire(&self, due: &Due) -> Result<Swept, StoreError> {
        let (mut answers, mut swept) = (Vec::new(), Swept::default());
        let now = column(due.now.as_micros());
        for (id, levels) in &due.leases {
            let levels = levels.as_deref().map(levels_from_text);
            match (lease_id(id), levels) {
                (Some(lease), Some(Ok(levels))) => {
                    answers.push((id, self.lanes.submit(Call::expire(lease, &Arc::new(levels)))?));
                }
                // It is not as we write it. Whoever asks for it is told so; others must not wait behind it.
                _ => self.set_aside(id, now).await?,
            }
        }
        for (id, answer) in answers {
            match answer.await.unwrap_or_else(|_| Err(StoreError::unavailable("the runtime has ended"))) {
                Ok(answer) => match (answer.status, answer.extra) {
                    (Status::Done, 0) => swept.settled += 1,
                    (Status::Done, _) => swept.returned += 1,
                    // It has ended or was renewed, or the time that decides is before the one that was read.
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

    /// Lets a lease that cannot be read, or whose limits cannot, stay as it is, for somebody to look at: it is due no more. One
    /// that was ended or renewed meanwhile is left alone.
    async fn set_aside(&self, id: &[u8], now: i64) -> Result<(), StoreError> {
        let statement = "
            UPDATE @.leases SET deadline = $3 WHERE namespace = $1 AND id = $2 AND how IS NULL AND deadline <= $4";
        self.inner.query(statement, &[&self.namespace, &id, &i64::MAX, &now]).await.map(drop)
    }

    /// Deletes leases that ended long ago.
    async fn forget(&self, now: Stamp) -> Result<u64, StoreError> {
        let Some(before) = before(now, Some(REMEMBERED)) else { return Ok(0) };
        let statement = "
            WITH gone AS (
                DELETE FROM @.leases WHERE namespace = $1 AND id = ANY (ARRAY(
                    SELECT id FROM @.leases WHERE namespace = $1 AND how IS NOT NULL AND ended_at < $2
                    ORDER BY ended_at LIMIT $3 FOR UPDATE SKIP LOCKED)) RETURNING 1
            )
            SELECT count(*) FROM gone";
        self.inner.delete(statement, &[&self.namespace, &column(before.as_micros()), &BATCH]).await
    }

    /// Forgets up to `max` of the oldest lines of the ledger.
    pub(super) async fn prune_up_to(&self, prune: &Prune, max: usize) -> Result<u64, StoreError> {
        // What has expired is there to be forgotten too.
        self.sweep_what_is_due().await?;
        let max = column(max as u64);
        match prune {
            Prune::Usage { window, before } => {
                let statement = "
                    WITH old AS (
                        SELECT entity, resource, name, start FROM @.usage
                        WHERE namespace = $1 AND span = $2 AND start < $3
                        ORDER BY start, entity, resource, name LIMIT $4 FOR UPDATE
                    ), gone AS (
                        DELETE FROM @.usage u USING old WHERE u.namespace = $1 AND u.span = $2 AND u.entity = old.entity
                            AND u.resource = old.resource AND u.name = old.name AND u.start = old.start RETURNING 1
                    )
                    SELECT count(*) FROM gone";
                let (span, start) = (*window as i16, ended_by(*window, *before));
                self.inner.count(statement, &[&self.namespace, &span, &start, &max]).await
            }
            Prune::Audit { through } => {
                let statement = "
                    WITH gone AS (
                        DELETE FROM @.audit WHERE namespace = $1 AND number IN (
                            SELECT number FROM @.audit WHERE namespace = $1 AND version <= $2 ORDER BY number LIMIT $3)
                        RETURNING 1
                    )
                    SELECT count(*) FROM gone";
                self.inner.count(statement, &[&self.namespace, &column(through.number()), &max]).await
            }
        }
    }

    /// Sweeps until nothing is left to do, within bounds. Answers whether something may be left. A server that is
    /// unavailable is tidied when it is back.
    async fn tidy(&self) -> bool {
        for _ in 0..SWEEPS_MAX {
            let Ok(swept) = self.sweep_up_to(SWEPT_IN_PASSING).await else { return false };
            if swept.settled + swept.returned < SWEPT_IN_PASSING as u64 {
                return swept.forgotten >= BATCHES_MAX * BATCH.unsigned_abs();
            }
        }
        true
    }

    /// Looks after the namespace now and then, for as long as it is used.
    pub(super) fn tidy_in_background(&self) {
        if self.inner.clock.is_some() {
            return;
        }
        let (inner, lanes, alive) =
            (Arc::downgrade(&self.inner), Arc::downgrade(&self.lanes), Arc::downgrade(&self.alive));
        let (namespace, changes) = (self.namespace, self.changes.clone());
        self.inner.handle.spawn(async move {
            let (mut calls, mut idle) = (0, 0);
            loop {
                sleep(TIDIED_EVERY).await;
                let (Some(inner), Some(lanes), Some(alive)) =
                    (inner.upgrade(), lanes.upgrade(), alive.upgrade())
                else {
                    return;
                };
                if inner.check_open().is_err() {
                    return;
                }
                let store = Self { inner, namespace, lanes, changes: changes.clone(), alive };
                let is_idle = std::mem::replace(&mut calls, store.stats().calls) == store.stats().calls;
                idle = if is_idle { (idle + 1) % TIDIED_IDLE } else { 0 };
                if idle <= 1 && store.tidy().await {
                    idle = 0;
                }
            }
        });
    }
}

impl Inner {
    /// Deletes what is too old to be kept, in every namespace.
    async fn retain(&self, due: &Due) -> Result<(), StoreError> {
        for (window, before) in self.retention.usage_before(due.wall) {
            let statement = "
                WITH gone AS (
                    DELETE FROM @.usage WHERE ctid = ANY (ARRAY(
                        SELECT ctid FROM @.usage WHERE span = $1 AND start < $2 ORDER BY start LIMIT $3
                        FOR UPDATE SKIP LOCKED)) RETURNING 1
                )
                SELECT count(*) FROM gone";
            self.delete(statement, &[&(window as i16), &ended_by(window, before), &BATCH]).await?;
        }
        if let Some(before) = self.retention.audit_before(due.now) {
            let statement = "
                WITH gone AS (
                    DELETE FROM @.audit WHERE ctid = ANY (ARRAY(
                        SELECT ctid FROM @.audit WHERE at < $1 ORDER BY at LIMIT $2 FOR UPDATE SKIP LOCKED)) RETURNING 1
                )
                SELECT count(*) FROM gone";
            self.delete(statement, &[&column(before.as_micros()), &BATCH]).await?;
        }
        Ok(())
    }

    /// Deletes batches of [`BATCH`] rows until one is not full, [`BATCHES_MAX`] at most. Answers how many rows that were.
    async fn delete(
        &self,
        statement: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<u64, StoreError> {
        let mut deleted = 0;
        for _ in 0..BATCHES_MAX {
            let batch = self.count(statement, parameters).await?;
            deleted += batch;
            if batch < BATCH.unsigned_abs() {
                break;
            }
        }
        Ok(deleted)
    }

    async fn count(
        &self,
        statement: &str,
        parameters: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<u64, StoreError> {
        let rows = self.query(statement, parameters).await?;
        number(first(&rows)?, "a count")
    }
}
