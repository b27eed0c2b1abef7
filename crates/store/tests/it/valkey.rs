//! Runs the suite and the soak test on Valkey.

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
fn four_processes_over_cut_wires_conserve_units() {
    skip_without!(VALKEY);
    println!("{}", soak(VALKEY, test_name!(four_processes_over_cut_wires_conserve_units)).join("\n"));
}
