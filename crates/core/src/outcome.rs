//! The outcome of a request, from which the gates and the controller learn.
//!
//! | outcome | circuit | controller | pause | progress | budget |
//! |---|---|---|---|---|---|
//! | success | success | learns, latency sampled | only if hinted | +1 if final | spent or reported, else estimate |
//! | failure | failure | learns, latency not sampled | only if hinted | +1 if final | spent or reported, else returned |
//! | overload, no hint | failure | one decrease per wave | size rule | +1 if final | spent or reported, else returned |
//! | overload with hint | nothing | one decrease per wave | hint (max) | +1 if final | spent or reported, else returned |
//! | ignored, drop, panic | probe returned | nothing | nothing | 0 | spent or reported stays, rest returns |
//! | a mistake (ignored) | probe returned | `Auto`: ends an outage | nothing | 0 | spent or reported stays, rest returns |
//!
//! `gate/settle.rs` implements this table, and its tests check it row by row.

use std::num::NonZero;
use std::time::Duration;

use crate::cause::Cause;
use crate::cost::{Cost, DIMENSIONS};
use crate::feedback::auto::index_of;
use crate::feedback::headers::{Dimension, Reset};
use crate::feedback::rejection;
use crate::time::nanos;

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an outcome does nothing until it is passed to a permit or a throttle"]
pub struct Outcome {
    pub(crate) kind: Kind,
    pub(crate) spent: Option<Cost>,
    pub(crate) retry_after: Option<Duration>,
    pub(crate) latency: Option<Duration>,
    pub(crate) retried: bool,
    pub(crate) cause: Option<Cause>,
    pub(crate) malformed: u16,
    /// Whether the upstream answered; used only if the outcome is ignored otherwise.
    pub(crate) is_answer: bool,
    pub(crate) exceeded: Option<Dimension>,
    pub(crate) quotas: [Option<PackedLevel>; DIMENSIONS],
}

/// The longest reset that is kept, in nanoseconds: 146 years.
const AFTER_MAX: u64 = u64::MAX >> 2;

/// A [`QuotaLevel`] in 32 bytes, because outcomes are copied with every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PackedLevel {
    limit: u64,
    remaining: u64,
    /// Nanoseconds until the reset, in the upper bits, then whether the quota is full by then, then a one.
    reset: NonZero<u64>,
    /// Nanoseconds; zero is unknown.
    window: u64,
}

impl PackedLevel {
    const fn new(level: QuotaLevel) -> Self {
        let is_full = matches!(level.reset, Reset::Full(_));
        let after = nanos(level.reset.after());
        let after = if after > AFTER_MAX { AFTER_MAX } else { after };
        let window = match level.window {
            Some(window) => nanos(window),
            None => 0,
        };
        let reset = NonZero::<u64>::MIN.saturating_add((after << 2) | ((is_full as u64) << 1));
        Self { limit: level.limit, remaining: level.remaining, reset, window }
    }

    pub(crate) const fn level(self) -> QuotaLevel {
        let reset = self.reset.get();
        let after = Duration::from_nanos(reset >> 2);
        QuotaLevel {
            limit: self.limit,
            remaining: self.remaining,
            reset: if reset & 2 > 0 { Reset::Full(after) } else { Reset::More(after) },
            window: if self.window > 0 { Some(Duration::from_nanos(self.window)) } else { None },
        }
    }
}

/// What the upstream reported about one of its quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaLevel {
    /// Units of the full quota.
    pub limit: u64,
    /// Units left.
    pub remaining: u64,
    /// When the quota resets.
    pub reset: Reset,
    /// The window of the limit, if known.
    pub window: Option<Duration>,
}

/// The four kinds of outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The request succeeded.
    Success,
    /// The request failed in a way that reflects on the upstream's health.
    Failure,
    /// The upstream reported overload.
    Overload,
    /// Carries no information about the upstream: cancelled, a caller's mistake, not sent.
    Ignored,
}

impl Outcome {
    /// A success.
    pub const fn success() -> Self {
        Self::new(Kind::Success)
    }

    /// A failure that reflects on the upstream's health.
    pub const fn failure() -> Self {
        Self::new(Kind::Failure)
    }

    /// The upstream reported overload (429, 503, "slow down").
    pub const fn overload() -> Self {
        Self::new(Kind::Overload)
    }

    /// Nothing to learn from: cancelled, never sent.
    pub const fn ignored() -> Self {
        Self::new(Kind::Ignored)
    }

    /// The upstream answered that the request is at fault (400, 404). [Ignored](Kind::Ignored), except that
    /// [`Auto`](crate::plan::Auto) learns that the upstream accepts requests.
    pub const fn mistake() -> Self {
        Self { is_answer: true, ..Self::new(Kind::Ignored) }
    }

    /// Success for `Ok`; for `Err`, a failure if `is_failure` returns true, otherwise ignored.
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

    /// Sets the actual total cost, which replaces the estimate and anything reported so far.
    pub const fn spent(mut self, actual: Cost) -> Self {
        self.spent = Some(actual);
        self
    }

    /// Sets the retry delay that the upstream sent.
    pub const fn retry_after(mut self, hint: Duration) -> Self {
        self.retry_after = Some(hint);
        self
    }

    /// Sets the latency, if it is not the time since the permit was granted.
    pub const fn took(mut self, latency: Duration) -> Self {
        self.latency = Some(latency);
        self
    }

    /// Marks the request as one that will be retried, so that progress does not count it.
    pub const fn retried(mut self) -> Self {
        self.retried = true;
        self
    }

    /// Sets the cause, for metrics.
    pub const fn because(mut self, cause: Cause) -> Self {
        self.cause = Some(cause);
        self
    }

