//! Rates in entries per second, exact to a millionth.
//!
//! Controllers move rates in fractional steps, such as a quarter per second. In millionths the rate stays an
//! integer, and a bucket with that many units per million seconds refills at exactly this rate.

use std::fmt;
use std::time::Duration;

use crate::bucket::{InvalidShape, Shape};
use crate::time::nanos;

const MILLION: u64 = 1_000_000;
/// The period in which a bucket refills as many units as the rate has millionths.
const PERIOD: Duration = Duration::from_secs(MILLION);

/// Entries per second, in millionths.
///
/// ```
/// use tidegate_core::per_second::PerSecond;
///
/// assert_eq!(PerSecond::from_millionths(2_500_000).to_string(), "2.5/s");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PerSecond(u64);

impl PerSecond {
    /// Creates a rate from millionths per second.
    pub const fn from_millionths(millionths: u64) -> Self {
        Self(millionths)
    }

    /// `amount` per `period`, rounded down.
    pub(crate) fn of(amount: u64, period: Duration) -> Self {
        let millionths = u128::from(amount) * u128::from(MILLION) * 1_000_000_000;
        Self(u64::try_from(millionths / u128::from(nanos(period).max(1))).unwrap_or(u64::MAX))
    }

    /// Millionths per second.
    pub const fn millionths(self) -> u64 {
        self.0
    }

    /// The rate as a float; exact up to nine billion per second.
    #[expect(clippy::cast_precision_loss, reason = "for display; calculations use millionths")]
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / MILLION as f64
    }

    /// The shape of a bucket that refills at exactly this rate.
    pub(crate) fn shape(self, burst: u64) -> Result<Shape, InvalidShape> {
        Shape::new(self.0, PERIOD, burst)
    }
}

impl fmt::Display for PerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / MILLION, self.0 % MILLION);
        if rest == 0 {
            return write!(f, "{whole}/s");
        }
        let digits = format!("{rest:06}");
        write!(f, "{whole}.{}/s", digits.trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::Bucket;
    use crate::time::Instant;

    #[test]
    fn it_is_shown_as_a_number_per_second() {
        let table = [(0, "0/s"), (250_000, "0.25/s"), (8_000_000, "8/s"), (1, "0.000001/s")];
        for (millionths, wanted) in table {
            assert_eq!(PerSecond(millionths).to_string(), wanted);
        }
        assert!((PerSecond(2_500_000).as_f64() - 2.5).abs() < f64::EPSILON);
    }

    #[test]
    fn an_amount_per_period_is_rounded_down_and_saturates() {
        let table = [
            (2, Duration::from_secs(1), 2_000_000),
            (1, Duration::from_secs(4), 250_000),
            (1, Duration::from_secs(3), 333_333),
            (1, Duration::from_secs(86_400), 11),
            (1 << 40, Duration::from_nanos(1), u64::MAX),
        ];
        for (amount, period, wanted) in table {
            assert_eq!(PerSecond::of(amount, period).millionths(), wanted);
        }
    }

    #[test]
    fn its_bucket_is_exact_to_the_nanosecond() {
        // A third per second, rounded down to a millionth: a unit takes three seconds and three microseconds.
        let shape = PerSecond(333_333).shape(1).unwrap();
        let mut bucket = Bucket::full();
        assert_eq!(bucket.take(&shape, 1, Instant::ZERO), Ok(()));
        assert_eq!(bucket.ready_at(&shape, 1, Instant::ZERO), Instant::from_nanos(3_000_003_001));
        // A quarter per second is one in four seconds.
        let shape = PerSecond(250_000).shape(1).unwrap();
        let mut bucket = Bucket::full();
        assert_eq!(bucket.take(&shape, 1, Instant::ZERO), Ok(()));
        assert_eq!(bucket.ready_at(&shape, 1, Instant::ZERO), Instant::from_nanos(4_000_000_000));
    }
}
