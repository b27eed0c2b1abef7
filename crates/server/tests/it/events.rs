//! Tests of server events and the snapshot.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Response;
use tidegate::store::wrap::{FaultPlan, Faulty};
use tidegate::store::{ManualWall, Tokens};
use tidegate::{Expect, Limiter, Memory, OnUnavailable, Store};
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tidegate_server::{Bounds, ShutdownOutcome};

use crate::kit::codec::{Value, from_str, json};
use crate::kit::{Kit, NOW, bounds, make_token, soon};

/// Reads server-sent events.
struct EventReader {
    response: Response,
    buffer: String,
}

impl EventReader {
    async fn new(kit: &Kit, token: &str) -> Self {
        let response = kit.request("GET", "/v1/events").bearer_auth(token).send().await.expect("an answer");
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { response, buffer: String::new() }
    }

    /// Returns the name and data of the next event, or `None` at the end.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some(end) = self.buffer.find("\n\n") {
                let event: String = self.buffer.drain(..end + 2).collect();
                let line = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
                let data = line("data: ").and_then(|text| from_str(text).ok());
                match line("event: ").map(str::to_owned).zip(data) {
                    Some(event) => return Some(event),
                    // A keep-alive comment.
                    None => continue,
                }
            }
            let chunk = soon("the next event", self.response.chunk()).await.ok()??;
            self.buffer.push_str(std::str::from_utf8(&chunk).expect("text"));
        }
    }

    async fn expect_event(&mut self, name: &str) -> Value {
        loop {
            let (received, event) = self.next().await.unwrap_or_else(|| panic!("the end instead of {name}"));
            if received == name {
                assert_eq!(event["type"], name);
                return event;
            }
        }
    }
}

fn ask(units: u64) -> Value {
    json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": units}})
}

#[tokio::test]
async fn refusals_changes_and_expiries_are_broadcast() {
    let kit = Kit::with(bounds(|bounds| bounds.sweep_every = Duration::from_millis(1))).await;
    let mut reader = EventReader::new(&kit, &kit.token).await;
    assert_eq!(kit.post("/v1/acquire", ask(900)).await.status, 200);
    kit.post("/v1/acquire", ask(500)).await.is_problem(429, "limited", "");
    let refused = reader.expect_event("refused").await;
    assert_eq!(
        refused,
        json!({"type": "refused", "entity": "acme", "resource": "gpt-4", "of": "acme", "limit": "tpm", "retry_after": 24})
    );
    kit.post("/v1/spend", ask(500)).await.is_problem(429, "limited", "");
    reader.expect_event("refused").await;

    let policy = json!({"policy": {"limits": ["rpm:5/min"]}});
    assert_eq!(kit.ask("PUT", "/v1/policy?entity=acme", Some(policy)).await.status, 200);
    let changed = reader.expect_event("changed").await;
    assert_eq!(changed["actor"], "token:all");
    let made = kit.post("/v1/tokens", json!({"id": "new", "scopes": "read"})).await;
    let changed = reader.expect_event("changed").await;
    assert_eq!(changed, json!({"type": "changed", "version": made.body["version"], "actor": "token:all"}));

    kit.clock.advance(Duration::from_mins(5));
    assert_eq!(
        reader.expect_event("leases_expired").await,
        json!({"type": "leases_expired", "settled": 1, "returned": 0})
    );
    let snapshot = kit.get("/v1/snapshot").await.body;
    assert_eq!((&snapshot["expired_settled"], &snapshot["refused"]), (&json!(1), &json!(2)));
}

#[tokio::test]
async fn store_outage_is_broadcast() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).on_unavailable(OnUnavailable::Allow).build().unwrap();
    let kit = Kit::over(limiter, clock, Bounds::default()).await;
    assert_eq!(kit.post("/v1/acquire", ask(1)).await.status, 200);
    let mut reader = EventReader::new(&kit, &kit.token).await;
    store.go_away();
    for _ in 0..10 {
        assert_eq!(kit.post("/v1/acquire", ask(1)).await.body["degraded"], "allowed");
    }
    let degraded = reader.expect_event("degraded").await;
    assert_eq!(degraded, json!({"type": "degraded", "entity": "acme", "resource": "gpt-4"}), "and no lease");
    assert!(reader.expect_event("store_away").await["span"].as_f64().unwrap() > 0.0);
    // The circuit is probed periodically, and stays open until a probe succeeds.
    let reported = async {
        loop {
            let snapshot = kit.get("/v1/snapshot").await.body;
            if snapshot["store_away"].as_f64().is_some_and(|span| span > 0.0) {
                break snapshot;
            }
        }
    };
    assert_eq!(soon("a snapshot that says so", reported).await["degraded"], 10);
}

