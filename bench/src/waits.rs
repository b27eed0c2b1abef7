//! How long answers take.

use std::time::Duration;

/// How long answers took, in microseconds: half of them, and all but one of a hundred.
#[derive(Debug, Clone, Copy)]
pub struct Waits {
    /// Half of them.
    pub p50: f64,
    /// All but one of a hundred.
    pub p99: f64,
}

impl Waits {
    /// Before any was measured.
    pub const NONE: Self = Self { p50: f64::INFINITY, p99: f64::INFINITY };

    /// Of all these.
    pub fn of(mut waits: Vec<Duration>) -> Self {
        waits.sort_unstable();
        let at =
            |percent| waits.get(waits.len() * percent / 100).map_or(f64::NAN, Duration::as_secs_f64) * 1e6;
        Self { p50: at(50), p99: at(99) }
    }

    /// The better of two rounds.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self { p50: self.p50.min(other.p50), p99: self.p99.min(other.p99) }
    }
}
