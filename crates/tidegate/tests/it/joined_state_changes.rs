//! State changes of the throttle or the limiter while a caller waits for the other: close, open circuit,
//! pause.

use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{Circuit, JoinedError, Limit, LimitError, Limiter, Memory, Outcome, Refused, Slots, Throttle};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::kit::joined::{BETA, limiter, one, slots, spend};
use crate::kit::limiter::{ACME, Act, HookStore, Moment, flushed, level, over};
use crate::kit::{millis, secs, settle_tasks};

#[tokio::test(start_paused = true)]
async fn closing_throttle_refuses_store_waiters() {
    let (throttle, limiter) = (slots(1), limiter(Limit::per_hour("rpm", 1)));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let joined = joined.clone();
            tokio::spawn(async move { joined.acquire(ACME, one()).await.map(drop) })
        })
        .collect();
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 3);
    let start = Instant::now();
    // With a request in flight, so that the close itself wakes the waiters and not the last release.
    let slot = throttle.acquire(one()).await.unwrap();
    throttle.close();
    for task in tasks {
        let error = task.await.unwrap().unwrap_err();
        assert!(matches!(error, JoinedError::Refused(Refused::Closed)) && error.is_final(), "{error}");
    }
    assert_eq!((start.elapsed(), limiter.stats().waiting), (Duration::ZERO, 0));
    drop(slot);
    throttle.drain().await;
}

#[tokio::test(start_paused = true)]
async fn closing_limiter_refuses_waiters_and_new_callers() {
    let (throttle, limiter) = (slots(1), limiter(Limit::per_hour("rpm", 1)));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let joined = joined.clone();
            tokio::spawn(async move { joined.acquire(ACME, one()).await.map(drop) })
        })
        .collect();
    settle_tasks().await;
    let start = Instant::now();
    limiter.close();
    for task in tasks {
        let error = task.await.unwrap().unwrap_err();
        assert!(matches!(error, JoinedError::Limit(LimitError::Closed)), "{error}");
    }
    let error = joined.acquire(BETA, one()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Closed)), "{error}");
    limiter.drain().await;
    let snapshot = throttle.snapshot();
    assert_eq!((start.elapsed(), snapshot.in_flight, snapshot.admitted), (Duration::ZERO, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn opening_circuit_refuses_store_waiters() {
    let throttle =
        Throttle::builder().circuit(Circuit::after_failures(1).open_for(secs(60))).build().unwrap();
    let limiter = limiter(Limit::per_hour("rpm", 1));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let stuck = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one()).await.map(drop) }
    });
    settle_tasks().await;
    let start = Instant::now();
    throttle.record_failure();
    let error = stuck.await.unwrap().unwrap_err();
    assert!(matches!(error, JoinedError::Refused(Refused::CircuitOpen { .. })), "{error}");
    assert_eq!((error.retry_after(), start.elapsed()), (Some(secs(60)), Duration::ZERO));
}

/// A throttle over a store that takes ten milliseconds to draw, and one acquire whose draw is in progress.
async fn drawing(throttle: &Throttle) -> (Limiter, Memory, JoinHandle<Result<(), JoinedError>>) {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(10)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 5)]).build().expect("within the bounds");
    let joined = throttle.limited_by(&limiter);
    let task = tokio::spawn(async move { joined.acquire(ACME, one()).await.map(drop) });
    settle_tasks().await;
    tokio::time::sleep(millis(5)).await;
    assert_eq!(throttle.snapshot().admitted, 1, "it holds a slot and waits for the store");
    (limiter, memory, task)
}

#[tokio::test(start_paused = true)]
async fn state_change_during_draw_is_respected() {
    let circuit = Circuit::after_failures(1).open_for(secs(60));
    let throttle = || Throttle::builder().slots(Slots::fixed(1)).circuit(circuit).build().unwrap();
    // A circuit that opened.
    let opened = throttle();
    let (limiter, memory, task) = drawing(&opened).await;
    opened.record_failure();
    let error = task.await.unwrap().unwrap_err();
    assert!(matches!(error, JoinedError::Refused(Refused::CircuitOpen { .. })), "{error}");
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((5, 0)));
    assert_eq!((opened.snapshot().in_flight, opened.snapshot().admitted), (0, 0));
    // A close.
    let closed = throttle();
    let (limiter, memory, task) = drawing(&closed).await;
    closed.drain().await;
    assert!(matches!(task.await.unwrap(), Err(JoinedError::Refused(Refused::Closed))));
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((5, 0)));
    // A pause: the caller starts over, holds nothing in between, and is admitted after the pause.
    let paused = throttle();
    let (limiter, memory, task) = drawing(&paused).await;
    let start = Instant::now();
    paused.pause(secs(30));
    tokio::time::sleep(secs(20)).await;
    assert_eq!((paused.snapshot().in_flight, limiter.stats().open_leases), (0, 0));
    assert_eq!(level(&memory, ACME, "rpm").await, Some((5, 0)));
    task.await.unwrap().unwrap();
    assert!(start.elapsed() >= secs(30), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn probe_keeps_its_role_while_store_draws() {
    let circuit = Circuit::after_failures(1).open_for(secs(1)).probes(1);
    let throttle = Throttle::builder().circuit(circuit).build().unwrap();
    let memory = Memory::new();
    let store = HookStore::new(&memory, |_, _| Act::Sleep(millis(5)));
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 5)]).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    throttle.record_failure();
    tokio::time::sleep(secs(2)).await;
    let probe = joined.acquire(ACME, one()).await.unwrap();
    assert!(probe.is_probe());
    assert!(matches!(throttle.try_acquire(one()), Err(Refused::CircuitOpen { .. })));
    probe.settle(Outcome::success()).await.unwrap();
    drop(throttle.try_acquire(one()).unwrap());
}
