//! Tests of rules that charge afterwards, of refunds, and of limits that requests bring.

use std::time::Duration;

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::{Ok as Under, OverLimit};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use tidegate::{Entity, EntityId, Expect, Subject};
use tonic::Code;

use crate::kit::codec::{Value, json};
use crate::rls_kit::{Rls, codes, descriptor, header, request};

/// Rules that charge afterwards, with refunds, and plain ones.
fn config() -> Value {
    json!({"rules": [
        {"match": [{"key": "model"}], "entity": "{model}", "resource": "shop",
         "cost": {"tokens": 1}, "charge": "after", "refund_within": "5m"},
        {"match": [{"key": "trial"}], "entity": "{trial}", "resource": "shop",
         "cost": {"tokens": 1}, "charge": "after", "shadow": true},
        {"match": [{"key": "plain"}], "entity": "{plain}", "resource": "shop",
         "cost": {"tokens": 1}, "charge": "after"},
        {"match": [{"key": "job"}], "entity": "{job}", "resource": "shop",
         "cost": {"tokens": 10}, "refund_within": "5m"},
        {"match": [{"key": "user"}], "entity": "{user}", "resource": "shop"},
        {"match": [{"key": "own"}], "entity": "{own}", "resource": "shop",
         "cost": {"quota": 1}, "charge": "after", "limits": ["quota:100/min"]},
    ]})
}

fn of(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { descriptors, ..request(&[]) }
}

fn hits(key: &str, value: &str, hits: u64) -> RateLimitDescriptor {
    descriptor(&[(key, value)], Some(hits))
}

fn refund(key: &str, value: &str, count: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..hits(key, value, count) }
}

impl Rls {
    async fn asks(&self, one: RateLimitDescriptor) -> bool {
        codes(&self.call(of(vec![one])).await.expect("an answer")).0 == Under
    }

    async fn used(&self, entity: &str) -> u64 {
        while self.kit.limiter.store().sweep(100).await.expect("swept").settled > 0 {}
        let found = self.kit.get(&format!("/v1/usage/summary?entity={entity}")).await;
        found.body["limits"]["tokens"]["units"].as_u64().unwrap_or(0)
    }
}

#[tokio::test]
async fn check_is_refused_once_reports_used_all_units() {
    let rls = Rls::new(config()).await;
    for key in ["plain", "model"] {
        let first = rls.call(of(vec![hits(key, key, 0)])).await.unwrap();
        assert_eq!((codes(&first).0, first.statuses[0].limit_remaining), (Under, 100));
        assert!(rls.asks(hits(key, key, 99)).await);
        assert!(rls.asks(hits(key, key, 0)).await, "one unit is left");
        assert!(rls.asks(hits(key, key, 1)).await);
        let over = rls.call(of(vec![hits(key, key, 0)])).await.unwrap();
        assert_eq!(codes(&over), (OverLimit, vec![OverLimit]), "none is left");
        assert_eq!(header(&over, "retry-after"), Some("1"));
        // A report is never refused, and never draws for the check.
        assert!(rls.asks(hits(key, key, 60)).await);
        assert_eq!(rls.left(key, "tokens").await, -60);
        rls.kit.clock.advance(Duration::from_secs(36));
        assert_eq!(rls.left(key, "tokens").await, 0);
        assert!(!rls.asks(hits(key, key, 0)).await);
        rls.kit.clock.advance(Duration::from_secs(1));
        assert!(rls.asks(hits(key, key, 0)).await);
    }
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"reported\"}").await, 6);
    rls.kit.clock.advance(Duration::from_mins(6));
    assert_eq!((rls.used("plain").await, rls.used("model").await), (160, 160));
}

#[tokio::test]
async fn report_counts_beside_a_refused_descriptor() {
    let rls = Rls::new(config()).await;
    for _ in 0..5 {
        assert!(rls.asks(hits("user", "ada", 1)).await);
    }
    let both = of(vec![hits("plain", "gpt", 30), hits("user", "ada", 1)]);
    assert_eq!(codes(&rls.call(both).await.unwrap()), (OverLimit, vec![Under, OverLimit]));
    assert_eq!(rls.left("gpt", "tokens").await, 70);
    // A shadow rule reports and checks too, and never refuses.
    assert!(rls.asks(hits("trial", "new", 130)).await);
    assert_eq!(rls.left("new", "tokens").await, -30);
    assert!(rls.asks(hits("trial", "new", 0)).await);
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await, 1);
}

/// The bucket of a rule's own limit is in no policy: a wrong report refused its checks until the debt was paid.
#[tokio::test]
async fn bucket_of_a_rules_limit_is_repaired() {
    let rls = Rls::new(config()).await;
    assert!(rls.asks(hits("own", "gpt", 900)).await);
    assert!(!rls.asks(hits("own", "gpt", 0)).await, "it is in debt");
    let put = json!({"entity": "gpt", "resource": "shop", "limit": "quota:100/min", "units": 1});
    let set = rls.kit.ask("PUT", "/v1/bucket", Some(put)).await;
    assert_eq!((set.status, &set.body["limit"]["available"]), (200, &json!(1)), "{}", set.text);
    assert!(rls.asks(hits("own", "gpt", 0)).await);
}

