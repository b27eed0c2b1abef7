//! The settler: delivers settles and cancels in the background, bounded, across runtimes, and reports every
//! loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::store::wrap::Verb;
use tidegate::{Limit, LimitError, LimitEvent, Limiter, Memory, SettleStatus, StoreError};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::kit::limiter::{
    ACME, Act, EventLog, HookStore, Moment, calm, flushed, level, memory, over, poll_and_drop, settled,
};
use crate::kit::{millis, secs, settle_tasks};

fn small_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime can be made")
}

fn is_unsettled(event: &LimitEvent) -> bool {
    matches!(event, LimitEvent::Unsettled { .. })
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_leases_and_pending_endings() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut settling = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    let working = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    store.go_away();
    assert_eq!(settling.settle([("rpm", 3)]).await.unwrap(), SettleStatus::Later);
    drop(settling);
    let start = Instant::now();
    let draining = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.drain().await }
    });
    tokio::time::sleep(secs(10)).await;
    assert!(!draining.is_finished(), "a lease is open");
    assert!(matches!(limiter.try_acquire(ACME, [("rpm", 1)]).await, Err(LimitError::Closed)));
    drop(working);
    tokio::time::sleep(secs(10)).await;
    assert!(!draining.is_finished(), "an ending is pending");
    store.come_back();
    draining.await.unwrap();
    assert!(start.elapsed() < secs(40), "{:?}", start.elapsed());
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((97, 3)));
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, stats.settling, stats.unsettled), (0, 0, 0));
    limiter.drain().await;
}

#[tokio::test(start_paused = true)]
async fn full_settler_leaves_leases_spent_with_event() {
    let (store, events) = (calm(), EventLog::default());
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 100)])
        .settler_max(2)
        .on_event(events.listener())
        .build()
        .unwrap();
    let mut leases = Vec::new();
    for _ in 0..5 {
        leases.push(limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap());
    }
    store.go_away();
    let start = Instant::now();
    leases.truncate(1);
    assert_eq!(start.elapsed(), millis(0));
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, events.count(is_unsettled)), (2, 2, 2));
    let error = leases[0].settle([("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "{error}");
    assert_eq!((limiter.stats().unsettled, events.count(is_unsettled)), (3, 3));
    drop(leases);
    store.come_back();
    flushed(&limiter).await;
    // Two returned; three stay spent until their deadline, and are then settled in full.
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((70, 30)));
    tokio::time::advance(secs(3_601)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(settled(memory(&store), ACME, "rpm").await, (31, 4));
    assert_eq!(limiter.stats().open_leases, 0);
}

#[tokio::test(start_paused = true)]
async fn ending_is_abandoned_after_ten_minutes_with_event() {
    let (store, events) = (calm(), EventLog::default());
    let limiter =
        over(&store).defaults([Limit::per_day("rpm", 100)]).on_event(events.listener()).build().unwrap();
    let lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    store.go_away();
    drop(lease);
    tokio::time::sleep(secs(590)).await;
    assert_eq!((limiter.stats().settling, events.count(is_unsettled)), (1, 0));
    tokio::time::sleep(secs(20)).await;
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, events.count(is_unsettled)), (0, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn denied_ending_is_reported_and_not_retried_forever() {
    let (memory, events) = (Memory::new(), EventLog::default());
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) => Act::Fail(StoreError::Denied { what: "read only".into() }),
        _ => Act::Pass,
    });
    let limiter =
        over(&store).defaults([Limit::per_day("rpm", 100)]).on_event(events.listener()).build().unwrap();
    drop(limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap());
    tokio::time::sleep(secs(590)).await;
    assert_eq!((limiter.stats().settling, events.count(is_unsettled)), (1, 0));
    tokio::time::sleep(secs(20)).await;
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, events.count(is_unsettled)), (0, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn store_panic_loses_one_ending_and_not_the_settler() {
    // Regression: an ending that panicked was requeued and picked up by a new worker, which panicked in turn,
    // in a busy loop.
    let (memory, events, is_broken) = (Memory::new(), EventLog::default(), Arc::new(AtomicBool::new(true)));
    let broken = Arc::clone(&is_broken);
    let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) if broken.load(Ordering::SeqCst) => Act::Panic,
        _ => Act::Pass,
    });
    let limiter =
        over(&store).defaults([Limit::per_day("rpm", 100)]).on_event(events.listener()).build().unwrap();
    drop(limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap());
    settle_tasks().await;
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, events.count(is_unsettled)), (0, 1, 1));
    is_broken.store(false, Ordering::SeqCst);
    drop(limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap());
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((90, 10)));
    limiter.drain().await;
}

