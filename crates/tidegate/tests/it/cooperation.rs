//! Acquires and draws take part in tokio's cooperative scheduling: a loop of them starves no other task.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::{Keyed, Limit, Limiter, Memory, Slots, Throttle};

use crate::kit::keyed::poll_once;
use crate::kit::{REQUEST, secs, slots};

/// More acquires than any budget of a task.
const MANY: u32 = 10_000;

/// Runs `acquire` in a loop until another task of the same thread has run.
async fn assert_yields<F: Future>(acquire: impl Fn() -> F) {
    let has_run = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&has_run);
    tokio::spawn(async move { flag.store(true, Ordering::Relaxed) });
    for _ in 0..MANY {
        drop(acquire().await);
        if has_run.load(Ordering::Relaxed) {
            return;
        }
    }
    panic!("{MANY} acquires without yielding");
}

#[tokio::test(start_paused = true)]
async fn loop_of_acquires_yields_to_other_tasks() {
    let throttle = slots(1);
    assert_yields(|| throttle.acquire(REQUEST)).await;
    assert_yields(|| throttle.acquire_within(REQUEST, secs(1))).await;
}

#[tokio::test(start_paused = true)]
async fn loop_of_keyed_acquires_yields_to_other_tasks() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().expect("within the bounds");
    let keyed: Keyed<u32> = Keyed::builder(limits).build().expect("within the bounds");
    assert_yields(|| keyed.acquire(&1, REQUEST)).await;
    assert_yields(|| keyed.acquire_within(&1, REQUEST, secs(1))).await;
}

/// Regression: an in-memory store replies at once, and only `Joined::acquire` yielded.
#[tokio::test(start_paused = true)]
async fn loop_of_draws_yields_to_other_tasks() {
    const SUBJECT: (&str, &str) = ("acme", "gpt-4");
    const COST: [(&str, u64); 1] = [("rpm", 1)];
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 60)]).build().unwrap();
    assert_yields(|| limiter.try_acquire(SUBJECT, COST)).await;
    assert_yields(|| limiter.acquire_within(SUBJECT, COST, secs(1))).await;
    assert_yields(|| limiter.spend(SUBJECT, COST)).await;
    assert_yields(|| limiter.request(SUBJECT, &COST).spend_with_balances()).await;
    let joined = slots(1).limited_by(&limiter);
    assert_yields(|| joined.acquire(SUBJECT, REQUEST)).await;
    assert_yields(|| joined.try_acquire(SUBJECT, REQUEST)).await;
}

#[test]
fn acquire_outside_a_runtime_never_yields() {
    let throttle = slots(1);
    for _ in 0..MANY {
        assert!(poll_once(throttle.acquire(REQUEST)).is_ready());
    }
}

#[tokio::test(start_paused = true)]
async fn yielding_acquire_holds_nothing() {
    let throttle = slots(1);
    let yielding = (0..MANY).find(|_| poll_once(throttle.acquire(REQUEST)).is_pending());
    assert!(yielding.is_some(), "the budget was never used up");
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().waiting), (0, 0));
}
