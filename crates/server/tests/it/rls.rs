//! Tests of Envoy's rate limit service, over a real connection.

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

/// Rules for users, teams, shadow mode, other domains and rule limits.
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
async fn rls_user_is_limited_with_same_headers_as_http() {
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
    // Other users are not limited, and the refused request drew nothing.
    assert_eq!(rls.codes(&[&[("user", "bob")]]).await.0, Under);
    assert_eq!(rls.left("ada", "tokens").await, 50);
    rls.kit.clock.advance(Duration::from_secs(12));
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"over_limit\"}").await, 1);
    assert_eq!(rls.counted("tidegate_rls_requests_total{answer=\"ok\"}").await, 7);
    assert_eq!(rls.counted("tidegate_rls_request_seconds_count").await, 8);
}

#[tokio::test]
async fn descriptor_hits_override_request_hits() {
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
    // Zero hits: the limit is evaluated, but nothing is drawn.
    let none = rls.call(ask(1, Some(0))).await.unwrap();
    assert_eq!((codes(&none).0, none.statuses[0].limit_remaining), (Under, 1));
    assert_eq!(rls.left("ada", "requests").await, 1);
    // Costs above the burst or the countable maximum are over the limit: an error would allow them.
    for hits in [6, 1 << 41, u64::MAX] {
        let over = rls.call(ask(1, Some(hits))).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, vec![OverLimit]), "{hits}");
        assert_eq!(over.statuses[0].duration_until_reset, None, "{hits}");
        assert_eq!(header(&over, "retry-after"), None, "it never recovers");
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
    assert_eq!(rls.call(back).await.unwrap_err().code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn descriptors_are_drawn_all_or_nothing() {
    let rls = Rls::new(config()).await;
    let (ada, blue): (&[_], &[_]) = (&[("user", "ada")], &[("team", "blue-7")]);
    for _ in 0..5 {
        assert_eq!(rls.codes(&[blue]).await.0, Under);
    }
    // In either order.
    for (pair, expected) in [([ada, blue], [Under, OverLimit]), ([blue, ada], [OverLimit, Under])] {
        let over = rls.call(request(&pair)).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, expected.to_vec()));
        assert_eq!(header(&over, "retry-after"), Some("12"));
        let status = over.statuses.iter().find(|status| status.code() == Under).unwrap();
        assert_eq!(status.limit_remaining, 5, "nothing is held after the response");
        assert_eq!((rls.left("ada", "requests").await, rls.left("ada", "tokens").await), (5, 100));
    }
    rls.kit.clock.advance(Duration::from_secs(24));
    assert_eq!(rls.codes(&[ada, blue]).await, (Under, vec![Under, Under]));
    assert_eq!((rls.left("ada", "requests").await, rls.left("team blue-7", "requests").await), (4, 1));
    // A duplicate descriptor is drawn twice, or not at all.
    assert_eq!(rls.codes(&[blue, blue]).await.0, OverLimit);
    assert_eq!(rls.left("team blue-7", "requests").await, 1);
    assert_eq!(rls.codes(&[ada, ada]).await.0, Under);
    assert_eq!(rls.left("ada", "requests").await, 2);
    // Grants are settled, and no lease stays open.
    let used = rls.kit.get("/v1/usage/summary?entity=ada").await;
    assert_eq!(used.body["limits"]["requests"]["units"], 3, "{}", used.text);
    rls.kit.clock.advance(Duration::from_hours(48));
    let swept = rls.kit.limiter.store().sweep(100).await.unwrap();
    assert_eq!((swept.settled, swept.returned), (0, 0));
}

#[tokio::test]
async fn shadow_rule_decides_but_never_refuses() {
    let rls = Rls::new(config()).await;
    let (tries, ada): (&[_], &[_]) = (&[("try", "x")], &[("user", "ada")]);
    for _ in 0..5 {
        assert_eq!(rls.codes(&[tries]).await, (Under, vec![Under]));
    }
    assert_eq!(rls.left("try x", "requests").await, 0, "shadow rules draw");
    let passed = rls.call(request(&[tries])).await.unwrap();
    assert_eq!((codes(&passed), header(&passed, "ratelimit")), ((Under, vec![Under]), None));
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await, 1);
    // It does not affect other descriptors, and is not drawn if they are refused.
    rls.kit.clock.advance(Duration::from_mins(1));
    for _ in 0..5 {
        assert_eq!(rls.codes(&[ada]).await.0, Under);
    }
    assert_eq!(rls.codes(&[tries, ada]).await, (OverLimit, vec![Under, OverLimit]));
    assert_eq!(rls.left("try x", "requests").await, 5);
    // It does not refuse invalid draws either.
    let many =
        RateLimitRequest { descriptors: vec![descriptor(&[("try", "x")], Some(u64::MAX))], ..request(&[]) };
    assert_eq!(codes(&rls.call(many).await.unwrap()).0, Under);
    for value in ["a#b", &"x".repeat(1_025)] {
        assert_eq!(rls.codes(&[&[("try", value)]]).await, (Under, vec![Under]), "{value}");
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await, 4);
}

