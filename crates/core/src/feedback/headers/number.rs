//! Parses numbers and durations in headers: decimals, integers, Go durations.
//!
//! No floats: fractions are rounded as their context requires, and no number of digits overflows.

use std::time::Duration;

const SECOND: u128 = 1_000_000_000;

/// Units of a Go duration in nanoseconds; a unit comes before its own prefixes.
const UNITS: [(&str, u128); 8] = [
    ("ms", 1_000_000),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ns", 1),
    ("h", 3_600 * SECOND),
    ("m", 60 * SECOND),
    ("s", SECOND),
];

/// A decimal number: digits with at most one point and an optional minus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decimal {
    /// Whether the number is below zero; a negative zero is not.
    pub(super) is_negative: bool,
    /// The integer part, saturating.
    pub(super) whole: u64,
    /// The fraction in billionths, rounded up.
    billionths: u64,
}

impl Decimal {
    /// Reads all of `text`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (has_minus, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if (whole.is_empty() && fraction.is_empty()) || !is_digits(whole) || !is_digits(fraction) {
            return None;
        }
        let digit = |byte: u8| u64::from(byte - b'0');
        let whole =
            whole.bytes().fold(0, |sum: u64, byte| sum.saturating_mul(10).saturating_add(digit(byte)));
        let first = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
        let rest = fraction.bytes().skip(9).any(|byte| byte != b'0');
        let billionths = first.fold(0, |sum, byte| sum * 10 + digit(byte)) + u64::from(rest);
        Some(Self { is_negative: has_minus && (whole > 0 || billionths > 0), whole, billionths })
    }

    /// The number in billionths, rounded up: nanoseconds, if the number is in seconds.
    pub(super) fn nanos(self) -> u128 {
        u128::from(self.whole) * SECOND + u128::from(self.billionths)
    }

    /// The number rounded up to an integer.
    pub(super) fn whole_up(self) -> u64 {
        self.whole.saturating_add(u64::from(self.billionths > 0))
    }
}

/// A duration that may be negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SignedDuration {
    pub(super) is_negative: bool,
    pub(super) size: Duration,
}

/// Parses a duration in Go notation: `1h2m3.5s`, `6m0s`, `12ms`, `0`.
pub(super) fn go_duration(text: &str) -> Option<SignedDuration> {
    let (has_minus, mut rest) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    if rest == "0" {
        return Some(SignedDuration { is_negative: false, size: Duration::ZERO });
    }
    let mut nanos = 0_u128;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let (number, after) = rest.split_at(end);
        let number = Decimal::parse(number)?;
        let (unit, size) = UNITS.iter().find(|(unit, _)| after.starts_with(unit))?;
        nanos = nanos.saturating_add(number.nanos().saturating_mul(*size).div_ceil(SECOND));
        rest = &after[unit.len()..];
    }
    Some(SignedDuration { is_negative: has_minus && nanos > 0, size: span(nanos) })
}

/// A duration of `nanos`, saturating at 584 years.
pub(super) fn span(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decimal_is_read_exactly_and_never_overflows() {
        let table = [
            ("0", Some((0, false))),
            ("-0.0", Some((0, false))),
            ("1.5", Some((1_500_000_000, false))),
            (".5", Some((500_000_000, false))),
            ("5.", Some((5_000_000_000, false))),
            ("-3", Some((3_000_000_000, true))),
            ("0.0000000001", Some((1, false))),
            ("0.9999999999", Some((1_000_000_000, false))),
            ("99999999999999999999999", Some((u128::from(u64::MAX) * SECOND, false))),
        ];
        for (text, expected) in table {
            let read = Decimal::parse(text).map(|number| (number.nanos(), number.is_negative));
            assert_eq!(read, expected, "{text}");
        }
        for text in
            ["", ".", "-", "-.", "+1", "1e3", "NaN", "inf", "1.2.3", "1 2", " 1", "٣", "0x1", "1_0", "--1"]
        {
            assert_eq!(Decimal::parse(text), None, "{text}");
        }
        assert_eq!(Decimal::parse("0.9999999999").map(Decimal::whole_up), Some(1));
        assert_eq!(Decimal::parse("2.0").map(Decimal::whole_up), Some(2));
    }

    #[test]
    fn a_go_duration_is_read() {
        let table = [
            ("1h2m3.5s", 3_723_500_000_000),
            ("6m0s", 360_000_000_000),
            ("12ms", 12_000_000),
            ("7.66s", 7_660_000_000),
            ("1.5h", 5_400_000_000_000),
            ("0", 0),
            ("0s", 0),
            ("90µs", 90_000),
            ("90μs", 90_000),
            ("1us1ns", 1_001),
            ("0.1ns", 1),
            ("99999999999999999999h", u64::MAX),
        ];
        for (text, nanos) in table {
            let expected = Some(SignedDuration { is_negative: false, size: Duration::from_nanos(nanos) });
            assert_eq!(go_duration(text), expected, "{text}");
        }
        let below = Some(SignedDuration { is_negative: true, size: Duration::from_secs(1) });
        assert_eq!(go_duration("-1s"), below);
        for text in ["", "-", "12", "s", "1 s", "1s ", "1d", "1s2", "1..2s", "1S", "NaNs", "1e3s", "+1s"] {
            assert_eq!(go_duration(text), None, "{text}");
        }
    }
}
