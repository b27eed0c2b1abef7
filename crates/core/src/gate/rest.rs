//! Whether anything would be lost with this state: what a registry asks before it forgets a key.
//!
//! Gates that are as they were at the beginning equal no gates at all: forgetting them is no amnesty. What holds
//! somebody back, or is held by somebody, is never forgotten; what was learned may be, once it is old. A circuit that
//! was opened and would let a probe through holds nobody back: that the far side was dead is learned.

use super::gates::Gates;
use crate::feedback::Feedback;
use crate::plan::Plan;
use crate::time::Instant;

/// What would be lost with the state of all gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// A limit: something is held, used, paused, open or closed for good.
    Busy,
    /// What was learned, and nothing that holds anybody back.
    Learned,
    /// Nothing: it is as it was at the beginning.
    Fresh,
}

impl Gates {
    /// Somebody asked for them at `now`, and that is all.
    pub fn touch(&mut self, plan: &Plan, now: Instant) {
        self.see(plan, now);
    }

    /// What would be lost with this state at `now`.
    pub fn rest(&self, plan: &Plan, now: Instant) -> Rest {
        let now = now.max(self.latest);
        if self.is_busy(plan, now) {
            Rest::Busy
        } else if self.has_learned(plan, now) {
            Rest::Learned
        } else {
            Rest::Fresh
        }
    }

    fn is_busy(&self, plan: &Plan, now: Instant) -> bool {
        self.lifecycle.is_closing()
            || self.slots.held() > 0
            || self.recovery.held() > 0
            || self.bytes.held() > 0
            || self.pause.holds(plan.draft.pause.tail, now)
            || self.circuit.as_ref().is_some_and(|circuit| circuit.holds(now))
            || self.pace.as_ref().is_some_and(|pace| pace.ready_at(0) > now)
            || (self.feedback.shape(plan).is_some() && !self.rate.is_full(now))
            || matches!((&self.feedback, &plan.auto), (Feedback::Auto(auto), Some(limits)) if auto.is_busy(limits, now))
            || plan.draft.budget.as_ref().is_some_and(|budget| self.budget.used(budget, now) > 0)
    }

    fn has_learned(&self, plan: &Plan, now: Instant) -> bool {
        let slots = plan.draft.slots.map_or(u32::MAX, |slots| slots.start);
        let interval = plan.draft.pace.map(|pace| pace.interval_min);
        self.slots_limit != slots
            || self.pace.as_ref().map(|pace| pace.interval()) != interval
            || self.circuit.as_ref().is_some_and(|circuit| circuit.has_seen(now))
            || self.feedback.has_learned(plan, now)
            || self.progress.is_some()
    }
}

#[cfg(test)]
#[path = "rest_tests.rs"]
mod tests;
