//! Tests of Envoy's service during store outages, dropped calls, shutdown and panics.

use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::Ok as Under;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tidegate::store::wrap::{FaultPlan, Faulty};
use tidegate::store::{ManualWall, Reply};
use tidegate::{Limiter, Memory, OnUnavailable, Store};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::TokenId;
use tidegate_server::{
    Bounds, LeaseKey, Secret, ServerOptions, ShutdownOutcome, State, StateOptions, StoredToken, TokenCache,
};
use tokio::time::advance;
use tonic::Code;

use crate::kit::codec::{Value, json};
use crate::kit::frozen::{Frozen, settle_down};
use crate::kit::{Kit, NOW, any_port, bounds, soon};
use crate::rls_kit::{Rls, channel, codes, descriptor, request, rules};

fn config() -> Value {
    json!({"rules": [
        {"match": [{"key": "user"}], "entity": "{user}", "resource": "shop"},
        {"match": [{"key": "try"}], "entity": "{try}", "resource": "shop", "shadow": true},
        {"match": [{"key": "use"}], "entity": "{use}", "resource": "shop",
         "cost": {"tokens": 1}, "charge": "after"},
        {"match": [{"key": "job"}], "entity": "{job}", "resource": "shop",
         "cost": {"tokens": 1}, "charge": "after", "refund_within": "5m"},
    ]})
}

async fn faulty(on_unavailable: OnUnavailable) -> (Arc<Faulty<Memory>>, Rls) {
    let clock = ManualWall::new(NOW);
    let store =
        Arc::new(Faulty::new(Memory::with_clock(clock.clone()), FaultPlan::seeded(1)).expect("a plan"));
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).on_unavailable(on_unavailable).build().expect("a limiter");
    // No sweeps: only the test's requests reach the store.
    let bounds = bounds(|bounds| bounds.sweep_every = Duration::from_hours(1));
    (store, Rls::over(limiter, clock, bounds, config()).await)
}

#[tokio::test]
async fn rls_recovers_after_store_outage() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    assert_eq!(rls.codes(&[&[("user", "ada")], &[("user", "bob")]]).await.0, Under);
    store.go_away();
    let (one, two): (&[_], &[_]) = (&[("user", "ada")], &[("user", "bob")]);
    for descriptors in [&[one][..], &[one, two]] {
        let error = rls.call(request(descriptors)).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert_eq!(error.message(), "the store is unavailable or did not respond in time");
    }
    // A shadow rule does not delay the response.
    assert_eq!(rls.codes(&[&[("try", "x")]]).await.0, Under);
    store.come_back();
    let recovered = async {
        while rls.call(request(&[one])).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon("the recovery", recovered).await;
}

#[tokio::test]
async fn rls_allows_during_outage_if_policy_says_so() {
    let (store, rls) = faulty(OnUnavailable::Allow).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    store.go_away();
    let passed = rls.call(request(&[&[("user", "ada")]])).await.unwrap();
    assert_eq!(codes(&passed), (Under, vec![Under]));
    assert!(passed.statuses[0].current_limit.is_none(), "the limit is unknown");
}

#[tokio::test]
async fn zero_hits_follow_outage_policy() {
    let ask =
        || RateLimitRequest { descriptors: vec![descriptor(&[("user", "ada")], Some(0))], ..request(&[]) };
    let (store, rls) = faulty(OnUnavailable::Allow).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    store.go_away();
    assert_eq!(codes(&rls.call(ask()).await.unwrap()), (Under, vec![Under]));
    let (store, rls) = faulty(OnUnavailable::Block).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    store.go_away();
    assert_eq!(rls.call(ask()).await.unwrap_err().code(), Code::Unavailable);
}

/// A server over a store whose calls take up to 100 ms, with a store deadline of a minute.
async fn slow(bounds: Bounds) -> (Arc<Faulty<Memory>>, Rls) {
    let (clock, plan) =
        (ManualWall::new(NOW), FaultPlan::seeded(1).delays(1_000, Duration::from_millis(100)));
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), plan).expect("a plan"));
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).store_deadline(Duration::from_mins(1)).build().expect("a limiter");
    (store, Rls::over(limiter, clock, bounds, config()).await)
}

#[tokio::test]
async fn shadow_rule_is_evaluated_with_slow_store() {
    let (store, rls) = slow(Bounds::default()).await;
    for _ in 0..8 {
        assert_eq!(rls.codes(&[&[("try", "x")]]).await, (Under, vec![Under]));
    }
    wait_until_left(&store, "x", 0).await;
    let counted = async {
        while rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await != 3 {
            tokio::task::yield_now().await;
        }
    };
    soon("the count", counted).await;
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"unasked\"}").await, 0);
}

