//! A store that is unavailable, calls that are dropped, a server that stops and one that panics.

use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code::Ok as Under;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tidegate::store::wrap::{Faulty, Plan};
use tidegate::store::{ManualWall, Reply};
use tidegate::{Limiter, Memory, OnUnavailable, Store};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::TokenId;
use tidegate_server::{Bounds, Key, Keyring, LeaseKey, Secret, ServerOptions, State, StateOptions, Stopped};
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
    ]})
}

async fn faulty(on_unavailable: OnUnavailable) -> (Arc<Faulty<Memory>>, Rls) {
    let clock = ManualWall::new(NOW);
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), Plan::seeded(1)).expect("a plan"));
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).on_unavailable(on_unavailable).build().expect("a limiter");
    // What the store is asked is what a test asks of it.
    let bounds = bounds(|bounds| bounds.sweep_every = Duration::from_hours(1));
    (store, Rls::over(limiter, clock, bounds, config()).await)
}

#[tokio::test]
async fn a_store_that_is_away_is_unavailable_and_asked_again_when_it_is_back() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    assert_eq!(rls.codes(&[&[("user", "ada")], &[("user", "bob")]]).await.0, Under);
    store.go_away();
    let (one, two): (&[_], &[_]) = (&[("user", "ada")], &[("user", "bob")]);
    for asked in [&[one][..], &[one, two]] {
        let error = rls.call(request(asked)).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable, "{error}");
        assert_eq!(error.message(), "the store is away, or did not answer in time");
    }
    // A rule that only looks holds nobody up.
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
async fn where_the_policy_says_so_everybody_passes_while_the_store_is_away() {
    let (store, rls) = faulty(OnUnavailable::Allow).await;
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    store.go_away();
    let passed = rls.call(request(&[&[("user", "ada")]])).await.unwrap();
    assert_eq!(codes(&passed), (Under, vec![Under]));
    assert!(passed.statuses[0].current_limit.is_none(), "nobody knows");
}

#[tokio::test]
async fn one_who_only_asks_passes_too_where_the_policy_says_so() {
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

/// A server over a store in which every call takes up to a tenth of a second, and may take a minute.
async fn slow(bounds: Bounds) -> (Arc<Faulty<Memory>>, Rls) {
    let (clock, plan) = (ManualWall::new(NOW), Plan::seeded(1).delays(1_000, Duration::from_millis(100)));
    let store = Arc::new(Faulty::new(Memory::with_clock(clock.clone()), plan).expect("a plan"));
    let shared: Arc<dyn Store> = store.clone();
    let limiter = Limiter::over(shared).store_deadline(Duration::from_mins(1)).build().expect("a limiter");
    (store, Rls::over(limiter, clock, bounds, config()).await)
}

#[tokio::test]
async fn a_rule_that_only_looks_is_asked_though_its_store_is_slow() {
    let (store, rls) = slow(Bounds::default()).await;
    for _ in 0..8 {
        assert_eq!(rls.codes(&[&[("try", "x")]]).await, (Under, vec![Under]));
    }
    comes_to(&store, "x", 0).await;
    let counted = async {
        while rls.counted("tidegate_rls_descriptors_total{kind=\"shadowed\"}").await != 3 {
            tokio::task::yield_now().await;
        }
    };
    soon("the count", counted).await;
    assert_eq!(rls.counted("tidegate_rls_descriptors_total{kind=\"unasked\"}").await, 0);
}

#[tokio::test]
async fn a_rule_that_only_looks_holds_nobody_up_and_what_is_too_much_is_given_up_and_counted() {
    let (store, rls) = slow(bounds(|bounds| bounds.requests_max = 1)).await;
    let (tries, unasked): (&[_], _) = (&[("try", "x")], "tidegate_rls_descriptors_total{kind=\"unasked\"}");
    assert_eq!(rls.codes(&[tries]).await.0, Under);
    comes_to(&store, "x", 4).await;
    store.hang();
    // Whoever waited for the store would wait for longer than a request may take.
    assert_eq!(rls.codes(&[tries]).await, (Under, vec![Under]));
    assert_eq!(rls.counted(unasked).await, 0, "it is still being asked");
    assert_eq!(rls.codes(&[tries]).await, (Under, vec![Under]));
    assert_eq!(rls.counted(unasked).await, 1);
}

#[tokio::test]
async fn a_rule_that_only_looks_and_is_not_answered_holds_nobody_up_and_is_counted() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    let (ada, tries): (&[_], &[_]) = (&[("user", "ada")], &[("try", "x")]);
    assert_eq!(rls.codes(&[ada, tries]).await.0, Under);
    store.hang_after(1);
    assert_eq!(rls.codes(&[ada, tries]).await, (Under, vec![Under, Under]));
    store.come_back();
    // It is the store that is away then, and not the answer's time that is over.
    let counted = async {
        while rls.counted("tidegate_rls_descriptors_total{kind=\"unasked\"}").await != 1 {
            tokio::task::yield_now().await;
        }
    };
    soon("the count", counted).await;
}

