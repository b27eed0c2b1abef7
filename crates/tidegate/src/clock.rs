//! Clocks. Core never reads the time; the shell reads it once per decision, before the lock.
//!
//! The default is tokio's clock, so `tokio::time::pause()` controls everything in tests. [`FastClock`] is for
//! hot paths that tolerate a millisecond. The feature `test-util` adds a manual clock.

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

/// A monotonic clock: reads the time, and sleeps until a later one.
///
/// Each clock has its own origin: instants of two clocks do not compare.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The current time. It may stand still, and a small step back is harmless: a throttle continues with the
    /// latest time it has seen.
    fn now(&self) -> Instant;

    /// Completes when [`now`](Self::now) has reached `at`, give or take the clock's resolution.
    fn sleep_until(&self, at: Instant) -> Sleep;

    /// Parks the thread until `at` or until it is unparked; it may return early.
    fn park_until(&self, at: Instant) {
        thread::park_timeout(at.since(self.now()).max(Duration::from_nanos(1)));
    }
}

/// Tokio's clock: the operating system's monotonic time, or a test's paused time.
#[derive(Debug, Clone)]
pub struct TokioClock {
    origin: tokio::time::Instant,
}

impl TokioClock {
    /// A clock whose origin is now.
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
