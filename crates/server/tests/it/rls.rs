//! Descriptors to limits, over a real connection.

use std::time::Duration;

use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::{Ok as Under, OverLimit};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tidegate::store::{ManualWall, MemoryOptions};
use tidegate::{Limiter, Memory};
use tidegate_server::Bounds;
use tonic::Code;

use crate::kit::codec::{Value, json};
use crate::kit::{NOW, soon};
use crate::rls_kit::{Rls, codes, descriptor, header, request};

/// Users, keys of the admin's, and those that are let through.
fn config() -> Value {
    json!({"rules": [
        {"match": [{"key": "user", "value": "root"}], "unlimited": true},
        {"match": [{"key": "user"}], "entity": "{user}", "resource": "shop", "cost": {"requests": 1, "tokens": 10}},
        {"match": [{"key": "team", "value": "blue-*"}], "entity": "team {team}", "resource": "shop"},
        {"match": [{"key": "try"}], "entity": "try {try}", "resource": "shop", "shadow": true},
        {"domain": "other", "match": [{"key": "own"}], "entity": "{own}", "resource": "shop"},
        {"match": [{"key": "few"}], "entity": "few {few}", "resource": "shop", "limits": ["requests:2/min"]},
    ]})
}

#[tokio::test]
async fn a_user_is_limited_and_told_so_as_over_http() {
    let rls = Rls::new(config()).await;
    let first = rls.call(request(&[&[("user", "ada")]])).await.unwrap();
    assert_eq!(codes(&first), (Under, vec![Under]));
    let status = &first.statuses[0];
    let limit = status.current_limit.as_ref().unwrap();
    assert_eq!((&*limit.name, limit.requests_per_unit, limit.unit()), ("requests", 5, Unit::Minute));
    assert_eq!(status.limit_remaining, 4);
    assert_eq!(status.duration_until_reset.unwrap().seconds, 12);
    assert_eq!(header(&first, "ratelimit"), Some("\"requests\";r=4, \"tokens\";r=90"));
    assert_eq!(header(&first, "ratelimit-policy"), Some("\"requests\";q=5;w=60, \"tokens\";q=100;w=60"));
    assert_eq!(header(&first, "retry-after"), None);
    for _ in 0..4 {
        assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    }
    let over = rls.call(request(&[&[("user", "ada")]])).await.unwrap();
    assert_eq!(codes(&over), (OverLimit, vec![OverLimit]));
    assert_eq!(header(&over, "retry-after"), Some("12"));
    assert_eq!(header(&over, "ratelimit"), Some("\"requests\";r=0;t=12, \"tokens\";r=50"));
    assert_eq!(
        (over.statuses[0].limit_remaining, over.statuses[0].duration_until_reset.unwrap().seconds),
        (0, 12)
    );
    // Nobody else is, and nothing was drawn by the one that was refused.
    assert_eq!(rls.codes(&[&[("user", "bob")]]).await.0, Under);
    assert_eq!(rls.left("ada", "tokens").await, 50);
    rls.kit.clock.advance(Duration::from_secs(12));
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"over_limit\"}").await, 1);
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"ok\"}").await, 7);
    assert_eq!(rls.counted("tidegate_rls_request_seconds_count").await, 8);
}

