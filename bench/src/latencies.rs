//! Latency percentiles of responses.

use std::time::Duration;

/// Latencies of responses, in microseconds.
#[derive(Debug, Clone, Copy)]
pub struct Latencies {
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Latencies {
    /// The neutral element of [`Latencies::or`].
    pub const NONE: Self = Self { p50: f64::INFINITY, p99: f64::INFINITY };

    /// The percentiles of these latencies.
    pub fn of(mut latencies: Vec<Duration>) -> Self {
        latencies.sort_unstable();
        let at = |percent| {
            latencies.get(latencies.len() * percent / 100).map_or(f64::NAN, Duration::as_secs_f64) * 1e6
        };
        Self { p50: at(50), p99: at(99) }
    }

    /// The better of two rounds.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self { p50: self.p50.min(other.p50), p99: self.p99.min(other.p99) }
    }
}
