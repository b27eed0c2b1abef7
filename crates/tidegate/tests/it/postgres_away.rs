//! A limiter over PostgreSQL behind a wire that is slow, a black hole, cut or down, and over a server that is killed: every
//! mode answers without waiting for it, and few connections are made when it returns.

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Limit, Limiter, OnUnavailable, PostgresOptions};

use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, address, skip_without, unique};
use crate::kit::engine_away::{FEW, Rig, Trouble, answer, from_the_store, is_answered, until_degraded};
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::proxy::{Proxy, local};

async fn rig() -> Rig {
    let url = address(POSTGRES);
    let (head, database) = url.rsplit_once('/').expect("an address with a database");
    let (user, port) = head.rsplit_once(':').expect("an address with a port");
    let (wire, schema) = (Proxy::to(local(port.parse().expect("a port"))).await, unique("away"));
    let far = format!("{user}:{}/{database}", wire.address.port());
    let open = async |url: &str| {
        answer(async || PostgresOptions::new(url).schema(&schema).connections(4).open().await).await
    };
    Rig { store: Arc::new(open(&far).await), near: Arc::new(open(&url).await), wire, connections_max: FEW }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_of_latency_is_answered_for_by_the_policy() {
    skip_without!(POSTGRES);
    is_answered(&rig().await, Trouble::Late).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_is_answered_for_by_the_policy() {
    skip_without!(POSTGRES);
    is_answered(&rig().await, Trouble::Hole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_are_all_cut_are_answered_for_by_the_policy() {
    skip_without!(POSTGRES);
    is_answered(&rig().await, Trouble::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_is_down_is_answered_for_by_the_policy() {
    skip_without!(POSTGRES);
    is_answered(&rig().await, Trouble::Down).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_is_answered_for_and_gone_on_with() {
    skip_without!(POSTGRES_SERVER);
    let mut server = PrivatePostgres::start();
    let store = answer(async || PostgresOptions::new(server.url()).connections(4).open().await).await;
    let limiter = Limiter::builder(store)
        .defaults([Limit::per_day("rpm", 1_000)])
        .on_unavailable(OnUnavailable::Allow)
        .store_deadline(Duration::from_millis(400))
        .build()
        .unwrap();
    let mut held = from_the_store(&limiter).await;
    server.kill();
    until_degraded(&limiter).await;
    server.start_again();
    drop(from_the_store(&limiter).await);
    // What was drawn before is ended after.
    held.settle_as_held().await.unwrap();
    drop(held);
    tokio::time::timeout(Duration::from_secs(120), limiter.drain())
        .await
        .expect("all endings reach the store");
    assert_eq!(limiter.stats().unsettled, 0);
}
