//! A limiter over PostgreSQL behind a proxy that is slow, a black hole, cut or down, and over a killed
//! server: every policy decides without waiting, and recovery opens few connections.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Limit, Limiter, OnUnavailable, PostgresOptions};

use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, address, skip_without, unique};
use crate::kit::engine_unavailable::{
    CONNECTIONS_MAX, Outage, Rig, acquire_from_store, acquire_until_degraded, check_outage, retry,
};
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::proxy::{Proxy, local};

async fn rig() -> Rig {
    let url = address(POSTGRES);
    let (head, database) = url.rsplit_once('/').expect("an address with a database");
    let (user, port) = head.rsplit_once(':').expect("an address with a port");
    let (proxy, schema) = (Proxy::to(local(port.parse().expect("a port"))).await, unique("away"));
    let proxied = format!("{user}:{}/{database}", proxy.address.port());
    let open = async |url: &str| {
        retry(async || PostgresOptions::new(url).schema(&schema).connections(4).open().await).await
    };
    Rig {
        store: Arc::new(open(&proxied).await),
        direct: Arc::new(open(&url).await),
        proxy,
        connections_max: CONNECTIONS_MAX,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_store_is_handled_by_policy() {
    skip_without!(POSTGRES);
    check_outage(&rig().await, Outage::Late).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_store_is_handled_by_policy() {
    skip_without!(POSTGRES);
    check_outage(&rig().await, Outage::Hole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_replies_are_handled_by_policy() {
    skip_without!(POSTGRES);
    check_outage(&rig().await, Outage::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_connections_are_handled_by_policy() {
    skip_without!(POSTGRES);
    check_outage(&rig().await, Outage::Down).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_server_is_handled_and_then_reused() {
    skip_without!(POSTGRES_SERVER);
    let mut server = PrivatePostgres::start();
    let store = retry(async || PostgresOptions::new(server.url()).connections(4).open().await).await;
    let limiter = Limiter::builder(store)
        .defaults([Limit::per_day("rpm", 1_000)])
        .on_unavailable(OnUnavailable::Allow)
        .store_deadline(Duration::from_millis(400))
        .build()
        .unwrap();
    let mut held = acquire_from_store(&limiter).await;
    server.kill();
    acquire_until_degraded(&limiter).await;
    server.start_again();
    drop(acquire_from_store(&limiter).await);
    // A lease drawn before the outage is settled after it.
    held.settle_full().await.unwrap();
    drop(held);
    tokio::time::timeout(Duration::from_secs(120), limiter.drain())
        .await
        .expect("all endings reach the store");
    assert_eq!(limiter.stats().unsettled, 0);
}