#[tokio::test]
async fn listeners_are_bounded_and_not_counted_as_requests() {
    let kit = Kit::with(bounds(|bounds| (bounds.listeners_max, bounds.requests_max) = (2, 1))).await;
    let first = EventReader::new(&kit, &kit.token).await;
    let _second = EventReader::new(&kit, &kit.other).await;
    let third = kit.get("/v1/events").await;
    third.is_problem(503, "many-listeners", "");
    assert_eq!(third.header("retry-after"), "5");
    let snapshot = kit.get("/v1/snapshot").await.body;
    assert_eq!((&snapshot["listeners"], &snapshot["listeners_max"]), (&json!(2), &json!(2)));
    assert_eq!((&snapshot["requests"], &snapshot["requests_max"]), (&json!(1), &json!(1)));
    drop(first);
    soon("a free place", async { while kit.get("/v1/snapshot").await.body["listeners"] == 2 {} }).await;
    EventReader::new(&kit, &kit.token).await;
}

/// One token could hold the places of all.
#[tokio::test]
async fn token_leaves_listeners_to_others() {
    let kit = Kit::with(bounds(|bounds| bounds.listeners_max = 4)).await;
    let mut readers = Vec::new();
    for _ in 0..3 {
        readers.push(EventReader::new(&kit, &kit.token).await);
    }
    let fourth = kit.get("/v1/events").await;
    fourth.is_problem(503, "many-listeners", "");
    assert!(fourth.text.contains("listeners of the token `all`: 3 are connected"), "{}", fourth.text);
    readers.push(EventReader::new(&kit, &kit.other).await);
    let full = kit.ask_as(&kit.other, "GET", "/v1/events", None).await;
    assert!(full.text.contains("too many event listeners: 4 are connected"), "{}", full.text);
}

#[tokio::test]
async fn listeners_do_not_delay_shutdown() {
    let kit = Kit::new().await;
    let mut reader = EventReader::new(&kit, &kit.token).await;
    kit.stopper.stop();
    assert_eq!(reader.next().await, Some(("stopping".to_owned(), json!({"type": "stopping"}))));
    assert_eq!(reader.next().await, None);
    assert_eq!(soon("the end", kit.stopped()).await, ShutdownOutcome::Drained);
}

#[tokio::test]
async fn slow_listener_does_not_delay_others() {
    let kit = Kit::new().await;
    let _silent = EventReader::new(&kit, &kit.token).await;
    let mut quick = EventReader::new(&kit, &kit.token).await;
    kit.post("/v1/spend", ask(1_000)).await;
    for _ in 0..1_000 {
        kit.post("/v1/spend", ask(500)).await.is_problem(429, "limited", "");
        quick.expect_event("refused").await;
    }
}

#[tokio::test]
async fn revoked_token_ends_its_event_stream() {
    let kit = Kit::with(bounds(|bounds| bounds.alive_every = Duration::from_millis(1))).await;
    let store = kit.limiter.store();
    let read = make_token(store, "reader", TokenScopes::new([TokenScope::Read]), "default").await;
    let (mut reader, mut other) =
        (EventReader::new(&kit, &read).await, EventReader::new(&kit, &kit.token).await);
    let id = TokenId::new("reader").unwrap();
    Tokens::revoke_token(store, &id, Expect::Any, "test").await.unwrap();
    assert_eq!(reader.next().await, None);
    kit.post("/v1/spend", ask(1_000)).await;
    kit.post("/v1/spend", ask(500)).await.is_problem(429, "limited", "");
    other.expect_event("refused").await;
}

#[tokio::test]
async fn snapshot_reports_server_state() {
    let kit = Kit::new().await;
    assert_eq!(kit.post("/v1/acquire", ask(100)).await.status, 200);
    assert_eq!(kit.post("/v1/spend", ask(100)).await.status, 204);
    kit.clock.advance(Duration::from_secs(7));
    let snapshot = kit.get("/v1/snapshot").await.body;
    let expected = json!({
        "at": "2027-01-15T08:00:07Z", "up_since": "2027-01-15T08:00:00Z", "program": env!("CARGO_PKG_VERSION"),
        "namespace": "default", "is_stopping": false, "granted": 2, "refused": 0, "degraded": 0,
        "expired_settled": 0, "expired_returned": 0, "unsettled": 0, "open_leases": 1, "waiting": 0, "settling": 0,
        "requests": 1, "requests_max": 4096, "busy": 0, "listeners": 0, "listeners_max": 64,
        "cache_entries": 1, "cache_hits": 1, "cache_misses": 1,
    });
    assert_eq!(snapshot, expected);
}
