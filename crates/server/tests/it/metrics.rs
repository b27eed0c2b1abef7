//! Tests that requests over HTTP are counted in the metrics.

use std::time::Duration;

use tidegate::store::{AnchoredWall, ManualWall, WallClock as _};
use tidegate::{Limiter, Memory};

use crate::kit::codec::json;
use crate::kit::{Kit, NOW, bounds, soon};

#[tokio::test]
async fn requests_are_counted_in_metrics() {
    let kit = Kit::new().await;
    let ask = |tpm: u64| json!({"entity": "acme", "resource": "gpt", "cost": {"tpm": tpm}});
    let mut leases = Vec::new();
    // Available of 1,000: 500, then 200 (a fifth), then 100.
    for tpm in [500, 300, 100] {
        let granted = kit.post("/v1/acquire", ask(tpm)).await;
        assert_eq!(granted.status, 200, "{}", granted.text);
        leases.push(granted.body["lease"].as_str().unwrap().to_owned());
    }
    assert_eq!(kit.post("/v1/spend", ask(50)).await.status, 204);
    assert_eq!(kit.post("/v1/spend", ask(60)).await.status, 429);
    assert_eq!(kit.post("/v1/acquire", ask(2_000)).await.status, 422, "more than the burst");
    let step = async |lease: usize, verb: &str, body| {
        let done = kit.post(&format!("/v1/leases/{}/{verb}", leases[lease]), body).await;
        assert_eq!(done.status, 200, "{}", done.text);
    };
    step(0, "settle", json!({"step": 1})).await;
    step(0, "settle", json!({"step": 1})).await;
    step(1, "cancel", json!({"step": 1})).await;
    step(2, "renew", json!({"step": 1, "expires_in": 60})).await;
    step(2, "extend", json!({"step": 2, "cost": {"tpm": 1}})).await;
    step(2, "adjust", json!({"step": 3, "changes": {"tpm": 1}})).await;
    let text = kit.get("/metrics").await.text;
    for line in [
        "tidegate_leases_granted_total 3",
        "tidegate_leases_open 1",
        "tidegate_leases_ended_total{how=\"settled\"} 1",
        "tidegate_leases_ended_total{how=\"cancelled\"} 1",
        "tidegate_near_limit_total{limit=\"tpm\"} 3",
        "tidegate_refusals_total{limit=\"tpm\"} 2",
        "tidegate_decision_seconds_count{verb=\"acquire\"} 4",
        "tidegate_decision_seconds_count{verb=\"spend\"} 2",
        "tidegate_decision_seconds_count{verb=\"settle\"} 2",
        "tidegate_decision_seconds_count{verb=\"cancel\"} 1",
        "tidegate_decision_seconds_count{verb=\"renew\"} 1",
        "tidegate_decision_seconds_count{verb=\"extend\"} 1",
        "tidegate_decision_seconds_count{verb=\"adjust\"} 1",
        "tidegate_http_requests_under_way 1",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line} in {text}");
    }
    assert!(!text.contains("acme") && !text.contains("gpt"), "metrics contain no names");
}

#[tokio::test]
async fn clock_offset_is_in_status_and_metrics() {
    let clock = ManualWall::new(NOW);
    let wall = clock.clone();
    let store = Memory::with_clock(AnchoredWall::new(move || wall.now()));
    let fast = bounds(|bounds| bounds.sweep_every = Duration::from_millis(1));
    let kit = Kit::over(Limiter::new(store), clock.clone(), fast).await;
    assert!(kit.get("/v1/status").await.body.get("clock_offset").is_none());
    clock.set(NOW - Duration::from_mins(1));
    assert_eq!(kit.get("/v1/status").await.body["clock_offset"], 60.0);
    let shown = async {
        while !kit.get("/metrics").await.text.contains("tidegate_clock_offset_seconds 60\n") {
            tokio::task::yield_now().await;
        }
    };
    soon("the metric", shown).await;
}
