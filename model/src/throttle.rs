//! The lock and queue protocol under a model checker: many schedules, every one with the real code.
//!
//! Runs only under `--cfg tidegate_model`, where the crate's lock is shuttle's. Each model also runs with
//! planted bugs, which it must find.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread;
use tidegate::fault_injection::Bug;
use tidegate::{Cost, ManualClock, Outcome, Pace, Refused, Slots, State, Throttle};

use crate::kit::holds_and_catches;

const REQUEST: Cost = Cost::request();

fn slots(slots: u32) -> Throttle {
    Throttle::builder().slots(Slots::fixed(slots)).build().expect("within the bounds")
}

/// Takes a permit, holds it while other threads run, and checks how many hold one.
fn work(throttle: &Throttle, running: &AtomicUsize, limit: usize) -> Result<(), Refused> {
    let permit = block_on(throttle.acquire(REQUEST))?;
    let now = running.fetch_add(1, Ordering::SeqCst) + 1;
    assert!(now <= limit, "{now} permits in use, at most {limit} allowed");
    thread::yield_now();
    running.fetch_sub(1, Ordering::SeqCst);
    permit.settle(Outcome::success());
    Ok(())
}

fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn every_waiter_is_served_within_the_limit() {
    fn model() {
        let (throttle, running) = (slots(1), Arc::new(AtomicUsize::new(0)));
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let (throttle, running) = (throttle.clone(), Arc::clone(&running));
                thread::spawn(move || work(&throttle, &running, 1).unwrap())
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        let snapshot = throttle.snapshot();
        assert_eq!((snapshot.in_flight, snapshot.waiting, snapshot.admitted), (0, 0, 3));
    }
    holds_and_catches(model, &[Bug::JoinLate]);
}

#[test]
fn dropped_acquire_leaks_no_slot() {
    fn model() {
        let throttle = slots(1);
        let held = throttle.try_acquire(REQUEST).unwrap().into_owned();
        let (leaver, waiter) = (throttle.clone(), throttle.clone());
        // Polled once and dropped: it may be queued, or granted without having observed it.
        let leaver = thread::spawn(move || {
            let mut future = Box::pin(leaver.acquire(REQUEST));
            let first = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            thread::yield_now();
            drop(first);
            drop(future);
        });
        let waiter = thread::spawn(move || drop(block_on(waiter.acquire(REQUEST)).unwrap()));
        let releaser = thread::spawn(move || drop(held));
        for thread in [leaver, waiter, releaser] {
            thread.join().unwrap();
        }
        let snapshot = throttle.snapshot();
        assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0));
    }
    holds_and_catches(model, &[Bug::LoseUnseenGrant]);
}

#[test]
fn waiters_move_up_when_the_head_is_dropped() {
    fn model() {
        let throttle = Throttle::builder()
            .budget(tidegate::Budget::tokens(10, Duration::from_secs(1_000)))
            .clock(ManualClock::new())
            .build()
            .unwrap();
        throttle.try_acquire(REQUEST.tokens(5)).unwrap().settle(Outcome::success());
        let (expensive, cheap) = (throttle.clone(), throttle.clone());
        let expensive = thread::spawn(move || {
            // It cannot enter while five tokens are used: it queues, and is dropped.
            assert!(poll_once(expensive.acquire(REQUEST.tokens(9))).is_pending());
        });
        let cheap = thread::spawn(move || drop(block_on(cheap.acquire(REQUEST.tokens(1))).unwrap()));
        expensive.join().unwrap();
        cheap.join().unwrap();
        assert_eq!(throttle.snapshot().waiting, 0);
    }
    holds_and_catches(model, &[Bug::SkipPump]);
}

#[test]
fn close_refuses_every_waiter() {
    fn model() {
        let (throttle, running) = (slots(1), Arc::new(AtomicUsize::new(0)));
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let (throttle, running) = (throttle.clone(), Arc::clone(&running));
                thread::spawn(move || match work(&throttle, &running, 1) {
                    Ok(()) => {}
                    Err(refused) => assert_eq!(refused, Refused::Closed),
                })
            })
            .collect();
        throttle.close();
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(throttle.snapshot().state, State::Closed);
        assert!(poll_once(throttle.drain()).is_ready());
    }
    holds_and_catches(model, &[Bug::JoinLate]);
}

#[test]
fn retune_under_load_serves_every_waiter() {
    fn model() {
        let (throttle, running) = (slots(2), Arc::new(AtomicUsize::new(0)));
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let (throttle, running) = (throttle.clone(), Arc::clone(&running));
                thread::spawn(move || work(&throttle, &running, 2).unwrap())
            })
            .collect();
        throttle.retune(|limits| limits.slots = Some(Slots::fixed(1))).unwrap();
        throttle.retune(|limits| limits.slots = Some(Slots::fixed(2))).unwrap();
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(throttle.snapshot().in_flight, 0);
    }
    holds_and_catches(model, &[Bug::JoinLate]);
}

#[test]
fn timer_passes_from_head_to_head() {
    fn model() {
        let clock = ManualClock::new();
        let throttle = Throttle::builder()
            .pace(Pace::every(Duration::from_secs(1)))
            .clock(clock.clone())
            .build()
            .unwrap();
        drop(throttle.try_acquire(REQUEST).unwrap());
        let done = Arc::new(AtomicUsize::new(0));
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let (throttle, done) = (throttle.clone(), Arc::clone(&done));
                thread::spawn(move || {
                    drop(block_on(throttle.acquire(REQUEST)).unwrap());
                    done.fetch_add(1, Ordering::SeqCst);
                })
            })
            .collect();
        // Time advances only while a thread sleeps on it: a lost timer is a deadlock.
        let (time, finished) = (clock, Arc::clone(&done));
        let ticking = thread::spawn(move || {
            for _ in 0..200 {
                if finished.load(Ordering::SeqCst) == 2 {
                    return;
                }
                if time.sleeping() > 0 {
                    time.advance(Duration::from_secs(1));
                }
                thread::yield_now();
            }
        });
        ticking.join().unwrap();
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(throttle.snapshot().waiting, 0);
    }
    holds_and_catches(model, &[Bug::LoseTimer]);
}
