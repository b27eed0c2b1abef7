//! Keys with only a rate have no throttle until a call needs one; no caller can tell.

use std::time::Duration;

use tidegate::{Cost, Instant, Keyed, ManualClock, Outcome, Permit, Phase, Rate, Refused};

use crate::kit::keyed::{IDLE, by_hand, has, rate, record_notices, slots, sweep, take_notices};
use crate::kit::{REQUEST, secs};

const CALLER: u64 = 0;

/// Keys of five per second in one shard.
fn fives() -> (Keyed<u64>, ManualClock) {
    let (builder, clock) = by_hand(rate(Rate::per_second(5)));
    (builder.shards(1).build().expect("within the bounds"), clock)
}

fn admitted(keyed: &Keyed<u64>, key: u64) -> Permit<'static> {
    keyed.try_acquire(&key, REQUEST).expect("a unit is left")
}

fn is_paused(keyed: &Keyed<u64>, key: u64) -> bool {
    keyed.snapshot(9).top.iter().any(|view| view.key == key && view.throttle.phase == Phase::Paused)
}

#[test]
fn hint_at_the_end_of_a_permit_pauses_its_key() {
    let (keyed, _) = fives();
    let (permit, other) = (admitted(&keyed, 1), admitted(&keyed, 2));
    permit.settle(Outcome::overload().retry_after(secs(30)));
    other.settle(Outcome::success());
    assert!(is_paused(&keyed, 1) && !is_paused(&keyed, 2));
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
    assert!(keyed.try_acquire(&2, REQUEST).is_ok());
    assert_eq!(keyed.snapshot(0).admitted, 3);
}

#[test]
fn recorded_hint_pauses_the_key_of_its_permit() {
    let (keyed, _) = fives();
    let mut permit = admitted(&keyed, 1);
    permit.record(Outcome::overload().retry_after(secs(30)));
    assert!(is_paused(&keyed, 1));
    drop(permit);
    assert_eq!(keyed.snapshot(0).admitted, 1);
}

#[test]
fn refusal_continues_from_the_level_of_the_rate() {
    let (keyed, clock) = fives();
    for _ in 0..5 {
        drop(admitted(&keyed, 1));
    }
    let Err(Refused::Limited { retry_after, .. }) = keyed.try_acquire(&1, REQUEST) else {
        panic!("it is empty")
    };
    assert_eq!(retry_after, Some(Duration::from_millis(200)));
    clock.advance(Duration::from_millis(200));
    drop(admitted(&keyed, 1));
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
    let seen = keyed.snapshot(9);
    assert_eq!((seen.admitted, seen.top[0].throttle.admitted, seen.keys), (6, 6, 1));
}

#[test]
fn snapshot_shows_the_level_of_a_rate() {
    let (keyed, _) = fives();
    drop((admitted(&keyed, 1), admitted(&keyed, 1)));
    let seen = keyed.snapshot(9).top.remove(0).throttle;
    let same = keyed.get(&1).expect("it exists").snapshot();
    assert_eq!((seen.admitted, seen.rate_level), (2, Some(3)));
    assert_eq!(seen, same, "a handle shows what the registry showed");
}

/// A full bucket may be evicted while its request is in flight; the upstream's hint holds when the key returns.
#[test]
fn hint_after_an_eviction_pauses_the_returning_key() {
    let (builder, clock) = by_hand(rate(Rate::per_second(5)));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.shards(1).build().expect("within the bounds");
    let permits = [(); 2].map(|()| admitted(&keyed, 1));
    // The table grows, and shrinks again.
    for key in 100..400 {
        drop(admitted(&keyed, key));
    }
    for _ in 0..5 {
        clock.advance(IDLE);
        sweep(&keyed, CALLER);
    }
    assert!(!has(&keyed, 1));
    take_notices(&notices);
    let [first, second] = permits;
    first.settle(Outcome::overload().retry_after(secs(30)));
    second.settle(Outcome::success());
    assert!(!has(&keyed, 1), "a hint creates no key");
    clock.advance(secs(10));
    let Err(Refused::Limited { retry_after, .. }) = keyed.try_acquire(&1, REQUEST) else {
        panic!("it is paused")
    };
    assert_eq!(retry_after, Some(secs(20)));
    assert!(keyed.try_acquire(&2, REQUEST).is_ok());
    clock.advance(secs(20));
    drop(admitted(&keyed, 1));
}

