//! Tokens per sliding window: an estimate is reserved on entry, and settled when the work ends.

use crate::event::Event;
use crate::plan::{Budget, Oversize};
use crate::refused::Refused;
use crate::time::Instant;
use crate::window::Window;

/// The tokens used in the running window.
#[derive(Debug, Clone, Default)]
pub(crate) struct BudgetGate {
    window: Window,
}

impl BudgetGate {
    /// Turned away at once, whatever else is going on.
    pub(crate) const fn refuses(plan: &Budget, tokens: u64) -> Option<Refused> {
        match plan.oversize {
            Oversize::Refuse if tokens > plan.tokens => {
                Some(Refused::TooLarge { tokens, capacity: plan.tokens })
            }
            Oversize::Refuse | Oversize::Alone => None,
        }
    }

    /// When `tokens`, with `ahead` tokens asked for by others before, fit at the earliest.
    ///
    /// A request without an estimate reserves nothing, and still waits while the budget is used up.
    pub(crate) fn ready_at(&self, plan: &Budget, ahead: u64, tokens: u64, now: Instant) -> Instant {
        // What is larger than the budget waits for an empty window.
        let wanted = ahead.saturating_add(tokens.clamp(1, plan.tokens));
        let used = self.window.total(plan.window, now);
        let excess = used.saturating_add(wanted).saturating_sub(plan.tokens);
        if excess == 0 {
            return now;
        }
        match self.window.freed_at(plan.window, now, excess.min(used)) {
            Some(freed) if excess <= used => freed,
            // Those ahead fill whole windows of their own, none of which has begun.
            freed => {
                let windows = u32::try_from((wanted - 1) / plan.tokens).unwrap_or(u32::MAX);
                freed.unwrap_or(now).max(now + plan.window.saturating_mul(windows))
            }
        }
    }

    /// Reserves an estimate.
    pub(crate) fn take(&mut self, plan: &Budget, tokens: u64, now: Instant, events: &mut Vec<Event>) {
        if tokens > 0 && self.window.record(plan.window, now, tokens) {
            events.push(Event::BudgetCoarsened);
        }
    }

    /// Replaces the estimate reserved at `entered` by what was used; what is beyond it is stamped `now`.
    pub(crate) fn settle(
        &mut self,
        plan: &Budget,
        reserved: u64,
        used: u64,
        entered: Instant,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        if used < reserved {
            self.window.take_back(entered, reserved - used);
        } else {
            self.take(plan, used - reserved, now, events);
        }
    }

    pub(crate) fn used(&self, plan: &Budget, now: Instant) -> u64 {
        self.window.total(plan.window, now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn at(secs: u64) -> Instant {
        Instant::from_nanos(secs * 1_000_000_000)
    }

    const PLAN: Budget = Budget::tokens(100, Duration::from_secs(10));

    fn used(entries: &[(u64, u64)]) -> BudgetGate {
        let mut gate = BudgetGate::default();
        for (when, tokens) in entries {
            gate.take(&PLAN, *tokens, at(*when), &mut Vec::new());
        }
        gate
    }

    #[test]
    fn g9_a_request_fits_just_after_enough_has_expired() {
        let gate = used(&[(0, 60), (3, 30)]);
        assert_eq!(gate.ready_at(&PLAN, 0, 50, at(3)), at(10).plus_nanos(1));
        assert_eq!(gate.ready_at(&PLAN, 0, 10, at(3)), at(3));
    }

    #[test]
    fn a_request_without_an_estimate_waits_while_the_budget_is_used_up() {
        let gate = used(&[(0, 100)]);
        assert_eq!(gate.ready_at(&PLAN, 0, 0, at(1)), at(10).plus_nanos(1));
        assert_eq!(used(&[(0, 99)]).ready_at(&PLAN, 0, 0, at(1)), at(1));
    }

    #[test]
    fn those_ahead_fill_windows_of_their_own() {
        let gate = used(&[(0, 60)]);
        assert_eq!(gate.ready_at(&PLAN, 0, 100, at(1)), at(10).plus_nanos(1));
        // 100 ahead and 100 of its own: one whole window must pass after the first can have entered.
        assert_eq!(gate.ready_at(&PLAN, 100, 100, at(1)), at(11));
        assert_eq!(gate.ready_at(&PLAN, 450, 100, at(1)), at(51));
    }

    #[test]
    fn larger_than_the_budget_is_refused_or_waits_for_an_empty_window() {
        let refused = Some(Refused::TooLarge { tokens: 150, capacity: 100 });
        assert_eq!(BudgetGate::refuses(&PLAN, 150), refused);
        assert_eq!(BudgetGate::refuses(&PLAN, 100), None);
        let alone = PLAN.oversize(Oversize::Alone);
        assert_eq!(BudgetGate::refuses(&alone, 150), None);
        assert_eq!(used(&[(0, 1)]).ready_at(&alone, 0, 150, at(1)), at(10).plus_nanos(1));
        assert_eq!(used(&[]).ready_at(&alone, 0, 150, at(1)), at(1));
    }
}
