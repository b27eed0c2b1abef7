//! Permits for calls of upstreams.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate::{Auto, ResourceName, Retry, RetryBudget, Slots, Throttle};
use tidegate_server::ShutdownOutcome;

use crate::kit::codec::{Value, json};
use crate::kit::frozen::{Frozen, advance_until};
use crate::kit::{ApiResponse, Kit, soon};

/// How far the frozen clock advances at a time.
const TENTH: Duration = Duration::from_millis(100);

async fn acquire(kit: &Kit, body: Value) -> ApiResponse {
    kit.post("/v1/upstreams/openai%2Fgpt-4/acquire", body).await
}

#[tokio::test]
async fn permit_is_settled_once_by_its_token() {
    let kit = Kit::new().await;
    let granted = acquire(&kit, json!({"tokens": 500})).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    let expires_in = granted.body["expires_in"].as_f64().unwrap();
    assert!((200.0..300.0).contains(&expires_in), "what is left of the lease: {expires_in}");
    let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
    let settle = json!({"status": 200, "headers": {"x-ratelimit-remaining-requests": "5"}, "tokens": 420});
    kit.ask_as(&kit.other, "POST", &path, Some(settle.clone())).await.is_problem(403, "not-your-permit", "");
    assert_eq!(kit.post(&path, settle.clone()).await.status, 200);
    kit.post(&path, settle).await.is_problem(404, "no-permit", "");
    let listed = kit.get("/v1/upstreams").await;
    let upstream = &listed.body["upstreams"][0];
    assert_eq!((upstream["name"].as_str(), upstream["admitted"].as_u64()), (Some("openai/gpt-4"), Some(1)));
    assert_eq!(upstream["in_flight"], 0, "{}", listed.text);
}

#[tokio::test]
async fn metrics_show_upstreams() {
    let kit = Kit::new().await;
    for status in [200, 429] {
        let granted = acquire(&kit, json!({"within": 30})).await;
        let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
        assert_eq!(kit.post(&path, json!({"status": status})).await.status, 200);
    }
    assert_eq!(kit.post("/v1/upstreams/other/acquire", json!({})).await.status, 200);
    for number in 0..70 {
        let path = format!("/v1/upstreams/u{number}/acquire");
        assert_eq!(kit.post(&path, json!({})).await.status, 200);
    }
    let text = kit.get("/metrics").await.text;
    for line in [
        "tidegate_upstream_outcomes_total{upstream=\"openai/gpt-4\",outcome=\"success\"} 1",
        "tidegate_upstream_outcomes_total{upstream=\"openai/gpt-4\",outcome=\"throttled\"} 1",
        "tidegate_upstream_in_flight{upstream=\"openai/gpt-4\"} 0",
        "tidegate_upstream_waiting{upstream=\"openai/gpt-4\"} 0",
        "tidegate_upstream_in_flight{upstream=\"other\"} 8",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line} in {text}");
    }
    assert_eq!(text.lines().filter(|line| line.starts_with("tidegate_upstream_rate{")).count(), 65);
}

#[tokio::test]
async fn undeclared_upstream_is_refused() {
    let limits = Throttle::host().auto_within(Auto::default().rate_max(3.0)).limits().unwrap();
    let kit =
        Kit::with_upstreams(BTreeMap::from([(ResourceName::new("openai/gpt-4").unwrap(), limits)])).await;
    let refused = kit.post("/v1/upstreams/other/acquire", json!({})).await;
    refused.is_problem(404, "no-upstream", "");
    assert!(refused.text.contains("declares: openai/gpt-4"), "{}", refused.text);
    assert_eq!(acquire(&kit, json!({})).await.status, 200);
    let listed = kit.get("/v1/upstreams").await;
    assert_eq!(listed.body["upstreams"][0]["reason"], "probing", "{}", listed.text);
    assert_eq!(listed.body["upstreams"][0]["rate"], 3.0, "{}", listed.text);

    let refused =
        Kit::with_upstreams(BTreeMap::new()).await.post("/v1/upstreams/other/acquire", json!({})).await;
    assert!(refused.text.contains("declares: there are none"), "{}", refused.text);
}

