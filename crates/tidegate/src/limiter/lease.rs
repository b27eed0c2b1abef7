//! A lease: units drawn from a store, and the way back for what was not used.
//!
//! The store's record of a lease is the truth. A settle says what was used in whole numbers, not as a difference,
//! so that whatever became of an extension or an adjustment whose answer was lost is put right by it.
//!
//! An ending that has begun stays that ending: whatever the store says, a drop repeats it and makes no other of it. What
//! was used is used, and a lease whose settle failed is never cancelled by being dropped.

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
    Adjust, Cancel, Drawn, Extend, Lookup, Moved, Reading, Readings, Renew, Reply, Settle, Store, StoreError,
};

use super::Shared;
use super::error::{LimitError, Limited};
use super::explain::{Asked, by_subject, lines};
use super::guard::Failed;
use super::settler::{End, Unheard};

/// Units drawn from a shared limit.
///
/// Dropping a lease cancels it: all it drew returns, adjustments included. Leases of a store that is not in this
/// process are cancelled in the background. A lease that was settled, or cancelled, and whose store did not do it, is not
/// open any more: dropped, it is settled, or cancelled, in the background.
///
/// Its calls panic where [`Limiter::acquire`](super::Limiter::acquire) does: within a tokio runtime whose timer is not
/// enabled, if the store is not in this process.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    /// The id, the last step, the levels, and what is held: what a settle would say now.
    pub(super) now: Settle,
    /// When the store last told about it.
    pub(super) at: Stamp,
    pub(super) readings: Readings,
    pub(super) backing: Backing,
    pub(super) state: State,
    /// How long it still has, if it was drawn before.
    pub(super) left: Option<Duration>,
}

/// Who keeps what the lease drew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Backing {
    /// The store.
    Store,
    /// This process, as its share.
    Local,
    /// Nobody.
    Nobody,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum State {
    Open,
    /// The store is being told of an ending; if nobody waits for it any more, the settler goes on.
    Ending(Ending),
    /// The store refused an ending, and has done nothing. Whoever holds the lease may say the same again, or end it
    /// otherwise; if nobody does, the settler says the same again.
    Refused(Ending),
    Ended {
        how: Ending,
        answer: Settled,
    },
}

/// Why a lease does not stand for units of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Degraded {
    /// The store was away, and the policy said to let everybody in.
    Allowed,
    /// The store was away, and this process keeps a share by itself.
    LocalShare,
}

/// Whether the store has heard of an ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Settled {
    /// It has.
    Now,
    /// It is away; it will be told in the background.
    Later,
}

/// Whether the store has an adjustment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Adjusted {
    /// It has.
    Now,
    /// It did not answer: the change travels with the settle. Lost if the process ends before.
    WithSettle,
}

impl Lease {
    /// The lease's id.
    pub const fn id(&self) -> LeaseId {
        self.now.lease
    }

    /// How long it still has, if it was drawn before [with the same id](super::Request::id), and nothing was drawn now.
    pub const fn drawn_before(&self) -> Option<Duration> {
        self.left
    }

    /// Who drew it, and of what.
    pub fn subject(&self) -> &Subject {
        self.now.levels.subject()
    }

    /// What is held of a limit; `None` where it takes no part. Of a lease that was settled, what it was
    /// settled at, whether the store has heard of it or not.
    pub fn held(&self, limit: &str) -> Option<u64> {
        self.now.actual[self.now.levels.position(limit).ok()?]
    }

    /// Whether, and why, the lease was given without the store.
    pub const fn degraded(&self) -> Option<Degraded> {
        match self.backing {
            Backing::Store => None,
            Backing::Local => Some(Degraded::LocalShare),
            Backing::Nobody => Some(Degraded::Allowed),
        }
    }

    /// The limits it drew from: as they are now, where the store is in this process, else as the store last told, at the
    /// draw or at the last extension or adjustment.
    pub fn balances(&self) -> Vec<Balance> {
        if self.is_here() {
            return self.balances_now().unwrap_or_default();
        }
        self.balances_read()
    }

    /// The limits it drew from as the draw left them. A store that has told nothing of them, since it was done before, is asked.
    pub(super) fn balances_told(&self) -> Vec<Balance> {
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
        let lines = lines(&self.now.levels, &by_subject(&seen), seen.at, (&units, Asked::Only));
        Some(lines.into_iter().map(|line| line.balance).collect())
    }