#[test]
fn runtime_shutdown_hands_over_pending_endings() {
    let (memory, hangs) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let is_hanging = Arc::clone(&hangs);
    let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Cancel | Verb::Settle, Moment::Before) if is_hanging.load(Ordering::SeqCst) => Act::Hang,
        _ => Act::Pass,
    });
    let minute = secs(60);
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).store_deadline(minute).build().unwrap();
    let first = small_runtime();
    first.block_on(async {
        for _ in 0..6 {
            drop(limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap());
        }
        let mut lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
        // A caller dropped its settle, and the settler continues.
        assert!(poll_and_drop(lease.settle([("rpm", 4)]), 1).await.is_none());
        drop(lease);
        settle_tasks().await;
    });
    assert_eq!(limiter.stats().settling, 7);
    hangs.store(false, Ordering::SeqCst);
    drop(first);
    // No other runtime is left, and the remaining endings are still delivered.
    small_runtime().block_on(limiter.drain());
    let left = small_runtime().block_on(level(&memory, ACME, "rpm"));
    assert_eq!(left, Some((96, 4)));
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, stats.settling, stats.unsettled), (0, 0, 0));
}

#[test]
fn lease_outliving_all_runtimes_is_cancelled_on_drop() {
    let store = calm();
    let builder = over(&store).defaults([Limit::per_day("rpm", 100)]);
    let limiter = builder.store_deadline(secs(60)).build().unwrap();
    let runtime = small_runtime();
    let lease = runtime.block_on(limiter.try_acquire(ACME, [("rpm", 10)])).unwrap();
    drop(runtime);
    assert_eq!(limiter.stats().open_leases, 1);
    drop(lease);
    small_runtime().block_on(limiter.drain());
    let left = small_runtime().block_on(level(memory(&store), ACME, "rpm"));
    assert_eq!(left, Some((100, 0)));
}

#[test]
fn endings_run_on_the_configured_runtime() {
    let store = calm();
    let chosen = small_runtime();
    let builder = over(&store).defaults([Limit::per_day("rpm", 100)]).store_deadline(secs(60));
    let limiter = builder.runtime(chosen.handle().clone()).build().unwrap();
    let lease = small_runtime().block_on(limiter.try_acquire(ACME, [("rpm", 10)])).unwrap();
    drop(lease);
    assert_eq!(limiter.stats().settling, 1, "the configured runtime is not running yet");
    chosen.block_on(limiter.drain());
    assert_eq!(limiter.stats().settling, 0);
}

#[tokio::test(start_paused = true)]
async fn settler_return_wakes_waiting_head() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 10)]).build().unwrap();
    let lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    let start = Instant::now();
    let head = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire_within(ACME, [("rpm", 10)], secs(7_200)).await }
    });
    settle_tasks().await;
    drop(lease);
    drop(head.await.unwrap().unwrap());
    assert_eq!(start.elapsed(), millis(0));
    limiter.drain().await;
}

#[tokio::test(start_paused = true)]
async fn drain_ignores_settled_lease_in_scope() {
    // Regression: a lease counted as open until it was dropped, so a drain waited forever for a settled lease
    // in scope.
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
    lease.settle_full().await.unwrap();
    assert_eq!(limiter.stats().open_leases, 0);
    tokio::time::timeout(secs(3_600), limiter.drain()).await.expect("no lease is open");
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn full_settler_does_not_confirm_repeated_settle() {
    // Regression: the second settle reported success without reaching the store.
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).settler_max(1).build().unwrap();
    let first = limiter.try_acquire(ACME, [("rpm", 40)]).await.unwrap();
    let mut second = limiter.try_acquire(ACME, [("rpm", 40)]).await.unwrap();
    store.go_away();
    drop(first);
    assert!(matches!(second.settle([("rpm", 5)]).await, Err(LimitError::Unavailable { .. })));
    store.come_back();
    flushed(&limiter).await;
    tokio::time::advance(secs(10)).await;
    let again = second.settle([("rpm", 5)]).await;
    drop(second);
    flushed(&limiter).await;
    let (units, _) = settled(memory(&store), ACME, "rpm").await;
    assert!(again.is_err() || units == 5, "{again:?}, and {units} units in the ledger");
}