#[tokio::test]
async fn hits_multiply_the_cost_and_a_descriptors_own_count_before_the_requests() {
    let rls = Rls::new(config()).await;
    let ask = |request_hits, own| RateLimitRequest {
        descriptors: vec![descriptor(&[("user", "ada")], own)],
        hits_addend: request_hits,
        ..request(&[])
    };
    assert_eq!(codes(&rls.call(ask(3, None)).await.unwrap()).0, Under);
    assert_eq!((rls.left("ada", "requests").await, rls.left("ada", "tokens").await), (2, 70));
    assert_eq!(codes(&rls.call(ask(3, Some(1))).await.unwrap()).0, Under);
    assert_eq!((rls.left("ada", "requests").await, rls.left("ada", "tokens").await), (1, 60));
    // None at all: it is asked, and nothing is drawn.
    let none = rls.call(ask(1, Some(0))).await.unwrap();
    assert_eq!((codes(&none).0, none.statuses[0].limit_remaining), (Under, 1));
    assert_eq!(rls.left("ada", "requests").await, 1);
    // More than a bucket ever holds, and more than can be counted, are over the limit: no error lets them through.
    for hits in [6, 1 << 41, u64::MAX] {
        let over = rls.call(ask(1, Some(hits))).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, vec![OverLimit]), "{hits}");
        assert_eq!(over.statuses[0].duration_until_reset, None, "{hits}");
        assert_eq!(header(&over, "retry-after"), None, "no time helps");
    }
    let over = rls.call(ask(1, Some(u64::MAX))).await.unwrap();
    let why = format!("{} hits of 1 `requests` each are more than {}\n", u64::MAX, 1_u64 << 40);
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), why);
    assert_eq!(rls.left("ada", "requests").await, 1);
    let back = RateLimitRequest {
        descriptors: vec![envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor {
            is_negative_hits: true,
            ..descriptor(&[("user", "ada")], Some(1))
        }],
        ..request(&[])
    };
    assert_eq!(rls.call(back).await.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn the_descriptors_of_one_request_are_all_or_nothing() {
    let rls = Rls::new(config()).await;
    let (ada, blue): (&[_], &[_]) = (&[("user", "ada")], &[("team", "blue-7")]);
    for _ in 0..5 {
        assert_eq!(rls.codes(&[blue]).await.0, Under);
    }
    // Whichever comes first.
    for (pair, expected) in [([ada, blue], [Under, OverLimit]), ([blue, ada], [OverLimit, Under])] {
        let over = rls.call(request(&pair)).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, expected.to_vec()));
        assert_eq!(header(&over, "retry-after"), Some("12"));
        let told = over.statuses.iter().find(|status| status.code() == Under).unwrap();
        assert_eq!(told.limit_remaining, 5, "nothing is held when it is answered");
        assert_eq!((rls.left("ada", "requests").await, rls.left("ada", "tokens").await), (5, 100));
    }
    rls.kit.clock.advance(Duration::from_secs(24));
    assert_eq!(rls.codes(&[ada, blue]).await, (Under, vec![Under, Under]));
    assert_eq!((rls.left("ada", "requests").await, rls.left("team blue-7", "requests").await), (4, 1));
    // The same twice is drawn twice, or not at all.
    assert_eq!(rls.codes(&[blue, blue]).await.0, OverLimit);
    assert_eq!(rls.left("team blue-7", "requests").await, 1);
    assert_eq!(rls.codes(&[ada, ada]).await.0, Under);
    assert_eq!(rls.left("ada", "requests").await, 2);
    // What was granted is used, and no lease is left open.
    let used = rls.kit.get("/v1/usage/summary?entity=ada").await;
    assert_eq!(used.body["limits"]["requests"]["units"], 3, "{}", used.text);
    rls.kit.clock.advance(Duration::from_hours(48));
    let swept = rls.kit.limiter.store().sweep(100).await.unwrap();
    assert_eq!((swept.settled, swept.returned), (0, 0));
}

#[tokio::test]
async fn a_rule_that_only_looks_is_decided_and_lets_everybody_pass() {
    let rls = Rls::new(config()).await;
    let (tries, ada): (&[_], &[_]) = (&[("try", "x")], &[("user", "ada")]);
    for _ in 0..5 {
        assert_eq!(rls.codes(&[tries]).await, (Under, vec![Under]));
    }
    assert_eq!(rls.left("try x", "requests").await, 0, "it is drawn in earnest");
    let passed = rls.call(request(&[tries])).await.unwrap();
    assert_eq!((codes(&passed), header(&passed, "ratelimit")), ((Under, vec![Under]), None));
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await, 1);
    // It does not hold up those beside it, and is not drawn where they are refused.
    rls.kit.clock.advance(Duration::from_mins(1));
    for _ in 0..5 {
        assert_eq!(rls.codes(&[ada]).await.0, Under);
    }
    assert_eq!(rls.codes(&[tries, ada]).await, (OverLimit, vec![Under, OverLimit]));
    assert_eq!(rls.left("try x", "requests").await, 5);
    // Nor does it refuse what cannot be asked.
    let many =
        RateLimitRequest { descriptors: vec![descriptor(&[("try", "x")], Some(u64::MAX))], ..request(&[]) };
    assert_eq!(codes(&rls.call(many).await.unwrap()).0, Under);
    for value in ["a#b", &"x".repeat(1_025)] {
        assert_eq!(rls.codes(&[&[("try", value)]]).await, (Under, vec![Under]), "{value}");
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await, 4);
}

