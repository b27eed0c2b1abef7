//! Progress of a batch: completions, percentage, time left.

use std::collections::VecDeque;
use std::time::Duration;

use crate::cost::DIMENSIONS;
use crate::time::nanos;

/// The number of recent durations in the estimate.
const DURATIONS_MAX: usize = 50;

/// Completions of a batch of known or unknown size.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    completed: u64,
    /// In nanoseconds, each small enough that the sum is exact.
    durations: VecDeque<u64>,
    sum: u64,
    /// Units per dimension used by all requests that have ended, each attempt included.
    used: [u64; DIMENSIONS],
    /// The last reported milestone.
    reported: u32,
}

impl Progress {
    /// Counts one completion that took `duration`.
    pub fn complete(&mut self, duration: Duration) {
        self.complete_unmeasured();
        if self.durations.len() == DURATIONS_MAX
            && let Some(oldest) = self.durations.pop_front()
        {
            self.sum -= oldest;
        }
        let duration = nanos(duration).min(u64::MAX / DURATIONS_MAX as u64);
        self.durations.push_back(duration);
        self.sum += duration;
    }

    /// Counts one completion without a duration.
    pub const fn complete_unmeasured(&mut self) {
        self.completed += 1;
    }

    /// Adds the units per dimension that a request has used.
    pub(crate) fn add_used(&mut self, used: [u64; DIMENSIONS]) {
        for (sum, used) in self.used.iter_mut().zip(used) {
            *sum = sum.saturating_add(used);
        }
    }

    /// The units per dimension that `requests` will use, at the mean of those completed.
    pub(crate) fn units_of(&self, requests: u64) -> [u128; DIMENSIONS] {
        self.used.map(|used| u128::from(used) * u128::from(requests) / u128::from(self.completed.max(1)))
    }

    /// The mean of the recent durations; `None` before the first.
    pub fn duration_mean(&self) -> Option<Duration> {
        let samples = u64::try_from(self.durations.len()).ok()?;
        self.sum.checked_div(samples).map(Duration::from_nanos)
    }

    /// Completions so far.
    pub const fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns the multiple of `step` percent of `total` that was reached, if it was not returned before.
    pub fn milestone(&mut self, total: u64, step: u32) -> Option<u32> {
        if total == 0 {
            return None;
        }
        let percent = u128::from(self.completed.min(total)) * 100 / u128::from(total);
        let step = u128::from(step.max(1));
        // 100 % is always a milestone.
        let reached = if percent == 100 { 100 } else { u32::try_from(percent / step * step).unwrap_or(100) };
        let is_new = reached > self.reported;
        self.reported = self.reported.max(reached);
        is_new.then_some(reached)
    }

    /// Completions in percent of `total`, at most 100; `None` without a total.
    #[expect(clippy::cast_precision_loss, reason = "a percentage for display")]
    pub fn percentage(&self, total: u64) -> Option<f64> {
        (total > 0).then(|| (self.completed as f64 / total as f64 * 100.0).min(100.0))
    }

    /// Estimated time left: the mean recent duration times the remaining work, divided by `slots` workers.
    ///
    /// `None` without a total, and before the first measured completion.
    pub fn eta(&self, total: u64, slots: u32) -> Option<Duration> {
        if total == 0 {
            return None;
        }
        let left = total.saturating_sub(self.completed);
        if left == 0 {
            return Some(Duration::ZERO);
        }
        let samples = u128::try_from(self.durations.len()).ok().filter(|samples| *samples > 0)?;
        // No more workers than remaining items.
        let workers = u128::from(left.min(u64::from(slots.max(1))));
        let nanos = u128::from(self.sum) * u128::from(left) / samples / workers;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn the_time_left_is_shared_by_the_slots() {
        let mut progress = Progress::default();
        assert_eq!(progress.eta(10, 1), None);
        progress.complete(secs(1));
        progress.complete(secs(3));
        assert_eq!(progress.eta(10, 1), Some(secs(16)));
        assert_eq!(progress.eta(10, 2), Some(secs(8)));
        assert_eq!(progress.percentage(10), Some(20.0));
        for _ in 0..8 {
            progress.complete(secs(2));
        }
        assert_eq!(progress.eta(10, 1), Some(Duration::ZERO));
        assert_eq!((progress.completed(), progress.percentage(10)), (10, Some(100.0)));
    }

    #[test]
    fn milestones_are_reported_once_and_end_at_100() {
        let milestones = |total, step| {
            let mut progress = Progress::default();
            let mut reported = Vec::new();
            for _ in 0..total + 2 {
                progress.complete(secs(1));
                reported.extend(progress.milestone(total, step));
            }
            reported
        };
        assert_eq!(milestones(10, 10), (1..=10).map(|tenth| tenth * 10).collect::<Vec<_>>());
        assert_eq!(milestones(4, 25), [25, 50, 75, 100]);
        assert_eq!(milestones(4, 10), [20, 50, 70, 100]);
        assert_eq!(milestones(1_000, 30), [30, 60, 90, 100]);
        assert_eq!(milestones(0, 10), [0_u32; 0], "without a total there are none");
        let mut shrunk = Progress::default();
        (0..55).for_each(|_| shrunk.complete(secs(1)));
        assert_eq!((shrunk.milestone(100, 10), shrunk.milestone(50, 10)), (Some(50), Some(100)));
    }

    #[test]
    fn zero_total_has_no_percentage_or_eta() {
        let mut progress = Progress::default();
        progress.complete(secs(1));
        assert_eq!((progress.completed(), progress.percentage(0), progress.eta(0, 1)), (1, None, None));
    }

    #[test]
    fn only_the_last_fifty_durations_count() {
        let mut progress = Progress::default();
        for _ in 0..50 {
            progress.complete(secs(100));
        }
        for _ in 0..50 {
            progress.complete(secs(2));
        }
        assert_eq!(progress.eta(101, 1), Some(secs(2)));
    }
}
