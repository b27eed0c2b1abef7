//! The settler: endings told in the background, within bounds, across runtimes, and never lost without a word.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::store::wrap::Verb;
use tidegate::{Limit, LimitError, LimitEvent, Limiter, Memory, Settled, StoreError};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::kit::limiter::{
    ACME, Act, Heard, Hooked, Moment, calm, flushed, level, memory, over, poll_and_drop, settled,
};
use crate::kit::{millis, secs, settle_tasks};

fn small_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime can be made")
}

fn is_unsettled(event: &LimitEvent) -> bool {
    matches!(event, LimitEvent::Unsettled { .. })
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_leases_and_for_endings_that_have_not_been_heard() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut settling = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    let working = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    store.go_away();
    assert_eq!(settling.settle([("rpm", 3)]).await.unwrap(), Settled::Later);
    drop(settling);
    let start = Instant::now();
    let draining = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.drain().await }
    });
    tokio::time::sleep(secs(10)).await;
    assert!(!draining.is_finished(), "a lease is out");
    assert!(matches!(limiter.acquire(ACME, [("rpm", 1)]).await, Err(LimitError::Closed)));
    drop(working);
    tokio::time::sleep(secs(10)).await;
    assert!(!draining.is_finished(), "the store has not heard");
    store.come_back();
    draining.await.unwrap();
    assert!(start.elapsed() < secs(40), "{:?}", start.elapsed());
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((97, 3)));
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, stats.settling, stats.unsettled), (0, 0, 0));
    limiter.drain().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_settler_leaves_leases_spent_and_says_so_and_never_waits() {
    let (store, heard) = (calm(), Heard::default());
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 100)])
        .settler_max(2)
        .on_event(heard.ear())
        .build()
        .unwrap();
    let mut leases = Vec::new();
    for _ in 0..5 {
        leases.push(limiter.acquire(ACME, [("rpm", 10)]).await.unwrap());
    }
    store.go_away();
    let start = Instant::now();
    leases.truncate(1);
    assert_eq!(start.elapsed(), millis(0));
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, heard.count(is_unsettled)), (2, 2, 2));
    let error = leases[0].settle([("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "{error}");
    assert_eq!((limiter.stats().unsettled, heard.count(is_unsettled)), (3, 3));
    drop(leases);
    store.come_back();
    flushed(&limiter).await;
    // Two returned; three stay spent until their deadline, and are then settled at what they drew.
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((70, 30)));
    tokio::time::advance(secs(3_601)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(settled(memory(&store), ACME, "rpm").await, (31, 4));
    assert_eq!(limiter.stats().open_leases, 0);
}

#[tokio::test(start_paused = true)]
async fn what_the_store_will_not_hear_for_ten_minutes_is_given_up_and_told() {
    let (store, heard) = (calm(), Heard::default());
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).on_event(heard.ear()).build().unwrap();
    let lease = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    store.go_away();
    drop(lease);
    tokio::time::sleep(secs(590)).await;
    assert_eq!((limiter.stats().settling, heard.count(is_unsettled)), (1, 0));
    tokio::time::sleep(secs(20)).await;
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, heard.count(is_unsettled)), (0, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_ending_that_is_denied_is_told_and_not_tried_for_ever() {
    let (memory, heard) = (Memory::new(), Heard::default());
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) => Act::Fail(StoreError::Denied { what: "read only".into() }),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).on_event(heard.ear()).build().unwrap();
    drop(limiter.acquire(ACME, [("rpm", 10)]).await.unwrap());
    tokio::time::sleep(secs(590)).await;
    assert_eq!((limiter.stats().settling, heard.count(is_unsettled)), (1, 0));
    tokio::time::sleep(secs(20)).await;
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, heard.count(is_unsettled)), (0, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_loses_one_ending_and_not_the_settler() {
    // Whatever panicked was put back and tried again by a new worker, which panicked at once: for ever, as fast as
    // a thread can.
    let (memory, heard, is_broken) = (Memory::new(), Heard::default(), Arc::new(AtomicBool::new(true)));
    let broken = Arc::clone(&is_broken);
    let store = Hooked::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) if broken.load(Ordering::SeqCst) => Act::Panic,
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).on_event(heard.ear()).build().unwrap();
    drop(limiter.acquire(ACME, [("rpm", 10)]).await.unwrap());
    settle_tasks().await;
    let stats = limiter.stats();
    assert_eq!((stats.settling, stats.unsettled, heard.count(is_unsettled)), (0, 1, 1));
    is_broken.store(false, Ordering::SeqCst);
    drop(limiter.acquire(ACME, [("rpm", 10)]).await.unwrap());
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((90, 10)));
    limiter.drain().await;
}

