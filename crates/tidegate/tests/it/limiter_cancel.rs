//! Limiter futures dropped at every await point, and leases that end abnormally: nothing leaks.

use std::sync::Arc;

use tidegate::store::wrap::Verb;
use tidegate::{Lease, Limit, LimitEvent, Limiter, Memory, SettleStatus};
use tokio::time::Instant;

use crate::kit::limiter::{
    ACME, Act, EventLog, HookStore, Moment, child, flushed, level, over, poll_and_drop, settled,
};
use crate::kit::{millis, secs, settle_tasks};

const BURST: i64 = 100;
const ORG: (&str, &str) = ("org", "gpt");

/// A limiter on a store that sleeps before and after every call, so that a caller can be dropped at three
/// points of it. Draws of `acme` also charge `org`.
async fn slow() -> (Limiter, Memory) {
    let memory = Memory::new();
    child(&Limiter::new(memory.clone()), "acme", "org").await;
    let store = HookStore::new(&memory, |_, _| Act::Sleep(millis(2)));
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    (over(&store).defaults(limits).build().expect("within the bounds"), memory)
}

/// Checks that all units but the settled ones are available at both levels, and that nothing is in progress.
async fn check_conserved(limiter: &Limiter, memory: &Memory, moment: &str) -> u64 {
    flushed(limiter).await;
    let stats = limiter.stats();
    let under_way = (stats.open_leases, stats.waiting, stats.settling, stats.unsettled);
    assert_eq!(under_way, (0, 0, 0, 0), "{moment}");
    let (units, _) = settled(memory, ACME, "rpm").await;
    for subject in [ACME, ORG] {
        let (available, consumed) = level(memory, subject, "rpm").await.unwrap_or((BURST, 0));
        let used = i64::try_from(units).expect("a small number");
        assert_eq!((available, consumed), (BURST - used, used), "{subject:?}, {moment}");
        assert_eq!(settled(memory, subject, "rpm").await.0, units, "{subject:?}, {moment}");
    }
    units
}

/// Acquires with cached policies.
async fn lease_of(limiter: &Limiter, units: u64) -> Lease {
    limiter.try_acquire(ACME, [("rpm", units)]).await.expect("enough units")
}

#[tokio::test(start_paused = true)]
async fn dropped_acquire_takes_nothing() {
    let mut endings = 0;
    for polls in 0..14 {
        for waits in [false, true] {
            let (limiter, memory) = slow().await;
            let lease = if waits {
                poll_and_drop(limiter.acquire_within(ACME, [("rpm", 10)], secs(60)), polls).await
            } else {
                poll_and_drop(limiter.try_acquire(ACME, [("rpm", 10)]), polls).await
            };
            endings += u32::from(lease.is_some());
            drop(lease);
            assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, 0);
        }
    }
    assert!((2..20).contains(&endings), "some were granted, and some were not: {endings}");
}

#[tokio::test(start_paused = true)]
async fn dropped_waiter_leaves_queue_and_takes_nothing() {
    let mut endings = 0;
    for polls in 0..14 {
        let (limiter, memory) = slow().await;
        let held = lease_of(&limiter, 95).await;
        let (before, behind) = (limiter.clone(), limiter.clone());
        let waiting = tokio::spawn(async move {
            poll_and_drop(before.acquire_within(ACME, [("rpm", 10)], secs(100_000)), polls).await.is_some()
        });
        settle_tasks().await;
        let next =
            tokio::spawn(async move { behind.acquire_within(ACME, [("rpm", 4)], secs(100_000)).await });
        tokio::time::sleep(millis(20)).await;
        drop(held);
        endings += u32::from(waiting.await.unwrap());
        let mut next = next.await.unwrap().unwrap();
        next.settle_full().await.unwrap();
        drop(next);
        assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, 4);
    }
    assert!((1..14).contains(&endings), "{endings}");
}

#[tokio::test(start_paused = true)]
async fn dropped_spend_charges_once_or_not_at_all() {
    let mut sums = Vec::new();
    for polls in 0..14 {
        let (limiter, memory) = slow().await;
        let spent = poll_and_drop(limiter.spend(ACME, [("rpm", 10)]), polls).await;
        let units = check_conserved(&limiter, &memory, &format!("{polls} polls")).await;
        assert!(units == 0 || units == 10, "{polls} polls left {units}");
        assert!(spent.is_none() || units == 10);
        sums.push(units);
    }
    assert!(sums.is_sorted() && sums[0] == 0 && sums[13] == 10, "{sums:?}");
}

