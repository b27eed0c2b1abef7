//! A point on the local, monotonic time line, in whole nanoseconds.
//!
//! `std::time::Instant` cannot be made from a number, so nothing pure can be tested with it. This one is a
//! `u64` since an origin that the shell's clock chooses; 584 years fit. All arithmetic saturates: a clock
//! that steps back, or a wait of centuries, denies or waits, and never panics.

use std::ops::Add;
use std::time::Duration;

/// A point in time: nanoseconds since the clock's origin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The clock's origin.
    pub const ZERO: Self = Self(0);
    /// Later than anything that will be waited for.
    pub const MAX: Self = Self(u64::MAX);

    /// The point `nanos` after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time passed since `earlier`; zero when `earlier` is not earlier.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Nanoseconds passed since `earlier`; zero when `earlier` is not earlier.
    pub const fn nanos_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The point `nanos` later, or [`Instant::MAX`].
    #[must_use]
    pub const fn plus_nanos(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }

    /// The point `nanos` earlier, or the origin.
    #[must_use]
    pub const fn minus_nanos(self, nanos: u64) -> Self {
        Self(self.0.saturating_sub(nanos))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        self.plus_nanos(nanos(span))
    }
}

/// A duration as whole nanoseconds; what does not fit in 584 years becomes 584 years.
#[inline]
pub const fn nanos(span: Duration) -> u64 {
    // Not `as_nanos`: it works in 128 bits, and this is on the way of every reading of the clock.
    span.as_secs().saturating_mul(1_000_000_000).saturating_add(span.subsec_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let late = Instant::from_nanos(u64::MAX - 1);
        assert_eq!(late + Duration::from_secs(9), Instant::MAX);
        assert_eq!(Instant::ZERO.since(late), Duration::ZERO);
        assert_eq!(Instant::ZERO.minus_nanos(1), Instant::ZERO);
        assert_eq!(nanos(Duration::MAX), u64::MAX);
    }

    #[test]
    fn a_span_is_the_difference_of_two_points() {
        let start = Instant::from_nanos(5);
        let end = start + Duration::from_micros(3);
        assert_eq!(end.since(start), Duration::from_micros(3));
        assert_eq!(end.nanos_since(start), 3_000);
        assert_eq!(end.as_nanos(), 3_005);
    }
}
