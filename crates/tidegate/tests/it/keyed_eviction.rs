//! Eviction removes only keys whose state limits no caller, and only in small steps (invariant 8).

use tidegate::{
    Aimd, Brake, Budget, Circuit, Clock, Controller, EvictCause, Instant, Keyed, KeyedEvent, Limits,
    ManualClock, Outcome, Pace, Pause, Rate, Refused, Retry, RetryBudget, Slots, Throttle,
};

use crate::kit::keyed::{
    Call, IDLE, by_hand, has, keys, poll_once, rate, record_notices, slots, sweep, take_notices,
};
use crate::kit::{REQUEST, secs};

/// The key that is called while the others stay idle.
const CALLER: u64 = 0;
const YEAR: std::time::Duration = secs(31_536_000);

/// Keys in one shard, so that every call can examine every key.
fn one_shard(limits: Limits) -> (Keyed<u64>, ManualClock) {
    let (builder, clock) = by_hand(limits);
    (builder.shards(1).build().expect("within the bounds"), clock)
}

#[test]
fn idle_key_is_evicted_after_idle_ttl() {
    let (builder, clock) = by_hand(slots(1));
    let (builder, notices) = record_notices(builder);
    let keyed = builder.shards(1).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.set(Instant::ZERO + secs(180 - 1));
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1));
    clock.advance(secs(1));
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
    assert_eq!(keyed.len(), 1);
    assert_eq!(take_notices(&notices), [(Some(1), KeyedEvent::Evicted { cause: EvictCause::Idle })]);
    let seen = keyed.snapshot(0);
    assert_eq!((seen.evicted_idle, seen.evicted_size, seen.admitted), (1, 0, 1));
}

#[test]
fn every_access_keeps_a_key_alive() {
    let table: [(&str, Call); 5] = [
        ("try_acquire", |keyed| drop(keyed.try_acquire(&1, REQUEST).unwrap())),
        ("acquire", |keyed| assert!(poll_once(keyed.acquire(&1, REQUEST)).is_ready())),
        ("acquire_blocking", |keyed| drop(keyed.acquire_blocking(&1, REQUEST).unwrap())),
        ("record", |keyed| keyed.record(&1, Outcome::success())),
        ("throttle", |keyed| drop(keyed.throttle(&1))),
    ];
    for (what, access) in table {
        let (keyed, clock) = one_shard(slots(1));
        clock.advance(YEAR);
        access(&keyed);
        sweep(&keyed, CALLER);
        assert!(has(&keyed, 1), "{what} created it just now");
        clock.advance(secs(100));
        access(&keyed);
        clock.advance(secs(100));
        sweep(&keyed, CALLER);
        assert!(has(&keyed, 1), "{what} used it 100 s ago");
    }
}

#[test]
fn get_does_not_keep_a_key_alive() {
    let (keyed, clock) = one_shard(slots(1));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.advance(IDLE);
    assert!(keyed.get(&1).is_some());
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
}

/// Regression: only calls to its own keys swept a shard, so with one busy key in 16 shards the idle keys of
/// the other fifteen stayed for good.
#[test]
fn calls_for_any_key_evict_idle_keys() {
    let (keyed, clock) = keys(slots(1));
    for key in 1..=500 {
        drop(keyed.try_acquire(&key, REQUEST).unwrap());
    }
    clock.advance(IDLE);
    // Enough calls even if many of the keys fall into one shard.
    for _ in 0..10 {
        sweep(&keyed, CALLER);
        clock.advance(secs(2));
    }
    assert_eq!(keyed.len(), 1, "only the calling key is left");
}

#[test]
fn held_waiting_or_pinned_key_is_never_evicted() {
    let (keyed, clock) = one_shard(slots(1));
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    let waited_at = keyed.try_acquire(&2, REQUEST).unwrap();
    let mut waiter = Box::pin(keyed.acquire(&2, REQUEST));
    assert!(poll_once(waiter.as_mut()).is_pending());
    let pinned = keyed.throttle(&3);
    drop(keyed.try_acquire(&4, REQUEST).unwrap());
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    assert_eq!([1, 2, 3, 4].map(|key| has(&keyed, key)), [true, true, true, false]);
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "the slot is still held");
    drop(waited_at);
    assert!(poll_once(waiter.as_mut()).is_ready());
    drop((held, waiter, pinned));
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    assert_eq!(keyed.len(), 1);
    assert_eq!(keyed.snapshot(9).in_flight, 0);
}

#[test]
fn limiting_key_stays_until_it_stops_limiting() {
    let hour = secs(3_600);
    let builder = Throttle::builder;
    let table = [
        ("rate", builder().rate(Rate::per_hour(1).burst(1)), Outcome::success()),
        ("pace", builder().pace(Pace::every(hour)), Outcome::success()),
        ("budget", builder().budget(Budget::tokens(10, hour)), Outcome::success()),
        ("pause", builder().pause(Pause::default().max(hour)), Outcome::overload().retry_after(hour)),
        (
            "tail",
            builder().recovery_slots(1).pause(Pause::default().tail(hour)),
            Outcome::overload().retry_after(secs(1)),
        ),
    ];
    for (what, builder, outcome) in table {
        let (keyed, clock) = one_shard(builder.limits().unwrap());
        keyed.try_acquire(&1, REQUEST.tokens(10)).unwrap().settle(outcome);
        clock.advance(secs(3_599));
        sweep(&keyed, CALLER);
        assert!(has(&keyed, 1), "{what}");
        if what != "tail" {
            assert!(keyed.try_acquire(&1, REQUEST.tokens(10)).is_err(), "{what}");
        }
        clock.advance(hour + IDLE);
        sweep(&keyed, CALLER);
        assert!(!has(&keyed, 1), "{what}");
    }
}

