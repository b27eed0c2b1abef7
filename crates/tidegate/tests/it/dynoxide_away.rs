//! A limiter over a table of DynamoDB behind a wire that is slow, a black hole, cut or down: every mode answers without waiting
//! for it. Each request has a connection to itself, so that there are as many as there are callers.

use std::sync::Arc;
use std::time::Duration;

use tidegate::DynamoDbOptions;

use crate::kit::engine::{DYNOXIDE, address, skip_without, unique};
use crate::kit::engine_away::{Rig, Trouble, answer, is_answered};
use crate::kit::proxy::{Proxy, local};

/// Every caller tries a few times before the store counts as unavailable to all.
const CONNECTIONS_MAX: u64 = 512;

async fn rig() -> Rig {
    let url = address(DYNOXIDE);
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port");
    let wire = Proxy::to(local(port)).await;
    let options =
        DynamoDbOptions::new(unique("away")).region("eu-central-1").credentials("tidegate", "tidegate");
    options.clone().endpoint(&url).timeout(Duration::from_secs(60)).create().await.expect("a table");
    let open = async |url: &str| Arc::new(answer(async || options.clone().endpoint(url).open().await).await);
    let far = format!("http://{}", wire.address);
    Rig { store: open(&far).await, near: open(&url).await, wire, connections_max: CONNECTIONS_MAX }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_of_latency_is_answered_for_by_the_policy() {
    skip_without!(DYNOXIDE);
    is_answered(&rig().await, Trouble::Late).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_is_answered_for_by_the_policy() {
    skip_without!(DYNOXIDE);
    is_answered(&rig().await, Trouble::Hole).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_are_all_cut_are_answered_for_by_the_policy() {
    skip_without!(DYNOXIDE);
    is_answered(&rig().await, Trouble::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_is_down_is_answered_for_by_the_policy() {
    skip_without!(DYNOXIDE);
    is_answered(&rig().await, Trouble::Down).await;
}
