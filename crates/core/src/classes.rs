//! Failure classes: from how a request ended to what is learned from it, and whether another attempt is worth it.
//!
//! | ended with | sort | outcome | cause | another attempt |
//! |---|---|---|---|---|
//! | 1xx, 2xx, 3xx | success | success | none | no |
//! | 429 | overload | overload | throttled | yes |
//! | 503, 529 | overload | overload | server | yes |
//! | 500, 502, 504, 520–524, 530 | transient | failure | server | yes |
//! | 408 | transient | failure | other | yes |
//! | a timeout, a lost connection | transient | failure | network | yes |
//! | any other 5xx, and numbers that are no status | permanent | failure | server | no |
//! | any other 4xx, never sent | mistake | ignored | none | no |
//!
//! 529 is how some say that they are overloaded; 520–524 and 530 are what a proxy in front says of a far side that it could
//! not reach, or not understand.
//!
//! A mistake is the caller's own: it says nothing of the far side, moves no limit, and does not end a row of
//! failures. Each status, the timeout and the connection can be given another sort.
//!
//! What the headers say is added by [`Classes::outcome_with`]:
//!
//! - What is said in so many words (`retry-after`, `retry-after-ms`) counts, with a success too; but not with a 202 or a 3xx
//!   that is one: there it says when to ask for *this* again, and nobody else has to wait for that.
//! - A mistake that says when to come back is none: a 403 or a 413 with `retry-after` is an overload.
//! - Nor is a 403 whose quota is surely empty (its limit is known, nothing is left, and more comes later): GitHub says so
//!   that there were too many. It is an overload, unless [`Drained::GoOn`] says that such numbers are not to be trusted.
//! - An overload without it waits until no quota is empty: the latest reset of those with nothing left.
//! - With any other ending an empty quota is waited for only until one unit of it is there, and only where the
//!   limit is known too: the next request would be refused for certain, and refused requests often count. Where a
//!   far side's numbers are not to be trusted, [`Drained::GoOn`] leaves this out.
//! - What is left of requests and tokens, and of which quota nothing is left, is passed on to the controller.
//! - `x-amz-retry-after` counts where nothing else is said and the request did not succeed, within 5 s beyond the
//!   caller's own back-off, which [`Classes::backoff`] tells.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::cause::Cause;
use crate::feedback::headers::{Signals, WAIT_MAX, amz_wait};
use crate::outcome::Outcome;

/// The lowest status there is.
pub const STATUS_MIN: u16 = 100;
/// The highest status there is.
pub const STATUS_MAX: u16 = 599;
/// The caller's own back-off unless told otherwise: the first delay of [`Retry::attempts`](crate::retry::Retry::attempts).
const BACKOFF: Duration = Duration::from_millis(200);
const STATUSES: usize = (STATUS_MAX - STATUS_MIN + 1) as usize;

/// How a request ended, as its caller saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Ended {
    /// A response came, with this status.
    Status(u16),
    /// Nothing came in time.
    Timeout,
    /// There was no connection, or it was lost.
    Connection,
    /// It was never sent: the request could not be made, or its maker gave up.
    Unsent,
}

/// What sort of ending it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sort {
    /// It worked.
    Success,
    /// The far side said that it is too much; later it may do.
    Overload,
    /// The far side failed, and may not the next time.
    Transient,
    /// The far side failed, and would again.
    Permanent,
    /// The caller's own mistake, which says nothing of the far side.
    Mistake,
}

impl Sort {
    /// Whether another attempt may end better.
    pub const fn is_worth_another(self) -> bool {
        matches!(self, Self::Overload | Self::Transient)
    }
}

/// What is done about a quota that is empty while the request itself was no overload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Drained {
    /// All wait until there is more of it.
    #[default]
    Wait,
    /// It is left to the far side to say no.
    GoOn,
}

/// A number that is no status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("status {status} is outside {STATUS_MIN}..={STATUS_MAX}")]
pub struct InvalidStatus {
    /// The number.
    pub status: u16,
}

