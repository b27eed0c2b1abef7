//! Limits that change while keys are in use: of one key, of all, off and on again, and the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;

use tidegate::{
    Budget, Circuit, CircuitState, Keyed, Limits, Outcome, Pace, Rate, Refused, Slots, State, Throttle,
};

use crate::kit::keyed::{Call, IDLE, by_hand, has, keys, poll_once, rate, slots, sweep};
use crate::kit::{REQUEST, secs};

fn tokens(tokens: u64) -> Limits {
    Throttle::builder().budget(Budget::tokens(tokens, secs(60))).limits().expect("within the bounds")
}

fn slots_of(keyed: &Keyed<u64>, key: u64) -> Option<u32> {
    keyed.throttle(&key).snapshot().slots
}

#[test]
fn limits_of_one_key_change_that_key_alone_and_go_back() {
    let (keyed, _) = keys(slots(1));
    drop((keyed.throttle(&1), keyed.throttle(&2)));
    keyed.set_limits(&1, slots(5)).unwrap();
    assert_eq!([1, 2].map(|key| slots_of(&keyed, key)), [Some(5), Some(1)]);
    keyed.reconfigure(|_| slots(2));
    assert_eq!([1, 2].map(|key| slots_of(&keyed, key)), [Some(5), Some(2)], "its own limits are its own");
    keyed.clear_limits(&1);
    assert_eq!(slots_of(&keyed, 1), Some(2));
    keyed.clear_limits(&1);
    keyed.set_limits(&3, slots(7)).unwrap();
    assert!(!has(&keyed, 3), "limits make no key");
    assert_eq!(slots_of(&keyed, 3), Some(7));
}

#[test]
fn limits_of_its_own_outlive_the_key() {
    let (builder, clock) = by_hand(slots(1));
    let keyed = builder.shards(1).build().unwrap();
    keyed.set_limits(&1, slots(5)).unwrap();
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    clock.advance(IDLE);
    sweep(&keyed, 0);
    assert!(!has(&keyed, 1));
    assert_eq!(slots_of(&keyed, 1), Some(5));
}

#[test]
fn as_many_keys_as_there_may_be_have_limits_of_their_own() {
    let (builder, _) = by_hand(slots(1));
    let keyed = builder.keys_max(2).build().unwrap();
    keyed.set_limits(&1, slots(2)).unwrap();
    keyed.set_limits(&2, slots(2)).unwrap();
    let no_room = keyed.set_limits(&3, slots(2)).unwrap_err();
    assert_eq!(no_room.keys_max, 2);
    assert_eq!(no_room.to_string(), "2 keys have limits of their own, and `keyed.keys_max` is 2");
    assert_eq!(slots_of(&keyed, 3), Some(1), "nothing was changed");
    keyed.set_limits(&1, slots(3)).unwrap();
    keyed.clear_limits(&2);
    keyed.set_limits(&3, slots(4)).unwrap();
    assert_eq!(slots_of(&keyed, 1), Some(3));
}

#[test]
fn keys_in_use_follow_at_once_and_the_others_when_they_are_asked_for() {
    let (keyed, _) = keys(slots(1));
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    keyed.reconfigure(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        slots(2)
    });
    assert_eq!(asked.load(Ordering::SeqCst), 1, "for the one that is held");
    assert_eq!(keyed.get(&1).unwrap().snapshot().slots, Some(2));
    assert_eq!(
        keyed.snapshot(2).top.iter().map(|view| view.throttle.slots.unwrap()).min(),
        Some(1),
        "not yet"
    );
    assert_eq!(keyed.get(&2).unwrap().snapshot().slots, Some(2), "whoever looks sees what holds");
    let second = keyed.try_acquire(&1, REQUEST).unwrap();
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "what was in flight is counted");
    assert_eq!(slots_of(&keyed, 2), Some(2));
    drop((held, second));
    assert_eq!(keyed.snapshot(9).in_flight, 0);
}

