//! Tables on an engine that speaks as DynamoDB does.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{Fixture, RealTime};
use tidegate_store::{DynamoDb, DynamoDbOptions, ManualWall};

use crate::kit::engine::{address, is_available, unique};
use crate::kit::words::quick;

/// 2027-01-15T08:00:00Z, so that no case begins near the end of an hour.
pub(crate) const START: Stamp = Stamp::from_secs(1_800_000_000);

/// An engine that takes longer hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// How to open a table of a test's own, which does not exist yet.
pub(crate) fn options(variable: &str) -> DynamoDbOptions {
    DynamoDbOptions::new(unique("t"))
        .region("eu-central-1")
        .endpoint(address(variable))
        .credentials("tidegate", "tidegate")
        .timeout(TIMEOUT)
}

/// The same for tests that count requests, or look at what is in the table: no draw sweeps.
pub(crate) fn unswept(variable: &str) -> DynamoDbOptions {
    options(variable).swept_every(Duration::from_secs(86_400))
}

/// The table, once it is made.
pub(crate) async fn made(options: DynamoDbOptions) -> DynamoDb {
    options.create().await.unwrap_or_else(|error| panic!("the table is not made: {error}"));
    options.open().await.unwrap_or_else(|error| panic!("the table does not open: {error}"))
}

/// An empty namespace, named after a case of the suite, on a manual clock. `None` without the engine.
pub(crate) async fn jumping(engine: &str, namespace: &str) -> Option<Fixture> {
    if !is_available(engine) {
        return None;
    }
    let clock = ManualWall::new(START);
    let options = options(engine).namespace(namespace);
    let store = made(options.clock(clock.clone())).await;
    Some(quick(Fixture::new(Arc::new(store), Arc::new(clock))))
}

/// The same on the system's clock.
pub(crate) async fn real(engine: &str, namespace: &str) -> Option<Fixture> {
    if !is_available(engine) {
        return None;
    }
    let store = Arc::new(made(options(engine).namespace(namespace)).await);
    Some(quick(Fixture::new(store.clone(), Arc::new(RealTime(store)))))
}
