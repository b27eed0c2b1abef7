//! Test helpers: futures polled by hand, shorthands, and one module per subject.

mod caller;
pub(crate) mod codec;
pub(crate) mod http;
pub(crate) mod joined;
pub(crate) mod keyed;
pub(crate) mod limiter;
pub(crate) mod tower;
pub(crate) mod upstream;

#[allow(dead_code, reason = "its tests are behind features")]
pub(crate) mod engine_unavailable;

// Shared with other crates, whose tests use the rest of them.
#[path = "../../../../store/tests/it/kit/engine.rs"]
#[allow(dead_code, unused_imports, reason = "its tests are behind features")]
pub(crate) mod engine;
#[path = "../../../../core/tests/it/outside_text/mutate.rs"]
pub(crate) mod mutate;
#[path = "../../../../store/tests/it/kit/private_postgres.rs"]
#[allow(dead_code, reason = "its tests are behind features, and another crate uses the rest")]
pub(crate) mod private_postgres;
#[path = "../../../../store/tests/it/kit/private_redis.rs"]
#[allow(dead_code, reason = "its tests are behind features, and another crate uses the rest")]
pub(crate) mod private_redis;
#[path = "../../../../store/tests/it/kit/proxy.rs"]
#[allow(dead_code, reason = "its tests are behind features, and another crate uses the rest")]
pub(crate) mod proxy;

pub(crate) use caller::{Caller, REQUEST, Wakes, millis, secs, settle_tasks, slots};
