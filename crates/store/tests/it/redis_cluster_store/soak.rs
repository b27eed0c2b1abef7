//! Four processes on one cluster, whose nodes close connections repeatedly.

use std::time::Duration;

use crate::kit::child::{ChildArgs, test_name};
use crate::kit::engine::{REDIS_SERVER, skip_without};
use crate::kit::redis::options_at;
use crate::kit::redis_nodes::{form, url_of};
use crate::kit::soak::{check_logs, name, run_child, run_children, runtime, soak_folder, url};

/// Closes all other connections of a node, unless another process closes this one first.
async fn cut(nodes: &[&str], number: u64) {
    let node = nodes[usize::try_from(number).expect("it is small") % nodes.len()];
    let client = redis::Client::open(format!("redis://{node}")).expect("an address");
    if let Ok(mut connection) = client.get_multiplexed_async_connection().await {
        let mut kill = redis::cmd("CLIENT");
        drop(kill.arg("KILL").arg("TYPE").arg("normal").exec_async(&mut connection).await);
    }
}

#[test]
fn four_processes_with_killed_clients_conserve_units() {
    skip_without!(REDIS_SERVER);
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let url = url(&args.path);
            let store = options_at(&url).namespace(name(&args.path)).open().await;
            let nodes: Vec<&str> = url["redis+cluster://".len()..].split(',').collect();
            let store = store.expect("the cluster responds");
            run_child(&args, store, async |number| cut(&nodes, number).await).await;
        });
    }
    let runtime = runtime();
    // No node is considered lost, however slow it is.
    let nodes = runtime.block_on(form(Duration::from_secs(60)));
    let folder = soak_folder(&url_of(&nodes));
    let test = test_name!(four_processes_with_killed_clients_conserve_units);
    let reports = run_children(test, folder.path());
    runtime.block_on(async {
        let store = options_at(&url_of(&nodes)).namespace(name(folder.path())).open().await.unwrap();
        let summary = check_logs(folder.path(), &store).await.unwrap();
        println!("{}\n{summary}", reports.join("\n"));
    });
}