/// Which ending is of which sort; the usual table, with exceptions of one's own.
///
/// The usual table is that of [the module](self): up to 399 a success; 429, 503 and 529 an overload; 408, 500, 502, 504, 520–524,
/// 530, timeouts and lost connections transient; any other 5xx permanent; any other 4xx, and what was never sent, a mistake.
///
/// ```
/// use tidegate_core::classes::{Classes, Ended, Sort};
/// use tidegate_core::outcome::Kind;
///
/// let classes = Classes::new()
///     .status(420, Sort::Overload)?        // some say "slow down" so
///     .status(404, Sort::Success)?         // to look and find nothing is an answer
///     .timeout(Sort::Permanent);           // what took too long once will again
/// assert_eq!(classes.outcome(Ended::Status(420)).kind(), Kind::Overload);
/// assert!(classes.sort(Ended::Status(502)).is_worth_another());
/// assert!(!classes.sort(Ended::Timeout).is_worth_another());
/// # Ok::<(), tidegate_core::classes::InvalidStatus>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Classes {
    statuses: [Sort; STATUSES],
    timeout: Sort,
    connection: Sort,
    drained: Drained,
    backoff: Duration,
}

impl Default for Classes {
    fn default() -> Self {
        Self::new()
    }
}

impl Classes {
    /// The usual table.
    pub const fn new() -> Self {
        let mut statuses = [Sort::Success; STATUSES];
        let mut at = 0;
        let mut status = STATUS_MIN;
        while status <= STATUS_MAX {
            statuses[at] = usual(status);
            at += 1;
            status += 1;
        }
        Self {
            statuses,
            timeout: Sort::Transient,
            connection: Sort::Transient,
            drained: Drained::Wait,
            backoff: BACKOFF,
        }
    }

    /// The same with another sort for one status.
    ///
    /// # Errors
    /// [`InvalidStatus`] where the number is outside of [`STATUS_MIN`]..=[`STATUS_MAX`].
    pub const fn status(mut self, status: u16, sort: Sort) -> Result<Self, InvalidStatus> {
        match index(status) {
            Some(at) => {
                self.statuses[at] = sort;
                Ok(self)
            }
            None => Err(InvalidStatus { status }),
        }
    }

    /// The same with another sort for timeouts.
    #[must_use]
    pub const fn timeout(mut self, sort: Sort) -> Self {
        self.timeout = sort;
        self
    }

    /// The same with another sort for connections that were refused or lost.
    #[must_use]
    pub const fn connection(mut self, sort: Sort) -> Self {
        self.connection = sort;
        self
    }

    /// The same with another answer to a quota that is empty while the request was no overload: whether all wait for it.
    #[must_use]
    pub const fn drained(mut self, drained: Drained) -> Self {
        self.drained = drained;
        self
    }

    /// The same with the caller's own back-off, around which `x-amz-retry-after` is followed; 200 ms unless told.
    #[must_use]
    pub const fn backoff(mut self, own: Duration) -> Self {
        self.backoff = own;
        self
    }

    /// What sort of ending it is, without a look at headers. A number that is no status counts as a 5xx, as HTTP
    /// has it (RFC 9110 §15).
    pub const fn sort(&self, ended: Ended) -> Sort {
        match ended {
            Ended::Status(status) => match index(status) {
                Some(at) => self.statuses[at],
                None => Sort::Permanent,
            },
            Ended::Timeout => self.timeout,
            Ended::Connection => self.connection,
            Ended::Unsent => Sort::Mistake,
        }
    }

    /// What sort of ending it is where the headers said this: a mistake that says when to come back is an overload, and so is
    /// a 403 whose quota is surely empty.
    pub fn sort_with(&self, ended: Ended, signals: &Signals) -> Sort {
        let says_when = match signals.retry_after {
            Some(hint) => !hint.wait.is_zero(),
            None => ended == Ended::Status(403) && self.until_more(signals).is_some(),
        };
        match self.sort(ended) {
            Sort::Mistake if says_when => Sort::Overload,
            sort => sort,
        }
    }

    /// What is learned from it, without a look at headers.
    pub fn outcome(&self, ended: Ended) -> Outcome {
        bare(ended, self.sort(ended))
    }

