//! The retention of the ledger.

use std::time::Duration;
use tidegate_core::excerpt::excerpt;

use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use crate::error::StoreError;

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
/// The maximum retention in days, unless it is unlimited. The minimum is [`HOUR`].
const DAYS_MAX: u64 = 36_500;
/// The options of an address.
pub(crate) const OPTIONS: &str =
    "minutely_usage_days, hourly_usage_days, daily_usage_days, monthly_usage_days and audit_days";

/// How long usage and audit entries are kept, from an hour to 36,500 days; `None` is forever.
///
/// Older data is deleted incrementally, by later writes and by [`sweep`](crate::Store::sweep).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Usage by the minute; a day by default.
    pub minutes: Option<Duration>,
    /// Usage by the hour; 62 days by default.
    pub hours: Option<Duration>,
    /// Usage by the day; 800 days by default.
    pub days: Option<Duration>,
    /// Usage by the month; forever by default.
    pub months: Option<Duration>,
    /// Audit entries; forever by default. To move them elsewhere, archive them.
    pub audit: Option<Duration>,
}

impl Default for Retention {
    fn default() -> Self {
        Self { minutes: Some(DAY), hours: Some(62 * DAY), days: Some(800 * DAY), months: None, audit: None }
    }
}

impl Retention {
    /// Sets a retention option of an address: a number of days, or `forever`. Returns whether it is a
    /// retention option.
    pub(crate) fn set(&mut self, option: &str, value: &str) -> Result<bool, StoreError> {
        let kept = match option {
            "minutely_usage_days" => &mut self.minutes,
            "hourly_usage_days" => &mut self.hours,
            "daily_usage_days" => &mut self.days,
            "monthly_usage_days" => &mut self.months,
            "audit_days" => &mut self.audit,
            _ => return Ok(false),
        };
        *kept = match value.parse::<u64>() {
            _ if value == "forever" => None,
            Ok(days @ 1..=DAYS_MAX) => Some(Duration::from_secs(days * DAY.as_secs())),
            _ => {
                let shown = excerpt(value);
                let what = format!("{option} is `{shown}`, expected 1..={DAYS_MAX} or forever");
                return Err(StoreError::Invalid { what });
            }
        };
        Ok(true)
    }

    /// Checks the bounds.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let Self { minutes, hours, days, months, audit } = *self;
        let usage = [("minutes", minutes), ("hours", hours), ("days", days), ("months", months)];
        for (field, kept) in usage.into_iter().chain([("audit", audit)]) {
            if let Some(kept) = kept.filter(|kept| *kept < HOUR || kept.as_secs() > DAYS_MAX * DAY.as_secs())
            {
                let what = format!("retention.{field} is {kept:?}, outside 1 hour..={DAYS_MAX} days");
                return Err(StoreError::Invalid { what });
            }
        }
        Ok(())
    }

    /// For each window with a retention: lines whose window ended before this time are too old at `now`.
    pub(crate) fn usage_before(&self, now: Stamp) -> impl Iterator<Item = (Window, Stamp)> {
        let kept = Window::ALL.map(|window| (window, self.of_usage(window)));
        kept.into_iter().filter_map(move |(window, kept)| Some((window, before(now, kept)?)))
    }

    /// How long usage of a window is kept.
    pub(crate) const fn of_usage(&self, window: Window) -> Option<Duration> {
        match window {
            Window::Minute => self.minutes,
            Window::Hour => self.hours,
            Window::Day => self.days,
            Window::Month => self.months,
        }
    }

    /// Audit entries made before this time are too old at `now`.
    pub(crate) fn audit_before(&self, now: Stamp) -> Option<Stamp> {
        before(now, self.audit)
    }
}

/// The time `kept` before `now`.
pub(crate) fn before(now: Stamp, kept: Option<Duration>) -> Option<Stamp> {
    let kept = u64::try_from(kept?.as_micros()).ok()?;
    now.as_micros().checked_sub(kept).map(Stamp::from_micros)
}
