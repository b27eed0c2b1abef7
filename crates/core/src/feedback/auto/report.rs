//! Reports of `Auto`: its estimates, the reason for its limits, and events when they change.

use std::time::Duration;

use super::{Advice, AutoState, narrow, per_second, secs};
use crate::control::{Control, Estimate, Reason};
use crate::event::{Change, Event};
use crate::plan::AutoLimits;
use crate::time::Instant;

/// A change of the reason is reported at most once in this many seconds.
const REPORT_EVERY: f32 = 1.0;

/// The last reported values.
#[derive(Debug, Clone, Copy)]
pub(super) struct LastReport {
    pub(super) reason: Reason,
    pub(super) at: f32,
    pub(super) rate: f32,
    pub(super) slots: u32,
}

impl AutoState {
    /// The reason for the limits of the moment, and the estimates.
    pub(crate) fn control(&self, limits: &AutoLimits, now: Instant) -> Control {
        let at = secs(now);
        let estimate = |index: usize| {
            let quota = &self.dimensions.get(index)?.quota;
            (quota.estimate > 0.0).then(|| per_second(quota.estimate))
        };
        let pace = |index: usize| self.is_counted(index).then(|| per_second(self.pace(limits, index, at)));
        let of = |index| Estimate { pace: pace(index), quota: estimate(index) };
        Control {
            reason: self.reason(limits, at),
            requests: of(0),
            tokens: of(1),
            input_tokens: of(2),
            output_tokens: of(3),
            slots: self.slots(limits),
        }
    }

    fn reason(&self, limits: &AutoLimits, now: f64) -> Reason {
        let quota = &self.dimensions[0].quota;
        let is_held = |held_at: f64| now - held_at < self.baseline.latency().max(1.0);
        if self.outage.is_dark() {
            Reason::Outage
        } else if self.dimensions.iter().any(|dimension| dimension.has_headers(now)) {
            Reason::Headers
        } else if self.cap.is_cap() {
            Reason::Concurrency
        } else if self.slow_slots > 0.0 {
            Reason::Latency
        } else if (self.slots(limits) >= limits.slots_max && is_held(self.cap.held_at))
            || (quota.rate >= limits.rate_max && is_held(quota.held_at))
        {
            Reason::Ceiling
        } else if quota.estimate > 0.0 && quota.probe.is_shared() && quota.calm > 0.0 {
            Reason::Shared
        } else {
            Reason::Probing
        }
    }

    /// Reports a change of the reason, at most once a second, and of the limits once they have moved by a
    /// third.
    pub(crate) fn report(
        &mut self,
        limits: &AutoLimits,
        advice: Advice,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        let at = secs(now);
        let reason = self.reason(limits, at);
        if reason != self.reported.reason && narrow(at) - self.reported.at >= REPORT_EVERY {
            events.push(Event::Controlled { reason: Change { from: self.reported.reason, to: reason } });
            self.reported.reason = reason;
            self.reported.at = narrow(at);
        }
        let (rate, slots) = (narrow(self.pace(limits, 0, at)), self.slots(limits));
        let is_moved = |from: f64, to: f64| to < 0.75 * from || to > 1.34 * from;
        let last = self.reported;
        if !is_moved(f64::from(last.rate), f64::from(rate))
            && !is_moved(f64::from(last.slots), f64::from(slots))
        {
            return;
        }
        self.reported = LastReport { rate, slots, ..last };
        let interval = Change { from: Duration::ZERO, to: Duration::ZERO };
        let change = Change { from: per_second(f64::from(last.rate)), to: per_second(f64::from(rate)) };
        let slots = Change { from: last.slots, to: slots };
        let is_slower = rate < last.rate || slots.to < slots.from;
        events.push(if advice.is_cut && is_slower {
            Event::Slowed { slots, interval, rate: Some(change), why: advice.why }
        } else {
            Event::SpedUp { slots, interval, rate: Some(change) }
        });
    }
}
