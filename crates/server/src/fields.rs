//! The `RateLimit` and `RateLimit-Policy` fields of an answer, as the IETF's draft writes them.
//!
//! A limit's name may be there on several levels; the fields name it once, with the level that has least of it.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use tidegate_client::{LimitState, Seconds};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Most fields fit into this.
const ROOM: usize = 96;

/// Writes both fields, unless there is no limit.
pub(crate) fn rate_limit(headers: &mut HeaderMap, limits: &[LimitState]) {
    let mut told: Vec<&LimitState> = Vec::new();
    for state in limits {
        match told.iter_mut().find(|other| other.limit == state.limit) {
            Some(other) if wait(state) > wait(other) || state.available < other.available => *other = state,
            Some(_) => {}
            None => told.push(state),
        }
    }
    let (mut now, mut policy) = (String::with_capacity(ROOM), String::with_capacity(ROOM));
    for state in told {
        item(&mut now, &state.limit);
        parameter(&mut now, ";r=", u64::try_from(state.available).unwrap_or(0));
        if let Some(wait) = state.retry_after.filter(|wait| *wait > Seconds::default()) {
            parameter(&mut now, ";t=", whole_seconds(wait.as_duration()));
        }
        item(&mut policy, &state.limit);
        parameter(&mut policy, ";q=", state.amount);
        let period = state.period.as_duration();
        if period.subsec_nanos() == 0 {
            parameter(&mut policy, ";w=", period.as_secs());
        }
    }
    for (name, text) in [(RATE_LIMIT, now), (RATE_LIMIT_POLICY, policy)] {
        if let Ok(value) = HeaderValue::try_from(text)
            && !value.is_empty()
        {
            headers.insert(name, value);
        }
    }
}

/// Begins what is said of one limit. Names of limits need no escape: they have letters, digits, `_`, `-` and `.`.
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

/// Writes when to come back, in whole seconds: never too early.
pub(crate) fn retry_after(headers: &mut HeaderMap, span: Duration) {
    headers.insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(span)));
}

fn whole_seconds(span: Duration) -> u64 {
    span.as_secs() + u64::from(span.subsec_nanos() > 0)
}

/// How long one has to wait for it; never is longer than any time.
fn wait(state: &LimitState) -> Duration {
    state.retry_after.map_or(Duration::MAX, Seconds::as_duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(limit: &str, available: i64, retry_after: f64) -> LimitState {
        LimitState {
            entity: "acme".parse().expect("valid"),
            resource: "gpt".parse().expect("valid"),
            limit: limit.to_owned(),
            source: None,
            available,
            burst: 150,
            amount: 100,
            period: Seconds::new(60.0).expect("valid"),
            consumed: 0,
            asked: 0,
            retry_after: Seconds::new(retry_after).ok(),
        }
    }

    #[test]
    fn each_limit_is_told_once_by_the_level_that_has_least_of_it() {
        let mut headers = HeaderMap::new();
        rate_limit(&mut headers, &[state("rpm", 5, 0.0), state("tpm", 90, 0.0), state("tpm", -3, 1.2)]);
        assert_eq!(headers["ratelimit"], "\"rpm\";r=5, \"tpm\";r=0;t=2");
        assert_eq!(headers["ratelimit-policy"], "\"rpm\";q=100;w=60, \"tpm\";q=100;w=60");
        retry_after(&mut headers, Duration::from_millis(1));
        assert_eq!(headers["retry-after"], "1");
    }

    #[test]
    fn without_a_limit_there_is_no_field() {
        let mut headers = HeaderMap::new();
        rate_limit(&mut headers, &[]);
        assert!(headers.is_empty());
    }
}
