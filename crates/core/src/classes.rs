//! Response classification: maps how a request completed to the outcome that controllers learn from, and to
//! whether a retry is worthwhile.
//!
//! | completion | class | outcome | cause | retryable |
//! |---|---|---|---|---|
//! | 1xx, 2xx, 3xx | success | success | none | no |
//! | 429 | overload | overload | throttled | yes |
//! | 503, 529 | overload | overload | server | yes |
//! | 500, 502, 504, 520–524, 530 | transient | failure | server | yes |
//! | 408 | transient | failure | other | yes |
//! | a timeout, a lost connection | transient | failure | network | yes |
//! | any other 5xx, and numbers that are not a status | permanent | failure | server | no |
//! | any other 4xx | mistake | mistake | none | no |
//! | never sent | mistake | ignored | none | no |
//!
//! Some providers answer 529 when overloaded. A proxy answers 520–524 and 530 when it cannot reach or
//! understand the upstream.
//!
//! A mistake is the caller's: it shows only that the upstream answers, moves no limit, and does not
//! interrupt a run of consecutive failures. The class of each status, of timeouts and of connection errors
//! can be overridden.
//!
//! [`Classes::outcome_with`] also reads the headers:
//!
//! - An explicit delay (`retry-after`, `retry-after-ms`) applies to successes too, except a successful 202 or
//!   3xx: there it says when to poll *this* resource again, and other requests need not wait.
//! - A mistake with an explicit delay is an overload: for example a 403 or a 413 with `retry-after`.
//! - So is a 403 whose quota is certainly empty (the limit is known, nothing remains, and a reset follows),
//!   which is how GitHub reports a rate limit. [`EmptyQuota::Ignore`] turns this off where such numbers
//!   cannot be trusted.
//! - An overload without an explicit delay waits until no quota is empty: the latest reset of the empty ones.
//! - Any other completion waits for an empty quota only until one unit is available, and only if the limit is
//!   known: the next request would certainly be rejected, and rejected requests often count. Turn this off
//!   with [`EmptyQuota::Ignore`] if the upstream's numbers cannot be trusted.
//! - The remaining requests and tokens, and which quota is exhausted, are passed on to the controller.
//! - `x-amz-retry-after` applies if no other header sets a delay and the request did not succeed. It is
//!   limited to 5 s beyond the caller's own backoff, set with [`Classes::backoff`].

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::cause::Cause;
use crate::feedback::headers::{Signals, WAIT_MAX, amz_wait};
use crate::outcome::Outcome;

/// The lowest valid status.
pub const STATUS_MIN: u16 = 100;
/// The highest valid status.
pub const STATUS_MAX: u16 = 599;
/// Default of the caller's own backoff: the first delay of
/// [`Retry::attempts`](crate::retry::Retry::attempts).
const BACKOFF: Duration = Duration::from_millis(200);
const STATUSES: usize = (STATUS_MAX - STATUS_MIN + 1) as usize;

/// How a request completed, as seen by its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Completion {
    /// A response with this status.
    Status(u16),
    /// No response before the timeout.
    Timeout,
    /// The connection failed or was lost.
    Connection,
    /// The request was never sent: it could not be built, or was abandoned.
    Unsent,
}

/// The class of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionClass {
    /// The request succeeded.
    Success,
    /// The upstream reported overload; a later attempt may succeed.
    Overload,
    /// The upstream failed; another attempt may succeed.
    Transient,
    /// The upstream failed and would fail again.
    Permanent,
    /// The caller's mistake, which carries no information about the upstream.
    Mistake,
}

impl CompletionClass {
    /// Whether another attempt may succeed.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Overload | Self::Transient)
    }
}

/// What an empty quota means if the request itself was not an overload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EmptyQuota {
    /// All requests wait until the quota has units again.
    #[default]
    Wait,
    /// Keep sending; the upstream rejects what it does not accept.
    Ignore,
}

/// A number outside the range of HTTP statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("status {status} is outside {STATUS_MIN}..={STATUS_MAX}")]
pub struct InvalidStatus {
    /// The number.
    pub status: u16,
}

