//! A clock that moves only by hand and wakes its sleepers when it does.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use tidegate_core::time::Instant;

use crate::clock::{Clock, Sleep};
use crate::thread_waker::thread_waker;

/// A clock for tests: time passes only when [`advance`](Self::advance) or [`set`](Self::set) is called.
///
/// Clones share the time.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Clock, Instant, ManualClock};
///
/// let clock = ManualClock::new();
/// clock.advance(Duration::from_secs(3));
/// assert_eq!(clock.now(), Instant::ZERO + Duration::from_secs(3));
/// ```
#[derive(Debug, Clone, Default)]
pub struct ManualClock {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    now: Instant,
    readings: u64,
    sleeps: u64,
    sleepers: BTreeMap<u64, (Instant, Waker)>,
}

impl ManualClock {
    /// A clock at its origin.
    pub fn new() -> Self {
        Self::default()
    }

    /// Advances the time and wakes every sleeper that is due.
    pub fn advance(&self, span: Duration) {
        let now = self.lock().now + span;
        self.set(now);
    }

    /// Sets the time, backwards if necessary, and wakes every sleeper that is due.
    pub fn set(&self, now: Instant) {
        let mut shared = self.lock();
        shared.now = now;
        let mut wakers: Vec<Waker> = Vec::new();
        shared.sleepers.retain(|_, (at, waker)| {
            let is_due = *at <= now;
            if is_due {
                wakers.push(waker.clone());
            }
            !is_due
        });
        drop(shared);
        // Outside the lock: a woken task may sleep again at once.
        wakers.into_iter().for_each(Waker::wake);
    }

    /// How many times the clock was read.
    pub fn readings(&self) -> u64 {
        self.lock().readings
    }

    /// How many sleeps were started.
    pub fn sleeps(&self) -> u64 {
        self.lock().sleeps
    }

    /// How many sleepers wait now.
    pub fn sleeping(&self) -> usize {
        self.lock().sleepers.len()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        let mut shared = self.lock();
        shared.readings += 1;
        shared.now
    }

    fn sleep_until(&self, at: Instant) -> Sleep {
        let mut shared = self.lock();
        shared.sleeps += 1;
        Box::pin(ManualSleep { clock: self.clone(), at, id: shared.sleeps })
    }

    fn park_until(&self, at: Instant) {
        let mut sleep = self.sleep_until(at);
        if sleep.as_mut().poll(&mut Context::from_waker(&thread_waker())).is_pending() {
            thread::park();
        }
    }
}

struct ManualSleep {
    clock: ManualClock,
    at: Instant,
    id: u64,
}

impl Future for ManualSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let waker = context.waker().clone();
        let mut shared = self.clock.lock();
        if shared.now >= self.at {
            return Poll::Ready(());
        }
        let replaced = shared.sleepers.insert(self.id, (self.at, waker));
        drop(shared);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for ManualSleep {
    fn drop(&mut self) {
        let removed = self.clock.lock().sleepers.remove(&self.id);
        drop(removed);
    }
}
