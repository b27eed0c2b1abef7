//! Writes the `RateLimit` and `RateLimit-Policy` fields of the IETF draft, and `Retry-After`, for our refusals.
//!
//! A limit's name may occur on several levels; the fields list it once, for the level with the least
//! available.

use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;
use tidegate_core::limit::balance::Balance;

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Most fields fit into this capacity.
const CAPACITY: usize = 96;

/// One limit, as listed in the fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "callers construct it")]
pub struct LimitField<'a> {
    /// Its name: letters, digits, `_`, `-` and `.`. A limit with another name is omitted.
    pub limit: &'a str,
    /// Whole units available; debt counts as zero.
    pub available: i64,
    /// Units per period.
    pub amount: u64,
    /// The period.
    pub period: Duration,
    /// When the requested units are available: zero means now, `None` never.
    pub retry_after: Option<Duration>,
}

impl<'a> From<&'a Balance> for LimitField<'a> {
    fn from(balance: &'a Balance) -> Self {
        Self {
            limit: balance.limit.as_str(),
            available: balance.available,
            amount: balance.amount,
            period: balance.period,
            retry_after: balance.retry_after,
        }
    }
}

impl LimitField<'_> {
    /// The wait for it; never is longer than any duration.
    fn wait(&self) -> Duration {
        self.retry_after.unwrap_or(Duration::MAX)
    }

    /// Whether the name needs no escaping.
    fn is_plain(&self) -> bool {
        self.limit.bytes().all(|letter| letter.is_ascii_alphanumeric() || b"_-.".contains(&letter))
    }
}

/// Writes both fields, unless there are no limits.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{LimitField, rate_limit_fields};
///
/// let minute = Duration::from_secs(60);
/// let rpm = LimitField { limit: "rpm", available: 7, amount: 60, period: minute, retry_after: Some(Duration::ZERO) };
/// let mut headers = http::HeaderMap::new();
/// rate_limit_fields(&mut headers, [rpm]);
/// assert_eq!(headers["ratelimit"], "\"rpm\";r=7");
/// assert_eq!(headers["ratelimit-policy"], "\"rpm\";q=60;w=60");
/// ```
pub fn rate_limit_fields<'a>(headers: &mut HeaderMap, limits: impl IntoIterator<Item: Into<LimitField<'a>>>) {
    let Some(texts) = rate_limit_texts(limits) else { return };
    for (name, text) in [RATE_LIMIT, RATE_LIMIT_POLICY].into_iter().zip(texts) {
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(name, value);
        }
    }
}

/// The values of both fields, `ratelimit` and `ratelimit-policy`, for other transports; `None` if there are
/// no limits.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{LimitField, rate_limit_texts};
///
/// let minute = Duration::from_secs(60);
/// let rpm = LimitField { limit: "rpm", available: 7, amount: 60, period: minute, retry_after: Some(Duration::ZERO) };
/// assert_eq!(rate_limit_texts([rpm]).unwrap(), ["\"rpm\";r=7", "\"rpm\";q=60;w=60"]);
/// ```
pub fn rate_limit_texts<'a>(limits: impl IntoIterator<Item: Into<LimitField<'a>>>) -> Option<[String; 2]> {
    let mut listed: SmallVec<[LimitField<'a>; 4]> = SmallVec::new();
    for limit in limits {
        let limit = limit.into();
        match listed.iter_mut().find(|other| other.limit == limit.limit) {
            Some(other) if limit.wait() > other.wait() || limit.available < other.available => *other = limit,
            None if limit.is_plain() => listed.push(limit),
            Some(_) | None => {}
        }
    }
    if listed.is_empty() {
        return None;
    }
    let (mut now, mut policy) = (String::with_capacity(CAPACITY), String::with_capacity(CAPACITY));
    for limit in listed {
        item(&mut now, limit.limit);
        parameter(&mut now, ";r=", u64::try_from(limit.available).unwrap_or(0));
        if let Some(wait) = limit.retry_after.filter(|wait| !wait.is_zero()) {
            parameter(&mut now, ";t=", whole_seconds(wait));
        }
        item(&mut policy, limit.limit);
        parameter(&mut policy, ";q=", limit.amount);
        if limit.period.subsec_nanos() == 0 {
            parameter(&mut policy, ";w=", limit.period.as_secs());
        }
    }
    Some([now, policy])
}

/// Writes the retry time, rounded up to whole seconds.
pub fn retry_after_field(headers: &mut HeaderMap, span: Duration) {
    headers.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(span)));
}

/// Starts the entry of a limit.
fn item(list: &mut String, limit: &str) {
    list.push_str(if list.is_empty() { "\"" } else { ", \"" });
    list.push_str(limit);
    list.push('"');
}

// Every grant carries both fields; `fmt` would take three times as long per number.
fn parameter(list: &mut String, name: &str, number: u64) {
    list.push_str(name);
    list.push_str(itoa::Buffer::new().format(number));
}

const fn whole_seconds(span: Duration) -> u64 {
    span.as_secs().saturating_add((span.subsec_nanos() > 0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(limit: &str, available: i64, retry_after: u64) -> LimitField<'_> {
        let (period, retry_after) = (Duration::from_secs(60), Some(Duration::from_millis(retry_after)));
        LimitField { limit, available, amount: 100, period, retry_after }
    }

    #[test]
    fn limit_is_listed_once_for_its_scarcest_level() {
        let mut headers = HeaderMap::new();
        rate_limit_fields(&mut headers, [field("rpm", 5, 0), field("tpm", 90, 0), field("tpm", -3, 1_200)]);
        assert_eq!(headers["ratelimit"], "\"rpm\";r=5, \"tpm\";r=0;t=2");
        assert_eq!(headers["ratelimit-policy"], "\"rpm\";q=100;w=60, \"tpm\";q=100;w=60");
        retry_after_field(&mut headers, Duration::from_millis(1));
        assert_eq!(headers["retry-after"], "1");
    }

    /// Names that need escaping are omitted.
    #[test]
    fn no_limits_write_no_fields() {
        let mut headers = HeaderMap::new();
        rate_limit_fields(&mut headers, [] as [LimitField<'_>; 0]);
        rate_limit_fields(&mut headers, [field("a\"b", 5, 0), field("ä", 5, 0)]);
        assert!(headers.is_empty());
    }
}
