//! Entries per period: the token bucket of `bucket.rs`, one unit a request. It alone knows until when nothing accrues.
//!
//! While it rests the bucket stands still as it was when the rest began, or, behind an open circuit, refills to one entry and
//! no more. Nothing is shifted in advance, so a rest may be lengthened, cut short or retuned without adding units or leaving
//! debt.

use crate::bucket::{Bucket, Shape};
use crate::time::Instant;

/// The level of the rate's bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RateGate {
    /// As of the beginning of the rest, if it stands still.
    bucket: Bucket,
    /// Boxed: a throttle that does not rest should not pay for it.
    rest: Option<Box<Rest>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rest {
    from: Instant,
    until: Instant,
    kind: RestKind,
}

/// What a rest does to the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestKind {
    /// It stands still.
    Still,
    /// It refills to one entry.
    ToOne,
}

impl RateGate {
    pub(crate) const fn full() -> Self {
        Self { bucket: Bucket::full(), rest: None }
    }

    /// When a request with `ahead` others before it may enter at the earliest.
    pub(crate) fn ready_at(&self, shape: &Shape, ahead: u64, now: Instant) -> Instant {
        self.resumed(shape).free_at(shape, ahead.saturating_add(1), now)
    }

    pub(crate) fn take(&mut self, shape: &Shape, now: Instant) {
        self.bucket.debit(shape, 1, now);
    }

    /// Takes if it may; answers whether it did.
    #[inline]
    pub(crate) fn try_take(&mut self, shape: &Shape, now: Instant) -> bool {
        self.bucket.take(shape, 1, now).is_ok()
    }

    /// The entry never went out.
    pub(crate) fn give_back(&mut self, shape: &Shape) {
        self.bucket.credit(shape, 1);
    }

    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.bucket.is_full(self.stands_at(now))
    }

    pub(crate) fn level(&self, shape: &Shape, now: Instant) -> i64 {
        match &self.rest {
            Some(rest) if now < rest.until => match rest.kind {
                RestKind::Still => self.bucket.level(shape, rest.from),
                RestKind::ToOne => self.bucket.level(shape, now).min(1),
            },
            _ => self.resumed(shape).level(shape, now),
        }
    }

    /// Keeps the level under a new shape.
    pub(crate) fn tune(&mut self, old: &Shape, new: &Shape, now: Instant) {
        let at = self.stands_at(now);
        self.bucket.reshape(old, new, at);
    }

    /// Fills the bucket: what an earlier rate was owed means nothing to another one.
    pub(crate) fn refill(&mut self) {
        self.bucket = Bucket::full();
    }

    /// Leaves at most one entry in the bucket.
    pub(crate) fn leave_one(&mut self, shape: &Shape, now: Instant) {
        let at = self.stands_at(now);
        self.bucket.leave(shape, 1, at);
    }

    /// Rests from `now` until `until`, or goes on at once if that is not later; an earlier end no longer counts.
    pub(crate) fn rest_until(&mut self, until: Instant, kind: RestKind, shape: Option<&Shape>, now: Instant) {
        if let Some(rest) = &mut self.rest {
            // What it did so far stays done.
            if until <= now || rest.kind != kind {
                rest.until = rest.until.min(now);
            }
        }
        self.wake(shape, now);
        match &mut self.rest {
            Some(rest) => rest.until = until,
            None if until > now => self.rest = Some(Box::new(Rest { from: now, until, kind })),
            None => {}
        }
    }

    /// Ends a rest that is over.
    pub(crate) fn wake(&mut self, shape: Option<&Shape>, now: Instant) {
        if let Some(rest) = self.rest.take_if(|rest| rest.until <= now) {
            rest.end(&mut self.bucket, shape);
        }
    }

    /// Until when it rests; `now` if it does not.
    pub(crate) fn rests_until(&self, now: Instant) -> Instant {
        self.rest.as_ref().map_or(now, |rest| rest.until.max(now))
    }

    pub(crate) const fn is_resting(&self) -> bool {
        self.rest.is_some()
    }

    /// The bucket as it is once the rest is over.
    fn resumed(&self, shape: &Shape) -> Bucket {
        let mut bucket = self.bucket;
        if let Some(rest) = &self.rest {
            rest.end(&mut bucket, Some(shape));
        }
        bucket
    }

    /// The time for which the bucket's level holds.
    fn stands_at(&self, now: Instant) -> Instant {
        match self.rest.as_deref() {
            Some(Rest { from, kind: RestKind::Still, .. }) => *from,
            _ => now,
        }
    }
}

