//! Tests of request ids: a retry returns the same lease and is charged once, on any server.

use std::sync::Arc;

use tidegate::store::ManualWall;
use tidegate::{Limiter, Memory, Store};
use tidegate_server::Bounds;

use crate::kit::codec::{Value, json};
use crate::kit::{Kit, NOW};

const ID: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

fn ask(units: u64) -> Value {
    json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": units}, "id": ID})
}

/// Returns the available tokens of 1,000.
async fn left(kit: &Kit) -> i64 {
    let balances = kit.get("/v1/balances?entity=acme&resource=gpt-4").await;
    let lines = balances.body["limits"].as_array().expect("the limits");
    lines.iter().find(|line| line["limit"] == "tpm").expect("tokens")["available"].as_i64().expect("a number")
}

#[tokio::test]
async fn repeated_acquire_returns_same_lease() {
    let kit = Kit::new().await;
    let first = kit.post("/v1/acquire", ask(100)).await;
    assert_eq!((first.status, &first.body["is_repeat"]), (200, &json!(false)), "{}", first.text);
    let again = kit.post("/v1/acquire", ask(100)).await;
    assert_eq!((again.status, &again.body["is_repeat"]), (200, &json!(true)), "{}", again.text);
    assert_eq!((&again.body["lease"], left(&kit).await), (&first.body["lease"], 900));
    assert_eq!(again.header("ratelimit"), first.header("ratelimit"));
    kit.clock.advance(std::time::Duration::from_secs(100));
    assert_eq!(kit.post("/v1/acquire", ask(100)).await.body["expires_in"], 200);

    kit.post("/v1/acquire", ask(101)).await.is_problem(409, "id-reused", "id");
    kit.post("/v1/spend", ask(100)).await.is_problem(409, "id-reused", "id");
    let other = kit.ask_as(&kit.other, "POST", "/v1/acquire", Some(ask(100))).await;
    assert_eq!((other.status, &other.body["is_repeat"]), (200, &json!(false)), "an id is its token's own");
    assert_ne!(other.body["lease"], first.body["lease"]);

    let lease = format!("/v1/leases/{}/settle", first.body["lease"].as_str().unwrap());
    assert_eq!(kit.post(&lease, json!({"step": 1, "actual": {"tpm": 40}})).await.status, 200);
    kit.post("/v1/acquire", ask(100)).await.is_problem(410, "lease-ended", "");
}

#[tokio::test]
async fn repeated_spend_is_charged_once() {
    let kit = Kit::new().await;
    for _ in 0..3 {
        assert_eq!(kit.post("/v1/spend", ask(100)).await.status, 204);
    }
    assert_eq!(left(&kit).await, 900);
    kit.post("/v1/spend", ask(99)).await.is_problem(409, "id-reused", "id");
    // A refused request can be retried with the same id.
    let large = |units| json!({"entity": "globex", "resource": "gpt-4", "cost": {"tpm": units}, "id": ID});
    assert_eq!(
        kit.post("/v1/spend", json!({"entity": "globex", "resource": "gpt-4", "cost": {"tpm": 1_000}}))
            .await
            .status,
        204
    );
    kit.post("/v1/spend", large(500)).await.is_problem(429, "limited", "");
    kit.clock.advance(std::time::Duration::from_mins(1));
    assert_eq!(kit.post("/v1/spend", large(500)).await.status, 204);
}

#[tokio::test]
async fn batch_requests_have_independent_ids() {
    let kit = Kit::new().await;
    let batch = json!({"requests": [ask(100), ask(100), ask(7), {"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 1}}]});
    let done = kit.post("/v1/acquire/batch", batch).await;
    let results = &done.body["results"];
    assert_eq!(results[0]["granted"]["lease"], results[1]["granted"]["lease"], "{}", done.text);
    assert_eq!(results[1]["granted"]["is_repeat"], true);
    assert_eq!(results[2]["refused"]["type"], "/problems/id-reused");
    assert_eq!((&results[3]["granted"]["is_repeat"], left(&kit).await), (&json!(false), 899));
}

#[tokio::test]
async fn request_id_length_is_bounded() {
    let kit = Kit::new().await;
    for bad in ["short", &"x".repeat(65), "0123456789 abcdef", ""] {
        let mut ask = ask(1);
        ask["id"] = json!(bad);
        kit.post("/v1/acquire", ask.clone()).await.is_problem(422, "invalid", "id");
        kit.post("/v1/spend", ask).await.is_problem(422, "invalid", "id");
    }
}

#[tokio::test]
async fn acquire_can_be_retried_on_other_server() {
    let clock = ManualWall::new(NOW);
    let store: Arc<dyn Store> = Arc::new(Memory::with_clock(clock.clone()));
    let first = Kit::over(Limiter::over(Arc::clone(&store)).build().unwrap(), clock, Bounds::default()).await;
    let lease = first.post("/v1/acquire", ask(100)).await.body["lease"].clone();
    let second = first.second_server(Limiter::over(store).build().unwrap()).await;
    first.stopper.stop();
    let again = second.post("/v1/acquire", ask(100)).await;
    assert_eq!((&again.body["lease"], &again.body["is_repeat"]), (&lease, &json!(true)), "{}", again.text);
    assert_eq!(left(&second).await, 900);
}
