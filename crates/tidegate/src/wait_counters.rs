//! Counters of the slow path: waits and their duration, refusals, retries.
//!
//! The throttles of a registry share one. Immediate admissions are counted by the gates, so the fast path
//! pays nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::time::nanos;

/// Counts since creation.
#[derive(Debug)]
pub(crate) struct WaitCounters {
    /// Waits longer than this count as throttled.
    throttled_after: Duration,
    refused: AtomicU64,
    throttled: AtomicU64,
    /// In microseconds: 64 bits last half a million years.
    waited: AtomicU64,
    retries: AtomicU64,
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WaitCounts {
    pub(crate) refused: u64,
    pub(crate) throttled: u64,
    pub(crate) waited: Duration,
    pub(crate) retries: u64,
}

impl WaitCounters {
    pub(crate) const fn new(throttled_after: Duration) -> Self {
        Self {
            throttled_after,
            refused: AtomicU64::new(0),
            throttled: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            retries: AtomicU64::new(0),
        }
    }

    /// Counts an acquire that completed or was abandoned, with its waiting time if it had to wait.
    pub(crate) fn record_acquire(&self, waited: Option<Duration>, is_refused: bool) {
        if let Some(span) = waited {
            self.waited.fetch_add(nanos(span) / 1_000, Ordering::Relaxed);
            let is_long = span > self.throttled_after;
            self.throttled.fetch_add(u64::from(is_long), Ordering::Relaxed);
        }
        if is_refused {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn record_retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> WaitCounts {
        WaitCounts {
            refused: self.refused.load(Ordering::Relaxed),
            throttled: self.throttled.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.waited.load(Ordering::Relaxed)),
            retries: self.retries.load(Ordering::Relaxed),
        }
    }
}
