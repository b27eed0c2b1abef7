//! Rate limit: the token bucket of `bucket.rs`, in requests, with suspensions of the refill.
//!
//! While suspended, the bucket is frozen at its level, or, during an open circuit, refills to at most one
//! entry. The bucket is not shifted in advance, so a suspension can be extended, cut short or retuned without
//! adding units or leaving debt.

use crate::bucket::{Bucket, Shape};
use crate::time::Instant;

/// The level of the rate's bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RateGate {
    /// As of the start of the suspension, if frozen.
    bucket: Bucket,
    /// Boxed, so that a throttle without a suspension stays small.
    suspension: Option<Box<Suspension>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Suspension {
    from: Instant,
    until: Instant,
    kind: SuspensionKind,
}

/// The effect of a suspension on the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SuspensionKind {
    /// The level does not change.
    Frozen,
    /// The bucket refills to at most one entry.
    RefillToOne,
}

impl RateGate {
    pub(crate) const fn full() -> Self {
        Self::with_bucket(Bucket::full())
    }

    pub(crate) const fn with_bucket(bucket: Bucket) -> Self {
        Self { bucket, suspension: None }
    }

    /// The earliest time at which a caller that counts as `requests` may enter behind `ahead` single ones.
    pub(crate) fn ready_at(&self, shape: &Shape, ahead: u64, requests: u64, now: Instant) -> Instant {
        self.after_suspension(shape).free_at(shape, ahead.saturating_add(requests), now)
    }

    pub(crate) fn take(&mut self, shape: &Shape, requests: u64, now: Instant) {
        self.bucket.debit(shape, requests, now);
    }

    /// Takes one unit if available; returns whether it did.
    #[inline]
    pub(crate) fn try_take(&mut self, shape: &Shape, now: Instant) -> bool {
        self.bucket.take(shape, 1, now).is_ok()
    }

    /// Returns the units of requests that were never sent.
    pub(crate) fn give_back(&mut self, shape: &Shape, requests: u64) {
        self.bucket.credit(shape, requests);
    }

    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.bucket.is_full(self.level_time(now))
    }

    pub(crate) fn level(&self, shape: &Shape, now: Instant) -> i64 {
        match &self.suspension {
            Some(suspension) if now < suspension.until => match suspension.kind {
                SuspensionKind::Frozen => self.bucket.level(shape, suspension.from),
                SuspensionKind::RefillToOne => self.bucket.level(shape, now).min(1),
            },
            _ => self.after_suspension(shape).level(shape, now),
        }
    }

    /// Keeps the level under a new shape.
    pub(crate) fn tune(&mut self, old: &Shape, new: &Shape, now: Instant) {
        let at = self.level_time(now);
        self.bucket.reshape(old, new, at);
    }

    /// Fills the bucket, because the debt of an earlier rate does not carry over.
    pub(crate) fn refill(&mut self) {
        self.bucket = Bucket::full();
    }

    /// Leaves at most one entry in the bucket.
    pub(crate) fn leave_one(&mut self, shape: &Shape, now: Instant) {
        let at = self.level_time(now);
        self.bucket.leave(shape, 1, at);
    }

    /// Suspends the bucket from `now` until `until`, replacing an earlier end; resumes at once if `until` is
    /// not later.
    pub(crate) fn suspend_until(
        &mut self,
        until: Instant,
        kind: SuspensionKind,
        shape: Option<&Shape>,
        now: Instant,
    ) {
        if let Some(suspension) = &mut self.suspension {
            // End the old suspension now, so that its effect so far is kept.
            if until <= now || suspension.kind != kind {
                suspension.until = suspension.until.min(now);
            }
        }
        self.resume(shape, now);
        match &mut self.suspension {
            Some(suspension) => suspension.until = until,
            None if until > now => self.suspension = Some(Box::new(Suspension { from: now, until, kind })),
            None => {}
        }
    }

    /// Ends a suspension that is over.
    pub(crate) fn resume(&mut self, shape: Option<&Shape>, now: Instant) {
        if let Some(suspension) = self.suspension.take_if(|suspension| suspension.until <= now) {
            suspension.end(&mut self.bucket, shape);
        }
    }

    /// The end of the suspension; `now` if not suspended.
    pub(crate) fn suspended_until(&self, now: Instant) -> Instant {
        self.suspension.as_ref().map_or(now, |suspension| suspension.until.max(now))
    }

    pub(crate) const fn is_suspended(&self) -> bool {
        self.suspension.is_some()
    }

    /// The bucket at the end of the suspension.
    fn after_suspension(&self, shape: &Shape) -> Bucket {
        let mut bucket = self.bucket;
        if let Some(suspension) = &self.suspension {
            suspension.end(&mut bucket, Some(shape));
        }
        bucket
    }

    /// The time to which the bucket's level refers.
    fn level_time(&self, now: Instant) -> Instant {
        match self.suspension.as_deref() {
            Some(Suspension { from, kind: SuspensionKind::Frozen, .. }) => *from,
            _ => now,
        }
    }
}

