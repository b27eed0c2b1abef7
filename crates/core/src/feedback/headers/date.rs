//! Parses dates in headers: the three HTTP formats (RFC 9110 §5.6.7) and RFC 3339.
//!
//! Dates before 1970 become 1970, since any past date means the same. The day of the week must be valid, but
//! need not match the date.

use crate::calendar::{self, Date};
use crate::time::Stamp;

const MONTHS: [&str; 12] =
    ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const DAYS: [&str; 7] = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];

/// Parses a date in one of HTTP's three formats; `now` determines the century of two-digit years.
///
/// ```
/// use tidegate_core::feedback::headers::http_date;
/// use tidegate_core::time::Stamp;
///
/// let now = Stamp::from_secs(784_111_700);
/// let date = Some(Stamp::from_secs(784_111_777));
/// assert_eq!(http_date("Sun, 06 Nov 1994 08:49:37 GMT", now), date);
/// assert_eq!(http_date("Sunday, 06-Nov-94 08:49:37 GMT", now), date);
/// assert_eq!(http_date("Sun Nov  6 08:49:37 1994", now), date);
/// assert_eq!(http_date("06.11.1994", now), None);
/// ```
pub fn http_date(text: &str, now: Stamp) -> Option<Stamp> {
    text.split_once(',').map_or_else(|| asctime(text), |(day, rest)| with_zone(day, rest, now))
}

/// ` 06 Nov 1994 08:49:37 GMT` or ` 06-Nov-94 08:49:37 GMT`, after the day of the week.
fn with_zone(day: &str, rest: &str, now: Stamp) -> Option<Stamp> {
    let (rest, zone) = rest.strip_prefix(' ')?.rsplit_once(' ')?;
    if !is_day(day) || !(zone.eq_ignore_ascii_case("GMT") || zone.eq_ignore_ascii_case("UTC")) {
        return None;
    }
    let (date, time) = rest.rsplit_once(' ')?;
    let is_old = date.contains('-');
    let mut parts = date.split(if is_old { '-' } else { ' ' });
    let (day, month, year) = (parts.next()?, parts.next()?, parts.next()?);
    let year = if is_old && year.len() == 2 { century(digits(year, 2)?, now) } else { digits(year, 4)? };
    let date = Date { year, month: month_of(month)?, day: digits(day, 2)? };
    stamp(date, clock(time)?).filter(|_| parts.next().is_none())
}

/// `Sun Nov  6 08:49:37 1994`.
fn asctime(text: &str) -> Option<Stamp> {
    let (day, rest) = text.split_once(' ')?;
    let (month, rest) = rest.split_once(' ')?;
    // A one-digit day is preceded by a second blank.
    let (date, rest) = rest.strip_prefix(' ').unwrap_or(rest).split_once(' ')?;
    let (time, year) = rest.split_once(' ')?;
    let date = digits(date, date.len().clamp(1, 2))?;
    let date = Date { year: digits(year, 4)?, month: month_of(month)?, day: date };
    stamp(date, clock(time)?).filter(|_| is_day(day))
}

