//! When a request may be sent: at the current pace, which decides, and at the earliest, which callers with a deadline
//! and `retry_after` go by.

use std::time::Duration;

use super::{AutoState, secs, units};
use crate::cost::{Cost, DIMENSIONS};
use crate::plan::AutoLimits;
use crate::time::Instant;
use crate::verdict::Gate;

impl AutoState {
    /// Until when nothing is sent, whatever is returned.
    pub(crate) fn rests_until(&self, now: Instant) -> Instant {
        now + span(self.outage.rest_until - secs(now))
    }

    /// When the head of the queue may be sent at the current pace, and the gate that decides. The pace may rise while
    /// it waits.
    pub(crate) fn ready_at(&self, limits: &AutoLimits, cost: Cost, now: Instant) -> (Gate, Instant) {
        let at = secs(now);
        let wait = |index, cost| self.lack(limits, index, cost, at) / self.pace(limits, index, at);
        self.latest_of(cost, now, wait)
    }

    /// The earliest time for a request behind `ahead` others, and the gate that decides: a caller that could be
    /// admitted by then must not be refused.
    pub(crate) fn bound_at(
        &self,
        limits: &AutoLimits,
        cost: Cost,
        ahead: u32,
        now: Instant,
    ) -> (Gate, Instant) {
        let at = secs(now);
        if ahead == 0 {
            return self.latest_of(cost, now, |index, cost| self.shortest_wait(limits, index, cost, at));
        }
        (
            Gate::Rate,
            now + span(if self.outage.is_dark() { 0.0 } else { self.wait_behind(limits, ahead, at) }),
        )
    }

    /// The latest of the dimensions' waits in seconds. During an outage only its rest counts.
    fn latest_of(&self, cost: Cost, now: Instant, wait: impl Fn(usize, u64) -> f64) -> (Gate, Instant) {
        let mut latest = (Gate::Rate, 0.0);
        if !self.outage.is_dark() {
            for (index, cost) in cost.estimated().into_iter().enumerate().take(self.dimensions.len()) {
                let wait = wait(index, cost);
                if wait > latest.1 {
                    latest = (if index == 0 { Gate::Rate } else { Gate::Budget }, wait);
                }
            }
        }
        (latest.0, now + span(latest.1))
    }

    /// The shortest time in seconds in which a dimension may grant what a request of this cost lacks.
    fn shortest_wait(&self, limits: &AutoLimits, index: usize, cost: u64, now: f64) -> f64 {
        let lack = self.lack(limits, index, cost, now);
        if lack == 0.0 {
            return 0.0;
        }
        let by_estimate = lack / self.highest_pace(limits, index);
        let law = self.dimensions[index].law.as_ref();
        let Some((law, wait)) =
            law.and_then(|law| Some((law, law.wait(lack, now, self.baseline.latency())?)))
        else {
            return by_estimate;
        };
        // When the headers are stale the estimate takes over, and the limits hold in any case.
        let wait = wait.min(law.stale_at() - now + by_estimate).min(lack / self.bounded(limits, index, 0.0));
        if index == 0 { wait.max(lack / limits.rate_max) } else { wait }
    }

    /// Seconds that a request behind `ahead` others waits at least by the quota of requests. None while no quota is
    /// established: before a first measure of it, and where headers report it, because a window may grant many
    /// requests at once. Nor by tokens: what those ahead will cost is not known here, and a mean of the past would
    /// refuse callers that could be admitted.
    fn wait_behind(&self, limits: &AutoLimits, ahead: u32, now: f64) -> f64 {
        let dimension = &self.dimensions[0];
        if dimension.quota.calm == 0.0 || dimension.has_headers(now) {
            return 0.0;
        }
        let pace = self.highest_pace(limits, 0);
        let level = dimension.refilled(pace, 1.0, (now - self.at).max(0.0));
        ((f64::from(ahead) + 1.0 - level) / pace).max(0.0)
    }

    /// The highest pace that is known without headers.
    fn highest_pace(&self, limits: &AutoLimits, index: usize) -> f64 {
        let quota = &self.dimensions[index].quota;
        self.bounded(limits, index, quota.rate.max(quota.estimate).max(quota.calm))
    }

    /// The time in which the upstream grants these units per dimension: at the pace where its quota is known, and
    /// otherwise at the most that the limits allow.
    pub(crate) fn time_for(&self, limits: &AutoLimits, wanted: [u128; DIMENSIONS], now: Instant) -> Duration {
        let now = secs(now);
        let mut longest = 0.0_f64;
        for (index, wanted) in wanted.into_iter().enumerate().take(self.dimensions.len()) {
            let dimension = &self.dimensions[index];
            let pace = match dimension.quota.estimate > 0.0 || dimension.has_headers(now) {
                true if self.is_counted(index) => self.pace(limits, index, now),
                false if index == 0 => limits.rate_max,
                _ => continue,
            };
            let level = dimension.refilled(pace, self.unit(index), (now - self.at).max(0.0));
            longest = longest.max((units(u64::try_from(wanted).unwrap_or(u64::MAX)) - level) / pace);
        }
        span(longest)
    }

    /// Units that a dimension lacks for a request of this cost.
    fn lack(&self, limits: &AutoLimits, index: usize, cost: u64, now: f64) -> f64 {
        if !self.is_counted(index) {
            return 0.0;
        }
        let unit = self.unit(index);
        let pace = self.pace(limits, index, now);
        let level = self.dimensions[index].refilled(pace, unit, (now - self.at).max(0.0));
        // A request above the mean cost takes the missing units as debt, so that later requests wait.
        let lack = units(cost).min(unit) - level;
        // Less than a nanosecond's worth is a rounding error.
        if lack * 1e9 > pace { lack } else { 0.0 }
    }

    /// Records that a gate delays a request.
    pub(crate) fn hold(&mut self, limits: &AutoLimits, by: Gate, cost: Cost, now: Instant) {
        let at = secs(now);
        match by {
            Gate::Slots => self.cap.held_at = at,
            Gate::Rate | Gate::Budget if at >= self.outage.rest_until => {
                for (index, cost) in cost.estimated().into_iter().enumerate().take(self.dimensions.len()) {
                    if self.lack(limits, index, cost, at) > 0.0 {
                        self.dimensions[index].quota.held_at = at;
                    }
                }
            }
            _ => {}
        }
    }
}

fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}
