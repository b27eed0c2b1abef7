//! The time left of a batch: the slots, or the last request's entry by every other limit, whichever is later.

use std::time::Duration;

use super::gates::Gates;
use crate::cost::Cost;
use crate::feedback::Feedback;
use crate::feedback::auto::index_of;
use crate::plan::{Budget, Plan};
use crate::progress::Progress;
use crate::time::Instant;

impl Gates {
    /// The time left: at least until the last request may enter, and then runs. Later requests are assumed to cost
    /// the mean of the completed ones.
    pub(super) fn eta(
        &self,
        plan: &Plan,
        progress: &Progress,
        slots: Option<u32>,
        now: Instant,
    ) -> Option<Duration> {
        let total = plan.draft.total?;
        let by_slots = progress.eta(total, slots.unwrap_or_else(|| self.in_flight()))?;
        let left = total.saturating_sub(progress.completed()).saturating_sub(self.in_flight().into());
        let (Some(behind), Some(duration)) = (left.checked_sub(1), progress.duration_mean()) else {
            return Some(by_slots);
        };
        let units = progress.units_of(left);
        let further = u32::try_from(units[0].saturating_sub(left.into())).unwrap_or(u32::MAX);
        let last = Cost::requests(further.saturating_add(1));
        let ahead = u32::try_from(behind).unwrap_or(u32::MAX);
        let paced = self.paced_at(plan, last, ahead, now).map_or(Duration::ZERO, |(_, at)| at.since(now));
        let refilled = self.budgets(plan, now).map(|(budget, used)| {
            refill_time(budget, used, index_of(budget.counts).map_or(0, |index| units[index]))
        });
        let learned = match (&self.feedback, &plan.auto) {
            (Feedback::Auto(auto), Some(limits)) => auto.time_for(limits, units, now),
            _ => Duration::ZERO,
        };
        let entered = refilled.fold(paced.max(learned), Duration::max);
        Some(by_slots.max(entered.saturating_add(duration)))
    }

    /// The budgets, and how many tokens of each are used or reserved.
    fn budgets<'a>(&'a self, plan: &'a Plan, now: Instant) -> impl Iterator<Item = (&'a Budget, u64)> {
        let unnamed = plan.draft.budget.as_ref().map(|budget| (budget, self.budget.used(budget, now)));
        let named = self.named.as_ref().zip(plan.named.as_ref());
        unnamed.into_iter().chain(named.into_iter().flat_map(move |(named, plan)| named.used(plan, now)))
    }
}

/// The time in which a budget refills by what `tokens` need beyond the remaining ones.
fn refill_time(budget: &Budget, used: u64, tokens: u128) -> Duration {
    let excess = tokens.saturating_sub(budget.tokens.saturating_sub(used).into());
    let nanos = budget.window.as_nanos().saturating_mul(excess) / u128::from(budget.tokens);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
