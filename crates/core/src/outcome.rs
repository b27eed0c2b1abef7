//! How the work went, and what may be learned from it.
//!
//! | outcome | circuit | controller | pause | progress | budget |
//! |---|---|---|---|---|---|
//! | success | success | learns, latency sampled | only if hinted | +1 if final | spent or reported, else estimate |
//! | failure | failure | learns, latency not sampled | only if hinted | +1 if final | spent or reported, else returned |
//! | overload, no hint | failure | one decrease per wave | size rule | +1 if final | spent or reported, else returned |
//! | overload with hint | nothing | one decrease per wave | hint (max) | +1 if final | spent or reported, else returned |
//! | ignored, drop, panic | probe back | nothing | nothing | 0 | spent or reported stays, rest returns |
//!
//! The table is carried out in `gate/settle.rs`, and tested there row by row.

use std::time::Duration;

use crate::cause::Cause;
use crate::cost::{Cost, DIMENSIONS};
use crate::feedback::auto::index_of;
use crate::feedback::headers::{Dimension, Reset};

/// How the work went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an outcome does nothing until a permit or a throttle is told of it"]
pub struct Outcome {
    pub(crate) kind: Kind,
    pub(crate) spent: Option<Cost>,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) latency: Option<Duration>,
    pub(crate) retried: bool,
    pub(crate) cause: Option<Cause>,
    pub(crate) malformed: u16,
    pub(crate) exceeded: Option<Dimension>,
    pub(crate) quotas: [Option<QuotaLevel>; DIMENSIONS],
}

/// What the upstream reported about one of its quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaLevel {
    /// Units when it is full.
    pub limit: u64,
    /// Units left.
    pub remaining: u64,
    /// When it changes.
    pub reset: Reset,
    /// The time the limit is for, where it is known.
    pub window: Option<Duration>,
}

/// The four endings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// It worked.
    Success,
    /// It failed in a way that speaks of the far side's health.
    Failure,
    /// The far side said it is too much.
    Overload,
    /// It says nothing about the far side: cancelled, a caller's mistake, not sent.
    Ignored,
}

impl Outcome {
    /// The work succeeded.
    pub const fn success() -> Self {
        Self::new(Kind::Success)
    }

    /// The work failed in a way that speaks of the far side's health.
    pub const fn failure() -> Self {
        Self::new(Kind::Failure)
    }

    /// The far side said it is too much (429, 503, "slow down").
    pub const fn overload() -> Self {
        Self::new(Kind::Overload)
    }

    /// Nothing is learned: cancelled, a mistake of the caller's own, never sent.
    pub const fn ignored() -> Self {
        Self::new(Kind::Ignored)
    }

    /// Success for `Ok`; for `Err`, failure where `is_failure` says so, else ignored.
    ///
    /// ```
    /// use tidegate_core::outcome::{Kind, Outcome};
    ///
    /// let reply: Result<(), u16> = Err(404);
    /// let outcome = Outcome::of(&reply, |status| *status >= 500);
    /// assert_eq!(outcome.kind(), Kind::Ignored);
    /// ```
    pub fn of<T, E>(result: &Result<T, E>, is_failure: impl FnOnce(&E) -> bool) -> Self {
        match result {
            Ok(_) => Self::success(),
            Err(error) if is_failure(error) => Self::failure(),
            Err(_) => Self::ignored(),
        }
    }

    /// What was really used, all told; it replaces the estimate and what was reported so far.
    pub const fn spent(mut self, actual: Cost) -> Self {
        self.spent = Some(actual);
        self
    }

    /// The far side said when to come back.
    pub const fn retry_after(mut self, hint: Duration) -> Self {
        self.retry_after = Some(hint);
        self
    }

    /// The work's own time, where it is not the time since the permit was granted.
    pub const fn took(mut self, latency: Duration) -> Self {
        self.latency = Some(latency);
        self
    }

    /// The work will be tried again: progress does not count this ending.
    pub const fn retried(mut self) -> Self {
        self.retried = true;
        self
    }

    /// What lies behind it, for those who count.
    pub const fn because(mut self, cause: Cause) -> Self {
        self.cause = Some(cause);
        self
    }

    /// What lies behind it, where that was said.
    pub const fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// So many header values of the response could not be read, or not be believed.
    #[expect(clippy::cast_possible_truncation, reason = "what is above the bound is the bound")]
    pub const fn with_malformed(mut self, values: u32) -> Self {
        self.malformed = if values > u16::MAX as u32 { u16::MAX } else { values as u16 };
        self
    }

    /// Header values of the response that could not be read, or not be believed; at most 65,535 are counted.
    pub const fn malformed(&self) -> u16 {
        self.malformed
    }

    /// The quota that a rejection was for, if its body or headers name it: requests or tokens.
    pub const fn exceeded(mut self, dimension: Dimension) -> Self {
        self.exceeded = Some(dimension);
        self
    }

    /// What the upstream reported about its quota of requests or tokens; others are not counted.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate_core::feedback::headers::{Dimension, Reset};
    /// use tidegate_core::outcome::{Outcome, QuotaLevel};
    ///
    /// let level = QuotaLevel { limit: 500, remaining: 20, reset: Reset::Full(Duration::from_secs(58)), window: None };
    /// let outcome = Outcome::success().quota(Dimension::Requests, level);
    /// # assert_eq!(outcome.quota_level(Dimension::Requests), Some(level));
    /// ```
    pub const fn quota(mut self, dimension: Dimension, level: QuotaLevel) -> Self {
        if let Some(index) = index_of(dimension) {
            self.quotas[index] = Some(level);
        }
        self
    }

    /// The level that was reported of a quota.
    pub const fn quota_level(&self, dimension: Dimension) -> Option<QuotaLevel> {
        match index_of(dimension) {
            Some(index) => self.quotas[index],
            None => None,
        }
    }

    /// Where the blame lies: what was said, else what the kind suggests. `None` for what is no error.
    #[inline]
    pub const fn blame(&self) -> Option<Cause> {
        match (self.kind, self.cause) {
            (Kind::Success | Kind::Ignored, _) => None,
            (Kind::Failure | Kind::Overload, Some(cause)) => Some(cause),
            (Kind::Overload, None) => Some(Cause::Throttled),
            (Kind::Failure, None) => Some(Cause::Other),
        }
    }

    /// The work's own time, where it was said.
    pub const fn latency(&self) -> Option<Duration> {
        self.latency
    }

    /// Whether the work will be tried again.
    pub const fn is_retried(&self) -> bool {
        self.retried
    }

    /// Which of the four endings it is.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// What was really used, where it was said.
    pub const fn spent_cost(&self) -> Option<Cost> {
        self.spent
    }

    /// Whether the far side said when to come back.
    pub const fn has_hint(&self) -> bool {
        self.retry_after.is_some()
    }

    /// When the far side said to come back, where it did.
    pub const fn hint(&self) -> Option<Duration> {
        self.retry_after
    }

    const fn new(kind: Kind) -> Self {
        Self {
            kind,
            spent: None,
            retry_after: None,
            latency: None,
            retried: false,
            cause: None,
            malformed: 0,
            exceeded: None,
            quotas: [None; DIMENSIONS],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_becomes_an_outcome_by_the_predicate() {
        let classify = |result: Result<(), &str>| Outcome::of(&result, |error| *error == "value").kind();
        assert_eq!(classify(Ok(())), Kind::Success);
        assert_eq!(classify(Err("value")), Kind::Failure);
        assert_eq!(classify(Err("runtime")), Kind::Ignored);
    }
}
