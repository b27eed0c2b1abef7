//! A joined throttle with a slow or unavailable store: how long slots are held, and which callers are
//! admitted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{
    Cost, Degraded, JoinedError, Limit, LimitError, Limiter, Memory, OnUnavailable, Outcome, Share, Slots,
    StoreError, Throttle,
};
use tokio::time::Instant;

use crate::kit::limiter::{ACME, Act, DEADLINE, HookStore, Moment, calm, flushed, level, memory, over};
use crate::kit::{millis, secs, settle_tasks};

fn slots(slots: u32) -> Throttle {
    Throttle::builder().slots(Slots::fixed(slots)).build().expect("within the bounds")
}

#[tokio::test(start_paused = true)]
async fn silent_store_holds_slot_until_its_deadline() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Hang,
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter);
    let start = Instant::now();
    let error = joined.acquire(ACME, Cost::request()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Unavailable { .. })), "{error}");
    assert!(error.retry_after().is_some() && !error.is_final());
    assert_eq!(start.elapsed(), DEADLINE);
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().admitted), (0, 0));
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((10, 0)), "a draw whose reply was lost is cancelled");
}

#[tokio::test(start_paused = true)]
async fn policies_are_read_before_local_charge() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, _| match verb {
        Verb::Draw => Act::Pass,
        _ => Act::Sleep(millis(20)),
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter);
    let asking = tokio::spawn(async move { joined.acquire(ACME, Cost::request()).await.map(drop) });
    settle_tasks().await;
    tokio::time::sleep(millis(30)).await;
    assert!(!asking.is_finished());
    assert_eq!(throttle.snapshot().in_flight, 0, "no slot is held while policies are read");
    asking.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn unavailable_store_follows_policy() {
    let share = OnUnavailable::LocalShare(Share::new(0.2).unwrap());
    let table = [
        (OnUnavailable::Block, 0, None),
        (OnUnavailable::Allow, 5, Some(Degraded::Allowed)),
        (share, 2, Some(Degraded::LocalShare)),
    ];
    for (behaviour, granted, degraded) in table {
        for is_known in [false, true] {
            let store = calm();
            let limits = [Limit::per_day("rpm", 10)];
            let limiter = over(&store).defaults(limits).on_unavailable(behaviour).build().unwrap();
            let throttle = slots(8);
            let joined = throttle.limited_by(&limiter);
            if is_known {
                joined
                    .acquire(ACME, Cost::request())
                    .await
                    .unwrap()
                    .settle(Outcome::success())
                    .await
                    .unwrap();
            }
            store.go_away();
            let mut permits = Vec::new();
            for _ in 0..5 {
                match joined.acquire_within(ACME, Cost::request(), secs(1)).await {
                    Ok(permit) => permits.push(permit),
                    Err(JoinedError::Limit(LimitError::Unavailable { .. })) => {
                        assert_eq!(behaviour, OnUnavailable::Block);
                    }
                    Err(JoinedError::Limit(LimitError::Limited(_) | LimitError::Waiting { .. })) => {
                        assert_eq!(behaviour, share);
                    }
                    Err(error) => panic!("{behaviour:?}: {error}"),
                }
            }
            assert_eq!(permits.len(), granted, "{behaviour:?}");
            assert_eq!(throttle.snapshot().in_flight as usize, granted, "{behaviour:?}");
            for permit in permits {
                assert_eq!(permit.degraded(), degraded);
                permit.settle(Outcome::success()).await.unwrap();
            }
            assert_eq!((throttle.snapshot().in_flight, limiter.stats().open_leases), (0, 0));
            store.come_back();
            tokio::time::sleep(secs(20)).await;
            flushed(&limiter).await;
            let consumed = level(memory(&store), ACME, "rpm").await.map_or(0, |(_, consumed)| consumed);
            assert_eq!(consumed, i64::from(is_known), "degraded leases are not charged to the store");
            let permit = joined.acquire(ACME, Cost::request()).await.unwrap();
            assert_eq!(permit.degraded(), None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn outage_refuses_queued_callers_in_order() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_second("rpm", 1)]).build().unwrap();
    let joined = slots(4).limited_by(&limiter);
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let joined = joined.clone();
            tokio::spawn(async move { joined.acquire(ACME, Cost::request()).await.map(drop) })
        })
        .collect();
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 4);
    store.go_away();
    let start = Instant::now();
    for task in tasks {
        let error = task.await.unwrap().unwrap_err();
        assert!(matches!(error, JoinedError::Limit(LimitError::Unavailable { .. })), "{error}");
    }
    assert!(start.elapsed() < secs(2), "{:?}", start.elapsed());
    assert_eq!((limiter.stats().waiting, joined.throttle().snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn store_error_reaches_caller_without_charge() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Fail(StoreError::Corrupt { what: "a bucket".into() }),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let throttle = slots(1);
    let error = throttle.limited_by(&limiter).acquire(ACME, Cost::request()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Store(_))) && error.is_final(), "{error}");
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().admitted), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn settle_is_delivered_after_outage() {
    let store = calm();
    let limiter: Limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter);
    let permit = joined.acquire(ACME, Cost::request()).await.unwrap();
    store.go_away();
    permit.settle(Outcome::success()).await.unwrap();
    assert_eq!(throttle.snapshot().in_flight, 0, "the slot does not wait for the store");
    store.come_back();
    tokio::time::sleep(Duration::from_secs(20)).await;
    flushed(&limiter).await;
    assert_eq!(crate::kit::limiter::settled(memory(&store), ACME, "rpm").await, (1, 1));
}

#[tokio::test(start_paused = true)]
async fn refused_settle_keeps_units_charged() {
    // Regression: the store refused the settle with a permanent error. The lease reopened and was then
    // cancelled with its permit, so all units returned and the ledger missed a request that had been sent.
    let spent = Outcome::success().spent(Cost::request().tokens(40));
    let table = [(Outcome::success(), None, 100), (spent, None, 40), (Outcome::failure(), Some(30), 30)];
    for (outcome, reported, used) in table {
        let (memory, is_denied) = (Memory::new(), Arc::new(AtomicBool::new(true)));
        let denied = Arc::clone(&is_denied);
        let store = HookStore::new(&memory, move |verb, moment| match (verb, moment) {
            (Verb::Settle, Moment::Before) if denied.load(Ordering::SeqCst) => {
                Act::Fail(StoreError::Denied { what: "for a moment".to_owned() })
            }
            _ => Act::Pass,
        });
        let limits = [Limit::per_day("rpm", 10), Limit::per_day("tpm", 1_000)];
        let limiter = over(&store).defaults(limits).build().unwrap();
        let joined = slots(1).limited_by(&limiter);
        let mut permit = joined.acquire(ACME, Cost::request().tokens(100)).await.unwrap();
        if let Some(tokens) = reported {
            permit.spend(tokens);
        }
        let error = permit.settle(outcome).await.unwrap_err();
        assert!(matches!(error, LimitError::Store(StoreError::Denied { .. })), "{error}");
        assert_eq!(joined.throttle().snapshot().in_flight, 0, "the slot has been released");
        tokio::time::sleep(secs(5)).await;
        is_denied.store(false, Ordering::SeqCst);
        flushed(&limiter).await;
        assert_eq!(level(&memory, ACME, "rpm").await, Some((9, 1)));
        assert_eq!(crate::kit::limiter::settled(&memory, ACME, "tpm").await, (used, 1));
        let stats = limiter.stats();
        assert_eq!((stats.open_leases, stats.unsettled), (0, 0));
    }
}
