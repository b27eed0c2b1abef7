//! Four processes on one cluster, whose nodes end connections again and again.

use std::time::Duration;

use crate::kit::child::{Orders, test_name};
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::redis::patient;
use crate::kit::redis_nodes::{form, url_of};
use crate::kit::soak::{at_once, be_a_child, judge, name, place, runtime, url};

/// Ends all connections to a node but the one that asks for it, unless another process ends that one first.
async fn cut(nodes: &[&str], number: u64) {
    let node = nodes[usize::try_from(number).expect("it is small") % nodes.len()];
    let client = redis::Client::open(format!("redis://{node}")).expect("an address");
    if let Ok(mut connection) = client.get_multiplexed_async_connection().await {
        let mut kill = redis::cmd("CLIENT");
        drop(kill.arg("KILL").arg("TYPE").arg("normal").exec_async(&mut connection).await);
    }
}

#[test]
fn four_processes_whose_connections_are_ended_conserve_every_unit() {
    skip_without!(REDIS_SERVER);
    if let Some(orders) = Orders::read() {
        return runtime().block_on(async {
            let url = url(&orders.path);
            let store = patient(&url).namespace(name(&orders.path)).open().await;
            let nodes: Vec<&str> = url["redis+cluster://".len()..].split(',').collect();
            let store = store.expect("the cluster is there");
            be_a_child(&orders, store, async |number| cut(&nodes, number).await).await;
        });
    }
    let runtime = runtime();
    // None is lost, however long it takes to answer.
    let nodes = runtime.block_on(form(Duration::from_secs(60)));
    let folder = place(&url_of(&nodes));
    let test = test_name!(four_processes_whose_connections_are_ended_conserve_every_unit);
    let told = at_once(test, folder.path());
    runtime.block_on(async {
        let store = patient(&url_of(&nodes)).namespace(name(folder.path())).open().await.unwrap();
        let judged = judge(folder.path(), &store).await.unwrap();
        println!("{}\n{judged}", told.join("\n"));
    });
}
