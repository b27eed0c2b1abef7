//! The memory of a key under `Auto`, with everything that its throttle has, and the allocations of its calls. A
//! separate program, because it counts those of the whole process.

use std::alloc::System;
use std::time::Duration;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tidegate::{Cost, Dimension, Keyed, ManualClock, Outcome, QuotaLevel, Reset, Throttle};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const KEYS: usize = 1_000;

fn in_use() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// Calls every key twenty times, and returns how many calls were admitted.
fn call_all(keyed: &Keyed<usize>, clock: &ManualClock, cost: Cost, outcome: Outcome) -> usize {
    let call = |key| {
        let permit = keyed.try_acquire(&key, cost);
        permit.map(|permit| permit.settle(outcome)).is_ok()
    };
    let mut admitted = 0;
    for _ in 0..20 {
        clock.advance(Duration::from_secs(1));
        admitted += (0..KEYS).filter(|key| call(*key)).count();
    }
    admitted
}

#[test]
fn key_of_auto_is_small_and_calls_do_not_allocate() {
    let reset = Reset::Full(Duration::from_secs(60));
    let level = QuotaLevel { limit: 6_000, remaining: 5_900, reset, window: None };
    let request = Cost::request();
    // Kinds of tokens are boxed in the charge.
    let table = [
        (request, Outcome::success(), 1_200, 0),
        (request, Outcome::success().quota(Dimension::Requests, level), 1_300, 0),
        (request.tokens(100), Outcome::success(), 1_400, 0),
        (request.input_tokens(100).output_tokens(5), Outcome::success(), 1_600, 1),
    ];
    for (cost, outcome, bytes_max, allocations_wanted) in table {
        let clock = ManualClock::default();
        let limits = Throttle::auto().limits().unwrap();
        let keyed: Keyed<usize> = Keyed::builder(limits).clock(clock.clone()).keys_max(KEYS).build().unwrap();
        let before = in_use();
        assert_eq!(call_all(&keyed, &clock, cost, outcome), 20 * KEYS);
        let bytes = (in_use() - before) / KEYS;
        assert!(bytes <= bytes_max, "{bytes} bytes for {cost:?}");
        let before = ALLOCATOR.stats().allocations;
        let admitted = call_all(&keyed, &clock, cost, outcome);
        let allocations = ALLOCATOR.stats().allocations - before;
        assert_eq!(allocations, admitted * allocations_wanted, "{cost:?}");
    }
}
