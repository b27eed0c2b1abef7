//! Limits that change while keys are in use: for one key, for all, disabled and enabled, and closing.

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
fn limits_of_one_key_can_be_set_and_reset() {
    let (keyed, _) = keys(slots(1));
    drop((keyed.throttle(&1), keyed.throttle(&2)));
    keyed.set_limits(&1, slots(5)).unwrap();
    assert_eq!([1, 2].map(|key| slots_of(&keyed, key)), [Some(5), Some(1)]);
    keyed.reconfigure(|_| slots(2));
    assert_eq!([1, 2].map(|key| slots_of(&keyed, key)), [Some(5), Some(2)], "only that key changes");
    keyed.clear_limits(&1);
    assert_eq!(slots_of(&keyed, 1), Some(2));
    keyed.clear_limits(&1);
    keyed.set_limits(&3, slots(7)).unwrap();
    assert!(!has(&keyed, 3), "setting limits creates no key");
    assert_eq!(slots_of(&keyed, 3), Some(7));
}

#[test]
fn own_limits_take_a_borrowed_key() {
    let keyed: Keyed<String> = Keyed::builder(slots(1)).build().unwrap();
    let limit = |key: &str| keyed.throttle(key).snapshot().slots;
    keyed.set_limits("model", slots(5)).unwrap();
    assert_eq!((limit("model"), limit("other")), (Some(5), Some(1)));
    keyed.set_limits("model", slots(6)).unwrap();
    assert_eq!(limit("model"), Some(6), "a key in use follows");
    keyed.clear_limits("model");
    assert_eq!(limit("model"), Some(1));
}

#[test]
fn own_limits_outlive_the_key() {
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
fn own_limits_are_bounded_by_keys_max() {
    let (builder, _) = by_hand(slots(1));
    let keyed = builder.keys_max(2).build().unwrap();
    keyed.set_limits(&1, slots(2)).unwrap();
    keyed.set_limits(&2, slots(2)).unwrap();
    let no_room = keyed.set_limits(&3, slots(2)).unwrap_err();
    assert_eq!(no_room.keys_max, 2);
    assert_eq!(no_room.to_string(), "2 keys already have their own limits, and `keyed.keys_max` is 2");
    assert_eq!(slots_of(&keyed, 3), Some(1), "nothing was changed");
    keyed.set_limits(&1, slots(3)).unwrap();
    keyed.clear_limits(&2);
    keyed.set_limits(&3, slots(4)).unwrap();
    assert_eq!(slots_of(&keyed, 1), Some(3));
}

#[test]
fn held_keys_follow_at_once_and_idle_keys_on_use() {
    let (keyed, _) = keys(slots(1));
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    let call_count = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&call_count);
    keyed.reconfigure(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        slots(2)
    });
    assert_eq!(call_count.load(Ordering::SeqCst), 1, "for the held key");
    assert_eq!(keyed.get(&1).unwrap().snapshot().slots, Some(2));
    assert_eq!(
        keyed.snapshot(2).top.iter().map(|view| view.throttle.slots.unwrap()).min(),
        Some(1),
        "not yet"
    );
    assert_eq!(keyed.get(&2).unwrap().snapshot().slots, Some(2), "a lookup shows the current limits");
    let second = keyed.try_acquire(&1, REQUEST).unwrap();
    assert!(keyed.try_acquire(&1, REQUEST).is_err(), "requests in flight are counted");
    assert_eq!(slots_of(&keyed, 2), Some(2));
    drop((held, second));
    assert_eq!(keyed.snapshot(9).in_flight, 0);
}

#[test]
fn levels_and_circuits_survive_reconfigure() {
    let limits = |burst| {
        let circuit = Circuit::after_failures(1).open_for(secs(60));
        Throttle::builder().rate(Rate::per_hour(1).burst(burst)).circuit(circuit).limits().unwrap()
    };
    let (keyed, _) = keys(limits(3));
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    keyed.record(&2, Outcome::failure());
    keyed.reconfigure(move |_| limits(9));
    let seen = keyed.throttle(&1).snapshot();
    assert_eq!(seen.rate_level, Some(2), "two of three units are still left");
    let circuit = keyed.throttle(&2).snapshot().circuit.unwrap();
    assert_eq!(circuit.state, CircuitState::Open);
}

/// A waiter whose cost has become impossible is refused.
#[test]
fn waiters_keep_position_across_reconfigure() {
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
    assert!(poll_once(second.as_mut()).is_pending(), "the first is ahead of it");
    // Its first poll as head arms the timer, which then wakes it.
    assert!(poll_once(first.as_mut()).is_pending() && poll_once(first.as_mut()).is_ready());
    keyed.reconfigure(|_| tokens(70));
    assert!(poll_once(second.as_mut()).is_ready(), "the head is evaluated again");
    assert_eq!(keyed.snapshot(0).waiting, 0);
}

#[test]
fn panicking_limits_function_loses_no_key() {
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
        assert_eq!(keyed.len(), 0, "no capacity is lost");
    }
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    bad.store(false, Ordering::SeqCst);
    drop(keyed.try_acquire(&1, REQUEST).unwrap());
    assert_eq!((keyed.len(), keyed.snapshot(0).overflowed), (1, 0));
}

/// Regression: the first key whose limits function panicked aborted the iteration over the keys in use, so a
/// close or change of limits missed the waiters of the others.
#[test]
fn panic_for_one_key_does_not_stop_the_others() {
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
        let result = catch_unwind(AssertUnwindSafe(|| change(&keyed)));
        assert_eq!(
            result.is_err(),
            what == "reconfigure",
            "{what}: the panic reaches the caller that passed the function"
        );
        let ready = waiting.iter_mut().map(|waiter| poll_once(waiter.as_mut()).is_ready());
        let ready: Vec<bool> = ready.collect();
        let fine = ready[..50].iter().filter(|is_ready| **is_ready).count();
        assert_eq!(fine, 50, "{what}: every key whose limits are known");
        if what != "reconfigure" {
            let rest = ready[50..].iter().filter(|is_ready| **is_ready).count();
            assert_eq!(rest, 50, "{what}: this holds whatever the limits are");
        }
        drop((waiting, held));
        assert_eq!(keyed.snapshot(0).in_flight, 0);
    }
}

