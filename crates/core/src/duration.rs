//! Durations as text: one grammar for everything that reads them, and formats for programs, limits and
//! people.
//!
//! A duration is a number and a unit, or several in a row: `250ms`, `1.5s`, `90m`, `1h30m`, `1h 30m`. Units
//! are `ns`, `us`, `ms`, `s`, `m`, `h`, `d`, `w`, and the words `sec`, `second`, `min`, `minute`, `hour`,
//! `day`, `week` with or without an `s`. Numbers are read exactly to the nanosecond; no float is involved.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::excerpt::excerpt;

const SECOND: u128 = 1_000_000_000;
const MINUTE: u128 = 60 * SECOND;
const HOUR: u128 = 60 * MINUTE;
const DAY: u128 = 24 * HOUR;

/// Units with their nanoseconds. The first name of each length is the one that is written.
const UNITS: [(&str, u128); 26] = [
    ("d", DAY),
    ("h", HOUR),
    ("m", MINUTE),
    ("s", SECOND),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
    ("w", 7 * DAY),
    ("week", 7 * DAY),
    ("weeks", 7 * DAY),
    ("day", DAY),
    ("days", DAY),
    ("hour", HOUR),
    ("hours", HOUR),
    ("min", MINUTE),
    ("mins", MINUTE),
    ("minute", MINUTE),
    ("minutes", MINUTE),
    ("sec", SECOND),
    ("secs", SECOND),
    ("second", SECOND),
    ("seconds", SECOND),
    ("µs", 1_000),
    ("μs", 1_000),
    ("nsec", 1),
    ("msec", 1_000_000),
];

/// Digits of a number, before and behind the point: as many as 2^64 has.
const DIGITS_MAX: usize = 20;

/// A text that is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not a duration: {why}; write a number and a unit, such as 250ms, 1.5s, 2m, 1h30m or 1d")]
pub struct InvalidDuration {
    /// The text, cut after 80 characters.
    pub text: String,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Reads a duration.
///
/// # Errors
/// [`InvalidDuration`] for anything but numbers with units, for fractions of a nanosecond, and for more than
/// 2^64 seconds.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::duration;
///
/// assert_eq!(duration::parse("1.5s"), Ok(Duration::from_millis(1_500)));
/// assert_eq!(duration::parse("1h30m"), Ok(Duration::from_secs(5_400)));
/// assert!(duration::parse("5").is_err());
/// ```
pub fn parse(text: &str) -> Result<Duration, InvalidDuration> {
    nanos(text)
        .and_then(|nanos| {
            let seconds = u64::try_from(nanos / SECOND).map_err(|_| "it is too long")?;
            Ok(Duration::new(seconds, u32::try_from(nanos % SECOND).unwrap_or(0)))
        })
        .map_err(|why| InvalidDuration { text: excerpt(text), why })
}

fn nanos(text: &str) -> Result<u128, &'static str> {
    let mut rest = text;
    let mut sum = 0_u128;
    loop {
        let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(rest.len());
        let (number, behind) = rest.split_at(end);
        let end = behind
            .find(|letter: char| letter.is_ascii_digit() || letter == '.' || letter == ' ')
            .unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(end);
        let per_unit = unit_nanos(unit)?;
        sum = sum.checked_add(multiply(number, per_unit)?).ok_or("it is too long")?;
        if behind.is_empty() {
            return Ok(sum);
        }
        rest = behind.strip_prefix(' ').unwrap_or(behind);
    }
}

fn unit_nanos(unit: &str) -> Result<u128, &'static str> {
    match UNITS.iter().find(|(name, _)| *name == unit) {
        Some((_, nanos)) => Ok(*nanos),
        None if unit.is_empty() => Err("it has no unit"),
        None => Err("its unit is not one of ns, us, ms, s, m, h, d, w"),
    }
}

/// A decimal number times whole nanoseconds, exactly.
fn multiply(number: &str, per_unit: u128) -> Result<u128, &'static str> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| match text.parse::<u128>() {
        Ok(value) if text.len() <= DIGITS_MAX => Ok(value),
        Ok(_) => Err("it has too many digits"),
        Err(_) => Err("it has no number before its unit"),
    };
    let scaled = digits(fraction)? * per_unit;
    let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    if !scaled.is_multiple_of(scale) {
        return Err("it has a fraction of a nanosecond");
    }
    Ok(digits(whole)? * per_unit + scaled / scale)
}

