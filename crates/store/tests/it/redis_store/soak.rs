//! Four processes on one server, each over a wire that is cut again and again.

use crate::kit::child::{Orders, test_name};
use crate::kit::engine::{REDIS, address, skip_without};
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::patient;
use crate::kit::soak::{at_once, be_a_child, judge, name, place, runtime, url};

/// On the server whose address is in this variable, for the test of this name.
pub(crate) fn soak(variable: &str, test: &str) -> Vec<String> {
    if let Some(orders) = Orders::read() {
        runtime().block_on(async {
            let url = url(&orders.path);
            let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
            let wire = Proxy::to(local(port.expect("an address with a port"))).await;
            let opened = patient(&wire.redis()).namespace(name(&orders.path)).open().await;
            let store = opened.expect("the server is there");
            be_a_child(&orders, store, async |number| wire.cut(1 + u32::from(number % 3 == 0))).await;
            assert!(wire.cuts() > 0);
        });
        return Vec::new();
    }
    let folder = place(&address(variable));
    let mut told = at_once(test, folder.path());
    runtime().block_on(async {
        let opened = patient(&address(variable)).namespace(name(folder.path())).open().await;
        let store = opened.expect("the server is there");
        told.push(judge(folder.path(), &store).await.expect("the server is there"));
    });
    told
}

#[test]
fn four_processes_whose_wires_are_cut_conserve_every_unit() {
    skip_without!(REDIS);
    println!(
        "{}",
        soak(REDIS, test_name!(four_processes_whose_wires_are_cut_conserve_every_unit)).join("\n")
    );
}
