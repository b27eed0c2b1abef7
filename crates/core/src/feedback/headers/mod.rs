//! What a response's headers say of limits: when to come back, how much is left, when there is more.
//!
//! Every provider has headers of its own, and the same word means different things. [`read`] knows the forms
//! and answers with [`Signals`] in one meaning:
//!
//! | profile | headers | what bites |
//! |---|---|---|
//! | all | `retry-after`, `retry-after-ms` | seconds or one of three dates; the one in milliseconds is finer and counts |
//! | OpenAI | `x-ratelimit-{limit,remaining,reset}-{requests,tokens}` | a reset is a Go duration, and the time to *full* |
//! | Azure | the same | `-1` and `0` stand for nothing; a reset may be bare seconds |
//! | Anthropic | `anthropic-ratelimit-…-{limit,remaining,reset}` | a reset is a date, which may have passed |
//! | AWS | `x-amz-retry-after` | milliseconds, good within 5 s of the caller's own back-off: [`amz_wait`] |
//! | IETF | `RateLimit`, `RateLimit-Policy`; of older drafts `RateLimit-{Limit,Remaining,Reset}` | structured fields; the time to *more* |
//! | others | `X-RateLimit-…`, `X-Rate-Limit-…` | a reset is seconds, seconds or milliseconds since 1970, or a date |
//!
//! Headers come from outside. What cannot be read is counted as malformed, what can be read and cannot be true
//! (below zero, more left than there is, a reset more than a day away) as ignored, and nothing panics. Where a
//! header is there twice, the more careful of the two counts: the longer wait, the lower number.
//!
//! What is learned here is a hint and never a right: no header raises a limit above what is configured.

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

/// [`read`] lets no hint say more than this: one day.
pub const WAIT_MAX: Duration = Duration::from_secs(86_400);
/// A reset further away than this is not believed: one day.
pub const RESET_MAX: Duration = Duration::from_secs(86_400);
/// A limit above this is none, and is not believed.
pub const LIMIT_MAX: u64 = AMOUNT_MAX;
/// Of one response at most so many quotas are kept; further ones count as ignored.
pub const QUOTAS_MAX: usize = 16;
/// A value of more bytes is malformed.
pub const VALUE_MAX: usize = 4_096;
/// A far side's clock that is further off than this is not believed: one day.
pub const SKEW_MAX: Duration = Duration::from_secs(86_400);
/// How far beyond the caller's own back-off `x-amz-retry-after` is followed.
pub const AMZ_BEYOND: Duration = Duration::from_secs(5);

/// What the headers of one response say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Signals {
    /// When to come back, where a header says it in so many words.
    pub retry_after: Option<Hint>,
    /// The longest time until there is more of a quota with nothing left. Only requests and tokens count: that
    /// there are no images left, say, holds up nobody else.
    pub drained: Option<Hint>,
    /// What `x-amz-retry-after` says; see [`amz_wait`].
    pub amz_retry_after: Option<Duration>,
    /// What is known of each quota, in the order of the headers.
    pub quotas: SmallVec<[Quota; 4]>,
    /// Values of known headers that could not be read.
    pub malformed: u32,
    /// Values that were read and cannot be true, or mean nothing.
    pub ignored: u32,
}

/// When to come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hint {
    /// How long from now. Zero is an answer.
    pub wait: Duration,
    /// Who says so.
    pub source: HintSource,
    /// Whether more was said, and cut to the longest wait there is.
    pub is_capped: bool,
}

/// Where a hint is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HintSource {
    /// `retry-after`.
    RetryAfter,
    /// `retry-after-ms`.
    RetryAfterMs,
    /// A quota with nothing left.
    Quota(Profile, Dimension),
}