#[tokio::test]
async fn failing_upstream_is_not_called_for_a_while() {
    let kit = Kit::new().await;
    for _ in 0..5 {
        let granted = acquire(&kit, json!({"within": 30})).await;
        assert_eq!(granted.status, 200, "{}", granted.text);
        let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
        assert_eq!(kit.post(&path, json!({"status": 500})).await.status, 200);
    }
    let refused = acquire(&kit, json!({"within": 1})).await;
    refused.is_problem(503, "circuit-open", "");
    assert!(refused.text.contains("the circuit is open"), "{}", refused.text);
    assert!(refused.body["retry_after"].as_f64().is_some_and(|seconds| seconds > 1.0), "{}", refused.text);
    assert!(!refused.header("retry-after").is_empty());
    assert_eq!(kit.post("/v1/upstreams/other/acquire", json!({})).await.status, 200, "others go on");
}

/// It was refused at once, however long the call would have waited.
#[tokio::test]
async fn permit_waits_for_a_circuit_to_close() {
    let _frozen = Frozen::new();
    let kit = Kit::new().await;
    for _ in 0..5 {
        let granted = advance_until(TENTH, acquire(&kit, json!({"within": 30}))).await.0;
        let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
        assert_eq!(kit.post(&path, json!({"status": 500})).await.status, 200);
    }
    let (granted, waited) = advance_until(TENTH, acquire(&kit, json!({"within": 60}))).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    assert!(waited > Duration::from_secs(1), "the circuit was open: {waited:?}");
}

#[tokio::test]
async fn limits_of_a_subject_are_drawn_and_settled() {
    let kit = Kit::new().await;
    let subject =
        json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1, "tpm": 800}, "within": 30});
    let granted = acquire(&kit, subject.clone()).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    let mut at_once = subject.clone();
    at_once["within"] = json!(0);
    acquire(&kit, at_once).await.is_problem(429, "limited", "");
    let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
    assert_eq!(kit.post(&path, json!({"status": 200, "actual": {"tpm": 100}})).await.status, 200);
    let left = kit.limiter.balances(("acme", "gpt-4")).await.unwrap();
    assert_eq!((left[0].balance.available, left[1].balance.available), (9, 900));
    acquire(&kit, json!({"entity": "acme"})).await.is_problem(422, "invalid", "entity");

    let granted = acquire(&kit, subject).await;
    let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
    let unknown = kit.post(&path, json!({"status": 200, "actual": {"images": 1}})).await;
    assert_eq!(unknown.status, 422, "{}", unknown.text);
    let left = kit.limiter.balances(("acme", "gpt-4")).await.unwrap();
    assert_eq!(left[1].balance.available, 100, "settled at the estimate");
}

/// Settles a permit that was acquired as this attempt. Returns the advice on a retry.
async fn settle_attempt(kit: &Kit, attempt: u32, report: Value) -> Value {
    let granted = acquire(kit, json!({"within": 60, "attempt": attempt})).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    let permit = granted.body["permit"].as_str().expect("a permit");
    kit.post(&format!("/v1/permits/{permit}/settle"), report).await.body["retry"].clone()
}

