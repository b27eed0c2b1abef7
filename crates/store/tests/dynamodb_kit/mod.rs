//! A table of a test's own, on an engine that `cargo xtask engines up` has started.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::time::Stamp;
use tidegate_store::conformance::{Fixture, RealTime};
use tidegate_store::{DynamoDb, DynamoDbOptions, ManualWall};

use crate::engine_kit;

/// 2027-01-15T08:00:00Z, so that no case begins near the end of an hour.
pub(crate) const START: Stamp = Stamp::from_secs(1_800_000_000);

/// How to open a table that nobody else has; it is not there yet.
pub(crate) fn options(variable: &str) -> DynamoDbOptions {
    DynamoDbOptions::new(engine_kit::unique("t"))
        .region("eu-central-1")
        .endpoint(engine_kit::address(variable))
        .credentials("tidegate", "tidegate")
        // Nobody follows it, and an engine on this machine slows down with all that was ever in one.
        .stream(false)
        // The engines share two processors with all that is tested on them.
        .timeout(Duration::from_secs(30))
}

/// The same for tests that count what is asked, or look at what is left: nobody who draws sweeps meanwhile.
pub(crate) fn unswept(variable: &str) -> DynamoDbOptions {
    options(variable).swept_every(Duration::from_hours(24))
}

/// The table, once it is made.
pub(crate) async fn made(options: DynamoDbOptions) -> DynamoDb {
    options.create().await.unwrap_or_else(|error| panic!("the table is not made: {error}"));
    options.open().await.unwrap_or_else(|error| panic!("the table does not open: {error}"))
}

/// An empty namespace, named after a case, on time that is set by hand.
pub(crate) async fn jumping(options: DynamoDbOptions, namespace: &str) -> Fixture {
    let clock = ManualWall::new(START);
    let store = made(options.namespace(namespace).clock(clock.clone())).await;
    patient(Fixture::new(Arc::new(store), Arc::new(clock)))
}

/// The same on the time that it is.
pub(crate) async fn real(options: DynamoDbOptions, namespace: &str) -> Fixture {
    let store = Arc::new(made(options.namespace(namespace)).await);
    patient(Fixture::new(store.clone(), Arc::new(RealTime(store))))
}

/// Every answer is a request over HTTP that is signed: only those who look deeper ask as often as they do of other engines.
fn patient(fixture: Fixture) -> Fixture {
    if std::env::var_os("TIDEGATE_DEEP").is_some() { fixture } else { fixture.slow() }
}
