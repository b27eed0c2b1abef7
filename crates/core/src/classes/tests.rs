//! Each status has a class, each class an outcome, and headers refine both.

use super::*;
use crate::feedback::headers::{Dimension, Reset, read};
use crate::outcome::{Kind, QuotaLevel};
use crate::time::Stamp;

const NOW: Stamp = Stamp::from_secs(1_769_851_800);

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// The outcome of a response with this status and these headers.
fn outcome(status: u16, headers: &[(&str, &str)]) -> Outcome {
    Classes::new().outcome_with(Completion::Status(status), &read(headers.iter().copied(), NOW))
}

/// How long all requests wait after it.
fn wait(status: u16, headers: &[(&str, &str)]) -> Option<Duration> {
    outcome(status, headers).retry_after
}

#[test]
fn every_status_has_its_class_and_outcome() {
    use Kind::{Failure, Ignored, Overload, Success};
    let classes = Classes::new();
    for status in 0..=u16::MAX {
        let (class, kind, cause) = match status {
            429 => (CompletionClass::Overload, Overload, Some(Cause::Throttled)),
            503 | 529 => (CompletionClass::Overload, Overload, Some(Cause::Server)),
            408 => (CompletionClass::Transient, Failure, Some(Cause::Other)),
            500 | 502 | 504 | 520..=524 | 530 => (CompletionClass::Transient, Failure, Some(Cause::Server)),
            100..=399 => (CompletionClass::Success, Success, None),
            400..=499 => (CompletionClass::Mistake, Ignored, None),
            _ => (CompletionClass::Permanent, Failure, Some(Cause::Server)),
        };
        let completion = Completion::Status(status);
        let outcome = classes.outcome(completion);
        assert_eq!(classes.classify(completion), class, "{status}");
        assert_eq!((outcome.kind(), outcome.cause()), (kind, cause), "{status}");
        assert!(!outcome.has_hint() && outcome.malformed() == 0, "{status}");
        assert_eq!(classes.outcome_with(completion, &Signals::default()), outcome, "{status}");
        let is_retryable = matches!(status, 408 | 429 | 500 | 502..=504 | 520..=524 | 529 | 530);
        assert_eq!(classes.classify(completion).is_retryable(), is_retryable, "{status}");
    }
}

#[test]
fn completions_without_a_status_have_a_class() {
    let classes = Classes::new();
    let network = Outcome::failure().because(Cause::Network);
    let table = [
        (Completion::Timeout, network, true),
        (Completion::Connection, network, true),
        (Completion::Unsent, Outcome::ignored(), false),
    ];
    for (completion, outcome, is_retryable) in table {
        assert_eq!(classes.outcome(completion), outcome, "{completion:?}");
        assert_eq!(classes.classify(completion).is_retryable(), is_retryable, "{completion:?}");
    }
}

#[test]
fn class_override_leaves_other_statuses_unchanged() {
    const OWN: Classes = match Classes::new().status(404, CompletionClass::Transient) {
        Ok(classes) => classes.timeout(CompletionClass::Overload).connection(CompletionClass::Permanent),
        Err(_) => Classes::new(),
    };
    let default = Classes::new();
    for status in STATUS_MIN..=STATUS_MAX {
        let expected = if status == 404 {
            CompletionClass::Transient
        } else {
            default.classify(Completion::Status(status))
        };
        assert_eq!(OWN.classify(Completion::Status(status)), expected, "{status}");
        for class in [
            CompletionClass::Success,
            CompletionClass::Overload,
            CompletionClass::Transient,
            CompletionClass::Permanent,
            CompletionClass::Mistake,
        ] {
            let own = default.clone().status(status, class).unwrap();
            assert_eq!(own.classify(Completion::Status(status)), class, "{status}");
        }
    }
    assert_eq!(OWN.outcome(Completion::Status(404)), Outcome::failure().because(Cause::Other));
    assert_eq!(OWN.outcome(Completion::Timeout), Outcome::overload().because(Cause::Network));
    assert_eq!(OWN.classify(Completion::Connection), CompletionClass::Permanent);
    let shown = format!("{OWN:?}");
    assert!(shown.contains("[(404, Transient)]") && shown.contains("connection: Permanent"), "{shown}");
}

#[test]
fn class_overrides_chain() {
    let every = (500..=599)
        .try_fold(Classes::new(), |classes, status| classes.status(status, CompletionClass::Transient));
    let every = every.unwrap();
    assert!(
        (500..=599).all(|status| every.classify(Completion::Status(status)) == CompletionClass::Transient)
    );
    assert_eq!(every.classify(Completion::Status(499)), CompletionClass::Mistake);
}

#[test]
fn invalid_status_is_refused_with_its_bounds() {
    for status in [0, 99, 600, 999, u16::MAX] {
        let error = Classes::new().status(status, CompletionClass::Success).unwrap_err();
        assert_eq!(error, InvalidStatus { status });
        assert_eq!(error.to_string(), format!("status {status} is outside 100..=599"));
    }
    assert!(Classes::new().status(100, CompletionClass::Success).is_ok());
    assert!(Classes::new().status(599, CompletionClass::Success).is_ok());
}

