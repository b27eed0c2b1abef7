//! A limiter over DynamoDB behind a proxy that is slow, a black hole, cut or down: every policy decides
//! without waiting. Each request has its own connection, so there are as many connections as callers.

use std::sync::Arc;
use std::time::Duration;

use tidegate::DynamoDbOptions;

use crate::kit::engine::{DYNOXIDE, address, skip_without, unique};
use crate::kit::engine_unavailable::{Outage, Rig, check_outage, retry};
use crate::kit::proxy::{Proxy, local};

/// Every caller tries a few times before the breaker opens for all of them.
const CONNECTIONS_MAX: u64 = 512;

async fn rig() -> Rig {
    let url = address(DYNOXIDE);
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port");
    let proxy = Proxy::to(local(port)).await;
    let options =
        DynamoDbOptions::new(unique("away")).region("eu-central-1").credentials("tidegate", "tidegate");
    options.clone().endpoint(&url).timeout(Duration::from_secs(60)).create().await.expect("a table");
    let open = async |url: &str| Arc::new(retry(async || options.clone().endpoint(url).open().await).await);
    let proxied = format!("http://{}", proxy.address);
    Rig { store: open(&proxied).await, direct: open(&url).await, proxy, connections_max: CONNECTIONS_MAX }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_store_is_handled_by_policy() {
    skip_without!(DYNOXIDE);
    check_outage(&rig().await, Outage::Late).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_store_is_handled_by_policy() {
    skip_without!(DYNOXIDE);
    check_outage(&rig().await, Outage::Hole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_replies_are_handled_by_policy() {
    skip_without!(DYNOXIDE);
    check_outage(&rig().await, Outage::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_connections_are_handled_by_policy() {
    skip_without!(DYNOXIDE);
    check_outage(&rig().await, Outage::Down).await;
}
