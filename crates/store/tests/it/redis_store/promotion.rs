//! A lost primary is replaced by its replica: only unreplicated writes are lost.

use tidegate_store::{Buckets as _, DrawResult, Lookup};

use crate::kit::common::{eventually, until_answered};
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{ask, connect, draw, granted, levels, options_at, settle, slow, subject};

/// Waits until the server's replication info contains this line.
async fn wait_for_info(url: &str, line: &str) {
    let mut connection = connect(url).await;
    eventually(line, async || {
        let info: String = ask(&mut connection, &["INFO", "replication"]).await;
        info.lines().any(|found| found.trim() == line)
    })
    .await;
}

#[tokio::test]
async fn promoted_replica_lacks_only_unreplicated_writes() {
    const BURST: i64 = 100;
    skip_without!(REDIS_SERVER);
    let mut primary = Server::start(&["--repl-diskless-sync-delay", "0"]).await;
    // A proxy between primary and replica controls replication.
    let wire = Proxy::to(local(primary.port)).await;
    let replica = Server::start(&["--replicaof", "127.0.0.1", &wire.address.port().to_string()]).await;
    wait_for_info(&replica.url(), "master_link_status:up").await;
    // A proxy between the store and the current primary.
    let proxy = Proxy::to(local(primary.port)).await;
    let store = options_at(&proxy.redis()).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    let mut kept_leases = Vec::new();
    for _ in 0..40 {
        let lease = draw(&levels, &[("rpm", 1)]);
        granted(store.draw(&lease).await);
        kept_leases.push(lease);
    }
    let mut connection = connect(&primary.url()).await;
    // WAIT covers the writes of its own connection, and so all earlier ones.
    ask::<String>(&mut connection, &["SET", "mark", "1"]).await;
    let replicas: u64 = ask(&mut connection, &["WAIT", "1", "60000"]).await;
    assert_eq!(replicas, 1, "the replica has the first forty");
    wire.hold(true);
    let mut lost_leases = Vec::new();
    for _ in 0..25 {
        let lease = draw(&levels, &[("rpm", 1)]);
        granted(store.draw(&lease).await);
        lost_leases.push(lease);
    }
    primary.kill();
    wire.sever();
    let mut connection = connect(&replica.url()).await;
    ask::<String>(&mut connection, &["REPLICAOF", "NO", "ONE"]).await;
    proxy.redirect_to(local(replica.port));

    // Replicated leases exist: each ends once, as it would have.
    for lease in &kept_leases {
        let settle = settle(lease, &[]);
        until_answered(|| store.settle(&settle)).await.expect("the replica has the lease");
    }
    for lease in &lost_leases {
        let error = store.settle(&settle(lease, &[])).await.expect_err("the replica does not have the lease");
        assert!(matches!(error, tidegate_store::StoreError::NoLease { .. }), "{error}");
    }
    let mut admitted = 0_i64;
    while let Ok(DrawResult::Granted(_)) = store.draw(&draw(&levels, &[("rpm", 1)])).await {
        admitted += 1;
    }
    let (replicated, lost) = (40, 25);
    assert_eq!(admitted, BURST - replicated, "the lost units can be drawn again, and no more");
    assert_eq!(replicated + lost + admitted, BURST + lost);
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), BURST);
}
