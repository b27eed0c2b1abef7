//! Four ways in, one engine: try once, wait, wait no longer than, block the thread.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;

use crate::permit::Permit;
use crate::state::{Effects, Entry, State};
use crate::sync::MutexGuard;
use crate::throttle::{Inner, Throttle};
use crate::waiting::Waiting;

impl Throttle {
    /// Waits until every gate admits `cost`, then takes it. Waiters enter in the order they asked.
    ///
    /// The place in line is taken when the future is first polled.
    ///
    /// # Errors
    /// [`Refused::Closed`], [`Refused::CircuitOpen`], [`Refused::TooLarge`] when waiting would not help, and
    /// [`Refused::Busy`] when the line is full. Nothing was taken.
    ///
    /// # Panics
    /// When it has to wait for time, and its clock cannot sleep where it is polled: the default clock and the fast
    /// one need a tokio runtime with its timer enabled.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the line and takes nothing; those behind move up at once. You lose your place.
    ///
    /// A future that is kept and not polled does not hold up the line: when its turn comes it is granted, and
    /// from then on holds what it was granted, as any permit does. Newcomers that have to wait behind it for
    /// over a second find it, and an event tells.
    #[inline]
    pub async fn acquire(&self, cost: impl Into<Cost>) -> Result<Permit<'_>, Refused> {
        let cost = cost.into();
        let reading = self.inner.reading();
        if let Some(charge) = self.inner.enter_plain(cost, reading) {
            return Ok(Permit::new(&self.inner, charge));
        }
        self.permit(self.inner.charge(cost, reading, None).await)
    }

    /// [`acquire`](Self::acquire), but no longer than `span`.
    ///
    /// It is refused as soon as it is clear that time will not do: when those ahead and itself cannot pass pause,
    /// pace and rate before then, or its tokens do not fit into the budget beside what was used for good.
    ///
    /// # Errors
    /// As `acquire`, and [`Refused::Limited`] when `span` is over or cannot be met.
    ///
    /// # Cancel safety
    /// As `acquire`.
    pub async fn acquire_within(&self, cost: impl Into<Cost>, span: Duration) -> Result<Permit<'_>, Refused> {
        self.permit(self.inner.charge(cost.into(), self.inner.reading(), Some(span)).await)
    }

    /// Enters now or not at all. It does not overtake those who wait.
    ///
    /// # Errors
    /// [`Refused`], which says when to come back where time decides. Nothing was taken.
    #[inline]
    pub fn try_acquire(&self, cost: impl Into<Cost>) -> Result<Permit<'_>, Refused> {
        let cost = cost.into();
        let reading = self.inner.reading();
        match self.inner.enter_plain(cost, reading) {
            Some(charge) => Ok(Permit::new(&self.inner, charge)),
            None => self.permit(self.inner.try_charge(cost, reading)),
        }
    }

    /// [`acquire`](Self::acquire) for threads. Not for use inside an async runtime: it blocks the thread.
    ///
    /// # Errors
    /// As `acquire`.
    pub fn acquire_blocking(&self, cost: impl Into<Cost>) -> Result<Permit<'_>, Refused> {
        self.permit(self.inner.charge_blocking(cost.into(), self.inner.reading(), None))
    }

    /// [`acquire_within`](Self::acquire_within) for threads.
    ///
    /// # Errors
    /// As `acquire_within`.
    pub fn acquire_blocking_within(
        &self,
        cost: impl Into<Cost>,
        span: Duration,
    ) -> Result<Permit<'_>, Refused> {
        self.permit(self.inner.charge_blocking(cost.into(), self.inner.reading(), Some(span)))
    }

    #[inline]
    fn permit(&self, charge: Result<Charge, Refused>) -> Result<Permit<'_>, Refused> {
        charge.map(|charge| Permit::new(&self.inner, charge))
    }
}

