//! Counting what happens on the slow ways: who waited and how long, who was refused, what was tried again.
//!
//! The throttles of a registry share one. What enters at once is counted by its gates, so the short way pays nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::time::nanos;

/// Counts since the beginning.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Waits longer than this count as throttled.
    throttled_after: Duration,
    refused: AtomicU64,
    throttled: AtomicU64,
    /// In microseconds: of those there is room for half a million years.
    waited: AtomicU64,
    retries: AtomicU64,
}

/// The counts of one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) refused: u64,
    pub(crate) throttled: u64,
    pub(crate) waited: Duration,
    pub(crate) retries: u64,
}

impl Tally {
    pub(crate) const fn new(throttled_after: Duration) -> Self {
        Self {
            throttled_after,
            refused: AtomicU64::new(0),
            throttled: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            retries: AtomicU64::new(0),
        }
    }

    /// Somebody has an answer, after so long if it had to wait; or has given up waiting for one.
    pub(crate) fn answered(&self, waited: Option<Duration>, is_refused: bool) {
        if let Some(span) = waited {
            self.waited.fetch_add(nanos(span) / 1_000, Ordering::Relaxed);
            let is_long = span > self.throttled_after;
            self.throttled.fetch_add(u64::from(is_long), Ordering::Relaxed);
        }
        if is_refused {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            refused: self.refused.load(Ordering::Relaxed),
            throttled: self.throttled.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.waited.load(Ordering::Relaxed)),
            retries: self.retries.load(Ordering::Relaxed),
        }
    }
}
