//! Whether evicting the gates would lose state: a registry checks this before it evicts a key.
//!
//! Gates in their initial state are equivalent to new gates, so evicting them grants no amnesty. Gates that
//! limit a caller, or hold a request, are never evicted; learned state may be, once it is old. An opened
//! circuit that would let a probe through limits no caller: the knowledge that the upstream was down counts
//! as learned.

use super::gates::Gates;
use crate::feedback::Feedback;
use crate::plan::Plan;
use crate::time::Instant;

/// What evicting the gates would lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idleness {
    /// A limit: something is held, used up, paused, open or closed.
    Busy,
    /// Only learned state, which limits no caller.
    Learned,
    /// Nothing: the gates are in their initial state.
    Fresh,
}

impl Gates {
    /// Records an access at `now` without a request.
    pub fn touch(&mut self, plan: &Plan, now: Instant) {
        self.advance_to(plan, now);
    }

    /// What evicting this state at `now` would lose.
    pub fn idleness(&self, plan: &Plan, now: Instant) -> Idleness {
        let now = now.max(self.latest);
        if self.is_busy(plan, now) {
            Idleness::Busy
        } else if self.has_learned(plan, now) {
            Idleness::Learned
        } else {
            Idleness::Fresh
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
            || matches!((&self.named, &plan.named), (Some(named), Some(plan)) if named.is_busy(plan, now))
    }

    fn has_learned(&self, plan: &Plan, now: Instant) -> bool {
        let slots = plan.draft.slots.map_or(u32::MAX, |slots| slots.start);
        let interval = plan.draft.pace.map(|pace| pace.interval_min);
        self.slots_limit != slots
            || self.pace.as_ref().map(|pace| pace.interval()) != interval
            || self.circuit.as_ref().is_some_and(|circuit| circuit.has_outcomes(now))
            || self.feedback.has_learned(plan, now)
            || self.progress.is_some()
    }
}

#[cfg(test)]
#[path = "idleness_tests.rs"]
mod tests;