impl Inner {
    /// The short way in, small enough to become part of the caller: nobody waits, and slots and a rate are all
    /// there is. `None` says nothing about the request: the long way decides.
    #[inline]
    pub(crate) fn enter_plain(&self, cost: Cost, reading: Option<Instant>) -> Option<Charge> {
        if !self.is_plain() {
            return None;
        }
        let mut state = self.lock();
        // Without a reading although time matters: the plan changed a moment ago.
        if self.waiting(&state) > 0 || (reading.is_none() && state.plan.is_timed()) {
            return None;
        }
        let State { plan, gates, .. } = &mut *state;
        let now = reading.unwrap_or(gates.latest());
        gates.admit_plain(plan, cost, now)
    }

    /// Waits until it may enter, but no longer than `span`.
    pub(crate) async fn charge(
        self: &Arc<Self>,
        cost: Cost,
        reading: Option<Instant>,
        span: Option<Duration>,
    ) -> Result<Charge, Refused> {
        match self.enter(cost, reading) {
            Entry::Admitted(charge) => Ok(charge),
            Entry::Refused(refused) => Err(refused),
            Entry::Wait(_) => {
                let deadline = span.map(|span| self.clock().now() + span);
                Waiting::new(self, cost, deadline).await
            }
        }
    }

    /// The same for a thread that blocks.
    pub(crate) fn charge_blocking(
        self: &Arc<Self>,
        cost: Cost,
        reading: Option<Instant>,
        span: Option<Duration>,
    ) -> Result<Charge, Refused> {
        match self.enter(cost, reading) {
            Entry::Admitted(charge) => Ok(charge),
            Entry::Refused(refused) => Err(refused),
            Entry::Wait(_) => {
                let deadline = span.map(|span| self.clock().now() + span);
                Waiting::new(self, cost, deadline).block()
            }
        }
    }

    /// Enters now or not at all, where the short way did not do.
    pub(crate) fn try_charge(&self, cost: Cost, reading: Option<Instant>) -> Result<Charge, Refused> {
        let mut events = Vec::new();
        let (mut state, now) = self.lock_timed(reading);
        let answer = if state.waiting() > 0 {
            self.try_behind(state, cost, now)
        } else {
            let answer = match state.admit(cost, now, &mut events) {
                Entry::Admitted(charge) => Ok(charge),
                Entry::Refused(refused) => Err(refused),
                Entry::Wait(wait) => Err(state.limited(cost, wait, now)),
            };
            self.leave(state, events);
            answer
        };
        self.answered(None, answer.as_ref().map(|_| ()));
        answer
    }

    /// The way in when nobody waits: one lock, one decision.
    pub(crate) fn enter(&self, cost: Cost, reading: Option<Instant>) -> Entry {
        let mut events = Vec::new();
        let (mut state, now) = self.lock_timed(reading);
        let entry = if state.waiting() > 0 {
            self.enter_behind(state, cost, now)
        } else {
            let entry = state.admit(cost, now, &mut events);
            self.leave(state, events);
            entry
        };
        match &entry {
            Entry::Admitted(_) => self.answered(None, Ok(())),
            Entry::Refused(refused) => self.answered(None, Err(refused)),
            Entry::Wait(_) => {}
        }
        entry
    }

    /// Lets the lock go; mostly that is all.
    #[inline]
    fn leave<'a>(&'a self, state: MutexGuard<'a, State>, events: Vec<Event>) {
        if events.is_empty() && !self.gauged.is_measured() {
            drop(state);
        } else {
            self.release(state, Effects { events, ..Effects::default() });
        }
    }

    /// The way in when somebody waits: those who are due go first.
    #[cold]
    fn enter_behind<'a>(&'a self, mut state: MutexGuard<'a, State>, cost: Cost, now: Instant) -> Entry {
        let mut effects = Effects::default();
        let entry = state.enter(cost, now, &mut effects);
        self.release(state, effects);
        entry
    }

    /// The same for a caller that will not wait.
    #[cold]
    fn try_behind<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        cost: Cost,
        now: Instant,
    ) -> Result<Charge, Refused> {
        let mut effects = Effects::default();
        let answer = match state.enter(cost, now, &mut effects) {
            Entry::Admitted(charge) => Ok(charge),
            Entry::Refused(refused) => Err(refused),
            Entry::Wait(wait) => Err(state.limited(cost, wait, now)),
        };
        self.release(state, effects);
        answer
    }
}
