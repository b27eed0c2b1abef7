//! Tests of the SQLite store within one process: failures of the file, the clock, or the callers.

mod batching;
mod bounds;
mod clock;
mod dropped_calls;
mod durability;
mod eviction;
mod eviction_like_memory;
mod files;
mod lifecycle;
mod like_memory;
mod panics;
mod retention;
mod tampered;
mod tokens;