#[tokio::test(start_paused = true)]
async fn dropped_extension_leaves_lease_unchanged() {
    for polls in 0..5 {
        for settles in [false, true] {
            let (limiter, memory) = slow().await;
            let mut lease = lease_of(&limiter, 10).await;
            let done = poll_and_drop(lease.extend([("rpm", 20)]), polls).await.is_some();
            let held = if done { 30 } else { 10 };
            assert_eq!(lease.held("rpm"), Some(held));
            // The lease continues as if it had never been extended.
            lease.extend([("rpm", 1)]).await.unwrap();
            if settles {
                lease.settle_full().await.unwrap();
            }
            drop(lease);
            let expected = if settles { held + 1 } else { 0 };
            assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, expected);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_adjustment_still_applies() {
    for polls in 1..5 {
        for (delta, settles) in [(25, true), (-4, true), (25, false), (-4, false)] {
            let (limiter, memory) = slow().await;
            let mut lease = lease_of(&limiter, 10).await;
            poll_and_drop(lease.adjust([("rpm", delta)]), polls).await;
            let held = 10_u64.saturating_add_signed(delta);
            assert_eq!(lease.held("rpm"), Some(held));
            if settles {
                lease.settle_full().await.unwrap();
            }
            drop(lease);
            let expected = if settles { held } else { 0 };
            assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, expected);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_settle_is_completed_by_settler() {
    for polls in 0..5 {
        let (limiter, memory) = slow().await;
        let mut lease = lease_of(&limiter, 10).await;
        poll_and_drop(lease.settle([("rpm", 7)]), polls).await;
        drop(lease);
        // A future that was never polled sent nothing, so the lease is cancelled.
        let expected = if polls == 0 { 0 } else { 7 };
        assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_cancel_is_completed_by_settler() {
    for polls in 0..5 {
        let (limiter, memory) = slow().await;
        let mut lease = lease_of(&limiter, 10).await;
        lease.adjust([("rpm", 5)]).await.unwrap();
        poll_and_drop(lease.cancel(), polls).await;
        drop(lease);
        assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_drain_leaves_limiter_closed_and_can_resume() {
    for polls in 0..4 {
        let (limiter, memory) = slow().await;
        drop(lease_of(&limiter, 10).await);
        poll_and_drop(limiter.drain(), polls).await;
        assert_eq!(limiter.is_closed(), polls > 0);
        limiter.drain().await;
        assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn panicked_or_aborted_task_returns_its_lease() {
    for is_slow in [false, true] {
        let (limiter, memory) = if is_slow {
            slow().await
        } else {
            let memory = Memory::new();
            let admin =
                Limiter::builder(memory.clone()).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
            child(&admin, "acme", "org").await;
            (admin, memory)
        };
        let (panicking, aborted) = (limiter.clone(), limiter.clone());
        let panicking = tokio::spawn(async move {
            let _lease = lease_of(&panicking, 30).await;
            panic!("injected panic");
        });
        let aborted = tokio::spawn(async move {
            let mut lease = lease_of(&aborted, 30).await;
            lease.adjust([("rpm", 50)]).await.expect("never refused");
            std::future::pending::<()>().await;
        });
        assert!(panicking.await.unwrap_err().is_panic());
        tokio::time::sleep(millis(100)).await;
        assert_eq!(level(&memory, ACME, "rpm").await, Some((20, 80)));
        aborted.abort();
        assert!(aborted.await.unwrap_err().is_cancelled());
        assert_eq!(check_conserved(&limiter, &memory, "after both").await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn listener_panic_is_counted_and_others_are_called() {
    let (memory, events) = (Memory::new(), EventLog::default());
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Cancel, Moment::Before) => {
            Act::Fail(tidegate::StoreError::Invalid { what: "read only".into() })
        }
        _ => Act::Pass,
    });
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 100).burst(10)])
        .waiters_max(1)
        .on_event(|event| panic!("injected panic: {event:?}"))
        .on_event(events.listener())
        .build()
        .unwrap();
    // The first event comes from the settler.
    drop(lease_of(&limiter, 1).await);
    flushed(&limiter).await;
    assert_eq!((limiter.stats().panics, limiter.stats().unsettled), (1, 1));
    // The second one comes from a caller.
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire_within(ACME, [("rpm", 10)], secs(100_000)).await }
    });
    settle_tasks().await;
    assert!(limiter.acquire_within(ACME, [("rpm", 1)], secs(1)).await.is_err());
    assert_eq!(limiter.stats().panics, 2);
    assert_eq!(events.count(|event| matches!(event, LimitEvent::QueueFull { .. })), 1);
    waiting.abort();
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn dropped_policy_reader_leaves_others_served() {
    for polls in 0..10 {
        let (limiter, memory) = slow().await;
        let limiter = Arc::new(limiter);
        let start = Instant::now();
        let (one, two) = (Arc::clone(&limiter), Arc::clone(&limiter));
        let leader =
            tokio::spawn(
                async move { poll_and_drop(one.try_acquire(ACME, [("rpm", 1)]), polls).await.is_some() },
            );
        let other = tokio::spawn(async move { two.try_acquire(ACME, [("rpm", 1)]).await.map(drop) });
        leader.await.unwrap();
        other.await.unwrap().unwrap();
        assert!(start.elapsed() <= millis(50), "{polls} polls: {:?}", start.elapsed());
        assert_eq!(check_conserved(&limiter, &memory, &format!("{polls} polls")).await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_settle_can_be_repeated() {
    // Regression: the second settle was a new step for the store, which reported that the lease had ended.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Settle, Moment::After) => Act::Sleep(millis(10)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 40)]).await.unwrap();
    assert!(poll_and_drop(lease.settle([("rpm", 5)]), 1).await.is_none());
    assert_eq!(settled(&memory, ACME, "rpm").await.0, 5, "the store has applied it");
    assert_eq!(lease.settle([("rpm", 5)]).await.unwrap(), SettleStatus::Now);
}

#[tokio::test(start_paused = true)]
async fn lease_used_after_dropped_settle_is_not_stranded() {
    // Regression: the extension succeeded, and the settler's earlier step was then refused and lost.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Settle, Moment::Before) => Act::Sleep(millis(10)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 40)]).await.unwrap();
    assert!(poll_and_drop(lease.settle([("rpm", 5)]), 1).await.is_none());
    let extended = lease.extend([("rpm", 1)]).await;
    drop(lease);
    flushed(&limiter).await;
    assert_eq!(limiter.stats().unsettled, 0, "{extended:?}");
    assert_eq!(level(&memory, ACME, "rpm").await, Some((95, 5)));
}
