//! Parses `Retry-After` and rate-limit headers of providers: when to retry, how much remains, when it resets.
//!
//! Every provider has its own headers, and the same word means different things. [`read`] knows the formats
//! and returns uniform [`Signals`]:
//!
//! | profile | headers | pitfalls |
//! |---|---|---|
//! | all | `retry-after`, `retry-after-ms` | seconds or one of three date formats; the one in milliseconds is finer and takes precedence |
//! | OpenAI | `x-ratelimit-{limit,remaining,reset}-{requests,tokens}` | a reset is a Go duration, and the time to *full* |
//! | Azure | the same | `-1` and `0` mean unknown; a reset may be plain seconds |
//! | Anthropic | `anthropic-ratelimit-…-{limit,remaining,reset}` | a reset is a date, which may have passed |
//! | AWS | `x-amz-retry-after` | milliseconds, applied within 5 s of the caller's own backoff: [`amz_wait`] |
//! | IETF | `RateLimit`, `RateLimit-Policy`; in older drafts `RateLimit-{Limit,Remaining,Reset}` | structured fields; the time to *more* |
//! | others | `X-RateLimit-…`, `X-Rate-Limit-…` | a reset is seconds, seconds or milliseconds since 1970, or a date |
//!
//! Headers are untrusted input. Values that cannot be parsed are counted as malformed; values that are
//! implausible (negative, more remaining than the limit, a reset more than a day away) as ignored; nothing
//! panics. If a header occurs twice, the more careful value counts: the longer wait, the lower number.
//!
//! Headers are only hints: none raises a limit above its configured value.

mod collect;
pub(crate) mod date;
mod names;
mod number;
mod structured;
#[cfg(test)]
mod tests;

use std::time::Duration;

use smallvec::SmallVec;

use crate::bucket::AMOUNT_MAX;
use crate::outcome::QuotaLevel;
use crate::time::{Stamp, nanos};
use collect::Collector;

pub use date::http_date;

/// The longest wait of a hint from [`read`]: one day.
pub const WAIT_MAX: Duration = Duration::from_secs(86_400);
/// The furthest plausible reset: one day.
pub const RESET_MAX: Duration = Duration::from_secs(86_400);
/// The highest plausible limit.
pub const LIMIT_MAX: u64 = AMOUNT_MAX;
/// The most quotas kept per response; further ones count as ignored.
pub const QUOTAS_MAX: usize = 16;
/// The longest header value in bytes; longer ones are malformed.
pub const VALUE_MAX: usize = 4_096;
/// The largest plausible skew of an upstream's clock: one day.
pub const SKEW_MAX: Duration = Duration::from_secs(86_400);
/// How far `x-amz-retry-after` may exceed the caller's own backoff.
pub const AMZ_BEYOND: Duration = Duration::from_secs(5);

/// The rate-limit information in the headers of one response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Signals {
    /// The explicit retry delay, if a header sets one.
    pub retry_after: Option<Hint>,
    /// The longest time until an empty quota has units again. Only requests and tokens count, because an
    /// empty quota of images, for example, does not concern other requests.
    pub empty_quota: Option<Hint>,
    /// The value of `x-amz-retry-after`; see [`amz_wait`].
    pub amz_retry_after: Option<Duration>,
    /// The quotas, in the order of the headers.
    pub quotas: SmallVec<[Quota; 4]>,
    /// Values of known headers that could not be parsed.
    pub malformed: u32,
    /// Values that were parsed, but are implausible or meaningless.
    pub ignored: u32,
}

/// When to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hint {
    /// The wait from now; zero is a valid hint.
    pub wait: Duration,
    /// The source of the hint.
    pub source: HintSource,
    /// Whether the wait was cut to the longest allowed one.
    pub is_capped: bool,
}

/// The source of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HintSource {
    /// `retry-after`.
    RetryAfter,
    /// `retry-after-ms`.
    RetryAfterMs,
    /// An empty quota.
    Quota(Profile, Dimension),
}

