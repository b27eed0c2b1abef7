//! What engines that work in the background have in common: when a sweep is due, and names that nothing else has.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::Instant;

/// Decides when a process that draws sweeps.
#[derive(Debug)]
pub(crate) struct SweepTimer {
    every: Duration,
    /// When the last sweep began; locked while it runs.
    last: Arc<Mutex<Instant>>,
}

impl SweepTimer {
    /// The default interval.
    pub(crate) const INTERVAL: Duration = Duration::from_secs(5);

    /// The first sweep is due after an interval.
    pub(crate) fn new(every: Duration) -> Self {
        Self { every, last: Arc::new(Mutex::new(Instant::now())) }
    }

    pub(crate) const fn every(&self) -> Duration {
        self.every
    }

    /// Begins a sweep if the last one has ended and began an interval ago. It ends with the guard.
    pub(crate) fn begin(&self) -> Option<OwnedMutexGuard<Instant>> {
        let mut last = Arc::clone(&self.last).try_lock_owned().ok()?;
        (last.elapsed() >= self.every).then(|| {
            *last = Instant::now();
            last
        })
    }
}

/// Makes names that no other handle of a store makes.
#[derive(Debug)]
pub(crate) struct UniqueNames {
    handle: u64,
    made: AtomicU64,
}

impl UniqueNames {
    pub(crate) fn new() -> Self {
        Self { handle: random(), made: AtomicU64::new(0) }
    }

    /// At most 33 characters: DynamoDB takes 36.
    pub(crate) fn next(&self) -> String {
        format!("{:x}-{:x}", self.handle, self.made.fetch_add(1, Ordering::Relaxed))
    }
}

/// An unpredictable number: each hasher of this process has keys of its own.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(std::process::id())
}
