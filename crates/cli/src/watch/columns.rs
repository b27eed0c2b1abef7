//! Formats numbers and times for narrow columns.

use std::time::Duration;

use tidegate::Stamp;

use crate::format;

/// A rate per second.
pub(crate) fn speed(per_second: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a speed is no less than 0")]
    let whole = per_second.round() as u64;
    match per_second {
        ..0.05 => "0".to_owned(),
        ..9.95 => format!("{per_second:.1}"),
        _ => format::number(whole),
    }
}

/// A duration in one unit.
pub(crate) fn age(span: Duration) -> String {
    match span.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3_600 => format!("{}m", seconds / 60),
        seconds @ 3_600..86_400 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// The time of day, in UTC.
pub(crate) fn clock(at: Stamp) -> String {
    let text = Stamp::from_secs(at.as_micros() / 1_000_000).to_string();
    text.split_once('T').map_or(text.clone(), |(_, time)| time.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_durations_fit_their_columns() {
        let table = [
            (7, "7"),
            (1_234, "1,234"),
            (99_999, "99,999"),
            (123_456, "123.5k"),
            (1_500_000, "1.50M"),
            (u64::from(u32::MAX), "4.29G"),
            (2_000_000_000_000, "2.00T"),
        ];
        for (count, text) in table {
            assert_eq!(format::number(count), text);
        }
        for (per_second, text) in [(0.0, "0"), (0.3333, "0.3"), (9.99, "10"), (1_234.4, "1,234")] {
            assert_eq!(speed(per_second), text);
        }
        for (seconds, text) in [(59, "59s"), (61, "1m"), (7_300, "2h"), (200_000, "2d")] {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
        assert_eq!(clock(Stamp::from_micros(45_296_999_999)), "12:34:56Z");
    }
}