    /// The cause, if set.
    pub const fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// Sets how many header values of the response were malformed or implausible.
    #[expect(clippy::cast_possible_truncation, reason = "values above the bound are clamped")]
    pub const fn with_malformed(mut self, values: u32) -> Self {
        self.malformed = if values > u16::MAX as u32 { u16::MAX } else { values as u16 };
        self
    }

    /// Malformed or implausible header values of the response; at most 65,535 are counted.
    pub const fn malformed(&self) -> u16 {
        self.malformed
    }

    /// Sets the quota that was exceeded, if the rejection names it: requests, tokens or a kind of token.
    pub const fn exceeded(mut self, dimension: Dimension) -> Self {
        self.exceeded = Some(dimension);
        self
    }

    /// Sets the quota that was exceeded to the one that the body of the rejection [names](rejection::exceeded), if
    /// this is an overload and the body names one. It takes precedence over what headers name, except that tokens
    /// do not replace a kind of token.
    ///
    /// ```
    /// use tidegate_core::feedback::headers::Dimension;
    /// use tidegate_core::outcome::Outcome;
    ///
    /// let outcome = Outcome::overload().exceeded_in(b"rate limit of 40,000 input tokens per minute");
    /// assert_eq!(outcome.exceeded_quota(), Some(Dimension::InputTokens));
    /// ```
    pub fn exceeded_in(mut self, body: &[u8]) -> Self {
        if self.kind == Kind::Overload {
            self.exceeded = match (rejection::exceeded(body), self.exceeded) {
                (
                    Some(Dimension::Tokens),
                    Some(kind @ (Dimension::InputTokens | Dimension::OutputTokens)),
                ) => Some(kind),
                (named, by_headers) => named.or(by_headers),
            };
        }
        self
    }

    /// The quota that was exceeded, if the rejection names it.
    pub const fn exceeded_quota(&self) -> Option<Dimension> {
        self.exceeded
    }

    /// Sets the reported level of the upstream's quota of requests, tokens or a kind of token;
    /// [`Dimension::Other`] is ignored.
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
            self.quotas[index] = Some(PackedLevel::new(level));
        }
        self
    }

    /// The reported level of a quota.
    pub const fn quota_level(&self, dimension: Dimension) -> Option<QuotaLevel> {
        match index_of(dimension) {
            Some(index) => match self.quotas[index] {
                Some(packed) => Some(packed.level()),
                None => None,
            },
            None => None,
        }
    }

    /// The cause of an error: as set, or derived from the kind. `None` for successes and ignored outcomes.
    #[inline]
    pub const fn blame(&self) -> Option<Cause> {
        match (self.kind, self.cause) {
            (Kind::Success | Kind::Ignored, _) => None,
            (Kind::Failure | Kind::Overload, Some(cause)) => Some(cause),
            (Kind::Overload, None) => Some(Cause::Throttled),
            (Kind::Failure, None) => Some(Cause::Other),
        }
    }

    /// The latency, if set.
    pub const fn latency(&self) -> Option<Duration> {
        self.latency
    }

    /// Whether the request will be retried.
    pub const fn is_retried(&self) -> bool {
        self.retried
    }

    /// The kind.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The actual cost, if set.
    pub const fn spent_cost(&self) -> Option<Cost> {
        self.spent
    }

    /// Whether the upstream sent a retry delay.
    pub const fn has_hint(&self) -> bool {
        self.retry_after.is_some()
    }

    /// Whether a throttle learns from it although nothing there learns from outcomes: a retry time pauses, and bad
    /// header values are counted.
    #[inline]
    pub const fn is_always_learned(&self) -> bool {
        self.has_hint() || self.malformed > 0
    }

    /// The retry delay that the upstream sent, if any.
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
            is_answer: false,
            exceeded: None,
            quotas: [None; DIMENSIONS],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_level_is_read_back() {
        let spans = [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(86_400 * 366)];
        for span in spans {
            for reset in [Reset::Full(span), Reset::More(span)] {
                for window in [None, Some(Duration::from_secs(60))] {
                    let level = QuotaLevel { limit: u64::MAX, remaining: 7, reset, window };
                    assert_eq!(PackedLevel::new(level).level(), level);
                }
            }
        }
        let endless = QuotaLevel { limit: 1, remaining: 0, reset: Reset::More(Duration::MAX), window: None };
        assert!(PackedLevel::new(endless).level().reset.after() > Duration::from_secs(86_400 * 36_500));
        assert_eq!(size_of::<Option<PackedLevel>>(), 32);
    }

    #[test]
    fn body_of_an_overload_names_the_quota() {
        use Dimension::{InputTokens, Requests, Tokens};
        let table = [
            (None, "tokens per minute", Some(Tokens)),
            (Some(Requests), "tokens per minute", Some(Tokens)),
            (Some(InputTokens), "tokens per minute", Some(InputTokens)),
            (Some(InputTokens), "requests per minute", Some(Requests)),
            (Some(InputTokens), "slow down", Some(InputTokens)),
        ];
        for (by_headers, body, wanted) in table {
            let outcome = by_headers.map_or(Outcome::overload(), |named| Outcome::overload().exceeded(named));
            assert_eq!(
                outcome.exceeded_in(body.as_bytes()).exceeded_quota(),
                wanted,
                "{by_headers:?} {body}"
            );
        }
        assert_eq!(Outcome::failure().exceeded_in(b"tokens per minute").exceeded_quota(), None);
    }

    #[test]
    fn a_result_becomes_an_outcome_by_the_predicate() {
        let classify = |result: Result<(), &str>| Outcome::of(&result, |error| *error == "value").kind();
        assert_eq!(classify(Ok(())), Kind::Success);
        assert_eq!(classify(Err("value")), Kind::Failure);
        assert_eq!(classify(Err("runtime")), Kind::Ignored);
    }
}
