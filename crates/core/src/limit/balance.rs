//! The state of a limit, ready to display.

use std::fmt;
use std::time::Duration;

use crate::limit::meter::Meter;
use crate::limit::name::{LimitKey, LimitName, Subject};
use crate::time::Stamp;

/// A limit's available units, its shape, and how long a caller has to wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Balance {
    /// The bucket: a subject, or a pool.
    pub subject: Subject,
    /// The limit's name.
    pub limit: LimitName,
    /// Whole units available; below zero is debt.
    pub available: i64,
    /// The capacity of the bucket.
    pub burst: u64,
    /// Units per period.
    pub amount: u64,
    /// The period.
    pub period: Duration,
    /// Units taken minus units returned, since the bucket was first used.
    pub consumed: i64,
    /// The requested units.
    pub asked: u64,
    /// How long until the requested units are available: zero is now, `None` never.
    pub retry_after: Option<Duration>,
}

impl Balance {
    /// The balance of `meter` at `now`, for a request of `asked` units.
    pub fn of(subject: &Subject, meter: &Meter, asked: u64, now: Stamp) -> Self {
        let shape = meter.rule().shape();
        let ready_at = meter.ready_at(asked, now);
        Self {
            subject: subject.clone(),
            limit: meter.rule().name().clone(),
            available: meter.available(now),
            burst: shape.burst(),
            amount: shape.amount(),
            period: shape.period(),
            consumed: meter.consumed(),
            asked,
            retry_after: (ready_at < Stamp::MAX).then(|| ready_at.since(now)),
        }
    }

    /// The limit, with how it is pooled.
    pub fn key(&self) -> LimitKey {
        LimitKey { name: self.limit.clone(), across: self.subject.across() }
    }

    /// Whether the requested units are not available.
    pub fn is_short(&self) -> bool {
        self.retry_after != Some(Duration::ZERO)
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: ", self.limit, self.subject)?;
        write!(f, "{} of {} available, {} requested", self.available, self.burst, self.asked)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::limit::policy::Version;
    use crate::limit::rule::Limit;

    #[test]
    fn balance_has_a_retry_time_unless_over_burst() {
        let now = Stamp::from_secs(1_800_000_000);
        let rule = Limit::per_minute("rpm", 100_000).check().unwrap();
        let mut meter = Meter::new(Arc::new(rule), Version::ZERO);
        meter.take(100_000, now);
        let subject = Subject::new("a", "b").unwrap();
        let after = |asked| Balance::of(&subject, &meter, asked, now).retry_after;
        // An empty bucket: 10,000 of 100,000 a minute take 6 s.
        assert_eq!(after(10_000), Some(Duration::from_secs(6)));
        assert_eq!(after(100_000), Some(Duration::from_secs(60)));
        assert_eq!(after(0), Some(Duration::ZERO));
        assert_eq!(after(100_001), None);
        let balance = Balance::of(&subject, &meter, 5, now);
        assert_eq!(balance.to_string(), "rpm of a on b: 0 of 100000 available, 5 requested");
        assert!(balance.is_short());
        assert!(!Balance::of(&subject, &meter, 0, now).is_short());
    }
}
