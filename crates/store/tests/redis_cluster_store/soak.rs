//! Four processes on one cluster, whose nodes end connections again and again.

use std::time::Duration;

use crate::child::Orders;
use crate::nodes::{form, patient, url_of};
use crate::soak_kit::{at_once, be_a_child, judge, name, place, runtime, url};

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
    let nodes = runtime.block_on(form(Duration::from_mins(1)));
    let folder = place(&url_of(&nodes));
    let told = at_once("soak::four_processes_whose_connections_are_ended_conserve_every_unit", folder.path());
    runtime.block_on(async {
        let store = patient(&url_of(&nodes)).namespace(name(folder.path())).open().await.unwrap();
        let judged = judge(folder.path(), &store).await.unwrap();
        println!("{}\n{judged}", told.join("\n"));
    });
}
