//! Closing and draining: no new admissions, no waiter left behind, no way to reopen.

use std::thread;

use tidegate::{Event, Outcome, Pace, Rate, Refused, Slots, State, Throttle};
use tokio::time::{Instant, sleep};

use crate::kit::{Caller, REQUEST, millis, secs, settle_tasks, slots};

#[tokio::test(start_paused = true)]
async fn drain_waits_for_permits_and_refuses_new_callers() {
    let throttle = slots(2);
    let worker = throttle.clone();
    let task = tokio::spawn(async move {
        let permit = worker.acquire(REQUEST).await.unwrap();
        sleep(millis(100)).await;
        permit.settle(Outcome::success());
    });
    settle_tasks().await;
    let start = Instant::now();
    throttle.drain().await;
    assert_eq!((start.elapsed(), throttle.snapshot().state), (millis(100), State::Closed));
    assert_eq!(throttle.acquire(REQUEST).await.unwrap_err(), Refused::Closed);
    task.await.unwrap();
}

#[test]
fn close_refuses_waiters_and_emits_event() {
    let throttle = slots(1);
    let mut events = throttle.events();
    let held = throttle.try_acquire(REQUEST).unwrap();
    let mut waiters: Vec<_> = (0..200).map(|_| Caller::queued(&throttle, REQUEST)).collect();
    assert!(throttle.close());
    assert!(!throttle.close(), "it is already closed");
    assert_eq!(throttle.snapshot().state, State::Draining);
    assert!(waiters.iter_mut().all(|waiter| waiter.refused() == Some(Refused::Closed)));
    assert_eq!(events.try_next().unwrap().event, Event::Closed { in_flight: 1 });
    drop(held);
    assert_eq!(events.try_next().unwrap().event, Event::Drained);
    assert_eq!(throttle.snapshot().state, State::Closed);
}

#[tokio::test(start_paused = true)]
async fn nothing_reopens_a_closed_throttle() {
    let throttle = slots(1);
    throttle.close();
    throttle.resume();
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(9))).unwrap();
    throttle.record_success();
    assert_eq!(throttle.try_acquire(REQUEST).unwrap_err(), Refused::Closed);
}

#[tokio::test(start_paused = true)]
async fn close_refuses_waiters_for_timed_gates() {
    let throttle = Throttle::builder().pace(Pace::every(secs(1_000))).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut waiter = Caller::queued(&throttle, REQUEST);
    throttle.close();
    assert_eq!(waiter.refused(), Some(Refused::Closed));
}

#[test]
fn concurrent_drains_all_complete() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let throttle = slots(1);
    let permit = throttle.try_acquire(REQUEST).unwrap().into_owned();
    let drains: Vec<_> = (0..2)
        .map(|_| {
            let throttle = throttle.clone();
            runtime.spawn(async move { throttle.drain().await })
        })
        .collect();
    drop(permit);
    runtime.block_on(async {
        for drain in drains {
            drain.await.unwrap();
        }
    });
}

#[test]
fn dropped_drain_leaves_throttle_closed() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).unwrap();
    {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let mut drain = Box::pin(throttle.drain());
        assert!(drain.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(throttle.snapshot().state, State::Draining);
    drop(held);
    throttle.drain_blocking();
    assert_eq!(throttle.snapshot().state, State::Closed);
}

/// Threads race `acquire` against `drain` a hundred times: each caller is admitted and awaited, or refused.
#[test]
fn drain_racing_acquire_strands_no_caller() {
    for _ in 0..100 {
        let throttle = slots(2);
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let throttle = throttle.clone();
                thread::spawn(move || {
                    let mut done = 0;
                    while let Ok(permit) = throttle.acquire_blocking(REQUEST) {
                        permit.settle(Outcome::success());
                        done += 1;
                    }
                    done
                })
            })
            .collect();
        throttle.drain_blocking();
        let snapshot = throttle.snapshot();
        assert_eq!((snapshot.state, snapshot.in_flight, snapshot.waiting), (State::Closed, 0, 0));
        let done: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        assert_eq!(done, snapshot.admitted);
    }
}

#[tokio::test(start_paused = true)]
async fn drain_does_not_wait_without_slots() {
    let throttle = Throttle::builder().rate(Rate::per_second(5)).build().unwrap();
    let permit = throttle.try_acquire(REQUEST).unwrap();
    throttle.drain().await;
    drop(permit);
    let counted = Throttle::builder().rate(Rate::per_second(5)).slots(Slots::unlimited()).build().unwrap();
    let permit = counted.try_acquire(REQUEST).unwrap();
    assert_eq!(counted.snapshot().in_flight, 1);
    counted.close();
    assert_eq!(counted.snapshot().state, State::Draining);
    drop(permit);
    counted.drain().await;
}