#[tokio::test]
async fn settled_call_says_whether_it_may_be_repeated() {
    let retry = Retry::attempts(3).budget(RetryBudget::new(0.0, 2, Duration::from_hours(1)));
    let limits = Throttle::builder().retry(retry).limits().unwrap();
    let kit =
        Kit::with_upstreams(BTreeMap::from([(ResourceName::new("openai/gpt-4").unwrap(), limits)])).await;
    for final_status in [200, 404, 401] {
        assert_eq!(settle_attempt(&kit, 0, json!({"status": final_status})).await, json!({"allowed": false}));
    }
    let lost = settle_attempt(&kit, 0, json!({})).await;
    assert_eq!(lost["allowed"], true, "{lost}");
    assert!(lost["after"].as_f64().is_some_and(|seconds| seconds <= 0.4), "{lost}");
    // A report that is an error takes nothing from the budget: its caller gets no advice.
    for _ in 0..2 {
        let subject = json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}});
        let granted = acquire(&kit, subject).await;
        let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().expect("a permit"));
        let report = json!({"status": 500, "actual": {"images": 1}});
        assert_eq!(kit.post(&path, report).await.status, 422);
    }
    let spent = settle_attempt(&kit, 2, json!({"status": 500})).await;
    assert_eq!(spent["allowed"], false, "the third attempt was the last: {spent}");
    let hinted = settle_attempt(&kit, 1, json!({"status": 429, "headers": {"retry-after": "0.5"}})).await;
    assert_eq!(hinted["allowed"], true, "{hinted}");
    let beyond = settle_attempt(&kit, 0, json!({"status": 500})).await;
    assert_eq!(beyond["allowed"], false, "the budget has two: {beyond}");
}

#[tokio::test]
async fn body_of_a_rejection_names_what_is_cut() {
    let body = r#"{"error": {"message": "Rate limit reached on tokens per min (TPM)"}}"#;
    for (report, quota) in [(json!({"status": 429, "body": body}), false), (json!({"status": 429}), true)] {
        let kit = Kit::new().await;
        let granted = acquire(&kit, json!({"tokens": 500})).await;
        let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
        assert_eq!(kit.post(&path, report).await.status, 200);
        let listed = kit.get("/v1/upstreams").await;
        assert_eq!(listed.body["upstreams"][0]["quota"].is_number(), quota, "of requests: {}", listed.text);
    }
}

/// A permit that expires counts as ignored: its place returns, and its lease ends by its own deadline.
#[tokio::test]
async fn expired_permit_cannot_be_settled() {
    let mut bounds = tidegate_server::Bounds::default();
    bounds.sweep_every = Duration::from_millis(1);
    let kit = Kit::with(bounds).await;
    let granted = acquire(&kit, json!({"deadline": 0.001})).await;
    assert_eq!(granted.status, 200, "{}", granted.text);
    loop {
        let listed = kit.get("/v1/upstreams").await;
        if listed.body["upstreams"][0]["in_flight"] == 0 {
            break;
        }
        tokio::task::yield_now().await;
    }
    let path = format!("/v1/permits/{}/settle", granted.body["permit"].as_str().unwrap());
    kit.post(&path, json!({"status": 200})).await.is_problem(404, "no-permit", "");
}

#[tokio::test]
async fn stop_does_not_wait_for_open_permits() {
    let kit = Kit::new().await;
    let subject = json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}});
    assert_eq!(acquire(&kit, subject).await.status, 200);
    let limiter = kit.limiter.clone();
    kit.stopper.stop();
    assert_eq!(soon("the end", kit.stopped()).await, ShutdownOutcome::Drained);
    let left = limiter.balances(("acme", "gpt-4")).await.unwrap();
    assert_eq!(left[0].balance.available, 9, "the call may have been made");
}

#[tokio::test]
async fn revocation_ends_waiting_permits() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().unwrap();
    let kit =
        Kit::with_upstreams(BTreeMap::from([(ResourceName::new("openai/gpt-4").unwrap(), limits)])).await;
    let spent = json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 10}});
    assert_eq!(kit.post("/v1/spend", spent).await.status, 204);
    assert_eq!(acquire(&kit, json!({})).await.status, 200);
    // One waits for a limit, and one for the upstream.
    let subject = json!({"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1}, "within": 60});
    let revoked = async {
        while kit.limiter.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        while kit.get("/v1/upstreams").await.body["upstreams"][0]["waiting"] != 1 {}
        assert_eq!(kit.ask_as(&kit.other, "DELETE", "/v1/tokens/all", None).await.status, 200);
    };
    let (limit, upstream, ()) = soon("the waits", async {
        tokio::join!(acquire(&kit, subject), acquire(&kit, json!({"within": 60})), revoked)
    })
    .await;
    limit.is_problem(401, "bad-token", "");
    upstream.is_problem(401, "bad-token", "");
}