/// Maps completions to classes: the default table, with overrides.
///
/// The default table is in [the module](self): statuses up to 399 succeed; 429, 503 and 529 are overloads;
/// 408, 500, 502, 504, 520–524, 530, timeouts and lost connections are transient; any other 5xx is permanent;
/// any other 4xx, and a request that was never sent, is a mistake.
///
/// ```
/// use tidegate_core::classes::{Classes, Completion, CompletionClass};
/// use tidegate_core::outcome::Kind;
///
/// let classes = Classes::new()
///     .status(420, CompletionClass::Overload)?        // "slow down" for some APIs
///     .status(404, CompletionClass::Success)?         // not found is a valid answer here
///     .timeout(CompletionClass::Permanent);           // a slow request stays slow
/// assert_eq!(classes.outcome(Completion::Status(420)).kind(), Kind::Overload);
/// assert!(classes.classify(Completion::Status(502)).is_retryable());
/// assert!(!classes.classify(Completion::Timeout).is_retryable());
/// # Ok::<(), tidegate_core::classes::InvalidStatus>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Classes {
    statuses: [CompletionClass; STATUSES],
    timeout: CompletionClass,
    connection: CompletionClass,
    empty_quota: EmptyQuota,
    backoff: Duration,
}

impl Default for Classes {
    fn default() -> Self {
        Self::new()
    }
}

impl Classes {
    /// The default table.
    pub const fn new() -> Self {
        let mut statuses = [CompletionClass::Success; STATUSES];
        let mut at = 0;
        let mut status = STATUS_MIN;
        while status <= STATUS_MAX {
            statuses[at] = default_class(status);
            at += 1;
            status += 1;
        }
        Self {
            statuses,
            timeout: CompletionClass::Transient,
            connection: CompletionClass::Transient,
            empty_quota: EmptyQuota::Wait,
            backoff: BACKOFF,
        }
    }

    /// Overrides the class of one status.
    ///
    /// # Errors
    /// [`InvalidStatus`] where the number is outside of [`STATUS_MIN`]..=[`STATUS_MAX`].
    pub const fn status(mut self, status: u16, class: CompletionClass) -> Result<Self, InvalidStatus> {
        match index(status) {
            Some(at) => {
                self.statuses[at] = class;
                Ok(self)
            }
            None => Err(InvalidStatus { status }),
        }
    }

    /// Overrides the class of timeouts.
    #[must_use]
    pub const fn timeout(mut self, class: CompletionClass) -> Self {
        self.timeout = class;
        self
    }

    /// Overrides the class of connections that were refused or lost.
    #[must_use]
    pub const fn connection(mut self, class: CompletionClass) -> Self {
        self.connection = class;
        self
    }

    /// Sets whether requests wait for an empty quota if the request itself was not an overload.
    #[must_use]
    pub const fn empty_quota(mut self, empty_quota: EmptyQuota) -> Self {
        self.empty_quota = empty_quota;
        self
    }

    /// Sets the caller's own backoff, which bounds `x-amz-retry-after`; 200 ms by default.
    #[must_use]
    pub const fn backoff(mut self, own: Duration) -> Self {
        self.backoff = own;
        self
    }

    /// Returns the class of a completion without its headers. A number that is not a status counts as a 5xx
    /// (RFC 9110 §15).
    pub const fn classify(&self, completion: Completion) -> CompletionClass {
        match completion {
            Completion::Status(status) => match index(status) {
                Some(at) => self.statuses[at],
                None => CompletionClass::Permanent,
            },
            Completion::Timeout => self.timeout,
            Completion::Connection => self.connection,
            Completion::Unsent => CompletionClass::Mistake,
        }
    }

    /// Returns the class of a completion with its headers: a mistake with an explicit delay is an overload,
    /// and so is a 403 whose quota is certainly empty.
    pub fn classify_with(&self, completion: Completion, signals: &Signals) -> CompletionClass {
        let has_delay = match signals.retry_after {
            Some(hint) => !hint.wait.is_zero(),
            None => completion == Completion::Status(403) && self.until_more(signals).is_some(),
        };
        match self.classify(completion) {
            CompletionClass::Mistake if has_delay => CompletionClass::Overload,
            class => class,
        }
    }

    /// Returns the outcome of a completion without its headers.
    pub fn outcome(&self, completion: Completion) -> Outcome {
        outcome_of(completion, self.classify(completion))
    }

