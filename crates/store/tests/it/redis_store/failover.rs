//! A primary is lost while callers draw, and a sentinel promotes its replica: the store continues, and only
//! unreplicated writes are lost.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_store::{Policies, PolicyChange, Store};

use crate::kit::common::{eventually, slow, until_answered};
use crate::kit::engine::{REDIS_SERVER, free_port, skip_without};
use crate::kit::loss::{Budget, measure_loss};
use crate::kit::private_redis::Server;
use crate::kit::redis::{connect, options_at};

/// Waits until a section of the server's INFO contains this text.
async fn wait_for_info(server: &Server, section: &str, what: &str) {
    let mut connection = connect(&server.url()).await;
    eventually(what, async || {
        let info: String =
            redis::cmd("INFO").arg(section).query_async(&mut connection).await.expect("the server responds");
        info.contains(what)
    })
    .await;
}

/// Waits until the replica has acknowledged all writes.
async fn wait_for_replica(primary: &Server) {
    let mut connection = connect(&primary.url()).await;
    redis::cmd("SET").arg("mark").arg(1).exec_async(&mut connection).await.expect("the mark is written");
    let replicas: u64 = redis::cmd("WAIT")
        .arg(1)
        .arg(60_000)
        .query_async(&mut connection)
        .await
        .expect("the server responds");
    assert_eq!(replicas, 1, "the replica acknowledges the write");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinel_failover_loses_only_unreplicated_writes() {
    const BUDGET: Budget = Budget { entities: 4, each: 400 };
    skip_without!(REDIS_SERVER);
    let mut primary = Server::start_with(&["--repl-diskless-sync-delay", "0"]).await;
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &primary.port.to_string()]).await;
    wait_for_info(&replica, "replication", "master_link_status:up").await;
    // A replica that has just synced receives nothing until it has acknowledged that, once a second.
    wait_for_replica(&primary).await;
    let sentinel = Server::watch(primary.port, "limits").await;
    wait_for_info(&sentinel, "sentinel", "slaves=1").await;
    // One of the configured sentinels is never available.
    let url = format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{}/limits", free_port(), sentinel.port);
    // The timeout for a sentinel is shorter than ours.
    let store = until_answered(|| options_at(&url).open()).await.unwrap();
    let changes = store.changes().expect("Redis announces changes");
    let loss = measure_loss(&store, BUDGET, async |granted: &AtomicU64| {
        eventually("many are granted", async || granted.load(Ordering::SeqCst) >= 500).await;
        primary.kill();
    })
    .await;
    println!("Sentinel failover: {loss:?}");
    let mut connection = connect(&replica.url()).await;
    let role: Vec<redis::Value> = redis::cmd("ROLE").query_async(&mut connection).await.unwrap();
    assert_eq!(role[0], redis::Value::BulkString(b"master".to_vec()));
    // Listeners are connected to the new primary.
    let policy = Policy::new([slow(7)]).unwrap();
    let change = PolicyChange { scope: Scope::System, expect: Expect::Any, policy: Some(policy) };
    let other = options_at(&replica.url()).open().await.unwrap();
    let version = other.apply(&[change], "ops").await.unwrap();
    eventually("the change is reported", async || changes.newest() == version).await;
}
