//! Joined acquires and settles dropped at every await point, and permits that end abnormally: slot and lease
//! are both returned.

use std::sync::Arc;

use tidegate::store::wrap::Verb;
use tidegate::{
    Budget, Bytes, Circuit, Controller, Cost, Joined, Limit, Limiter, ManualClock, Memory, Outcome, Pace,
    Rate, Slots, StoreError, Throttle,
};
use tokio::time::Instant;

use crate::kit::limiter::{ACME, Act, HookStore, Moment, flushed, level, over, poll_and_drop, settled};
use crate::kit::{millis, secs, settle_tasks};

const BURST: i64 = 10;
const COST: Cost = Cost::request().tokens(2).bytes(64);

/// Every gate, each with capacity for one request at a time.
fn throttle() -> Throttle {
    Throttle::builder()
        .slots(Slots::fixed(1))
        .bytes(Bytes::in_flight(64))
        .rate(Rate::per_minute(1))
        .pace(Pace::every(secs(60)))
        .budget(Budget::tokens(2, secs(60)))
        .circuit(Circuit::after_failures(5))
        .controller(Controller::Fixed)
        .build()
        .expect("within the bounds")
}

/// What the store does while the caller is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreMode {
    /// Replies at once.
    Immediate,
    /// Sleeps before and after every call.
    Slow,
    /// Replies at once, and is exhausted.
    Empty,
    /// Exhausted and slow.
    EmptyAndSlow,
    /// Every draw fails as unavailable.
    Unavailable,
    /// Never replies to a draw.
    Silent,
}

const MODES: [StoreMode; 6] = [
    StoreMode::Immediate,
    StoreMode::Slow,
    StoreMode::Empty,
    StoreMode::EmptyAndSlow,
    StoreMode::Unavailable,
    StoreMode::Silent,
];

/// A limiter over such a store, and the units that are spent before the test begins.
async fn limiter(mode: StoreMode) -> (Limiter, Memory, i64) {
    let memory = Memory::new();
    let limits = [Limit::per_day("rpm", 10), Limit::per_day("tpm", 10)];
    let here = Limiter::builder(memory.clone()).defaults(limits.clone()).build().expect("within the bounds");
    let used = if matches!(mode, StoreMode::Empty | StoreMode::EmptyAndSlow) { BURST } else { 0 };
    if used > 0 {
        here.spend(ACME, [("rpm", 10), ("tpm", 10)]).await.expect("enough units");
    }
    if matches!(mode, StoreMode::Immediate | StoreMode::Empty) {
        return (here, memory, used);
    }
    let store = HookStore::new(&memory, move |verb, moment| match (mode, verb, moment) {
        (StoreMode::Unavailable, Verb::Draw, Moment::After) => Act::Fail(StoreError::unavailable("injected")),
        (StoreMode::Silent, Verb::Draw, Moment::After) => Act::Hang,
        _ => Act::Sleep(millis(2)),
    });
    (over(&store).defaults(limits).build().expect("within the bounds"), memory, used)
}

/// Checks that nothing is held, and that the throttle is as good as new.
async fn check_whole(joined: &Joined, memory: &Memory, used: i64, moment: &str) {
    let snapshot = joined.throttle().snapshot();
    let held = (snapshot.in_flight, snapshot.bytes_in_flight, snapshot.tokens_used, snapshot.waiting);
    assert_eq!(held, (0, 0, 0, 0), "{moment}");
    assert_eq!((snapshot.admitted, snapshot.rate_level), (0, Some(1)), "{moment}");
    flushed(joined.limiter()).await;
    let stats = joined.limiter().stats();
    let under_way = (stats.open_leases, stats.waiting, stats.settling, stats.unsettled);
    assert_eq!(under_way, (0, 0, 0, 0), "{moment}");
    for limit in ["rpm", "tpm"] {
        let found = level(memory, ACME, limit).await.unwrap_or((BURST, 0));
        assert_eq!(found, (BURST - used, used), "{limit}, {moment}");
    }
    // Slot, bytes, rate, pace and tokens are available to the next caller at once.
    drop(joined.throttle().try_acquire(COST).unwrap_or_else(|refused| panic!("{refused}, {moment}")));
}

