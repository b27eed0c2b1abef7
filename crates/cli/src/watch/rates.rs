//! Counts per second in a ring buffer of bounded size.

use std::collections::VecDeque;

use tidegate::Stamp;

const SECOND: u64 = 1_000_000;

/// Seconds that the displayed speed averages, since polls are not exactly periodic.
const SPEED_SECONDS: u32 = 3;

/// Counts per second.
#[derive(Debug, Clone)]
pub(crate) struct Rates {
    slots: VecDeque<u64>,
    /// The second of the newest slot.
    newest: u64,
    seconds_max: usize,
}

impl Rates {
    /// A ring of the last `seconds_max` seconds.
    pub(crate) const fn new(seconds_max: usize) -> Self {
        Self { slots: VecDeque::new(), newest: 0, seconds_max }
    }

    /// Adds a count at `now`.
    pub(crate) fn add(&mut self, count: u64, now: Stamp) {
        self.advance(now.as_micros() / SECOND);
        if let Some(slot) = self.slots.back_mut() {
            *slot = slot.saturating_add(count);
        }
    }

    /// Spreads a count over the seconds between two times, without loss by rounding.
    pub(crate) fn spread(&mut self, count: u64, from: Stamp, to: Stamp) {
        let (from, to) = (from.as_micros(), to.as_micros());
        if from >= to {
            return self.add(count, Stamp::from_micros(to));
        }
        // Seconds older than the ring are skipped.
        let first = (from / SECOND).max((to / SECOND).saturating_sub(self.seconds_max as u64));
        let until = |at: u64| {
            let part = u128::from(count) * u128::from(at.clamp(from, to) - from) / u128::from(to - from);
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        for second in first..=to / SECOND {
            let part = until((second + 1) * SECOND) - until(second * SECOND);
            self.add(part, Stamp::from_micros(second * SECOND));
        }
    }

    /// The counts of up to `seconds` whole seconds before `now`, the oldest first.
    pub(crate) fn last(&self, seconds: usize, now: Stamp) -> Vec<u64> {
        let current = now.as_micros() / SECOND;
        let seconds = u64::try_from(seconds).unwrap_or(u64::MAX).min(current);
        (current - seconds..current).map(|second| self.at(second)).collect()
    }

    /// The count of the last [`SPEED_SECONDS`] whole seconds. Does not allocate, since tables sort by it.
    pub(crate) fn recent(&self, now: Stamp) -> u64 {
        let current = now.as_micros() / SECOND;
        let seconds = current.saturating_sub(u64::from(SPEED_SECONDS))..current;
        seconds.fold(0, |sum, second| sum.saturating_add(self.at(second)))
    }

    /// The recent count per second.
    pub(crate) fn per_second(&self, now: Stamp) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "it is shown with three digits")]
        let sum = self.recent(now) as f64;
        sum / f64::from(SPEED_SECONDS)
    }

    fn at(&self, second: u64) -> u64 {
        let back = self.newest.checked_sub(second).and_then(|back| usize::try_from(back).ok());
        let index = back.and_then(|back| self.slots.len().checked_sub(back + 1));
        index.and_then(|index| self.slots.get(index)).copied().unwrap_or_default()
    }

    /// Moves to a second. If the clock was set back, counts go to the newest second.
    fn advance(&mut self, second: u64) {
        if self.slots.is_empty() || second.saturating_sub(self.newest) >= self.seconds_max as u64 {
            self.slots.clear();
            self.slots.push_back(0);
            self.newest = self.newest.max(second);
        }
        while self.newest < second {
            if self.slots.len() >= self.seconds_max {
                self.slots.pop_front();
            }
            self.slots.push_back(0);
            self.newest += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(millis: u64) -> Stamp {
        Stamp::from_micros(millis * 1_000)
    }

    #[test]
    fn count_is_spread_over_seconds_without_loss() {
        let mut rates = Rates::new(60);
        rates.spread(10, millis(10_500), millis(12_500));
        assert_eq!(rates.last(3, millis(13_000)), [2, 5, 3], "10.5 to 11, 11 to 12, 12 to 12.5");
        rates.spread(7, millis(12_500), millis(12_500));
        assert_eq!(rates.last(1, millis(13_000)), [10]);
        assert!((rates.per_second(millis(13_999)) - 17.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn ring_is_bounded() {
        let mut rates = Rates::new(4);
        for second in 0..1_000 {
            rates.add(1, Stamp::from_secs(second));
        }
        assert_eq!((rates.slots.len(), rates.last(6, Stamp::from_secs(1_000))), (4, vec![0, 0, 1, 1, 1, 1]));
        rates.add(5, Stamp::from_secs(5_000));
        assert_eq!((rates.slots.len(), rates.last(2, Stamp::from_secs(5_001))), (1, vec![0, 5]));
        rates.spread(1_000_000, Stamp::ZERO, Stamp::from_secs(1_000_000));
        assert_eq!(rates.last(1, Stamp::from_secs(1_000_000)), [1], "a long gap is skipped");
    }

    #[test]
    fn clock_set_back_loses_no_count() {
        let mut rates = Rates::new(4);
        rates.add(1, Stamp::from_secs(100));
        rates.add(2, Stamp::from_secs(50));
        assert_eq!(rates.last(1, Stamp::from_secs(101)), [3]);
    }
}
