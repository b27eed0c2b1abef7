//! Two timelines: local monotonic time in nanoseconds ([`Instant`]) and wall time in microseconds
//! ([`Stamp`]).
//!
//! `std::time::Instant` cannot be built from a number, which rules it out for pure, table-driven tests.
//! [`Instant`] is a `u64` since an origin that the shell's clock chooses; 584 years fit. [`Stamp`] is the
//! wall time shared by stores: microseconds since 1970, which engines whose numbers are doubles represent
//! exactly. All arithmetic saturates: a clock that steps back, or a wait of centuries, denies or waits, and
//! never panics.

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use crate::calendar;
use crate::excerpt::excerpt;
use crate::feedback::headers::date::rfc3339;

/// A timeline for buckets: points are whole ticks since its origin.
pub trait Timeline: Copy + Ord + fmt::Debug {
    /// Nanoseconds per tick.
    const TICK: u64;

    /// The point `ticks` after the origin.
    fn from_ticks(ticks: u64) -> Self;

    /// Ticks since the origin.
    fn ticks(self) -> u64;
}

impl Timeline for Instant {
    const TICK: u64 = 1;

    #[inline]
    fn from_ticks(ticks: u64) -> Self {
        Self(ticks)
    }

    #[inline]
    fn ticks(self) -> u64 {
        self.0
    }
}

impl Timeline for Stamp {
    const TICK: u64 = 1_000;

    #[inline]
    fn from_ticks(ticks: u64) -> Self {
        Self(ticks)
    }

    #[inline]
    fn ticks(self) -> u64 {
        self.0
    }
}

/// A point in wall time, by a store's clock: microseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u64);

impl Stamp {
    /// The beginning of 1970.
    pub const ZERO: Self = Self(0);
    /// The end of the timeline: later than any real deadline.
    pub const MAX: Self = Self(u64::MAX);

    /// The point `micros` after the beginning of 1970.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// The point `seconds` after the beginning of 1970.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000))
    }

    /// Microseconds since the beginning of 1970.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Time passed since `earlier`; zero when `earlier` is not earlier.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Stamp {
    type Output = Self;

    /// Rounds up to the microsecond, so that a deadline is never early.
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span).div_ceil(1_000)))
    }
}

impl Sub<Duration> for Stamp {
    type Output = Self;

    /// Rounds down to the microsecond; never earlier than 1970.
    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span).div_ceil(1_000)))
    }
}

impl fmt::Display for Stamp {
    /// Formats as RFC 3339, `2026-01-31T09:30:00.000250Z`; omits a fraction of zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, micros) = (self.0 / 1_000_000, self.0 % 1_000_000);
        let (days, rest) = (seconds / 86_400, seconds % 86_400);
        let date = calendar::date(days);
        write!(f, "{:04}-{:02}-{:02}", date.year, date.month, date.day)?;
        write!(f, "T{:02}:{:02}:{:02}", rest / 3_600, rest / 60 % 60, rest % 60)?;
        if micros > 0 {
            write!(f, ".{micros:06}")?;
        }
        f.write_str("Z")
    }
}

/// The text is not a valid time.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not an RFC 3339 time such as 2026-01-31T09:30:00Z")]
pub struct InvalidStamp {
    /// The text, at most 80 characters of it.
    pub text: String,
}

impl FromStr for Stamp {
    type Err = InvalidStamp;

    /// Parses RFC 3339 with any offset. A fraction is rounded up to the microsecond; a time before 1970
    /// becomes 1970.
    fn from_str(text: &str) -> Result<Self, InvalidStamp> {
        rfc3339(text).ok_or_else(|| InvalidStamp { text: excerpt(text) })
    }
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A point in time: nanoseconds since the clock's origin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The clock's origin.
    pub const ZERO: Self = Self(0);
    /// The end of the timeline: later than any real deadline.
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

/// Converts a duration to whole nanoseconds, saturating at 584 years.
#[inline]
pub const fn nanos(span: Duration) -> u64 {
    // Not `as_nanos`, which computes in 128 bits: every clock reading comes through here.
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
    fn a_stamp_reads_as_a_date_and_saturates() {
        assert_eq!(Stamp::from_secs(1_704_067_200).to_string(), "2024-01-01T00:00:00Z");
        assert_eq!(Stamp::from_micros(951_782_400_000_250).to_string(), "2000-02-29T00:00:00.000250Z");
        assert_eq!(Stamp::from_secs(1) + Duration::from_nanos(1), Stamp::from_micros(1_000_001));
        assert_eq!(Stamp::MAX + Duration::from_secs(1), Stamp::MAX);
        assert_eq!(Stamp::ZERO.since(Stamp::MAX), Duration::ZERO);
        assert!(Stamp::MAX.to_string().ends_with('Z'));
    }

    #[test]
    fn stamp_round_trips_through_text() {
        for stamp in [Stamp::ZERO, Stamp::from_secs(1_704_067_200), Stamp::from_micros(951_782_400_000_250)] {
            assert_eq!(stamp.to_string().parse(), Ok(stamp));
        }
        assert_eq!("2024-01-01T01:00:00+01:00".parse(), Ok(Stamp::from_secs(1_704_067_200)));
        for bad in ["", "today", "2024-13-01T00:00:00Z", "10000-01-01T00:00:00Z", "1704067200"] {
            let error = bad.parse::<Stamp>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{bad}` is not an RFC 3339 time")), "{error}");
        }
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
