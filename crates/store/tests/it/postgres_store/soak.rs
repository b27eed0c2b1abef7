//! Four processes on one server, each over wires that are cut again and again.

use crate::kit::child::{Orders, test_name};
use crate::kit::engine::{POSTGRES, skip_without};
use crate::kit::postgres::{by_way_of, listens_at, open, patient, url as server};
use crate::kit::proxy::Proxy;
use crate::kit::soak::{at_once, be_a_child, judge, name, place, runtime, url};

#[test]
fn four_processes_whose_wires_are_cut_conserve_every_unit() {
    skip_without!(POSTGRES);
    if let Some(orders) = Orders::read() {
        return runtime().block_on(async {
            let url = url(&orders.path);
            let wire = Proxy::to(listens_at(&url)).await;
            let options = patient(by_way_of(&url, wire.address)).schema(name(&orders.path));
            let store = open(options.connections(4)).await;
            be_a_child(&orders, store, async |number| wire.cut(1 + u32::from(number % 3 == 0))).await;
            assert!(wire.cuts() > 0);
        });
    }
    let folder = place(&server());
    let test = test_name!(four_processes_whose_wires_are_cut_conserve_every_unit);
    let told = at_once(test, folder.path());
    runtime().block_on(async {
        let store = open(patient(server()).schema(name(folder.path()))).await;
        let judged = judge(folder.path(), &store).await.unwrap();
        println!("{}\n{judged}", told.join("\n"));
    });
}