    /// Draws more, all or nothing. Refused, the lease stays as it is.
    ///
    /// # Errors
    /// [`LimitError::Limited`] and [`LimitError::TooLarge`] where a limit is short, [`LimitError::Unavailable`] when
    /// the store is away, and a [`StoreError::Ended`] for a lease that has ended, or whose end has begun.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the lease as it was: what the store may have drawn returns when the lease ends.
    pub async fn extend<'a>(&mut self, more: impl AsRef<[(&'a str, u64)]>) -> Result<(), LimitError> {
        self.check_open()?;
        let units = self.now.levels.units(more.as_ref())?;
        if self.backing != Backing::Nobody {
            let step = self.next_step();
            let levels = Arc::clone(&self.now.levels);
            let extend = Extend { lease: self.now.lease, step, levels, units: units.clone() };
            // What is new to the lease is named from now on: should the answer be lost, the end says that it holds none.
            let before = self.now.actual.clone();
            for (held, _) in self.now.actual.iter_mut().zip(&units).filter(|(_, more)| more.is_some()) {
                held.get_or_insert(0);
            }
            let refused = match self.call(self.store().extend(&extend)).await {
                Ok(Drawn::Granted(moved)) => {
                    self.learn(moved);
                    None
                }
                Ok(Drawn::Refused(moved)) => Some(Limited::new(&extend.levels, &moved, &units).into_error()),
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

    /// Takes what turned out to be needed, or gives back what was not: never refused, and what is missing is debt.
    /// No more is given back than is held. A change that the store did not hear of is kept and travels with the settle, which
    /// the answer says.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for a limit that is not known, and a [`StoreError::Ended`] for a lease that has ended, or
    /// whose end has begun.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the change made: it is told with the end if the store has not heard of it.
    pub async fn adjust<'a>(
        &mut self,
        changes: impl AsRef<[(&'a str, i64)]>,
    ) -> Result<Adjusted, LimitError> {
        self.check_open()?;
        let deltas = self.now.levels.deltas(changes.as_ref())?;
        check_held(&self.now.levels, &self.now.actual, &deltas)?;
        let gives_back = deltas.iter().flatten().any(|delta| *delta < 0);
        for (held, delta) in self.now.actual.iter_mut().zip(&deltas) {
            if let Some(delta) = delta {
                *held = Some(held.unwrap_or(0).saturating_add_signed(*delta));
            }
        }
        if self.backing == Backing::Nobody {
            return Ok(Adjusted::Now);
        }
        let (step, levels) = (self.next_step(), Arc::clone(&self.now.levels));
        let adjust = Adjust { lease: self.now.lease, step, levels, deltas };
        match self.call(self.store().adjust(&adjust)).await {
            Ok(moved) => {
                self.learn(moved);
                if gives_back {
                    self.shared.turns.returned(&self.now.levels);
                }
                Ok(Adjusted::Now)
            }
            Err(failed) if failed.error.is_transient() => Ok(Adjusted::WithSettle),
            Err(failed) => Err(LimitError::Store(failed.error)),
        }
    }

    /// Gives the lease `span` from now on, by the store's clock and at most a day; one that has more time is left with it.
    /// What it holds stays as it is. Whoever renews a lease well before each deadline keeps it for as long as it lives.
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] when the store is away: the lease may have more time or not, and can be renewed again. A
    /// [`StoreError::Ended`] for a lease that has ended, its deadline included, or whose end has begun, and a
    /// [`StoreError::Invalid`] for a longer span.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it renewed or not. Nothing else changes.
    pub async fn renew(&mut self, span: Duration) -> Result<(), LimitError> {
        self.check_open()?;
        if self.backing == Backing::Nobody {
            return Ok(());
        }
        let (step, levels) = (self.next_step(), Arc::clone(&self.now.levels));
        let renew = Renew { lease: self.now.lease, step, levels, span };
        let renewed = self.call(self.store().renew(&renew)).await;
        renewed.map(drop).map_err(|failed| self.shared.failure(failed.error))
    }

    /// Ends the lease at what was used of the limits named, and at what is held of the others. More than is held
    /// may leave a debt.
    ///
    /// Settling again at the same is answered as the first time.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for a limit that is not known: nothing was said, and the lease stays open.
    ///
    /// After any other error the lease is not open any more. Dropped, it is settled at this in the background, and never
    /// cancelled:
    ///
    /// | error | what became of it | what its holder may do |
    /// |---|---|---|
    /// | [`StoreError::Ended`], [`StoreError::NoLease`] | it has ended otherwise: by its deadline, or as it was ended before | nothing: it is over |
    /// | [`LimitError::Unavailable`]: the store is away, and the settler is full | the store may have done it | settle at the same again |
    /// | [`StoreError::Denied`], [`StoreError::Corrupt`], [`StoreError::Full`] | nothing was done; the store may be repaired | settle at the same again or at something else, cancel; dropped, the settler tries for ten minutes |
    /// | [`StoreError::Invalid`], [`StoreError::Late`], [`StoreError::Closed`], all others | nothing was done, and the same would be refused again | settle at something else, cancel; dropped, it is [unsettled](super::LimiterStats::unsettled), and ends by its deadline |
    ///
    /// # Cancel safety
    /// Dropping the future does not undo it: the settler goes on.
    pub async fn settle<'a>(&mut self, actual: impl AsRef<[(&'a str, u64)]>) -> Result<Settled, LimitError> {
        let mut amounts = self.now.levels.amounts(actual.as_ref())?;
        for (actual, held) in amounts.iter_mut().zip(&self.now.actual) {
            *actual = actual.or(*held);
        }
        let is_same = self.now.actual == amounts;
        match self.state {
            State::Ended { how: Ending::Settled, answer } if is_same => return Ok(answer),
            // Nobody waited for the answer the first time.
            State::Ending(Ending::Settled) | State::Refused(Ending::Settled) if is_same => {
                return self.end(Ending::Settled, true).await;
            }
            _ => self.check_not_ending()?,
        }
        // What was said before and not done is not what it holds at the store.
        let is_again = matches!(self.state, State::Refused(_));
        let gives_back = is_again || amounts.iter().zip(&self.now.actual).any(|(actual, held)| actual < held);
        self.now.actual = amounts;
        self.next_step();
        // From here on it is not open, even if the store panics.
        self.state = State::Ending(Ending::Settled);
        if self.is_here()
            && let Some(answer) = self.store().settle(&self.now).now()
        {
            // Such a store is not away, so there is nothing to remember for later.
            return self.ended(answer.map(drop), Ending::Settled, gives_back);
        }
        self.end(Ending::Settled, gives_back).await
    }

    /// Ends the lease at what it holds.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    /// As [`settle`](Self::settle).
    pub async fn settle_as_held(&mut self) -> Result<Settled, LimitError> {
        self.settle([]).await
    }

    /// Ends the lease as if it had never been: all of it returns, adjustments included.
    ///
    /// # Errors
    /// A [`StoreError::Ended`] for a lease that was settled, and the other errors of [`settle`](Self::settle): dropped
    /// after one of them, the lease is cancelled in the background.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo it: the settler goes on.
    pub async fn cancel(&mut self) -> Result<Settled, LimitError> {
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

    /// Tells the store of an end, or the settler if the store is away.
    pub(super) async fn end(&mut self, how: Ending, gives_back: bool) -> Result<Settled, LimitError> {
        self.state = State::Ending(how);
        let answer = match (self.backing, how) {
            (Backing::Nobody, _) => Ok(()),
            (_, Ending::Cancelled) => {
                let cancel = self.cancellation();
                self.call(self.store().cancel(&cancel)).await.map(drop)
            }
            _ => self.call(self.store().settle(&self.now)).await.map(drop),
        };
        match answer {
            Err(failed) if failed.error.is_transient() => {
                if self.shared.settle_later(self.ending(how)) {
                    self.close(how, Settled::Later);
                    return Ok(Settled::Later);
                }
                // It may have ended or not: whoever holds it may say the same again, and a drop does.
                Err(self.shared.failure(failed.error))
            }
            answer => self.ended(answer.map_err(StoreError::from), how, gives_back),
        }
    }

    /// The store has answered an ending.
    #[inline]
    pub(super) fn ended(
        &mut self,
        answer: Result<(), StoreError>,
        how: Ending,
        gives_back: bool,
    ) -> Result<Settled, LimitError> {
        match answer.as_ref().map_err(Unheard::of) {
            Ok(()) => self.close(how, Settled::Now),
            // It ended by itself before.
            Err(Unheard::Over(how)) => self.close(how, Settled::Now),
            // Never open again: what was used would return if it were dropped.
            Err(Unheard::Later | Unheard::Never) => self.state = State::Refused(how),
        }
        answer.map_err(LimitError::Store)?;
        if gives_back {
            self.shared.turns.returned(&self.now.levels);
        }
        Ok(Settled::Now)
    }

    /// It is over.
    #[inline]
    pub(super) fn close(&mut self, how: Ending, answer: Settled) {
        self.state = State::Ended { how, answer };
        self.shared.counters.ended.fetch_add(1, Ordering::SeqCst);
        if self.shared.is_closed.load(Ordering::SeqCst) {
            self.shared.lease_ended.notify_waiters();
        }
    }

    /// What is to be told to the store.
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

    /// Whether what it drew is kept in this process, so that every call is answered at once.
    pub(super) fn is_here(&self) -> bool {
        match self.backing {
            Backing::Local => true,
            Backing::Store => self.shared.is_immediate,
            Backing::Nobody => false,
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

    /// Refuses to end otherwise what may have ended.
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
            Backing::Store | Backing::Nobody => &*self.shared.store,
        }
    }

    async fn call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Failed> {
        if self.is_here() {
            return reply.await.map_err(|error| Failed { error, may_be_done: true });
        }
        self.shared.guard.call(reply).await
    }

    /// Takes in what the store told.
    fn learn(&mut self, moved: Moved) {
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

    /// The end of a lease that was dropped.
    #[cold]
    fn drop_open(&mut self, how: Ending) {
        if self.is_here() {
            // Such a store answers when it is asked.
            let answer = match self.ending(how) {
                End::Cancel(cancel) => self.store().cancel(&cancel).now(),
                End::Settle(settle) => self.store().settle(&settle).now(),
            };
            let is_over = |error: &StoreError| matches!(Unheard::of(error), Unheard::Over(_));
            if answer.is_some_and(|answer| answer.as_ref().err().is_none_or(is_over)) {
                self.shared.turns.returned(&self.now.levels);
                return;
            }
        }
        match self.backing {
            Backing::Store => drop(self.shared.settle_later(self.ending(how))),
            // The settler speaks to the store, and not to this process's share.
            Backing::Local => self.shared.lost(self.now.lease),
            Backing::Nobody => {}
        }
    }
}

/// Refuses to hold more than can be said at the end.
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
        self.close(how, Settled::Later);
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
