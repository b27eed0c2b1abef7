//! Durations as numbers of seconds, exact to the microsecond.

use std::fmt;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// The maximum duration, some 285 years. Up to this bound a JSON number is exact to the microsecond.
pub const SECONDS_MAX: u32 = u32::MAX;

/// A duration: `2.5` is two and a half seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Seconds(Duration);

/// A number that is not a valid duration.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("a span of {seconds} seconds, outside 0..={SECONDS_MAX}")]
pub struct InvalidSeconds {
    /// The number.
    pub seconds: f64,
}

impl Seconds {
    /// Creates a duration, rounded to the nearest microsecond.
    ///
    /// # Errors
    /// [`InvalidSeconds`] for a number outside 0..=[`SECONDS_MAX`].
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    pub fn new(seconds: f64) -> Result<Self, InvalidSeconds> {
        if !(0.0..=f64::from(SECONDS_MAX)).contains(&seconds) {
            return Err(InvalidSeconds { seconds });
        }
        Ok(Self(Duration::from_micros((seconds * 1e6).round() as u64)))
    }

    /// Converts to a [`Duration`].
    pub const fn as_duration(self) -> Duration {
        self.0
    }
}

impl From<Duration> for Seconds {
    /// Rounds up to the microsecond, so that no caller retries too early, and saturates at [`SECONDS_MAX`].
    fn from(span: Duration) -> Self {
        let micros = span.min(Duration::from_secs(u64::from(SECONDS_MAX))).as_nanos().div_ceil(1_000);
        Self(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.0.subsec_nanos() == 0 {
            to.serialize_u64(self.0.as_secs())
        } else {
            to.serialize_f64(self.0.as_secs_f64())
        }
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Self::new(f64::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn seconds_outside_bounds_are_rejected() {
        let read = |text: &str| serde_json::from_str::<Seconds>(text);
        assert_eq!(read("2.5").unwrap().as_duration(), Duration::from_millis(2_500));
        assert_eq!(read("0").unwrap(), Seconds::default());
        for bad in ["-1", "4294967296", "1e300", "-0.001"] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains("outside 0..=4294967295"), "{error}");
        }
        assert!(Seconds::new(f64::NAN).is_err());
        assert_eq!(Seconds::from(Duration::MAX).as_duration().as_secs(), u64::from(SECONDS_MAX));
        assert_eq!(Seconds::from(Duration::from_nanos(1)).as_duration(), Duration::from_micros(1));
        assert_eq!(serde_json::to_string(&Seconds::new(60.0).unwrap()).unwrap(), "60");
    }

    proptest! {
        #[test]
        fn seconds_round_trip(micros in 0..=u64::from(SECONDS_MAX) * 1_000_000) {
            let span = Seconds::from(Duration::from_micros(micros));
            let text = serde_json::to_string(&span).unwrap();
            prop_assert_eq!(serde_json::from_str::<Seconds>(&text).unwrap(), span);
        }
    }
}
