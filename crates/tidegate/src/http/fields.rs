//! The `RateLimit` and `RateLimit-Policy` fields of an answer, as the IETF's draft writes them, and `Retry-After`.
//!
//! A limit's name may be there on several levels; the fields name it once, with the level that has least of it.

use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;
use tidegate_core::limit::balance::Balance;

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Most fields fit into this.
const ROOM: usize = 96;

/// One limit, as the fields tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "whoever writes fields fills it in")]
pub struct LimitField<'a> {
    /// Its name: letters, digits, `_`, `-` and `.`. A limit of another name is left out.
    pub limit: &'a str,
    /// Whole units there; debt is told as none.
    pub available: i64,
    /// Units per period.
    pub amount: u64,
    /// The period.
    pub period: Duration,
    /// How long until what was asked for can be had: zero is now, `None` never.
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
    /// How long one has to wait for it; never is longer than any time.
    fn wait(&self) -> Duration {
        self.retry_after.unwrap_or(Duration::MAX)
    }

    /// Whether the name can stand in quotes as it is.
    fn is_plain(&self) -> bool {
        self.limit.bytes().all(|letter| letter.is_ascii_alphanumeric() || b"_-.".contains(&letter))
    }
}

/// Writes both fields, unless there is no limit.
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

/// What both fields say, `ratelimit` and `ratelimit-policy`, for those who send them otherwise; `None` where there is no limit.
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
    let mut told: SmallVec<[LimitField<'a>; 4]> = SmallVec::new();
    for limit in limits {
        let limit = limit.into();
        match told.iter_mut().find(|other| other.limit == limit.limit) {
            Some(other) if limit.wait() > other.wait() || limit.available < other.available => *other = limit,
            None if limit.is_plain() => told.push(limit),
            Some(_) | None => {}
        }
    }
    if told.is_empty() {
        return None;
    }
    let (mut now, mut policy) = (String::with_capacity(ROOM), String::with_capacity(ROOM));
    for limit in told {
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

/// Writes when to come back, in whole seconds: never too early.
pub fn retry_after_field(headers: &mut HeaderMap, span: Duration) {
    headers.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(span)));
}

/// Begins what is said of one limit.
fn item(list: &mut String, limit: &str) {
    list.push_str(if list.is_empty() { "\"" } else { ", \"" });
    list.push_str(limit);
    list.push('"');
}

// Every grant carries both fields: what formats anything would take three times as long for a number.
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
    fn each_limit_is_told_once_by_the_level_that_has_least_of_it() {
        let mut headers = HeaderMap::new();
        rate_limit_fields(&mut headers, [field("rpm", 5, 0), field("tpm", 90, 0), field("tpm", -3, 1_200)]);
        assert_eq!(headers["ratelimit"], "\"rpm\";r=5, \"tpm\";r=0;t=2");
        assert_eq!(headers["ratelimit-policy"], "\"rpm\";q=100;w=60, \"tpm\";q=100;w=60");
        retry_after_field(&mut headers, Duration::from_millis(1));
        assert_eq!(headers["retry-after"], "1");
    }

    #[test]
    fn without_a_limit_there_is_no_field_and_a_name_that_needs_an_escape_is_left_out() {
        let mut headers = HeaderMap::new();
        rate_limit_fields(&mut headers, [] as [LimitField<'_>; 0]);
        rate_limit_fields(&mut headers, [field("a\"b", 5, 0), field("ä", 5, 0)]);
        assert!(headers.is_empty());
    }
}