#[tokio::test]
async fn what_no_rule_knows_and_what_is_unlimited_is_as_configured() {
    let rls = Rls::new(config()).await;
    let unknown: [&[(&str, &str)]; 4] =
        [&[("nobody", "x")], &[("team", "red")], &[("own", "x")], &[("user", "a"), ("path", "/")]];
    for entries in unknown {
        assert_eq!(rls.codes(&[entries]).await, (Under, vec![Under]), "{entries:?}");
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"unknown\"}").await, 4);
    for _ in 0..10 {
        assert_eq!(rls.codes(&[&[("user", "root")]]).await.0, Under);
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"unlimited\"}").await, 10);
    let other = RateLimitRequest { domain: "other".to_owned(), ..request(&[&[("own", "x")]]) };
    assert_eq!(codes(&rls.call(other).await.unwrap()).0, Under);
    assert_eq!(rls.left("x", "requests").await, 4);

    let mut strict = config();
    strict["unknown"] = json!("refuse");
    let rls = Rls::new(strict).await;
    let over = rls.call(request(&[&[("user", "ada")], &[("nobody", "x")]])).await.unwrap();
    assert_eq!(codes(&over), (OverLimit, vec![Under, OverLimit]));
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), "no rule knows this descriptor\n");
    assert_eq!(rls.left("ada", "requests").await, 5);
}

#[tokio::test]
async fn limits_of_a_rules_own_stand_in_the_place_of_those_that_are_written() {
    let rls = Rls::new(config()).await;
    for expected in [Under, Under, OverLimit] {
        assert_eq!(rls.codes(&[&[("few", "x")]]).await.0, expected);
    }
    assert_eq!(rls.codes(&[&[("few", "x")], &[("user", "ada")]]).await.0, OverLimit);
    assert_eq!(rls.left("ada", "requests").await, 5);
}

#[tokio::test]
async fn a_value_that_is_no_name_is_over_the_limit_so_that_no_failure_mode_lets_it_through() {
    let rls = Rls::new(config()).await;
    for value in ["", "a#b", "$SYSTEM", "_default_", "a\nb", &"x".repeat(257), &"x".repeat(1_025)] {
        let over = rls.call(request(&[&[("user", value)]])).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, vec![OverLimit]), "{value:?}");
        assert!(!over.raw_body.is_empty(), "it is told what is wrong");
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"invalid\"}").await, 7);
    // What no rule uses may be as it likes.
    let long = "x".repeat(1_025);
    assert_eq!(rls.codes(&[&[("nobody", &long)], &[("user", "ada")]]).await.0, Under);
}

#[tokio::test]
async fn a_rule_whose_limit_is_not_written_is_an_error_that_names_it_where_no_caller_chose_a_value() {
    let rls = Rls::new(json!({"rules": [
        {"match": [{"key": "all"}], "entity": "all", "resource": "shop", "cost": {"megabytes": 1}},
        {"match": [{"key": "user"}], "entity": "{user}", "resource": "shop", "cost": {"megabytes": 1}},
    ]}))
    .await;
    let error = rls.call(request(&[&[("all", "x")]])).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(
        error.message(),
        "rule 1: `all on shop` has no limit `megabytes`; it has `requests`, `tokens`"
    );
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"failed\"}").await, 1);
    let over = rls.call(request(&[&[("user", "ada")]])).await.unwrap();
    assert_eq!(codes(&over), (OverLimit, vec![OverLimit]));
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), "no limit is written for this\n");
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"unasked\"}").await, 2);
}

