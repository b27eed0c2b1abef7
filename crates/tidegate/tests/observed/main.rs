//! Tests of traces and metrics, in their own binary because `tracing` caches interest per callsite for the
//! whole process.
//!
//! Threads of other tests emit the same events without a subscriber, and could disable these callsites for
//! all.

#![cfg(not(tidegate_model))]

mod keyed_telemetry;
#[path = "../it/kit/caller.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod kit;
mod subscribers;
mod tracing;