#[tokio::test]
async fn disabled_entity_is_over_its_limit() {
    let rls = Rls::new(config()).await;
    let ada = Entity::new(EntityId::new("ada").unwrap()).disabled(true);
    rls.kit.limiter.admin("test").put_entity(&ada, Expect::Absent).await.unwrap();
    for one in [hits("user", "ada", 1), hits("plain", "ada", 0)] {
        let over = rls.call(of(vec![one])).await.unwrap();
        assert_eq!(codes(&over).0, OverLimit);
        let why = "the entity `ada` is disabled: requests of ada on shop are refused\n";
        assert_eq!(String::from_utf8(over.raw_body).unwrap(), why);
    }
    // Usage of admitted requests is still reported.
    assert!(rls.asks(hits("plain", "ada", 30)).await);
    assert_eq!(rls.left("ada", "tokens").await, 70);
    let body = json!({"entity": "ada", "resource": "shop", "cost": {"tokens": 1}});
    let refused = rls.kit.post("/v1/acquire", body).await;
    assert_eq!((refused.status, &refused.body["type"]), (403, &"/problems/entity-disabled".into()));
}

#[tokio::test]
async fn refund_returns_at_most_its_charges() {
    let rls = Rls::new(config()).await;
    let subject = Subject::new("build", "shop").unwrap();
    rls.kit.limiter.spend(&subject, [("tokens", 40)]).await.unwrap();
    assert!(rls.asks(hits("job", "build", 3)).await);
    assert!(rls.asks(hits("job", "build", 2)).await);
    assert_eq!(rls.left("build", "tokens").await, 10);
    assert!(rls.asks(refund("job", "build", 4)).await);
    assert_eq!(rls.left("build", "tokens").await, 50);
    // One hit is left of the charges. Other units of the subject are not the rule's to return.
    for _ in 0..2 {
        assert!(rls.asks(refund("job", "build", 9)).await);
        assert_eq!(rls.left("build", "tokens").await, 60);
    }
    // Another subject has no charge.
    rls.kit.limiter.spend(("other", "shop"), [("tokens", 40)]).await.unwrap();
    assert!(rls.asks(refund("job", "other", 2)).await);
    assert_eq!(rls.left("other", "tokens").await, 60);
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"refunded\"}").await, 4);
    // Several descriptors are charged and refunded like one.
    let both = of(vec![hits("job", "one", 2), hits("job", "two", 3)]);
    assert_eq!(codes(&rls.call(both).await.unwrap()).0, Under);
    let back = of(vec![refund("job", "one", 1), refund("job", "two", 1)]);
    assert_eq!(codes(&rls.call(back).await.unwrap()).0, Under);
    assert_eq!((rls.left("one", "tokens").await, rls.left("two", "tokens").await), (90, 80));
    // So are reports.
    assert!(rls.asks(hits("model", "gpt", 120)).await);
    assert!(rls.asks(refund("model", "gpt", 50)).await);
    assert_eq!(rls.left("gpt", "tokens").await, 30);
}

#[tokio::test]
async fn refund_returns_nothing_after_its_time() {
    let rls = Rls::new(config()).await;
    assert!(rls.asks(hits("job", "build", 10)).await);
    assert!(rls.asks(refund("job", "build", 2)).await);
    assert_eq!(rls.used("build").await, 0, "until it can no longer be refunded");
    rls.kit.clock.advance(Duration::from_mins(5));
    assert_eq!(rls.used("build").await, 80);
    assert!(rls.asks(hits("job", "build", 10)).await);
    assert!(rls.asks(refund("job", "build", 18)).await);
    rls.kit.clock.advance(Duration::from_mins(5));
    assert_eq!(rls.used("build").await, 80, "only the second charge is returned");
    let error = rls.call(of(vec![refund("plain", "gpt", 1)])).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::FailedPrecondition, "rule 3: negative hits need `refund_within`")
    );
}

#[tokio::test]
async fn request_limit_never_exceeds_the_rules_own() {
    let rls = Rls::new(config()).await;
    let bring = |user: &str, requests_per_unit, hits| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit: RateLimitUnit::Minute.into() }),
        ..descriptor(&[("user", user)], Some(hits))
    };
    assert!(rls.asks(bring("ada", 2, 2)).await);
    let over = rls.call(of(vec![bring("ada", 2, 1)])).await.unwrap();
    assert_eq!(codes(&over).0, OverLimit);
    let limit = over.statuses[0].current_limit.as_ref().unwrap();
    assert_eq!((&*limit.name, limit.requests_per_unit), ("override", 2));
    assert_eq!(rls.left("ada", "requests").await, 3, "the refused request drew nothing");
    assert!(rls.asks(hits("user", "ada", 1)).await);
    // A larger one does not raise the rule's own limit, nor does another one start anew.
    assert!(rls.asks(bring("ada", 1_000, 2)).await);
    for limit in [1_000, 3] {
        assert!(!rls.asks(bring("ada", limit, 1)).await);
    }
    assert!(!rls.asks(bring("bob", 0, 1)).await);
}
