//! Durations as text: `200ms`, `1.5s`, `2m`. Exact to the nanosecond in both directions; no floats are
//! involved.

use std::time::Duration;

const SECOND: u128 = 1_000_000_000;

/// Units, the longest first, and their nanoseconds.
const UNITS: [(&str, u128); 8] = [
    ("d", 86_400 * SECOND),
    ("h", 3_600 * SECOND),
    ("m", 60 * SECOND),
    ("s", SECOND),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("µs", 1_000),
    ("ns", 1),
];

/// More digits are not a plausible duration, and would overflow.
const DIGITS_MAX: usize = 18;

/// Parses a number with a unit, or seconds without one. `None` if the text is malformed, or out of the range
/// of [`Duration`].
pub(super) fn parse(text: &str) -> Option<Duration> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let nanos_per_unit = match unit {
        "" => SECOND,
        _ => UNITS.iter().find(|(name, _)| *name == unit)?.1,
    };
    let (whole, part) = match number.split_once('.') {
        Some((whole, part)) => (digits(whole)?, Some(part)),
        None => (digits(number)?, None),
    };
    let mut nanos = whole * nanos_per_unit;
    if let Some(part) = part {
        let scale = 10_u128.pow(u32::try_from(part.len()).ok().filter(|_| part.len() <= DIGITS_MAX)?);
        let scaled = digits(part)? * nanos_per_unit;
        // Fractions of a nanosecond are rejected instead of rounded.
        nanos += (scaled % scale == 0).then_some(scaled / scale)?;
    }
    let seconds = u64::try_from(nanos / SECOND).ok()?;
    Some(Duration::new(seconds, u32::try_from(nanos % SECOND).ok()?))
}

/// Formats a duration as a whole number of the longest unit that fits.
pub(super) fn text(span: Duration) -> String {
    let nanos = span.as_nanos();
    let unit = UNITS.iter().find(|(_, nanos_per_unit)| nanos != 0 && nanos.is_multiple_of(*nanos_per_unit));
    unit.map_or_else(|| "0s".to_owned(), |(name, nanos_per_unit)| format!("{}{name}", nanos / nanos_per_unit))
}

/// Parses ASCII digits, at most [`DIGITS_MAX`].
fn digits(text: &str) -> Option<u128> {
    let are_digits = !text.is_empty() && text.bytes().all(|letter| letter.is_ascii_digit());
    (are_digits && text.len() <= DIGITS_MAX).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_unit_is_read_exactly() {
        let table = [
            ("0", Duration::ZERO),
            ("0.2", Duration::from_millis(200)),
            ("200ms", Duration::from_millis(200)),
            ("1.5s", Duration::from_millis(1_500)),
            ("2m", Duration::from_secs(120)),
            ("0.5h", Duration::from_secs(1_800)),
            ("1d", Duration::from_secs(86_400)),
            ("7us", Duration::from_micros(7)),
            ("7µs", Duration::from_micros(7)),
            ("1.000000001s", Duration::new(1, 1)),
            ("0.1000000000s", Duration::from_millis(100)),
            ("3ns", Duration::from_nanos(3)),
            ("007s", Duration::from_secs(7)),
        ];
        for (given, wanted) in table {
            assert_eq!(parse(given), Some(wanted), "{given}");
        }
    }

    #[test]
    fn malformed_durations_are_rejected() {
        let table = [
            "",
            "s",
            ".",
            ".5s",
            "5.s",
            "1.2.3s",
            "-1s",
            "+1s",
            "1 s",
            " 1s",
            "1S",
            "1w",
            "1e3",
            "NaN",
            "inf",
            "0.5ns",
            "1.0000000001s",
            "٣s",
            "999999999999999999d",
            "9999999999999999999s",
            "0.0000000000000000001d",
        ];
        for given in table {
            assert_eq!(parse(given), None, "{given}");
        }
    }

    #[test]
    fn times_are_written_in_the_longest_unit_that_fits() {
        let table = [(0, "0s"), (1, "1ns"), (1_500, "1500ns"), (2_000, "2us"), (1_500_000_000, "1500ms")];
        for (nanos, wanted) in table {
            assert_eq!(text(Duration::from_nanos(nanos)), wanted);
        }
        assert_eq!(text(Duration::from_secs(90)), "90s");
        assert_eq!(text(Duration::from_secs(600)), "10m");
        assert_eq!(text(Duration::from_secs(172_800)), "2d");
    }

    proptest! {
        #[test]
        fn duration_up_to_366_days_round_trips(nanos in 0_u64..=366 * 86_400 * 1_000_000_000) {
            let span = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&text(span)), Some(span));
        }

        #[test]
        fn arbitrary_text_does_not_panic(given in any::<String>(), number in "[0-9.]{0,40}", unit in "[a-zµ]{0,2}") {
            let _ = parse(&given);
            let _ = parse(&format!("{number}{unit}"));
        }
    }
}
