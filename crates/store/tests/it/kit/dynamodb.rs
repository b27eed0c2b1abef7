//! Tables on an engine with DynamoDB's API.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{Fixture, RealTime};
use tidegate_store::{DynamoDb, DynamoDbOptions, ManualWall};

use crate::kit::common::quick;
use crate::kit::engine::{address, is_available, unique};

/// 2027-01-15T08:00:00Z, so that no case starts near the end of an hour.
pub(crate) const START: Stamp = Stamp::from_secs(1_800_000_000);

/// An engine that takes longer hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Options for a table of the test's own, which does not exist yet.
pub(crate) fn options(variable: &str) -> DynamoDbOptions {
    DynamoDbOptions::new(unique("t"))
        .region("eu-central-1")
        .endpoint(address(variable))
        .credentials("tidegate", "tidegate")
        .timeout(TIMEOUT)
}

/// The same for tests that count requests or read items: draws do not sweep.
pub(crate) fn unswept(variable: &str) -> DynamoDbOptions {
    options(variable).swept_every(Duration::from_secs(86_400))
}

/// Creates and opens the table.
pub(crate) async fn open_new(options: DynamoDbOptions) -> DynamoDb {
    options.create().await.unwrap_or_else(|error| panic!("the table is not created: {error}"));
    options.open().await.unwrap_or_else(|error| panic!("the table does not open: {error}"))
}

/// An empty namespace, named after a case of the suite, with a manual clock. `None` without the engine.
pub(crate) async fn jumping(engine: &str, namespace: &str) -> Option<Fixture> {
    if !is_available(engine) {
        return None;
    }
    let clock = ManualWall::new(START);
    let options = options(engine).namespace(namespace);
    let store = open_new(options.clock(clock.clone())).await;
    Some(quick(Fixture::new(Arc::new(store), Arc::new(clock))))
}

/// The same with the system clock.
pub(crate) async fn real(engine: &str, namespace: &str) -> Option<Fixture> {
    if !is_available(engine) {
        return None;
    }
    let store = Arc::new(open_new(options(engine).namespace(namespace)).await);
    Some(quick(Fixture::new(store.clone(), Arc::new(RealTime(store)))))
}