#[test]
fn a_runtime_that_shuts_down_hands_its_endings_over() {
    let (memory, hangs) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let is_hanging = Arc::clone(&hangs);
    let store = Hooked::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Cancel | Verb::Settle, Moment::Before) if is_hanging.load(Ordering::SeqCst) => Act::Hang,
        _ => Act::Pass,
    });
    let minute = secs(60);
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).store_deadline(minute).build().unwrap();
    let first = small_runtime();
    first.block_on(async {
        for _ in 0..6 {
            drop(limiter.acquire(ACME, [("rpm", 10)]).await.unwrap());
        }
        let mut lease = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
        // Somebody gave up waiting for a settle: the settler goes on.
        assert!(poll_and_drop(lease.settle([("rpm", 4)]), 1).await.is_none());
        drop(lease);
        settle_tasks().await;
    });
    assert_eq!(limiter.stats().settling, 7);
    hangs.store(false, Ordering::SeqCst);
    drop(first);
    // Nobody else has a runtime now; what was left is done all the same.
    small_runtime().block_on(limiter.drain());
    let left = small_runtime().block_on(level(&memory, ACME, "rpm"));
    assert_eq!(left, Some((96, 4)));
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, stats.settling, stats.unsettled), (0, 0, 0));
}

#[test]
fn a_lease_that_outlives_every_runtime_is_cancelled_when_it_is_dropped() {
    let store = calm();
    let builder = over(&store).defaults([Limit::per_day("rpm", 100)]);
    let limiter = builder.store_deadline(secs(60)).build().unwrap();
    let runtime = small_runtime();
    let lease = runtime.block_on(limiter.acquire(ACME, [("rpm", 10)])).unwrap();
    drop(runtime);
    assert_eq!(limiter.stats().open_leases, 1);
    drop(lease);
    small_runtime().block_on(limiter.drain());
    let left = small_runtime().block_on(level(memory(&store), ACME, "rpm"));
    assert_eq!(left, Some((100, 0)));
}

#[test]
fn endings_run_where_the_builder_says() {
    let store = calm();
    let chosen = small_runtime();
    let builder = over(&store).defaults([Limit::per_day("rpm", 100)]).store_deadline(secs(60));
    let limiter = builder.runtime(chosen.handle().clone()).build().unwrap();
    let lease = small_runtime().block_on(limiter.acquire(ACME, [("rpm", 10)])).unwrap();
    drop(lease);
    assert_eq!(limiter.stats().settling, 1, "the chosen runtime does not run yet");
    chosen.block_on(limiter.drain());
    assert_eq!(limiter.stats().settling, 0);
}

#[tokio::test(start_paused = true)]
async fn a_head_that_waits_is_woken_when_the_settler_has_returned_what_it_waits_for() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 10)]).build().unwrap();
    let lease = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
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
async fn draining_does_not_wait_for_a_settled_lease_that_is_still_in_scope() {
    // A lease counted as open until its variable was dropped: whoever kept a settled one waited for ever.
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
    lease.settle_as_held().await.unwrap();
    assert_eq!(limiter.stats().open_leases, 0);
    tokio::time::timeout(secs(3_600), limiter.drain()).await.expect("nothing is open");
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn a_settle_that_found_the_settler_full_is_not_answered_as_done_the_second_time() {
    // The second settle answered that it was done, and nobody ever told the store.
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).settler_max(1).build().unwrap();
    let first = limiter.acquire(ACME, [("rpm", 40)]).await.unwrap();
    let mut second = limiter.acquire(ACME, [("rpm", 40)]).await.unwrap();
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