    /// What is learned from it where the headers said this.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate_core::classes::{Classes, Ended};
    /// use tidegate_core::feedback::headers::read;
    /// use tidegate_core::outcome::Outcome;
    /// use tidegate_core::time::Stamp;
    ///
    /// let signals = read([("retry-after", "2")], Stamp::from_secs(1_800_000_000));
    /// let outcome = Classes::new().outcome_with(Ended::Status(200), &signals);
    /// assert_eq!(outcome, Outcome::success().retry_after(Duration::from_secs(2)));
    /// ```
    pub fn outcome_with(&self, ended: Ended, signals: &Signals) -> Outcome {
        let sort = self.sort_with(ended, signals);
        let unread = signals.malformed.saturating_add(signals.ignored);
        let mut outcome = bare(ended, sort).with_malformed(unread);
        // Numbers that are not trusted do not set a pace either.
        if self.drained == Drained::Wait && sort != Sort::Mistake {
            for quota in &signals.quotas {
                // Of several quotas of one dimension the first counts, as in `Signals::quota`.
                if let Some(level) = quota.level().filter(|_| outcome.quota_level(quota.dimension).is_none())
                {
                    outcome = outcome.quota(quota.dimension, level);
                }
            }
        }
        if let (Sort::Overload, Some(dimension)) = (sort, signals.exceeded()) {
            outcome = outcome.exceeded(dimension);
        }
        match self.wait(ended, sort, signals) {
            Some(wait) => outcome.retry_after(wait.min(WAIT_MAX)),
            None => outcome,
        }
    }

    /// How long all stay away.
    fn wait(&self, ended: Ended, sort: Sort, signals: &Signals) -> Option<Duration> {
        let said = signals.retry_after.map(|hint| hint.wait);
        let amz = || signals.amz_retry_after.map(|said| amz_wait(said, self.backoff));
        let until_more = || self.until_more(signals);
        match sort {
            // Zero is an answer here: a far side that says when to come back is alive.
            Sort::Overload => signals.hint().map(|hint| hint.wait).or_else(amz),
            Sort::Success => {
                said.filter(|_| !is_of_one(ended)).or_else(until_more).filter(|wait| !wait.is_zero())
            }
            Sort::Transient | Sort::Permanent => {
                said.or_else(until_more).or_else(amz).filter(|wait| !wait.is_zero())
            }
            Sort::Mistake => None,
        }
    }

    /// How long a quota that is surely empty keeps all away, where such numbers are trusted.
    fn until_more(&self, signals: &Signals) -> Option<Duration> {
        signals.until_more().filter(|_| self.drained == Drained::Wait)
    }
}

impl fmt::Debug for Classes {
    /// Only what differs from the usual table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = (STATUS_MIN..=STATUS_MAX).zip(self.statuses);
        let other: Vec<_> = all.filter(|(status, sort)| *sort != usual(*status)).collect();
        f.debug_struct("Classes")
            .field("statuses", &other)
            .field("timeout", &self.timeout)
            .field("connection", &self.connection)
            .field("drained", &self.drained)
            .field("backoff", &self.backoff)
            .finish()
    }
}

/// Where a status is in the table.
const fn index(status: u16) -> Option<usize> {
    if STATUS_MIN <= status && status <= STATUS_MAX { Some((status - STATUS_MIN) as usize) } else { None }
}

/// The usual table.
const fn usual(status: u16) -> Sort {
    match status {
        ..=399 => Sort::Success,
        429 | 503 | 529 => Sort::Overload,
        408 | 500 | 502 | 504 | 520..=524 | 530 => Sort::Transient,
        400..=499 => Sort::Mistake,
        _ => Sort::Permanent,
    }
}

/// Whether a success speaks of one thing only when it says when to come back: work that is not done yet, a redirect.
const fn is_of_one(ended: Ended) -> bool {
    matches!(ended, Ended::Status(202 | 300..=399))
}

/// The outcome of an ending of this sort, without hints.
const fn bare(ended: Ended, sort: Sort) -> Outcome {
    let outcome = match sort {
        Sort::Success => return Outcome::success(),
        Sort::Mistake => return Outcome::ignored(),
        Sort::Overload => Outcome::overload(),
        Sort::Transient | Sort::Permanent => Outcome::failure(),
    };
    outcome.because(match ended {
        Ended::Status(429) => Cause::Throttled,
        Ended::Status(STATUS_MIN..=499) | Ended::Unsent => Cause::Other,
        Ended::Status(_) => Cause::Server,
        Ended::Timeout | Ended::Connection => Cause::Network,
    })
}

#[cfg(test)]
mod tests;
