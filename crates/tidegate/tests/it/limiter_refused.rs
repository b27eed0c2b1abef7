//! The store is there, and does not do what ends a lease: what was used stays used, whatever becomes of the lease.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tidegate::store::wrap::Verb;
use tidegate::{LeaseId, Limit, LimitError, LimitEvent, Limiter, Memory, Settled, StoreError};

use crate::kit::limiter::{ACME, Act, Heard, Hooked, Moment, flushed, level, over, poll_and_drop, settled};
use crate::kit::{millis, secs, settle_tasks};

const BETA: (&str, &str) = ("beta", "gpt");

/// How a store refuses.
type Refuses = fn() -> StoreError;

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

/// A store that refuses endings while the test says so.
struct Refusing {
    memory: Memory,
    limiter: Limiter,
    heard: Heard,
    refuses: Arc<Mutex<Option<Refuses>>>,
    endings: Arc<AtomicUsize>,
}

impl Refusing {
    fn new() -> Self {
        Self::of(false)
    }

    fn of(is_here: bool) -> Self {
        let (memory, heard) = (Memory::new(), Heard::default());
        let (refuses, endings) = (Arc::new(Mutex::new(None::<Refuses>)), Arc::new(AtomicUsize::new(0)));
        let (refusal, count) = (Arc::clone(&refuses), Arc::clone(&endings));
        let hook = move |verb, moment| {
            if !matches!((verb, moment), (Verb::Settle | Verb::Cancel, Moment::Before)) {
                return Act::Pass;
            }
            count.fetch_add(1, Ordering::SeqCst);
            let refuses = *refusal.lock().expect("nobody panicked");
            refuses.map_or(Act::Pass, |refuses| Act::Fail(refuses()))
        };
        let store = if is_here { Hooked::here(&memory, hook) } else { Hooked::new(&memory, hook) };
        let limits = [Limit::per_day("rpm", 100)];
        let limiter = over(&store).defaults(limits).on_event(heard.ear()).build().expect("within the bounds");
        Self { memory, limiter, heard, refuses, endings }
    }

    fn set(&self, refuses: Option<Refuses>) {
        *self.refuses.lock().expect("nobody panicked") = refuses;
    }

