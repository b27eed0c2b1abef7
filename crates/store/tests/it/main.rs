//! The tests of the stores: one program, with a module per store and engine.
//!
//! The path of an engine's test begins with the engine's name, so that `cargo test -p tidegate-store redis`
//! runs them. Without the engine they are skipped, which is reported once: see [`kit::engine`].

#![allow(
    clippy::duplicate_mod,
    reason = "the tests of DynamoDB run on two engines, each with its own module tree"
)]

#[cfg_attr(
    not(all(
        feature = "archive-remote",
        feature = "dynamodb",
        feature = "postgres-tls",
        feature = "redis-tls"
    )),
    allow(dead_code, unused_imports, unused_macros, reason = "tests of other features use the rest")
)]
mod kit;

mod archive;
mod archive_killed;
#[cfg(feature = "archive-remote")]
mod archive_remote;
mod example_engine;
mod memory;
mod memory_clock;
mod memory_eviction;
mod planted;
mod sqlite;
mod sqlite_processes;
mod sqlite_store;
mod wrappers;

#[cfg(feature = "dynamodb")]
mod dynamodb;
#[cfg(feature = "dynamodb")]
mod dynoxide;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres")]
mod postgres_store;
#[cfg(feature = "postgres-tls")]
mod postgres_tls;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
mod redis_cluster;
#[cfg(feature = "redis")]
mod redis_cluster_lifecycle;
#[cfg(feature = "redis")]
mod redis_cluster_store;
#[cfg(feature = "redis")]
mod redis_lifecycle;
#[cfg(feature = "redis")]
mod redis_store;
#[cfg(feature = "redis-tls")]
mod redis_tls;
#[cfg(feature = "redis")]
mod valkey;

#[test]
fn engines_not_built_are_reported() {
    kit::engine::report_unbuilt(&[
        ("archive-remote", cfg!(feature = "archive-remote")),
        ("dynamodb", cfg!(feature = "dynamodb")),
        ("postgres", cfg!(feature = "postgres")),
        ("postgres-tls", cfg!(feature = "postgres-tls")),
        ("redis", cfg!(feature = "redis")),
        ("redis-tls", cfg!(feature = "redis-tls")),
    ]);
}
