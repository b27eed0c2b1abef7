//! The store on Redis passes the suite, on a server of its own.

mod engine_kit;
mod redis_kit;

use tidegate_store::conformance::{self, Fixture};

async fn open(namespace: &str) -> Fixture {
    redis_kit::open("TIDEGATE_TEST_REDIS", namespace).await
}

conformance::suite!(redis, open);
