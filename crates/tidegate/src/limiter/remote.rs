//! Leases held by remote callers: each call names the lease and its step, and this process keeps no state
//! between calls.
//!
//! The store's record of a lease is its only state machine. A [`Lease`] keeps the state for a holder in this
//! process; a remote holder keeps its own state behind a network, and this process may restart between two of
//! its calls. So each call reads the levels and held units from the store, and the store decides by the step.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, Ending, LeaseId, Turn, digest};
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, Buckets, Cancel, DrawResult, Extend, LeaseSnapshot, LeaseStatus, Movement, Reading, Renew,
    Renewal, Reply, Settle, Store, StoreError,
};

use super::error::{LimitError, Limited};
use super::events::LimitEvent;
use super::lease::{Backing, SettleStatus, State};
use super::{Lease, Limiter, Shared};

/// An open lease as recorded in its store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenLease {
    /// The lease's id.
    pub id: LeaseId,
    /// The subject that drew it.
    pub subject: Subject,
    /// The units held of each limit that takes part.
    pub held: Vec<(LimitName, u64)>,
    /// The last step applied: the holder continues with the next number.
    pub step: u32,
    /// When it was drawn.
    pub drawn_at: Stamp,
    /// When it expires.
    pub deadline: Stamp,
    /// What happens when it expires.
    pub on_expiry: OnExpiry,
    /// When it was read, by the store's clock.
    pub at: Stamp,
}

/// The result of a step of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseStep {
    /// When it was decided; for a repeat, when it was first decided.
    pub at: Stamp,
    /// It was applied before, and nothing changed now.
    pub is_repeat: bool,
    /// The limits that took part, after the step. Empty for a repeated ending.
    pub balances: Vec<Balance>,
}

impl Lease {
    /// Releases the handle without ending the lease, and returns its id. The id's holder continues with
    /// [`Limiter::settle_lease`] and the related calls, in this process or in another one over the same
    /// store; otherwise the lease ends by its deadline.
    ///
    /// It no longer counts in [`open_leases`](super::LimiterStats::open_leases), and a
    /// [drain](Limiter::drain) does not wait for it. A lease whose ending has begun completes that ending, as
    /// if it were dropped. A [degraded](Self::degraded) lease is known to this process alone or, if no
    /// process accounts for it, to none: calls on it fail with `NoLease`.
    pub fn detach(mut self) -> LeaseId {
        if let State::Open = self.state {
            // For this handle, it expires.
            self.close(Ending::Expired, SettleStatus::Later);
        }
        self.id()
    }
}

