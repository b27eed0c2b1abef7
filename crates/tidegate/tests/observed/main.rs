//! Its own program: `tracing` caches for the whole process which events are wanted.
//!
//! Threads of other tests emit the same events without a subscriber, and could decide for all that they are unwanted.

#![cfg(not(tidegate_model))]

#[path = "../it/kit/caller.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod kit;
mod observed_keys;
mod subscribers;
mod tracing;
