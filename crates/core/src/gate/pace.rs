//! The least gap between entries, with jitter.
//!
//! The next entry time is reserved when an entry is taken, so ten callers at once leave one by one.

use std::time::Duration;

use crate::random::Random;
use crate::time::{Instant, nanos};

/// When the next request may enter, and how far apart entries are kept now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PaceGate {
    /// The interval as tuned, in nanoseconds.
    interval: u64,
    last: Instant,
    next: Instant,
}

impl PaceGate {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval: nanos(interval), last: Instant::ZERO, next: Instant::ZERO }
    }

    pub(crate) const fn interval(&self) -> Duration {
        Duration::from_nanos(self.interval)
    }

    /// When a request with `ahead` others before it may enter at the earliest.
    pub(crate) fn ready_at(&self, ahead: u64) -> Instant {
        self.next.plus_nanos(self.interval.saturating_mul(ahead))
    }

    pub(crate) fn take(&mut self, jitter: f64, now: Instant, random: &mut Random) {
        self.last = now;
        self.next = now.plus_nanos(self.gap(jitter, random));
    }

    /// The entry at `entered` never went out: if it was the last one, the gate is open again as it was then.
    pub(crate) fn undo(&mut self, entered: Instant) {
        if self.last == entered {
            self.next = self.next.min(entered);
        }
    }

    /// A new interval. A shorter one also shortens the gap that is running; a longer one starts with the next.
    pub(crate) fn tune(&mut self, interval: Duration, jitter: f64, random: &mut Random) {
        let interval = nanos(interval);
        if interval < self.interval {
            self.interval = interval;
            self.next = self.next.min(self.last.plus_nanos(self.gap(jitter, random)));
        }
        self.interval = interval;
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "jitter is a fraction: 53 bits of an interval are more than enough, and `as` saturates"
    )]
    fn gap(&self, jitter: f64, random: &mut Random) -> u64 {
        if jitter <= 0.0 {
            return self.interval;
        }
        self.interval.saturating_add(random.below((self.interval as f64 * jitter) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_gap_is_the_rest_of_the_interval() {
        let mut pace = PaceGate::new(millis(1_000));
        assert!(pace.ready_at(0) <= at(0));
        pace.take(0.0, at(0), &mut Random::fixed(0.0));
        assert_eq!(pace.ready_at(0).since(at(300)), millis(700));
    }

    #[test]
    fn jitter_lengthens_the_gap() {
        let mut pace = PaceGate::new(millis(1_000));
        // U(0, 0.5 s) that comes out at 0.2 s is the fraction 0.4.
        pace.take(0.5, at(0), &mut Random::fixed(0.4));
        assert_eq!(pace.ready_at(0).since(at(500)), millis(700));
    }

    #[test]
    fn callers_at_once_are_reserved_one_by_one() {
        let mut pace = PaceGate::new(millis(500));
        pace.take(0.0, at(0), &mut Random::fixed(0.0));
        assert_eq!([0, 1, 2].map(|ahead| pace.ready_at(ahead)), [at(500), at(1_000), at(1_500)]);
    }

    #[test]
    fn a_shorter_interval_acts_at_once_and_a_longer_one_from_the_next_entry() {
        let mut pace = PaceGate::new(millis(30_000));
        let mut random = Random::fixed(0.0);
        pace.take(0.0, at(0), &mut random);
        pace.tune(millis(200), 0.0, &mut random);
        assert_eq!(pace.ready_at(0), at(200));
        pace.tune(millis(5_000), 0.0, &mut random);
        assert_eq!(pace.ready_at(0), at(200));
        assert_eq!(pace.interval(), millis(5_000));
    }
}
