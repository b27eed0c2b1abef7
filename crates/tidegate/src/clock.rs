//! Where the time comes from. Core never asks; the shell reads once per decision, before the lock.
//!
//! The default is tokio's clock, so `tokio::time::pause()` drives everything in tests. [`FastClock`] is for
//! hot paths that can live with a millisecond. A manual clock comes with the feature `test-util`.

mod fast;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::thread;
use std::time::Duration;

use tidegate_core::time::Instant;

pub use fast::FastClock;

/// A sleep of a [`Clock`].
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A monotonic clock: what time it is, and how to wait for a later one.
///
/// Its origin is its own: instants of two clocks do not compare.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The time now. It may stand still, and never runs back by more than is harmless: a throttle goes on
    /// with the latest time it has seen.
    fn now(&self) -> Instant;

    /// Completes when [`now`](Self::now) has reached `at`, give or take the clock's resolution.
    fn sleep_until(&self, at: Instant) -> Sleep;

    /// Parks the thread until `at`, or until it is unparked; it may return early.
    fn park_until(&self, at: Instant) {
        thread::park_timeout(at.since(self.now()).max(Duration::from_nanos(1)));
    }
}

/// Tokio's clock: the monotonic time of the operating system, or a paused test's own.
#[derive(Debug, Clone)]
pub struct TokioClock {
    origin: tokio::time::Instant,
}

impl TokioClock {
    /// A clock that starts now.
    pub fn new() -> Self {
        Self { origin: tokio::time::Instant::now() }
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for TokioClock {
    #[inline]
    fn now(&self) -> Instant {
        Instant::ZERO + tokio::time::Instant::now().saturating_duration_since(self.origin)
    }

    fn sleep_until(&self, at: Instant) -> Sleep {
        match self.origin.checked_add(at.since(Instant::ZERO)) {
            Some(deadline) => Box::pin(tokio::time::sleep_until(deadline)),
            None => Box::pin(std::future::pending()),
        }
    }
}
