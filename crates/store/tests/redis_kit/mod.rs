//! A namespace that nobody has used, on an engine that `cargo xtask engines up` has started.

use std::sync::Arc;
use std::time::Duration;

use tidegate_store::RedisOptions;
use tidegate_store::conformance::{Fixture, RealTime};

use crate::engine_kit;

/// An empty namespace, named after a case.
pub(crate) async fn open(variable: &str, name: &str) -> Fixture {
    // Long enough for a machine that has much else to do.
    let options = RedisOptions::new(engine_kit::address(variable)).timeout(Duration::from_secs(20));
    let options = options.namespace(engine_kit::unique(name));
    let store = Arc::new(options.open().await.unwrap_or_else(|error| panic!("{variable}: {error}")));
    Fixture::new(store.clone(), Arc::new(RealTime(store)))
}
