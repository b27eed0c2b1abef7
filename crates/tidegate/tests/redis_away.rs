//! A limiter over Redis behind a wire that is slow, a black hole, cut or down, and over a server that is killed: every mode
//! answers without waiting for it, and what comes back is not met by everybody at once.

mod engine_away;
#[path = "../../store/tests/engine_kit/mod.rs"]
mod engine_kit;
#[path = "../../store/tests/engine_kit/private_redis.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod private_redis;
#[path = "../../store/tests/engine_kit/proxy.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod proxy;

use std::sync::Arc;
use std::time::Duration;

use engine_away::{FEW, Rig, Trouble, answer, is_answered};
use engine_kit::{address, unique};
use private_redis::Server;
use proxy::{Proxy, local};
use tidegate::{Limit, Limiter, OnUnavailable, RedisOptions};

async fn rig() -> Rig {
    let url = address("TIDEGATE_TEST_REDIS");
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port");
    let (wire, namespace) = (Proxy::to(local(port)).await, unique("away"));
    let open =
        async |url: &str| answer(async || RedisOptions::new(url).namespace(&namespace).open().await).await;
    Rig {
        store: Arc::new(open(&wire.redis()).await),
        near: Arc::new(open(&url).await),
        wire,
        connections_max: FEW,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_of_latency_is_answered_for_by_the_policy() {
    is_answered(&rig().await, Trouble::Late).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_is_answered_for_by_the_policy() {
    is_answered(&rig().await, Trouble::Hole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_are_all_cut_are_answered_for_by_the_policy() {
    is_answered(&rig().await, Trouble::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_is_down_is_answered_for_by_the_policy() {
    is_answered(&rig().await, Trouble::Down).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_is_answered_for_and_gone_on_with() {
    let mut server = Server::start(&[]).await;
    let store = answer(async || RedisOptions::new(server.url()).open().await).await;
    let limiter = Limiter::builder(store)
        .defaults([Limit::per_day("rpm", 1_000)])
        .on_unavailable(OnUnavailable::Allow)
        .store_deadline(Duration::from_millis(400))
        .build()
        .unwrap();
    let mut held = engine_away::from_the_store(&limiter).await;
    server.kill();
    assert!(limiter.acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap().degraded().is_some());
    server.restart().await;
    drop(engine_away::from_the_store(&limiter).await);
    // What was drawn before is ended after.
    held.settle_as_held().await.unwrap();
    drop(held);
    tokio::time::timeout(Duration::from_mins(2), limiter.drain()).await.expect("all endings reach the store");
    assert_eq!(limiter.stats().unsettled, 0);
}