/// A duration in the longest unit that holds it exactly: `90s`, `1500ms`, `2d`. [`parse`] reads it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exact(pub Duration);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let unit = UNITS.iter().find(|(_, per_unit)| nanos > 0 && nanos.is_multiple_of(*per_unit));
        match unit {
            Some((name, per_unit)) => write!(f, "{}{name}", nanos / per_unit),
            None => f.write_str("0s"),
        }
    }
}

/// The period of a limit, as it follows a `/`: `s`, `min`, `h`, `day`, or an [`Exact`] duration: `30s`,
/// `250ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period(pub Duration);

/// Periods that are written without a number.
const PERIODS: [(&str, u128); 4] = [("s", SECOND), ("min", MINUTE), ("h", HOUR), ("day", DAY)];

impl Period {
    /// Reads a period: a duration, or a unit of a second or more without a number (`min` is one minute).
    ///
    /// # Errors
    /// As [`parse`].
    pub fn parse(text: &str) -> Result<Duration, InvalidDuration> {
        let starts_with_digit = text.starts_with(|letter: char| letter.is_ascii_digit());
        match unit_nanos(text) {
            Ok(nanos) if nanos >= SECOND && !starts_with_digit => {
                Ok(Duration::from_secs(u64::try_from(nanos / SECOND).unwrap_or(u64::MAX)))
            }
            _ => parse(text),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        match PERIODS.iter().find(|(_, per_unit)| nanos == *per_unit) {
            Some((name, _)) => f.write_str(name),
            None => Exact(self.0).fmt(f),
        }
    }
}

/// A duration for people, rounded up: to the millisecond, and from a minute on to the second: `250ms`, `1.5s`, `3h36m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounded(pub Duration);

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        if nanos <= 59_999_000_000 {
            let millis = nanos.div_ceil(1_000_000);
            return match (millis / 1_000, millis % 1_000) {
                (0, 0) => f.write_str("0s"),
                (0, millis) => write!(f, "{millis}ms"),
                (seconds, 0) => write!(f, "{seconds}s"),
                (seconds, millis) => {
                    let fraction = format!("{millis:03}");
                    write!(f, "{seconds}.{}s", fraction.trim_end_matches('0'))
                }
            };
        }
        let seconds = nanos.div_ceil(SECOND);
        let (minutes, hours) = (seconds / 60, seconds / 3_600);
        for (count, unit) in [(hours / 24, "d"), (hours % 24, "h"), (minutes % 60, "m"), (seconds % 60, "s")]
        {
            if count > 0 {
                write!(f, "{count}{unit}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parse_reads_units_exactly() {
        let table = [
            ("0s", Duration::ZERO),
            ("0.2s", Duration::from_millis(200)),
            ("200ms", Duration::from_millis(200)),
            ("1.5s", Duration::from_millis(1_500)),
            ("2m", Duration::from_mins(2)),
            ("2min", Duration::from_mins(2)),
            ("0.5h", Duration::from_mins(30)),
            ("1d", Duration::from_hours(24)),
            ("2weeks", Duration::from_hours(336)),
            ("7us", Duration::from_micros(7)),
            ("7µs", Duration::from_micros(7)),
            ("1.000000001s", Duration::new(1, 1)),
            ("0.1000000000s", Duration::from_millis(100)),
            ("3ns", Duration::from_nanos(3)),
            ("007s", Duration::from_secs(7)),
            ("1h30m", Duration::from_mins(90)),
            ("1h 30m", Duration::from_mins(90)),
            ("1m 1.5s", Duration::from_millis(61_500)),
        ];
        for (given, wanted) in table {
            assert_eq!(parse(given), Ok(wanted), "{given}");
        }
    }

    #[test]
    fn parse_refuses_other_text() {
        let table = [
            ("", "it has no unit"),
            ("s", "it has no number before its unit"),
            (".", "it has no unit"),
            (".5s", "it has no number before its unit"),
            ("5.s", "it has no number before its unit"),
            ("1.2.3s", "it has no number before its unit"),
            ("-1s", "its unit is not one of ns, us, ms, s, m, h, d, w"),
            ("1 s", "it has no unit"),
            (" 1s", "it has no unit"),
            ("1s ", "it has no unit"),
            ("1S", "its unit is not one of ns, us, ms, s, m, h, d, w"),
            ("1e3", "its unit is not one of ns, us, ms, s, m, h, d, w"),
            ("5", "it has no unit"),
            ("0.5ns", "it has a fraction of a nanosecond"),
            ("999999999999999999d", "it is too long"),
            ("999999999999999999999s", "it has too many digits"),
        ];
        for (given, why) in table {
            assert_eq!(parse(given).map_err(|invalid| invalid.why), Err(why), "{given}");
        }
    }

    #[test]
    fn exact_uses_longest_unit() {
        let table = [(0, "0s"), (1, "1ns"), (1_500, "1500ns"), (2_000, "2us"), (1_500_000_000, "1500ms")];
        for (nanos, wanted) in table {
            assert_eq!(Exact(Duration::from_nanos(nanos)).to_string(), wanted);
        }
        let table = [(90, "90s"), (600, "10m"), (172_800, "2d"), (604_800, "7d")];
        for (seconds, wanted) in table {
            assert_eq!(Exact(Duration::from_secs(seconds)).to_string(), wanted);
        }
    }

    #[test]
    fn period_omits_the_number_one() {
        let table = [
            ("s", 1, "s"),
            ("min", 60, "min"),
            ("minute", 60, "min"),
            ("m", 60, "min"),
            ("1m", 60, "min"),
            ("hour", 3_600, "h"),
            ("day", 86_400, "day"),
            ("1d", 86_400, "day"),
            ("30s", 30, "30s"),
            ("90min", 5_400, "90m"),
            ("w", 604_800, "7d"),
        ];
        for (given, seconds, written) in table {
            let period = Duration::from_secs(seconds);
            assert_eq!(Period::parse(given), Ok(period), "{given}");
            assert_eq!(Period(period).to_string(), written, "{given}");
        }
        assert_eq!(Period::parse("ms").unwrap_err().why, "it has no number before its unit");
    }

    #[test]
    fn rounded_is_never_less() {
        let millis = |millis| Duration::from_millis(millis);
        let table = [
            (Duration::ZERO, "0s"),
            (Duration::from_nanos(1), "1ms"),
            (millis(250), "250ms"),
            (Duration::from_micros(999_001), "1s"),
            (millis(1_500), "1.5s"),
            (millis(12_034), "12.034s"),
            (millis(59_999), "59.999s"),
            (Duration::from_micros(59_999_001), "1m"),
            (millis(61_001), "1m2s"),
            (millis(3_599_001), "1h"),
            (millis(12_959_980), "3h36m"),
            (Duration::from_secs(6_048), "1h40m48s"),
            (Duration::from_secs(90_000), "1d1h"),
            (Duration::MAX, "213503982334601d7h16s"),
        ];
        for (span, wanted) in table {
            assert_eq!(Rounded(span).to_string(), wanted);
        }
    }

    proptest! {
        #[test]
        fn exact_is_read_back(nanos in any::<u64>()) {
            let span = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&Exact(span).to_string()), Ok(span));
            prop_assert_eq!(Period::parse(&Period(span).to_string()), Ok(span));
        }

        #[test]
        fn rounded_is_at_least_exact(nanos in any::<u64>()) {
            let span = Duration::from_nanos(nanos);
            let rounded = parse(&Rounded(span).to_string());
            prop_assert!(rounded.is_ok_and(|rounded| rounded >= span));
        }

        #[test]
        fn parse_never_panics(given in any::<String>(), number in "[0-9. ]{0,40}", unit in "[a-zµ]{0,3}") {
            let _ = parse(&given);
            let _ = parse(&format!("{number}{unit}"));
            let _ = Period::parse(&given);
        }
    }
}
