//! A lease: units drawn from a store, and how unused ones return.
//!
//! The store's record of a lease is authoritative. A settle carries absolute amounts rather than differences, so it
//! corrects any extension or adjustment whose response was lost.
//!
//! An ending that has begun is final: whatever the store responds, a drop repeats the same ending. In particular, a
//! lease whose settle failed is never cancelled by being dropped, because its units were used.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, Cancel, DrawResult, Extend, Lookup, Movement, Reading, Readings, Renew, Reply, Settle, Store,
    StoreError,
};

use super::Shared;
use super::breaker::CallFailure;
use super::error::{LimitError, Limited};
use super::explain::{LimitFilter, by_subject, lines};
use super::remote::is_above;
use super::settler::{End, EndingError};

/// Units drawn from a shared limit.
///
/// Dropping a lease cancels it: all units it drew return, adjustments included. Leases of a store outside this
/// process are cancelled in the background. After a settle or cancel that the store did not carry out, the lease is
/// no longer open: dropping it repeats that settle or cancel in the background.
///
/// Its calls panic where [`Limiter::try_acquire`](super::Limiter::try_acquire) does: within a tokio runtime whose timer is not
/// enabled, if the store is not in this process.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    /// The id, last step, levels and held units: the settle request as of now.
    pub(super) now: Settle,
    /// The time of the store's last response about it.
    pub(super) at: Stamp,
    pub(super) readings: Readings,
    pub(super) backing: Backing,
    pub(super) state: State,
    /// The remaining time, if the lease was drawn earlier.
    pub(super) time_left: Option<Duration>,
}

/// What accounts for the units the lease drew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backing {
    /// The store.
    Store,
    /// This process, from its local share.
    Local,
    /// Nothing.
    Unbacked,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum State {
    Open,
    /// An ending was sent to the store. If the caller stops waiting for it, the settler completes it.
    Ending(Ending),
    /// The store refused an ending and did nothing. The holder may retry it or end the lease differently; otherwise
    /// the settler retries it.
    Refused(Ending),
    Ended {
        how: Ending,
        answer: SettleStatus,
    },
}

/// Why a lease is not backed by units of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Degraded {
    /// The store was unavailable, and the policy is to admit all callers.
    Allowed,
    /// The store was unavailable, and this process accounts for a local share.
    LocalShare,
}

/// Whether the store has recorded an ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettleStatus {
    /// Recorded.
    Now,
    /// The store is unavailable; the settler sends the ending in the background.
    Later,
}

/// Whether the store has recorded an adjustment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdjustStatus {
    /// Recorded.
    Now,
    /// The store did not respond: the change is sent with the settle, and is lost if the process exits before.
    WithSettle,
    /// The lease was granted [without the store](Degraded::Allowed): the change is not recorded, now or later.
    Unrecorded,
}

impl Lease {
    /// The lease's id.
    pub const fn id(&self) -> LeaseId {
        self.now.lease
    }

    /// The remaining time, if it was drawn earlier [with the same id](super::Request::id) and nothing was drawn now.
    pub const fn drawn_before(&self) -> Option<Duration> {
        self.time_left
    }

    /// The subject that drew it.
    pub fn subject(&self) -> &Subject {
        self.now.levels.subject()
    }

    /// The units held of a limit; `None` if the limit takes no part. For a settled lease, the units it was settled
    /// at, whether or not the store has recorded them.
    pub fn held(&self, limit: &str) -> Option<u64> {
        self.now.actual[self.now.levels.position(limit).ok()?]
    }

    /// Whether, and why, the lease was granted without the store.
    pub const fn degraded(&self) -> Option<Degraded> {
        match self.backing {
            Backing::Store => None,
            Backing::Local => Some(Degraded::LocalShare),
            Backing::Unbacked => Some(Degraded::Allowed),
        }
    }

    /// The limits it drew from: current if the store is in this process, otherwise as of the store's last response to
    /// a draw, extension or adjustment.
    pub fn balances(&self) -> Vec<Balance> {
        if self.is_local() {
            return self.balances_now().unwrap_or_default();
        }
        self.balances_read()
    }

