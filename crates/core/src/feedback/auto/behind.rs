//! How long a request waits behind others: the units ahead of it over the quota that was measured.

use std::time::Duration;

use super::{AutoState, secs, units};
use crate::cost::Cost;
use crate::plan::AutoLimits;
use crate::time::Instant;
use crate::verdict::Gate;

impl AutoState {
    /// How long a request behind `ahead` others waits at least, and the gate that decides. Each of them is taken
    /// to cost the mean. `None` while no quota is established: before a first measure of it, during an outage, and
    /// where headers report it, because a window may grant many requests at once.
    pub(crate) fn wait_behind(
        &self,
        limits: &AutoLimits,
        cost: Cost,
        ahead: u32,
        now: Instant,
    ) -> Option<(Gate, Duration)> {
        let at = secs(now);
        let wait = |(index, cost): (usize, u64)| {
            let dimension = self.dimensions.get(index)?;
            let quota = &dimension.quota;
            if quota.calm == 0.0 || !self.is_counted(index) || dimension.has_headers(at) {
                return None;
            }
            // The highest of what is known, because a caller that could be admitted must not be refused.
            let pace = self.bounded(limits, index, quota.rate.max(quota.estimate).max(quota.calm));
            let unit = self.unit(index);
            let level = dimension.refilled(pace, unit, (at - self.at).max(0.0));
            let by = if index == 0 { Gate::Rate } else { Gate::Budget };
            Some((by, (f64::from(ahead) * unit + units(cost).min(unit) - level) / pace))
        };
        if self.outage.is_dark() {
            return None;
        }
        let waits = cost.estimated().into_iter().enumerate().filter_map(wait);
        let (by, wait) = waits.max_by(|one, other| one.1.total_cmp(&other.1))?;
        Some((by, Duration::try_from_secs_f64(wait.max(0.0)).unwrap_or(Duration::MAX)))
    }
}