#[tokio::test]
async fn excess_shadow_work_is_dropped_and_counted() {
    let (store, rls) = slow(bounds(|bounds| bounds.requests_max = 1)).await;
    let (tries, unasked): (&[_], _) = (&[("try", "x")], "tidegate_rls_descriptors_total{kind=\"unasked\"}");
    assert_eq!(rls.codes(&[tries]).await.0, Under);
    wait_until_left(&store, "x", 4).await;
    store.hang();
    // Waiting for the store would exceed the request timeout.
    assert_eq!(rls.codes(&[tries]).await, (Under, vec![Under]));
    assert_eq!(rls.counted(unasked).await, 0, "it is still running");
    assert_eq!(rls.codes(&[tries]).await, (Under, vec![Under]));
    assert_eq!(rls.counted(unasked).await, 1);
}

#[tokio::test]
async fn hanging_shadow_rule_does_not_delay_response() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    let (ada, tries): (&[_], &[_]) = (&[("user", "ada")], &[("try", "x")]);
    assert_eq!(rls.codes(&[ada, tries]).await.0, Under);
    store.hang_after(1);
    assert_eq!(rls.codes(&[ada, tries]).await, (Under, vec![Under, Under]));
    store.come_back();
    // The store's deadline passes then, not the grace period.
    let counted = async {
        while rls.counted("tidegate_rls_descriptors_total{kind=\"unasked\"}").await != 1 {
            tokio::task::yield_now().await;
        }
    };
    soon("the count", counted).await;
}

/// Returns the available requests of an entity, read from the store directly.
fn left(store: &Faulty<Memory>, entity: &str) -> i64 {
    left_of(store, entity)[0]
}

/// Returns the available requests and tokens of an entity, read from the store directly.
fn left_of(store: &Faulty<Memory>, entity: &str) -> [i64; 2] {
    let direct = Limiter::new(store.inner().clone());
    let lines = direct.balances((entity, "shop")).now_or_never().expect("at once").expect("it answers");
    [0, 1].map(|line: usize| lines[line].balance.available)
}

/// Reports this many tokens.
fn reports(entries: &[(&str, &str, u64)]) -> RateLimitRequest {
    let descriptors = entries.iter().map(|(key, value, hits)| descriptor(&[(key, value)], Some(*hits)));
    RateLimitRequest { descriptors: descriptors.collect(), ..request(&[]) }
}

async fn wait_for_tokens(store: &Faulty<Memory>, entity: &str, expected: i64) {
    let come = async {
        while left_of(store, entity)[1] != expected {
            tokio::task::yield_now().await;
        }
    };
    soon("the report", come).await;
}

/// The usage of the tokens of an entity in the ledger.
async fn used(rls: &Rls, entity: &str) -> u64 {
    let found = rls.kit.get(&format!("/v1/usage/summary?entity={entity}")).await;
    found.body["limits"]["tokens"]["units"].as_u64().unwrap_or(0)
}

/// Two round trips had to fit into the caller's timeout, and an outage lost the report.
#[tokio::test]
async fn reports_survive_a_store_outage() {
    for (behaviour, is_cached) in
        [(OnUnavailable::Block, true), (OnUnavailable::Allow, true), (OnUnavailable::Block, false)]
    {
        for outage in [Faulty::go_away, Faulty::hang] {
            let (store, rls) = faulty(behaviour).await;
            let mut expected = 100;
            if is_cached {
                assert_eq!(codes(&rls.call(reports(&[("use", "gpt", 10)])).await.unwrap()).0, Under);
                wait_for_tokens(&store, "gpt", 90).await;
                expected = 90;
            } else {
                assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under, "the token is cached");
            }
            outage(&store);
            // The response does not wait for the store.
            let both = rls.call(reports(&[("use", "gpt", 30), ("job", "gpt", 100)])).await.unwrap();
            assert_eq!(codes(&both), (Under, vec![Under, Under]));
            assert_eq!(left_of(&store, "gpt")[1], expected);
            store.come_back();
            wait_for_tokens(&store, "gpt", expected - 130).await;
            rls.kit.clock.advance(Duration::from_mins(6));
            while rls.kit.limiter.store().sweep(100).await.unwrap().settled > 0 {}
            let recorded =
                async { while used(&rls, "gpt").await != 230 - u64::try_from(expected).unwrap() {} };
            soon("the ledger", recorded).await;
            assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"lost\"}").await, 0);
        }
    }
}