#[test]
fn retry_after_applies_except_to_202_and_3xx() {
    for status in STATUS_MIN..=STATUS_MAX {
        if status == 202 || (300..=399).contains(&status) {
            let outcome = outcome(status, &[("retry-after", "2"), ("retry-after-ms", "1500")]);
            assert_eq!(outcome, Outcome::success(), "{status}");
            continue;
        }
        assert_eq!(wait(status, &[("retry-after", "2")]), Some(secs(2)), "{status}");
        assert_eq!(
            wait(status, &[("retry-after-ms", "1500"), ("retry-after", "9")]),
            Some(Duration::from_millis(1_500)),
            "{status}"
        );
    }
}

#[test]
fn mistake_with_retry_after_is_overload() {
    for status in [400, 403, 413] {
        let outcome = outcome(status, &[("retry-after", "30")]);
        assert_eq!(outcome, Outcome::overload().because(Cause::Other).retry_after(secs(30)));
        let signals = read([("retry-after", "30")], NOW);
        assert!(Classes::new().classify_with(Completion::Status(status), &signals).is_retryable());
    }
    for headers in [("retry-after", "0"), ("retry-after", "soon"), ("x-amz-retry-after", "500")] {
        let outcome = outcome(404, &[headers]);
        assert_eq!((outcome.kind(), outcome.has_hint()), (Kind::Ignored, false), "{headers:?}");
    }
}

#[test]
fn retry_after_applies_to_202_that_is_not_success() {
    let classes = Classes::new().status(202, CompletionClass::Transient).unwrap();
    let signals = read([("retry-after", "2")], NOW);
    let outcome = classes.outcome_with(Completion::Status(202), &signals);
    assert_eq!((outcome.kind(), outcome.hint()), (Kind::Failure, Some(secs(2))));
}