/// Parses an RFC 3339 time with any offset; a fraction is rounded up to the microsecond. Seconds are
/// optional, as in ISO 8601, because Jira omits them.
pub(crate) fn rfc3339(text: &str) -> Option<Stamp> {
    let (date, rest) = text.split_at_checked(10)?;
    let mut parts = date.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    let date = Date { year: digits(year, 4)?, month: digits(month, 2)?, day: digits(day, 2)? };
    let rest = rest.strip_prefix(['T', 't', ' '])?;
    let has_seconds = rest.as_bytes().get(5) == Some(&b':');
    let (time, rest) = rest.split_at_checked(if has_seconds { 8 } else { 5 })?;
    let seconds = if has_seconds { clock(time)? } else { minutes(time)? };
    let (micros, rest) = match rest.strip_prefix('.') {
        Some(rest) if has_seconds => {
            let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
            (fraction(&rest[..end])?, &rest[end..])
        }
        _ => (0, rest),
    };
    let point = stamp(date, seconds)?.as_micros() + micros;
    if rest.eq_ignore_ascii_case("Z") {
        return Some(Stamp::from_micros(point));
    }
    let (is_ahead, offset) = match rest.strip_prefix('+') {
        Some(offset) => (true, offset),
        None => (false, rest.strip_prefix('-')?),
    };
    let (hours, minutes) = offset.split_once(':')?;
    let (hours, minutes) = (digits(hours, 2)?, digits(minutes, 2)?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    let offset = (hours * 60 + minutes) * 60_000_000;
    let point = if is_ahead { point.saturating_sub(offset) } else { point + offset };
    Some(Stamp::from_micros(point))
}

/// Microseconds from the digits after the point, rounded up.
fn fraction(text: &str) -> Option<u64> {
    let first = text.bytes().chain(std::iter::repeat(b'0')).take(6);
    let micros = first.fold(0, |sum, byte| sum * 10 + u64::from(byte - b'0'));
    let rest = text.bytes().skip(6).any(|byte| byte != b'0');
    (!text.is_empty()).then(|| micros + u64::from(rest))
}

/// The year that ends in the digits `two`: at most 50 years ahead, otherwise the latest past one.
fn century(two: u64, now: Stamp) -> u64 {
    let this = calendar::date(now.as_micros() / 86_400_000_000).year.min(9_949);
    let year = this - this % 100 + two;
    // The latest such year that is at most 50 years ahead.
    if year > this + 50 {
        year - 100
    } else if year + 100 <= this + 50 {
        year + 100
    } else {
        year
    }
}

/// Seconds since midnight from `08:49:37`. A leap second is the first second of the next minute.
fn clock(text: &str) -> Option<u64> {
    let (time, second) = text.rsplit_once(':')?;
    let second = digits(second, 2).filter(|second| *second <= 60)?;
    Some(minutes(time)? + second)
}

/// Seconds since midnight from `08:49`.
fn minutes(text: &str) -> Option<u64> {
    let (hour, minute) = text.split_once(':')?;
    let (hour, minute) = (digits(hour, 2)?, digits(minute, 2)?);
    (hour < 24 && minute < 60).then_some(hour * 3_600 + minute * 60)
}

fn stamp(date: Date, seconds: u64) -> Option<Stamp> {
    if date.year < 1970 {
        let is_date = (1..=12).contains(&date.month)
            && (1..=calendar::days_in(date.year, date.month)).contains(&date.day);
        return is_date.then_some(Stamp::ZERO);
    }
    Some(Stamp::from_secs(calendar::days(date)? * 86_400 + seconds))
}

/// A number of exactly `count` digits.
fn digits(text: &str, count: usize) -> Option<u64> {
    let fits = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    if fits { text.parse().ok() } else { None }
}

fn month_of(name: &str) -> Option<u64> {
    MONTHS.iter().zip(1..).find_map(|(month, number)| name.eq_ignore_ascii_case(month).then_some(number))
}

/// Whether it names a day of the week, in full or in three letters.
fn is_day(name: &str) -> bool {
    DAYS.iter().any(|day| name.eq_ignore_ascii_case(day) || name.eq_ignore_ascii_case(&day[..3]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 2026-01-31T09:30:00Z.
    const NOW: Stamp = Stamp::from_secs(1_769_851_800);

    #[test]
    fn http_date_formats_are_equivalent() {
        let table = [
            ("Sat, 31 Jan 2026 09:30:05 GMT", "2026-01-31T09:30:05Z"),
            ("sat, 31 jan 2026 09:30:05 gmt", "2026-01-31T09:30:05Z"),
            ("Saturday, 31-Jan-26 09:30:05 GMT", "2026-01-31T09:30:05Z"),
            ("Sat, 31-Jan-2026 09:30:05 GMT", "2026-01-31T09:30:05Z"),
            ("Sat Jan 31 09:30:05 2026", "2026-01-31T09:30:05Z"),
            ("Sun Feb  1 00:00:00 2026", "2026-02-01T00:00:00Z"),
            ("Thu, 29 Feb 2024 23:59:60 GMT", "2024-03-01T00:00:00Z"),
            ("Thu, 01 Jan 1970 00:00:00 GMT", "1970-01-01T00:00:00Z"),
            ("Wed, 31 Dec 1969 23:59:59 GMT", "1970-01-01T00:00:00Z"),
            ("Sun, 06 Nov 0000 08:49:37 GMT", "1970-01-01T00:00:00Z"),
            ("Fri, 31 Dec 9999 23:59:59 GMT", "9999-12-31T23:59:59Z"),
        ];
        for (text, expected) in table {
            let read = http_date(text, NOW).map(|date| date.to_string());
            assert_eq!(read.as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn two_digits_of_a_year_are_at_most_fifty_years_ahead() {
        let year = |digits: &str, now: &str| {
            let date = http_date(&format!("Monday, 01-Jan-{digits} 00:00:00 GMT"), rfc3339(now).unwrap());
            date.map(|date| date.to_string()[..4].to_owned())
        };
        let table = [("26", "2026"), ("76", "2076"), ("77", "1977"), ("99", "1999"), ("00", "2000")];
        for (digits, expected) in table {
            assert_eq!(year(digits, "2026-01-31T09:30:00Z").as_deref(), Some(expected), "{digits}");
        }
        assert_eq!(year("01", "2099-12-31T23:59:59Z").as_deref(), Some("2101"));
    }

    #[test]
    fn malformed_http_dates_are_refused() {
        let table = [
            "",
            ",",
            "Sat, ",
            "Xyz, 31 Jan 2026 09:30:05 GMT",
            "Sat,31 Jan 2026 09:30:05 GMT",
            "Sat, 31 Jan 2026 09:30:05",
            "Sat, 31 Jan 2026 09:30:05 CET",
            "Sat, 31 Jan 2026 09:30:05 +0100",
            "Sat, 31 Foo 2026 09:30:05 GMT",
            "Sat, 31 Jan 26 09:30:05 GMT",
            "Sat, 1 Jan 2026 09:30:05 GMT",
            "Sat, 32 Jan 2026 09:30:05 GMT",
            "Sun, 29 Feb 2025 09:30:05 GMT",
            "Sat, 31 Jan 2026 24:00:00 GMT",
            "Sat, 31 Jan 2026 09:60:05 GMT",
            "Sat, 31 Jan 2026 09:30 GMT",
            "Sat, 31 Jan 2026 09:30:05:00 GMT",
            "Sat, 31-Jan-26-1 09:30:05 GMT",
            "Sat Jan 31 09:30:05 2026 GMT",
            "Sat Jan 031 09:30:05 2026",
            "Sat Jan  09:30:05 2026",
            "Sat, 31 Jan ２026 09:30:05 GMT",
        ];
        for text in table {
            assert_eq!(http_date(text, NOW), None, "{text}");
        }
    }

    #[test]
    fn rfc_3339_is_read_with_fractions_and_offsets() {
        let table = [
            ("2026-01-31T09:30:05Z", Some("2026-01-31T09:30:05Z")),
            ("2026-01-31t09:30:05z", Some("2026-01-31T09:30:05Z")),
            ("2026-01-31 09:30:05Z", Some("2026-01-31T09:30:05Z")),
            ("2026-01-31T09:30:05.25Z", Some("2026-01-31T09:30:05.250000Z")),
            ("2026-01-31T09:30:05.0000001Z", Some("2026-01-31T09:30:05.000001Z")),
            ("2026-01-31T09:30:05.9999999Z", Some("2026-01-31T09:30:06Z")),
            ("2026-01-31T09:30:05+02:00", Some("2026-01-31T07:30:05Z")),
            ("2026-01-31T09:30:05-00:30", Some("2026-01-31T10:00:05Z")),
            ("1970-01-01T00:30:00+01:00", Some("1970-01-01T00:00:00Z")),
            ("1960-01-01T00:30:00Z", Some("1970-01-01T00:00:00Z")),
            ("2026-01-31T09:30:05", None),
            ("2026-01-31T09:30:05.Z", None),
            ("2026-01-31T09:30:05+0200", None),
            ("2026-01-31T09:30:05+24:00", None),
            ("2026-01-31T09:30Z", Some("2026-01-31T09:30:00Z")),
            ("2026-01-31T09:30+02:00", Some("2026-01-31T07:30:00Z")),
            ("2026-01-31T09:30", None),
            ("2026-01-31T09:30.5Z", None),
            ("2026-01-31T09:60Z", None),
            ("2026-01-31T24:00Z", None),
            ("2026-01-31T09Z", None),
            ("2026-01-31T09:3é:05Z", None),
            ("2026-13-31T09:30:05Z", None),
            ("2026-01-31", None),
            ("2026-01-3éT09:30:05Z", None),
            ("", None),
        ];
        for (text, expected) in table {
            assert_eq!(rfc3339(text).map(|date| date.to_string()).as_deref(), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn stamps_round_trip_through_rfc_3339(micros in 0_u64..253_402_300_800_000_000) {
            let date = Stamp::from_micros(micros);
            prop_assert_eq!(rfc3339(&date.to_string()), Some(date));
        }

        #[test]
        fn arbitrary_dates_do_not_panic(
            text in any::<String>(),
            near in "(Sun|Sunday)?[, ]{0,2}[0-9]{0,2}[ -]Nov[ -][0-9]{0,5} [0-9:]{0,9} (GMT)?",
            now in any::<u64>(),
        ) {
            for text in [text, near] {
                let _ = http_date(&text, Stamp::from_micros(now));
                let _ = rfc3339(&text);
            }
        }
    }
}
