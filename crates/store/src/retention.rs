//! How long the ledger is kept, for stores that forget by age.

use std::time::Duration;

use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

const DAY: Duration = Duration::from_secs(86_400);

/// How long what was used, and who changed what, is kept. What is `None` is kept for ever.
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
