//! The store on Valkey passes the suite, on a server of its own, and four processes whose wires are cut.

#[path = "sqlite_processes/child.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod child;
mod engine_kit;
#[path = "sqlite_processes/log.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod log;
#[path = "engine_kit/proxy.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod proxy;
mod redis_kit;
#[path = "redis_store/soak.rs"]
mod soak;
#[path = "engine_kit/soak.rs"]
mod soak_kit;
#[path = "engine_kit/words.rs"]
#[allow(dead_code, reason = "another test needs the rest")]
mod words;

use tidegate_store::conformance::{self, Fixture};

const SOAKED: &str = "TIDEGATE_TEST_VALKEY";

async fn open(namespace: &str) -> Fixture {
    redis_kit::open(SOAKED, namespace).await
}

conformance::suite!(valkey, open);
