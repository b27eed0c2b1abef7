//! Only what holds nobody back is forgotten, and only in small steps (invariant 8).

use tidegate::{
    Aimd, Brake, Budget, Circuit, Clock, Controller, Evict, Instant, Keyed, KeyedEvent, Limits, ManualClock,
    Outcome, Pace, Pause, Rate, Refused, Retry, RetryBudget, Slots, Throttle,
};

use crate::kit::keyed::{Call, IDLE, by_hand, has, hearing, keys, poll_once, rate, slots, sweep, told};
use crate::kit::{REQUEST, secs};

/// The key that calls while the others are left alone.
const CALLER: u64 = 0;
const YEAR: std::time::Duration = secs(31_536_000);

/// Keys in one shard, so that every call may look at every key.
fn one_shard(limits: Limits) -> (Keyed<u64>, ManualClock) {
    let (builder, clock) = by_hand(limits);
    (builder.shards(1).build().expect("within the bounds"), clock)
}

#[test]
fn an_idle_key_is_forgotten_after_its_time_and_no_earlier() {
    let (builder, clock) = by_hand(slots(1));
    let (builder, heard) = hearing(builder);
    let keyed = builder.shards(1).build().unwrap();
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.set(Instant::ZERO + secs(180 - 1));
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1));
    clock.advance(secs(1));
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
    assert_eq!(keyed.len(), 1);
    assert_eq!(told(&heard), [(Some(1), KeyedEvent::Evicted { cause: Evict::Idle })]);
    let seen = keyed.snapshot(0);
    assert_eq!((seen.evicted_idle, seen.evicted_size, seen.admitted), (1, 0, 1));
}

#[test]
fn asking_for_a_key_in_any_way_keeps_it() {
    let table: [(&str, Call); 5] = [
        ("try_acquire", |keyed| drop(keyed.try_acquire(&1, REQUEST).unwrap())),
        ("acquire", |keyed| assert!(poll_once(keyed.acquire(&1, REQUEST)).is_ready())),
        ("acquire_blocking", |keyed| drop(keyed.acquire_blocking(&1, REQUEST).unwrap())),
        ("record", |keyed| keyed.record(&1, Outcome::success())),
        ("throttle", |keyed| drop(keyed.throttle(&1))),
    ];
    for (what, ask) in table {
        let (keyed, clock) = one_shard(slots(1));
        clock.advance(YEAR);
        ask(&keyed);
        sweep(&keyed, CALLER);
        assert!(has(&keyed, 1), "{what} made it a moment ago");
        clock.advance(secs(100));
        ask(&keyed);
        clock.advance(secs(100));
        sweep(&keyed, CALLER);
        assert!(has(&keyed, 1), "{what} came 100 s ago");
    }
}

#[test]
fn looking_at_a_key_does_not_keep_it() {
    let (keyed, clock) = one_shard(slots(1));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.advance(IDLE);
    assert!(keyed.get(&1).is_some());
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
}

/// The story: a shard was swept by calls to its own keys alone, so with one busy key in one of 16 shards the idle keys
/// of the other fifteen stayed for good.
#[test]
fn idle_keys_leave_whichever_key_is_asked_for() {
    let (keyed, clock) = keys(slots(1));
    for key in 1..=500 {
        drop(keyed.try_acquire(&key, REQUEST).unwrap());
    }
    clock.advance(IDLE);
    // As often as it takes where chance has put many of them into one shard.
    for _ in 0..10 {
        sweep(&keyed, CALLER);
        clock.advance(secs(2));
    }
    assert_eq!(keyed.len(), 1, "all but the one that calls");
}

#[test]
fn a_key_that_is_held_waited_at_or_pinned_stays_however_long_that_takes() {
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
fn a_key_that_limits_stays_until_it_limits_no_more() {
    let hour = secs(3_600);
    let builder = Throttle::builder;
    let table = [
        ("rate", builder().rate(Rate::per_hour(1).burst(1)), Outcome::success()),
        ("pace", builder().pace(Pace::every(hour)), Outcome::success()),
        ("budget", builder().budget(Budget::tokens(10, hour)), Outcome::success()),
        ("pause", builder().pause(Pause::default().max(hour)), Outcome::overload().retry_after(hour)),
        ("tail", builder().pause(Pause::default().tail(hour)), Outcome::overload().retry_after(secs(1))),
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
    assert!(probe.is_probe(), "it is remembered as long as somebody asks for it");
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1), "a probe is out");
    probe.settle(Outcome::failure());
    clock.advance(secs(1_199));
    sweep(&keyed, CALLER);
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "open again, for twice as long");
    clock.advance(secs(1) + IDLE);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1), "that a far side died long ago is forgotten with the rest");
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
fn what_was_learned_is_forgotten_only_after_the_idle_time_also_when_room_is_needed() {
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
        assert!(has(&keyed, 1) && !has(&keyed, 2), "{what} is worth more than a newcomer");
        clock.advance(IDLE);
        drop(keyed.throttle(&2));
        assert!(!has(&keyed, 1) && has(&keyed, 2), "{what} was left alone for long enough");
    }
}

#[test]
fn a_shard_is_swept_in_steps_of_at_most_eight() {
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
        assert!(least - keyed.len() <= 8, "no call forgets more than it looks at");
        least = least.min(keyed.len());
    }
    assert_eq!(keyed.len(), 1);
    assert_eq!(keyed.snapshot(0).evicted_idle, 1_000);
}

#[test]
fn a_key_that_comes_back_begins_anew_and_follows_the_limits_of_now() {
    let (keyed, clock) = one_shard(rate(Rate::per_second(1).burst(2)));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    keyed.set_limits(&1, rate(Rate::per_second(1).burst(5))).unwrap();
    clock.advance(YEAR);
    sweep(&keyed, CALLER);
    assert!(!has(&keyed, 1));
    let entered = (0..9).filter(|_| keyed.try_acquire(&1, REQUEST).is_ok()).count();
    assert_eq!(entered, 5, "its own limits outlive it");
}

#[test]
fn a_clock_that_steps_back_or_jumps_far_ahead_breaks_nothing() {
    let (keyed, clock) = one_shard(rate(Rate::per_second(1).burst(1)));
    clock.advance(YEAR);
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.set(Instant::ZERO);
    sweep(&keyed, CALLER);
    assert!(has(&keyed, 1), "a step back makes nobody idle");
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "and fills nothing");
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
