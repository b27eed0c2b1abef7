//! Leases whose holder is elsewhere: each call names the lease and its step, and nothing is kept here between two.
//!
//! The store's record of a lease is its one state machine. A [`Lease`] remembers for a holder in this process; here the
//! holder remembers for itself, behind a network, and this process may be started anew between two of its calls. So the
//! levels and what is held are read from the store with each call, and the store decides by the step.

use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, Turn, digest};
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, Buckets, Cancel, Drawn, Extend, Held, Moved, Reading, Renew, Renewed, Reply, Settle, Standing,
    Store, StoreError,
};

use super::error::{LimitError, Limited};
use super::lease::{Backing, Settled, State};
use super::{Lease, Limiter, Shared};

/// An open lease as its store has it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenLease {
    /// Which lease.
    pub id: LeaseId,
    /// Who drew it, and of what.
    pub subject: Subject,
    /// What it holds of each limit that takes part.
    pub held: Vec<(LimitName, u64)>,
    /// The last step that was done: its holder goes on with the next number.
    pub step: u32,
    /// When it drew.
    pub drawn_at: Stamp,
    /// When it expires.
    pub deadline: Stamp,
    /// What becomes of it then.
    pub on_expiry: OnExpiry,
    /// When it was looked at, by the clock that decides.
    pub at: Stamp,
}

/// What a step of a lease came to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseStep {
    /// When it was decided. A repeat tells when it was decided first.
    pub at: Stamp,
    /// It was done before, and nothing moved now.
    pub is_repeat: bool,
    /// The limits that took part, after it. The repeat of an ending knows of none.
    pub balances: Vec<Balance>,
}

impl Lease {
    /// Lets go of the lease without ending it: from now on it is its id. Whoever has it goes on with
    /// [`Limiter::settle_lease`] and the others, in this process or in another one over the same store; if nobody does, it
    /// ends by its deadline.
    ///
    /// It is not among [`open_leases`](super::LimiterStats::open_leases) any more, and a [drain](Limiter::drain) does not
    /// wait for it. A lease whose end has begun goes on to that end, as if it were dropped. A [degraded](Self::degraded) one
    /// is known to this process alone, and one that nobody keeps to nobody: calls on it answer that there is no such lease.
    pub fn detach(mut self) -> LeaseId {
        if let State::Open = self.state {
            // It expires, as far as this handle knows.
            self.close(Ending::Expired, Settled::Later);
        }
        self.id()
    }
}

impl Limiter {
    /// An open lease by its id, as its store has it.
    ///
    /// # Errors
    /// A [`StoreError::Ended`] for one that has ended, a [`StoreError::NoLease`] for one that never drew or ended long ago,
    /// and [`LimitError::Unavailable`] when the store is away.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn find_lease(&self, id: LeaseId) -> Result<OpenLease, LimitError> {
        let (_, Held { at, levels, record }) = self.shared.open_lease(id).await?;
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

    /// Draws more for a lease, all or nothing, as its step `step`. Refused, the lease stays as it is.
    ///
    /// # Errors
    /// [`LimitError::Limited`] and [`LimitError::TooLarge`] where a limit is short, [`LimitError::Cost`] for what cannot be
    /// asked for, and those of [`settle_lease`](Self::settle_lease).
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same step again finds out.
    pub async fn extend_lease<'a>(
        &self,
        id: LeaseId,
        step: u32,
        more: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<LeaseStep, LimitError> {
        let shared = &self.shared;
        let (backing, Held { levels, .. }) = shared.open_lease(id).await?;
        let units = levels.units(more.as_ref())?;
        let extend = Extend { lease: id, step, levels, units };
        match shared.ask_of(backing, shared.store_of(backing).extend(&extend)).await? {
            Drawn::Granted(moved) => Ok(LeaseStep::of(&extend.levels, &moved)),
            Drawn::Refused(moved) => Err(Limited::new(&extend.levels, &moved, &extend.units).into_error()),
        }
    }