#[test]
fn limits_function_may_call_the_registry() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let keys = Arc::clone(&cell);
    let (builder, _) = by_hand(slots(1));
    let builder = builder.shards(1).limits_by(move |key| {
        let keyed = keys.get().expect("set before the first call");
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

/// Regression: a key that got its entry while the limits function ran was served by the overflow entry when
/// the registry was full, and so had two states.
#[test]
fn key_with_entry_uses_it_when_registry_is_full() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let (keys, first) = (Arc::clone(&cell), AtomicBool::new(true));
    let (held, holding) = mpsc::channel();
    let (builder, _) = by_hand(slots(1));
    let builder = builder.keys_max(1).limits_by(move |_| {
        if first.swap(false, Ordering::SeqCst) {
            let keyed = keys.get().expect("set before the first call");
            held.send(keyed.try_acquire(&1, REQUEST).expect("the first")).expect("the receiver is alive");
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

/// Regression: the second caller to create a key got the entry of the first unchanged, although all limits
/// had changed in between, and kept it until the next lookup.
#[test]
fn concurrently_created_key_follows_current_limits() {
    let cell: Arc<OnceLock<Keyed<u64>>> = Arc::default();
    let (keys, first) = (Arc::clone(&cell), AtomicBool::new(true));
    let (builder, _) = by_hand(slots(1));
    let builder = builder.limits_by(move |_| {
        if first.swap(false, Ordering::SeqCst) {
            let keyed = keys.get().expect("set before the first call");
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
fn slow_limits_function_does_not_block_others() {
    let (started, has_started) = mpsc::channel();
    let (resume, resumed) = mpsc::channel::<()>();
    let resumed = std::sync::Mutex::new(resumed);
    let (builder, _) = by_hand(slots(1));
    let builder = builder.shards(1).limits_by(move |key| {
        if *key == 1 {
            started.send(()).expect("the receiver is alive");
            resumed.lock().expect("no panic").recv().expect("the sender sends");
        }
        slots(1)
    });
    let keyed = builder.build().unwrap();
    let slow = {
        let keyed = keyed.clone();
        thread::spawn(move || drop(keyed.try_acquire(&1, REQUEST).unwrap()))
    };
    has_started.recv().unwrap();
    drop(keyed.try_acquire(&2, REQUEST).unwrap());
    keyed.set_limits(&3, slots(2)).unwrap();
    keyed.reconfigure(|_| slots(4));
    assert_eq!(keyed.snapshot(9).keys, 1);
    resume.send(()).unwrap();
    slow.join().unwrap();
    assert_eq!(keyed.get(&1).unwrap().snapshot().slots, Some(4), "the concurrent change is not missed");
}

#[test]
fn reconfigure_racing_acquire_never_mixes_limits() {
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
fn disabled_registry_counts_but_charges_nothing() {
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
        assert!(keyed.try_acquire(&key, REQUEST).is_ok(), "nothing was charged while limits were disabled");
    }
    assert!(keyed.try_acquire(&0, REQUEST).is_err() || keyed.try_acquire(&1, REQUEST).is_err());
}

#[test]
fn disabling_admits_waiters_and_keeps_levels() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).pace(Pace::every(secs(60))).limits().unwrap();
    let (builder, clock) = by_hand(limits);
    let keyed = builder.keys_max(1).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    // More waiters than are granted under one lock, at a key and at the overflow entry.
    let mut all: Vec<Pin<Box<dyn Future<Output = _>>>> = Vec::new();
    for turn in 0..200 {
        all.push(Box::pin(keyed.acquire(&[1, 2][turn % 2], REQUEST)));
    }
    let ready = |all: &mut Vec<Pin<Box<dyn Future<Output = Result<_, Refused>>>>>| {
        all.extract_if(.., |waiter| poll_once(waiter.as_mut()).is_ready()).count()
    };
    assert_eq!(ready(&mut all), 1, "the first at the overflow entry");
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
fn learning_continues_while_limits_are_disabled() {
    let limits = Throttle::builder().circuit(Circuit::after_failures(1)).limits().unwrap();
    let (keyed, _) = keys(limits);
    keyed.set_enabled(false);
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::failure());
    assert!(keyed.try_acquire(&1, REQUEST).is_ok(), "an open circuit refuses no caller");
    assert_eq!(keyed.snapshot(0).open, 1);
    keyed.set_enabled(true);
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
}

#[tokio::test(start_paused = true)]
async fn close_refuses_waiters_and_new_callers_of_all_keys() {
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
    assert!(poll_once(drained.as_mut()).is_pending(), "one request is in flight at the overflow entry");
    drop(shared);
    drained.await;
    assert_eq!(keyed.throttle(&1).snapshot().state, State::Closed);
}

#[tokio::test(start_paused = true)]
async fn cancelled_drain_leaves_registry_closed() {
    let keyed: Keyed<u64> = Keyed::builder(slots(1)).build().unwrap();
    let held = keyed.try_acquire(&1, REQUEST).unwrap();
    assert!(tokio::time::timeout(secs(5), keyed.drain()).await.is_err());
    assert_eq!(keyed.try_acquire(&2, REQUEST).unwrap_err(), Refused::Closed);
    drop(held);
    keyed.drain().await;
}
