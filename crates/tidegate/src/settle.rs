//! Settling a request, and recording outcomes without one: refund, learn, then serve waiters.

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::gate::Ending;
use tidegate_core::outcome::Outcome;
use tidegate_core::time::Instant;

use crate::queue::Refund;
use crate::state::{Effects, State};
use crate::sync::MutexGuard;
use crate::throttle::{Inner, Throttle};

/// The clock reading that settling needs.
#[derive(Clone, Copy)]
pub(crate) enum Time {
    /// No clock reading is needed.
    Idle,
    Needed,
    Read(Instant),
}

impl Throttle {
    /// Learns from a request that had no permit.
    pub fn record(&self, outcome: Outcome) {
        self.inner.record(None, outcome);
    }

    /// Records a success.
    pub fn record_success(&self) {
        self.record(Outcome::success());
    }

    /// Records a failure.
    pub fn record_failure(&self) {
        self.record(Outcome::failure());
    }

    /// Books tokens that were used without a permit: a number, or the tokens of a cost.
    pub fn record_tokens(&self, tokens: impl Into<Cost>) {
        let spent = tokens.into();
        self.change(|state, now, effects| {
            state.gates.record_tokens(&state.plan, spent, now, &mut effects.events);
        });
    }
}

impl Inner {
    /// Settles a request, on the slow path. By value and apart, so that callers need no permit in memory for the fast
    /// path.
    #[inline(never)]
    pub(crate) fn settle_apart(&self, charge: Charge, reported: Option<Box<Cost>>, outcome: &Outcome) {
        let time = if self.needs_reading(outcome) { Time::Needed } else { Time::Idle };
        let reported = reported.map(|reported| *reported);
        self.settle_locked(Ending { charge, reported, outcome }, time);
    }

    /// Settles a request from which nothing learns, whatever its outcome unless that
    /// [is always learned](Outcome::is_always_learned). Returns `false` if nothing was done.
    #[inline]
    pub(crate) fn settle_plain(&self, charge: &Charge, is_always_learned: bool) -> bool {
        !is_always_learned && !self.settles_timed() && self.leave_plain(charge)
    }

    /// The fast path out, small enough to be inlined: nothing is learned and there are no waiters. Returns
    /// `false` if nothing was done. A charge that holds nothing needs no notification.
    #[inline]
    pub(crate) fn leave_plain(&self, charge: &Charge) -> bool {
        if !charge.holds_anything() {
            return true;
        }
        let mut state = self.lock();
        self.waiting(&state) == 0 && state.gates.leave_plain(charge)
    }

    pub(crate) fn settle_locked(&self, ending: Ending<'_>, time: Time) {
        let reading = match time {
            Time::Idle => None,
            Time::Read(now) => Some(now),
            // A measured throttle is always timed, so this check is only needed here.
            Time::Needed if self.gauge_handle.is_measured() => return self.settle_measured(ending),
            Time::Needed => Some(self.clock().now()),
        };
        let mut events = Vec::new();
        let mut state = self.lock();
        let now = reading.unwrap_or(state.gates.latest());
        let waiting = state.waiting();
        let State { plan, gates, .. } = &mut *state;
        let has_tokens_back = gates.settle(plan, ending, waiting, now, &mut events);
        if waiting > 0 || !events.is_empty() {
            let refund = if has_tokens_back { Refund::Tokens } else { Refund::Places };
            self.serve_waiters(state, reading, refund, events);
        }
    }

    /// The same for a measured throttle, which reports every outcome.
    #[cold]
    #[inline(never)]
    fn settle_measured(&self, ending: Ending<'_>) {
        let now = self.clock().now();
        let (outcome, since_entry) = (*ending.outcome, now.since(ending.charge.sent_at()));
        self.settle_locked(ending, Time::Read(now));
        self.show();
        self.observe_outcome(outcome, Some(since_entry));
    }

    pub(crate) fn record(&self, charge: Option<&mut Charge>, outcome: Outcome) {
        let now = self.clock().now();
        let since_sent = charge.as_ref().map(|charge| now.since(charge.sent_at()));
        let mut effects = Effects::default();
        let mut state = self.lock();
        let waiting = state.waiting();
        let State { plan, gates, .. } = &mut *state;
        gates.record(plan, charge, outcome, waiting, now, &mut effects.events);
        state.pump_after(now, Refund::Nothing, &mut effects);
        self.release(state, effects);
        self.observe_outcome(outcome, since_sent);
    }

    /// Books tokens that a request reports while it runs, if they exceed what it has reserved. The caller must
    /// [release](Self::release) what this returns.
    pub(crate) fn book(
        &self,
        charge: &Charge,
        before: Option<Cost>,
        reported: Cost,
    ) -> Option<(MutexGuard<'_, State>, Effects)> {
        if !self.settles_timed() || !charge.is_exceeded_by(reported) {
            return None;
        }
        let now = self.clock().now();
        let mut effects = Effects::default();
        let mut state = self.lock();
        let State { plan, gates, .. } = &mut *state;
        gates.spend(plan, charge, (before, reported), now, &mut effects.events);
        Some((state, effects))
    }

    /// The work starts now: time in our queue, in a store or in the scheduler is not upstream latency.
    #[inline]
    pub(crate) fn mark_sent(&self, charge: Charge) -> Charge {
        #[cold]
        fn mark_sent_now(throttle: &Inner, charge: Charge) -> Charge {
            charge.goes_out(throttle.clock().now())
        }
        if self.settles_timed() { mark_sent_now(self, charge) } else { charge }
    }

    /// Something learns, or a hint is counted from now.
    #[inline]
    pub(crate) fn needs_reading(&self, outcome: &Outcome) -> bool {
        self.settles_timed() || outcome.has_hint()
    }

    /// Serves waiters or reports events after a settle.
    #[cold]
    fn serve_waiters<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        reading: Option<Instant>,
        refund: Refund,
        events: Vec<Event>,
    ) {
        let mut effects = Effects { events, ..Effects::default() };
        // If the lock is released to read the clock, nothing was learned, so no event is reported out of
        // order.
        let (mut state, now) = self.time(state, reading);
        state.pump_after(now, refund, &mut effects);
        self.release(state, effects);
    }
}
