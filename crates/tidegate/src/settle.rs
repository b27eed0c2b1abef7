//! The end of a request, and outcomes reported without one: give back, learn, let in whoever that lets in.

use tidegate_core::cost::Charge;
use tidegate_core::event::Event;
use tidegate_core::gate::Ending;
use tidegate_core::outcome::Outcome;
use tidegate_core::time::Instant;

use crate::queue::Returned;
use crate::state::{Effects, State};
use crate::sync::MutexGuard;
use crate::throttle::{Inner, Throttle};

/// What settling knows of the time.
#[derive(Clone, Copy)]
pub(crate) enum Time {
    /// Nothing asks for it.
    Idle,
    Needed,
    Read(Instant),
}

impl Throttle {
    /// Learns from a request that had no permit.
    pub fn record(&self, outcome: Outcome) {
        self.inner.record(None, outcome);
    }

    /// Learns of a success.
    pub fn record_success(&self) {
        self.record(Outcome::success());
    }

    /// Learns of a failure.
    pub fn record_failure(&self) {
        self.record(Outcome::failure());
    }

    /// Books tokens that were used without having been asked for.
    pub fn record_tokens(&self, tokens: u64) {
        self.change(|state, now, effects| {
            state.gates.record_tokens(&state.plan, tokens, now, &mut effects.events);
        });
    }
}

impl Inner {
    #[inline]
    pub(crate) fn settle(&self, charge: Charge, reported: Option<u64>, outcome: Outcome) {
        if self.needs_reading(outcome) {
            self.settle_locked(Ending { charge, reported, outcome }, Time::Needed);
        } else if outcome.malformed() > 0 || !self.leave_plain(&charge) {
            self.settle_locked(Ending { charge, reported, outcome }, Time::Idle);
        }
    }

    /// The short way out, small enough to become part of the caller: nothing is learned, and nobody waits. Where nothing is
    /// held either there is nobody to tell. `false` says that nothing was done.
    #[inline]
    pub(crate) fn leave_plain(&self, charge: &Charge) -> bool {
        if !charge.holds_anything() {
            return true;
        }
        let mut state = self.lock();
        self.waiting(&state) == 0 && state.gates.leave_plain(charge)
    }

    pub(crate) fn settle_locked(&self, ending: Ending, time: Time) {
        let reading = match time {
            Time::Idle => None,
            Time::Read(now) => Some(now),
            // Whoever is measured is timed, so nobody else is asked.
            Time::Needed if self.gauged.is_measured() => return self.settle_measured(ending),
            Time::Needed => Some(self.clock().now()),
        };
        let mut events = Vec::new();
        let mut state = self.lock();
        let now = reading.unwrap_or(state.gates.latest());
        let waiting = state.waiting();
        let State { plan, gates, .. } = &mut *state;
        let has_tokens_back = gates.settle(plan, ending, waiting, now, &mut events);
        if waiting > 0 || !events.is_empty() {
            let returned = if has_tokens_back { Returned::Tokens } else { Returned::Places };
            self.let_in(state, reading, returned, events);
        }
    }

    /// The same for one that is measured, which has somebody to tell whatever comes of it.
    #[cold]
    #[inline(never)]
    fn settle_measured(&self, ending: Ending) {
        let now = self.clock().now();
        let (outcome, since_entry) = (ending.outcome, now.since(ending.charge.sent_at()));
        self.settle_locked(ending, Time::Read(now));
        self.show();
        self.ended(outcome, Some(since_entry));
    }

    pub(crate) fn record(&self, charge: Option<&mut Charge>, outcome: Outcome) {
        let now = self.clock().now();
        let since_sent = charge.as_ref().map(|charge| now.since(charge.sent_at()));
        let mut effects = Effects::default();
        let mut state = self.lock();
        let waiting = state.waiting();
        let State { plan, gates, .. } = &mut *state;
        gates.record(plan, charge, outcome, waiting, now, &mut effects.events);
        state.pump_after(now, Returned::Nothing, &mut effects);
        self.release(state, effects);
        self.ended(outcome, since_sent);
    }

    /// The work starts now: time in our queue, in a store or in the scheduler is not the upstream's latency.
    #[inline]
    pub(crate) fn goes_out(&self, charge: Charge) -> Charge {
        #[cold]
        fn goes_out_now(throttle: &Inner, charge: Charge) -> Charge {
            charge.goes_out(throttle.clock().now())
        }
        if self.settles_timed() { goes_out_now(self, charge) } else { charge }
    }

    /// Something learns, or a hint is counted from now.
    #[inline]
    pub(crate) fn needs_reading(&self, outcome: Outcome) -> bool {
        self.settles_timed() || outcome.has_hint()
    }

    /// Somebody waits, or something happened.
    #[cold]
    fn let_in<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        reading: Option<Instant>,
        returned: Returned,
        events: Vec<Event>,
    ) {
        let mut effects = Effects { events, ..Effects::default() };
        // Where the lock is let go to read the clock nothing was learned, so nothing is told out of order.
        let (mut state, now) = self.time(state, reading);
        state.pump_after(now, returned, &mut effects);
        self.release(state, effects);
    }
}
