//! Gregorian calendar arithmetic for usage windows and for dates in headers.

/// A day of the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    /// The year.
    pub year: u64,
    /// The month, from 1.
    pub month: u64,
    /// The day of the month, from 1.
    pub day: u64,
}

/// Days in a cycle of 400 years, after which the calendar repeats.
const CYCLE_DAYS: u64 = 146_097;
/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: u64 = 719_468;

/// The date `days` after 1970-01-01.
pub const fn date(days: u64) -> Date {
    // Years start in March, so that the leap day is the last day of its year.
    let days = days.saturating_add(EPOCH_DAYS);
    let (cycle, day) = (days / CYCLE_DAYS, days % CYCLE_DAYS);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // From March on, month lengths repeat as 31, 30, 31, 30, 31: 153 days in five months.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    Date { year: cycle * 400 + year + carry, month, day }
}

/// Days from 1970-01-01 to this date; `None` before 1970, past the year 9999, and for dates that do not
/// exist.
pub const fn days(date: Date) -> Option<u64> {
    let Date { year, month, day } = date;
    if year < 1970 || year > 9_999 || month < 1 || month > 12 || day < 1 || day > days_in(year, month) {
        return None;
    }
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let day = (153 * month + 2) / 5 + day - 1;
    Some(365 * year + year / 4 - year / 100 + year / 400 + day - EPOCH_DAYS)
}

/// Days in `month` of `year`.
pub const fn days_in(year: u64, month: u64) -> u64 {
    match month {
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_day_of_a_cycle_follows_the_one_before() {
        let mut expected = Date { year: 1970, month: 1, day: 1 };
        for days in 0..CYCLE_DAYS + 1_000 {
            assert_eq!(date(days), expected, "{days} days after 1970-01-01");
            assert_eq!(super::days(expected), Some(days), "{expected:?}");
            expected.day += 1;
            if expected.day > days_in(expected.year, expected.month) {
                expected = Date { month: expected.month + 1, day: 1, ..expected };
            }
            if expected.month > 12 {
                expected = Date { year: expected.year + 1, month: 1, day: 1 };
            }
        }
    }

    #[test]
    fn invalid_date_has_no_day_number() {
        let table = [(1969, 12, 31), (2025, 2, 29), (2025, 0, 1), (2025, 13, 1), (2025, 4, 31), (2025, 1, 0)];
        for (year, month, day) in table.into_iter().chain([(10_000, 1, 1), (u64::MAX, u64::MAX, u64::MAX)]) {
            assert_eq!(days(Date { year, month, day }), None, "{year}-{month}-{day}");
        }
    }
}
