//! What Gemini and Vertex say of limits: not in headers, but in the JSON of an error's body.
//!
//! An error of Google's has `details`, each with an `@type`. `google.rpc.RetryInfo` says in `retryDelay` when to come
//! back, and `google.rpc.QuotaFailure` which quotas were exceeded; that of a day does not heal by waiting, though a
//! `retryDelay` may stand beside it. Nothing else of the body is read.

use std::time::Duration;

use serde_json::Value;
use tidegate_core::feedback::headers::WAIT_MAX;
use tidegate_core::outcome::Outcome;

use crate::run::Class;

/// A body of more bytes is not looked at.
pub const RETRY_INFO_BODY_MAX: usize = 65_536;
/// What is added to the delay: come back on the second, it is often said once more.
const MARGIN: Duration = Duration::from_secs(1);

/// What the body of an error says of when to come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetryInfo {
    /// After this: a second more than is said, and at most a day.
    After(Duration),
    /// A quota of a whole day is used up. No wait of a reasonable length helps.
    DayUsedUp,
}

impl RetryInfo {
    /// What the attempt means that ended with `outcome` and this in its body: another attempt after the delay, and
    /// none where the quota of the day is used up.
    pub const fn class(self, outcome: Outcome) -> Class {
        match self {
            Self::After(wait) => Class::again(outcome.retry_after(wait)),
            Self::DayUsedUp => Class::end(outcome),
        }
    }
}

/// What the body of an error of Google's says of when to come back.
///
/// `None` where it is no JSON, longer than [`RETRY_INFO_BODY_MAX`], or says nothing of it; then status and headers decide.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Cause, Class, Outcome, RetryInfo, retry_info};
///
/// let body = br#"{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [
///     {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}]}}"#;
/// let info = retry_info(body).expect("it is there");
/// assert_eq!(info, RetryInfo::After(Duration::from_millis(4_500)));
///
/// let overload = Outcome::overload().because(Cause::Throttled);
/// assert_eq!(info.class(overload), Class::again(overload.retry_after(Duration::from_millis(4_500))));
/// ```
pub fn retry_info(body: &[u8]) -> Option<RetryInfo> {
    if body.len() > RETRY_INFO_BODY_MAX {
        return None;
    }
    let body: Value = serde_json::from_slice(body).ok()?;
    // A streamed answer is a list, and its error the first in it.
    let first = body.as_array().map_or(Some(&body), |list| list.first())?;
    let details = first.get("error").unwrap_or(first).get("details")?.as_array()?;
    let of_type = |name: &'static str| details.iter().filter(move |detail| is_of_type(detail, name));
    if of_type("google.rpc.QuotaFailure").any(is_of_a_day) {
        return Some(RetryInfo::DayUsedUp);
    }
    let delays = of_type("google.rpc.RetryInfo").filter_map(|info| delay(info.get("retryDelay")?.as_str()?));
    delays.max().map(|delay| RetryInfo::After(delay.saturating_add(MARGIN).min(WAIT_MAX)))
}

/// `type.googleapis.com/google.rpc.RetryInfo` is of the type behind its last slash.
fn is_of_type(detail: &Value, name: &str) -> bool {
    let of = detail.get("@type").and_then(Value::as_str);
    of.and_then(|of| of.rsplit('/').next()).is_some_and(|of| of == name)
}

/// Whether one of the quotas is counted by the day: `GenerateRequestsPerDayPerProjectPerModel-FreeTier`.
fn is_of_a_day(failure: &Value) -> bool {
    let violations = failure.get("violations").and_then(Value::as_array);
    let is_of_a_day = |violation: &Value| {
        let names = ["quotaId", "quotaMetric"].iter().filter_map(|key| violation.get(key)?.as_str());
        names.map(str::to_ascii_lowercase).any(|name| name.contains("perday") || name.contains("per_day"))
    };
    violations.is_some_and(|violations| violations.iter().any(is_of_a_day))
}