/// The provider or standard that defines the headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// OpenAI and compatible providers.
    OpenAi,
    /// The same headers, from Azure.
    Azure,
    /// Anthropic.
    Anthropic,
    /// `RateLimit` and `RateLimit-Policy`.
    Ietf,
    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset` of older drafts.
    IetfNumbers,
    /// `X-RateLimit-…` and `X-Rate-Limit-…` of other providers.
    Common,
}

/// The unit that a quota counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dimension {
    /// Requests; also if no unit is named.
    Requests,
    /// Input and output tokens together.
    Tokens,
    /// Input tokens.
    InputTokens,
    /// Output tokens.
    OutputTokens,
    /// Something else, named by the quota's label.
    Other,
}

/// When a quota resets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reset {
    /// The time until the quota is full.
    Full(Duration),
    /// The time until the quota has more units.
    More(Duration),
}

/// One quota, as reported by headers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// The profile of its headers.
    pub profile: Profile,
    /// The unit it counts.
    pub dimension: Dimension,
    /// The name of the policy, or of a dimension without its own variant.
    pub label: Option<String>,
    /// Units of the full quota; never zero.
    pub limit: Option<u64>,
    /// Units left; never more than the limit.
    pub remaining: Option<u64>,
    /// When it resets; zero if that time has passed.
    pub reset: Option<Reset>,
    /// The window of the limit, if reported.
    pub window: Option<Duration>,
}

/// How fast a quota refills: `amount` units per `period`, both non-zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refill {
    /// Units.
    pub amount: u64,
    /// The time in which they refill.
    pub period: Duration,
}

/// Reads the headers of a response received at `now`, in wall time.
///
/// Names are case-insensitive; names and values may contain any bytes. Hints are capped at [`WAIT_MAX`].
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::feedback::headers::{Dimension, Reset, read};
/// use tidegate_core::time::Stamp;
///
/// let signals = read(
///     [
///         ("X-RateLimit-Limit-Requests", "60"),
///         ("X-RateLimit-Remaining-Requests", "30"),
///         ("X-RateLimit-Reset-Requests", "1m0s"),
///         ("Retry-After", "2"),
///     ],
///     Stamp::from_secs(1_800_000_000),
/// );
/// assert_eq!(signals.wait(Duration::ZERO), Duration::from_secs(2));
/// let requests = signals.quota(Dimension::Requests).expect("reported");
/// assert_eq!(requests.reset, Some(Reset::Full(Duration::from_secs(60))));
/// assert_eq!(requests.refill().expect("known").interval(), Duration::from_secs(2));
/// ```
pub fn read<N, V>(headers: impl IntoIterator<Item = (N, V)>, now: Stamp) -> Signals
where
    N: AsRef<[u8]>,
    V: AsRef<[u8]>,
{
    read_within(headers, now, WAIT_MAX)
}

/// Like [`read`], with hints capped at `wait_max`.
pub fn read_within<N, V>(headers: impl IntoIterator<Item = (N, V)>, now: Stamp, wait_max: Duration) -> Signals
where
    N: AsRef<[u8]>,
    V: AsRef<[u8]>,
{
    let mut collector = Collector::new(now);
    for (name, value) in headers {
        collector.header(name.as_ref(), value.as_ref());
    }
    collector.finish(wait_max)
}

/// Returns when the upstream sent this response by its own clock: its `Date` plus the `Age` that a cache
/// added.
///
/// Dates in headers refer to the upstream's clock. If the clocks differ, a future reset may be in the local
/// past; pass this time to [`read`] instead of the local time to correct for that. Returns the local time
/// `now` if the header is missing or malformed, or differs by more than a day. A `Date` has whole seconds, so
/// waits may be up to one second longer.
///
/// ```
/// use tidegate_core::feedback::headers::{read, sent_at};
/// use tidegate_core::time::Stamp;
///
/// let headers = [("date", "Sat, 31 Jan 2026 09:30:00 GMT"), ("retry-after", "Sat, 31 Jan 2026 09:30:20 GMT")];
/// let fast = Stamp::from_secs(1_769_851_800 + 300);      // our clock is five minutes ahead
/// assert_eq!(read(headers, fast).hint().map(|hint| hint.wait.as_secs()), Some(0));
/// assert_eq!(read(headers, sent_at(headers, fast)).hint().map(|hint| hint.wait.as_secs()), Some(20));
/// ```
pub fn sent_at<N, V>(headers: impl IntoIterator<Item = (N, V)>, now: Stamp) -> Stamp
where
    N: AsRef<[u8]>,
    V: AsRef<[u8]>,
{
    let (mut date, mut age) = (None, Duration::ZERO);
    for (name, value) in headers {
        let name = name.as_ref().trim_ascii();
        let text = std::str::from_utf8(value.as_ref().trim_ascii()).unwrap_or_default();
        if name.eq_ignore_ascii_case(b"date") {
            date = http_date(text, now).or(date);
        } else if name.eq_ignore_ascii_case(b"age") {
            age = text.parse().map_or(age, Duration::from_secs);
        }
    }
    let sent = date.map_or(now, |date| date + age);
    let is_near = sent.since(now).max(now.since(sent)) <= SKEW_MAX;
    if is_near { sent } else { now }
}

/// Parses the value of one `Retry-After` header: seconds, or a date in any of HTTP's three formats.
///
/// Rounds up to whole seconds; a negative number or a past date is zero. Returns `None` if it is neither:
/// then the caller's own backoff applies. The wait is not capped.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::feedback::headers::retry_after;
/// use tidegate_core::time::Stamp;
///
/// let now = Stamp::from_secs(784_111_770);
/// assert_eq!(retry_after("120", now), Some(Duration::from_secs(120)));
/// assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:37 GMT", now), Some(Duration::from_secs(7)));
/// assert_eq!(retry_after("soon", now), None);
/// ```
pub fn retry_after(value: &str, now: Stamp) -> Option<Duration> {
    collect::retry_after(value.trim_matches([' ', '\t']), now)
}

