//! More stories of defects: answers that were lost or late, and callers behind others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate::store::wrap::{Observed, Verb};
use tidegate::{Limit, LimitError, Limiter, Memory, StoreError};
use tokio::time::Instant;

use crate::kit::limiter::{ACME, Act, Hooked, Moment, calm, flushed, level, over, settled, wait};
use crate::kit::{millis, secs, settle_tasks};

/// An acquire whose draw was under way when the limiter was closed was granted after the drain had returned.
#[tokio::test(start_paused = true)]
async fn nobody_gets_a_lease_after_draining_has_ended() {
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let asking = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire(ACME, [("rpm", 1)]).await.map(|lease| (lease, Instant::now())) }
    });
    tokio::time::sleep(millis(5)).await;
    limiter.drain().await;
    let drained = Instant::now();
    if let Ok((lease, granted)) = asking.await.unwrap() {
        drop(lease);
        panic!("granted {:?} after draining had ended", granted - drained);
    }
}

/// An extension whose answer was lost, of a limit that the lease did not hold before, was charged by the settle.
#[tokio::test(start_paused = true)]
async fn a_lost_extension_of_a_new_limit_returns_with_the_settle() {
    let (memory, shots) = (Memory::new(), Arc::new(AtomicU32::new(1)));
    let left = Arc::clone(&shots);
    let store = Hooked::new(&memory, move |verb, moment| {
        let is_it = (verb, moment) == (Verb::Extend, Moment::After);
        if is_it && left.swap(0, Ordering::SeqCst) > 0 {
            return Act::Fail(StoreError::TimedOut { millis: 50 });
        }
        Act::Pass
    });
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    let limiter = over(&store).defaults(limits).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
    assert!(lease.extend([("tpm", 60)]).await.is_err());
    lease.settle([("rpm", 1)]).await.unwrap();
    assert_eq!(level(&memory, ACME, "tpm").await, Some((100, 0)));
    assert_eq!(settled(&memory, ACME, "tpm").await.0, 0);
}

/// What returned between the store's refusal and the head's falling asleep was not noticed: it slept an hour.
#[tokio::test(start_paused = true)]
async fn a_return_while_the_head_is_being_refused_wakes_it_all_the_same() {
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 10)]).build().unwrap();
    let lease = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let head = wait(&limiter, ACME, 10, secs(7_200));
    tokio::time::sleep(millis(5)).await;
    // The store has refused the head, and its answer is on the way.
    drop(lease);
    drop(head.await.unwrap().unwrap());
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
}

/// What could never be had behind one who was served in time waited for its turn before it was told so.
#[tokio::test(start_paused = true)]
async fn what_is_never_possible_is_refused_at_once_behind_any_head() {
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

/// Whoever was refused because of the one ahead was told how long that one had to wait when it came.
#[tokio::test(start_paused = true)]
async fn who_is_refused_behind_a_head_is_told_how_long_from_now() {
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

/// A store that was said to answer at once, and answered when it was polled, never heard of a dropped lease.
#[tokio::test(start_paused = true)]
async fn a_lease_of_an_observed_store_returns_when_it_is_dropped() {
    let store = Arc::new(Observed::new(Memory::new()));
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    drop(limiter.acquire(ACME, [("rpm", 4)]).await.unwrap());
    flushed(&limiter).await;
    assert_eq!(level(store.inner(), ACME, "rpm").await, Some((10, 0)));
}

/// Reads that were each in time and together not were thrown away, so that a slow store was never usable.
#[tokio::test(start_paused = true)]
async fn a_store_that_takes_a_third_of_its_deadline_is_usable() {
    let memory = Memory::new();
    let store = Hooked::new(&memory, |_, moment| match moment {
        Moment::Before => Act::Sleep(millis(18)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut granted = 0;
    for _ in 0..20 {
        granted += u32::from(limiter.acquire(ACME, [("rpm", 1)]).await.is_ok());
        tokio::time::sleep(secs(1)).await;
    }
    assert!(granted > 0, "every call is answered well within the deadline");
}

/// More than this process's share was refused for ever, though the store's own limit holds it.
#[tokio::test(start_paused = true)]
async fn what_only_the_local_share_cannot_hold_is_not_refused_for_ever() {
    let store = calm();
    let half = tidegate::OnUnavailable::LocalShare(tidegate::Share::new(0.5).unwrap());
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).on_unavailable(half).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    let error = limiter.acquire(ACME, [("rpm", 60)]).await.unwrap_err();
    assert!(!error.is_final(), "{error}");
}

/// A spend whose answer was lost was told to have failed, though it was spent: whoever tried again paid twice.
#[tokio::test(start_paused = true)]
async fn a_spend_whose_answer_was_lost_is_asked_for_again_and_charged_once() {
    let (memory, shots) = (Memory::new(), Arc::new(AtomicU32::new(1)));
    let left = Arc::clone(&shots);
    let store = Hooked::new(&memory, move |verb, moment| {
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
