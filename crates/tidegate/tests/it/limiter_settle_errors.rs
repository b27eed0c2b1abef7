//! An available store that refuses settles and cancels: used units stay charged, whatever happens to the
//! lease.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tidegate::store::wrap::Verb;
use tidegate::{LeaseId, Limit, LimitError, LimitEvent, Limiter, Memory, SettleStatus, StoreError};

use crate::kit::limiter::{
    ACME, Act, EventLog, HookStore, Moment, flushed, level, over, poll_and_drop, settled,
};
use crate::kit::{millis, secs, settle_tasks};

const BETA: (&str, &str) = ("beta", "gpt");

/// Constructor of the error that a store returns.
type ErrorFn = fn() -> StoreError;

fn denied() -> StoreError {
    StoreError::Denied { what: "read only".to_owned() }
}

fn corrupt() -> StoreError {
    StoreError::Corrupt { what: "a bucket".to_owned() }
}

fn full() -> StoreError {
    StoreError::Full { what: "buckets", max: 1 }
}

fn invalid() -> StoreError {
    StoreError::Invalid { what: "two numbers for one limit".to_owned() }
}

fn late() -> StoreError {
    StoreError::Late { lease: LeaseId::new(1, 1), step: 1, done: 2 }
}

fn closed() -> StoreError {
    StoreError::Closed { what: "the file was closed".to_owned() }
}

/// A store that refuses settles and cancels while a test says so.
struct RefusingStore {
    memory: Memory,
    limiter: Limiter,
    events: EventLog,
    refuses: Arc<Mutex<Option<ErrorFn>>>,
    endings: Arc<AtomicUsize>,
}

impl RefusingStore {
    fn new() -> Self {
        Self::of(false)
    }

    fn of(is_immediate: bool) -> Self {
        let (memory, events) = (Memory::new(), EventLog::default());
        let (refuses, endings) = (Arc::new(Mutex::new(None::<ErrorFn>)), Arc::new(AtomicUsize::new(0)));
        let (refusal, count) = (Arc::clone(&refuses), Arc::clone(&endings));
        let hook = move |verb, moment| {
            if !matches!((verb, moment), (Verb::Settle | Verb::Cancel, Moment::Before)) {
                return Act::Pass;
            }
            count.fetch_add(1, Ordering::SeqCst);
            let refuses = *refusal.lock().expect("the lock is not poisoned");
            refuses.map_or(Act::Pass, |refuses| Act::Fail(refuses()))
        };
        let store =
            if is_immediate { HookStore::immediate(&memory, hook) } else { HookStore::new(&memory, hook) };
        let limits = [Limit::per_day("rpm", 100)];
        let limiter =
            over(&store).defaults(limits).on_event(events.listener()).build().expect("within the bounds");
        Self { memory, limiter, events, refuses, endings }
    }

    fn set(&self, refuses: Option<ErrorFn>) {
        *self.refuses.lock().expect("the lock is not poisoned") = refuses;
    }

    /// The number of abandoned leases, by counter and by events.
    fn lost(&self) -> (u64, usize) {
        let reported = self.events.count(|event| matches!(event, LimitEvent::Unsettled { .. }));
        (self.limiter.stats().unsettled, reported)
    }
}

#[tokio::test(start_paused = true)]
async fn lease_dropped_after_refused_settle_is_settled() {
    // Regression: the refusal reopened the lease, and dropping an open lease cancels it, so used units
    // returned.
    let table = [denied, corrupt, full] as [ErrorFn; 3];
    for (refuses, is_immediate) in table.into_iter().flat_map(|refuses| [(refuses, false), (refuses, true)]) {
        let test = RefusingStore::of(is_immediate);
        let mut lease = test.limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
        test.set(Some(refuses));
        let error = lease.settle([("rpm", 4)]).await.unwrap_err();
        assert!(matches!(error, LimitError::Store(_)), "{error}");
        assert_eq!((test.endings.load(Ordering::SeqCst), test.limiter.stats().open_leases), (1, 1));
        drop(lease);
        tokio::time::sleep(secs(300)).await;
        assert_eq!(
            (test.limiter.stats().settling, test.lost()),
            (1, (0, 0)),
            "{error}: it may be recoverable"
        );
        test.set(None);
        flushed(&test.limiter).await;
        assert_eq!(settled(&test.memory, ACME, "rpm").await, (4, 1), "{error}");
        assert_eq!(level(&test.memory, ACME, "rpm").await, Some((96, 4)), "{error}");
        assert_eq!((test.limiter.stats().open_leases, test.lost()), (0, (0, 0)));
    }
}

#[tokio::test(start_paused = true)]
async fn unsettleable_dropped_lease_stays_spent_with_event() {
    for refuses in [invalid, late, closed] as [ErrorFn; 3] {
        let test = RefusingStore::new();
        let mut lease = test.limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
        test.set(Some(refuses));
        let error = lease.settle([("rpm", 4)]).await.unwrap_err();
        drop(lease);
        settle_tasks().await;
        assert_eq!((test.limiter.stats().settling, test.lost()), (0, (1, 1)), "{error}");
        assert_eq!(
            test.endings.load(Ordering::SeqCst),
            2,
            "{error}: one attempt by its holder, one by the settler"
        );
        tokio::time::timeout(secs(1), test.limiter.drain()).await.expect("the drain does not wait");
        assert_eq!(level(&test.memory, ACME, "rpm").await, Some((90, 10)), "{error}: no unit returned");
    }
}

