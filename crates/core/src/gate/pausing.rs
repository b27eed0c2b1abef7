//! Pausing all gates: by a hint, by the size rule, or by hand; and the only end of it that is not time's.
//!
//! `pause.rs` keeps the pause; here it meets the rate, which accrues nothing while it lasts, and the events.

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
            self.rate.unsuspend(self.latest, until);
            self.feedback.wake(self.latest, until);
        }
        let resumed = self.pause.resume();
        if resumed {
            events.push(Event::Resumed);
        }
        resumed
    }

    /// Whether nobody enters at `now` because of a pause.
    pub fn is_paused(&self, plan: &Plan, now: Instant) -> bool {
        self.phase(plan, now.max(self.latest)) == Phase::Paused
    }

    /// Pauses for `span` from the latest time seen.
    pub(super) fn pause_for(&mut self, span: Duration, waiting: u32, events: &mut Vec<Event>) {
        let now = self.latest;
        let until = now + span;
        // The rate accrues nothing while paused; what an earlier pause covers is suspended already.
        let from = self.pause.until(now).unwrap_or(now);
        if self.pause.raise(until, waiting, now, &mut self.random) {
            self.rate.suspend(from, until);
            self.feedback.rest(from, until);
            // A wave of the same hints raises it by a little each time: that is one piece of news, until it adds up.
            if self.pause.is_news(span / 100) {
                events.push(Event::Paused { until, span: until.since(now) });
            }
        }
    }
}

#[cfg(test)]
#[path = "pausing_tests.rs"]
mod tests;