impl Limiter {
    /// Finds an open lease by its id.
    ///
    /// # Errors
    /// [`StoreError::Ended`] if it has ended, [`StoreError::NoLease`] if it was never drawn or ended long
    /// ago, and [`LimitError::Unavailable`] if the store is unavailable.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn find_lease(&self, id: LeaseId) -> Result<OpenLease, LimitError> {
        let (_, LeaseSnapshot { at, levels, record }) = self.shared.open_lease(id).await?;
        let named = levels.names().iter().zip(record.held());
        Ok(OpenLease {
            id,
            subject: levels.subject().clone(),
            held: named.filter_map(|(name, held)| Some((name.clone(), (*held)?))).collect(),
            step: record.step(),
            drawn_at: record.drawn_at(),
            deadline: record.deadline(),
            on_expiry: record.on_expiry(),
            at,
        })
    }

    /// Draws more units for a lease, all or nothing, as its step `step`. If refused, the lease is unchanged.
    ///
    /// # Errors
    /// [`LimitError::Limited`] and [`LimitError::TooLarge`] if a limit is short, [`LimitError::Cost`] for an
    /// invalid cost, and those of [`settle_lease`](Self::settle_lease).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave it done: a retry of the same step finds out.
    pub async fn extend_lease<'a>(
        &self,
        id: LeaseId,
        step: u32,
        more: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<LeaseStep, LimitError> {
        let shared = &self.shared;
        let (backing, LeaseSnapshot { levels, .. }) = shared.open_lease(id).await?;
        let units = levels.units(more.as_ref())?;
        let extend = Extend { lease: id, step, levels, units };
        match shared.call_backing(backing, shared.store_of(backing).extend(&extend)).await? {
            DrawResult::Granted(moved) => Ok(LeaseStep::of(&extend.levels, &moved)),
            DrawResult::Refused(moved) => {
                Err(Limited::new(&extend.levels, &moved, &extend.units).into_error())
            }
        }
    }

    /// Draws units that turned out to be needed, or returns unused ones, as the lease's step `step`. It is
    /// never refused: a shortfall becomes debt. At most the held units are returned.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for an unknown limit or too many units, and those of
    /// [`settle_lease`](Self::settle_lease).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave it done: a retry of the same step finds out.
    pub async fn adjust_lease<'a>(
        &self,
        id: LeaseId,
        step: u32,
        changes: impl AsRef<[(&'a str, i64)]>,
    ) -> Result<LeaseStep, LimitError> {
        let shared = &self.shared;
        let (backing, LeaseSnapshot { levels, record, .. }) = shared.open_lease(id).await?;
        let deltas = levels.deltas(changes.as_ref())?;
        // The held units already include a repeat.
        if record.turn(step) == Turn::Apply {
            super::lease::check_held(&levels, record.held(), &deltas)?;
        }
        let adjust = Adjust { lease: id, step, levels, deltas };
        let moved = shared.call_backing(backing, shared.store_of(backing).adjust(&adjust)).await?;
        if adjust.deltas.iter().flatten().any(|delta| *delta > 0) {
            shared.report_debts(&adjust.levels, &moved);
        }
        if adjust.deltas.iter().flatten().any(|delta| *delta < 0) {
            shared.waiters.returned(&adjust.levels);
        }
        Ok(LeaseStep::of(&adjust.levels, &moved))
    }

    /// Extends a lease's deadline to `span` from now, at most a day, as its step `step`; a later deadline is
    /// kept.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a longer span, and those of [`settle_lease`](Self::settle_lease). A lease
    /// past its deadline has ended.
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave it done: a retry of the same step finds out.
    pub async fn renew_lease(&self, id: LeaseId, step: u32, span: Duration) -> Result<Renewal, LimitError> {
        let shared = &self.shared;
        let (backing, LeaseSnapshot { levels, .. }) = shared.open_lease(id).await?;
        let renew = Renew { lease: id, step, levels, span };
        shared.call_backing(backing, shared.store_of(backing).renew(&renew)).await
    }

    /// Ends a lease at the given units of the named limits, and at the held units of the others, as its step
    /// `step`. Units beyond those held may leave a debt. A repeat returns the first result for ten minutes.
    ///
    /// # Errors
    /// [`StoreError::Ended`] if the lease ended differently, [`StoreError::Late`] for a step before the last
    /// one applied, [`StoreError::NoLease`] if the lease was never drawn or ended long ago,
    /// [`LimitError::Cost`] for an unknown limit, and [`LimitError::Unavailable`] if the store is
    /// unavailable: nothing continues in the background, and the holder retries.
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave it done: a retry of the same step finds out.
    pub async fn settle_lease<'a>(
        &self,
        id: LeaseId,
        step: u32,
        actual: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<LeaseStep, LimitError> {
        let (shared, actual) = (&self.shared, actual.as_ref());
        let (backing, levels, held) = match shared.standing(id).await? {
            (backing, LeaseStatus::Open(found)) => (backing, found.levels, found.record),
            // The limits it drew from are forgotten; how it ended is not.
            (_, LeaseStatus::Ended(ended)) => {
                return repeat_of(id, &ended, ended.turn_settle(step, digest(actual.iter().copied())));
            }
        };
        let actual = levels.amounts(actual)?;
        let settle = Settle { lease: id, step, levels, actual, is_watched: true };
        let moved = shared.call_backing(backing, shared.store_of(backing).settle(&settle)).await?;
        if is_above(&settle.actual, held.held()) {
            shared.report_debts(&settle.levels, &moved);
        }
        shared.waiters.returned(&settle.levels);
        Ok(LeaseStep::of(&settle.levels, &moved))
    }

    /// Ends a lease as if it had never been drawn, as its step `step`: all units return. A repeat returns the
    /// first result.
    ///
    /// # Errors
    /// As [`settle_lease`](Self::settle_lease).
    ///
    /// # Cancel safety
    /// Dropping the future may or may not leave it done: a retry finds out.
    pub async fn cancel_lease(&self, id: LeaseId, step: u32) -> Result<LeaseStep, LimitError> {
        let shared = &self.shared;
        let (backing, levels) = match shared.standing(id).await? {
            (backing, LeaseStatus::Open(held)) => (backing, held.levels),
            (_, LeaseStatus::Ended(ended)) => return repeat_of(id, &ended, ended.turn_cancel()),
        };
        let cancel = Cancel { lease: id, step, levels, is_watched: true };
        let moved = shared.call_backing(backing, shared.store_of(backing).cancel(&cancel)).await?;
        shared.waiters.returned(&cancel.levels);
        Ok(LeaseStep::of(&cancel.levels, &moved))
    }
}

