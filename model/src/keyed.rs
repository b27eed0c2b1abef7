//! The registry of keys under a model checker: eviction, creation, reconfiguration and snapshots against each other.
//!
//! Runs only under `--cfg tidegate_model`, where the crate's locks are shuttle's. Each model is also run with bugs
//! planted, and must find them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread::{self, JoinHandle};
use tidegate::planted::Bug;
use tidegate::{
    Cost, Keyed, Limits, ManualClock, Outcome, Permit, Rate, Refused, Slots, Snapshot, State, Throttle,
};

use crate::kit::holds_and_catches;

const REQUEST: Cost = Cost::request();
const IDLE: Duration = Duration::from_mins(3);

fn slots(slots: u32) -> Limits {
    Throttle::builder().slots(Slots::fixed(slots)).limits().expect("within the bounds")
}

fn keys(keys_max: usize) -> (Keyed<u64>, ManualClock) {
    let clock = ManualClock::new();
    let builder = Keyed::builder(slots(1)).clock(clock.clone()).shards(1).keys_max(keys_max);
    (builder.build().expect("within the bounds"), clock)
}

/// Takes the one slot of key 1, holds it while others run, and checks that no other thread has it.
fn worker(keyed: &Keyed<u64>, running: &Arc<AtomicUsize>) -> JoinHandle<()> {
    let (keyed, running) = (keyed.clone(), Arc::clone(running));
    thread::spawn(move || {
        let permit = block_on(keyed.acquire(&1, REQUEST)).expect("it is never closed");
        assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "two at a key of one slot");
        thread::yield_now();
        running.fetch_sub(1, Ordering::SeqCst);
        permit.settle(Outcome::success());
    })
}

/// A key as it is; asking for its throttle would bring it up to date.
fn seen(keyed: &Keyed<u64>, key: u64) -> Snapshot {
    let view = keyed.snapshot(9).top.into_iter().find(|view| view.key == key);
    view.expect("the key exists").throttle
}

fn nothing_is_left(keyed: &Keyed<u64>, admitted: u64) {
    let seen = keyed.snapshot(9);
    assert_eq!((seen.in_flight, seen.waiting, seen.admitted), (0, 0, admitted));
    assert_eq!((seen.keys, seen.top.len()), (keyed.len(), keyed.len()), "every place has its key");
}

#[test]
fn a_key_that_is_idle_and_asked_for_again_never_has_two_states() {
    fn model() {
        let (keyed, clock) = keys(8);
        let running = Arc::default();
        drop(keyed.try_acquire(&1, REQUEST).unwrap());
        let workers = [worker(&keyed, &running), worker(&keyed, &running)];
        let sweeper = {
            let keyed = keyed.clone();
            thread::spawn(move || {
                // Each tick is a reason to look for idle keys, and every key without a permit is idle.
                for _ in 0..2 {
                    clock.advance(IDLE);
                    drop(keyed.throttle(&2));
                }
            })
        };
        for thread in workers.into_iter().chain([sweeper]) {
            thread.join().unwrap();
        }
        nothing_is_left(&keyed, 3);
    }
    holds_and_catches(model, &[Bug::EvictHandedOut, Bug::InsertUnlooked]);
}

#[test]
fn two_who_make_a_key_at_once_make_one_though_there_is_room_for_one_only() {
    fn model() {
        let (keyed, _) = keys(1);
        let running = Arc::default();
        for thread in [worker(&keyed, &running), worker(&keyed, &running)] {
            thread.join().unwrap();
        }
        nothing_is_left(&keyed, 2);
        assert_eq!((keyed.len(), keyed.snapshot(0).overflowed), (1, 0));
    }
    holds_and_catches(model, &[Bug::ShareUnlooked]);
}

#[test]
fn making_room_takes_nobodys_state_away() {
    fn model() {
        let clock = ManualClock::new();
        let limits = Throttle::builder().rate(Rate::per_hour(1).burst(1)).limits().unwrap();
        let keyed: Keyed<u64> =
            Keyed::builder(limits).clock(clock).shards(1).keys_max(3).overflow(slots(9)).build().unwrap();
        drop(keyed.throttle(&9));
        let entered: Arc<AtomicUsize> = Arc::default();
        let threads: Vec<_> = [1, 1, 2]
            .map(|key| {
                let (keyed, entered) = (keyed.clone(), Arc::clone(&entered));
                thread::spawn(move || {
                    let is_in = keyed.try_acquire(&key, REQUEST).is_ok();
                    if key == 1 && is_in {
                        entered.fetch_add(1, Ordering::SeqCst);
                    }
                    assert!(keyed.len() <= 3, "{} keys of three", keyed.len());
                })
            })
            .into();
        for thread in threads {
            thread.join().unwrap();
        }
        let seen = keyed.snapshot(9);
        assert_eq!(seen.keys, keyed.len());
        // Key 9 may be evicted, or a caller served by the overflow entry; units used of key 1 stay used.
        let shared = usize::try_from(seen.overflowed).unwrap();
        let entered = entered.load(Ordering::SeqCst);
        assert!(entered <= 1 + shared, "{entered} entered, of whom {shared} may have shared");
        assert!(keyed.get(&1).is_none() || keyed.try_acquire(&1, REQUEST).is_err());
    }
    holds_and_catches(model, &[Bug::InsertUnlooked]);
}

