//! What was really sent of late, per second: a rate is an allowance, and what goes out under it may be less.
//!
//! Two marks are kept, a span apart, and the earlier one is dropped when a third would be set: the average is over one
//! to two spans.

use std::time::Duration;

use crate::per_second::PerSecond;
use crate::time::Instant;

/// How far marks are apart.
const SPAN: Duration = Duration::from_secs(8);
/// Over less than this, requests that happen to come together would count as many.
const LEAST: Duration = Duration::from_secs(4);

/// A count of requests over the last while.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lately {
    marks: Option<[Mark; 2]>,
}

/// How many requests had been admitted when.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    admitted: u64,
}

impl Lately {
    /// So many have been admitted by `now`.
    pub(super) fn see(&mut self, admitted: u64, now: Instant) {
        let here = Mark { at: now, admitted };
        let [_, last] = *self.marks.get_or_insert([here; 2]);
        if now.since(last.at) >= SPAN {
            self.marks = Some([last, here]);
        }
    }

    /// What was sent per second until `now`, where it has been watched for long enough.
    pub(super) fn per_second(&self, admitted: u64, now: Instant) -> Option<PerSecond> {
        let [first, _] = self.marks?;
        let span = now.since(first.at);
        (span >= LEAST).then(|| PerSecond::of(admitted.saturating_sub(first.admitted), span))
    }

    /// Begins anew: nobody asked for all there was.
    pub(super) const fn forget(&mut self) {
        self.marks = None;
    }

    /// So much time does not count.
    pub(super) fn rest(&mut self, span: Duration) {
        for mark in self.marks.iter_mut().flatten() {
            mark.at = mark.at + span;
        }
    }

    /// So much of the time that was not to count does.
    pub(super) fn wake(&mut self, nanos: u64) {
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
    fn seen(lately: &Lately, second: u64) -> Option<u64> {
        lately.per_second(second * 2, at(second)).map(PerSecond::millionths)
    }

    #[test]
    fn it_is_told_from_four_seconds_on_and_over_no_more_than_sixteen() {
        let mut lately = Lately::default();
        assert_eq!(lately.per_second(9, at(9)), None, "nothing was seen yet");
        for second in 0..=100 {
            lately.see(second * 2, at(second));
            assert_eq!(seen(&lately, second), (second >= 4).then_some(2_000_000), "at {second} s");
        }
        // Nothing more is sent: what was sent is gone after two spans.
        for second in 101..=120 {
            lately.see(200, at(second));
        }
        assert_eq!(lately.per_second(200, at(120)), Some(PerSecond::from_millionths(0)));
        lately.forget();
        assert_eq!(lately.per_second(200, at(121)), None);
    }

    #[test]
    fn time_that_does_not_count_does_not_thin_it() {
        let mut lately = Lately::default();
        lately.see(0, at(0));
        lately.rest(Duration::from_secs(30));
        assert_eq!(lately.per_second(10, at(35)), Some(PerSecond::from_millionths(2_000_000)));
        lately.wake(nanos(Duration::from_secs(15)));
        assert_eq!(lately.per_second(10, at(20)), Some(PerSecond::from_millionths(2_000_000)));
    }
}
