//! Four processes on one server, each over a wire that is cut again and again.

use std::time::Duration;

use tidegate_store::RedisOptions;

use crate::child::Orders;
use crate::engine_kit::address;
use crate::proxy::{Proxy, local};
use crate::soak_kit::{at_once, be_a_child, judge, name, place, runtime, url};

/// On the server whose address is in this variable.
fn soak(variable: &str) -> Vec<String> {
    // Long enough for a machine that has much else to do.
    let options = |url: &str| RedisOptions::new(url).timeout(Duration::from_secs(20));
    if let Some(orders) = Orders::read() {
        runtime().block_on(async {
            let url = url(&orders.path);
            let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
            let wire = Proxy::to(local(port.expect("an address with a port"))).await;
            let opened = options(&wire.redis()).namespace(name(&orders.path)).open().await;
            let store = opened.expect("the server is there");
            be_a_child(&orders, store, async |number| wire.cut(1 + u32::from(number % 3 == 0))).await;
            assert!(wire.cuts() > 0);
        });
        return Vec::new();
    }
    let folder = place(&address(variable));
    let mut told = at_once("soak::four_processes_whose_wires_are_cut_conserve_every_unit", folder.path());
    runtime().block_on(async {
        let opened = options(&address(variable)).namespace(name(folder.path())).open().await;
        let store = opened.expect("the server is there");
        told.push(judge(folder.path(), &store).await.expect("the server is there"));
    });
    told
}

#[test]
fn four_processes_whose_wires_are_cut_conserve_every_unit() {
    println!("{}", soak(crate::SOAKED).join("\n"));
}
