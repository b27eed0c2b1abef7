//! Futures dropped at every await point, and permits that end abnormally: nothing leaks and no waiter hangs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use tidegate::{
    Budget, Bytes, Circuit, Cost, ManualClock, Outcome, Pace, Permit, Random, Rate, Slots, Throttle,
};

use crate::kit::{Caller, REQUEST, secs, settle_tasks};

const COST: Cost = Cost::request().tokens(40).bytes(60);

/// A throttle with one of every gate.
fn everything(clock: &ManualClock) -> Throttle {
    Throttle::builder()
        .slots(Slots::fixed(1))
        .bytes(Bytes::in_flight(100))
        .pace(Pace::every(secs(1)))
        .rate(Rate::per_minute(60).burst(2))
        .budget(Budget::tokens(100, secs(10)))
        .circuit(Circuit::default())
        .random(Random::fixed(0.0))
        .clock(clock.clone())
        .build()
        .expect("within the bounds")
}

/// The events around a waiting future, step by step; the future is polled before each step.
fn script(step: usize, throttle: &Throttle, clock: &ManualClock, held: &mut Option<Permit<'_>>) {
    match step {
        0 => drop(throttle.pause(secs(3))),
        1 => clock.advance(secs(2)),
        2 => drop(held.take()),
        3 | 4 => clock.advance(secs(1)),
        5 => throttle.retune(|limits| limits.rate = Some(Rate::per_minute(120))).expect("in bounds"),
        _ => clock.advance(secs(5)),
    }
}

/// Polls and steps `moments` times, drops the future, and checks that nothing is left behind.
async fn drop_after(moments: usize, within: Option<Duration>) -> bool {
    let clock = ManualClock::new();
    let throttle = everything(&clock);
    let mut held = throttle.try_acquire(COST).ok();
    let mut caller = match within {
        Some(span) => Caller::new(throttle.acquire_within(COST, span)),
        None => Caller::new(throttle.acquire(COST)),
    };
    let mut ended = false;
    for moment in 0..moments {
        // Odd counts skip the last poll, so that the future is dropped with a grant pending.
        if moment % 2 == 0 && caller.poll().is_ready() {
            ended = true;
            break;
        }
        script(moment / 2, &throttle, &clock, &mut held);
        settle_tasks().await;
    }
    drop(caller);
    drop(held);
    clock.advance(secs(60));
    settle_tasks().await;
    let snapshot = throttle.snapshot();
    assert_eq!(
        (snapshot.in_flight, snapshot.waiting, snapshot.bytes_in_flight),
        (0, 0, 0),
        "{moments} moments"
    );
    assert_eq!((snapshot.tokens_used, snapshot.rate_level), (0, Some(2)), "{moments} moments");
    let next = Caller::new(throttle.acquire(COST)).permit();
    assert!(next.is_some(), "the next caller enters at once");
    drop(next);
    assert_eq!(clock.sleeping(), 0, "no timer is left behind");
    ended
}

#[tokio::test]
async fn acquire_dropped_at_every_poll_leaves_no_trace() {
    let mut endings = 0;
    for moments in 0..24 {
        endings += u32::from(drop_after(moments, None).await);
        endings += u32::from(drop_after(moments, Some(secs(30))).await);
        drop_after(moments, Some(secs(4))).await;
    }
    assert!(endings > 0, "the last of them was admitted");
}

#[test]
fn panicking_work_releases_permit_without_outcome() {
    let clock = ManualClock::new();
    let throttle = everything(&clock);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut permit = throttle.try_acquire(COST).unwrap();
        permit.spend(15);
        panic!("the work has a bug");
    }));
    assert!(panicked.is_err());
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.bytes_in_flight, snapshot.tokens_used), (0, 0, 15));
    assert_eq!(snapshot.circuit.unwrap().consecutive_failures, 0);
    assert_eq!(snapshot.rate_level, Some(1), "the rate unit stays spent");
}

#[test]
fn owned_permit_keeps_throttle_and_settles_once() {
    let clock = ManualClock::new();
    let throttle = everything(&clock);
    let permit = throttle.try_acquire(COST).unwrap().into_owned();
    assert_eq!(throttle.snapshot().in_flight, 1);
    let watching = throttle.clone();
    drop(throttle);
    permit.settle(Outcome::success());
    assert_eq!((watching.snapshot().in_flight, watching.snapshot().tokens_used), (0, 40));
}

#[test]
fn leaked_permit_holds_only_its_slot() {
    let clock = ManualClock::new();
    let throttle = everything(&clock);
    std::mem::forget(throttle.try_acquire(COST).unwrap());
    clock.advance(secs(60));
    assert_eq!(throttle.snapshot().in_flight, 1);
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(2))).unwrap();
    assert!(throttle.try_acquire(REQUEST).is_ok(), "the other slots stay usable");
}
