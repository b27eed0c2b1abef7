//! At and beyond `keys_max`: which keys are evicted, which share the overflow entry, and what a flood of keys
//! costs.

use std::time::Duration;

use tidegate::{Cost, EvictCause, Gate, Instant, Keyed, KeyedEvent, Outcome, Rate, Refused};

use crate::kit::keyed::{IDLE, by_hand, has, poll_once, rate, record_notices, slots, take_notices};
use crate::kit::{REQUEST, millis, secs};

const OVERFLOWED: fn(usize) -> (Option<u64>, KeyedEvent) =
    |keys_max| (None, KeyedEvent::Overflowed { keys_max });

/// A bucket that is full again one second after use.
fn short() -> tidegate::Limits {
    rate(Rate::per_second(1).burst(1))
}

#[test]
fn key_without_state_is_evicted_for_a_new_key() {
    let (builder, clock) = by_hand(short());
    let (builder, notices) = record_notices(builder);
    let keyed = builder.keys_max(2).build().unwrap();
    for key in [1, 2] {
        drop(keyed.try_acquire(&key, REQUEST).unwrap());
    }
    clock.advance(millis(500));
    drop(keyed.try_acquire(&1, REQUEST));
    clock.advance(millis(500));
    let held = keyed.try_acquire(&2, REQUEST).unwrap();
    drop(keyed.try_acquire(&3, REQUEST).unwrap());
    assert!(!has(&keyed, 1) && has(&keyed, 2) && has(&keyed, 3));
    assert_eq!(take_notices(&notices), [(Some(1), KeyedEvent::Evicted { cause: EvictCause::Size })]);
    let seen = keyed.snapshot(9);
    assert_eq!((seen.keys, seen.evicted_size, seen.evicted_idle, seen.overflowed), (2, 1, 0, 0));
    assert_eq!((seen.admitted, keyed.len()), (4, 2), "its admissions stay counted");
    drop(held);
}

#[test]
fn new_keys_share_overflow_entry_when_full() {
    let (builder, clock) = by_hand(slots(5));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.keys_max(2).overflow(slots(1)).build().unwrap();
    let held = [1, 2].map(|key| keyed.try_acquire(&key, REQUEST).unwrap());
    let shared = keyed.try_acquire(&3, REQUEST).unwrap();
    let refused = keyed.try_acquire(&4, REQUEST).unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Slots, retry_after: None }, "one slot for all of them");
    assert!(keyed.try_acquire(&1, REQUEST).is_ok(), "a key that has an entry uses its own");
    assert!(!has(&keyed, 3) && !has(&keyed, 4));
    assert_eq!((keyed.len(), keyed.snapshot(0).overflowed), (2, 2));
    assert_eq!(take_notices(&notices), [OVERFLOWED(2)]);
    drop(shared);
    clock.advance(secs(1));
    assert!(keyed.try_acquire(&4, REQUEST).is_ok());
    drop(held);
    drop(keyed.try_acquire(&4, REQUEST).unwrap());
    assert!(has(&keyed, 4), "there is space again");
    assert_eq!(keyed.snapshot(9).in_flight, 0);
}

#[test]
fn overflow_limits_default_to_builder_limits() {
    let (builder, _) = by_hand(slots(1));
    let keyed = builder.keys_max(1).limits_by(|_| slots(3)).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let shared = keyed.try_acquire(&2, REQUEST).unwrap();
    assert!(keyed.try_acquire(&3, REQUEST).is_err());
    drop((held, shared));
}