#[tokio::test]
async fn unknown_and_unlimited_descriptors_follow_config() {
    let rls = Rls::new(config()).await;
    let unknown: [&[(&str, &str)]; 4] =
        [&[("other", "x")], &[("team", "red")], &[("own", "x")], &[("user", "a"), ("path", "/")]];
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
    let over = rls.call(request(&[&[("user", "ada")], &[("other", "x")]])).await.unwrap();
    assert_eq!(codes(&over), (OverLimit, vec![Under, OverLimit]));
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), "no rule matches this descriptor\n");
    assert_eq!(rls.left("ada", "requests").await, 5);
}

#[tokio::test]
async fn rule_limits_replace_stored_limits() {
    let rls = Rls::new(config()).await;
    for expected in [Under, Under, OverLimit] {
        assert_eq!(rls.codes(&[&[("few", "x")]]).await.0, expected);
    }
    assert_eq!(rls.codes(&[&[("few", "x")], &[("user", "ada")]]).await.0, OverLimit);
    assert_eq!(rls.left("ada", "requests").await, 5);
}

#[tokio::test]
async fn invalid_value_is_over_limit() {
    let rls = Rls::new(config()).await;
    for value in ["", "a#b", "$SYSTEM", "_default_", "a\nb", &"x".repeat(257), &"x".repeat(1_025)] {
        let over = rls.call(request(&[&[("user", value)]])).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, vec![OverLimit]), "{value:?}");
        assert!(!over.raw_body.is_empty(), "the body has the reason");
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"invalid\"}").await, 7);
    // Values that no rule uses are unrestricted.
    let long = "x".repeat(1_025);
    assert_eq!(rls.codes(&[&[("other", &long)], &[("user", "ada")]]).await.0, Under);
}

#[tokio::test]
async fn missing_rule_limit_fails_unless_value_is_given() {
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
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), "no limit is defined for this\n");
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"unasked\"}").await, 2);
}

#[tokio::test]
async fn full_store_is_over_limit() {
    let clock = ManualWall::new(NOW);
    let store = Memory::with(MemoryOptions::new().subjects_max(1).clock(clock.clone())).unwrap();
    let rls = Rls::over(Limiter::new(store), clock, Bounds::default(), config()).await;
    let mut last = None;
    // The bound applies to each shard of the store.
    for number in 0..10_000 {
        let answer = rls.call(request(&[&[("user", &format!("u{number}"))]])).await.unwrap();
        if answer.overall_code() == OverLimit {
            last = Some(answer);
            break;
        }
    }
    let over = last.expect("the store is full");
    assert_eq!(String::from_utf8(over.raw_body).unwrap(), "the store is full\n");
}

#[tokio::test]
async fn concurrent_requests_neither_lose_nor_gain_units() {
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
async fn rls_decisions_are_in_documented_metrics() {
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
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has a help text");
        let row =
            page.lines().find(|row| row.starts_with(&format!("| `{name}`"))).expect("it is on the page");
        if let Some((_, value)) = line.split_once("{answer=\"").or_else(|| line.split_once("{kind=\"")) {
            let value = value.split('"').next().unwrap();
            assert!(row.contains(&format!("`{value}`")), "{value} in {row}");
        }
    }
}

#[tokio::test]
async fn rls_refusals_are_broadcast() {
    let rls = Rls::new(config()).await;
    let events = rls.kit.request("GET", "/v1/events").bearer_auth(&rls.kit.token);
    let mut events = events.send().await.unwrap();
    for _ in 0..6 {
        rls.codes(&[&[("user", "ada")]]).await;
    }
    let mut text = String::new();
    let received = async {
        while !text.contains("event: refused") || !text.contains("ada") {
            text.push_str(&String::from_utf8_lossy(&events.chunk().await.unwrap().unwrap()));
        }
    };
    soon("an event", received).await;
}
