//! The store on Valkey passes the suite, and four processes whose wires are cut conserve every unit.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::child::test_name;
use crate::kit::engine::{VALKEY, skip_without};
use crate::kit::redis;
use crate::redis_store::soak::soak;

async fn open(namespace: &str) -> Option<Fixture> {
    redis::open(VALKEY, namespace).await
}

conformance::suite!(suite, open);

#[test]
fn four_processes_whose_wires_are_cut_conserve_every_unit() {
    skip_without!(VALKEY);
    println!(
        "{}",
        soak(VALKEY, test_name!(four_processes_whose_wires_are_cut_conserve_every_unit)).join("\n")
    );
}
