//! The integration tests of this crate, in one binary.
//!
//! Tests that need a server are behind the feature of its store, and are skipped unless the server's address
//! is set.

// With this cfg, locks work only inside the model scheduler, which these tests do not use.
#![cfg(not(tidegate_model))]

mod kit;

// One throttle.
mod adaptive_rate;
mod auto;
mod cancel;
mod clocks;
mod codec;
mod cooperation;
mod drain;
mod layered;
mod listeners;
mod named_limits;
mod properties;
mod queue;
mod readme;
mod run;
mod run_tokens;
mod throttle;
mod timer;

// Keyed throttles.
mod hosts;
mod keyed;
mod keyed_capacity;
mod keyed_disabled;
mod keyed_events;
mod keyed_eviction;
mod keyed_interactions;
mod keyed_listeners;
mod keyed_properties;
mod keyed_random_calls;
mod keyed_rates;
mod keyed_reconfigure;
mod keyed_regressions;
mod keyed_snapshots;
mod registrable;
mod scripted_server;
mod upstreams;

// Configuration.
mod config;
mod manifest;

// HTTP.
mod axum_layer;
mod axum_sockets;
mod http_classes;
mod rejection_bodies;
mod reqwest_limits;
mod reqwest_redirects;
mod reqwest_retry;
mod reqwest_usage;
mod tower_drops;
mod tower_generic;
mod tower_ready;
mod tower_sockets;
mod tower_wait;
mod untrusted_bodies;

// The limiter: limits in a store.
mod limiter;
mod limiter_blocking;
mod limiter_cache;
mod limiter_cancel;
mod limiter_clock;
mod limiter_idempotency;
mod limiter_lost_replies;
mod limiter_pools;
mod limiter_races;
mod limiter_regressions;
mod limiter_remote;
mod limiter_settle_errors;
mod limiter_settler;
mod limiter_sqlite;
mod limiter_unavailable;
mod limiter_waiting;
mod manifest_apply;

// A throttle joined with a limiter.
mod joined;
mod joined_cancel;
mod joined_properties;
mod joined_run;
mod joined_state_changes;
mod joined_unavailable;
mod joined_waiting;
mod joined_wakeups;

// Stores on a server.
#[cfg(feature = "dynamodb")]
mod dynamodb_unavailable;
#[cfg(feature = "postgres")]
mod postgres_unavailable;
#[cfg(feature = "redis")]
mod redis_unavailable;

#[test]
fn engines_that_were_not_built_are_reported() {
    kit::engine::report_unbuilt(&[
        ("dynamodb", cfg!(feature = "dynamodb")),
        ("postgres", cfg!(feature = "postgres")),
        ("redis", cfg!(feature = "redis")),
    ]);
}
