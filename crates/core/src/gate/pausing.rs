//! Pausing all gates: by a hint, by the size rule, or by hand; and the only end of it that is not time's.
//!
//! `pause.rs` keeps the pause; here it meets the rate, which accrues nothing while it lasts, and the events. A rate that a
//! controller moves rests as well while the circuit is open.

use std::time::Duration;

use super::gates::Gates;
use super::pause::Spread;
use super::rate::RestKind;
use crate::event::Event;
use crate::feedback::Feedback;
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
        self.pause_for(plan, span, waiting, events);
        self.pause.until(self.latest) > before
    }

    /// Ends a pause and its tail by hand; answers whether there was one.
    pub fn resume(&mut self, plan: &Plan, now: Instant, events: &mut Vec<Event>) -> bool {
        self.see(plan, now);
        let resumed = self.pause.resume();
        // An open circuit goes on, and the rate rests on with it.
        self.update_rest(plan);
        if resumed {
            events.push(Event::Resumed);
        }
        resumed
    }

    /// Whether nobody enters at `now` because of a pause.
    pub fn is_paused(&self, plan: &Plan, now: Instant) -> bool {
        !self.is_bypassed && self.phase(plan, now.max(self.latest)) == Phase::Paused
    }

    /// The end of the pause that is running at `now`.
    pub fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.pause.until(now.max(self.latest)).filter(|_| !self.is_bypassed)
    }

    /// Pauses for `span` from the latest time seen.
    pub(super) fn pause_for(&mut self, plan: &Plan, span: Duration, waiting: u32, events: &mut Vec<Event>) {
        let now = self.latest;
        let until = now + span;
        // A learned pace lets waiters in one by one: nothing is left to spread.
        let spread = match &self.feedback {
            Feedback::Auto(_) => Spread::None,
            _ => Spread::Over(waiting),
        };
        if self.pause.raise(until, spread, now, &mut self.random) {
            self.update_rest(plan);
            // A wave of the same hints raises it by a little each time: that is one event, until it adds up.
            if self.pause.is_news(span / 100) {
                events.push(Event::Paused { until, span: until.since(now) });
            }
        }
    }

    /// The pause, the circuit or the controller changed: the rate rests as long as one of them says so.
    ///
    /// A learned rate has at most one entry in it after that: waiters come at the rate, and not as a burst on an upstream that has
    /// just recovered. A fixed rate is an agreement, and keeps its burst.
    pub(super) fn update_rest(&mut self, plan: &Plan) {
        let now = self.latest;
        let before = self.rate.rests_until(now);
        let paused = self.pause.until(now).unwrap_or(now);
        let open = self.open_until(now);
        let until = open.map_or(paused, |open| open.max(paused));
        let kind = if open.is_some() { RestKind::ToOne } else { RestKind::Still };
        let shape = self.feedback.shape(plan);
        self.rate.rest_until(until, kind, shape, now);
        if let Some(shape) = shape.filter(|_| until > now && self.feedback.rate().is_some()) {
            self.rate.leave_one(shape, now);
        }
        match until.cmp(&before) {
            std::cmp::Ordering::Greater => self.feedback.rest(before, until),
            std::cmp::Ordering::Less => self.feedback.wake(until, before),
            std::cmp::Ordering::Equal => {}
        }
        self.has_pause = self.pause.is_set() || self.rate.is_resting();
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