/// Whose headers they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Profile {
    /// OpenAI, and the many that do as it does.
    OpenAi,
    /// The same headers, from Azure.
    Azure,
    /// Anthropic.
    Anthropic,
    /// `RateLimit` and `RateLimit-Policy`.
    Ietf,
    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset` of older drafts.
    IetfNumbers,
    /// `X-RateLimit-…` and `X-Rate-Limit-…` of everybody else.
    Common,
}

/// What a quota counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dimension {
    /// Requests; also where nothing is named.
    Requests,
    /// Tokens of input and output together.
    Tokens,
    /// Tokens of the input.
    InputTokens,
    /// Tokens of the output.
    OutputTokens,
    /// Something else; the quota's label says what.
    Other,
}

/// When a quota changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reset {
    /// After this all of it is there again.
    Full(Duration),
    /// After this there is more of it.
    More(Duration),
}

/// What is known of one quota.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Whose header it is.
    pub profile: Profile,
    /// What it counts.
    pub dimension: Dimension,
    /// The name of the policy, or of a dimension that is none of ours.
    pub label: Option<String>,
    /// How much there is when it is full; never zero.
    pub limit: Option<u64>,
    /// How much is left; never more than the limit.
    pub remaining: Option<u64>,
    /// When it changes. What has passed is zero.
    pub reset: Option<Reset>,
    /// The time the limit is for, where it is said.
    pub window: Option<Duration>,
}

/// How fast a quota comes back: `amount` units in `period`, neither of them zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refill {
    /// Units.
    pub amount: u64,
    /// The time in which they come back.
    pub period: Duration,
}

/// Reads the headers of a response that came at `now`, by the wall's time.
///
/// Names may have any case, and names and values any bytes. No hint is longer than [`WAIT_MAX`].
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
/// let requests = signals.quota(Dimension::Requests).expect("said");
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

/// As [`read`], with a longest wait of one's own.
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

/// When the far side sent this response by its own clock: its `Date`, and the `Age` that a cache added.
///
/// Dates in headers are the far side's. Where the two clocks differ, a reset of its future may be in our past;
/// given to [`read`] in place of the local time, this makes it a wait again. `now`, the local time, is the answer
/// where there is no such header, where it cannot be read, and where it is more than a day off. A `Date` has whole
/// seconds, so waits may be up to one second longer.
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

/// The value of one `Retry-After` header: seconds, or a date in any of HTTP's three forms.
///
/// A started second counts as a whole one, and what is below zero or has passed is zero. `None` where it is
/// neither: then the caller's own back-off decides. There is no cap.
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

/// How long to wait where AWS `said` so long and the caller's own back-off is `own`: not less than `own`, and at
/// most [`AMZ_BEYOND`] longer.
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
pub fn amz_wait(said: Duration, own: Duration) -> Duration {
    said.clamp(own, own.saturating_add(AMZ_BEYOND))
}

impl Signals {
    /// When to come back: what is said in so many words, or else the time until no quota is empty.
    pub fn hint(&self) -> Option<Hint> {
        self.retry_after.or(self.drained)
    }

    /// How long to wait before another attempt, where the caller's own back-off is `own`: the hint if there is
    /// one, or what AWS says, within its bounds, or else `own`.
    pub fn wait(&self, own: Duration) -> Duration {
        let amz = || self.amz_retry_after.map_or(own, |said| amz_wait(said, own));
        self.hint().map_or_else(amz, |hint| hint.wait)
    }

    /// How long until one unit of every quota is there, where a quota of requests or tokens is surely empty: nothing
    /// is left, and both the limit and the time to more are known.
    pub fn until_more(&self) -> Option<Duration> {
        let is_empty = |quota: &&Quota| {
            quota.remaining == Some(0) && quota.limit.is_some() && quota.dimension != Dimension::Other
        };
        let waits = self.quotas.iter().filter(is_empty).filter_map(|quota| quota.time_to(1));
        waits.filter(|wait| !wait.is_zero()).max()
    }

    /// The dimension of the quotas with nothing left, if they are of one dimension.
    pub fn exceeded(&self) -> Option<Dimension> {
        let mut empty = self.quotas.iter().filter(|quota| quota.remaining == Some(0));
        let first = empty.next()?.dimension;
        empty.all(|quota| quota.dimension == first).then_some(first)
    }

    /// The first quota that counts this.
    pub fn quota(&self, dimension: Dimension) -> Option<&Quota> {
        self.quotas.iter().find(|quota| quota.dimension == dimension)
    }

    /// Whether nothing was said of limits, well or badly.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Reset {
    /// The time until it, whatever comes then.
    pub const fn after(self) -> Duration {
        match self {
            Self::Full(after) | Self::More(after) => after,
        }
    }
}

impl Quota {
    /// The numbers of it that a controller paces by, where all are known.
    pub fn level(&self) -> Option<QuotaLevel> {
        let Self { limit, remaining, reset, window, .. } = *self;
        Some(QuotaLevel { limit: limit?, remaining: remaining?, reset: reset?, window })
    }

    /// How fast it comes back. Where the reset is the time to full, (limit − remaining) in that time; where a
    /// window is said, the limit in the window. `None` where neither is known, or nothing is missing.
    pub fn refill(&self) -> Option<Refill> {
        let limit = self.limit?;
        let (amount, period) = match (self.reset, self.window) {
            (Some(Reset::Full(after)), _) => (limit - self.remaining?.min(limit), after),
            (_, Some(window)) => (limit, window),
            _ => return None,
        };
        (amount > 0 && !period.is_zero()).then_some(Refill { amount, period })
    }

    /// The time until `units` are there, as far as is known: zero if they are left, else what the refill says, or
    /// the reset. `None` where nothing tells, and for more units than the limit.
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
    /// The time in which one unit comes back, rounded up.
    pub fn interval(&self) -> Duration {
        self.time_for(1)
    }

    /// The time in which so many units come back, rounded up.
    pub fn time_for(&self, units: u64) -> Duration {
        let parts = u128::from(nanos(self.period)) * u128::from(units);
        number::span(parts.div_ceil(u128::from(self.amount.max(1))))
    }
}