#[test]
fn levels_and_circuits_stay_when_all_limits_change() {
    let limits = |burst| {
        let circuit = Circuit::after_failures(1).open_for(secs(60));
        Throttle::builder().rate(Rate::per_hour(1).burst(burst)).circuit(circuit).limits().unwrap()
    };
    let (keyed, _) = keys(limits(3));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    keyed.record(&2, Outcome::failure());
    keyed.reconfigure(move |_| limits(9));
    let seen = keyed.throttle(&1).snapshot();
    assert_eq!(seen.rate_level, Some(2), "two of three were left, and two they are");
    let circuit = keyed.throttle(&2).snapshot().circuit.unwrap();
    assert_eq!(circuit.state, CircuitState::Open);
}

#[test]
fn whoever_waits_keeps_its_place_and_a_cost_that_became_impossible_is_refused() {
    let (keyed, clock) = keys(tokens(100));
    let used = keyed.try_acquire(&1, REQUEST.tokens(100)).unwrap();
    let mut large = Box::pin(keyed.acquire(&1, REQUEST.tokens(80)));
    let mut first = Box::pin(keyed.acquire(&1, REQUEST.tokens(30)));
    let mut second = Box::pin(keyed.acquire(&1, REQUEST.tokens(30)));
    assert!(poll_once(large.as_mut()).is_pending());
    assert!(poll_once(first.as_mut()).is_pending() && poll_once(second.as_mut()).is_pending());
    keyed.reconfigure(|_| tokens(50));
    let std::task::Poll::Ready(Err(refused)) = poll_once(large.as_mut()) else {
        panic!("it can never enter")
    };
    assert!(matches!(refused, Refused::TooLarge { .. }), "{refused}");
    used.settle(Outcome::success());
    clock.advance(secs(61));
    assert!(poll_once(second.as_mut()).is_pending(), "the first is before it");
    // The first look finds it the head, which keeps the timer; the timer then wakes it.
    assert!(poll_once(first.as_mut()).is_pending() && poll_once(first.as_mut()).is_ready());
    keyed.reconfigure(|_| tokens(70));
    assert!(poll_once(second.as_mut()).is_ready(), "the head is asked again");
    assert_eq!(keyed.snapshot(0).waiting, 0);
}

#[test]
fn a_plan_function_that_panics_loses_nothing() {
    let bad = Arc::new(AtomicBool::new(true));
    let is_bad = Arc::clone(&bad);
    let (builder, _) = by_hand(slots(1));
    let builder = builder.keys_max(1).shards(1).limits_by(move |key| {
        assert!(*key != 1 || !is_bad.load(Ordering::SeqCst), "no limits for {key}");
        slots(1)
    });
    let keyed = builder.build().unwrap();
    for _ in 0..10 {
        assert!(catch_unwind(AssertUnwindSafe(|| keyed.try_acquire(&1, REQUEST))).is_err());
        assert_eq!(keyed.len(), 0, "no place is lost");
    }
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    bad.store(false, Ordering::SeqCst);
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    assert_eq!((keyed.len(), keyed.snapshot(0).overflowed), (1, 0));
}

