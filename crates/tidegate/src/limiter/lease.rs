//! A lease: units drawn from a store, and the way back for what was not used.
//!
//! The store's record of a lease is the truth. A settle says what was used in whole numbers, not as a difference,
//! so that whatever became of an extension or an adjustment whose answer was lost is put right by it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;
use tidegate_store::{Adjust, Cancel, Drawn, Extend, Moved, Reading, Reply, Settle, Store, StoreError};

use super::Shared;
use super::error::{LimitError, Limited};
use super::guard::Failed;
use super::settler::End;

/// Units drawn from a shared limit.
///
/// Dropping a lease cancels it: all it drew returns, adjustments included. Leases of a store that is not in this
/// process are cancelled in the background.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    pub(super) id: LeaseId,
    pub(super) levels: Arc<Levels>,
    pub(super) held: Units,
    pub(super) step: u32,
    /// When the store last told about it.
    pub(super) at: Stamp,
    pub(super) readings: Vec<Reading>,
    pub(super) backing: Backing,
    pub(super) state: State,
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

#[derive(Debug)]
pub(super) enum State {
    Open,
    /// The store is being told of an ending; if nobody waits for it any more, the settler goes on.
    Ending(End),
    Ended {
        how: Ending,
        amounts: Units,
        answer: Settled,
    },
}

/// Why a lease does not stand for units of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Degraded {
    /// The store was away, and the policy said to let everybody in.
    Allowed,
    /// The store was away, and this process keeps a share by itself.
    LocalShare,
}

/// Whether the store has heard of an ending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// It has.
    Now,
    /// It is away; it will be told in the background.
    Later,
}

impl Lease {
    /// The lease's id.
    pub const fn id(&self) -> LeaseId {
        self.id
    }

    /// Who drew it, and of what.
    pub fn subject(&self) -> &Subject {
        self.levels.subject()
    }

    /// What is held of a limit; `None` where it takes no part.
    pub fn held(&self, limit: &str) -> Option<u64> {
        self.held[self.levels.position(limit).ok()?]
    }

    /// Whether, and why, the lease was given without the store.
    pub const fn degraded(&self) -> Option<Degraded> {
        match self.backing {
            Backing::Store => None,
            Backing::Local => Some(Degraded::LocalShare),
            Backing::Nobody => Some(Degraded::Allowed),
        }
    }

    /// The limits it drew from, as the store last told: at the draw, or at the last extension or adjustment.
    pub fn balances(&self) -> Vec<Balance> {
        let balance = |reading: &Reading| {
            let subject = &self.levels.levels()[reading.level].subject;
            Balance::of(subject, &reading.meter, 0, self.at)
        };
        self.readings.iter().map(balance).collect()
    }

