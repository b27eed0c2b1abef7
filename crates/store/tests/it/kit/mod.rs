//! Shared parts of the tests: engines and connections to them, short constructors for limits and leases, and
//! child processes.

pub(crate) mod child;
pub(crate) mod clock;
pub(crate) mod common;
pub(crate) mod contents;
pub(crate) mod engine;
pub(crate) mod eviction;
pub(crate) mod killed;
pub(crate) mod log;
pub(crate) mod round_robin;
pub(crate) mod sqlite;

#[cfg(feature = "redis")]
pub(crate) mod connect_redis;
#[cfg(feature = "dynamodb")]
pub(crate) mod dynamodb;
#[cfg(feature = "dynamodb")]
pub(crate) mod dynamodb_items;
#[cfg(feature = "dynamodb")]
pub(crate) mod dynamodb_proxy;
#[cfg(feature = "redis")]
pub(crate) mod loss;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "postgres")]
pub(crate) mod private_postgres;
#[cfg(feature = "redis")]
pub(crate) mod private_redis;
#[cfg(any(feature = "postgres", feature = "redis"))]
#[allow(dead_code, reason = "tests of another crate use the rest")]
pub(crate) mod proxy;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "redis")]
pub(crate) mod redis_nodes;
#[cfg(feature = "archive-remote")]
pub(crate) mod s3;
#[cfg(any(feature = "postgres", feature = "redis"))]
pub(crate) mod soak;
