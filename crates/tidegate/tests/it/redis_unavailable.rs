//! A limiter over Redis behind a proxy that is slow, a black hole, cut or down, and over a killed server:
//! every policy decides without waiting, and recovery opens few connections.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Limit, Limiter, OnUnavailable, RedisOptions};

use crate::kit::engine::{REDIS, REDIS_SERVER, address, skip_without, unique};
use crate::kit::engine_unavailable::{
    CONNECTIONS_MAX, Outage, Rig, acquire_from_store, acquire_until_degraded, check_outage, retry,
};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};

async fn rig() -> Rig {
    let url = address(REDIS);
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port");
    let (proxy, namespace) = (Proxy::to(local(port)).await, unique("away"));
    let open =
        async |url: &str| retry(async || RedisOptions::new(url).namespace(&namespace).open().await).await;
    Rig {
        store: Arc::new(open(&proxy.redis()).await),
        direct: Arc::new(open(&url).await),
        proxy,
        connections_max: CONNECTIONS_MAX,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_store_is_handled_by_policy() {
    skip_without!(REDIS);
    check_outage(&rig().await, Outage::Late).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_store_is_handled_by_policy() {
    skip_without!(REDIS);
    check_outage(&rig().await, Outage::Hole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_replies_are_handled_by_policy() {
    skip_without!(REDIS);
    check_outage(&rig().await, Outage::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_connections_are_handled_by_policy() {
    skip_without!(REDIS);
    check_outage(&rig().await, Outage::Down).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_server_is_handled_and_then_reused() {
    skip_without!(REDIS_SERVER);
    let mut server = Server::start(&[]).await;
    let store = retry(async || RedisOptions::new(server.url()).open().await).await;
    let limiter = Limiter::builder(store)
        .defaults([Limit::per_day("rpm", 1_000)])
        .on_unavailable(OnUnavailable::Allow)
        .store_deadline(Duration::from_millis(400))
        .build()
        .unwrap();
    let mut held = acquire_from_store(&limiter).await;
    server.kill();
    acquire_until_degraded(&limiter).await;
    server.restart().await;
    drop(acquire_from_store(&limiter).await);
    // A lease drawn before the outage is settled after it.
    held.settle_full().await.unwrap();
    drop(held);
    tokio::time::timeout(Duration::from_secs(120), limiter.drain())
        .await
        .expect("all endings reach the store");
    assert_eq!(limiter.stats().unsettled, 0);
}