impl Suspension {
    fn end(&self, bucket: &mut Bucket, shape: Option<&Shape>) {
        match (self.kind, shape) {
            (SuspensionKind::Frozen, _) => bucket.suspend(self.from, self.until),
            (SuspensionKind::RefillToOne, Some(shape)) => bucket.leave(shape, 1, self.until),
            (SuspensionKind::RefillToOne, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    fn per_second(burst: u64) -> Shape {
        Shape::new(1, Duration::from_secs(1), burst).unwrap()
    }

    /// A bucket of ten with `units` in it at second 100.
    fn with(units: u64) -> (RateGate, Shape) {
        let (mut gate, shape) = (RateGate::full(), per_second(10));
        (units..10).for_each(|_| gate.take(&shape, 1, at(100)));
        (gate, shape)
    }

    #[test]
    fn suspension_neither_adds_units_nor_leaves_debt() {
        // Units, ends of the suspension and when they are set, time of the check in seconds, expected level.
        type Case = (u64, &'static [(u64, u64)], u64, i64);
        let table: [Case; 8] = [
            (4, &[(130, 100)], 130, 4),
            (4, &[(130, 100)], 133, 7),
            (4, &[(130, 100), (160, 110)], 162, 6),
            // Cut short at 110: five more units five seconds later.
            (4, &[(130, 100), (110, 110)], 115, 9),
            // Suspended forever, then not at all.
            (4, &[(u64::MAX / 1_000_000_000, 100), (100, 100)], 101, 5),
            (0, &[(u64::MAX / 1_000_000_000, 100), (107, 107)], 109, 2),
            // Two suspensions in succession.
            (4, &[(110, 100), (130, 120)], 131, 10),
            (10, &[(130, 100)], 131, 10),
        ];
        for (units, suspensions, second, level) in table {
            let (mut gate, shape) = with(units);
            for (until, now) in suspensions {
                gate.suspend_until(at(*until), SuspensionKind::Frozen, Some(&shape), at(*now));
            }
            assert_eq!(gate.level(&shape, at(second)), level, "{units} {suspensions:?} at {second}");
            gate.resume(Some(&shape), at(second));
            assert_eq!(gate.level(&shape, at(second)), level, "resumed: {units} {suspensions:?} at {second}");
        }
    }

    #[test]
    fn entry_returned_during_a_suspension_stays() {
        let (mut gate, shape) = with(0);
        gate.suspend_until(at(130), SuspensionKind::Frozen, Some(&shape), at(100));
        gate.give_back(&shape, 1);
        assert_eq!((gate.level(&shape, at(120)), gate.level(&shape, at(131))), (1, 2));
    }

    #[test]
    fn new_shape_during_a_suspension_keeps_the_level() {
        let (mut gate, shape) = with(3);
        gate.suspend_until(at(1_000), SuspensionKind::Frozen, Some(&shape), at(100));
        let slower = Shape::new(1, Duration::from_secs(10), 10).unwrap();
        gate.tune(&shape, &slower, at(500));
        assert_eq!(gate.level(&slower, at(999)), 3);
        assert_eq!(gate.level(&slower, at(1_010)), 4);
        gate.suspend_until(at(600), SuspensionKind::Frozen, Some(&slower), at(600));
        assert_eq!(gate.level(&slower, at(610)), 4);
    }

    #[test]
    fn one_entry_is_left_at_the_end() {
        let (mut gate, shape) = with(10);
        gate.suspend_until(at(130), SuspensionKind::Frozen, Some(&shape), at(100));
        gate.leave_one(&shape, at(100));
        assert_eq!((gate.level(&shape, at(130)), gate.level(&shape, at(131))), (1, 2));
    }
    #[test]
    fn open_circuit_leaves_one_entry_and_no_debt() {
        // Units, end of the suspension, when it is cut short, time of the check in seconds, expected level.
        let table = [
            (10, 130, None, 130, 1),
            (10, 130, None, 132, 3),
            (0, 130, None, 130, 1),
            (0, 130, None, 100, 0),
            // Too short to refill an entry.
            (0, 100, None, 100, 0),
            // Cut short: at most one, and it refills from there.
            (10, 130, Some(110), 110, 1),
            (10, 130, Some(110), 112, 3),
            (0, u64::MAX / 1_000_000_000, Some(100), 105, 5),
        ];
        for (units, until, cut, second, level) in table {
            let (mut gate, shape) = with(units);
            gate.suspend_until(at(until), SuspensionKind::RefillToOne, Some(&shape), at(100));
            if let Some(cut) = cut {
                gate.suspend_until(at(cut), SuspensionKind::RefillToOne, Some(&shape), at(cut));
            }
            assert_eq!(
                gate.level(&shape, at(second)),
                level,
                "{units} until {until}, cut {cut:?}, at {second}"
            );
        }
    }

    #[test]
    fn pause_during_an_open_circuit_keeps_its_cap() {
        let (mut gate, shape) = with(10);
        gate.suspend_until(at(130), SuspensionKind::RefillToOne, Some(&shape), at(100));
        gate.suspend_until(at(150), SuspensionKind::Frozen, Some(&shape), at(120));
        assert_eq!((gate.level(&shape, at(140)), gate.level(&shape, at(151))), (1, 2));
    }
}