/// Returns the wait for an `x-amz-retry-after` of `requested` and the caller's own backoff `own`: at least
/// `own`, and at most [`AMZ_BEYOND`] longer.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::feedback::headers::amz_wait;
///
/// let own = Duration::from_secs(2);
/// assert_eq!(amz_wait(Duration::from_secs(1), own), own);
/// assert_eq!(amz_wait(Duration::from_secs(3), own), Duration::from_secs(3));
/// assert_eq!(amz_wait(Duration::from_secs(60), own), Duration::from_secs(7));
/// ```
pub fn amz_wait(requested: Duration, own: Duration) -> Duration {
    requested.clamp(own, own.saturating_add(AMZ_BEYOND))
}

impl Signals {
    /// When to retry: the explicit delay, or else the time until no quota is empty.
    pub fn hint(&self) -> Option<Hint> {
        self.retry_after.or(self.empty_quota)
    }

    /// How long to wait before another attempt, given the caller's own backoff: the hint, if any, or the AWS
    /// delay within its bounds, or else `own`.
    pub fn wait(&self, own: Duration) -> Duration {
        let amz = || self.amz_retry_after.map_or(own, |requested| amz_wait(requested, own));
        self.hint().map_or_else(amz, |hint| hint.wait)
    }

    /// How long until every quota has one unit, if a quota of requests or tokens is certainly empty: nothing
    /// is left, and both the limit and the reset are known.
    pub fn until_more(&self) -> Option<Duration> {
        let is_empty = |quota: &&Quota| {
            quota.remaining == Some(0) && quota.limit.is_some() && quota.dimension != Dimension::Other
        };
        let waits = self.quotas.iter().filter(is_empty).filter_map(|quota| quota.time_to(1));
        waits.filter(|wait| !wait.is_zero()).max()
    }

    /// The dimension of the empty quotas, if they all have the same one. Tokens do not count beside a kind of
    /// token: providers report the tightest limit as that of tokens.
    pub fn exceeded(&self) -> Option<Dimension> {
        let empty =
            || self.quotas.iter().filter(|quota| quota.remaining == Some(0)).map(|quota| quota.dimension);
        let is_kind = |dimension| matches!(dimension, Dimension::InputTokens | Dimension::OutputTokens);
        let first = empty().find(|dimension| is_kind(*dimension)).or_else(|| empty().next())?;
        let is_same = |dimension| dimension == first || (dimension == Dimension::Tokens && is_kind(first));
        empty().all(is_same).then_some(first)
    }

    /// The first quota of a dimension.
    pub fn quota(&self, dimension: Dimension) -> Option<&Quota> {
        self.quotas.iter().find(|quota| quota.dimension == dimension)
    }

    /// Whether the headers contain nothing about limits, valid or not.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Reset {
    /// The time until the reset.
    pub const fn after(self) -> Duration {
        match self {
            Self::Full(after) | Self::More(after) => after,
        }
    }
}

impl Quota {
    /// The numbers that a controller needs, if all are known.
    pub fn level(&self) -> Option<QuotaLevel> {
        let Self { limit, remaining, reset, window, .. } = *self;
        Some(QuotaLevel { limit: limit?, remaining: remaining?, reset: reset?, window })
    }

    /// How fast the quota refills: (limit − remaining) in the time to full, or the limit per window. `None`
    /// if neither is known, or nothing is missing.
    pub fn refill(&self) -> Option<Refill> {
        let limit = self.limit?;
        let (amount, period) = match (self.reset, self.window) {
            (Some(Reset::Full(after)), _) => (limit - self.remaining?.min(limit), after),
            (_, Some(window)) => (limit, window),
            _ => return None,
        };
        (amount > 0 && !period.is_zero()).then_some(Refill { amount, period })
    }

    /// The time until `units` are available: zero if they are left, otherwise from the refill or the reset.
    /// `None` if unknown, or for more units than the limit.
    pub fn time_to(&self, units: u64) -> Option<Duration> {
        let remaining = self.remaining?;
        if units <= remaining {
            return Some(Duration::ZERO);
        }
        if self.limit.is_some_and(|limit| units > limit) {
            return None;
        }
        match self.reset? {
            Reset::More(after) => Some(after),
            Reset::Full(after) => {
                Some(self.refill().map_or(after, |refill| refill.time_for(units - remaining)))
            }
        }
    }
}

impl Refill {
    /// The time in which one unit refills, rounded up.
    pub fn interval(&self) -> Duration {
        self.time_for(1)
    }

    /// The time in which `units` refill, rounded up.
    pub fn time_for(&self, units: u64) -> Duration {
        let parts = u128::from(nanos(self.period)) * u128::from(units);
        number::span(parts.div_ceil(u128::from(self.amount.max(1))))
    }
}
