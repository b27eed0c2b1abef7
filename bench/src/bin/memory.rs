//! Bytes per throttle and waiter, or with the argument `buckets` per bucket, or with `keys` per key, by a
//! counting allocator.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::alloc::System;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tidegate::store::ManualWall;
use tidegate::{Cost, Keyed, Limit, Limiter, Memory, Policy, Rate, Scope, Slots, Stamp, Throttle};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const WAITERS: usize = 10_000;
const ENTITIES: usize = 1_000_000;
const KEYS: usize = 1_000_000;

/// Bytes in use.
fn in_use() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("buckets") => {
            let (bucket, ledger) = bucket_bytes();
            println!("bucket_bytes {bucket}");
            println!("ledger_bytes {ledger}");
        }
        Some("keys") => println!("key_bytes {}", key_bytes()),
        _ => {
            println!("throttle_bytes {}", throttle_bytes());
            println!("waiter_bytes {}", waiter_bytes());
        }
    }
}

/// Bytes that a throttle adds to the plan it shares: `twin` builds a second one under the same plan.
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

/// Bytes of a key with a rate alone, of a million; includes the table.
fn key_bytes() -> usize {
    let limits = Throttle::builder().rate(Rate::per_second(5)).limits().expect("within the bounds");
    let keyed: Keyed<u64> = Keyed::builder(limits).keys_max(KEYS).build().expect("within the bounds");
    let before = in_use();
    for key in 0..KEYS {
        drop(keyed.try_acquire(&(key as u64), Cost::request()).expect("a fresh bucket is full"));
    }
    assert_eq!(keyed.len(), KEYS, "every key exists");
    (in_use() - before) / KEYS
}

fn waiter_bytes() -> usize {
    let throttle = Throttle::builder().slots(Slots::fixed(1)).build().expect("within the bounds");
    let held = throttle.try_acquire(Cost::request()).expect("no slot is in use");
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

/// Bytes of a bucket of two limits, without and with usage, of a million entities. Both include the records
/// of the last quarter of a million leases.
fn bucket_bytes() -> (usize, usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let clock = ManualWall::new(Stamp::from_secs(1_800_000_000));
        let store = Memory::with_clock(clock.clone());
        let before = in_use();
        let limits = [Limit::per_minute("rpm", 60), Limit::per_minute("tpm", 100_000)];
        let limiter = Limiter::builder(store.clone()).cache_max(1).build();
        let limiter = limiter.expect("within the bounds");
        // A policy that was just written: buckets under a new policy are not evicted, even when full.
        let policy = Policy::new(limits).expect("a policy");
        limiter.admin("bench").set_policy(Scope::System, policy).await.expect("in memory");
        for number in 0..ENTITIES {
            let name = format!("user-{number}");
            let lease = limiter.try_acquire((name.as_str(), "gpt-4"), [("rpm", 1), ("tpm", 800)]).await;
            // Fast enough for the policy to be new at the end, and slow enough for leases to be evicted.
            clock.advance(std::time::Duration::from_micros(100));
            // Returned: nothing is written to the ledger.
            drop(lease.expect("a fresh bucket is full"));
        }
        assert_eq!(store.stats().subjects, ENTITIES as u64, "every subject exists");
        let bucket = (in_use() - before) / ENTITIES;
        for number in 0..ENTITIES {
            let name = format!("user-{number}");
            let spent = limiter.spend((name.as_str(), "gpt-4"), [("rpm", 1), ("tpm", 800)]).await;
            spent.expect("a full bucket");
        }
        (bucket, (in_use() - before) / ENTITIES)
    })
}
