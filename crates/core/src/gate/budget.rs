//! Token budget per sliding window: reserves an estimate on entry and settles it on completion.

use crate::event::Event;
use crate::plan::{Budget, Oversize};
use crate::refused::Refused;
use crate::time::Instant;
use crate::window::Window;

/// The tokens used in the current window.
#[derive(Debug, Clone, Default)]
pub(crate) struct BudgetGate {
    /// Allocated with the first tokens, so that a throttle without a budget stays small.
    used: Option<Box<TokenUse>>,
}

#[derive(Debug, Clone, Default)]
struct TokenUse {
    window: Window,
    /// The part that requests in flight have reserved, and may return.
    reserved: u64,
}

impl BudgetGate {
    /// Why a request is refused immediately, independent of the window.
    pub(crate) const fn refuses(plan: &Budget, tokens: u64) -> Option<Refused> {
        match plan.oversize {
            Oversize::Refuse if tokens > plan.tokens => {
                Some(Refused::TooLarge { tokens, capacity: plan.tokens })
            }
            Oversize::Refuse | Oversize::Alone => None,
        }
    }

    /// When `tokens` fit if nothing more is returned; `now` or earlier means immediately.
    ///
    /// A request without an estimate reserves nothing, but still waits while the budget is used up.
    pub(crate) fn ready_at(&self, plan: &Budget, tokens: u64, now: Instant) -> Instant {
        self.freed_at(plan, tokens, 0, now)
    }

    /// When `tokens` fit at the earliest: requests in flight may return all their reservations before.
    pub(crate) fn bound_at(&self, plan: &Budget, tokens: u64, now: Instant) -> Instant {
        self.freed_at(plan, tokens, self.used.as_ref().map_or(0, |used| used.reserved), now)
    }

    fn freed_at(&self, plan: &Budget, tokens: u64, returns: u64, now: Instant) -> Instant {
        // A request larger than the budget waits for an empty window.
        let wanted = tokens.clamp(1, plan.tokens);
        let Some(used) = &self.used else { return now };
        let total = used.window.total(plan.window, now);
        let excess = total.saturating_add(wanted).saturating_sub(plan.tokens).saturating_sub(returns);
        if excess == 0 {
            return now;
        }
        used.window.freed_at(plan.window, now, excess).unwrap_or(now)
    }

    /// Reserves an estimate.
    pub(crate) fn reserve(&mut self, plan: &Budget, tokens: u64, now: Instant, events: &mut Vec<Event>) {
        let used = self.used.get_or_insert_default();
        used.reserved = used.reserved.saturating_add(tokens);
        self.take(plan, tokens, now, events);
    }

    /// Records used tokens.
    pub(crate) fn take(&mut self, plan: &Budget, tokens: u64, now: Instant, events: &mut Vec<Event>) {
        if tokens > 0 && self.used.get_or_insert_default().window.record(plan.window, now, tokens) {
            events.push(Event::BudgetCoarsened);
        }
    }

    /// Removes the reservation of a request that ended.
    pub(crate) fn unreserve(&mut self, tokens: u64) {
        if let Some(used) = &mut self.used {
            used.reserved = used.reserved.saturating_sub(tokens);
        }
    }

    /// Clears the window when the budget is removed: one that is added later starts empty.
    pub(crate) fn clear(&mut self) {
        if let Some(used) = &mut self.used {
            used.window.clear();
        }
    }

    /// Removes expired entries.
    pub(crate) fn prune(&mut self, plan: &Budget, now: Instant) {
        if let Some(used) = &mut self.used {
            used.window.prune(plan.window, now);
        }
    }

    /// Replaces the tokens booked from `entered` on by the actual use; any excess is recorded at `now`.
    pub(crate) fn settle(
        &mut self,
        plan: &Budget,
        booked: u64,
        used: u64,
        entered: Instant,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        if used > booked {
            self.take(plan, used - booked, now, events);
        } else if used < booked
            && let Some(gate) = &mut self.used
        {
            gate.window.take_back(entered, booked - used);
        }
    }

    pub(crate) fn used(&self, plan: &Budget, now: Instant) -> u64 {
        self.used.as_ref().map_or(0, |used| used.window.total(plan.window, now))
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
    fn a_request_fits_just_after_enough_has_expired() {
        let gate = used(&[(0, 60), (3, 30)]);
        assert_eq!(gate.ready_at(&PLAN, 50, at(3)), at(10).plus_nanos(1));
        assert_eq!(gate.ready_at(&PLAN, 10, at(3)), at(3));
    }

    #[test]
    fn request_without_estimate_waits_for_empty_budget() {
        let gate = used(&[(0, 100)]);
        assert_eq!(gate.ready_at(&PLAN, 0, at(1)), at(10).plus_nanos(1));
        assert_eq!(used(&[(0, 99)]).ready_at(&PLAN, 0, at(1)), at(1));
    }

    #[test]
    fn reserved_tokens_do_not_count_in_the_bound() {
        let mut gate = used(&[(0, 60)]);
        gate.reserve(&PLAN, 40, at(1), &mut Vec::new());
        assert_eq!(gate.ready_at(&PLAN, 50, at(1)), at(10).plus_nanos(1));
        assert_eq!(gate.bound_at(&PLAN, 30, at(1)), at(1), "the forty may be returned at any time");
        assert_eq!(gate.bound_at(&PLAN, 50, at(1)), at(10).plus_nanos(1), "the sixty may not");
        gate.unreserve(40);
        gate.settle(&PLAN, 40, 10, at(1), at(2), &mut Vec::new());
        assert_eq!(gate.bound_at(&PLAN, 30, at(2)), at(2));
        assert_eq!(gate.bound_at(&PLAN, 31, at(2)), at(10).plus_nanos(1));
    }

    #[test]
    fn oversize_is_refused_or_waits_for_empty_window() {
        let refused = Some(Refused::TooLarge { tokens: 150, capacity: 100 });
        assert_eq!(BudgetGate::refuses(&PLAN, 150), refused);
        assert_eq!(BudgetGate::refuses(&PLAN, 100), None);
        let alone = PLAN.oversize(Oversize::Alone);
        assert_eq!(BudgetGate::refuses(&alone, 150), None);
        assert_eq!(used(&[(0, 1)]).ready_at(&alone, 150, at(1)), at(10).plus_nanos(1));
        assert_eq!(used(&[]).ready_at(&alone, 150, at(1)), at(1));
    }
}