/// The story: the first key whose plan function panicked ended the walk over the keys in use, and with it a close or a
/// change of limits: whoever waited at the others waited on.
#[test]
fn a_plan_function_that_panics_for_one_key_keeps_the_others_from_nothing() {
    let changes: [(&str, Call); 3] = [
        ("close", |keyed| assert!(keyed.close())),
        ("off", |keyed| assert!(keyed.set_enabled(false))),
        ("reconfigure", |keyed| {
            keyed.reconfigure(|key| if *key < 50 { slots(2) } else { panic!("no limits for {key}") });
        }),
    ];
    for (what, change) in changes {
        let bad = Arc::new(AtomicBool::new(false));
        let is_bad = Arc::clone(&bad);
        let (builder, _) = by_hand(slots(1));
        let builder = builder.limits_by(move |key| {
            assert!(*key < 50 || !is_bad.load(Ordering::SeqCst), "no limits for {key}");
            slots(1)
        });
        let keyed = builder.build().unwrap();
        let held: Vec<_> = (0..100).map(|key| keyed.try_acquire(&key, REQUEST).unwrap()).collect();
        let all: Vec<u64> = (0..100).collect();
        let mut waiting: Vec<_> = Vec::new();
        for key in &all {
            let mut waiter = Box::pin(keyed.acquire(key, REQUEST));
            assert!(poll_once(waiter.as_mut()).is_pending());
            waiting.push(waiter);
        }
        bad.store(true, Ordering::SeqCst);
        let told = catch_unwind(AssertUnwindSafe(|| change(&keyed)));
        assert_eq!(told.is_err(), what == "reconfigure", "{what}: whoever brings the function is told");
        let ready = waiting.iter_mut().map(|waiter| poll_once(waiter.as_mut()).is_ready());
        let ready: Vec<bool> = ready.collect();
        let fine = ready[..50].iter().filter(|is_ready| **is_ready).count();
        assert_eq!(fine, 50, "{what}: all whose limits are known");
        if what != "reconfigure" {
            let rest = ready[50..].iter().filter(|is_ready| **is_ready).count();
            assert_eq!(rest, 50, "{what}: and this is so whatever the limits are");
        }
        drop((waiting, held));
        assert_eq!(keyed.snapshot(0).in_flight, 0);
    }
}

#[test]
fn a_plan_function_may_call_the_same_keys() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let keys = Arc::clone(&cell);
    let (builder, _) = by_hand(slots(1));
    let builder = builder.shards(1).limits_by(move |key| {
        let keyed = keys.get().expect("it is set before anybody asks");
        if *key > 0 {
            drop(keyed.try_acquire(&(key - 1), REQUEST).expect("a slot for each"));
        }
        keyed.snapshot(3);
        slots(1)
    });
    let keyed = builder.build().unwrap();
    cell.set(keyed.clone()).unwrap();
    drop(keyed.try_acquire(&9, REQUEST).unwrap());
    assert_eq!((keyed.len(), keyed.snapshot(0).admitted), (10, 10));
    keyed.reconfigure(|_| slots(2));
    let again = keyed.clone();
    keyed.reconfigure(move |key| {
        assert!(again.set_limits(&(key + 100), slots(3)).is_ok());
        slots(3)
    });
    assert_eq!(slots_of(&keyed, 9), Some(3));
}

/// The story: a key that got its entry while the plan function ran was served by the shared entry when no room was
/// left, and so had two states: its own, and a share of the other.
#[test]
fn a_key_that_has_an_entry_by_now_uses_it_though_there_is_no_room() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let (keys, first) = (Arc::clone(&cell), AtomicBool::new(true));
    let (held, holding) = mpsc::channel();
    let (builder, _) = by_hand(slots(1));
    let builder = builder.keys_max(1).limits_by(move |_| {
        if first.swap(false, Ordering::SeqCst) {
            let keyed = keys.get().expect("it is set before anybody asks");
            held.send(keyed.try_acquire(&1, REQUEST).expect("the first")).expect("somebody reads");
        }
        slots(1)
    });
    let keyed = builder.build().unwrap();
    cell.set(keyed.clone()).unwrap();
    let second = keyed.try_acquire(&1, REQUEST);
    assert!(second.is_err(), "its one slot is held by the first");
    assert_eq!((keyed.len(), keyed.snapshot(0).overflowed), (1, 0));
    drop(holding.recv().unwrap());
    assert!(keyed.try_acquire(&1, REQUEST).is_ok());
}

