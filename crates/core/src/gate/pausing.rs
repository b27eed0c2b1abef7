//! Pausing all gates: by a hint, by the size rule, or by hand; and the only end of it that is not time's.
//!
//! `pause.rs` keeps the pause; here it meets the rate, which accrues nothing while it lasts, and the events. A rate that a
//! controller moves rests as well while the circuit is open.

use std::time::Duration;

use super::gates::Gates;
use crate::event::Event;
use crate::plan::Plan;
use crate::snapshot::Phase;
use crate::time::Instant;

impl Gates {
    /// Pauses by hand; answers whether that raised anything.
    pub fn pause(
        &mut self,
        plan: &Plan,
        span: Duration,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> bool {
        self.see(plan, now);
        let before = self.pause.until(self.latest);
        self.pause_for(span, waiting, events);
        self.pause.until(self.latest) > before
    }

    /// Ends a pause and its tail by hand; answers whether there was one.
    pub fn resume(&mut self, plan: &Plan, now: Instant, events: &mut Vec<Event>) -> bool {
        self.see(plan, now);
        if let Some(until) = self.pause.until(self.latest) {
            // An open circuit goes on, and the rate rests on with it.
            let from = self.open_until(self.latest).unwrap_or(self.latest);
            if until > from {
                self.rate.unsuspend(from, until);
                self.feedback.wake(from, until);
            }
        }
        let resumed = self.pause.resume();
        self.has_pause = false;
        if resumed {
            events.push(Event::Resumed);
        }
        resumed
    }

    /// Whether nobody enters at `now` because of a pause.
    pub fn is_paused(&self, plan: &Plan, now: Instant) -> bool {
        !self.is_bypassed && self.phase(plan, now.max(self.latest)) == Phase::Paused
    }

    /// Pauses for `span` from the latest time seen.
    pub(super) fn pause_for(&mut self, span: Duration, waiting: u32, events: &mut Vec<Event>) {
        let now = self.latest;
        let until = now + span;
        // The rate accrues nothing while paused; what an earlier pause or an open circuit covers is suspended already.
        let from = self.rests_until(now);
        if self.pause.raise(until, waiting, now, &mut self.random) {
            self.has_pause = true;
            if until > from {
                self.rate.suspend(from, until);
                self.feedback.rest(from, until);
            }
            // A wave of the same hints raises it by a little each time: that is one piece of news, until it adds up.
            if self.pause.is_news(span / 100) {
                events.push(Event::Paused { until, span: until.since(now) });
            }
        }
    }

    /// The circuit has changed. Where it opened, a rate that was learned rests until the first probe, and has one entry in
    /// it then: probes come at the rate, and not as the burst that a far side just back on its feet may not bear.
    ///
    /// A rate that nobody moves is an agreement, and what was saved up under it stays.
    pub(super) fn rest_while_open(&mut self, plan: &Plan) {
        let (Some(_), Some(shape)) = (self.feedback.rate(), self.feedback.shape(plan)) else { return };
        let Some(until) = self.open_until(self.latest) else { return };
        let paused = self.pause.until(self.latest).unwrap_or(self.latest);
        self.rate.leave_one(shape, until.max(paused));
        if until > paused {
            self.feedback.rest(paused, until);
        }
    }

    /// The circuit goes away: what rested for it alone goes on from here.
    pub(super) fn wake_from_circuit(&mut self) {
        let paused = self.pause.until(self.latest).unwrap_or(self.latest);
        if let Some(until) = self.open_until(self.latest).filter(|until| *until > paused) {
            self.rate.unsuspend(paused, until);
            self.feedback.wake(paused, until);
        }
    }

    /// Until when the rate accrues nothing; `now` if it does not rest.
    pub(super) fn rests_until(&self, now: Instant) -> Instant {
        let paused = self.pause.until(now).unwrap_or(now);
        self.open_until(now).map_or(paused, |open| open.max(paused))
    }

    /// Until when an open circuit makes the rate rest, where it does.
    fn open_until(&self, now: Instant) -> Option<Instant> {
        self.feedback.rate()?;
        self.circuit.as_ref()?.open_until(now)
    }
}

#[cfg(test)]
#[path = "pausing_tests.rs"]
mod tests;
