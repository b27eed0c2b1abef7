//! Untrusted response bodies: none panics, and every delay is between a second and a day.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use tidegate::{RETRY_INFO_BODY_MAX, RetryInfo, retry_info};

use crate::kit::mutate::Mutator;

const BODIES: &[&str] = &[
    r#"{"error":{"code":429,"message":"Resource exhausted","status":"RESOURCE_EXHAUSTED","details":[
        {"@type":"type.googleapis.com/google.rpc.QuotaFailure","violations":[{"quotaMetric":"requests",
         "quotaId":"GenerateRequestsPerMinutePerProjectPerModel-FreeTier","quotaDimensions":{"model":"m"},"quotaValue":"15"}]},
        {"@type":"type.googleapis.com/google.rpc.Help","links":[{"description":"d","url":"https://example.com"}]},
        {"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"45.123456789s"}]}}"#,
    r#"[{"error":{"details":[{"@type":"type.googleapis.com/google.rpc.QuotaFailure",
        "violations":[{"quotaId":"GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}]}}]"#,
    r#"{"details":[{"@type":"google.rpc.RetryInfo","retryDelay":"3.5s"}]}"#,
];

const WORDS: &[&str] = &[
    "\"retryDelay\":",
    "\"-1s\"",
    "\"0s\"",
    "\"99999999999999999999s\"",
    "\"1.0000000000s\"",
    "\"s\"",
    "null",
    "[]",
    "{}",
    "[",
    "{",
    "}",
    "]",
    "\"@type\":",
    "\"google.rpc.RetryInfo\"",
    "\"details\":",
    "\"error\":",
    "PerDay",
    "per_day",
    "\\u0000",
    "\\ud800",
    "1e999",
    "-",
    ",",
    ":",
];

const DELAYS: &[&str] = &["45.123456789s", "3.5s", "0s", "-7s", "86399.5s"];

const DELAY_WORDS: &[&str] =
    &["-", ".", "s", "0", "99999999999999999999", "000000000", "1e9", "+", " ", "ms"];

fn check(body: &[u8]) {
    match retry_info(body) {
        Some(RetryInfo::After(wait)) => {
            assert!((Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&wait), "{wait:?}");
            assert!(body.len() <= RETRY_INFO_BODY_MAX);
        }
        Some(_) => assert!(body.len() <= RETRY_INFO_BODY_MAX),
        None => {}
    }
}

#[test]
fn mutated_bodies_yield_bounded_delays() {
    Mutator::new(5, BODIES, WORDS).run(2_000, |input, _| check(input));
}

/// Most mutations of JSON break it, so here only the text between two quotes changes.
#[test]
fn mutated_delay_strings_yield_bounded_delays() {
    let read = AtomicU64::new(0);
    Mutator::new(6, DELAYS, DELAY_WORDS).run(2_000, |input, _| {
        let is_plain = |byte: &u8| (b' '..=b'~').contains(byte) && !b"\"\\".contains(byte);
        let delay: Vec<u8> = input.iter().copied().filter(is_plain).collect();
        let frame = r#"{"error":{"details":[{"@type":"google.rpc.RetryInfo","retryDelay":""#;
        let body = [frame.as_bytes(), &delay, br#""}]}}"#].concat();
        check(&body);
        read.fetch_add(u64::from(retry_info(&body).is_some()), Ordering::Relaxed);
    });
    assert!(read.into_inner() > 100, "a good part of them are still delays");
}

#[test]
fn deeply_nested_body_is_ignored() {
    for open in ["[", "{\"error\":", "{\"details\":[", "[{\"error\":{\"details\":["] {
        check(open.repeat(RETRY_INFO_BODY_MAX / open.len()).as_bytes());
        assert_eq!(retry_info(open.repeat(RETRY_INFO_BODY_MAX / open.len()).as_bytes()), None);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        body in prop::collection::vec(any::<u8>(), 0..200),
        delay in "[-0-9.]{0,12}s?",
    ) {
        check(&body);
        let whole = format!(r#"{{"details":[{{"@type":"google.rpc.RetryInfo","retryDelay":"{delay}"}}]}}"#);
        check(whole.as_bytes());
    }
}