impl Rest {
    fn end(&self, bucket: &mut Bucket, shape: Option<&Shape>) {
        match (self.kind, shape) {
            (RestKind::Still, _) => bucket.suspend(self.from, self.until),
            (RestKind::ToOne, Some(shape)) => bucket.leave(shape, 1, self.until),
            (RestKind::ToOne, None) => {}
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
        (units..10).for_each(|_| gate.take(&shape, at(100)));
        (gate, shape)
    }

    #[test]
    fn rest_neither_adds_units_nor_leaves_debt() {
        // Units, ends of the rest as they are set, second at which it is looked at, level then.
        type Case = (u64, &'static [(u64, u64)], u64, i64);
        let table: [Case; 8] = [
            (4, &[(130, 100)], 130, 4),
            (4, &[(130, 100)], 133, 7),
            (4, &[(130, 100), (160, 110)], 162, 6),
            // Cut short at 110: five seconds later there are five more.
            (4, &[(130, 100), (110, 110)], 115, 9),
            // For ever, and then not at all.
            (4, &[(u64::MAX / 1_000_000_000, 100), (100, 100)], 101, 5),
            (0, &[(u64::MAX / 1_000_000_000, 100), (107, 107)], 109, 2),
            // One rest after another.
            (4, &[(110, 100), (130, 120)], 131, 10),
            (10, &[(130, 100)], 131, 10),
        ];
        for (units, rests, second, level) in table {
            let (mut gate, shape) = with(units);
            for (until, now) in rests {
                gate.rest_until(at(*until), RestKind::Still, Some(&shape), at(*now));
            }
            assert_eq!(gate.level(&shape, at(second)), level, "{units} {rests:?} at {second}");
            gate.wake(Some(&shape), at(second));
            assert_eq!(gate.level(&shape, at(second)), level, "woken: {units} {rests:?} at {second}");
        }
    }

    #[test]
    fn entry_returned_during_a_rest_stays() {
        let (mut gate, shape) = with(0);
        gate.rest_until(at(130), RestKind::Still, Some(&shape), at(100));
        gate.give_back(&shape);
        assert_eq!((gate.level(&shape, at(120)), gate.level(&shape, at(131))), (1, 2));
    }

    #[test]
    fn new_shape_during_a_rest_keeps_the_level() {
        let (mut gate, shape) = with(3);
        gate.rest_until(at(1_000), RestKind::Still, Some(&shape), at(100));
        let slower = Shape::new(1, Duration::from_secs(10), 10).unwrap();
        gate.tune(&shape, &slower, at(500));
        assert_eq!(gate.level(&slower, at(999)), 3);
        assert_eq!(gate.level(&slower, at(1_010)), 4);
        gate.rest_until(at(600), RestKind::Still, Some(&slower), at(600));
        assert_eq!(gate.level(&slower, at(610)), 4);
    }

    #[test]
    fn one_entry_is_left_at_the_end() {
        let (mut gate, shape) = with(10);
        gate.rest_until(at(130), RestKind::Still, Some(&shape), at(100));
        gate.leave_one(&shape, at(100));
        assert_eq!((gate.level(&shape, at(130)), gate.level(&shape, at(131))), (1, 2));
    }
    #[test]
    fn open_circuit_leaves_one_entry_and_no_debt() {
        // Units, end of the rest, when it is cut short if it is, second at which it is looked at, level then.
        let table = [
            (10, 130, None, 130, 1),
            (10, 130, None, 132, 3),
            (0, 130, None, 130, 1),
            (0, 130, None, 100, 0),
            // Too short for an entry.
            (0, 100, None, 100, 0),
            // Cut short: at most one, and it refills from there.
            (10, 130, Some(110), 110, 1),
            (10, 130, Some(110), 112, 3),
            (0, u64::MAX / 1_000_000_000, Some(100), 105, 5),
        ];
        for (units, until, cut, second, level) in table {
            let (mut gate, shape) = with(units);
            gate.rest_until(at(until), RestKind::ToOne, Some(&shape), at(100));
            if let Some(cut) = cut {
                gate.rest_until(at(cut), RestKind::ToOne, Some(&shape), at(cut));
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
        gate.rest_until(at(130), RestKind::ToOne, Some(&shape), at(100));
        gate.rest_until(at(150), RestKind::Still, Some(&shape), at(120));
        assert_eq!((gate.level(&shape, at(140)), gate.level(&shape, at(151))), (1, 2));
    }
}
