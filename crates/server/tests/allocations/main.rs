//! A separate program, because it counts the allocations of the whole process.

mod flood;
#[path = "../it/kit/mod.rs"]
mod kit;
mod vanished;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::Mutex;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Held by each test while it runs: concurrent tests would distort the count.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Returns the bytes in use.
fn in_use() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}
