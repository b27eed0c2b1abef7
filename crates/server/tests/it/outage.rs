//! Tests of store outages, restarts and two servers over one store.

use std::sync::Arc;
use std::time::Duration;

use tidegate::store::wrap::{FaultPlan, Faulty};
use tidegate::store::{ManualWall, Reply};
use tidegate::{LimitError, Limiter, Memory, OnUnavailable, Store};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::TokenId;
use tidegate_server::{
    Bounds, LeaseKey, Secret, ShutdownOutcome, State, StateOptions, StoredToken, TokenCache,
};

use crate::kit::codec::json;
use crate::kit::{Kit, NOW, bounds, send, soon};

#[tokio::test]
async fn store_outage_returns_retry_after_without_details() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let kit = Kit::over(Limiter::over(shared).build().unwrap(), clock, Bounds::default()).await;
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 1}});
    assert_eq!(kit.post("/v1/acquire", ask.clone()).await.status, 200);
    store.go_away();
    let away = kit.post("/v1/acquire", ask.clone()).await;
    away.is_problem(503, "store-away", "");
    assert!(!away.header("retry-after").is_empty());
    assert_eq!(away.body["detail"], "the store is unavailable or did not respond in time");
    let ready = send(kit.request("GET", "/health/ready")).await;
    ready.is_problem(503, "store-away", "");
    assert_eq!(send(kit.request("GET", "/health/live")).await.status, 204);
    store.come_back();
    let recovered = async {
        while kit.post("/v1/acquire", ask.clone()).await.status != 200 {
            tokio::task::yield_now().await;
        }
    };
    soon("the recovery", recovered).await;
}

#[tokio::test]
async fn busy_store_is_503_with_retry_after() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    // The engine is available: its outage policy does not apply.
    let limiter = Limiter::over(shared).on_unavailable(OnUnavailable::Allow).build().unwrap();
    let kit = Kit::over(limiter.clone(), clock, Bounds::default()).await;
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 1}});
    assert_eq!(kit.post("/v1/acquire", ask.clone()).await.status, 200);
    store.fill_queue();
    let error = limiter.try_acquire(("acme", "gpt-4"), [("tpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Busy { retry_after: Some(_), .. }), "{error}");
    for _ in 0..9 {
        let busy = kit.post("/v1/acquire", ask.clone()).await;
        busy.is_problem(503, "busy", "");
        assert_eq!(busy.header("retry-after"), "1", "in whole seconds");
    }
    store.come_back();
    assert_eq!(kit.post("/v1/acquire", ask).await.status, 200, "the circuit stays closed");
}

#[tokio::test]
async fn outage_policy_grants_degraded_leases() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).on_unavailable(OnUnavailable::Allow).build().unwrap();
    let kit = Kit::over(limiter, clock, Bounds::default()).await;
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 1}});
    assert!(kit.post("/v1/acquire", ask.clone()).await.body["degraded"].is_null());
    store.go_away();
    let degraded = kit.post("/v1/acquire", ask).await;
    assert_eq!((degraded.status, &degraded.body["degraded"]), (200, &json!("allowed")), "{}", degraded.text);
}

#[tokio::test]
async fn hanging_sweep_does_not_block_next_sweep() {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).unwrap());
    let shared: Arc<dyn Store> = store.clone();
    let often = bounds(|bounds| {
        (bounds.sweep_every, bounds.report_time) = (Duration::from_millis(1), Duration::from_millis(1));
    });
    let kit = Kit::over(Limiter::over(shared).build().unwrap(), clock, often).await;
    // The first sweep at startup hangs.
    store.hang();
    assert_eq!(send(kit.request("GET", "/health/live")).await.status, 204);
    store.come_back();
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 1}, "deadline": 5});
    assert_eq!(kit.post("/v1/acquire", ask).await.status, 200);
    kit.clock.advance(Duration::from_secs(6));
    let ended = async {
        while kit.get("/v1/snapshot").await.body["expired_settled"] != 1 {
            tokio::task::yield_now().await;
        }
    };
    soon("a sweep", ended).await;
}

/// A token cache that panics.
#[derive(Debug)]
struct PanickingTokenCache;

impl TokenCache for PanickingTokenCache {
    fn get<'a>(&'a self, _: &'a TokenId) -> Reply<'a, Option<Arc<StoredToken>>> {
        panic!("the secret is 1234")
    }
}

#[tokio::test]
async fn panic_returns_internal_error_without_details() {
    let limiter = Limiter::new(Memory::new());
    let options = StateOptions {
        token_cache: Arc::new(PanickingTokenCache),
        namespace: Namespace::new("default").unwrap(),
        lease_key: LeaseKey::random(),
        bounds: Bounds::default(),
        clock: Arc::new(ManualWall::new(NOW)),
        upstreams: None,
    };
    let kit = Kit::serving(State::with(limiter, options), (String::new(), String::new())).await;
    let token = Secret::generate(&TokenId::new("ci").unwrap());
    let answer = kit.ask_as(token.reveal(), "GET", "/v1/policies", None).await;
    answer.is_problem(500, "internal", "");
    assert!(!answer.text.contains("1234"), "{}", answer.text);
    assert_eq!(send(kit.request("GET", "/health/ready")).await.status, 204);
}

#[tokio::test]
async fn lease_continues_on_other_server_over_same_store() {
    let clock = ManualWall::new(NOW);
    let store: Arc<dyn Store> = Arc::new(Memory::with_clock(clock.clone()));
    let first = Kit::over(Limiter::over(Arc::clone(&store)).build().unwrap(), clock, Bounds::default()).await;
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 100}});
    let lease = first.post("/v1/acquire", ask).await.body["lease"].as_str().unwrap().to_owned();
    let second = first.second_server(Limiter::over(store).build().unwrap()).await;
    first.stopper.stop();
    assert_eq!(soon("the end", first.stopped()).await, ShutdownOutcome::Drained);

    let path = format!("/v1/leases/{lease}");
    assert_eq!(second.get(&path).await.body["held"], json!({"tpm": 100}));
    let other = second.ask_as(&second.other, "GET", &path, None).await;
    other.is_problem(403, "not-your-lease", "");
    let settled = second.post(&format!("{path}/settle"), json!({"step": 1, "actual": {"tpm": 40}})).await;
    assert_eq!(settled.status, 200, "{}", settled.text);
    let usage = second.get("/v1/usage/summary?entity=acme").await;
    assert_eq!(usage.body["limits"]["tpm"]["units"], 40, "{}", usage.text);
}
