//! The single timer of a throttle across runtimes and threads: a head that is not polled, or whose runtime is
//! not driven, blocks no other caller.

use std::thread;

use tidegate::{Budget, Cost, ManualClock, Outcome, Pace, Random, Slots, Throttle};

use crate::kit::{Caller, REQUEST, secs, settle_tasks};

/// One entry per second on a manual clock, with the first already taken.
fn paced(clock: &ManualClock) -> Throttle {
    let builder = Throttle::builder().pace(Pace::every(secs(1))).slots(Slots::fixed(9));
    let throttle = builder.clock(clock.clone()).build().expect("within the bounds");
    drop(throttle.try_acquire(REQUEST));
    throttle
}

#[test]
fn unpolled_head_outside_runtime_blocks_no_task() {
    let clock = ManualClock::new();
    let throttle = paced(&clock);
    let head = Caller::queued(&throttle, REQUEST);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let behind = throttle.clone();
    let task = runtime.spawn(async move { behind.acquire(REQUEST).await.map(|_| ()) });
    for _ in 0..3 {
        runtime.block_on(settle_tasks());
        clock.advance(secs(1));
    }
    runtime.block_on(task).unwrap().unwrap();
    drop(head);
}

#[test]
fn head_in_idle_runtime_blocks_no_other_task() {
    let clock = ManualClock::new();
    let throttle = paced(&clock);
    let idle = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let head = idle.block_on(async { Caller::queued(&throttle, REQUEST) });
    let driven = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let behind = throttle.clone();
    let task = driven.spawn(async move { behind.acquire(REQUEST).await.map(|_| ()) });
    for _ in 0..3 {
        driven.block_on(settle_tasks());
        clock.advance(secs(1));
    }
    driven.block_on(task).unwrap().unwrap();
    drop(head);
}

/// The plan has no timed gate, and a thread without a runtime sets the pause.
#[test]
fn pause_set_by_plain_thread_ends_with_unpolled_head() {
    let clock = ManualClock::new();
    let throttle = Throttle::layered()
        .slots(Slots::fixed(2))
        .random(Random::fixed(0.0))
        .clock(clock.clone())
        .build()
        .unwrap();
    let held = [throttle.try_acquire(REQUEST).unwrap(), throttle.try_acquire(REQUEST).unwrap()];
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let unpolled = runtime.block_on(async { Caller::queued(&throttle, REQUEST) });
    let behind = throttle.clone();
    let task = runtime.spawn(async move { behind.acquire(REQUEST).await.map(|_| ()) });
    runtime.block_on(settle_tasks());
    for permit in held {
        permit.settle(Outcome::overload());
    }
    clock.advance(secs(60));
    runtime.block_on(settle_tasks());
    runtime.block_on(task).unwrap().unwrap();
    drop(unpolled);
    assert_eq!(throttle.snapshot().in_flight, 0);
}

/// More waiters are due in one tick than are granted under one lock; the last one polls first, at its
/// deadline.
#[tokio::test]
async fn caller_due_at_its_deadline_is_admitted() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(200))
        .budget(Budget::tokens(100, secs(1)))
        .clock(clock.clone())
        .build()
        .unwrap();
    throttle.record_tokens(100);
    let within = secs(1) + std::time::Duration::from_nanos(1);
    let mut callers: Vec<_> =
        (0..70).map(|_| Caller::new(throttle.acquire_within(Cost::request().tokens(1), within))).collect();
    for caller in &mut callers {
        assert!(caller.poll().is_pending());
    }
    clock.advance(within);
    for caller in callers.iter_mut().rev() {
        assert!(caller.permit().is_some(), "it was due in this very tick");
    }
}

#[test]
fn threads_and_tasks_in_two_runtimes_are_all_served() {
    let clock = ManualClock::new();
    let throttle = paced(&clock);
    let runtimes: Vec<_> = (0..2)
        .map(|_| tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap())
        .collect();
    let tasks: Vec<_> = (0..6)
        .map(|number: usize| {
            let throttle = throttle.clone();
            runtimes[number % 2].spawn(async move { throttle.acquire(REQUEST).await.map(|_| ()) })
        })
        .collect();
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let throttle = throttle.clone();
            thread::spawn(move || throttle.acquire_blocking(REQUEST).map(|_| ()))
        })
        .collect();
    while throttle.snapshot().admitted < 9 {
        clock.advance(secs(1));
        thread::yield_now();
    }
    for (number, task) in tasks.into_iter().enumerate() {
        runtimes[number % 2].block_on(task).unwrap().unwrap();
    }
    for thread in threads {
        thread.join().unwrap().unwrap();
    }
    assert_eq!(throttle.snapshot().waiting, 0);
}