#[test]
fn limits_that_change_while_keys_are_made_and_entered_reach_whoever_has_them() {
    fn enter(keyed: &Keyed<u64>, key: u64) -> JoinHandle<Permit<'static>> {
        let keyed = keyed.clone();
        thread::spawn(move || block_on(keyed.acquire(&key, REQUEST)).unwrap())
    }
    fn model() {
        let (keyed, _) = keys(8);
        let callers = [1, 1, 2].map(|key| enter(&keyed, key));
        // Two are admitted together only under the new limits: a missed change is a deadlock.
        keyed.reconfigure(|_| slots(2));
        let permits = callers.map(|caller| caller.join().unwrap());
        for key in [1, 2] {
            assert_eq!(seen(&keyed, key).slots, Some(2), "of key {key}");
        }
        drop(permits);
        nothing_is_left(&keyed, 3);
    }
    holds_and_catches(model, &[Bug::MissChange]);
}

#[test]
fn closing_leaves_nobody_behind_whichever_key_is_made_meanwhile() {
    fn model() {
        let (keyed, _) = keys(8);
        let callers = [1, 1, 2].map(|key| {
            let keyed = keyed.clone();
            thread::spawn(move || match block_on(keyed.acquire(&key, REQUEST)) {
                Ok(permit) => Some(permit),
                Err(refused) => {
                    assert_eq!(refused, Refused::Closed);
                    None
                }
            })
        });
        // Of the two at one key one has the slot, and the other waits until it is closed.
        keyed.close();
        let permits = callers.map(|caller| caller.join().unwrap());
        for key in [1, 2] {
            let state = seen(&keyed, key).state;
            assert!(matches!(state, State::Draining | State::Closed), "key {key} is {state}");
        }
        drop(permits);
        block_on(keyed.drain());
        assert_eq!(keyed.snapshot(0).in_flight, 0);
    }
    holds_and_catches(model, &[Bug::MissChange]);
}

#[test]
fn a_key_made_by_another_is_under_the_limits_of_now() {
    fn model() {
        let (keyed, _) = keys(8);
        // It keeps nothing, so that the change does not find the key in use.
        let first = {
            let keyed = keyed.clone();
            thread::spawn(move || drop(keyed.throttle(&1)))
        };
        let second = {
            let keyed = keyed.clone();
            thread::spawn(move || keyed.throttle(&1))
        };
        keyed.reconfigure(|_| slots(2));
        first.join().unwrap();
        let throttle = second.join().unwrap();
        assert_eq!(throttle.snapshot().slots, Some(2));
        assert_eq!(keyed.len(), 1);
    }
    holds_and_catches(model, &[Bug::HandOutStale]);
}

#[test]
fn the_shared_entry_is_on_or_off_as_was_said_last() {
    fn model() {
        let (keyed, _) = keys(1);
        let pinned = keyed.throttle(&1);
        let shared = keyed.throttle(&2);
        let off = {
            let keyed = keyed.clone();
            thread::spawn(move || keyed.set_enabled(false))
        };
        keyed.set_enabled(false);
        keyed.set_enabled(true);
        off.join().unwrap();
        for throttle in [pinned, shared] {
            let held = throttle.try_acquire(REQUEST);
            assert_eq!(throttle.try_acquire(REQUEST).is_err(), keyed.is_enabled());
            drop(held);
        }
    }
    holds_and_catches(model, &[Bug::ReadVersionLate]);
}

#[test]
fn a_snapshot_counts_once_whatever_leaves_meanwhile() {
    fn model() {
        let (keyed, clock) = keys(8);
        for key in 1..=3 {
            drop(keyed.try_acquire(&key, REQUEST).unwrap());
        }
        let sweeper = {
            let keyed = keyed.clone();
            thread::spawn(move || {
                clock.advance(IDLE);
                drop(keyed.throttle(&4));
            })
        };
        let walkers = [0, 1].map(|_| {
            let keyed = keyed.clone();
            thread::spawn(move || assert_eq!(keyed.snapshot(9).admitted, 3))
        });
        for thread in walkers.into_iter().chain([sweeper]) {
            thread.join().unwrap();
        }
        nothing_is_left(&keyed, 3);
    }
    holds_and_catches(model, &[]);
}
