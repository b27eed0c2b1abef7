//! A primary that is lost while everybody draws, and the replica that a sentinel puts in its place: the store goes on by itself,
//! and what was lost is what the replica had not heard of.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_store::{Policies, PolicyChange, Store};

use crate::kit::account::{Budget, settle_accounts};
use crate::kit::engine::{REDIS_SERVER, free_port, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::redis::{connect, patient};
use crate::kit::words::{eventually, slow, until_answered};

/// Waits until a server says so about itself.
async fn says(server: &Server, section: &str, what: &str) {
    let mut connection = connect(&server.url()).await;
    eventually(what, async || {
        let info: String =
            redis::cmd("INFO").arg(section).query_async(&mut connection).await.expect("it tells");
        info.contains(what)
    })
    .await;
}

/// Waits until a server's replica has heard of what it was told.
async fn hears(primary: &Server) {
    let mut connection = connect(&primary.url()).await;
    redis::cmd("SET").arg("mark").arg(1).exec_async(&mut connection).await.expect("it is kept");
    let replicas: u64 =
        redis::cmd("WAIT").arg(1).arg(60_000).query_async(&mut connection).await.expect("it waits");
    assert_eq!(replicas, 1, "the replica hears");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_sentinels_replace_takes_along_what_its_replica_had_not_heard_and_no_more() {
    const BUDGET: Budget = Budget { entities: 4, each: 400 };
    skip_without!(REDIS_SERVER);
    let mut primary = Server::start_with(&["--repl-diskless-sync-delay", "0"]).await;
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &primary.port.to_string()]).await;
    says(&replica, "replication", "master_link_status:up").await;
    // One that was just synced is told nothing until it has said so, once a second.
    hears(&primary).await;
    let sentinel = Server::watch(primary.port, "limits").await;
    says(&sentinel, "sentinel", "slaves=1").await;
    // One of the sentinels is away all the time.
    let url = format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{}/limits", free_port(), sentinel.port);
    // A sentinel is asked with less patience than ours.
    let store = until_answered(|| patient(&url).open()).await.unwrap();
    let changes = store.changes().expect("Redis announces changes");
    let account = settle_accounts(&store, BUDGET, async |granted: &AtomicU64| {
        eventually("many are granted", async || granted.load(Ordering::SeqCst) >= 500).await;
        primary.kill();
    })
    .await;
    println!("Sentinel failover: {account:?}");
    let mut connection = connect(&replica.url()).await;
    let role: Vec<redis::Value> = redis::cmd("ROLE").query_async(&mut connection).await.unwrap();
    assert_eq!(role[0], redis::Value::BulkString(b"master".to_vec()));
    // Whoever listens listens to the new one.
    let policy = Policy::new([slow(7)]).unwrap();
    let change = PolicyChange { scope: Scope::System, expect: Expect::Any, policy: Some(policy) };
    let other = patient(&replica.url()).open().await.unwrap();
    let version = other.apply(&[change], "ops").await.unwrap();
    eventually("it is heard of", async || changes.newest() == version).await;
}