#[test]
fn open_circuit_is_kept_and_refuses_until_due() {
    let circuit = Circuit::after_failures(1).open_for(secs(600)).probes(1);
    let (keyed, clock) = one_shard(Throttle::builder().circuit(circuit).limits().unwrap());
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::failure());
    clock.advance(secs(599));
    sweep(&keyed, CALLER);
    let refused = keyed.try_acquire(&1, REQUEST).unwrap_err();
    assert_eq!(refused.retry_after(), Some(secs(1)));
    clock.advance(secs(2));
    sweep(&keyed, CALLER);
    let probe = keyed.try_acquire(&1, REQUEST).unwrap();
    assert!(probe.is_probe(), "an open circuit is kept while it is used");
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1), "a probe is in flight");
    probe.settle(Outcome::failure());
    clock.advance(secs(1_199));
    sweep(&keyed, CALLER);
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "open again, for twice as long");
    clock.advance(secs(1) + IDLE);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1), "a circuit that opened long ago is evicted with the key");
}

#[test]
fn outcome_after_idle_ttl_reaches_the_same_state() {
    let limits = Throttle::builder().circuit(Circuit::after_failures(2)).limits().unwrap();
    let (keyed, clock) = one_shard(limits);
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::failure());
    let long = keyed.try_acquire(&1, REQUEST).unwrap();
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    long.settle(Outcome::failure());
    let refused = keyed.try_acquire(&1, REQUEST).unwrap_err();
    assert!(matches!(refused, Refused::CircuitOpen { .. }), "the second failure of two: {refused}");
}

#[test]
fn learned_state_outlives_pressure_until_idle_ttl() {
    let brake = Controller::Brake(Brake::default().at(1, secs(60)));
    let aimd = Controller::Aimd(Aimd::default());
    let retry = Retry::attempts(2).budget(RetryBudget::default());
    let table = [
        ("slots", Throttle::builder().slots(Slots::adaptive(1..=8)).controller(brake)),
        ("rate", Throttle::builder().rate(Aimd::RATE).controller(aimd)),
        ("circuit", Throttle::builder().circuit(Circuit::after_failures(9))),
        ("retries", Throttle::builder().retry(retry)),
    ];
    for (what, builder) in table {
        let (keyed, clock) = by_hand(builder.limits().unwrap());
        let keyed = keyed.shards(1).keys_max(1).build().unwrap();
        let work = keyed.run(&1, REQUEST, |_| async { Ok::<_, ()>(()) });
        assert!(poll_once(work).is_ready());
        keyed.record(&1, Outcome::overload());
        keyed.record(&1, Outcome::failure());
        clock.advance(secs(9));
        drop(keyed.throttle(&2));
        assert!(has(&keyed, 1) && !has(&keyed, 2), "{what} is kept in favour of a new key");
        clock.advance(IDLE);
        drop(keyed.throttle(&2));
        assert!(!has(&keyed, 1) && has(&keyed, 2), "{what} was idle for long enough");
    }
}

#[test]
fn sweep_examines_at_most_eight_keys() {
    let (keyed, clock) = one_shard(slots(1));
    for key in 1..=1_000 {
        drop(keyed.try_acquire(&key, REQUEST).unwrap());
    }
    clock.advance(YEAR);
    let mut least = keyed.len();
    for _ in 0..100_000 {
        let before = keyed.examined();
        drop(keyed.throttle(&CALLER));
        assert!(keyed.examined() - before <= 8);
        assert!(least - keyed.len() <= 8, "no call evicts more keys than it examines");
        least = least.min(keyed.len());
    }
    assert_eq!(keyed.len(), 1);
    assert_eq!(keyed.snapshot(0).evicted_idle, 1_000);
}

#[test]
fn recreated_key_starts_fresh_with_current_limits() {
    let (keyed, clock) = one_shard(rate(Rate::per_second(1).burst(2)));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    keyed.set_limits(&1, rate(Rate::per_second(1).burst(5))).unwrap();
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
    let entered = (0..9).filter(|_| keyed.try_acquire(&1, REQUEST).is_ok()).count();
    assert_eq!(entered, 5, "its own limits outlive the entry");
}

#[test]
fn clock_jumps_do_not_break_eviction() {
    let (keyed, clock) = one_shard(rate(Rate::per_second(1).burst(1)));
    clock.advance(YEAR);
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.set(Instant::ZERO);
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1), "a step back makes no key idle");
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "and refills nothing");
    let seen = keyed.snapshot(9);
    assert_eq!((seen.keys, seen.admitted), (2, 1));
    let end = Instant::ZERO + std::time::Duration::MAX;
    clock.set(end);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1), "at the end of time it is idle and full");
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    assert_eq!(keyed.snapshot(9).at, end);
    clock.set(Instant::ZERO);
    sweep(&keyed, CALLER);
    assert!(keyed.try_acquire(&3, REQUEST).is_ok());
    assert_eq!(keyed.snapshot(9).in_flight, 0);
    assert_eq!(clock.now(), Instant::ZERO);
}
