//! Its own program: it counts allocations, which are those of the whole process.

mod flood;
#[path = "../it/kit/mod.rs"]
mod kit;
mod vanished;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::Mutex;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by each test while it runs: allocations of another would be counted.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Bytes in use.
fn in_use() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}