/// Regression: seconds were counted in ticks of 2³⁰ ns, so two overflows a millisecond apart were both
/// reported across a tick boundary, and a clock that stepped back repeated every report.
#[test]
fn overflow_event_is_limited_to_one_per_second() {
    let (builder, clock) = by_hand(slots(1));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.keys_max(1).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let mut times = Vec::new();
    for step in 1_070..5_070 {
        clock.set(Instant::ZERO + millis(step));
        drop(keyed.try_acquire(&2, REQUEST));
        times.extend(take_notices(&notices).iter().map(|_| step));
    }
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 1_000), "reported at {times:?} ms");
    assert!((3..=4).contains(&times.len()), "reported at {times:?} ms");
    assert_eq!(keyed.snapshot(0).overflowed, 4_000);
    for _ in 0..10 {
        clock.set(Instant::ZERO);
        drop(keyed.try_acquire(&2, REQUEST));
        clock.set(Instant::ZERO + millis(5_069));
        drop(keyed.try_acquire(&2, REQUEST));
    }
    assert!(take_notices(&notices).len() <= 1, "a clock that steps back and forth reports nothing new");
    drop(held);
}

#[test]
fn registry_of_one_key_serves_keys_in_turn() {
    for shards in [1, 16, 1_024] {
        let (builder, clock) = by_hand(short());
        let keyed = builder.keys_max(1).shards(shards).build().unwrap();
        for key in 0..50 {
            drop(keyed.try_acquire(&key, REQUEST).unwrap());
            assert!(has(&keyed, key), "key {key} of {shards} shards");
            assert_eq!(keyed.len(), 1);
            clock.advance(secs(1));
        }
        assert_eq!(keyed.snapshot(0).overflowed, 0);
    }
}

/// Regression: a call looks for space in at most 16 shards. With many more shards than keys nearly all are
/// empty, and new keys shared the overflow entry although another key could have been evicted.
#[test]
fn evictable_key_is_found_in_any_shard() {
    for (keys_max, shards) in [(3, 1_024), (8, 64), (64, 16), (100, 1), (2_048, 1_024)] {
        let (builder, clock) = by_hand(short());
        let keyed = builder.keys_max(keys_max).shards(shards).build().unwrap();
        for key in 0..keys_max as u64 {
            drop(keyed.try_acquire(&key, REQUEST).unwrap());
        }
        for key in 10_000..10_000 + keys_max as u64 {
            // Every key is evictable, so the first one examined is evicted.
            clock.advance(secs(1));
            drop(keyed.try_acquire(&key, REQUEST).unwrap());
            assert!(has(&keyed, key), "{keys_max} keys in {shards} shards");
        }
        let seen = keyed.snapshot(0);
        let gone = 2 * keys_max as u64 - keyed.len() as u64;
        assert_eq!((seen.evicted_size + seen.evicted_idle, seen.overflowed), (gone, 0));
    }
}

#[test]
fn one_evictable_key_among_many_is_found_in_steps() {
    let (builder, clock) = by_hand(slots(1));
    let keyed = builder.keys_max(100).build().unwrap();
    let held: Vec<_> = (0..99).map(|key| keyed.try_acquire(&key, REQUEST).unwrap()).collect();
    drop(keyed.try_acquire(&99, REQUEST).unwrap());
    clock.advance(secs(1));
    let calls = (0..1_000).take_while(|_| {
        let before = keyed.examined();
        let permit = keyed.try_acquire(&500, REQUEST);
        assert!(keyed.examined() - before <= 8);
        drop(permit);
        !has(&keyed, 500)
    });
    let calls = calls.count();
    assert!(calls < 100, "{calls} calls, each of which examines eight of a hundred keys");
    assert!(!has(&keyed, 99));
    drop(held);
}

