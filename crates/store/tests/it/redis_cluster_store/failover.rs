//! A node of a cluster that is lost while everybody draws, with its replica in its place: the store goes on by itself, and what
//! was lost is what the replica had not heard of.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::kit::account::{Budget, settle_accounts};
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::redis::patient;
use crate::kit::redis_nodes::{form, url_of};
use crate::kit::words::eventually;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_replica_takes_its_place_takes_along_what_that_had_not_heard_and_no_more() {
    const BUDGET: Budget = Budget { entities: 10, each: 80 };
    skip_without!(REDIS_SERVER);
    let mut nodes = form(Duration::from_secs(2)).await;
    let store = patient(&url_of(&nodes)).open().await.unwrap();
    let account = settle_accounts(&store, BUDGET, async |granted: &AtomicU64| {
        eventually("many are granted", async || granted.load(Ordering::SeqCst) >= 250).await;
        nodes[0].server.kill();
    })
    .await;
    println!("Cluster failover: {account:?}");
    nodes[3].says("INFO replication", "role:master").await;
    let kept: u64 = nodes[3].ask("DBSIZE").await;
    let elsewhere = nodes[1].ask::<u64>("DBSIZE").await + nodes[2].ask::<u64>("DBSIZE").await;
    assert!(kept > 0 && elsewhere > 0, "{kept} keys were at the lost node, and {elsewhere} elsewhere");
}
