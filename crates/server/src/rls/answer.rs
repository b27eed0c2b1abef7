//! What Envoy is told: a status per descriptor, and the headers that the HTTP server sends too.

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::google::protobuf;
use tidegate::{Balance, rate_limit_texts};

use super::decide::{Over, Verdict};

/// The answer to a request.
pub(super) fn answer(verdicts: &[Verdict]) -> RateLimitResponse {
    let over = || verdicts.iter().filter_map(as_over);
    let overall = if over().next().is_some() { Code::OverLimit } else { Code::Ok };
    let mut headers = Vec::new();
    if let Some([now, policy]) = rate_limit_texts(verdicts.iter().flat_map(balances)) {
        headers = vec![header("ratelimit", now), header("ratelimit-policy", policy)];
    }
    // Whoever comes back earlier than the longest of them says is refused again. Where one is never over, none is told.
    if let Some(span) = over().map(|over| over.retry_after).min_by_key(Option::is_some).flatten() {
        let span = over().filter_map(|over| over.retry_after).max().unwrap_or(span);
        headers.push(header("retry-after", whole(span).seconds.to_string()));
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

const fn as_over(verdict: &Verdict) -> Option<&Over> {
    match verdict {
        Verdict::Over(over) => Some(over),
        Verdict::Open | Verdict::Within(_) | Verdict::Shadow => None,
    }
}

/// What a verdict tells of limits.
fn balances(verdict: &Verdict) -> &[Balance] {
    match verdict {
        Verdict::Within(balances) | Verdict::Over(Over { balances, .. }) => balances,
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
    // The one that is used up first, or is; of equal ones the first.
    let tightest = balances(verdict).iter().rev().max_by_key(|balance| {
        (balance.is_short(), balance.retry_after.unwrap_or(Duration::MAX), used(balance))
    });
    let Some(balance) = tightest else {
        let duration_until_reset = retry_after.map(whole);
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
            Code::OverLimit => retry_after.map(whole),
            _ => Some(span(until_full(balance))),
        },
        ..DescriptorStatus::default()
    }
}

/// How much of a full bucket is gone, of 2³².
fn used(balance: &Balance) -> u128 {
    let gone = i128::from(balance.burst) - i128::from(balance.available);
    (u128::try_from(gone).unwrap_or(0) << 32) / u128::from(balance.burst.max(1))
}

fn clamped(units: i64) -> u32 {
    u32::try_from(units.max(0)).unwrap_or(u32::MAX)
}

/// How long until a bucket is full, never too short.
fn until_full(balance: &Balance) -> Duration {
    let gone = i128::from(balance.burst) - i128::from(balance.available);
    let micros = u128::try_from(gone).unwrap_or(0).saturating_mul(balance.period.as_micros());
    let micros = micros.div_ceil(u128::from(balance.amount.max(1)));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

/// The unit that a period is, if it is one. Months and years are no periods of ours.
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

/// Whole seconds, as the header has them: who comes back then is not refused for a part of one.
fn whole(wait: Duration) -> protobuf::Duration {
    span(Duration::from_secs(wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0))))
}

fn span(span: Duration) -> protobuf::Duration {
    protobuf::Duration {
        seconds: i64::try_from(span.as_secs()).unwrap_or(i64::MAX),
        nanos: span.subsec_nanos().cast_signed(),
    }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
