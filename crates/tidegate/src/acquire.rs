//! The acquire variants on one engine: try once, wait, wait with a timeout, block the thread.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::cost::{Admission, Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;
use tokio::task::coop;

use crate::acquire_future::AcquireFuture;
use crate::permit::Permit;
use crate::state::{Effects, Entry, State};
use crate::sync::MutexGuard;
use crate::throttle::{Inner, Throttle};

impl Throttle {
    /// Waits until every gate admits `cost`, then takes it. Waiters are served in FIFO order.
    ///
    /// The place in the queue is taken when the future is first polled. It consumes one unit of tokio's
    /// [cooperative budget](tokio::task::coop): with none left, it yields to the runtime first, so a loop of
    /// acquires that never have to wait does not starve other tasks, timeouts and cancellation.
    ///
    /// # Errors
    /// [`Refused::Closed`], [`Refused::CircuitOpen`], [`Refused::TooLarge`] or [`Refused::AboveCapacity`] when
    /// waiting would not help, and [`Refused::Busy`] when the queue is full. Nothing was taken.
    ///
    /// # Panics
    /// If it has to wait for time and its clock cannot sleep where it is polled: the default clock and the
    /// fast clock need a tokio runtime with its timer enabled.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue and takes nothing; later waiters move up at once. You lose your
    /// place.
    ///
    /// A future that is kept but not polled does not block the queue: when its turn comes it is granted, and
    /// from then on it holds its grant as any permit does. If the grant stays uncollected for over a second,
    /// a newcomer that has to wait behind it triggers an event.
    #[inline]
    pub async fn acquire(&self, cost: impl Into<Cost>) -> Result<Permit<'_>, Refused> {
        cooperate().await;
        let cost = cost.into();
        let reading = self.inner.reading();
        if let Some(charge) = self.inner.enter_plain(cost, reading) {
            return Ok(Permit::new(&self.inner, charge));
        }
        self.permit(self.inner.charge(cost, reading, None).await)
    }

    /// [`acquire`](Self::acquire) with a timeout of `span`.
    ///
    /// It fails as soon as the timeout is known to be too short: when the waiters ahead and this caller
    /// cannot pass pause, pace and rate in time, or when its tokens do not fit into the budget beside those
    /// already used.
    ///
    /// # Errors
    /// As `acquire`, and [`Refused::Limited`] when `span` has elapsed or cannot be met.
    ///
    /// # Cancel safety
    /// As `acquire`.
    pub async fn acquire_within(&self, cost: impl Into<Cost>, span: Duration) -> Result<Permit<'_>, Refused> {
        cooperate().await;
        self.permit(self.inner.charge(cost.into(), self.inner.reading(), Some(span)).await)
    }

    /// Acquires now or fails. It does not overtake waiters.
    ///
    /// # Errors
    /// [`Refused`], with a retry time where time decides. Nothing was taken.
    #[inline]
    pub fn try_acquire(&self, cost: impl Into<Cost>) -> Result<Permit<'_>, Refused> {
        let cost = cost.into();
        let reading = self.inner.reading();
        match self.inner.enter_plain(cost, reading) {
            Some(charge) => Ok(Permit::new(&self.inner, charge)),
            None => self.permit(self.inner.try_charge(cost, reading)),
        }
    }

    /// [`acquire`](Self::acquire) for threads. Do not call it inside an async runtime: it blocks the thread.
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

/// Consumes a unit of the task's cooperative budget; without one, yields to the runtime. Outside a runtime
/// there is no budget. Called before anything is taken, so that a yielding caller holds nothing.
#[inline]
pub(crate) fn cooperate() -> impl Future<Output = ()> {
    poll_fn(|context| coop::poll_proceed(context).map(|unit| unit.made_progress()))
}

impl Inner {
    /// The fast path, small enough to be inlined: no waiters, and no gates besides slots and a rate. `None`
    /// says nothing about the request: the slow path decides.
    #[inline]
    pub(crate) fn enter_plain(&self, cost: Cost, reading: Option<Instant>) -> Option<Charge> {
        // Mostly known when this is compiled.
        if cost.is_plain() { Some(self.enter_request(reading)?.charge(cost)) } else { None }
    }

    // Apart, so that its callers stay small enough to be inlined where the cost is known.
    #[inline(never)]
    fn enter_request(&self, reading: Option<Instant>) -> Option<Admission> {
        if !self.is_plain() {
            return None;
        }
        let mut state = self.lock();
        // There is no reading although time matters: the plan has just changed.
        if self.waiting(&state) > 0 || (reading.is_none() && state.plan.is_timed()) {
            return None;
        }
        let State { plan, gates, .. } = &mut *state;
        let now = reading.unwrap_or(gates.latest());
        gates.admit_plain(plan, now)
    }

    /// Waits for admission, but no longer than `span`.
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
                AcquireFuture::new(self, cost, deadline).await
            }
        }
    }

    /// The blocking variant of [`charge`](Self::charge).
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
                AcquireFuture::new(self, cost, deadline).block()
            }
        }
    }

    /// Admits now or fails, after the fast path declined.
    #[inline(never)]
    pub(crate) fn try_charge(&self, cost: Cost, reading: Option<Instant>) -> Result<Charge, Refused> {
        let mut events = Vec::new();
        let (mut state, now) = self.lock_timed(reading);
        let answer = if state.waiting() > 0 {
            self.try_behind(state, cost, now)
        } else {
            let State { plan, gates, .. } = &mut *state;
            // Not by way of an `Entry`: a charge is large to copy.
            let answer = match gates.admit(plan, cost, 0, now, &mut events) {
                Ok(charge) => Ok(charge),
                Err(verdict) => Err(state.refusal(cost, verdict, now)),
            };
            self.leave(state, events);
            answer
        };
        self.observe_acquire(None, answer.as_ref().map(|_| ()));
        answer
    }

    /// Admits without waiters ahead: one lock, one decision.
    #[inline(never)]
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
            Entry::Admitted(_) => self.observe_acquire(None, Ok(())),
            Entry::Refused(refused) => self.observe_acquire(None, Err(refused)),
            Entry::Wait(_) => {}
        }
        entry
    }

    /// Releases the lock; usually there is nothing else to do.
    #[inline]
    fn leave<'a>(&'a self, state: MutexGuard<'a, State>, events: Vec<Event>) {
        if events.is_empty() && !self.gauge_handle.is_measured() {
            drop(state);
        } else {
            self.release(state, Effects { events, ..Effects::default() });
        }
    }

    /// Admits with waiters in the queue: due waiters are served first.
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