#[test]
fn overflow_waiters_are_served_and_counted() {
    let (builder, _) = by_hand(slots(1));
    let keyed = builder.keys_max(1).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let shared = keyed.try_acquire(&2, REQUEST).unwrap();
    let mut waiter = Box::pin(keyed.acquire(&3, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    let seen = keyed.snapshot(9);
    assert_eq!((seen.keys, seen.in_flight, seen.waiting), (1, 2, 1), "requests of the overflow entry count");
    drop(shared);
    assert!(poll_once(waiter.as_mut()).is_ready());
    drop((held, waiter));
    let seen = keyed.snapshot(9);
    assert_eq!((seen.in_flight, seen.waiting, seen.admitted, seen.total), (0, 0, 3, 3));
}

#[test]
fn idle_eviction_reports_idle_cause() {
    let (builder, clock) = by_hand(short());
    let (builder, notices) = record_notices(builder);
    let keyed = builder.keys_max(1).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.advance(IDLE);
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    assert_eq!(take_notices(&notices), [(Some(1), KeyedEvent::Evicted { cause: EvictCause::Idle })]);
}

/// A flood of keys that are used once, each with a bucket that refills within a second, and one that is
/// limited for an hour.
fn flood(keys: u64, keys_max: usize) {
    let (builder, clock) = by_hand(short());
    let limited = keys + 1;
    let own = rate(Rate::per_hour(1).burst(1));
    let builder = builder.keys_max(keys_max);
    let keyed: Keyed<u64> = builder
        .limits_by(move |key| if *key == limited { own.clone() } else { short() })
        .build()
        .expect("within the bounds");
    keyed.try_acquire(&limited, REQUEST).expect("its one").settle(Outcome::success());
    // `keys_max` is about the arrivals of a second, so most keys find space and some do not.
    let a_second = keys_max as u64 * 2;
    for key in 0..keys {
        if key % a_second == 0 {
            clock.advance(secs(1));
        }
        let before = keyed.examined();
        let permit = keyed.try_acquire(&key, Cost::request());
        let examined = keyed.examined() - before;
        assert!(examined <= 8, "a call examined {examined} entries");
        assert!(keyed.len() <= keys_max, "{} keys", keyed.len());
        drop(permit);
        if key % 1_000 == 0 {
            assert!(
                keyed.try_acquire(&limited, REQUEST).is_err(),
                "the limited key was admitted at key {key}"
            );
        }
    }
    let seen = keyed.snapshot(keys_max);
    assert_eq!((seen.keys, seen.top.len(), seen.in_flight), (keys_max, keys_max, 0));
    assert!(seen.evicted_size > 0 && seen.overflowed > 0, "both paths were taken: {seen:?}");
    assert_eq!(seen.total, keys + 1 + keys.div_ceil(1_000));
    assert!(has(&keyed, limited));
    clock.advance(Duration::from_secs(3_600));
    assert!(keyed.try_acquire(&limited, REQUEST).is_ok(), "an hour later it is admitted");
}

#[test]
fn flood_of_keys_is_bounded_and_keeps_limited_key() {
    let is_deep = std::env::var_os("TIDEGATE_DEEP").is_some();
    flood(if is_deep { 10_000_000 } else { 1_000_000 }, 10_000);
}

#[test]
fn flood_of_limiting_keys_is_bounded() {
    let (builder, _) = by_hand(rate(Rate::per_day(1).burst(1)));
    let keyed = builder.keys_max(1_000).overflow(rate(Rate::per_second(5).burst(5))).build().unwrap();
    let entered = (0..100_000).filter(|key| {
        let before = keyed.examined();
        let is_in = keyed.try_acquire(key, REQUEST).is_ok();
        assert!(keyed.examined() - before <= 8);
        is_in
    });
    assert_eq!(entered.count(), 1_005, "a thousand in their own entries, and five in the overflow entry");
    let seen = keyed.snapshot(0);
    assert_eq!((seen.keys, seen.overflowed, seen.evicted_size + seen.evicted_idle), (1_000, 99_000, 0));
    assert_eq!((seen.total, seen.refused), (100_000, 98_995));
    assert!((0..1_000).all(|key| keyed.try_acquire(&key, REQUEST).is_err()), "no limited key was reset");
}

/// Regression: the `Retry-After` of one overflowing host paused all hosts in the shared entry.
#[test]
fn hint_of_one_overflowing_key_pauses_no_other() {
    let (builder, _clock) = by_hand(slots(5));
    let keyed = builder.keys_max(1).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let shared = keyed.try_acquire(&2, REQUEST).unwrap();
    shared.settle(Outcome::overload().retry_after(secs(60)));
    assert!(keyed.try_acquire(&3, REQUEST).is_ok());
    // A key with an entry of its own is paused by its hint.
    drop(held);
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::overload().retry_after(secs(60)));
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
}