    /// Returns the outcome of a completion with its headers.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate_core::classes::{Classes, Completion};
    /// use tidegate_core::feedback::headers::read;
    /// use tidegate_core::outcome::Outcome;
    /// use tidegate_core::time::Stamp;
    ///
    /// let signals = read([("retry-after", "2")], Stamp::from_secs(1_800_000_000));
    /// let outcome = Classes::new().outcome_with(Completion::Status(200), &signals);
    /// assert_eq!(outcome, Outcome::success().retry_after(Duration::from_secs(2)));
    /// ```
    pub fn outcome_with(&self, completion: Completion, signals: &Signals) -> Outcome {
        let class = self.classify_with(completion, signals);
        let unread = signals.malformed.saturating_add(signals.ignored);
        let mut outcome = outcome_of(completion, class).with_malformed(unread);
        // Untrusted numbers do not set a pace either.
        if self.empty_quota == EmptyQuota::Wait && class != CompletionClass::Mistake {
            for quota in &signals.quotas {
                // The first quota of each dimension counts, as in `Signals::quota`.
                if let Some(level) = quota.level().filter(|_| outcome.quota_level(quota.dimension).is_none())
                {
                    outcome = outcome.quota(quota.dimension, level);
                }
            }
        }
        if let (CompletionClass::Overload, Some(dimension)) = (class, signals.exceeded()) {
            outcome = outcome.exceeded(dimension);
        }
        match self.delay(completion, class, signals) {
            Some(wait) => outcome.retry_after(wait.min(WAIT_MAX)),
            None => outcome,
        }
    }

    /// How long all requests must wait.
    fn delay(&self, completion: Completion, class: CompletionClass, signals: &Signals) -> Option<Duration> {
        let explicit = signals.retry_after.map(|hint| hint.wait);
        let amz = || signals.amz_retry_after.map(|wait| amz_wait(wait, self.backoff));
        let until_more = || self.until_more(signals);
        match class {
            // Zero counts here: an upstream that sends a retry delay is alive.
            CompletionClass::Overload => signals.hint().map(|hint| hint.wait).or_else(amz),
            CompletionClass::Success => explicit
                .filter(|_| !is_about_one_resource(completion))
                .or_else(until_more)
                .filter(|wait| !wait.is_zero()),
            CompletionClass::Transient | CompletionClass::Permanent => {
                explicit.or_else(until_more).or_else(amz).filter(|wait| !wait.is_zero())
            }
            CompletionClass::Mistake => None,
        }
    }

    /// How long a certainly empty quota blocks all requests, unless such numbers are ignored.
    fn until_more(&self, signals: &Signals) -> Option<Duration> {
        signals.until_more().filter(|_| self.empty_quota == EmptyQuota::Wait)
    }
}

impl fmt::Debug for Classes {
    /// Shows only what differs from the default table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = (STATUS_MIN..=STATUS_MAX).zip(self.statuses);
        let other: Vec<_> = all.filter(|(status, class)| *class != default_class(*status)).collect();
        f.debug_struct("Classes")
            .field("statuses", &other)
            .field("timeout", &self.timeout)
            .field("connection", &self.connection)
            .field("empty_quota", &self.empty_quota)
            .field("backoff", &self.backoff)
            .finish()
    }
}

/// The index of a status in the table.
const fn index(status: u16) -> Option<usize> {
    if STATUS_MIN <= status && status <= STATUS_MAX { Some((status - STATUS_MIN) as usize) } else { None }
}

/// The default table.
const fn default_class(status: u16) -> CompletionClass {
    match status {
        ..=399 => CompletionClass::Success,
        429 | 503 | 529 => CompletionClass::Overload,
        408 | 500 | 502 | 504 | 520..=524 | 530 => CompletionClass::Transient,
        400..=499 => CompletionClass::Mistake,
        _ => CompletionClass::Permanent,
    }
}

/// Whether a success's `retry-after` is about one resource only: pending work, or a redirect.
const fn is_about_one_resource(completion: Completion) -> bool {
    matches!(completion, Completion::Status(202 | 300..=399))
}

/// The outcome of a completion of `class`, without hints.
const fn outcome_of(completion: Completion, class: CompletionClass) -> Outcome {
    let outcome = match class {
        CompletionClass::Success => return Outcome::success(),
        CompletionClass::Mistake if matches!(completion, Completion::Status(_)) => return Outcome::mistake(),
        CompletionClass::Mistake => return Outcome::ignored(),
        CompletionClass::Overload => Outcome::overload(),
        CompletionClass::Transient | CompletionClass::Permanent => Outcome::failure(),
    };
    outcome.because(match completion {
        Completion::Status(429) => Cause::Throttled,
        Completion::Status(STATUS_MIN..=499) | Completion::Unsent => Cause::Other,
        Completion::Status(_) => Cause::Server,
        Completion::Timeout | Completion::Connection => Cause::Network,
    })
}

#[cfg(test)]
mod tests;