    /// Takes what turned out to be needed, or gives back what was not, as the lease's step `step`: never refused, and what
    /// is missing is debt. No more is given back than is held.
    ///
    /// # Errors
    /// [`LimitError::Cost`] for a limit that is not known or too many units, and those of
    /// [`settle_lease`](Self::settle_lease).
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same step again finds out.
    pub async fn adjust_lease<'a>(
        &self,
        id: LeaseId,
        step: u32,
        changes: impl AsRef<[(&'a str, i64)]>,
    ) -> Result<LeaseStep, LimitError> {
        let shared = &self.shared;
        let (backing, Held { levels, record, .. }) = shared.open_lease(id).await?;
        let deltas = levels.deltas(changes.as_ref())?;
        // A repeat is held already.
        if record.turn(step) == Turn::Apply {
            super::lease::check_held(&levels, record.held(), &deltas)?;
        }
        let adjust = Adjust { lease: id, step, levels, deltas };
        let moved = shared.ask_of(backing, shared.store_of(backing).adjust(&adjust)).await?;
        if adjust.deltas.iter().flatten().any(|delta| *delta < 0) {
            shared.turns.returned(&adjust.levels);
        }
        Ok(LeaseStep::of(&adjust.levels, &moved))
    }

    /// Gives a lease `span` from now on, at most a day, as its step `step`; one that has more is left with it.
    ///
    /// # Errors
    /// A [`StoreError::Invalid`] for a longer span, and those of [`settle_lease`](Self::settle_lease). What is past its
    /// deadline has ended.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same step again finds out.
    pub async fn renew_lease(&self, id: LeaseId, step: u32, span: Duration) -> Result<Renewed, LimitError> {
        let shared = &self.shared;
        let (backing, Held { levels, .. }) = shared.open_lease(id).await?;
        let renew = Renew { lease: id, step, levels, span };
        shared.ask_of(backing, shared.store_of(backing).renew(&renew)).await
    }

    /// Ends a lease at what was used of the limits named, and at what it holds of the others, as its step `step`. More than
    /// is held may leave a debt. The same again is answered as the first time, for ten minutes.
    ///
    /// # Errors
    /// A [`StoreError::Ended`] for a lease that has ended otherwise, a [`StoreError::Late`] for a step that comes after a
    /// later one, a [`StoreError::NoLease`] for a lease that never drew or ended long ago, [`LimitError::Cost`] for a limit
    /// that is not known, and [`LimitError::Unavailable`] when the store is away: nothing goes on in the background, and
    /// the holder says the same again.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same step again finds out.
    pub async fn settle_lease<'a>(
        &self,
        id: LeaseId,
        step: u32,
        actual: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<LeaseStep, LimitError> {
        let (shared, actual) = (&self.shared, actual.as_ref());
        let (backing, levels) = match shared.standing(id).await? {
            (backing, Standing::Open(held)) => (backing, held.levels),
            // What it drew from is forgotten; how it ended is not.
            (_, Standing::Ended(ended)) => {
                return repeat_of(id, &ended, ended.turn_settle(step, digest(actual.iter().copied())));
            }
        };
        let actual = levels.amounts(actual)?;
        let settle = Settle { lease: id, step, levels, actual, is_watched: true };
        let moved = shared.ask_of(backing, shared.store_of(backing).settle(&settle)).await?;
        shared.turns.returned(&settle.levels);
        Ok(LeaseStep::of(&settle.levels, &moved))
    }

    /// Ends a lease as if it had never been, as its step `step`: all of it returns. Cancelling it again is answered as the
    /// first time.
    ///
    /// # Errors
    /// As [`settle_lease`](Self::settle_lease).
    ///
    /// # Cancel safety
    /// Dropping the future leaves it done or not: the same again finds out.
    pub async fn cancel_lease(&self, id: LeaseId, step: u32) -> Result<LeaseStep, LimitError> {
        let shared = &self.shared;
        let (backing, levels) = match shared.standing(id).await? {
            (backing, Standing::Open(held)) => (backing, held.levels),
            (_, Standing::Ended(ended)) => return repeat_of(id, &ended, ended.turn_cancel()),
        };
        let cancel = Cancel { lease: id, step, levels, is_watched: true };
        let moved = shared.ask_of(backing, shared.store_of(backing).cancel(&cancel)).await?;
        shared.turns.returned(&cancel.levels);
        Ok(LeaseStep::of(&cancel.levels, &moved))
    }
}

impl LeaseStep {
    fn of(levels: &Levels, moved: &Moved) -> Self {
        let balance = |reading: &Reading| {
            let subject = &levels.levels()[reading.level].subject;
            Balance::of(subject, &reading.meter(levels), 0, moved.at)
        };
        let balances = moved.readings.iter().map(balance).collect();
        Self { at: moved.at, is_repeat: moved.is_repeat, balances }
    }
}

/// The answer to an ending that comes after the end.
fn repeat_of(lease: LeaseId, ended: &Ended, turn: Turn) -> Result<LeaseStep, LimitError> {
    if turn == Turn::Repeat {
        return Ok(LeaseStep { at: ended.at, is_repeat: true, balances: Vec::new() });
    }
    Err(LimitError::Store(StoreError::Ended { lease, how: ended.how }))
}

impl Shared {
    /// The lease, if it is open, and who keeps it.
    async fn open_lease(&self, lease: LeaseId) -> Result<(Backing, Held), LimitError> {
        match self.standing(lease).await? {
            (backing, Standing::Open(held)) => Ok((backing, held)),
            (_, Standing::Ended(ended)) => {
                Err(LimitError::Store(StoreError::Ended { lease, how: ended.how }))
            }
        }
    }

    /// What is known of a lease, and who knows it: the store, or this process, which keeps its share while the store is
    /// away.
    pub(super) async fn standing(&self, lease: LeaseId) -> Result<(Backing, Standing), LimitError> {
        match self.ask(self.store.lease(lease)).await {
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
            Backing::Store | Backing::Nobody => &*self.store,
        }
    }

    async fn ask_of<T: Unpin>(&self, backing: Backing, reply: Reply<'_, T>) -> Result<T, LimitError> {
        match backing {
            // It is never away.
            Backing::Local => reply.await.map_err(LimitError::Store),
            Backing::Store | Backing::Nobody => self.ask(reply).await,
        }
    }
}
