//! Parses retry information of Gemini and Vertex, which is in the JSON body of an error, not in headers.
//!
//! A Google error has `details`, each with an `@type`. `google.rpc.RetryInfo` contains the `retryDelay`, and
//! `google.rpc.QuotaFailure` the exceeded quotas; a daily quota does not recover by waiting, even if there is
//! a `retryDelay`. The rest of the body is ignored.

use std::time::Duration;

use serde_json::Value;
use tidegate_core::feedback::headers::WAIT_MAX;
use tidegate_core::outcome::Outcome;

use crate::run::Class;

/// A larger body is not parsed.
pub const RETRY_INFO_BODY_MAX: usize = 65_536;
/// Added to the delay: a retry exactly on time is often rejected again.
const MARGIN: Duration = Duration::from_secs(1);

/// The retry information in the body of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetryInfo {
    /// Retry after this: one second more than the body says, and at most a day.
    After(Duration),
    /// A daily quota is used up. No reasonable wait helps.
    DayUsedUp,
}

impl RetryInfo {
    /// Classifies an attempt that completed with `outcome` and this body: retryable after the delay, and not
    /// retryable if a daily quota is used up.
    pub const fn class(self, outcome: Outcome) -> Class {
        match self {
            Self::After(wait) => Class::again(outcome.retry_after(wait)),
            Self::DayUsedUp => Class::end(outcome),
        }
    }
}

/// Parses the retry information in the body of a Google error.
///
/// `None` if it is not JSON, longer than [`RETRY_INFO_BODY_MAX`], or has no such information; then status and
/// headers decide.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Cause, Class, Outcome, RetryInfo, retry_info};
///
/// let body = br#"{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [
///     {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}]}}"#;
/// let info = retry_info(body).expect("the body has a delay");
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
    // A streamed response is a list whose first element is the error.
    let first = body.as_array().map_or(Some(&body), |list| list.first())?;
    let details = first.get("error").unwrap_or(first).get("details")?.as_array()?;
    let of_type = |name: &'static str| details.iter().filter(move |detail| is_of_type(detail, name));
    if of_type("google.rpc.QuotaFailure").any(is_of_a_day) {
        return Some(RetryInfo::DayUsedUp);
    }
    let delays = of_type("google.rpc.RetryInfo").filter_map(|info| delay(info.get("retryDelay")?.as_str()?));
    delays.max().map(|delay| RetryInfo::After(delay.saturating_add(MARGIN).min(WAIT_MAX)))
}

/// The type is the part after the last slash, as in `type.googleapis.com/google.rpc.RetryInfo`.
fn is_of_type(detail: &Value, name: &str) -> bool {
    let of = detail.get("@type").and_then(Value::as_str);
    of.and_then(|of| of.rsplit('/').next()).is_some_and(|of| of == name)
}

/// Whether one of the quotas is daily, such as `GenerateRequestsPerDayPerProjectPerModel-FreeTier`.
fn is_of_a_day(failure: &Value) -> bool {
    let violations = failure.get("violations").and_then(Value::as_array);
    let is_of_a_day = |violation: &Value| {
        let names = ["quotaId", "quotaMetric"].iter().filter_map(|key| violation.get(key)?.as_str());
        names.map(str::to_ascii_lowercase).any(|name| name.contains("perday") || name.contains("per_day"))
    };
    violations.is_some_and(|violations| violations.iter().any(is_of_a_day))
}

/// A duration in protocol buffers' JSON form: seconds with at most nine decimals, and an `s`. Negative values
/// count as zero.
fn delay(text: &str) -> Option<Duration> {
    let number = text.strip_suffix('s')?;
    let (is_negative, number) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let nanos = format!("{fraction:0<9}").parse().ok()?;
    // A number of seconds that does not fit exceeds the bound anyway.
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
    fn delay_has_a_margin_and_is_at_most_a_day() {
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
    fn daily_quota_does_not_recover_by_waiting() {
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

    /// A bare status, without `error` around it, is parsed too.
    #[test]
    fn longest_of_several_delays_counts() {
        let body = format!(
            r#"{{"code":8,"details":[{{"@type":"{RETRY_INFO}","retryDelay":"2s"}},
               {{"@type":"google.rpc.RetryInfo","retryDelay":"9s"}},{{"@type":"x.RetryInfo","retryDelay":"99s"}}]}}"#
        );
        assert_eq!(retry_info(body.as_bytes()), Some(RetryInfo::After(Duration::from_secs(10))));
    }

    #[test]
    fn body_without_retry_info_is_none() {
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
