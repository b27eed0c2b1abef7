//! How much happened in each of the last seconds: a ring, so that it is as large after a year as after a minute.

use std::collections::VecDeque;

use tidegate::Stamp;

const SECOND: u64 = 1_000_000;

/// The speed that is told is that of so many whole seconds: looks come a little early and a little late.
const TOLD_OVER: u32 = 3;

/// Counts by second.
#[derive(Debug, Clone)]
pub(crate) struct Rates {
    slots: VecDeque<u64>,
    /// The second of the newest slot.
    newest: u64,
    seconds_max: usize,
}

impl Rates {
    /// Of the last so many seconds.
    pub(crate) const fn new(seconds_max: usize) -> Self {
        Self { slots: VecDeque::new(), newest: 0, seconds_max }
    }

    /// So many happened now.
    pub(crate) fn add(&mut self, count: u64, now: Stamp) {
        self.advance(now.as_micros() / SECOND);
        if let Some(slot) = self.slots.back_mut() {
            *slot = slot.saturating_add(count);
        }
    }

    /// So many happened between two times: each second has its part of them, and all parts are the whole.
    pub(crate) fn spread(&mut self, count: u64, from: Stamp, to: Stamp) {
        let (from, to) = (from.as_micros(), to.as_micros());
        if from >= to {
            return self.add(count, Stamp::from_micros(to));
        }
        // What is older than the ring is not kept, and is not walked through.
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

    /// The counts of the last whole seconds before `now`, the oldest first, at most so many.
    pub(crate) fn last(&self, seconds: usize, now: Stamp) -> Vec<u64> {
        let current = now.as_micros() / SECOND;
        let seconds = u64::try_from(seconds).unwrap_or(u64::MAX).min(current);
        (current - seconds..current).map(|second| self.at(second)).collect()
    }

    /// How many happened in the last whole seconds of which the speed is told. Nothing is allocated: tables are sorted by it.
    pub(crate) fn lately(&self, now: Stamp) -> u64 {
        let current = now.as_micros() / SECOND;
        let seconds = current.saturating_sub(u64::from(TOLD_OVER))..current;
        seconds.fold(0, |sum, second| sum.saturating_add(self.at(second)))
    }

    /// How many happen in a second.
    pub(crate) fn per_second(&self, now: Stamp) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "it is shown with three digits")]
        let sum = self.lately(now) as f64;
        sum / f64::from(TOLD_OVER)
    }

    fn at(&self, second: u64) -> u64 {
        let back = self.newest.checked_sub(second).and_then(|back| usize::try_from(back).ok());
        let index = back.and_then(|back| self.slots.len().checked_sub(back + 1));
        index.and_then(|index| self.slots.get(index)).copied().unwrap_or_default()
    }

    /// A clock that was set back counts into the newest second: nothing is forgotten for it.
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
    fn what_happened_between_two_looks_is_spread_over_the_seconds_and_none_is_lost() {
        let mut rates = Rates::new(60);
        rates.spread(10, millis(10_500), millis(12_500));
        assert_eq!(rates.last(3, millis(13_000)), [2, 5, 3], "10.5 to 11, 11 to 12, 12 to 12.5");
        rates.spread(7, millis(12_500), millis(12_500));
        assert_eq!(rates.last(1, millis(13_000)), [10]);
        assert!((rates.per_second(millis(13_999)) - 17.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_ring_holds_no_more_than_its_seconds() {
        let mut rates = Rates::new(4);
        for second in 0..1_000 {
            rates.add(1, Stamp::from_secs(second));
        }
        assert_eq!((rates.slots.len(), rates.last(6, Stamp::from_secs(1_000))), (4, vec![0, 0, 1, 1, 1, 1]));
        rates.add(5, Stamp::from_secs(5_000));
        assert_eq!((rates.slots.len(), rates.last(2, Stamp::from_secs(5_001))), (1, vec![0, 5]));
        rates.spread(1_000_000, Stamp::ZERO, Stamp::from_secs(1_000_000));
        assert_eq!(rates.last(1, Stamp::from_secs(1_000_000)), [1], "a long time is not walked through");
    }

    #[test]
    fn a_clock_that_is_set_back_loses_nothing() {
        let mut rates = Rates::new(4);
        rates.add(1, Stamp::from_secs(100));
        rates.add(2, Stamp::from_secs(50));
        assert_eq!(rates.last(1, Stamp::from_secs(101)), [3]);
    }
}
