//! The cost of finding a lease by its id on a cluster: the id does not name its home.

use std::time::Duration;

use tidegate_store::{Buckets as _, Redis, StoreError};

use crate::kit::common::{draw_of, granted, next_lease, own};
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::redis::{NEVER_SWEPT, calls_in, options_at};
use crate::kit::redis_nodes::{Node, form, url_of};

/// The calls of a command that `store` sends to look up a lease once.
async fn calls_of_lookup(nodes: &mut [Node], store: &Redis, lease: u128) -> (u64, u64) {
    for node in &mut *nodes {
        node.ask::<String>("CONFIG RESETSTAT").await;
    }
    store.lease(tidegate_core::limit::lease::LeaseId::from_number(lease)).await.expect("the lease is found");
    let (mut scripts, mut listings) = (0, 0);
    for node in nodes {
        let stats: String = node.ask("INFO commandstats").await;
        scripts += calls_in(&stats, "evalsha");
        listings += calls_in(&stats, "smembers");
    }
    (scripts, listings)
}

/// Regression: each lookup read the list of homes, and then every home one after another.
#[tokio::test]
async fn lookup_of_a_known_lease_is_one_call() {
    skip_without!(REDIS_SERVER);
    let mut nodes = form(Duration::from_secs(60)).await;
    let options = options_at(&url_of(&nodes)).swept_every(NEVER_SWEPT);
    let (store, other) = (options.clone().open().await.unwrap(), options.open().await.unwrap());
    let mut leases = Vec::new();
    for number in 0..20 {
        let draw = draw_of(&own(&format!("tenant-{number}"), 10), 1);
        granted(store.draw(&draw).await);
        leases.push(draw.lease.number());
    }
    // An unknown lease is searched for everywhere, which loads the script on every node.
    assert!(matches!(other.lease(next_lease()).await, Err(StoreError::NoLease { .. })));
    for lease in leases {
        assert_eq!(calls_of_lookup(&mut nodes, &store, lease).await, (1, 0), "drawn by this process");
        let (searched, listings) = calls_of_lookup(&mut nodes, &other, lease).await;
        assert!((1..=20).contains(&searched) && listings == 1, "{searched} calls, {listings} listings");
        assert_eq!(calls_of_lookup(&mut nodes, &other, lease).await, (1, 0), "found before");
    }
}
