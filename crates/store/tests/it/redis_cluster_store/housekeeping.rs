//! Repair of a damaged index on a cluster, where the home of a tree is stored in another slot than the tree.

use tidegate_core::limit::name::ResourceName;
use tidegate_store::{Buckets as _, Paging, Redis, RepairReport, Store as _};

use crate::kit::common::{draw_of, granted, own};
use crate::kit::connect_redis::connect_cluster;
use crate::kit::engine::{CLUSTER, address, skip_without, unique};
use crate::kit::redis::options_at;

async fn spend(store: &Redis, entity: &str, requests: u64) {
    granted(store.spend(&draw_of(&own(entity, 100), requests)).await);
}

/// The listed subjects.
async fn listed(store: &Redis) -> Vec<String> {
    let resource = ResourceName::new("gpt").expect("a valid name");
    let page = store.buckets(&resource, &Paging::default()).await.expect("buckets are listed");
    page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect()
}

#[tokio::test]
async fn sweeps_restore_lost_index_and_home_entries() {
    skip_without!(CLUSTER);
    let (namespace, url) = (unique("homes"), address(CLUSTER));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    spend(&store, "acme", 3).await;
    spend(&store, "globex", 2).await;
    let mut cluster = connect_cluster(&url).await;
    let key = |what: &str| format!("tidegate:{{{namespace}}}:{what}");
    let [mut index, mut homes, mut trees] = ["ZREM", "HDEL", "DEL"].map(redis::cmd);
    index.arg(key("index")).arg("s\0globex\0gpt").arg("r\0gpt\0globex");
    homes.arg(key("homes")).arg("globex");
    trees.arg(key("trees"));
    for call in [index, homes, trees] {
        call.exec_async(&mut cluster).await.unwrap();
    }
    assert_eq!(store.caution(), None);
    assert_eq!(listed(&store).await, ["acme"]);
    let mut sweeps = 0;
    while listed(&store).await != ["acme", "globex"] {
        sweeps += 1;
        assert!(sweeps < 5_000, "the lost subject is not restored");
        store.sweep(1).await.unwrap();
    }
    // `repair` restores the index in one call.
    let [mut index, mut unused] = ["ZREM", "ZADD"].map(redis::cmd);
    index.arg(key("index")).arg("s\0globex\0gpt").arg("r\0gpt\0globex");
    unused.arg(key("index")).arg(0).arg("s\0unused\0gpt").arg(0).arg("r\0gpt\0unused");
    for call in [index, unused] {
        call.exec_async(&mut cluster).await.unwrap();
    }
    assert_eq!(store.repair().await.unwrap(), RepairReport { added: 1, removed: 1 });
    let homes: Vec<String> =
        redis::cmd("SMEMBERS").arg(key("trees")).query_async(&mut cluster).await.unwrap();
    assert!(!homes.is_empty(), "sweeps find the leases of the tree again");
}
