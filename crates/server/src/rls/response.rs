//! Builds Envoy's response: a status per descriptor, and the same rate limit headers as over HTTP.

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::google::protobuf;
use tidegate::{Balance, rate_limit_texts};

use super::decide::{OverLimit, Verdict};

/// Builds the response to a request.
pub(super) fn to_response(verdicts: &[Verdict]) -> RateLimitResponse {
    let over = || verdicts.iter().filter_map(as_over_limit);
    let overall = if over().next().is_some() { Code::OverLimit } else { Code::Ok };
    let mut headers = Vec::new();
    if let Some([now, policy]) = rate_limit_texts(verdicts.iter().flat_map(balances)) {
        headers = vec![header("ratelimit", now), header("ratelimit-policy", policy)];
    }
    // `Retry-After` is the longest delay of all exceeded limits, and absent if one of them never recovers.
    if let Some(span) = over().map(|over| over.retry_after).min_by_key(Option::is_some).flatten() {
        let span = over().filter_map(|over| over.retry_after).max().unwrap_or(span);
        headers.push(header("retry-after", whole_seconds(span).seconds.to_string()));
    }
    let why = over().find_map(|over| over.why.as_ref());
    RateLimitResponse {
        overall_code: overall.into(),
        statuses: verdicts.iter().map(status).collect(),
        response_headers_to_add: headers,
        raw_body: why.map(|why| format!("{why}\n").into_bytes()).unwrap_or_default(),
        ..RateLimitResponse::default()
    }
}

const fn as_over_limit(verdict: &Verdict) -> Option<&OverLimit> {
    match verdict {
        Verdict::Over(over) => Some(over),
        Verdict::Open | Verdict::Within(_) | Verdict::Shadow => None,
    }
}

/// Returns the balances of a verdict.
fn balances(verdict: &Verdict) -> &[Balance] {
    match verdict {
        Verdict::Within(balances) | Verdict::Over(OverLimit { balances, .. }) => balances,
        Verdict::Open | Verdict::Shadow => &[],
    }
}

fn header(name: &str, value: String) -> HeaderValue {
    HeaderValue { key: name.to_owned(), value, ..HeaderValue::default() }
}

fn status(verdict: &Verdict) -> DescriptorStatus {
    let (code, retry_after) = match verdict {
        Verdict::Over(over) => (Code::OverLimit, over.retry_after),
        Verdict::Open | Verdict::Within(_) | Verdict::Shadow => (Code::Ok, None),
    };
    // The tightest limit: exceeded first, then longest retry delay, then highest utilization. Ties go to the
    // first.
    let tightest = balances(verdict).iter().rev().max_by_key(|balance| {
        (balance.is_short(), balance.retry_after.unwrap_or(Duration::MAX), used(balance))
    });
    let Some(balance) = tightest else {
        let duration_until_reset = retry_after.map(whole_seconds);
        return DescriptorStatus { code: code.into(), duration_until_reset, ..DescriptorStatus::default() };
    };
    DescriptorStatus {
        code: code.into(),
        current_limit: Some(RateLimit {
            name: balance.limit.as_str().to_owned(),
            requests_per_unit: u32::try_from(balance.amount).unwrap_or(u32::MAX),
            unit: unit(balance.period).into(),
        }),
        limit_remaining: clamped(balance.available),
        duration_until_reset: match code {
            Code::OverLimit => retry_after.map(whole_seconds),
            _ => Some(span(until_full(balance))),
        },
        ..DescriptorStatus::default()
    }
}

/// Returns the used fraction of a bucket, in units of 2⁻³².
fn used(balance: &Balance) -> u128 {
    let used_units = i128::from(balance.burst) - i128::from(balance.available);
    (u128::try_from(used_units).unwrap_or(0) << 32) / u128::from(balance.burst.max(1))
}

fn clamped(units: i64) -> u32 {
    u32::try_from(units.max(0)).unwrap_or(u32::MAX)
}

/// Returns the time until a bucket is full, rounded up.
fn until_full(balance: &Balance) -> Duration {
    let used_units = i128::from(balance.burst) - i128::from(balance.available);
    let micros = u128::try_from(used_units).unwrap_or(0).saturating_mul(balance.period.as_micros());
    let micros = micros.div_ceil(u128::from(balance.amount.max(1)));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

/// Returns Envoy's unit of a period, if there is one. Periods are never months or years.
const fn unit(period: Duration) -> Unit {
    match (period.as_secs(), period.subsec_nanos()) {
        (1, 0) => Unit::Second,
        (60, 0) => Unit::Minute,
        (3_600, 0) => Unit::Hour,
        (86_400, 0) => Unit::Day,
        (604_800, 0) => Unit::Week,
        _ => Unit::Unknown,
    }
}

/// Rounds up to whole seconds, like the header, so that a retry is not early.
fn whole_seconds(wait: Duration) -> protobuf::Duration {
    span(Duration::from_secs(wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0))))
}

fn span(span: Duration) -> protobuf::Duration {
    protobuf::Duration {
        seconds: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
        nanos: span.subsec_nanos().cast_signed(),
    }
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