    /// How many leases were given up, by the numbers and by the events.
    fn lost(&self) -> (u64, usize) {
        let told = self.heard.count(|event| matches!(event, LimitEvent::Unsettled { .. }));
        (self.limiter.stats().unsettled, told)
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_dropped_after_a_refused_settle_is_settled_and_not_cancelled() {
    // It was open again after the refusal, and a drop of an open lease is a cancel: what was used returned.
    let table = [denied, corrupt, full] as [Refuses; 3];
    for (refuses, is_here) in table.into_iter().flat_map(|refuses| [(refuses, false), (refuses, true)]) {
        let test = Refusing::of(is_here);
        let mut lease = test.limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
        test.set(Some(refuses));
        let error = lease.settle([("rpm", 4)]).await.unwrap_err();
        assert!(matches!(error, LimitError::Store(_)), "{error}");
        assert_eq!((test.endings.load(Ordering::SeqCst), test.limiter.stats().open_leases), (1, 1));
        drop(lease);
        tokio::time::sleep(secs(300)).await;
        assert_eq!((test.limiter.stats().settling, test.lost()), (1, (0, 0)), "{error}: it may be repaired");
        test.set(None);
        flushed(&test.limiter).await;
        assert_eq!(settled(&test.memory, ACME, "rpm").await, (4, 1), "{error}");
        assert_eq!(level(&test.memory, ACME, "rpm").await, Some((96, 4)), "{error}");
        assert_eq!((test.limiter.stats().open_leases, test.lost()), (0, (0, 0)));
    }
}

#[tokio::test(start_paused = true)]
async fn where_it_cannot_help_to_settle_again_a_dropped_lease_stays_spent_and_that_is_told() {
    for refuses in [invalid, late, closed] as [Refuses; 3] {
        let test = Refusing::new();
        let mut lease = test.limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
        test.set(Some(refuses));
        let error = lease.settle([("rpm", 4)]).await.unwrap_err();
        drop(lease);
        settle_tasks().await;
        assert_eq!((test.limiter.stats().settling, test.lost()), (0, (1, 1)), "{error}");
        assert_eq!(
            test.endings.load(Ordering::SeqCst),
            2,
            "{error}: once by its holder, once by the settler"
        );
        tokio::time::timeout(secs(1), test.limiter.drain()).await.expect("nothing is waited for");
        assert_eq!(level(&test.memory, ACME, "rpm").await, Some((90, 10)), "{error}: nothing returned");
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_holds_a_lease_may_end_it_again_or_otherwise_after_a_refusal() {
    for refuses in [denied, corrupt, full, invalid] as [Refuses; 4] {
        for (again, used) in [(Some(4), 4), (Some(7), 7), (None, 0)] {
            let test = Refusing::new();
            let mut lease = test.limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
            test.set(Some(refuses));
            let error = lease.settle([("rpm", 4)]).await.unwrap_err();
            assert!(lease.settle([("rpm", 4)]).await.is_err(), "{error}: still");
            test.set(None);
            // Its end has begun: it is not worked with any more.
            assert!(lease.extend([("rpm", 1)]).await.is_err() && lease.adjust([("rpm", 1)]).await.is_err());
            let answer = match again {
                Some(units) => lease.settle([("rpm", units)]).await,
                None => lease.cancel().await,
            };
            assert_eq!(answer.unwrap(), Settled::Now);
            drop(lease);
            flushed(&test.limiter).await;
            assert_eq!(level(&test.memory, ACME, "rpm").await, Some((100 - used, used)), "{error}");
            assert_eq!((test.limiter.stats().open_leases, test.lost()), (0, (0, 0)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_is_refused_is_repeated_and_may_become_a_settle() {
    for settles in [false, true] {
        let test = Refusing::new();
        let mut lease = test.limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
        test.set(Some(denied));
        assert!(lease.cancel().await.is_err());
        if settles {
            // Given up while it is said: from here on it is a settle.
            drop(poll_and_drop(lease.settle_as_held(), 1).await);
        }
        drop(lease);
        test.set(None);
        flushed(&test.limiter).await;
        let used = if settles { 10 } else { 0 };
        assert_eq!(level(&test.memory, ACME, "rpm").await, Some((100 - used, used)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ended_by_itself_is_over_whatever_it_is_settled_at() {
    let test = Refusing::new();
    let mut lease = test.limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    tokio::time::advance(secs(3_601)).await;
    test.limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    let error = lease.settle([("rpm", 4)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Store(StoreError::Ended { .. })), "{error}");
    assert_eq!(test.limiter.stats().open_leases, 0);
    drop(lease);
    settle_tasks().await;
    assert_eq!((test.endings.load(Ordering::SeqCst), test.lost()), (1, (0, 0)), "a drop says no more");
}

#[tokio::test(start_paused = true)]
async fn a_cost_that_cannot_be_leaves_the_lease_open() {
    let test = Refusing::new();
    let mut lease = test.limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    assert!(matches!(lease.settle([("typo", 4)]).await, Err(LimitError::Cost(_))));
    lease.extend([("rpm", 5)]).await.unwrap();
    drop(lease);
    flushed(&test.limiter).await;
    assert_eq!(level(&test.memory, ACME, "rpm").await, Some((100, 0)), "nothing was said: a drop cancels");
}

#[tokio::test(start_paused = true)]
async fn endings_that_are_refused_hold_up_no_others() {
    // Four tasks tell the store. Each slept for up to 5 s on an ending that was refused, and others waited.
    let (memory, is_damaged) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let damaged = Arc::clone(&is_damaged);
    let store = Hooked::new(&memory, move |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) if damaged.load(Ordering::SeqCst) => Act::Fail(corrupt()),
        (Verb::Settle, Moment::Before) => Act::Sleep(millis(1)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut refused = Vec::new();
    for _ in 0..12 {
        refused.push(limiter.acquire(ACME, [("rpm", 1)]).await.unwrap());
    }
    let mut other = limiter.acquire(BETA, [("rpm", 10)]).await.unwrap();
    drop(refused);
    tokio::time::sleep(secs(60)).await;
    assert_eq!(limiter.stats().settling, 12);
    assert!(poll_and_drop(other.settle([("rpm", 4)]), 1).await.is_none(), "it is left to the settler");
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
async fn a_store_that_was_closed_is_an_error_for_callers_and_holds_up_no_drain() {
    // It counted as away: what was dropped was told again and again, and a drain waited ten minutes for it.
    let memory = Memory::new();
    let is_closed = Arc::new(AtomicBool::new(false));
    let after = Arc::clone(&is_closed);
    let store = Hooked::new(&memory, move |_, moment| match moment {
        Moment::Before if after.load(Ordering::SeqCst) => Act::Fail(closed()),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let dropped = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
    is_closed.store(true, Ordering::SeqCst);
    for subject in [ACME, BETA] {
        let error = limiter.acquire(subject, [("rpm", 1)]).await.unwrap_err();
        assert!(matches!(error, LimitError::Store(StoreError::Closed { .. })), "{error}");
        assert!(error.is_final(), "{error}");
    }
    drop(dropped);
    tokio::time::timeout(secs(1), limiter.drain()).await.expect("nothing is waited for");
    assert_eq!((limiter.stats().unsettled, limiter.stats().open_leases), (1, 0));
}
