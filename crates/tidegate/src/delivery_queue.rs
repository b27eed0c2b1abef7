//! A bounded queue of notices for one listener: filled under a lock, delivered after it, one by one and in
//! order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Notices buffered for a slow listener; newer ones are lost and counted.
const PENDING_MAX: usize = 1_024;

/// The notices on their way to one listener.
pub(crate) struct DeliveryQueue<N> {
    pending: Mutex<Pending<N>>,
    lost: AtomicU64,
}

struct Pending<N> {
    notices: VecDeque<N>,
    /// A thread is delivering, and will deliver later notices too.
    is_delivering: bool,
}

impl<N> Default for DeliveryQueue<N> {
    fn default() -> Self {
        let pending = Pending { notices: VecDeque::new(), is_delivering: false };
        Self { pending: Mutex::new(pending), lost: AtomicU64::new(0) }
    }
}

impl<N> DeliveryQueue<N> {
    pub(crate) fn put(&self, notice: N) {
        let mut pending = self.lock();
        if pending.notices.len() < PENDING_MAX {
            pending.notices.push_back(notice);
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
            // Dropped after unlocking: it may hold the last reference to something.
            drop(pending);
            drop(notice);
        }
    }

    /// Delivers the queued notices one by one and in order; a concurrent call returns at once and leaves its
    /// notices to the first.
    ///
    /// A panic in `deliver_one` propagates to the caller; the remaining notices are delivered by the next
    /// call.
    pub(crate) fn deliver(&self, deliver_one: impl Fn(N)) {
        let mut pending = self.lock();
        if pending.is_delivering {
            return;
        }
        pending.is_delivering = true;
        let mut reset = ResetOnPanic { queue: self, is_over: false };
        while let Some(notice) = pending.notices.pop_front() {
            drop(pending);
            deliver_one(notice);
            pending = self.lock();
        }
        // Cleared under the same lock that found the queue empty: a later notice finds no thread delivering.
        pending.is_delivering = false;
        reset.is_over = true;
    }

    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Pending<N>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Clears the flag if delivery panics, so that a later call can deliver.
struct ResetOnPanic<'a, N> {
    queue: &'a DeliveryQueue<N>,
    is_over: bool,
}

impl<N> Drop for ResetOnPanic<'_, N> {
    fn drop(&mut self) {
        if !self.is_over {
            self.queue.lock().is_delivering = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn panicking_listener_leaves_the_rest_queued() {
        let queue = DeliveryQueue::default();
        (1..=3).for_each(|notice| queue.put(notice));
        let delivered = Mutex::new(Vec::new());
        let deliver_one = |notice| {
            assert_ne!(notice, 2, "a bug in the listener");
            delivered.lock().unwrap().push(notice);
        };
        assert!(catch_unwind(AssertUnwindSafe(|| queue.deliver(deliver_one))).is_err());
        queue.deliver(deliver_one);
        assert_eq!((delivered.into_inner().unwrap(), queue.lost()), (vec![1, 3], 0));
    }
}