    /// The limits it drew from as of the draw. Reads them if the response had none because the draw was a repeat.
    pub(super) fn balances_at_draw(&self) -> Vec<Balance> {
        if self.readings.is_empty() { self.balances() } else { self.balances_read() }
    }

    fn balances_read(&self) -> Vec<Balance> {
        let balance = |reading: &Reading| {
            let subject = &self.now.levels.levels()[reading.level].subject;
            Balance::of(subject, &reading.meter(&self.now.levels), 0, self.at)
        };
        self.readings.iter().map(balance).collect()
    }

    fn balances_now(&self) -> Option<Vec<Balance>> {
        let levels = self.now.levels.levels();
        let lookup = Lookup::Subjects(levels.iter().map(|level| level.subject.clone()).collect());
        let seen = self.store().balances(&lookup).now()?.ok()?;
        let units: Units = self.now.actual.iter().map(|held| held.map(|_| 0)).collect();
        let lines = lines(&self.now.levels, &by_subject(&seen), seen.at, (&units, LimitFilter::Requested));
        Some(lines.into_iter().map(|line| line.balance).collect())
    }

    /// Draws more units, all or nothing. If refused, the lease is unchanged.
    ///
    /// # Errors
    /// [`LimitError::Limited`] and [`LimitError::TooLarge`] if a limit is short, [`LimitError::Unavailable`] if the
    /// store is unavailable, and [`StoreError::Ended`] if the lease has ended or an ending has begun.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the lease unchanged: units the store may have drawn return when the lease ends.
    pub async fn extend<'a>(&mut self, more: impl AsRef<[(&'a str, u64)]>) -> Result<(), LimitError> {
        self.check_open()?;
        let units = self.now.levels.units(more.as_ref())?;
        if self.backing != Backing::Unbacked {
            let step = self.next_step();
            let levels = Arc::clone(&self.now.levels);
            let extend = Extend { lease: self.now.lease, step, levels, units: units.clone() };
            // Limits new to the lease are listed from now on: if the response is lost, the ending reports zero for
            // them.
            let before = self.now.actual.clone();
            for (held, _) in self.now.actual.iter_mut().zip(&units).filter(|(_, more)| more.is_some()) {
                held.get_or_insert(0);
            }
            let refused = match self.call(self.store().extend(&extend)).await {
                Ok(DrawResult::Granted(moved)) => {
                    self.learn(moved);
                    None
                }
                Ok(DrawResult::Refused(moved)) => {
                    Some(Limited::new(&extend.levels, &moved, &units).into_error())
                }
                Err(failed) if failed.error.is_transient() => {
                    return Err(self.shared.failure(failed.error));
                }
                Err(failed) => Some(LimitError::Store(failed.error)),
            };
            if let Some(error) = refused {
                self.now.actual = before;
                return Err(error);
            }
        }
        for (held, more) in self.now.actual.iter_mut().zip(&units) {
            if let Some(more) = more {
                *held = Some(held.unwrap_or(0).saturating_add(*more));
            }
        }
        Ok(())
    }

    /// Draws units that turned out to be needed, or returns unused ones. It is never refused: a shortfall becomes
    /// debt. At most the held units are returned. If the store does not respond, the change is kept and sent with the
    /// settle, as the result indicates.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for an unknown limit, and [`StoreError::Ended`] if the lease has ended or an ending has
    /// begun.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo the change: if the store has not recorded it, it is sent with the ending.
    pub async fn adjust<'a>(
        &mut self,
        changes: impl AsRef<[(&'a str, i64)]>,
    ) -> Result<AdjustStatus, LimitError> {
        self.check_open()?;
        let deltas = self.now.levels.deltas(changes.as_ref())?;
        check_held(&self.now.levels, &self.now.actual, &deltas)?;
        let gives_back = deltas.iter().flatten().any(|delta| *delta < 0);
        let takes = deltas.iter().flatten().any(|delta| *delta > 0);
        for (held, delta) in self.now.actual.iter_mut().zip(&deltas) {
            if let Some(delta) = delta {
                *held = Some(held.unwrap_or(0).saturating_add_signed(*delta));
            }
        }
        if self.backing == Backing::Unbacked {
            return Ok(AdjustStatus::Unrecorded);
        }
        let (step, levels) = (self.next_step(), Arc::clone(&self.now.levels));
        let adjust = Adjust { lease: self.now.lease, step, levels, deltas };
        match self.call(self.store().adjust(&adjust)).await {
            Ok(moved) => {
                if takes {
                    self.shared.report_debts(&self.now.levels, &moved);
                }
                self.learn(moved);
                if gives_back {
                    self.shared.waiters.returned(&self.now.levels);
                }
                Ok(AdjustStatus::Now)
            }
            Err(failed) if failed.error.is_transient() => Ok(AdjustStatus::WithSettle),
            Err(failed) => Err(LimitError::Store(failed.error)),
        }
    }

    /// Extends the lease's deadline to `span` from now, by the store's clock and at most a day; a later deadline is
    /// kept. The held units are unchanged. Renewing well before each deadline keeps a lease alive indefinitely.
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] if the store is unavailable: the renewal may or may not have happened, and can be
    /// retried. [`StoreError::Ended`] if the lease has ended, including by its deadline, or an ending has begun, and
    /// [`StoreError::Invalid`] for a longer span.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the lease renewed or not. Nothing else changes.
    pub async fn renew(&mut self, span: Duration) -> Result<(), LimitError> {
        self.check_open()?;
        if self.backing == Backing::Unbacked {
            return Ok(());
        }
        let (step, levels) = (self.next_step(), Arc::clone(&self.now.levels));
        let renew = Renew { lease: self.now.lease, step, levels, span };
        let renewed = self.call(self.store().renew(&renew)).await;
        renewed.map(drop).map_err(|failed| self.shared.failure(failed.error))
    }

    /// Ends the lease at the given units of the named limits, and at the held units of the others. Units beyond those
    /// held may leave a debt.
    ///
    /// Settling again at the same units returns the first result.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for an unknown limit: nothing was sent, and the lease stays open.
    ///
    /// After any other error the lease is no longer open. Dropping it settles it at these units in the background,
    /// and never cancels it:
    ///
    /// | error | state of the lease | options of the holder |
    /// |---|---|---|
    /// | [`StoreError::Ended`], [`StoreError::NoLease`] | it ended before: by its deadline, or by another ending | none |
    /// | [`LimitError::Unavailable`]: the store is unavailable, and the settler is full | the store may have settled it | settle at the same units again |
    /// | [`StoreError::Denied`], [`StoreError::Corrupt`], [`StoreError::Full`] | nothing was done; the store may be repaired | settle at the same or other units, cancel; dropped, the settler retries for ten minutes |
    /// | [`StoreError::Invalid`], [`StoreError::Late`], [`StoreError::Closed`], all others | nothing was done, and a retry would be refused | settle at other units, cancel; dropped, it is [unsettled](super::LimiterStats::unsettled), and ends by its deadline |
    ///
    /// # Cancel safety
    /// Dropping the future does not undo the settle: the settler completes it.
    pub async fn settle<'a>(
        &mut self,
        actual: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<SettleStatus, LimitError> {
        let mut amounts = self.now.levels.amounts(actual.as_ref())?;
        for (actual, held) in amounts.iter_mut().zip(&self.now.actual) {
            *actual = actual.or(*held);
        }
        let is_same = self.now.actual == amounts;
        match self.state {
            State::Ended { how: Ending::Settled, answer } if is_same => return Ok(answer),
            // The first future was dropped before the response, or the store refused.
            State::Ending(Ending::Settled) | State::Refused(Ending::Settled) if is_same => {
                return self.end(Ending::Settled, true).await;
            }
            _ => self.check_not_ending()?,
        }
        // The units of a refused ending are not those that the store holds.
        let is_again = matches!(self.state, State::Refused(_));
        let gives_back = is_again || amounts.iter().zip(&self.now.actual).any(|(actual, held)| actual < held);
        // The readings show whether a debt reaches its bound.
        self.now.is_watched |= is_above(&amounts, &self.now.actual);
        self.now.actual = amounts;
        self.next_step();
        // No longer open from here on, even if the store panics.
        self.state = State::Ending(Ending::Settled);
        if self.is_local()
            && let Some(answer) = self.store().settle(&self.now).now()
        {
            // An in-process store is always available, so nothing is queued for the settler.
            let answer = answer.map(|moved| self.shared.settled(&self.now, &moved));
            return self.finish_ending(answer, Ending::Settled, gives_back);
        }
        self.end(Ending::Settled, gives_back).await
    }

    /// Checks the units that a [`settle`](Self::settle) names, without sending anything.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for an unknown limit, or too many units.
    pub fn check_units<'a>(&self, actual: impl AsRef<[(&'a str, u64)]>) -> Result<(), LimitError> {
        Ok(self.now.levels.amounts(actual.as_ref()).map(drop)?)
    }

    /// Ends the lease at the units it holds.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    /// As [`settle`](Self::settle).
    pub async fn settle_full(&mut self) -> Result<SettleStatus, LimitError> {
        self.settle([]).await
    }

    /// Ends the lease as if it had never been drawn: all units return, adjustments included.
    ///
    /// # Errors
    /// [`StoreError::Ended`] if the lease was settled, and the other errors of [`settle`](Self::settle): dropping the
    /// lease after one of those cancels it in the background.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo the cancel: the settler completes it.
    pub async fn cancel(&mut self) -> Result<SettleStatus, LimitError> {
        match self.state {
            State::Ended { how: Ending::Cancelled, answer } => return Ok(answer),
            State::Ending(Ending::Cancelled) | State::Refused(Ending::Cancelled) => {}
            _ => {
                self.check_not_ending()?;
                self.next_step();
            }
        }
        self.end(Ending::Cancelled, true).await
    }

    /// Sends an ending to the store, or queues it for the settler if the store is unavailable.
    pub(super) async fn end(&mut self, how: Ending, gives_back: bool) -> Result<SettleStatus, LimitError> {
        self.state = State::Ending(how);
        let answer = match (self.backing, how) {
            (Backing::Unbacked, _) => Ok(()),
            (_, Ending::Cancelled) => {
                let cancel = self.cancellation();
                self.call(self.store().cancel(&cancel)).await.map(drop)
            }
            _ => {
                let answer = self.call(self.store().settle(&self.now)).await;
                answer.map(|moved| self.shared.settled(&self.now, &moved))
            }
        };
        match answer {
            Err(failed) if failed.error.is_transient() => {
                if self.shared.settle_later(self.ending(how)) {
                    self.close(how, SettleStatus::Later);
                    return Ok(SettleStatus::Later);
                }
                // It may or may not have ended: the holder may retry the same ending, and a drop does.
                Err(self.shared.failure(failed.error))
            }
            answer => self.finish_ending(answer.map_err(StoreError::from), how, gives_back),
        }
    }

    /// Handles the store's response to an ending.
    #[inline]
    pub(super) fn finish_ending(
        &mut self,
        answer: Result<(), StoreError>,
        how: Ending,
        gives_back: bool,
    ) -> Result<SettleStatus, LimitError> {
        match answer.as_ref().map_err(EndingError::of) {
            Ok(()) => self.close(how, SettleStatus::Now),
            // It had already ended.
            Err(EndingError::AlreadyEnded(how)) => self.close(how, SettleStatus::Now),
            // Never open again: a drop would then return units that were used.
            Err(EndingError::Transient | EndingError::Permanent) => self.state = State::Refused(how),
        }
        answer.map_err(LimitError::Store)?;
        if gives_back {
            self.shared.waiters.returned(&self.now.levels);
        }
        Ok(SettleStatus::Now)
    }

    /// Marks the lease as ended.
    #[inline]
    pub(super) fn close(&mut self, how: Ending, answer: SettleStatus) {
        self.state = State::Ended { how, answer };
        self.shared.counters.ended.fetch_add(1, Ordering::SeqCst);
        if self.shared.is_closed.load(Ordering::SeqCst) {
            self.shared.lease_ended.notify_waiters();
        }
    }

    /// The ending as a request to the store.
    fn ending(&self, how: Ending) -> End {
        match how {
            Ending::Settled => End::Settle(self.now.clone()),
            Ending::Cancelled | Ending::Expired => End::Cancel(self.cancellation()),
        }
    }

    pub(super) fn cancellation(&self) -> Cancel {
        let Settle { lease, step, levels, .. } = &self.now;
        Cancel { lease: *lease, step: *step, levels: Arc::clone(levels), is_watched: false }
    }

    /// Whether the drawn units are accounted for in this process, so that every call completes immediately.
    pub(super) fn is_local(&self) -> bool {
        match self.backing {
            Backing::Local => true,
            Backing::Store => self.shared.is_immediate,
            Backing::Unbacked => false,
        }
    }

    fn check_open(&self) -> Result<(), LimitError> {
        match self.state {
            State::Open => Ok(()),
            State::Ending(how) | State::Refused(how) | State::Ended { how, .. } => {
                Err(LimitError::Store(StoreError::Ended { lease: self.now.lease, how }))
            }
        }
    }

    /// Rejects a different ending once one may have happened.
    fn check_not_ending(&self) -> Result<(), LimitError> {
        if matches!(self.state, State::Refused(_)) { Ok(()) } else { self.check_open() }
    }

    pub(super) const fn next_step(&mut self) -> u32 {
        self.now.step += 1;
        self.now.step
    }

    pub(super) fn store(&self) -> &dyn Store {
        match self.backing {
            Backing::Local => &self.shared.local,
            Backing::Store | Backing::Unbacked => &*self.shared.store,
        }
    }

    async fn call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, CallFailure> {
        if self.is_local() {
            return reply.await.map_err(|error| CallFailure { error, may_be_done: true });
        }
        self.shared.breaker.call(reply).await
    }

    /// Records the store's response.
    fn learn(&mut self, moved: Movement) {
        if moved.is_repeat {
            return;
        }
        self.at = moved.at;
        for reading in moved.readings {
            let known = self.readings.iter_mut();
            match known.into_iter().find(|known| (known.level, known.name) == (reading.level, reading.name)) {
                Some(known) => *known = reading,
                None => self.readings.push(reading),
            }
        }
    }

    /// Ends a lease that was dropped.
    #[cold]
    fn drop_open(&mut self, how: Ending) {
        if self.is_local() {
            // An in-process store replies immediately.
            let answer = match self.ending(how) {
                End::Cancel(cancel) => self.store().cancel(&cancel).now(),
                End::Settle(settle) => self.store().settle(&settle).now(),
            };
            let is_over = |error: &StoreError| matches!(EndingError::of(error), EndingError::AlreadyEnded(_));
            if answer.is_some_and(|answer| answer.as_ref().err().is_none_or(is_over)) {
                self.shared.waiters.returned(&self.now.levels);
                return;
            }
        }
        match self.backing {
            Backing::Store => drop(self.shared.settle_later(self.ending(how))),
            // The settler calls the store, not this process's local share.
            Backing::Local => self.shared.report_unsettled(self.now.lease),
            Backing::Unbacked => {}
        }
    }
}

/// Rejects an adjustment after which the held units could not be settled.
pub(super) fn check_held(
    levels: &Levels,
    held: &[Option<u64>],
    deltas: &[Option<i64>],
) -> Result<(), LimitError> {
    for (name, (held, delta)) in held.iter().zip(deltas).enumerate() {
        let after = held.unwrap_or(0).saturating_add_signed(delta.unwrap_or(0));
        levels.check_units(name, i128::from(after))?;
    }
    Ok(())
}

impl Drop for Lease {
    fn drop(&mut self) {
        let how = match self.state {
            State::Ended { .. } => return,
            State::Ending(how) | State::Refused(how) => how,
            State::Open => {
                self.next_step();
                Ending::Cancelled
            }
        };
        self.drop_open(how);
        self.close(how, SettleStatus::Later);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.now.lease)
            .field("subject", self.subject())
            .field("held", &self.now.actual)
            .field("degraded", &self.degraded())
            .finish_non_exhaustive()
    }
}
