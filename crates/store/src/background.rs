//! What engines that work in the background have in common: when a sweep is due, and names that nothing else has.

use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::lock;

/// Decides when a process that draws sweeps.
#[derive(Debug)]
pub(crate) struct SweepTimer {
    every: Duration,
    last: Mutex<Instant>,
}

impl SweepTimer {
    /// The default interval.
    pub(crate) const INTERVAL: Duration = Duration::from_secs(5);

    /// The first sweep is due after an interval.
    pub(crate) fn new(every: Duration) -> Self {
        Self { every, last: Mutex::new(Instant::now()) }
    }

    pub(crate) const fn every(&self) -> Duration {
        self.every
    }

    /// Whether the interval since the last sweep has passed. If so, the next one begins.
    pub(crate) fn is_due(&self) -> bool {
        let mut last = lock(&self.last);
        let is_due = last.elapsed() >= self.every;
        if is_due {
            *last = Instant::now();
        }
        is_due
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
