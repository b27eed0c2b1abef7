//! Pauses and resumes all gates: by an upstream's hint, by the size rule, or by hand.
//!
//! `pause.rs` holds the pause itself; this file connects it with the rate, which does not refill during a
//! pause, and with the events. A rate that a controller moves is also suspended while the circuit is open.

use std::time::Duration;

use super::gates::Gates;
use super::pause::Spread;
use super::rate::SuspensionKind;
use crate::event::Event;
use crate::feedback::Feedback;
use crate::plan::Plan;
use crate::snapshot::Phase;
use crate::time::Instant;

impl Gates {
    /// Pauses by hand; returns whether this extended the pause.
    pub fn pause(
        &mut self,
        plan: &Plan,
        span: Duration,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> bool {
        self.advance_to(plan, now);
        let before = self.pause.until(self.latest);
        self.pause_for(plan, span, waiting, events);
        self.pause.until(self.latest) > before
    }

    /// Ends a pause and its tail by hand; returns whether there was one.
    pub fn resume(&mut self, plan: &Plan, now: Instant, events: &mut Vec<Event>) -> bool {
        self.advance_to(plan, now);
        let resumed = self.pause.resume();
        // An open circuit stays open and keeps the rate suspended.
        self.update_suspension(plan);
        if resumed {
            events.push(Event::Resumed);
        }
        resumed
    }

    /// Whether a pause blocks all requests at `now`.
    pub fn is_paused(&self, plan: &Plan, now: Instant) -> bool {
        !self.is_bypassed && self.phase(plan, now.max(self.latest)) == Phase::Paused
    }

    /// The end of the pause running at `now`.
    pub fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.pause.until(now.max(self.latest)).filter(|_| !self.is_bypassed)
    }

    /// Pauses for `span` from the latest clock reading.
    pub(super) fn pause_for(&mut self, plan: &Plan, span: Duration, waiting: u32, events: &mut Vec<Event>) {
        let now = self.latest;
        let until = now + span;
        // A learned pace admits waiters one by one, so nothing needs spreading.
        let spread = match &self.feedback {
            Feedback::Auto(_) => Spread::None,
            _ => Spread::Over(waiting),
        };
        if self.pause.raise(until, spread, now, &mut self.random) {
            self.update_suspension(plan);
            // A wave of equal hints extends the pause a little each time: emit one event until the extensions
            // add up.
            if self.pause.should_report(span / 100) {
                events.push(Event::Paused { until, span: until.since(now) });
            }
        }
    }

    /// Updates the suspension of the rate after a change of the pause, the circuit or the controller.
    ///
    /// Afterwards a learned rate holds at most one entry, so that waiters arrive at the rate, and not as a
    /// burst at an upstream that has just recovered. A fixed rate is an agreement with the upstream and keeps
    /// its burst.
    pub(super) fn update_suspension(&mut self, plan: &Plan) {
        let now = self.latest;
        let before = self.rate.suspended_until(now);
        let paused = self.pause.until(now).unwrap_or(now);
        let open = self.open_until(now);
        let until = open.map_or(paused, |open| open.max(paused));
        let kind = if open.is_some() { SuspensionKind::RefillToOne } else { SuspensionKind::Frozen };
        let shape = self.feedback.shape(plan);
        self.rate.suspend_until(until, kind, shape, now);
        if let Some(shape) = shape.filter(|_| until > now && self.feedback.rate().is_some()) {
            self.rate.leave_one(shape, now);
        }
        match until.cmp(&before) {
            std::cmp::Ordering::Greater => self.feedback.suspend(before, until),
            std::cmp::Ordering::Less => self.feedback.resume(until, before),
            std::cmp::Ordering::Equal => {}
        }
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            named.suspend_until(plan, paused, now);
        }
        self.has_pause = self.pause.is_set() || self.is_suspended();
    }

    /// Until when an open circuit suspends the rate, if it does.
    fn open_until(&self, now: Instant) -> Option<Instant> {
        self.feedback.rate()?;
        self.circuit.as_ref()?.open_until(now)
    }
}

#[cfg(test)]
#[path = "pausing_tests.rs"]
mod tests;
