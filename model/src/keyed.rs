//! The registry of keys under a model checker: eviction, creation, reconfiguration and snapshots against each other.
//!
//! Runs only under `--cfg tidegate_model`, where the crate's locks are shuttle's. Each model also runs with
//! planted bugs, which it must find.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread::{self, JoinHandle};
use tidegate::fault_injection::Bug;
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

/// Takes the only slot of key 1, holds it while other threads run, and checks that no other thread holds it.
fn worker(keyed: &Keyed<u64>, running: &Arc<AtomicUsize>) -> JoinHandle<()> {
    let (keyed, running) = (keyed.clone(), Arc::clone(running));
    thread::spawn(move || {
        let permit = block_on(keyed.acquire(&1, REQUEST)).expect("it is not closed");
        assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "one slot per key");
        thread::yield_now();
        running.fetch_sub(1, Ordering::SeqCst);
        permit.settle(Outcome::success());
    })
}

/// The state of a key, without refreshing it as `throttle` would.
fn key_snapshot(keyed: &Keyed<u64>, key: u64) -> Snapshot {
    let view = keyed.snapshot(9).top.into_iter().find(|view| view.key == key);
    view.expect("the key exists").throttle
}

fn assert_idle(keyed: &Keyed<u64>, admitted: u64) {
    let snapshot = keyed.snapshot(9);
    assert_eq!((snapshot.in_flight, snapshot.waiting, snapshot.admitted), (0, 0, admitted));
    assert_eq!((snapshot.keys, snapshot.top.len()), (keyed.len(), keyed.len()), "every entry has a key");
}

#[test]
fn idle_key_in_use_never_has_two_states() {
    fn model() {
        let (keyed, clock) = keys(8);
        let running = Arc::default();
        drop(keyed.try_acquire(&1, REQUEST).unwrap());
        let workers = [worker(&keyed, &running), worker(&keyed, &running)];
        let sweeper = {
            let keyed = keyed.clone();
            thread::spawn(move || {
                // Each tick sweeps for idle keys, and every key without a permit is idle.
                for _ in 0..2 {
                    clock.advance(IDLE);
                    drop(keyed.throttle(&2));
                }
            })
        };
        for thread in workers.into_iter().chain([sweeper]) {
            thread.join().unwrap();
        }
        assert_idle(&keyed, 3);
    }
    holds_and_catches(model, &[Bug::EvictInUse, Bug::InsertUnchecked]);
}

#[test]
fn racing_creations_of_a_key_make_one_key() {
    fn model() {
        let (keyed, _) = keys(1);
        let running = Arc::default();
        for thread in [worker(&keyed, &running), worker(&keyed, &running)] {
            thread.join().unwrap();
        }
        assert_idle(&keyed, 2);
        assert_eq!((keyed.len(), keyed.snapshot(0).overflowed), (1, 0));
    }
    holds_and_catches(model, &[Bug::ShareUnchecked]);
}

#[test]
fn eviction_loses_no_used_units() {
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
        let snapshot = keyed.snapshot(9);
        assert_eq!(snapshot.keys, keyed.len());
        // Key 9 may be evicted, or a caller served by the overflow entry; used units of key 1 stay used.
        let shared = usize::try_from(snapshot.overflowed).unwrap();
        let entered = entered.load(Ordering::SeqCst);
        assert!(entered <= 1 + shared, "{entered} entered, at most {shared} of them by the overflow entry");
        assert!(keyed.get(&1).is_none() || keyed.try_acquire(&1, REQUEST).is_err());
    }
    holds_and_catches(model, &[Bug::InsertUnchecked]);
}

#[test]
fn new_limits_reach_keys_created_concurrently() {
    fn enter(keyed: &Keyed<u64>, key: u64) -> JoinHandle<Permit<'static>> {
        let keyed = keyed.clone();
        thread::spawn(move || block_on(keyed.acquire(&key, REQUEST)).unwrap())
    }
    fn model() {
        let (keyed, _) = keys(8);
        let callers = [1, 1, 2].map(|key| enter(&keyed, key));
        // Two callers are admitted together only under the new limits: a missed change is a deadlock.
        keyed.reconfigure(|_| slots(2));
        let permits = callers.map(|caller| caller.join().unwrap());
        for key in [1, 2] {
            assert_eq!(key_snapshot(&keyed, key).slots, Some(2), "key {key}");
        }
        drop(permits);
        assert_idle(&keyed, 3);
    }
    holds_and_catches(model, &[Bug::MissLimitChange]);
}

#[test]
fn close_refuses_waiters_of_keys_created_concurrently() {
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
        // Of the two callers of key 1 one gets the slot, and the other waits until the key is closed.
        keyed.close();
        let permits = callers.map(|caller| caller.join().unwrap());
        for key in [1, 2] {
            let state = key_snapshot(&keyed, key).state;
            assert!(matches!(state, State::Draining | State::Closed), "key {key} is {state}");
        }
        drop(permits);
        block_on(keyed.drain());
        assert_eq!(keyed.snapshot(0).in_flight, 0);
    }
    holds_and_catches(model, &[Bug::MissLimitChange]);
}

#[test]
fn key_created_by_another_thread_has_new_limits() {
    fn model() {
        let (keyed, _) = keys(8);
        // It holds no permit, so that the change does not find the key in use.
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
    holds_and_catches(model, &[Bug::ReturnStale]);
}

#[test]
fn overflow_entry_follows_last_set_enabled() {
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
fn snapshot_counts_once_during_eviction() {
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
        let readers = [0, 1].map(|_| {
            let keyed = keyed.clone();
            thread::spawn(move || assert_eq!(keyed.snapshot(9).admitted, 3))
        });
        for thread in readers.into_iter().chain([sweeper]) {
            thread.join().unwrap();
        }
        assert_idle(&keyed, 3);
    }
    holds_and_catches(model, &[]);
}
