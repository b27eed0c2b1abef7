//! A namespace that nobody has used, on an engine that `cargo xtask engines up` has started.

use std::sync::Arc;

use tidegate_store::RedisOptions;
use tidegate_store::conformance::{Fixture, RealTime};

use crate::engine_kit;

/// An empty namespace, named after a case.
pub(crate) async fn open(variable: &str, name: &str) -> Fixture {
    let options = RedisOptions::new(engine_kit::address(variable)).namespace(engine_kit::unique(name));
    let store = Arc::new(options.open().await.unwrap_or_else(|error| panic!("{variable}: {error}")));
    Fixture::new(store.clone(), Arc::new(RealTime(store)))
}
