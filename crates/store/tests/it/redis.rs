//! Runs the suite on the Redis store.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::engine::REDIS;
use crate::kit::redis;

async fn open(namespace: &str) -> Option<Fixture> {
    redis::open(REDIS, namespace).await
}

conformance::suite!(suite, open);
