//! How many bytes a throttle and a waiter take, by an allocator that counts.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::alloc::System;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tidegate::{Cost, Rate, Slots, Throttle};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const WAITERS: usize = 10_000;

/// Bytes in use.
fn in_use() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn main() {
    println!("throttle_bytes {}", throttle_bytes());
    println!("waiter_bytes {}", waiter_bytes());
}

/// What a throttle adds to the plan it shares with others: `twin` builds a second one under the same plan.
fn throttle_bytes() -> usize {
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=5))
        .rate(Rate::per_second(5))
        .build()
        .expect("within the bounds");
    let before = in_use();
    let twin = throttle.twin();
    let bytes = in_use() - before;
    drop(twin);
    bytes
}

fn waiter_bytes() -> usize {
    let throttle = Throttle::builder().slots(Slots::fixed(1)).build().expect("within the bounds");
    let held = throttle.try_acquire(Cost::request()).expect("nobody is there");
    let mut futures: Vec<Pin<Box<_>>> =
        (0..WAITERS).map(|_| Box::pin(throttle.acquire(Cost::request()))).collect();
    let before = in_use();
    let mut context = Context::from_waker(Waker::noop());
    for future in &mut futures {
        assert!(future.as_mut().poll(&mut context).is_pending(), "the one slot is held");
    }
    let bytes = (in_use() - before) / WAITERS;
    drop(futures);
    drop(held);
    bytes
}