    /// Draws more, all or nothing. Refused, the lease stays as it is.
    ///
    /// # Errors
    /// [`LimitError::Limited`] and [`LimitError::TooLarge`] where a limit is short, [`LimitError::Unavailable`] when
    /// the store is away, and a [`StoreError::Ended`] for a lease that has ended.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the lease as it was: what the store may have drawn returns when the lease ends.
    pub async fn extend<'a>(&mut self, more: impl AsRef<[(&'a str, u64)]>) -> Result<(), LimitError> {
        self.check_open()?;
        let units = self.levels.units(more.as_ref())?;
        let drawn = match self.backing {
            Backing::Nobody => None,
            Backing::Store | Backing::Local => {
                let extend = Extend {
                    lease: self.id,
                    step: self.next_step(),
                    levels: self.levels.clone(),
                    units: units.clone(),
                };
                let answer = self.call(self.store().extend(&extend)).await;
                match answer.map_err(|failed| self.shared.failure(failed.error))? {
                    Drawn::Granted(moved) => Some(moved),
                    Drawn::Refused(moved) => {
                        return Err(Limited::new(&self.levels, &moved, &units).into_error());
                    }
                }
            }
        };
        for (held, more) in self.held.iter_mut().zip(&units) {
            if let Some(more) = more {
                *held = Some(held.unwrap_or(0).saturating_add(*more));
            }
        }
        if let Some(moved) = drawn {
            self.learn(moved);
        }
        Ok(())
    }

    /// Takes what turned out to be needed, or gives back what was not: never refused, and what is missing is debt.
    /// No more is given back than is held. When the store is away the change is kept and told with the end.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for a limit that is not known, and a [`StoreError::Ended`] for a lease that has ended.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the change made: it is told with the end if the store has not heard of it.
    pub async fn adjust<'a>(&mut self, changes: impl AsRef<[(&'a str, i64)]>) -> Result<(), LimitError> {
        self.check_open()?;
        let deltas = self.levels.deltas(changes.as_ref())?;
        let gives_back = deltas.iter().flatten().any(|delta| *delta < 0);
        for (held, delta) in self.held.iter_mut().zip(&deltas) {
            if let Some(delta) = delta {
                *held = Some(held.unwrap_or(0).saturating_add_signed(*delta));
            }
        }
        if self.backing == Backing::Nobody {
            return Ok(());
        }
        let adjust = Adjust { lease: self.id, step: self.next_step(), levels: self.levels.clone(), deltas };
        match self.call(self.store().adjust(&adjust)).await {
            Ok(moved) => {
                self.learn(moved);
                if gives_back {
                    self.shared.turns.returned(&self.levels);
                }
                Ok(())
            }
            Err(failed) if failed.error.is_transient() => Ok(()),
            Err(failed) => Err(LimitError::Store(failed.error)),
        }
    }

    /// Ends the lease at what was used of the limits named, and at what is held of the others. More than is held
    /// may leave a debt.
    ///
    /// Settling again at the same is answered as the first time.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for a limit that is not known: the lease stays open. A [`StoreError::Ended`] for a lease
    /// that has ended otherwise. [`LimitError::Unavailable`] when the store is away and the settler is full.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo it: the settler goes on.
    pub async fn settle<'a>(&mut self, actual: impl AsRef<[(&'a str, u64)]>) -> Result<Settled, LimitError> {
        let mut amounts = self.levels.amounts(actual.as_ref())?;
        for (actual, held) in amounts.iter_mut().zip(&self.held) {
            *actual = actual.or(*held);
        }
        if let State::Ended { how: Ending::Settled, amounts: settled, answer } = &self.state
            && *settled == amounts
        {
            return Ok(*answer);
        }
        self.check_open()?;
        let gives_back = amounts.iter().zip(&self.held).any(|(actual, held)| actual < held);
        let step = self.next_step();
        let settle = Settle { lease: self.id, step, levels: self.levels.clone(), actual: amounts.clone() };
        self.end(End::Settle(settle), Ending::Settled, amounts, gives_back).await
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
    /// A [`StoreError::Ended`] for a lease that was settled. [`LimitError::Unavailable`] when the store is away and
    /// the settler is full.
    ///
    /// # Cancel safety
    /// Dropping the future does not undo it: the settler goes on.
    pub async fn cancel(&mut self) -> Result<Settled, LimitError> {
        if let State::Ended { how: Ending::Cancelled, answer, .. } = &self.state {
            return Ok(*answer);
        }
        self.check_open()?;
        let cancel = Cancel { lease: self.id, step: self.next_step(), levels: self.levels.clone() };
        self.end(End::Cancel(cancel), Ending::Cancelled, Units::default(), true).await
    }

    /// Tells the store of an end, or the settler if the store is away.
    async fn end(
        &mut self,
        end: End,
        how: Ending,
        amounts: Units,
        gives_back: bool,
    ) -> Result<Settled, LimitError> {
        self.state = State::Ending(end);
        let answer = match (&self.state, self.backing) {
            (State::Ending(End::Settle(settle)), Backing::Store | Backing::Local) => {
                self.call(self.store().settle(settle)).await.map(drop)
            }
            (State::Ending(End::Cancel(cancel)), Backing::Store | Backing::Local) => {
                self.call(self.store().cancel(cancel)).await.map(drop)
            }
            _ => Ok(()),
        };
        let answer = match answer {
            Ok(()) => Ok(Settled::Now),
            Err(failed) if failed.error.is_transient() => self.end_later(failed.error),
            Err(Failed { error: StoreError::Ended { lease, how }, .. }) => {
                self.state = State::Ended { how, amounts, answer: Settled::Now };
                return Err(LimitError::Store(StoreError::Ended { lease, how }));
            }
            Err(failed) => Err(LimitError::Store(failed.error)),
        };
        let said = answer.as_ref().copied().unwrap_or(Settled::Now);
        self.state = State::Ended { how, amounts, answer: said };
        if gives_back {
            self.shared.turns.returned(&self.levels);
        }
        answer
    }

    fn end_later(&mut self, error: StoreError) -> Result<Settled, LimitError> {
        let State::Ending(end) = std::mem::replace(&mut self.state, State::Open) else {
            unreachable!("only an ending is told later")
        };
        if self.shared.settle_later(end) {
            return Ok(Settled::Later);
        }
        Err(self.shared.failure(error))
    }

    fn check_open(&self) -> Result<(), LimitError> {
        match self.state {
            State::Open | State::Ending(_) => Ok(()),
            State::Ended { how, .. } => Err(LimitError::Store(StoreError::Ended { lease: self.id, how })),
        }
    }

    const fn next_step(&mut self) -> u32 {
        self.step += 1;
        self.step
    }

    fn store(&self) -> &dyn Store {
        match self.backing {
            Backing::Local => &self.shared.local,
            Backing::Store | Backing::Nobody => &*self.shared.store,
        }
    }

    async fn call<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Failed> {
        if self.shared.is_immediate || self.backing == Backing::Local {
            return reply.await.map_err(|error| Failed { error, may_be_done: true });
        }
        self.shared.guard.call(reply, self.shared.guard.until()).await
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
    fn drop_open(&mut self) {
        let end = match std::mem::replace(&mut self.state, State::Open) {
            State::Ended { .. } => return,
            State::Ending(end) => end,
            State::Open => {
                let cancel = Cancel { lease: self.id, step: self.next_step(), levels: self.levels.clone() };
                End::Cancel(cancel)
            }
        };
        if self.shared.is_immediate || self.backing == Backing::Local {
            // Such a store answers when it is first asked.
            let mut context = Context::from_waker(Waker::noop());
            let answered = match &end {
                End::Cancel(cancel) => Pin::new(&mut self.store().cancel(cancel)).poll(&mut context),
                End::Settle(settle) => Pin::new(&mut self.store().settle(settle)).poll(&mut context),
            };
            debug_assert!(answered.is_ready(), "a store that answers at once does");
            self.shared.turns.returned(&self.levels);
        } else if self.backing == Backing::Store {
            self.shared.settle_later(end);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.drop_open();
        self.shared.counters.ended.fetch_add(1, Ordering::SeqCst);
        if self.shared.is_closed.load(Ordering::SeqCst) {
            self.shared.lease_ended.notify_waiters();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.id)
            .field("subject", self.subject())
            .field("held", &self.held)
            .field("degraded", &self.degraded())
            .finish_non_exhaustive()
    }
}