#[test]
fn status_403_with_empty_quota_is_overload() {
    let empty = [("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "40")];
    let level = QuotaLevel { limit: 60, remaining: 0, reset: Reset::More(secs(40)), window: None };
    let wanted = Outcome::overload().because(Cause::Other).retry_after(secs(40));
    let wanted = wanted.quota(Dimension::Requests, level).exceeded(Dimension::Requests);
    assert_eq!(outcome(403, &empty), wanted);
    let signals = read(empty, NOW);
    assert_eq!(Classes::new().classify_with(Completion::Status(403), &signals), CompletionClass::Overload);
    for status in [400, 401, 404, 422] {
        assert_eq!(outcome(status, &empty).kind(), Kind::Ignored, "{status}");
    }
    let ignoring = Classes::new().empty_quota(EmptyQuota::Ignore);
    assert_eq!(ignoring.outcome_with(Completion::Status(403), &signals), Outcome::mistake());
    let overridden = Classes::new().status(403, CompletionClass::Permanent).unwrap();
    assert_eq!(overridden.classify_with(Completion::Status(403), &signals), CompletionClass::Permanent);
    let unsure: [&[(&str, &str)]; 5] = [
        &empty[..2],
        &empty[1..],
        &[("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "9"), ("x-ratelimit-reset", "40")],
        &[("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "0")],
        &[empty[0], empty[1], empty[2], ("retry-after", "0")],
    ];
    for headers in unsure {
        assert_eq!(outcome(403, headers), Outcome::mistake(), "{headers:?}");
    }
}

#[test]
fn retry_after_of_zero_counts_for_overload_only() {
    assert_eq!(wait(429, &[("retry-after", "0")]), Some(Duration::ZERO));
    for status in [200, 404, 500, 501] {
        assert_eq!(wait(status, &[("retry-after", "0")]), None, "{status}");
    }
}

#[test]
fn overload_waits_until_no_quota_is_empty() {
    let anthropic = [
        ("anthropic-ratelimit-requests-limit", "60"),
        ("anthropic-ratelimit-requests-remaining", "0"),
        ("anthropic-ratelimit-requests-reset", "2026-01-31T09:30:30Z"),
        ("anthropic-ratelimit-tokens-limit", "60000"),
        ("anthropic-ratelimit-tokens-remaining", "0"),
        ("anthropic-ratelimit-tokens-reset", "2026-01-31T09:31:00Z"),
    ];
    assert_eq!(wait(429, &anthropic), Some(secs(60)));
    assert_eq!(wait(429, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "7")]), Some(secs(7)));
}

#[test]
fn empty_quota_waits_for_one_unit() {
    // The reset is the time to full, far longer than the half second until one unit is available.
    let full = [
        ("anthropic-ratelimit-requests-limit", "60"),
        ("anthropic-ratelimit-requests-remaining", "0"),
        ("anthropic-ratelimit-requests-reset", "2026-01-31T09:30:30Z"),
    ];
    let window = [("x-ratelimit-limit", "5000"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "40")];
    let ietf = [("ratelimit-policy", "\"p\";q=10;w=60"), ("ratelimit", "\"p\";r=0;t=20")];
    for status in [200, 304, 500, 501] {
        assert_eq!(wait(status, &full), Some(Duration::from_millis(500)), "{status}");
        assert_eq!(wait(status, &window), Some(secs(40)), "{status}");
        assert_eq!(wait(status, &ietf), Some(secs(20)), "{status}");
    }
    assert_eq!(wait(404, &window), None, "a mistake sets no delay");
    let mut explicit = window.to_vec();
    explicit.push(("retry-after", "9"));
    for status in [200, 404, 429, 500] {
        assert_eq!(wait(status, &explicit), Some(secs(9)), "{status}: an explicit delay comes first");
    }
    let ignoring = Classes::new().empty_quota(EmptyQuota::Ignore);
    let signals = read(window, NOW);
    assert_eq!(ignoring.outcome_with(Completion::Status(200), &signals), Outcome::success());
    assert_eq!(ignoring.outcome_with(Completion::Status(429), &signals).retry_after, Some(secs(40)));
}

#[test]
fn quotas_and_exceeded_dimension_are_passed_on() {
    let headers = [
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "30"),
        ("x-ratelimit-reset-requests", "30s"),
        ("x-ratelimit-limit-tokens", "1000"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-tokens", "1m0s"),
    ];
    let requests = QuotaLevel { limit: 60, remaining: 30, reset: Reset::Full(secs(30)), window: None };
    let tokens = QuotaLevel { limit: 1_000, remaining: 0, reset: Reset::Full(secs(60)), window: None };
    for (status, exceeded) in [(200, None), (429, Some(Dimension::Tokens))] {
        let outcome = outcome(status, &headers);
        assert_eq!(outcome.quota_level(Dimension::Requests), Some(requests));
        assert_eq!(outcome.quota_level(Dimension::Tokens), Some(tokens));
        assert_eq!(outcome.exceeded, exceeded, "{status}");
    }
    // With two empty quotas, neither is named.
    let both = headers.map(|(name, value)| (name, if value == "30" { "0" } else { value }));
    assert_eq!(outcome(429, &both).exceeded, None);
    // Implausible numbers are ignored and counted.
    let untrue = headers.map(|(name, value)| (name, if value == "30" { "61" } else { value }));
    let outcome = outcome(200, &untrue);
    assert_eq!((outcome.quota_level(Dimension::Requests), outcome.malformed()), (None, 1));
}

#[test]
fn uncertain_empty_quota_sets_no_delay() {
    let table: [&[(&str, &str)]; 7] = [
        &[("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "40")],
        &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "40")],
        &[("x-ratelimit-limit", "0"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "40")],
        &[("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "0")],
        &[("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "0")],
        &[
            ("x-ratelimit-limit-images", "9"),
            ("x-ratelimit-remaining-images", "0"),
            ("x-ratelimit-reset-images", "9"),
        ],
        &[("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "90000")],
    ];
    for headers in table {
        assert_eq!(wait(200, headers), None, "{headers:?}");
    }
}

#[test]
fn amz_retry_after_is_bounded_by_own_backoff() {
    let classes = Classes::new().backoff(secs(2));
    let delay = |status, millis: &str| {
        let signals = read([("x-amz-retry-after", millis)], NOW);
        classes.outcome_with(Completion::Status(status), &signals).retry_after
    };
    for status in [429, 503, 500, 501] {
        assert_eq!(delay(status, "1"), Some(secs(2)), "{status}");
        assert_eq!(delay(status, "3000"), Some(secs(3)), "{status}");
        assert_eq!(delay(status, "99999999999999999999"), Some(secs(7)), "{status}");
    }
    assert_eq!((delay(200, "3000"), delay(404, "3000")), (None, None));
    let both = [("x-amz-retry-after", "1000"), ("retry-after", "4")];
    assert_eq!(wait(503, &both), Some(secs(4)), "the standard header comes first");
    let longest = Classes::new().backoff(Duration::MAX);
    let signals = read([("x-amz-retry-after", "1")], NOW);
    assert_eq!(longest.outcome_with(Completion::Status(503), &signals).retry_after, Some(WAIT_MAX));
}

#[test]
fn malformed_headers_are_counted_for_every_status() {
    let headers = [
        ("retry-after", "soon"),
        ("x-ratelimit-limit", "-1"),
        ("ratelimit", "\"p"),
        ("x-ratelimit-reset", "90000"),
    ];
    for status in [200, 404, 429, 500] {
        assert_eq!(outcome(status, &headers).malformed(), 4, "{status}");
    }
    let many = vec![("retry-after", "soon"); 70_000];
    assert_eq!(outcome(200, &many).malformed(), u16::MAX);
}

#[test]
fn classes_table_is_small() {
    assert!(size_of::<Classes>() <= 528, "{}", size_of::<Classes>());
}
