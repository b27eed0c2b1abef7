//! Every status has its sort, and every sort its outcome; headers add to that what they may.

use super::*;
use crate::feedback::headers::{Dimension, Reset, read};
use crate::outcome::{Kind, QuotaLevel};
use crate::time::Stamp;

const NOW: Stamp = Stamp::from_secs(1_769_851_800);

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// How an ending with this status and these headers is taken.
fn outcome(status: u16, headers: &[(&str, &str)]) -> Outcome {
    Classes::new().outcome_with(Ended::Status(status), &read(headers.iter().copied(), NOW))
}

/// How long all stay away because of it.
fn wait(status: u16, headers: &[(&str, &str)]) -> Option<Duration> {
    outcome(status, headers).retry_after
}

#[test]
fn every_status_has_its_sort_and_its_outcome() {
    use Kind::{Failure, Ignored, Overload, Success};
    let classes = Classes::new();
    for status in 0..=u16::MAX {
        let (sort, kind, cause) = match status {
            429 => (Sort::Overload, Overload, Some(Cause::Throttled)),
            503 | 529 => (Sort::Overload, Overload, Some(Cause::Server)),
            408 => (Sort::Transient, Failure, Some(Cause::Other)),
            500 | 502 | 504 | 520..=524 | 530 => (Sort::Transient, Failure, Some(Cause::Server)),
            100..=399 => (Sort::Success, Success, None),
            400..=499 => (Sort::Mistake, Ignored, None),
            _ => (Sort::Permanent, Failure, Some(Cause::Server)),
        };
        let ended = Ended::Status(status);
        let outcome = classes.outcome(ended);
        assert_eq!(classes.sort(ended), sort, "{status}");
        assert_eq!((outcome.kind(), outcome.cause()), (kind, cause), "{status}");
        assert!(!outcome.has_hint() && outcome.malformed() == 0, "{status}");
        assert_eq!(classes.outcome_with(ended, &Signals::default()), outcome, "{status}");
        let is_worth_it = matches!(status, 408 | 429 | 500 | 502..=504 | 520..=524 | 529 | 530);
        assert_eq!(classes.sort(ended).is_worth_another(), is_worth_it, "{status}");
    }
}

#[test]
fn what_has_no_status_has_its_sort_too() {
    let classes = Classes::new();
    let network = Outcome::failure().because(Cause::Network);
    let table = [
        (Ended::Timeout, network, true),
        (Ended::Connection, network, true),
        (Ended::Unsent, Outcome::ignored(), false),
    ];
    for (ended, outcome, is_worth_it) in table {
        assert_eq!(classes.outcome(ended), outcome, "{ended:?}");
        assert_eq!(classes.sort(ended).is_worth_another(), is_worth_it, "{ended:?}");
    }
}

#[test]
fn each_can_be_given_another_sort_and_the_others_stay() {
    const OWN: Classes = match Classes::new().status(404, Sort::Transient) {
        Ok(classes) => classes.timeout(Sort::Overload).connection(Sort::Permanent),
        Err(_) => Classes::new(),
    };
    let usual = Classes::new();
    for status in STATUS_MIN..=STATUS_MAX {
        let expected = if status == 404 { Sort::Transient } else { usual.sort(Ended::Status(status)) };
        assert_eq!(OWN.sort(Ended::Status(status)), expected, "{status}");
        for sort in [Sort::Success, Sort::Overload, Sort::Transient, Sort::Permanent, Sort::Mistake] {
            let own = usual.clone().status(status, sort).unwrap();
            assert_eq!(own.sort(Ended::Status(status)), sort, "{status}");
        }
    }
    assert_eq!(OWN.outcome(Ended::Status(404)), Outcome::failure().because(Cause::Other));
    assert_eq!(OWN.outcome(Ended::Timeout), Outcome::overload().because(Cause::Network));
    assert_eq!(OWN.sort(Ended::Connection), Sort::Permanent);
    let shown = format!("{OWN:?}");
    assert!(shown.contains("[(404, Transient)]") && shown.contains("connection: Permanent"), "{shown}");
}

#[test]
fn many_statuses_are_given_another_sort_in_a_row() {
    let every =
        (500..=599).try_fold(Classes::new(), |classes, status| classes.status(status, Sort::Transient));
    let every = every.unwrap();
    assert!((500..=599).all(|status| every.sort(Ended::Status(status)) == Sort::Transient));
    assert_eq!(every.sort(Ended::Status(499)), Sort::Mistake);
}

#[test]
fn a_number_that_is_no_status_is_refused_with_its_bounds() {
    for status in [0, 99, 600, 999, u16::MAX] {
        let error = Classes::new().status(status, Sort::Success).unwrap_err();
        assert_eq!(error, InvalidStatus { status });
        assert_eq!(error.to_string(), format!("status {status} is outside 100..=599"));
    }
    assert!(Classes::new().status(100, Sort::Success).is_ok());
    assert!(Classes::new().status(599, Sort::Success).is_ok());
}