/// A duration as protocol buffers write it in JSON: seconds with at most nine digits behind the point, and an `s`.
/// Below zero is zero.
fn delay(text: &str) -> Option<Duration> {
    let number = text.strip_suffix('s')?;
    let (is_negative, number) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let nanos = format!("{fraction:0<9}").parse().ok()?;
    // More seconds than fit are more than the bound in any case.
    let seconds = whole.parse().unwrap_or(u64::MAX);
    Some(if is_negative { Duration::ZERO } else { Duration::new(seconds, nanos) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

    fn with_delay(delay: &str) -> String {
        format!(r#"{{"error":{{"details":[{{"@type":"{RETRY_INFO}","retryDelay":{delay}}}]}}}}"#)
    }

    fn with_quota(key: &str, name: &str) -> String {
        format!(
            r#"[{{"error":{{"code":429,"details":[
                {{"@type":"type.googleapis.com/google.rpc.QuotaFailure","violations":[{{"{key}":"{name}"}}]}},
                {{"@type":"type.googleapis.com/google.rpc.Help","links":[]}},
                {{"@type":"{RETRY_INFO}","retryDelay":"39s"}}]}}}}]"#
        )
    }

    #[test]
    fn a_delay_is_a_second_longer_than_said_and_at_most_a_day() {
        let table = [
            ("\"3.5s\"", Some(4_500_000_000)),
            ("\"0s\"", Some(1_000_000_000)),
            ("\"-7s\"", Some(1_000_000_000)),
            ("\"0.000000001s\"", Some(1_000_000_001)),
            ("\"45s\"", Some(46_000_000_000)),
            ("\"99999999999999999999999s\"", Some(86_400_000_000_000)),
            ("\"3.5\"", None),
            ("\"3,5s\"", None),
            ("\".5s\"", None),
            ("\"5.s\"", None),
            ("\"s\"", None),
            ("\"-s\"", None),
            ("\"1e3s\"", None),
            ("\"0.0000000001s\"", None),
            ("\"1 s\"", None),
            ("3.5", None),
            ("null", None),
            ("{\"seconds\":3}", None),
        ];
        for (text, nanos) in table {
            let expected = nanos.map(|nanos| RetryInfo::After(Duration::from_nanos(nanos)));
            assert_eq!(retry_info(with_delay(text).as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn a_quota_of_a_day_does_not_heal_by_waiting() {
        let after = Some(RetryInfo::After(Duration::from_secs(40)));
        let table = [
            ("quotaId", "GenerateRequestsPerDayPerProjectPerModel-FreeTier", Some(RetryInfo::DayUsedUp)),
            ("quotaMetric", "aiplatform.googleapis.com/requests_per_day", Some(RetryInfo::DayUsedUp)),
            ("quotaId", "GenerateRequestsPerMinutePerProjectPerModel-FreeTier", after),
            ("description", "PerDay", after),
        ];
        for (key, name, expected) in table {
            assert_eq!(retry_info(with_quota(key, name).as_bytes()), expected, "{name}");
        }
    }

    #[test]
    fn of_several_delays_the_longest_counts_and_a_bare_status_is_read_too() {
        let body = format!(
            r#"{{"code":8,"details":[{{"@type":"{RETRY_INFO}","retryDelay":"2s"}},
               {{"@type":"google.rpc.RetryInfo","retryDelay":"9s"}},{{"@type":"x.RetryInfo","retryDelay":"99s"}}]}}"#
        );
        assert_eq!(retry_info(body.as_bytes()), Some(RetryInfo::After(Duration::from_secs(10))));
    }

    #[test]
    fn what_says_nothing_of_it_is_none() {
        let long = format!("{}{}", with_delay("\"1s\""), " ".repeat(RETRY_INFO_BODY_MAX));
        let deep = "[".repeat(10_000);
        let table = [
            "",
            "null",
            "1",
            "[]",
            "{}",
            "{\"error\":1}",
            "{\"error\":{\"details\":{}}}",
            "{\"error\":{\"details\":[1,null]}}",
            "<html>",
            "retryDelay\": \"3s\"",
            &long,
            &deep,
        ];
        for body in table {
            assert_eq!(retry_info(body.as_bytes()), None, "{}", &body[..body.len().min(60)]);
        }
        assert_eq!(retry_info(b"\xff\xfe"), None);
    }
}
