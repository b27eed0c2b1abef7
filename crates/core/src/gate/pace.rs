//! Pace: a minimum interval between entries, with jitter.
//!
//! Each entry reserves the next entry time, so that ten simultaneous callers enter one by one.

use std::time::Duration;

use crate::random::Random;
use crate::time::{Instant, nanos};

/// The time of the next entry and the current interval.
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

    /// The earliest time at which a request behind `ahead` others may enter.
    pub(crate) fn ready_at(&self, ahead: u64) -> Instant {
        self.next.plus_nanos(self.interval.saturating_mul(ahead))
    }

    pub(crate) fn take(&mut self, jitter: f64, now: Instant, random: &mut Random) {
        self.last = now;
        self.next = now.plus_nanos(self.gap(jitter, random));
    }

    /// Undoes the entry at `entered` if it was the last one; its gap is released.
    pub(crate) fn undo(&mut self, entered: Instant) {
        if self.last == entered {
            self.next = self.next.min(entered);
        }
    }

    /// Sets the interval. A shorter one also shortens the current gap; a longer one applies from the next
    /// entry.
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
        // U(0, 0.5 s) yields 0.2 s at a fraction of 0.4.
        pace.take(0.5, at(0), &mut Random::fixed(0.4));
        assert_eq!(pace.ready_at(0).since(at(500)), millis(700));
    }

    #[test]
    fn simultaneous_callers_are_spaced_by_the_interval() {
        let mut pace = PaceGate::new(millis(500));
        pace.take(0.0, at(0), &mut Random::fixed(0.0));
        assert_eq!([0, 1, 2].map(|ahead| pace.ready_at(ahead)), [at(500), at(1_000), at(1_500)]);
    }

    #[test]
    fn shorter_interval_applies_at_once_longer_one_later() {
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
