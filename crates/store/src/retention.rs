//! How long the ledger is kept, for stores that forget by age.

use std::time::Duration;

use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use crate::error::StoreError;

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
/// Nothing is kept for less than [`HOUR`] or for more than so many days, unless it is kept for ever.
const DAYS_MAX: u64 = 36_500;
/// The options of an address.
pub(crate) const OPTIONS: &str = "hourly_usage_days, daily_usage_days, monthly_usage_days and audit_days";

/// How long usage and audit are kept, from an hour to 36,500 days. What is `None` is kept for ever.
///
/// What is too old is forgotten little by little: by whoever writes next, and by [`sweep`](crate::Store::sweep).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Usage by the hour; 62 days.
    pub hours: Option<Duration>,
    /// Usage by the day; 800 days.
    pub days: Option<Duration>,
    /// Usage by the month; for ever.
    pub months: Option<Duration>,
    /// The audit; for ever. To keep it elsewhere, archive it.
    pub audit: Option<Duration>,
}

impl Default for Retention {
    fn default() -> Self {
        Self { hours: Some(62 * DAY), days: Some(800 * DAY), months: None, audit: None }
    }
}

impl Retention {
    /// Takes over an option of an address: a number of days, or `forever`. Returns whether it is one of these options.
    pub(crate) fn set(&mut self, option: &str, value: &str) -> Result<bool, StoreError> {
        let kept = match option {
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
                let shown: String = value.chars().take(80).flat_map(char::escape_debug).collect();
                let what = format!("{option} is `{shown}`, and may be 1..={DAYS_MAX} or forever");
                return Err(StoreError::Invalid { what });
            }
        };
        Ok(true)
    }

    /// Everything is kept for at least an hour, and for no longer than can be counted.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let Self { hours, days, months, audit } = *self;
        for (field, kept) in [("hours", hours), ("days", days), ("months", months), ("audit", audit)] {
            if let Some(kept) = kept.filter(|kept| *kept < HOUR || kept.as_secs() > DAYS_MAX * DAY.as_secs())
            {
                let what = format!("retention.{field} is {kept:?}, outside 1 hour..={DAYS_MAX} days");
                return Err(StoreError::Invalid { what });
            }
        }
        Ok(())
    }

    /// Each window whose lines are forgotten by age, and when those have ended that are too old at `now`.
    pub(crate) fn usage_before(&self, now: Stamp) -> impl Iterator<Item = (Window, Stamp)> {
        let kept = [self.hours, self.days, self.months];
        let windows = Window::ALL.into_iter().zip(kept);
        windows.filter_map(move |(window, kept)| Some((window, before(now, kept)?)))
    }

    /// Entries of the audit that were made before this are too old at `now`.
    pub(crate) fn audit_before(&self, now: Stamp) -> Option<Stamp> {
        before(now, self.audit)
    }
}

/// What is older than this has been kept for so long at `now`.
pub(crate) fn before(now: Stamp, kept: Option<Duration>) -> Option<Stamp> {
    let kept = u64::try_from(kept?.as_micros()).ok()?;
    now.as_micros().checked_sub(kept).map(Stamp::from_micros)
}