/// The story: whoever came second to make a key was handed the entry of the first as it was, though all limits had
/// changed since, and kept it until somebody else asked for the key.
#[test]
fn a_key_made_by_another_meanwhile_follows_the_limits_of_now() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let (keys, first) = (Arc::clone(&cell), AtomicBool::new(true));
    let (builder, _) = by_hand(slots(1));
    let builder = builder.limits_by(move |_| {
        if first.swap(false, Ordering::SeqCst) {
            let keyed = keys.get().expect("it is set before anybody asks");
            drop(keyed.try_acquire(&1, REQUEST).expect("the first"));
            keyed.close();
        }
        slots(1)
    });
    let keyed = builder.build().unwrap();
    cell.set(keyed.clone()).unwrap();
    assert_eq!(keyed.try_acquire(&1, REQUEST).unwrap_err(), Refused::Closed);
    assert_eq!(keyed.len(), 1);
}

#[test]
fn a_plan_function_that_is_slow_holds_nobody_else_up() {
    let (begun, beginning) = mpsc::channel();
    let (go_on, going_on) = mpsc::channel::<()>();
    let going_on = std::sync::Mutex::new(going_on);
    let (builder, _) = by_hand(slots(1));
    let builder = builder.shards(1).limits_by(move |key| {
        if *key == 1 {
            begun.send(()).expect("somebody reads");
            going_on.lock().expect("no panic").recv().expect("it is told to go on");
        }
        slots(1)
    });
    let keyed = builder.build().unwrap();
    let slow = {
        let keyed = keyed.clone();
        thread::spawn(move || drop(keyed.try_acquire(&1, REQUEST).unwrap()))
    };
    beginning.recv().unwrap();
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    keyed.set_limits(&3, slots(2)).unwrap();
    keyed.reconfigure(|_| slots(4));
    assert_eq!(keyed.snapshot(9).keys, 1);
    go_on.send(()).unwrap();
    slow.join().unwrap();
    assert_eq!(keyed.get(&1).unwrap().snapshot().slots, Some(4), "what changed meanwhile is not missed");
}

#[test]
fn limits_that_change_while_others_enter_are_never_mixed_up() {
    let (builder, _) = by_hand(slots(1));
    let keyed = builder.keys_max(3).build().unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..2)
        .map(|seed: u64| {
            let (keyed, is_over) = (keyed.clone(), Arc::clone(&is_over));
            thread::spawn(move || {
                let mut turn = seed;
                while !is_over.load(Ordering::SeqCst) {
                    turn += 1;
                    drop(keyed.acquire_blocking(&(turn % 5), REQUEST).unwrap());
                }
            })
        })
        .collect();
    for turn in 1..500 {
        keyed.reconfigure(move |_| slots(turn));
        keyed.set_limits(&1, slots(turn)).unwrap();
        keyed.set_enabled(turn % 3 != 0);
        keyed.clear_limits(&1);
        keyed.throttle(&0);
    }
    is_over.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.join().unwrap();
    }
    assert!((0..5).all(|key| keyed.get(&key).is_none() || slots_of(&keyed, key) == Some(499)));
    let seen = keyed.snapshot(9);
    assert_eq!((seen.in_flight, seen.waiting, seen.keys), (0, 0, keyed.len()));
}

#[test]
fn built_without_limits_everybody_enters_is_counted_and_takes_nothing() {
    let (builder, _) = by_hand(rate(Rate::per_day(1).burst(1)));
    let keyed = builder.enabled(false).keys_max(2).build().unwrap();
    assert!(!keyed.is_enabled());
    for key in 0..3 {
        for _ in 0..10 {
            keyed.try_acquire(&key, REQUEST).unwrap().settle(Outcome::success());
        }
    }
    let seen = keyed.snapshot(2);
    assert_eq!((seen.is_enabled, seen.total, seen.admitted, seen.refused), (false, 30, 30, 0));
    assert!(!keyed.set_enabled(true));
    for key in 0..3 {
        assert!(keyed.try_acquire(&key, REQUEST).is_ok(), "nothing was taken while they were off");
    }
    assert!(keyed.try_acquire(&0, REQUEST).is_err() || keyed.try_acquire(&1, REQUEST).is_err());
}

