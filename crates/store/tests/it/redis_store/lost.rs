//! A primary that is lost, and a replica in its place: what may be lost is what the replica had not heard of.

use tidegate_store::{Buckets as _, Drawn, Lookup};

use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{ask, connect, draw, granted, levels, patient, settle, slow, subject};
use crate::kit::words::{eventually, until_answered};

/// Waits until a server says so about itself.
async fn until(url: &str, line: &str) {
    let mut connection = connect(url).await;
    eventually(line, async || {
        let info: String = ask(&mut connection, &["INFO", "replication"]).await;
        info.lines().any(|found| found.trim() == line)
    })
    .await;
}

#[tokio::test]
async fn a_lost_primary_takes_along_what_its_replica_had_not_heard_and_no_more() {
    const BURST: i64 = 100;
    skip_without!(REDIS_SERVER);
    let mut primary = Server::start(&["--repl-diskless-sync-delay", "0"]).await;
    // Between primary and replica, so that a test can say what the replica hears.
    let wire = Proxy::to(local(primary.port)).await;
    let replica = Server::start(&["--replicaof", "127.0.0.1", &wire.address.port().to_string()]).await;
    until(&replica.url(), "master_link_status:up").await;
    // Between the store and whoever is the primary.
    let proxy = Proxy::to(local(primary.port)).await;
    let store = patient(&proxy.redis()).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    let mut heard = Vec::new();
    for _ in 0..40 {
        let lease = draw(&levels, &[("rpm", 1)]);
        granted(store.draw(&lease).await);
        heard.push(lease);
    }
    let mut connection = connect(&primary.url()).await;
    // It waits for what its own connection has written, and so for all before it.
    ask::<String>(&mut connection, &["SET", "mark", "1"]).await;
    let replicas: u64 = ask(&mut connection, &["WAIT", "1", "60000"]).await;
    assert_eq!(replicas, 1, "the replica has heard of the first forty");
    wire.hold(true);
    let mut unheard = Vec::new();
    for _ in 0..25 {
        let lease = draw(&levels, &[("rpm", 1)]);
        granted(store.draw(&lease).await);
        unheard.push(lease);
    }
    primary.kill();
    wire.sever();
    let mut connection = connect(&replica.url()).await;
    ask::<String>(&mut connection, &["REPLICAOF", "NO", "ONE"]).await;
    proxy.turn_to(local(replica.port));

    // What it had heard of is there: the leases end as they would have, each once.
    for lease in &heard {
        let settle = settle(lease, &[]);
        until_answered(|| store.settle(&settle)).await.expect("the replica knows it");
    }
    for lease in &unheard {
        let error = store.settle(&settle(lease, &[])).await.expect_err("the replica never heard of it");
        assert!(matches!(error, tidegate_store::StoreError::NoLease { .. }), "{error}");
    }
    let mut admitted = 0_i64;
    while let Ok(Drawn::Granted(_)) = store.draw(&draw(&levels, &[("rpm", 1)])).await {
        admitted += 1;
    }
    let (known, lost) = (40, 25);
    assert_eq!(admitted, BURST - known, "what was lost can be had again, and nothing beyond it");
    assert_eq!(known + lost + admitted, BURST + lost);
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), BURST);
}
