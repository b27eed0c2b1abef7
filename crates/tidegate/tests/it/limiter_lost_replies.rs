//! Regressions around lost or late replies, and callers queued behind others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate::store::wrap::{Observed, Verb};
use tidegate::{Limit, LimitError, Limiter, Memory, StoreError};
use tokio::time::Instant;

use crate::kit::limiter::{ACME, Act, HookStore, Moment, calm, flushed, level, over, settled, wait};
use crate::kit::{millis, secs, settle_tasks};

/// An acquire whose draw was in progress when the limiter closed was granted after the drain had returned.
#[tokio::test(start_paused = true)]
async fn no_lease_is_granted_after_drain() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let asking = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.try_acquire(ACME, [("rpm", 1)]).await.map(|lease| (lease, Instant::now())) }
    });
    tokio::time::sleep(millis(5)).await;
    limiter.drain().await;
    let drained = Instant::now();
    if let Ok((lease, granted)) = asking.await.unwrap() {
        drop(lease);
        panic!("granted {:?} after the drain", granted - drained);
    }
}

/// The settle charged an extension by a new limit whose reply was lost.
#[tokio::test(start_paused = true)]
async fn lost_extension_returns_with_the_settle() {
    let (memory, shots) = (Memory::new(), Arc::new(AtomicU32::new(1)));
    let left = Arc::clone(&shots);
    let store = HookStore::new(&memory, move |verb, moment| {
        let is_it = (verb, moment) == (Verb::Extend, Moment::After);
        if is_it && left.swap(0, Ordering::SeqCst) > 0 {
            return Act::Fail(StoreError::TimedOut { millis: 50 });
        }
        Act::Pass
    });
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    let limiter = over(&store).defaults(limits).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
    assert!(lease.extend([("tpm", 60)]).await.is_err());
    lease.settle([("rpm", 1)]).await.unwrap();
    assert_eq!(level(&memory, ACME, "tpm").await, Some((100, 0)));
    assert_eq!(settled(&memory, ACME, "tpm").await.0, 0);
}

/// A return between the store's refusal and the start of the head's sleep was missed, and the head slept an
/// hour.
#[tokio::test(start_paused = true)]
async fn return_during_refusal_wakes_the_head() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 10)]).build().unwrap();
    let lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let head = wait(&limiter, ACME, 10, secs(7_200));
    tokio::time::sleep(millis(5)).await;
    // The store has refused the head, and its reply has not arrived yet.
    drop(lease);
    drop(head.await.unwrap().unwrap());
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
}

/// An impossible cost behind another waiter was refused only when it reached the head of the queue.
#[tokio::test(start_paused = true)]
async fn impossible_cost_is_refused_behind_any_head() {
    let limits = [Limit::per_second("rpm", 1).burst(10)];
    let limiter = Limiter::builder(Memory::new()).defaults(limits).build().unwrap();
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let head = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    let start = Instant::now();
    let error = limiter.acquire_within(ACME, [("rpm", 11)], secs(60)).await.unwrap_err();
    assert!(matches!(error, LimitError::TooLarge(_)), "{error}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(head);
}

/// A caller refused because of the head got the wait that the head had when it arrived, not the remaining
/// one.
#[tokio::test(start_paused = true)]
async fn retry_after_behind_a_head_is_the_remaining_wait() {
    let limits = [Limit::per_second("rpm", 1).burst(10)];
    let limiter = Limiter::builder(Memory::new()).defaults(limits).build().unwrap();
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    let head = wait(&limiter, ACME, 10, secs(60));
    settle_tasks().await;
    tokio::time::advance(secs(9)).await;
    let error = limiter.acquire_within(ACME, [("rpm", 1)], millis(500)).await.unwrap_err();
    assert!(error.retry_after() <= Some(secs(2)), "{error}");
    drop(head);
}

/// A store that claimed to be immediate but replied only when polled never received the cancel of a dropped
/// lease.
#[tokio::test(start_paused = true)]
async fn observed_store_cancels_dropped_lease() {
    let store = Arc::new(Observed::new(Memory::new()));
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    drop(limiter.try_acquire(ACME, [("rpm", 4)]).await.unwrap());
    flushed(&limiter).await;
    assert_eq!(level(store.inner(), ACME, "rpm").await, Some((10, 0)));
}

/// Reads that were in time one by one but not in total were discarded, so a slow store was never usable.
#[tokio::test(start_paused = true)]
async fn store_using_a_third_of_its_deadline_is_usable() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |_, moment| match moment {
        Moment::Before => Act::Sleep(millis(18)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut granted = 0;
    for _ in 0..20 {
        granted += u32::from(limiter.try_acquire(ACME, [("rpm", 1)]).await.is_ok());
        tokio::time::sleep(secs(1)).await;
    }
    assert!(granted > 0, "every call replies well within the deadline");
}

/// A cost above the local share was refused permanently, although the store's own limit can hold it.
#[tokio::test(start_paused = true)]
async fn cost_above_local_share_is_refused_as_transient() {
    let store = calm();
    let half = tidegate::OnUnavailable::LocalShare(tidegate::Share::new(0.5).unwrap());
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).on_unavailable(half).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    let error = limiter.try_acquire(ACME, [("rpm", 60)]).await.unwrap_err();
    assert!(!error.is_final(), "{error}");
}

/// A spend whose reply was lost was reported as failed although it was charged, so a retry paid twice.
#[tokio::test(start_paused = true)]
async fn spend_with_lost_reply_is_retried_and_charged_once() {
    let (memory, shots) = (Memory::new(), Arc::new(AtomicU32::new(1)));
    let left = Arc::clone(&shots);
    let store = HookStore::new(&memory, move |verb, moment| {
        let is_it = (verb, moment) == (Verb::Spend, Moment::After);
        if is_it && left.swap(0, Ordering::SeqCst) > 0 {
            return Act::Fail(StoreError::unavailable("the connection was reset"));
        }
        Act::Pass
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((90, 10)));
    assert_eq!(settled(&memory, ACME, "rpm").await.0, 10);
}