/// The first error dropped all later reports of the request.
#[tokio::test]
async fn invalid_report_leaves_others() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    let mut both = reports(&[("use", "gpt", 1), ("use", "gpt", 30)]);
    both.descriptors[0].is_negative_hits = true;
    let error = rls.call(both).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
    wait_for_tokens(&store, "gpt", 70).await;
}

#[tokio::test]
async fn report_that_cannot_be_recorded_is_counted() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    store.go_away();
    assert_eq!(codes(&rls.call(reports(&[("use", "gpt", 30)])).await.unwrap()).0, Under);
    rls.kit.limiter.close();
    let counted = async {
        while rls.counted("tidegate_rls_descriptors_total{kind=\"lost\"}").await != 1 {
            tokio::task::yield_now().await;
        }
    };
    soon("the count", counted).await;
}

/// Waits until this many are available.
async fn wait_until_left(store: &Faulty<Memory>, entity: &str, expected: i64) {
    let come = async {
        while left(store, entity) != expected {
            tokio::task::yield_now().await;
        }
    };
    soon("the balance", come).await;
}

#[tokio::test]
async fn outage_between_descriptors_leaves_none_drawn() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    // The limits of both are cached.
    assert_eq!(rls.codes(&[&[("user", "ada")], &[("user", "bob")]]).await.0, Under);
    store.go_away_after(1);
    // The order of the descriptors does not matter.
    let error = rls.call(request(&[&[("user", "bob")], &[("user", "ada")]])).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert_eq!((left(&store, "ada"), left(&store, "bob")), (3, 4), "the first one was drawn");
    store.come_back();
    wait_until_left(&store, "ada", 4).await;
}

#[tokio::test]
async fn dropped_call_returns_its_draws() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    assert_eq!(rls.codes(&[&[("user", "ada")], &[("user", "bob")]]).await.0, Under);
    store.hang_after(1);
    // The call waits for the store while time is paused.
    let frozen = Frozen::new();
    tokio::select! {
        answer = rls.call(request(&[&[("user", "ada")], &[("user", "bob")]])) => panic!("{answer:?}"),
        () = wait_until_left(&store, "ada", 3) => {}
    }
    drop(frozen);
    tokio::time::resume();
    store.come_back();
    wait_until_left(&store, "ada", 4).await;
    assert_eq!(left(&store, "bob"), 4);
    let answered = async {
        while rls.call(request(&[&[("user", "bob")]])).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon("the recovery", answered).await;
}

#[tokio::test]
async fn stopping_server_answers_received_calls() {
    let rls = Rls::new(config()).await;
    // The server waits for its last calls while time is paused.
    let _frozen = Frozen::new();
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    let calls = (0..20).map(|_| rls.call(request(&[&[("user", "ada")]])));
    let mut calls: FuturesUnordered<_> = calls.collect();
    assert!(calls.next().await.unwrap().is_ok());
    rls.kit.stopper.stop();
    while let Some(answer) = calls.next().await {
        // A call that did not reach the server fails with a connection error: the server refuses none.
        if let Err(error) = answer {
            assert!(std::error::Error::source(&error).is_some(), "{error}");
        }
    }
    drop(calls);
    // Every call is answered: let the grace period pass.
    settle_down().await;
    advance(Duration::from_secs(1)).await;
    assert_eq!(soon("the end", rls.kit.stopped()).await, ShutdownOutcome::Drained);
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
    let options = StateOptions {
        token_cache: Arc::new(PanickingTokenCache),
        namespace: Namespace::new("default").unwrap(),
        lease_key: LeaseKey::random(),
        bounds: Bounds::default(),
        clock: Arc::new(ManualWall::new(NOW)),
        upstreams: None,
    };
    let state = State::with(Limiter::new(Memory::new()), options);
    let listen = ServerOptions::new(any_port()).envoy(any_port(), rules(config()));
    let token = Secret::generate(&TokenId::new("ci").unwrap()).reveal().to_owned();
    let kit = Kit::serving_at(&listen, state, (token, String::new())).await;
    let channel = channel(&kit).await;
    let rls = Rls { kit, channel };
    for _ in 0..2 {
        let error = rls.call(request(&[&[("user", "ada")]])).await.unwrap_err();
        assert_eq!(error.code(), Code::Internal);
        assert!(!error.message().contains("1234"), "{error}");
    }
}
