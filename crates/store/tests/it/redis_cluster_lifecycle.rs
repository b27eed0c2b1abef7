//! The lifecycle of a namespace on a cluster: its name is registered in another slot than its records.

use tidegate_store::lifecycle::{self, Readiness};
use tidegate_store::{Buckets, Redis, StoreError};

use crate::kit::common::{balance, draw_of, error_text, granted, own};
use crate::kit::connect_redis::connect_cluster;
use crate::kit::engine::{CLUSTER, address, skip_without, unique};
use crate::kit::redis::options_at;

async fn open(url: &str, namespace: &str) -> Result<Redis, StoreError> {
    options_at(url).namespace(namespace).open().await
}

#[tokio::test]
async fn older_cluster_namespace_is_refused_and_upgraded() {
    skip_without!(CLUSTER);
    let (url, name) = (address(CLUSTER), unique("older"));
    let life = lifecycle::at(&format!("{url}?timeout_ms=60000&namespace={name}")).unwrap();
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Missing);
    assert!(life.init().await.unwrap().parts[0].is_new);
    let store = open(&url, &name).await.unwrap();
    granted(store.draw(&draw_of(&own("acme", 10), 3)).await);

    let mut connection = connect_cluster(&url).await;
    let mut ask = async |call: &[&str]| {
        let (name, args) = call.split_first().unwrap();
        redis::cmd(name).arg(args).query_async::<i64>(&mut connection).await.unwrap()
    };
    ask(&["HSET", &format!("tidegate:{{{name}}}:meta"), "schema", "1"]).await;

    let refused = error_text(open(&url, &name).await);
    assert!(
        refused.ends_with("has schema version 1, older than 4: run `tidegate store upgrade`"),
        "{refused}"
    );
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Older);
    // Without a name, all namespaces are upgraded.
    let all = lifecycle::at(&format!("{url}?timeout_ms=60000")).unwrap();
    let upgraded = all.upgrade().await.unwrap();
    let ours = upgraded.parts.iter().find(|part| part.part.name == name).expect("the namespace is upgraded");
    assert_eq!((ours.from, upgraded.schema), (1, 4));
    assert_eq!(ask(&["SISMEMBER", "tidegate:namespaces", &name]).await, 1);
    assert!(!all.list().await.unwrap().spaces.is_empty());
    assert_eq!(balance(&open(&url, &name).await.unwrap(), "acme").await, Some((7, 3)));
    let checked = life.check().await.unwrap();
    assert!(checked.server.contains("a cluster of 3 primaries"), "{}", checked.server);
}
