//! The integration tests of this crate, as one program.
//!
//! Tests that need a server are behind the feature of its store, and are skipped where the server's address is not set.

// With this cfg locks work only inside the model scheduler, which these tests do not run under.
#![cfg(not(tidegate_model))]

mod kit;

// One throttle.
mod adaptive_rate;
mod auto;
mod cancel;
mod clocks;
mod drain;
mod keeper;
mod layered;
mod listeners;
mod properties;
mod queue;
mod run;
mod throttle;

// Many throttles by key.
mod far_sides;
mod host_cases;
mod keyed;
mod keyed_between;
mod keyed_events;
mod keyed_forgets;
mod keyed_full;
mod keyed_listeners;
mod keyed_off;
mod keyed_properties;
mod keyed_rules;
mod keyed_snapshots;
mod keyed_stories;
mod keyed_wander;
mod registrable;
mod scripted_server;

// Configuration.
mod config;
mod manifest;

// HTTP.
mod axum_layer;
mod axum_sockets;
mod http_classes;
mod outside_bodies;
mod reqwest_limits;
mod reqwest_redirects;
mod reqwest_retry;
mod tower_drops;
mod tower_ready;
mod tower_sockets;
mod tower_wait;

// Limits in a store.
mod declared;
mod limiter;
mod limiter_away;
mod limiter_blocking;
mod limiter_cache;
mod limiter_cancel;
mod limiter_chosen;
mod limiter_clock;
mod limiter_lost;
mod limiter_races;
mod limiter_refused;
mod limiter_remote;
mod limiter_settler;
mod limiter_sqlite;
mod limiter_stories;
mod limiter_waiting;

// A throttle and a limiter together.
mod joined;
mod joined_away;
mod joined_cancel;
mod joined_properties;
mod joined_returns;
mod joined_turned;
mod joined_waiting;

// Stores on a server.
#[cfg(feature = "dynamodb")]
mod dynoxide_away;
#[cfg(feature = "postgres")]
mod postgres_away;
#[cfg(feature = "redis")]
mod redis_away;

#[test]
fn engines_that_were_not_built_are_reported() {
    kit::engine::report_unbuilt(&[
        ("dynamodb", cfg!(feature = "dynamodb")),
        ("postgres", cfg!(feature = "postgres")),
        ("redis", cfg!(feature = "redis")),
    ]);
}
