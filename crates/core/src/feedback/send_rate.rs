//! The recently measured send rate, which may be lower than the allowed rate.
//!
//! Two marks are kept, one span apart; a third replaces the earlier one. The average covers one to two spans.

use std::time::Duration;

use crate::per_second::PerSecond;
use crate::time::Instant;

/// The time between marks.
const SPAN: Duration = Duration::from_secs(8);
/// The shortest time to measure over: below it, a few requests sent together would look like a high rate.
const LEAST: Duration = Duration::from_secs(4);

/// The send rate over the last one or two spans.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SendRate {
    marks: Option<[Mark; 2]>,
}

/// The number of requests admitted by a time.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    admitted: u64,
}

impl SendRate {
    /// Records that `admitted` requests were admitted by `now`.
    pub(super) fn record(&mut self, admitted: u64, now: Instant) {
        let here = Mark { at: now, admitted };
        let [_, last] = *self.marks.get_or_insert([here; 2]);
        if now.since(last.at) >= SPAN {
            self.marks = Some([last, here]);
        }
    }

    /// Requests sent per second until `now`; `None` if measured for too short a time.
    pub(super) fn per_second(&self, admitted: u64, now: Instant) -> Option<PerSecond> {
        let [first, _] = self.marks?;
        let span = now.since(first.at);
        (span >= LEAST).then(|| PerSecond::of(admitted.saturating_sub(first.admitted), span))
    }

    /// Restarts the measurement, because callers did not use the whole rate.
    pub(super) const fn reset(&mut self) {
        self.marks = None;
    }

    /// Excludes `span` of upcoming time (a pause) from the average.
    pub(super) fn exclude(&mut self, span: Duration) {
        for mark in self.marks.iter_mut().flatten() {
            mark.at = mark.at + span;
        }
    }

    /// Includes `nanos` of the excluded time again, because the pause ended early.
    pub(super) fn include(&mut self, nanos: u64) {
        for mark in self.marks.iter_mut().flatten() {
            mark.at = mark.at.minus_nanos(nanos);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::nanos;

    const fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    /// Millionths per second at `second`, with two sent in each second so far.
    fn measured(rate: &SendRate, second: u64) -> Option<u64> {
        rate.per_second(second * 2, at(second)).map(PerSecond::millionths)
    }

    #[test]
    fn send_rate_averages_over_four_to_sixteen_seconds() {
        let mut rate = SendRate::default();
        assert_eq!(rate.per_second(9, at(9)), None, "no record yet");
        for second in 0..=100 {
            rate.record(second * 2, at(second));
            assert_eq!(measured(&rate, second), (second >= 4).then_some(2_000_000), "at {second} s");
        }
        // Without further requests, earlier ones leave the average after two spans.
        for second in 101..=120 {
            rate.record(200, at(second));
        }
        assert_eq!(rate.per_second(200, at(120)), Some(PerSecond::from_millionths(0)));
        rate.reset();
        assert_eq!(rate.per_second(200, at(121)), None);
    }

    #[test]
    fn excluded_time_does_not_lower_send_rate() {
        let mut rate = SendRate::default();
        rate.record(0, at(0));
        rate.exclude(Duration::from_secs(30));
        assert_eq!(rate.per_second(10, at(35)), Some(PerSecond::from_millionths(2_000_000)));
        rate.include(nanos(Duration::from_secs(15)));
        assert_eq!(rate.per_second(10, at(20)), Some(PerSecond::from_millionths(2_000_000)));
    }
}