#[tokio::test(start_paused = true)]
async fn refused_settle_may_be_retried_or_changed() {
    for refuses in [denied, corrupt, full, invalid] as [ErrorFn; 4] {
        for (again, used) in [(Some(4), 4), (Some(7), 7), (None, 0)] {
            let test = RefusingStore::new();
            let mut lease = test.limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
            test.set(Some(refuses));
            let error = lease.settle([("rpm", 4)]).await.unwrap_err();
            assert!(lease.settle([("rpm", 4)]).await.is_err(), "{error}: still refused");
            test.set(None);
            // The lease is being settled, so it accepts no further work.
            assert!(lease.extend([("rpm", 1)]).await.is_err() && lease.adjust([("rpm", 1)]).await.is_err());
            let answer = match again {
                Some(units) => lease.settle([("rpm", units)]).await,
                None => lease.cancel().await,
            };
            assert_eq!(answer.unwrap(), SettleStatus::Now);
            drop(lease);
            flushed(&test.limiter).await;
            assert_eq!(level(&test.memory, ACME, "rpm").await, Some((100 - used, used)), "{error}");
            assert_eq!((test.limiter.stats().open_leases, test.lost()), (0, (0, 0)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refused_cancel_is_retried_and_may_become_a_settle() {
    for settles in [false, true] {
        let test = RefusingStore::new();
        let mut lease = test.limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
        test.set(Some(denied));
        assert!(lease.cancel().await.is_err());
        if settles {
            // Dropped while in progress: from here on it is a settle.
            drop(poll_and_drop(lease.settle_full(), 1).await);
        }
        drop(lease);
        test.set(None);
        flushed(&test.limiter).await;
        let used = if settles { 10 } else { 0 };
        assert_eq!(level(&test.memory, ACME, "rpm").await, Some((100 - used, used)));
    }
}

#[tokio::test(start_paused = true)]
async fn expired_lease_stays_ended_when_settled() {
    let test = RefusingStore::new();
    let mut lease = test.limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    tokio::time::advance(secs(3_601)).await;
    test.limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    let error = lease.settle([("rpm", 4)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Store(StoreError::Ended { .. })), "{error}");
    assert_eq!(test.limiter.stats().open_leases, 0);
    drop(lease);
    settle_tasks().await;
    assert_eq!(
        (test.endings.load(Ordering::SeqCst), test.lost()),
        (1, (0, 0)),
        "the drop sends nothing more"
    );
}

#[tokio::test(start_paused = true)]
async fn invalid_settle_cost_keeps_lease_open() {
    let test = RefusingStore::new();
    let mut lease = test.limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    assert!(matches!(lease.settle([("typo", 4)]).await, Err(LimitError::Cost(_))));
    lease.extend([("rpm", 5)]).await.unwrap();
    drop(lease);
    flushed(&test.limiter).await;
    assert_eq!(level(&test.memory, ACME, "rpm").await, Some((100, 0)), "nothing was sent: the drop cancels");
}

#[tokio::test(start_paused = true)]
async fn refused_endings_do_not_delay_others() {
    // Regression: each of the four settler tasks slept for up to 5 s on a refused ending while others waited.
    let (memory, is_damaged) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let damaged = Arc::clone(&is_damaged);
    let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) if damaged.load(Ordering::SeqCst) => Act::Fail(corrupt()),
        (Verb::Settle, Moment::Before) => Act::Sleep(millis(1)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut refused = Vec::new();
    for _ in 0..12 {
        refused.push(limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap());
    }
    let mut other = limiter.try_acquire(BETA, [("rpm", 10)]).await.unwrap();
    drop(refused);
    tokio::time::sleep(secs(60)).await;
    assert_eq!(limiter.stats().settling, 12);
    assert!(poll_and_drop(other.settle([("rpm", 4)]), 1).await.is_none(), "the settler takes over");
    drop(other);
    tokio::time::sleep(millis(5)).await;
    assert_eq!(settled(&memory, BETA, "rpm").await, (4, 1));
    assert_eq!(limiter.stats().settling, 12);
    is_damaged.store(false, Ordering::SeqCst);
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((100, 0)));
    assert_eq!(limiter.stats().unsettled, 0);
}

#[tokio::test(start_paused = true)]
async fn closed_store_is_an_error_and_does_not_block_drain() {
    // Regression: a closed store counted as unavailable, so dropped leases were retried and a drain waited
    // ten minutes.
    let memory = Memory::new();
    let is_closed = Arc::new(AtomicBool::new(false));
    let after = Arc::clone(&is_closed);
    let store = HookStore::new(&memory, move |_, moment| match moment {
        Moment::Before if after.load(Ordering::SeqCst) => Act::Fail(closed()),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let dropped = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
    is_closed.store(true, Ordering::SeqCst);
    for subject in [ACME, BETA] {
        let error = limiter.try_acquire(subject, [("rpm", 1)]).await.unwrap_err();
        assert!(matches!(error, LimitError::Store(StoreError::Closed { .. })), "{error}");
        assert!(error.is_final(), "{error}");
    }
    drop(dropped);
    tokio::time::timeout(secs(1), limiter.drain()).await.expect("the drain does not wait");
    assert_eq!((limiter.stats().unsettled, limiter.stats().open_leases), (1, 0));
}