/// The throttle of the evicted key was made under another key's limits.
#[test]
fn returning_key_follows_its_own_limits() {
    let (builder, clock) = by_hand(slots(1));
    let builder = builder.limits_by(|key| rate(Rate::per_second(*key)));
    let keyed = builder.shards(1).build().expect("within the bounds");
    let permit = admitted(&keyed, 2);
    clock.advance(IDLE);
    drop(admitted(&keyed, 9));
    sweep(&keyed, 9);
    assert!(!has(&keyed, 2));
    permit.settle(Outcome::overload().retry_after(secs(1)));
    clock.advance(secs(10));
    drop([(); 2].map(|()| admitted(&keyed, 2)));
    assert!(keyed.try_acquire(&2, REQUEST).is_err(), "two per second");
}

#[test]
fn returning_key_has_its_full_burst() {
    let (builder, clock) = by_hand(slots(1));
    let builder = builder.limits_by(|key| rate(Rate::per_second(*key)));
    let keyed = builder.shards(1).build().expect("within the bounds");
    let permit = admitted(&keyed, 9);
    clock.advance(IDLE);
    drop(admitted(&keyed, 2));
    sweep(&keyed, 2);
    assert!(!has(&keyed, 9));
    permit.settle(Outcome::overload().retry_after(secs(1)));
    assert!(keyed.try_acquire(&9, REQUEST).is_err(), "it is paused");
    // Nothing refills during the pause, and it had all before.
    clock.advance(secs(1));
    let held = [(); 9].map(|()| keyed.try_acquire(&9, REQUEST));
    assert!(held.iter().all(Result::is_ok), "{held:?}");
}

/// A throttle was made while permits of the key without one were out.
#[test]
fn permits_end_after_their_key_has_a_throttle() {
    let (keyed, _) = fives();
    let [first, second, third, fourth] = [(); 4].map(|()| admitted(&keyed, 1));
    drop(keyed.get(&1).expect("it exists"));
    first.settle(Outcome::success());
    drop(second);
    drop(third.into_owned());
    fourth.settle(Outcome::overload().retry_after(secs(30)));
    assert!(is_paused(&keyed, 1));
    assert_eq!((keyed.snapshot(0).admitted, keyed.len()), (4, 1));
}

#[test]
fn new_limits_reach_keys_with_only_a_rate() {
    let (keyed, _) = fives();
    let permit = admitted(&keyed, 1);
    drop(admitted(&keyed, 2));
    keyed.reconfigure(|_| slots(1));
    let held = keyed.try_acquire(&2, REQUEST).expect("on its next use");
    assert!(keyed.try_acquire(&2, REQUEST).is_err(), "one slot");
    permit.settle(Outcome::success());
    drop(held);
    assert_eq!(keyed.snapshot(0).in_flight, 0);
}

#[test]
fn own_limits_and_bypass_apply_to_rates() {
    let (keyed, _) = fives();
    drop(admitted(&keyed, 1));
    keyed.set_limits(&1, rate(Rate::per_second(1))).expect("there is space");
    keyed.set_enabled(false);
    for _ in 0..20 {
        drop(keyed.try_acquire(&1, REQUEST).expect("limits are off"));
        drop(keyed.try_acquire(&2, REQUEST).expect("limits are off"));
    }
    keyed.set_enabled(true);
    keyed.close();
    assert_eq!(keyed.try_acquire(&1, REQUEST).unwrap_err(), Refused::Closed);
    assert_eq!(keyed.try_acquire(&3, REQUEST).unwrap_err(), Refused::Closed);
}

#[test]
fn permit_outlives_its_registry() {
    let (keyed, clock) = fives();
    let (first, mut second) = (admitted(&keyed, 1), admitted(&keyed, 1));
    drop(keyed);
    first.settle(Outcome::success());
    second.record(Outcome::overload().retry_after(secs(30)));
    clock.advance(secs(1));
    second.settle(Outcome::failure());
}

#[test]
fn late_clock_does_not_refill_a_rate() {
    let (keyed, clock) = fives();
    clock.set(Instant::ZERO + secs(100));
    for _ in 0..5 {
        drop(admitted(&keyed, 1));
    }
    clock.set(Instant::ZERO + secs(50));
    assert!(keyed.try_acquire(&1, Cost::request()).is_err());
    clock.set(Instant::ZERO + secs(100));
    assert!(keyed.try_acquire(&1, Cost::request()).is_err(), "the same second, once");
}
