//! A cluster node is lost while callers draw, and its replica takes over: the store continues, and only
//! unreplicated writes are lost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::kit::common::eventually;
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::loss::{Budget, measure_loss};
use crate::kit::redis::options_at;
use crate::kit::redis_nodes::{form, url_of};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_failover_loses_only_unreplicated_writes() {
    const BUDGET: Budget = Budget { entities: 10, each: 80 };
    skip_without!(REDIS_SERVER);
    let mut nodes = form(Duration::from_secs(2)).await;
    let store = options_at(&url_of(&nodes)).open().await.unwrap();
    let loss = measure_loss(&store, BUDGET, async |granted: &AtomicU64| {
        eventually("many are granted", async || granted.load(Ordering::SeqCst) >= 250).await;
        nodes[0].server.kill();
    })
    .await;
    println!("Cluster failover: {loss:?}");
    nodes[3].wait_for("INFO replication", "role:master").await;
    let kept: u64 = nodes[3].ask("DBSIZE").await;
    let elsewhere = nodes[1].ask::<u64>("DBSIZE").await + nodes[2].ask::<u64>("DBSIZE").await;
    assert!(kept > 0 && elsewhere > 0, "{kept} keys were at the lost node, and {elsewhere} elsewhere");
}