#[tokio::test]
async fn who_finds_no_room_in_the_store_is_over_the_limit() {
    let clock = ManualWall::new(NOW);
    let store = Memory::with(MemoryOptions::new().subjects_max(1).clock(clock.clone())).unwrap();
    let rls = Rls::over(Limiter::new(store), clock, Bounds::default(), config()).await;
    let mut last = None;
    // The bound is one of many parts of the store.
    for number in 0..10_000 {
        let answer = rls.call(request(&[&[("user", &format!("u{number}"))]])).await.unwrap();
        if answer.overall_code() == OverLimit {
            last = Some(answer);
            break;
        }
    }
    let over = last.expect("it is full");
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), "there is no room to count this\n");
}

#[tokio::test]
async fn requests_at_the_same_time_in_whichever_order_lose_and_win_nothing() {
    let rls = Rls::new(config()).await;
    let (ada, blue): (&[_], &[_]) = (&[("user", "ada")], &[("team", "blue-7")]);
    let pairs: Vec<_> =
        (0..20).map(|number| if number % 2 == 0 { [ada, blue] } else { [blue, ada] }).collect();
    let answers = futures_util::future::join_all(pairs.iter().map(|pair| rls.codes(pair))).await;
    let granted = answers.iter().filter(|(code, _)| *code == Under).count();
    let left = 5 - i64::try_from(granted).unwrap();
    assert_eq!((rls.left("ada", "requests").await, rls.left("team blue-7", "requests").await), (left, left));
    assert!((1..=5).contains(&granted), "{granted}");
}

#[tokio::test]
async fn what_is_decided_for_envoy_is_counted_as_over_http_and_described() {
    let rls = Rls::new(config()).await;
    let (ada, bob): (&[_], &[_]) = (&[("user", "ada")], &[("user", "bob")]);
    for _ in 0..6 {
        rls.codes(&[ada]).await;
    }
    assert_eq!(rls.codes(&[bob, ada]).await.0, OverLimit);
    assert_eq!(rls.counted("tidegate_decision_seconds_count{verb=\"spend\"}").await, 6);
    assert_eq!(rls.counted("tidegate_decision_seconds_count{verb=\"acquire\"}").await, 1);
    assert_eq!(rls.counted("tidegate_refusals_total{limit=\"requests\"}").await, 2);
    assert_eq!(rls.counted("tidegate_near_limit_total{limit=\"requests\"}").await, 2);
    let text = rls.kit.get("/metrics").await.text;
    let page = include_str!("../../../../docs/metrics.md");
    for line in text.lines().filter(|line| line.starts_with("tidegate_rls_")) {
        let name = line.split(['{', ' ']).next().unwrap();
        let name =
            ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
        assert!(text.contains(&format!("# HELP {name} ")), "{name} says what it is");
        let row =
            page.lines().find(|row| row.starts_with(&format!("| `{name}`"))).expect("it is on the page");
        if let Some((_, value)) = line.split_once("{answer=\"").or_else(|| line.split_once("{kind=\"")) {
            let value = value.split('"').next().unwrap();
            assert!(row.contains(&format!("`{value}`")), "{value} in {row}");
        }
    }
}

#[tokio::test]
async fn refusals_are_told_to_those_who_listen() {
    let rls = Rls::new(config()).await;
    let events = rls.kit.request("GET", "/v1/events").bearer_auth(&rls.kit.token);
    let mut events = events.send().await.unwrap();
    for _ in 0..6 {
        rls.codes(&[&[("user", "ada")]]).await;
    }
    let mut text = String::new();
    let heard = async {
        while !text.contains("event: refused") || !text.contains("ada") {
            text.push_str(&String::from_utf8_lossy(&events.chunk().await.unwrap().unwrap()));
        }
    };
    soon("an event", heard).await;
}
