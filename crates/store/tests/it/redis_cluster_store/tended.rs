//! An index that has lost something, on a cluster: where a tree is at home is in another slot than the tree.

use tidegate_core::limit::name::ResourceName;
use tidegate_store::{Buckets as _, Paging, Redis, Repaired, Store as _};

use crate::kit::connect_redis::connect_cluster;
use crate::kit::engine::{CLUSTER, address, skip_without, unique};
use crate::kit::redis::patient;
use crate::kit::words::{draw_of, granted, own};

async fn spend(store: &Redis, entity: &str, requests: u64) {
    granted(store.spend(&draw_of(&own(entity, 100), requests)).await);
}

/// Those that are listed.
async fn listed(store: &Redis) -> Vec<String> {
    let resource = ResourceName::new("gpt").expect("a valid name");
    let page = store.buckets(&resource, &Paging::default()).await.expect("buckets are listed");
    page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect()
}

#[tokio::test]
async fn a_cluster_that_has_lost_a_subject_and_its_home_is_told_again_by_sweeps() {
    skip_without!(CLUSTER);
    let (namespace, url) = (unique("homes"), address(CLUSTER));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
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
        assert!(sweeps < 5_000, "it does not come back");
        store.sweep(1).await.unwrap();
    }
    // All at once, for whoever cannot wait.
    let [mut index, mut nobody] = ["ZREM", "ZADD"].map(redis::cmd);
    index.arg(key("index")).arg("s\0globex\0gpt").arg("r\0gpt\0globex");
    nobody.arg(key("index")).arg(0).arg("s\0nobody\0gpt").arg(0).arg("r\0gpt\0nobody");
    for call in [index, nobody] {
        call.exec_async(&mut cluster).await.unwrap();
    }
    assert_eq!(store.repair().await.unwrap(), Repaired { added: 1, removed: 1 });
    let homes: Vec<String> =
        redis::cmd("SMEMBERS").arg(key("trees")).query_async(&mut cluster).await.unwrap();
    assert!(!homes.is_empty(), "its leases are looked for again");
}