#[tokio::test(start_paused = true)]
async fn dropped_acquire_returns_slot_and_units() {
    for mode in MODES {
        let mut granted = 0;
        for polls in 0..24 {
            for way in 0..3 {
                let (limiter, memory, used) = limiter(mode).await;
                let joined = throttle().limited_by(&limiter);
                let permit = match way {
                    0 => poll_and_drop(joined.acquire(ACME, COST), polls).await,
                    1 => poll_and_drop(joined.acquire_within(ACME, COST, secs(3_600)), polls).await,
                    _ => poll_and_drop(joined.try_acquire(ACME, COST), polls).await,
                };
                let moment = format!("{mode:?}, way {way}, {polls} polls");
                if let Some(Ok(permit)) = permit {
                    granted += 1;
                    // The permit was granted: rate and pace stay spent, and the rest returns.
                    drop(permit);
                    flushed(&limiter).await;
                    assert_eq!(joined.throttle().snapshot().in_flight, 0, "{moment}");
                    assert_eq!(level(&memory, ACME, "rpm").await, Some((BURST, 0)), "{moment}");
                    assert_eq!(limiter.stats().open_leases, 0, "{moment}");
                } else {
                    check_whole(&joined, &memory, used, &moment).await;
                }
            }
        }
        let expected = match mode {
            StoreMode::Immediate => 60..=69,
            StoreMode::Slow => 1..=68,
            _ => 0..=0,
        };
        assert!(expected.contains(&granted), "{mode:?}: {granted}");
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_store_waiter_lets_the_next_proceed() {
    for polls in 0..12 {
        for mode in [StoreMode::Immediate, StoreMode::Slow] {
            let (limiter, memory, _) = limiter(mode).await;
            let joined = throttle().limited_by(&limiter);
            let mut lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
            // The head of the queue runs in a task; the dropped waiter is second, and a third one queues
            // behind it.
            let wait = || {
                let joined = joined.clone();
                tokio::spawn(async move { joined.acquire(ACME, Cost::request()).await.map(drop) })
            };
            let first = wait();
            tokio::time::sleep(millis(20)).await;
            let mut second = Box::pin(joined.acquire(ACME, Cost::request()));
            let third = {
                let waiting = poll_and_drop(second.as_mut(), polls.min(1)).await;
                assert!(waiting.is_none());
                wait()
            };
            tokio::time::sleep(millis(20)).await;
            lease.cancel().await.unwrap();
            // It is dropped some polls after it was promoted.
            drop(poll_and_drop(second, polls).await);
            for task in [first, third] {
                task.await.unwrap().unwrap();
            }
            flushed(&limiter).await;
            let stats = limiter.stats();
            assert_eq!((stats.waiting, stats.open_leases), (0, 0), "{mode:?}, {polls} polls");
            assert_eq!(level(&memory, ACME, "rpm").await, Some((BURST, 0)), "{mode:?}, {polls} polls");
            let snapshot = joined.throttle().snapshot();
            assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0), "{mode:?}, {polls} polls");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_throttle_waiter_takes_nothing() {
    for polls in 0..8 {
        for mode in MODES {
            let (limiter, memory, used) = limiter(mode).await;
            let throttle = Throttle::builder().slots(Slots::fixed(1)).build().unwrap();
            let joined = throttle.limited_by(&limiter);
            let slot = throttle.acquire(Cost::request()).await.unwrap();
            drop(poll_and_drop(joined.acquire_within(ACME, COST, secs(5)), polls).await);
            assert_eq!(throttle.snapshot().waiting, 0, "{mode:?}, {polls} polls");
            drop(slot);
            assert_eq!(throttle.snapshot().in_flight, 0, "{mode:?}, {polls} polls");
            flushed(&limiter).await;
            let found = level(&memory, ACME, "rpm").await.unwrap_or((BURST, 0));
            assert_eq!(found, (BURST - used, used), "{mode:?}, {polls} polls");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_settle_still_completes() {
    for polls in 0..6 {
        for (outcome, units) in
            [(Outcome::success().spent(Cost::request().tokens(1)), 1), (Outcome::failure(), 0)]
        {
            let (limiter, memory, _) = limiter(StoreMode::Slow).await;
            let joined = throttle().limited_by(&limiter);
            let permit = joined.acquire(ACME, COST).await.unwrap();
            drop(poll_and_drop(permit.settle(outcome), polls).await);
            assert_eq!(joined.throttle().snapshot().in_flight, 0, "{polls} polls");
            flushed(&limiter).await;
            assert_eq!(limiter.stats().open_leases, 0, "{polls} polls");
            assert_eq!(settled(&memory, ACME, "tpm").await.0, units, "{polls} polls");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn panicked_or_aborted_task_returns_slot_and_lease() {
    for mode in [StoreMode::Immediate, StoreMode::Slow] {
        let (limiter, memory, _) = limiter(mode).await;
        let throttle = Throttle::builder().slots(Slots::fixed(3)).build().unwrap();
        let joined = Arc::new(throttle.limited_by(&limiter));
        let task = |spent: u64, panics: bool| {
            let joined = Arc::clone(&joined);
            tokio::spawn(async move {
                let mut permit = joined.acquire(ACME, COST).await.unwrap();
                if spent > 0 {
                    permit.spend(spent);
                }
                assert!(!panics, "injected");
                std::future::pending::<()>().await;
            })
        };
        let (panicking, aborted, reported) = (task(0, true), task(0, false), task(1, false));
        assert!(panicking.await.unwrap_err().is_panic());
        tokio::time::sleep(millis(50)).await;
        assert_eq!(throttle.snapshot().in_flight, 2);
        aborted.abort();
        reported.abort();
        settle_tasks().await;
        assert_eq!(throttle.snapshot().in_flight, 0);
        flushed(&limiter).await;
        assert_eq!(level(&memory, ACME, "tpm").await, Some((BURST - 1, 1)), "reported usage stays charged");
        assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn clock_step_back_refills_nothing() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .rate(Rate::per_minute(1))
        .controller(Controller::Fixed)
        .clock(clock.clone())
        .build()
        .unwrap();
    let (limiter, memory, _) = limiter(StoreMode::Slow).await;
    let joined = throttle.limited_by(&limiter);
    clock.advance(secs(100));
    joined.acquire(ACME, COST).await.unwrap().settle(Outcome::success()).await.unwrap();
    clock.set(tidegate::Instant::ZERO + secs(10));
    let error = joined.try_acquire(ACME, COST).await.unwrap_err();
    assert!(error.refused().is_some(), "{error}");
    let waiting = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, COST).await.map(drop) }
    });
    settle_tasks().await;
    assert!(!waiting.is_finished());
    clock.set(tidegate::Instant::ZERO + secs(160));
    let start = Instant::now();
    waiting.await.unwrap().unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((BURST - 1, 1)));
    assert_eq!(throttle.snapshot().in_flight, 0);
}
