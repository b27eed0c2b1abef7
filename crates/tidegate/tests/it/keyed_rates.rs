//! Keys with only a rate have no throttle until a call needs one; no caller can tell.

use std::time::Duration;

use tidegate::{
    Cost, EvictCause, Instant, Keyed, KeyedEvent, ManualClock, Outcome, Permit, Phase, Rate, Refused,
};

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

#[test]
fn permit_keeps_its_key_while_the_table_grows() {
    let (builder, clock) = by_hand(rate(Rate::per_second(5)));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.shards(1).build().expect("within the bounds");
    let permit = admitted(&keyed, 1);
    for key in 100..400 {
        drop(admitted(&keyed, key));
    }
    clock.advance(IDLE);
    for _ in 0..5 {
        sweep(&keyed, CALLER);
    }
    assert!(has(&keyed, 1), "its permit is held");
    assert_eq!(keyed.len(), 2);
    take_notices(&notices);
    permit.settle(Outcome::success());
    clock.advance(IDLE);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
    assert_eq!(take_notices(&notices), [(Some(1), KeyedEvent::Evicted { cause: EvictCause::Idle })]);
}

/// A throttle was made while permits of the key without one were held: they still end.
#[test]
fn permits_end_after_their_key_has_a_throttle() {
    let (keyed, clock) = fives();
    let permits = [(); 4].map(|()| admitted(&keyed, 1));
    let handle = keyed.get(&1).expect("it exists");
    let [first, second, third, fourth] = permits;
    first.settle(Outcome::success());
    drop(second);
    drop(third.into_owned());
    drop(handle);
    clock.advance(IDLE);
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1), "one permit is held");
    fourth.settle(Outcome::overload().retry_after(secs(30)));
    assert!(is_paused(&keyed, 1));
    clock.advance(IDLE);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1), "no permit is held, and the pause is over");
}

#[test]
fn full_registry_replaces_only_rates_without_permits() {
    let (builder, clock) = by_hand(rate(Rate::per_second(5)));
    let keyed = builder.shards(1).keys_max(2).build().expect("within the bounds");
    let permit = admitted(&keyed, 1);
    drop(admitted(&keyed, 2));
    clock.advance(secs(2));
    drop(admitted(&keyed, 3));
    assert!(has(&keyed, 1) && !has(&keyed, 2) && has(&keyed, 3), "2 was full and had no permit");
    drop(permit);
}

#[test]
fn new_limits_reach_keys_with_permits() {
    let (keyed, _) = fives();
    let permit = admitted(&keyed, 1);
    drop(admitted(&keyed, 2));
    keyed.reconfigure(|_| slots(1));
    assert_eq!(keyed.snapshot(9).top.iter().find(|view| view.key == 1).unwrap().throttle.slots, Some(1));
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
