//! Complete responses of providers: their headers together determine the wait.

use std::time::Duration;

use http::Response;
use tidegate_core::feedback::headers::{Dimension, Reset, read};
use tidegate_core::outcome::{Kind, Outcome, QuotaLevel};
use tidegate_core::response::signals;
use tidegate_core::time::Stamp;

/// 2026-01-31T09:30:00Z.
const NOW: Stamp = Stamp::from_secs(1_769_851_800);

fn outcome(status: u16, headers: &[(&str, &str)]) -> Outcome {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    Outcome::from_response(&response.body(()).expect("headers without mistakes"), NOW)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// GitHub's primary limit: no `retry-after`; requests must wait for `x-ratelimit-reset`.
#[test]
fn github_403_with_empty_quota_waits_for_reset() {
    let outcome = outcome(
        403,
        &[
            ("date", "Sat, 31 Jan 2026 09:30:00 GMT"),
            ("content-type", "application/json; charset=utf-8"),
            ("x-ratelimit-limit", "60"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", "1769851920"),
            ("x-ratelimit-used", "60"),
            ("x-ratelimit-resource", "core"),
        ],
    );
    assert_eq!((outcome.kind(), outcome.hint()), (Kind::Overload, Some(secs(120))));
}

/// Jira Cloud omits the seconds of its resets.
#[test]
fn jira_reset_without_seconds_is_read() {
    let outcome = outcome(
        429,
        &[
            ("x-ratelimit-limit", "350"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", "2026-01-31T09:32Z"),
        ],
    );
    assert_eq!((outcome.hint(), outcome.malformed()), (Some(secs(120)), 0));
}

#[test]
fn model_provider_responses_are_read_correctly() {
    // OpenAI, accepted.
    let openai = outcome(
        200,
        &[
            ("x-ratelimit-limit-requests", "5000"),
            ("x-ratelimit-remaining-requests", "4999"),
            ("x-ratelimit-reset-requests", "12ms"),
            ("x-ratelimit-limit-tokens", "160000"),
            ("x-ratelimit-remaining-tokens", "159976"),
            ("x-ratelimit-reset-tokens", "9ms"),
            ("openai-processing-ms", "420"),
        ],
    );
    let level = |limit, remaining, reset| QuotaLevel {
        limit,
        remaining,
        reset: Reset::Full(millis(reset)),
        window: None,
    };
    let wanted = Outcome::success().quota(Dimension::Requests, level(5_000, 4_999, 12));
    assert_eq!(openai, wanted.quota(Dimension::Tokens, level(160_000, 159_976, 9)));
    // OpenAI, rejected.
    let over = outcome(
        429,
        &[("retry-after", "1"), ("retry-after-ms", "642"), ("x-ratelimit-remaining-tokens", "12")],
    );
    assert_eq!((over.kind(), over.hint()), (Kind::Overload, Some(millis(642))));
    // Azure, rejected, with both headers and `-1`.
    let azure = outcome(
        429,
        &[
            ("retry-after", "7"),
            ("retry-after-ms", "6900"),
            ("x-ratelimit-remaining-requests", "-1"),
            ("x-ms-region", "x"),
        ],
    );
    assert_eq!((azure.hint(), azure.malformed()), (Some(millis(6_900)), 1));
    // Anthropic, rejected without retry-after: the latest reset of the empty quotas.
    let anthropic = outcome(
        429,
        &[
            ("anthropic-ratelimit-requests-limit", "50"),
            ("anthropic-ratelimit-requests-remaining", "0"),
            ("anthropic-ratelimit-requests-reset", "2026-01-31T09:30:10Z"),
            ("anthropic-ratelimit-tokens-limit", "40000"),
            ("anthropic-ratelimit-tokens-remaining", "0"),
            ("anthropic-ratelimit-tokens-reset", "2026-01-31T09:30:42Z"),
        ],
    );
    assert_eq!(anthropic.hint(), Some(secs(42)));
    // Groq.
    let groq = outcome(
        429,
        &[
            ("retry-after", "2"),
            ("x-ratelimit-limit-requests", "14400"),
            ("x-ratelimit-remaining-requests", "14370"),
            ("x-ratelimit-reset-requests", "2m59.56s"),
            ("x-ratelimit-reset-tokens", "7.66s"),
        ],
    );
    assert_eq!((groq.hint(), groq.malformed()), (Some(secs(2)), 0));
}

#[test]
fn other_upstream_responses_are_read_correctly() {
    // AWS.
    let aws = outcome(503, &[("x-amz-retry-after", "1500"), ("x-amzn-requestid", "x")]);
    assert_eq!(aws.hint(), Some(millis(1_500)));
    // GitHub, the secondary limit.
    let github = outcome(403, &[("retry-after", "60"), ("x-ratelimit-remaining", "4990")]);
    assert_eq!((github.kind(), github.hint()), (Kind::Overload, Some(secs(60))));
    // IETF, the current draft.
    let ietf = outcome(
        429,
        &[
            ("ratelimit-policy", "\"burst\";q=100;w=60,\"daily\";q=1000;w=86400"),
            ("ratelimit", "\"burst\";r=0;t=30,\"daily\";r=900;t=3600"),
        ],
    );
    assert_eq!(ietf.hint(), Some(secs(30)));
    // IETF, an older one.
    let older = outcome(
        429,
        &[("ratelimit-limit", "100, 100;w=60"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "50")],
    );
    assert_eq!(older.hint(), Some(secs(50)));
    // Cloudflare.
    let cloudflare = outcome(
        429,
        &[
            ("ratelimit", "\"default\";r=0;t=10"),
            ("ratelimit-policy", "\"default\";q=1200;w=300"),
            ("retry-after", "10"),
        ],
    );
    assert_eq!(cloudflare.hint(), Some(secs(10)));
    // Discord.
    let discord = outcome(
        429,
        &[
            ("x-ratelimit-limit", "5"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", "1769851801.250"),
            ("x-ratelimit-reset-after", "1.250"),
            ("x-ratelimit-bucket", "abcd1234"),
            ("x-ratelimit-scope", "user"),
            ("retry-after", "2"),
        ],
    );
    assert_eq!((discord.hint(), discord.malformed()), (Some(secs(2)), 0));
    // Twitter / X.
    let twitter = outcome(
        429,
        &[
            ("x-rate-limit-limit", "15"),
            ("x-rate-limit-remaining", "0"),
            ("x-rate-limit-reset", "1769852700"),
        ],
    );
    assert_eq!(twitter.hint(), Some(secs(900)));
    // Reddit.
    let reddit = outcome(
        429,
        &[("x-ratelimit-used", "600"), ("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "117")],
    );
    assert_eq!(reddit.hint(), Some(secs(117)));
}

/// An upstream whose clock is four hours behind.
#[test]
fn skewed_dates_do_not_shorten_a_wait() {
    let response = Response::builder()
        .status(429)
        .header("date", "Sat, 31 Jan 2026 05:30:00 GMT")
        .header("x-ratelimit-limit", "10")
        .header("x-ratelimit-remaining", "0")
        .header("x-ratelimit-reset", "1769837430")
        .body(())
        .unwrap();
    assert_eq!(Outcome::from_response(&response, NOW).hint(), Some(secs(30)));
}

/// A cache may send any `Age`.
#[test]
fn implausible_age_is_ignored() {
    for age in ["18446744073709551615", "86401", "-1", "x"] {
        let headers = [
            ("date", "Sat, 31 Jan 2026 09:30:00 GMT"),
            ("age", age),
            ("retry-after", "Sat, 31 Jan 2026 09:30:20 GMT"),
        ];
        let map = http::HeaderMap::from_iter(headers.map(|(name, value)| {
            (name.parse::<http::HeaderName>().unwrap(), value.parse::<http::HeaderValue>().unwrap())
        }));
        assert_eq!(signals(&map, NOW).hint().map(|hint| hint.wait), Some(secs(20)), "{age}");
    }
}

/// Kong: a used-up limit per minute counts requests.
#[test]
fn requests_per_minute_quota_is_followed() {
    let signals = read(
        [
            ("x-ratelimit-limit-minute", "5"),
            ("x-ratelimit-remaining-minute", "0"),
            ("ratelimit-limit", "5"),
            ("ratelimit-remaining", "0"),
            ("ratelimit-reset", "48"),
        ],
        NOW,
    );
    assert_eq!(signals.hint().map(|hint| hint.wait), Some(secs(48)));
}

/// Azure and others report long-running work this way: poll *this* resource again in 10 s.
#[test]
fn retry_after_of_202_delays_no_other_request() {
    let polled = outcome(202, &[("location", "/operations/7"), ("retry-after", "10")]);
    assert_eq!((polled.kind(), polled.hint()), (Kind::Success, None));
    let moved = outcome(301, &[("location", "/elsewhere"), ("retry-after", "120")]);
    assert_eq!((moved.kind(), moved.hint()), (Kind::Success, None));
}

/// A 429 for output tokens: the quota of tokens mirrors the tightest one, and is empty with it.
#[test]
fn anthropic_kinds_of_tokens_are_quotas_of_their_own() {
    let headers = [
        ("anthropic-ratelimit-requests-limit", "50"),
        ("anthropic-ratelimit-requests-remaining", "49"),
        ("anthropic-ratelimit-requests-reset", "2026-01-31T09:30:01Z"),
        ("anthropic-ratelimit-input-tokens-limit", "30000"),
        ("anthropic-ratelimit-input-tokens-remaining", "27000"),
        ("anthropic-ratelimit-input-tokens-reset", "2026-01-31T09:30:06Z"),
        ("anthropic-ratelimit-output-tokens-limit", "8000"),
        ("anthropic-ratelimit-output-tokens-remaining", "0"),
        ("anthropic-ratelimit-output-tokens-reset", "2026-01-31T09:31:00Z"),
        ("anthropic-ratelimit-tokens-limit", "8000"),
        ("anthropic-ratelimit-tokens-remaining", "0"),
        ("anthropic-ratelimit-tokens-reset", "2026-01-31T09:31:00Z"),
    ];
    let outcome = outcome(429, &headers);
    let full = |limit, remaining, seconds| {
        Some(QuotaLevel { limit, remaining, reset: Reset::Full(secs(seconds)), window: None })
    };
    assert_eq!(outcome.quota_level(Dimension::InputTokens), full(30_000, 27_000, 6));
    assert_eq!(outcome.quota_level(Dimension::OutputTokens), full(8_000, 0, 60));
    assert_eq!(outcome.quota_level(Dimension::Tokens), full(8_000, 0, 60));
    assert_eq!(read(headers, NOW).exceeded(), Some(Dimension::OutputTokens));
}