#[test]
fn what_is_said_in_so_many_words_counts_unless_it_is_about_one_thing_only() {
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
fn a_mistake_that_says_when_to_come_back_is_an_overload() {
    for status in [400, 403, 413] {
        let outcome = outcome(status, &[("retry-after", "30")]);
        assert_eq!(outcome, Outcome::overload().because(Cause::Other).retry_after(secs(30)));
        let signals = read([("retry-after", "30")], NOW);
        assert!(Classes::new().sort_with(Ended::Status(status), &signals).is_worth_another());
    }
    for headers in [("retry-after", "0"), ("retry-after", "soon"), ("x-amz-retry-after", "500")] {
        let outcome = outcome(404, &[headers]);
        assert_eq!((outcome.kind(), outcome.has_hint()), (Kind::Ignored, false), "{headers:?}");
    }
}

#[test]
fn what_is_said_of_one_thing_counts_where_it_is_no_success() {
    let classes = Classes::new().status(202, Sort::Transient).unwrap();
    let signals = read([("retry-after", "2")], NOW);
    let outcome = classes.outcome_with(Ended::Status(202), &signals);
    assert_eq!((outcome.kind(), outcome.hint()), (Kind::Failure, Some(secs(2))));
}

#[test]
fn a_403_is_an_overload_where_its_quota_is_surely_empty() {
    let empty = [("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "40")];
    let level = QuotaLevel { limit: 60, remaining: 0, reset: Reset::More(secs(40)), window: None };
    let wanted = Outcome::overload().because(Cause::Other).retry_after(secs(40));
    let wanted = wanted.quota(Dimension::Requests, level).exceeded(Dimension::Requests);
    assert_eq!(outcome(403, &empty), wanted);
    let signals = read(empty, NOW);
    assert_eq!(Classes::new().sort_with(Ended::Status(403), &signals), Sort::Overload);
    for status in [400, 401, 404, 422] {
        assert_eq!(outcome(status, &empty).kind(), Kind::Ignored, "{status}");
    }
    let distrustful = Classes::new().drained(Drained::GoOn);
    assert_eq!(distrustful.outcome_with(Ended::Status(403), &signals), Outcome::ignored());
    let known = Classes::new().status(403, Sort::Permanent).unwrap();
    assert_eq!(known.sort_with(Ended::Status(403), &signals), Sort::Permanent);
    let unsure: [&[(&str, &str)]; 5] = [
        &empty[..2],
        &empty[1..],
        &[("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "9"), ("x-ratelimit-reset", "40")],
        &[("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "0")],
        &[empty[0], empty[1], empty[2], ("retry-after", "0")],
    ];
    for headers in unsure {
        assert_eq!(outcome(403, headers), Outcome::ignored(), "{headers:?}");
    }
}

#[test]
fn zero_is_an_answer_to_an_overload_and_nothing_to_others() {
    assert_eq!(wait(429, &[("retry-after", "0")]), Some(Duration::ZERO));
    for status in [200, 404, 500, 501] {
        assert_eq!(wait(status, &[("retry-after", "0")]), None, "{status}");
    }
}

#[test]
fn an_overload_waits_until_no_quota_is_empty() {
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
fn an_empty_quota_is_waited_for_until_one_unit_is_there() {
    // The request itself was answered. A reset that is the time to full is far too long: half a second per unit.
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
    assert_eq!(wait(404, &window), None, "a mistake teaches nothing");
    let mut told = window.to_vec();
    told.push(("retry-after", "9"));
    for status in [200, 404, 429, 500] {
        assert_eq!(wait(status, &told), Some(secs(9)), "{status}: what is said in so many words comes first");
    }
    let trusting = Classes::new().drained(Drained::GoOn);
    let signals = read(window, NOW);
    assert_eq!(trusting.outcome_with(Ended::Status(200), &signals), Outcome::success());
    assert_eq!(trusting.outcome_with(Ended::Status(429), &signals).retry_after, Some(secs(40)));
}

#[test]
fn quotas_and_the_one_that_is_empty_are_passed_on() {
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
    // Two are empty: the rejection names neither.
    let both = headers.map(|(name, value)| (name, if value == "30" { "0" } else { value }));
    assert_eq!(outcome(429, &both).exceeded, None);
    // What cannot be true is ignored and counted.
    let untrue = headers.map(|(name, value)| (name, if value == "30" { "61" } else { value }));
    let outcome = outcome(200, &untrue);
    assert_eq!((outcome.quota_level(Dimension::Requests), outcome.malformed()), (None, 1));
}

#[test]
fn a_quota_that_is_not_surely_empty_holds_up_nobody() {
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
fn what_aws_says_is_followed_near_the_callers_own_back_off() {
    let classes = Classes::new().backoff(secs(2));
    let told = |status, millis: &str| {
        let signals = read([("x-amz-retry-after", millis)], NOW);
        classes.outcome_with(Ended::Status(status), &signals).retry_after
    };
    for status in [429, 503, 500, 501] {
        assert_eq!(told(status, "1"), Some(secs(2)), "{status}");
        assert_eq!(told(status, "3000"), Some(secs(3)), "{status}");
        assert_eq!(told(status, "99999999999999999999"), Some(secs(7)), "{status}");
    }
    assert_eq!((told(200, "3000"), told(404, "3000")), (None, None));
    let both = [("x-amz-retry-after", "1000"), ("retry-after", "4")];
    assert_eq!(wait(503, &both), Some(secs(4)), "what everybody says comes first");
    let patient = Classes::new().backoff(Duration::MAX);
    let signals = read([("x-amz-retry-after", "1")], NOW);
    assert_eq!(patient.outcome_with(Ended::Status(503), &signals).retry_after, Some(WAIT_MAX));
}

#[test]
fn what_could_not_be_read_or_believed_is_counted_whatever_the_status() {
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
fn the_table_is_small() {
    assert!(size_of::<Classes>() <= 528, "{}", size_of::<Classes>());
}