/// What is left of somebody's requests, as the store has it, whatever the network is like.
async fn left(store: &Faulty<Memory>, entity: &str) -> i64 {
    let beside = Limiter::new(store.inner().clone());
    beside.balances((entity, "shop")).await.expect("it answers")[0].balance.available
}

/// Waits until so much is left.
async fn comes_to(store: &Faulty<Memory>, entity: &str, expected: i64) {
    let come = async {
        while left(store, entity).await != expected {
            tokio::task::yield_now().await;
        }
    };
    soon("what is left", come).await;
}

#[tokio::test]
async fn a_store_that_goes_away_between_two_descriptors_leaves_neither_drawn() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    // What limits both is known.
    assert_eq!(rls.codes(&[&[("user", "ada")], &[("user", "bob")]]).await.0, Under);
    store.go_away_after(1);
    // In whichever order they are asked.
    let error = rls.call(request(&[&[("user", "bob")], &[("user", "ada")]])).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert_eq!((left(&store, "ada").await, left(&store, "bob").await), (3, 4), "the first one was drawn");
    store.come_back();
    comes_to(&store, "ada", 4).await;
}

#[tokio::test]
async fn a_dropped_call_takes_nothing_from_the_next() {
    let (store, rls) = faulty(OnUnavailable::Block).await;
    assert_eq!(rls.codes(&[&[("user", "ada")], &[("user", "bob")]]).await.0, Under);
    store.hang_after(1);
    // The call waits for the store while time stands still.
    let frozen = Frozen::new();
    tokio::select! {
        answer = rls.call(request(&[&[("user", "ada")], &[("user", "bob")]])) => panic!("{answer:?}"),
        () = comes_to(&store, "ada", 3) => {}
    }
    drop(frozen);
    tokio::time::resume();
    store.come_back();
    comes_to(&store, "ada", 4).await;
    assert_eq!(left(&store, "bob").await, 4);
    let answered = async {
        while rls.call(request(&[&[("user", "bob")]])).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon("the recovery", answered).await;
}

#[tokio::test]
async fn a_stopping_server_answers_calls_that_reach_it() {
    let rls = Rls::new(config()).await;
    // The server waits for its last calls while time stands still.
    let _frozen = Frozen::new();
    assert_eq!(rls.codes(&[&[("user", "ada")]]).await.0, Under);
    let calls = (0..20).map(|_| rls.call(request(&[&[("user", "ada")]])));
    let mut calls: FuturesUnordered<_> = calls.collect();
    assert!(calls.next().await.unwrap().is_ok());
    rls.kit.stopper.stop();
    while let Some(answer) = calls.next().await {
        // A call that did not reach the server fails with an error of the connection: the server refuses none.
        if let Err(error) = answer {
            assert!(std::error::Error::source(&error).is_some(), "{error}");
        }
    }
    drop(calls);
    // Every call is answered: the time for the last ones may pass.
    settle_down().await;
    advance(Duration::from_secs(1)).await;
    assert_eq!(soon("the end", rls.kit.stopped()).await, Stopped::Drained);
}

/// A keyring with a mistake in it.
#[derive(Debug)]
struct Broken;

impl Keyring for Broken {
    fn key<'a>(&'a self, _: &'a TokenId) -> Reply<'a, Option<Arc<Key>>> {
        panic!("the secret is 1234")
    }
}

#[tokio::test]
async fn a_panic_is_an_answer_that_tells_nothing_and_others_are_served() {
    let options = StateOptions {
        keyring: Arc::new(Broken),
        namespace: Namespace::new("default").unwrap(),
        lease_key: LeaseKey::random(),
        bounds: Bounds::default(),
        clock: Arc::new(ManualWall::new(NOW)),
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