impl LeaseStep {
    fn of(levels: &Levels, moved: &Movement) -> Self {
        let balance = |reading: &Reading| {
            let subject = &levels.levels()[reading.level].subject;
            Balance::of(subject, &reading.meter(levels), 0, moved.at)
        };
        let balances = moved.readings.iter().map(balance).collect();
        Self { at: moved.at, is_repeat: moved.is_repeat, balances }
    }
}

/// The result of an ending that arrives after the lease has ended.
fn repeat_of(lease: LeaseId, ended: &EndRecord, turn: Turn) -> Result<LeaseStep, LimitError> {
    if turn == Turn::Repeat {
        return Ok(LeaseStep { at: ended.at, is_repeat: true, balances: Vec::new() });
    }
    Err(LimitError::Store(StoreError::Ended { lease, how: ended.how }))
}

/// Whether any of `actual` is more than is held.
pub(super) fn is_above(actual: &[Option<u64>], held: &[Option<u64>]) -> bool {
    actual.iter().zip(held).any(|(actual, held)| actual.unwrap_or(0) > held.unwrap_or(0))
}

impl Shared {
    /// Handles a settlement. It has readings if it is above the held units.
    pub(super) fn settled(&self, settle: &Settle, moved: &Movement) {
        if settle.is_watched {
            self.report_debts(&settle.levels, moved);
        }
    }

    /// Reports the buckets whose debt is at its bound after a step that took units whether available or not.
    pub(super) fn report_debts(&self, levels: &Levels, moved: &Movement) {
        if moved.is_repeat {
            return;
        }
        for reading in &moved.readings {
            let level = &levels.levels()[reading.level];
            let line = level.limits.iter().find(|line| line.name == reading.name);
            let Some((line, debt_max)) = line.and_then(|line| Some((line, line.debt_max?))) else { continue };
            let bound = 0_i64.saturating_sub_unsigned(debt_max);
            if reading.meter(levels).available(moved.at) <= bound {
                self.counters.debt_bound.fetch_add(1, Ordering::Relaxed);
                self.listeners.notify(&LimitEvent::DebtBound {
                    bucket: level.subject.clone(),
                    limit: line.rule.name().clone(),
                    debt_max,
                });
            }
        }
    }

    /// The lease, if it is open, and what backs it.
    async fn open_lease(&self, lease: LeaseId) -> Result<(Backing, LeaseSnapshot), LimitError> {
        match self.standing(lease).await? {
            (backing, LeaseStatus::Open(held)) => Ok((backing, held)),
            (_, LeaseStatus::Ended(ended)) => {
                Err(LimitError::Store(StoreError::Ended { lease, how: ended.how }))
            }
        }
    }

    /// The record of a lease and what backs it: the store, or this process, which accounts for its share
    /// while the store is unavailable.
    pub(super) async fn standing(&self, lease: LeaseId) -> Result<(Backing, LeaseStatus), LimitError> {
        // A store may have to search for a lease that another process has drawn.
        match self.call_store_slow(self.store.lease(lease)).await {
            Ok(standing) => Ok((Backing::Store, standing)),
            Err(error @ (LimitError::Unavailable { .. } | LimitError::Store(StoreError::NoLease { .. }))) => {
                match self.local.lease(lease).now() {
                    Some(Ok(standing)) => Ok((Backing::Local, standing)),
                    Some(Err(_)) | None => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn store_of(&self, backing: Backing) -> &dyn Store {
        match backing {
            Backing::Local => &self.local,
            Backing::Store | Backing::Unbacked => &*self.store,
        }
    }

    async fn call_backing<T: Unpin>(&self, backing: Backing, reply: Reply<'_, T>) -> Result<T, LimitError> {
        match backing {
            // It is always available.
            Backing::Local => reply.await.map_err(LimitError::Store),
            Backing::Store | Backing::Unbacked => self.call_store(reply).await,
        }
    }
}
