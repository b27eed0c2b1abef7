//! The memory of a key under `Auto`, with everything that its throttle has, and the allocations of calls: none per
//! request, except for one box of a cost with kinds of tokens, which keeps the charges of all others small (decision
//! record 049). A separate program, because it counts those of the whole process.

use std::alloc::System;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tidegate::{Cost, Dimension, Keyed, ManualClock, Outcome, QuotaLevel, Random, Reset, Slots, Throttle};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const KEYS: usize = 1_000;

/// Held by each test: the counts are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocations of a thousand calls, after as many that fill what grows once.
fn allocations(call: impl Fn()) -> usize {
    let thousand = || (0..1_000).for_each(|_| call());
    thousand();
    let before = ALLOCATOR.stats().allocations;
    thousand();
    ALLOCATOR.stats().allocations - before
}

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
    let _alone = alone();
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

#[test]
fn rejections_and_records_do_not_allocate() {
    let _alone = alone();
    let clock = ManualClock::default();
    let builder = Throttle::auto().clock(clock.clone()).random(Random::fixed(0.5));
    let throttle = builder.build().unwrap();
    let rejection = Outcome::overload().exceeded(Dimension::Requests);
    let hinted = rejection.retry_after(Duration::from_millis(1));
    for outcome in [Outcome::success(), rejection, hinted, Outcome::failure()] {
        let call = || {
            clock.advance(Duration::from_secs(60));
            if let Ok(permit) = throttle.try_acquire(100) {
                permit.settle(outcome);
            }
        };
        let counts = (allocations(call), allocations(|| throttle.record(outcome)));
        // Events and pauses do, which are few.
        assert!(counts.0 < 100 && counts.1 < 100, "{counts:?} of 1,000 for {outcome:?}");
    }
}

#[test]
fn queued_acquire_allocates_once() {
    let _alone = alone();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(ManualClock::default()).build().unwrap();
    let call = || {
        let held = throttle.try_acquire(()).unwrap();
        let mut waiting = pin!(throttle.acquire(()));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(held);
        assert!(waiting.as_mut().poll(&mut context).is_ready());
    };
    // The list of wakers that are woken after the lock is released.
    assert_eq!(allocations(call), 1_000);
}
