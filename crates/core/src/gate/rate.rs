//! Entries per period: the bucket of `bucket.rs`, one unit a request.

use crate::bucket::{Bucket, Shape};
use crate::time::Instant;

/// The level of the rate's bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateGate {
    bucket: Bucket,
}

impl RateGate {
    pub(crate) const fn full() -> Self {
        Self { bucket: Bucket::full() }
    }

    /// When a request with `ahead` others before it may enter at the earliest.
    pub(crate) fn ready_at(&self, shape: &Shape, ahead: u64, now: Instant) -> Instant {
        self.bucket.free_at(shape, ahead.saturating_add(1), now)
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
        self.bucket.is_full(now)
    }

    pub(crate) fn level(&self, shape: &Shape, now: Instant) -> i64 {
        self.bucket.level(shape, now)
    }

    /// Keeps the level under a new shape.
    pub(crate) fn tune(&mut self, old: &Shape, new: &Shape, now: Instant) {
        self.bucket.reshape(old, new, now);
    }

    /// At `then` there is at most one entry in it, and it refills from there.
    pub(crate) fn leave_one(&mut self, shape: &Shape, then: Instant) {
        self.bucket.leave(shape, 1, then);
    }

    /// A pause was set or lengthened: from `from` to `until` nothing accrues.
    pub(crate) fn suspend(&mut self, from: Instant, until: Instant) {
        self.bucket.suspend(from, until);
    }

    /// The pause that was to last until `until` ends `now`.
    pub(crate) fn unsuspend(&mut self, now: Instant, until: Instant) {
        self.bucket.unsuspend(now, until);
    }
}