#[test]
fn turned_off_all_who_wait_are_let_in_and_turned_on_it_goes_on_from_where_it_was() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).pace(Pace::every(secs(60))).limits().unwrap();
    let (builder, clock) = by_hand(limits);
    let keyed = builder.keys_max(1).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    // More than are let in under one lock; at a key and at the shared entry.
    let mut all: Vec<Pin<Box<dyn Future<Output = _>>>> = Vec::new();
    for turn in 0..200 {
        all.push(Box::pin(keyed.acquire(&[1, 2][turn % 2], REQUEST)));
    }
    let ready = |all: &mut Vec<Pin<Box<dyn Future<Output = Result<_, Refused>>>>>| {
        all.extract_if(.., |waiter| poll_once(waiter.as_mut()).is_ready()).count()
    };
    assert_eq!(ready(&mut all), 1, "the first at the shared entry");
    assert!(keyed.set_enabled(false));
    assert_eq!(ready(&mut all), 199);
    drop(all);
    assert!(!keyed.set_enabled(true));
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "the slot is held as before");
    drop(held);
    let refused = keyed.try_acquire(&1, REQUEST).unwrap_err();
    assert_eq!(refused.retry_after(), Some(secs(60)), "and the pace is as before");
    clock.advance(secs(60));
    assert!(keyed.try_acquire(&1, REQUEST).is_ok());
    assert_eq!(keyed.snapshot(1).in_flight, 0);
}

#[test]
fn what_is_learned_goes_on_while_the_limits_are_off() {
    let limits = Throttle::builder().circuit(Circuit::after_failures(1)).limits().unwrap();
    let (keyed, _) = keys(limits);
    keyed.set_enabled(false);
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::failure());
    assert!(keyed.try_acquire(&1, REQUEST).is_ok(), "an open circuit refuses nobody now");
    assert_eq!(keyed.snapshot(0).open, 1);
    keyed.set_enabled(true);
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
}

#[tokio::test(start_paused = true)]
async fn closing_refuses_all_who_wait_and_all_who_come_whatever_their_key() {
    let keyed: Keyed<u64> = Keyed::builder(slots(1)).keys_max(2).build().unwrap();
    let held = [1, 2].map(|key| keyed.try_acquire(&key, REQUEST).unwrap());
    let shared = keyed.try_acquire(&3, REQUEST).unwrap();
    let waiters: Vec<_> = (1..=3)
        .map(|key| {
            let keyed = keyed.clone();
            tokio::spawn(async move { keyed.acquire(&key, REQUEST).await.map(drop) })
        })
        .collect();
    tokio::task::yield_now().await;
    assert_eq!(keyed.snapshot(0).waiting, 3);
    assert!(keyed.close() && !keyed.close());
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap(), Err(Refused::Closed));
    }
    for key in 1..=4 {
        assert_eq!(keyed.acquire(&key, REQUEST).await.unwrap_err(), Refused::Closed);
    }
    keyed.set_enabled(false);
    assert_eq!(keyed.try_acquire(&1, REQUEST).unwrap_err(), Refused::Closed, "nothing re-opens it");
    let mut drained = Box::pin(keyed.drain());
    assert!(poll_once(drained.as_mut()).is_pending());
    drop(held);
    assert!(poll_once(drained.as_mut()).is_pending(), "one is in flight at the shared entry");
    drop(shared);
    drained.await;
    assert_eq!(keyed.throttle(&1).snapshot().state, State::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_is_cancelled_leaves_the_keys_closed() {
    let keyed: Keyed<u64> = Keyed::builder(slots(1)).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    assert!(tokio::time::timeout(secs(5), keyed.drain()).await.is_err());
    assert_eq!(keyed.try_acquire(&2, REQUEST).unwrap_err(), Refused::Closed);
    drop(held);
    keyed.drain().await;
}
