//! Things on their way out: put down under a lock, handed out after it, one by one and in order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Things waiting for a slow listener; newer ones are lost to it, and counted.
const PENDING_MAX: usize = 1_024;

/// What is on its way to one listener.
pub(crate) struct Outbox<N> {
    pending: Mutex<Pending<N>>,
    lost: AtomicU64,
}

struct Pending<N> {
    notices: VecDeque<N>,
    /// Somebody is telling, and will tell what is added too.
    telling: bool,
}

impl<N> Default for Outbox<N> {
    fn default() -> Self {
        let pending = Pending { notices: VecDeque::new(), telling: false };
        Self { pending: Mutex::new(pending), lost: AtomicU64::new(0) }
    }
}

impl<N> Outbox<N> {
    pub(crate) fn put(&self, notice: N) {
        let mut pending = self.lock();
        if pending.notices.len() < PENDING_MAX {
            pending.notices.push_back(notice);
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
            // It may be the last to hold something: nothing is dropped under the lock.
            drop(pending);
            drop(notice);
        }
    }

    /// Hands out what is in the box, one by one and in order; whoever comes meanwhile leaves that to the first.
    ///
    /// A panic in `tell` goes on to the caller; what is left in the box is handed out by whoever comes next.
    pub(crate) fn deliver(&self, tell: impl Fn(N)) {
        let mut pending = self.lock();
        if pending.telling {
            return;
        }
        pending.telling = true;
        let mut unwinding = Unwinding { outbox: self, is_over: false };
        while let Some(notice) = pending.notices.pop_front() {
            drop(pending);
            tell(notice);
            pending = self.lock();
        }
        // Under the same lock that found the box empty: what is put in from now on finds nobody telling.
        pending.telling = false;
        unwinding.is_over = true;
    }

    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Pending<N>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets others tell where the one who does breaks off.
struct Unwinding<'a, N> {
    outbox: &'a Outbox<N>,
    is_over: bool,
}

impl<N> Drop for Unwinding<'_, N> {
    fn drop(&mut self) {
        if !self.is_over {
            self.outbox.lock().telling = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panic_of_one_who_tells_leaves_the_rest_to_the_next() {
        let outbox = Outbox::default();
        (1..=3).for_each(|notice| outbox.put(notice));
        let told = Mutex::new(Vec::new());
        let tell = |notice| {
            assert_ne!(notice, 2, "a bug in who tells");
            told.lock().unwrap().push(notice);
        };
        assert!(catch_unwind(AssertUnwindSafe(|| outbox.deliver(tell))).is_err());
        outbox.deliver(tell);
        assert_eq!((told.into_inner().unwrap(), outbox.lost()), (vec![1, 3], 0));
    }
}
