//! An unavailable store: what callers get, how long they wait, and what is settled after recovery.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{
    AdjustStatus, Degraded, Limit, LimitError, LimitEvent, Limiter, Memory, OnUnavailable, Scope,
    SettleStatus, Share, StoreError,
};
use tokio::time::Instant;

use crate::kit::limiter::{
    ACME, Act, DEADLINE, EventLog, HookStore, Moment, calm, flushed, level, memory, over, policy, settled,
};
use crate::kit::{millis, secs, settle_tasks};

fn is_unavailable(error: &LimitError) -> bool {
    matches!(error, LimitError::Unavailable { .. })
}

fn lost_reply() -> StoreError {
    StoreError::TimedOut { millis: 50 }
}

/// Fails a given number of calls.
#[derive(Clone, Default)]
struct FaultInjector(Arc<AtomicU32>);

impl FaultInjector {
    fn arm(&self, faults: u32) {
        self.0.store(faults, Ordering::SeqCst);
    }

    fn should_fail(&self) -> bool {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |faults| faults.checked_sub(1)).is_ok()
    }
}

/// A store that executes calls of one verb but loses their replies when a test says so.
fn losing_replies(memory: &Memory, lost_verb: Verb) -> (Arc<HookStore>, FaultInjector) {
    let injector = FaultInjector::default();
    let trigger = injector.clone();
    let store = HookStore::new(memory, move |verb, moment| {
        let is_it = (verb, moment) == (lost_verb, Moment::After);
        if is_it && trigger.should_fail() { Act::Fail(lost_reply()) } else { Act::Pass }
    });
    (store, injector)
}

#[tokio::test(start_paused = true)]
async fn blocking_policy_refuses_with_retry_after() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(is_unavailable(&error) && !error.is_final(), "{error}");
    assert!(error.retry_after() >= Some(DEADLINE));
    assert!(is_unavailable(&limiter.spend(ACME, [("rpm", 1)]).await.unwrap_err()));
    assert!(is_unavailable(&limiter.acquire_within(ACME, [("rpm", 1)], secs(60)).await.unwrap_err()));
    assert!(is_unavailable(&limiter.balances(ACME).await.unwrap_err()));
    store.come_back();
    flushed(&limiter).await;
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((9, 1)));
    assert_eq!((limiter.stats().degraded, limiter.stats().open_leases), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn allowing_policy_grants_a_degraded_lease() {
    let (memory, events) = (Memory::new(), EventLog::default());
    let (store, injector) = losing_replies(&memory, Verb::Draw);
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 10)])
        .on_unavailable(OnUnavailable::Allow)
        .on_event(events.listener())
        .build()
        .unwrap();
    // The engine fails after the write: the units are drawn, but no lease was returned.
    injector.arm(1);
    let mut lease = limiter.try_acquire(ACME, [("rpm", 4)]).await.unwrap();
    assert_eq!((lease.degraded(), lease.held("rpm")), (Some(Degraded::Allowed), Some(4)));
    assert_eq!(
        events.count(|event| matches!(event, LimitEvent::Degraded { lease: id, .. } if *id == lease.id())),
        1
    );
    lease.extend([("rpm", 100)]).await.unwrap();
    assert_eq!(lease.adjust([("rpm", -50)]).await.unwrap(), AdjustStatus::Unrecorded);
    assert_eq!(lease.settle_full().await.unwrap(), SettleStatus::Now);
    drop(lease);
    flushed(&limiter).await;
    // The store's draw was cancelled, and the degraded lease is in no ledger.
    assert_eq!(level(&memory, ACME, "rpm").await, Some((10, 0)));
    assert_eq!(settled(&memory, ACME, "rpm").await, (0, 0));
    assert_eq!((limiter.stats().degraded, limiter.stats().open_leases), (1, 0));
    assert!(limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap().degraded().is_none());
}

#[tokio::test(start_paused = true)]
async fn local_share_scales_amount_and_burst() {
    let store = calm();
    let limiter = over(&store).build().unwrap();
    let quarter = OnUnavailable::LocalShare(Share::new(0.25).unwrap());
    let limits = [Limit::per_minute("rpm", 40).burst(80), Limit::per_day("tpm", 2)];
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, policy(limits).on_unavailable(quarter)).await.unwrap();
    limiter.spend(ACME, [("rpm", 80)]).await.unwrap();
    store.go_away();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 15), ("tpm", 1)]).await.unwrap();
    assert_eq!(lease.degraded(), Some(Degraded::LocalShare));
    let balance = &lease.balances()[0];
    assert_eq!((balance.burst, balance.amount, balance.available), (20, 10, 5));
    assert_eq!(lease.balances()[1].burst, 1, "a share is at least one unit");
    let error = limiter.try_acquire(ACME, [("rpm", 6)]).await.unwrap_err();
    assert_eq!((error.retry_after(), error.limited().unwrap().lines.len()), (Some(secs(6)), 1));
    assert!(limiter.try_acquire(ACME, [("rpm", 21)]).await.is_err(), "more than the burst of the share");
    assert!(lease.extend([("rpm", 6)]).await.is_err());
    lease.extend([("rpm", 5)]).await.unwrap();
    assert_eq!(lease.settle([("rpm", 10)]).await.unwrap(), SettleStatus::Now);
    let spent = limiter.spend(ACME, [("rpm", 10)]).await;
    spent.unwrap();
    // Waiting works as with the store, at the rate of the share.
    let start = Instant::now();
    let waited = limiter.acquire_within(ACME, [("rpm", 5)], secs(60)).await.unwrap();
    assert_eq!((start.elapsed(), waited.degraded()), (secs(30), Some(Degraded::LocalShare)));
    drop(waited);
    drop(limiter.try_acquire(ACME, [("rpm", 5)]).await.unwrap());
    // None of it is charged to the store.
    drop(lease);
    store.come_back();
    flushed(&limiter).await;
    assert_eq!(settled(memory(&store), ACME, "rpm").await, (80, 1));
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 0));
}

/// This holds even if policies must be read first.
#[tokio::test(start_paused = true)]
async fn silent_store_costs_one_deadline_per_acquire() {
    for knows in [false, true] {
        let store = calm();
        let limiter = over(&store)
            .defaults([Limit::per_day("rpm", 10)])
            .on_unavailable(OnUnavailable::Allow)
            .build()
            .unwrap();
        if knows {
            limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
            tokio::time::advance(secs(61)).await;
        }
        store.hang();
        let start = Instant::now();
        let lease = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
        assert_eq!((lease.degraded(), start.elapsed()), (Some(Degraded::Allowed), DEADLINE));
        let start = Instant::now();
        limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
        assert_eq!(start.elapsed(), DEADLINE);
    }
}

#[tokio::test(start_paused = true)]
async fn slow_replies_within_deadline_are_awaited() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |_, moment| match moment {
        Moment::Before => Act::Sleep(millis(40)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let start = Instant::now();
    // Three reads and a draw, each within the deadline: the store is slow but available.
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(start.elapsed(), millis(160));
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(start.elapsed(), millis(200), "policies are cached by now");
}

#[tokio::test(start_paused = true)]
async fn admin_calls_have_longer_deadlines_than_draws() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |_, moment| match moment {
        Moment::Before => Act::Sleep(secs(3)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let start = Instant::now();
    let policy = policy([Limit::per_day("rpm", 5)]);
    for change in 1..=6 {
        limiter.admin("ops").set_policy(Scope::System, policy.clone()).await.unwrap();
        // The change reads the policy and then writes it.
        assert_eq!(start.elapsed(), secs(6 * change));
    }
    assert_eq!(limiter.admin("ops").policies().await.unwrap().len(), 1);
    assert_eq!(limiter.stats().store_away, None);
    let start = Instant::now();
    assert!(is_unavailable(&limiter.balances(ACME).await.unwrap_err()));
    assert_eq!(start.elapsed(), DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn breaker_opens_after_three_slow_round_trips() {
    let (store, events) = (calm(), EventLog::default());
    let limiter =
        over(&store).defaults([Limit::per_day("rpm", 10)]).on_event(events.listener()).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.hang();
    let is_gone = |event: &LimitEvent| matches!(event, LimitEvent::StoreAway { span } if *span == secs(1));
    let mut lengths = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        // Spends leave only cancels to the settler. These fail as well, at the settler's own pace.
        assert!(is_unavailable(&limiter.balances(ACME).await.unwrap_err()));
        lengths.push(start.elapsed());
    }
    assert_eq!(lengths[..3], [DEADLINE; 3]);
    assert_eq!(lengths[3..], [Duration::ZERO; 3]);
    assert_eq!(events.count(is_gone), 1);
    let error = limiter.balances(ACME).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(secs(1)));
    // Half-open: one caller probes, and the others are refused at once.
    tokio::time::advance(secs(1)).await;
    let start = Instant::now();
    let probe = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.balances(ACME).await }
    });
    settle_tasks().await;
    assert!(is_unavailable(&limiter.balances(ACME).await.unwrap_err()));
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(is_unavailable(&probe.await.unwrap().unwrap_err()));
    assert_eq!(start.elapsed(), DEADLINE);
    // The probe fails and the breaker reopens. Then the store recovers, and all callers are served.
    store.come_back();
    assert!(is_unavailable(&limiter.balances(ACME).await.unwrap_err()));
    tokio::time::advance(secs(10)).await;
    limiter.balances(ACME).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(events.count(|event| matches!(event, LimitEvent::StoreBack)), 1);
}

#[tokio::test(start_paused = true)]
async fn cached_policies_are_used_during_an_outage() {
    let store = calm();
    let limiter = over(&store).build().unwrap();
    let allowing = policy([Limit::per_day("rpm", 10)]).on_unavailable(OnUnavailable::Allow);
    limiter.admin("ops").set_policy(Scope::System, allowing).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    tokio::time::advance(secs(3_600)).await;
    for number in 1..=8 {
        let lease = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
        assert_eq!(lease.degraded(), Some(Degraded::Allowed));
        assert_eq!(limiter.stats().cache.stale, number);
    }
    let error = limiter.try_acquire(ACME, [("typo", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Cost(_)), "the cached policy decides: {error}");
    store.come_back();
    tokio::time::advance(secs(60)).await;
    assert!(limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap().degraded().is_none());
}

#[tokio::test(start_paused = true)]
async fn failed_policy_change_keeps_cached_policies() {
    // Regression: a policy write that failed during an outage cleared the cache, so callers that a cached
    // policy allowed were blocked from then on.
    let store = calm();
    let limiter = over(&store).build().unwrap();
    let allowing = policy([Limit::per_day("rpm", 10)]).on_unavailable(OnUnavailable::Allow);
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, allowing.clone()).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    assert!(is_unavailable(&admin.set_policy(Scope::System, allowing).await.unwrap_err()));
    let lease = limiter.try_acquire(ACME, [("rpm", 1)]).await;
    assert_eq!(lease.unwrap().degraded(), Some(Degraded::Allowed));
}

#[tokio::test(start_paused = true)]
async fn uncached_subjects_follow_limiter_defaults() {
    let store = calm();
    store.go_away();
    let blocking = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    assert!(is_unavailable(&blocking.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err()));
    let allow = OnUnavailable::Allow;
    let without_limits = over(&store).on_unavailable(allow).build().unwrap();
    assert!(is_unavailable(&without_limits.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err()));
    let allowing = over(&store).defaults([Limit::per_day("rpm", 10)]).on_unavailable(allow).build().unwrap();
    let lease = allowing.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(lease.degraded(), Some(Degraded::Allowed));
    let half = OnUnavailable::LocalShare(Share::new(0.5).unwrap());
    let sharing = over(&store).defaults([Limit::per_day("rpm", 10)]).on_unavailable(half).build().unwrap();
    sharing.spend(ACME, [("rpm", 5)]).await.unwrap();
    assert!(matches!(sharing.spend(ACME, [("rpm", 1)]).await.unwrap_err(), LimitError::Limited(_)));
}

#[tokio::test(start_paused = true)]
async fn denied_and_corrupt_do_not_count_as_unavailable() {
    let errors: [fn() -> StoreError; 2] = [
        || StoreError::Denied { what: "no password".into() },
        || StoreError::Corrupt { what: "half a row".into() },
    ];
    for error in errors {
        for failing in [Verb::Version, Verb::Draw, Verb::Spend] {
            let (memory, events) = (Memory::new(), EventLog::default());
            let store = HookStore::new(&memory, move |verb, moment| {
                if (verb, moment) == (failing, Moment::Before) { Act::Fail(error()) } else { Act::Pass }
            });
            let limiter = over(&store)
                .defaults([Limit::per_day("rpm", 10)])
                .on_unavailable(OnUnavailable::Allow)
                .on_event(events.listener())
                .build()
                .unwrap();
            for _ in 0..10 {
                let result = match failing {
                    Verb::Spend => limiter.spend(ACME, [("rpm", 1)]).await,
                    _ => limiter.try_acquire(ACME, [("rpm", 1)]).await.map(drop),
                };
                let refused = result.unwrap_err();
                assert!(matches!(refused, LimitError::Store(_)) && refused.is_final(), "{refused}");
                assert_eq!(refused.to_string(), error().to_string());
            }
            assert_eq!(events.count(|_| true), 0, "neither degraded nor unavailable");
            let stats = limiter.stats();
            assert_eq!((stats.degraded, stats.granted, stats.settling, stats.unsettled), (0, 0, 0, 0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn draw_with_lost_reply_is_cancelled() {
    let memory = Memory::new();
    let (store, injector) = losing_replies(&memory, Verb::Draw);
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    injector.arm(1);
    let error = limiter.try_acquire(ACME, [("rpm", 7)]).await.unwrap_err();
    assert!(is_unavailable(&error), "{error}");
    assert_eq!(level(&memory, ACME, "rpm").await, Some((3, 7)), "the store had drawn");
    assert_eq!(limiter.stats().settling, 1);
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((10, 0)));
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn draw_arriving_after_its_cancel_is_refused() {
    // The draw takes longer than the deadline, and the cancel overtakes it.
    let (memory, is_slow) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let slow = Arc::clone(&is_slow);
    let store = HookStore::new(&memory, move |verb, moment| {
        let waits = (verb, moment) == (Verb::Draw, Moment::Before) && slow.swap(false, Ordering::SeqCst);
        if waits { Act::Sleep(millis(60)) } else { Act::Pass }
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    assert!(is_unavailable(&limiter.try_acquire(ACME, [("rpm", 7)]).await.unwrap_err()));
    flushed(&limiter).await;
    tokio::time::advance(secs(1)).await;
    assert_eq!(level(&memory, ACME, "rpm").await.map_or(0, |(_, consumed)| consumed), 0);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn settle_during_outage_completes_after_recovery() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut leases = Vec::new();
    for _ in 0..3 {
        leases.push(limiter.try_acquire(ACME, [("rpm", 20)]).await.unwrap());
    }
    store.go_away();
    assert_eq!(leases[0].settle([("rpm", 5)]).await.unwrap(), SettleStatus::Later);
    assert_eq!(leases[0].settle([("rpm", 5)]).await.unwrap(), SettleStatus::Later, "as the first time");
    assert_eq!(leases[1].cancel().await.unwrap(), SettleStatus::Later);
    drop(leases.pop());
    assert_eq!(limiter.stats().settling, 3);
    tokio::time::sleep(secs(30)).await;
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((40, 60)));
    store.come_back();
    flushed(&limiter).await;
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((95, 5)));
    assert_eq!(settled(memory(&store), ACME, "rpm").await, (5, 1));
    assert_eq!(limiter.stats().unsettled, 0);
}

#[tokio::test(start_paused = true)]
async fn lost_adjustment_is_sent_with_the_settle() {
    let store = calm();
    let limiter =
        over(&store).defaults([Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 20)]).await.unwrap();
    assert_eq!(lease.adjust([("rpm", 1)]).await.unwrap(), AdjustStatus::Now);
    store.go_away();
    assert_eq!(lease.adjust([("rpm", 14), ("tpm", 3)]).await.unwrap(), AdjustStatus::WithSettle);
    assert_eq!(lease.adjust([("rpm", -5)]).await.unwrap(), AdjustStatus::WithSettle);
    assert_eq!((lease.held("rpm"), lease.held("tpm")), (Some(30), Some(3)));
    store.come_back();
    tokio::time::advance(secs(2)).await;
    assert_eq!(lease.settle_full().await.unwrap(), SettleStatus::Now);
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((70, 30)));
    assert_eq!(settled(memory(&store), ACME, "tpm").await, (3, 1));
}

#[tokio::test(start_paused = true)]
async fn extension_during_outage_keeps_lease_unchanged() {
    let memory = Memory::new();
    let (store, injector) = losing_replies(&memory, Verb::Extend);
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 20)]).await.unwrap();
    injector.arm(1);
    let error = lease.extend([("rpm", 30)]).await.unwrap_err();
    assert!(is_unavailable(&error), "{error}");
    assert_eq!((lease.held("rpm"), level(&memory, ACME, "rpm").await), (Some(20), Some((50, 50))));
    lease.extend([("rpm", 1)]).await.unwrap();
    // Units whose reply was lost return with the settle.
    lease.settle_full().await.unwrap();
    assert_eq!(level(&memory, ACME, "rpm").await, Some((79, 21)));
    assert_eq!(settled(&memory, ACME, "rpm").await, (21, 1));
}

#[tokio::test(start_paused = true)]
async fn denied_settle_can_be_retried() {
    // Regression: it counted as done, so the second settle succeeded without reaching the store.
    let (memory, injector) = (Memory::new(), FaultInjector::default());
    let trigger = injector.clone();
    let store = HookStore::new(&memory, move |verb, moment| {
        let is_it = (verb, moment) == (Verb::Settle, Moment::Before);
        if is_it && trigger.should_fail() {
            Act::Fail(StoreError::Denied { what: "read only".into() })
        } else {
            Act::Pass
        }
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 40)]).await.unwrap();
    injector.arm(1);
    assert!(matches!(lease.settle([("rpm", 5)]).await, Err(LimitError::Store(StoreError::Denied { .. }))));
    assert_eq!(lease.settle([("rpm", 5)]).await.unwrap(), SettleStatus::Now);
    drop(lease);
    assert_eq!(settled(&memory, ACME, "rpm").await, (5, 1));
    // A settle that is not retried is repeated when the lease is dropped, because the work was done.
    let mut lease = limiter.try_acquire(ACME, [("rpm", 40)]).await.unwrap();
    injector.arm(1);
    assert!(lease.settle([("rpm", 5)]).await.is_err());
    drop(lease);
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((90, 10)));
}

#[tokio::test(start_paused = true)]
async fn listener_may_call_its_limiter() {
    let (store, events) = (calm(), EventLog::default());
    let (itself, listener) = (Arc::new(OnceLock::<Limiter>::new()), events.listener());
    let own = Arc::clone(&itself);
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 100)])
        .on_unavailable(OnUnavailable::Allow)
        .settler_max(1)
        .on_event(move |event| {
            listener(event);
            let limiter: &Limiter = own.get().expect("set before the first event");
            assert!(limiter.stats().granted > 0);
            if matches!(event, LimitEvent::StoreBack) {
                limiter.invalidate();
            }
            // Polled once and not awaited: it would deadlock if a lock were held.
            let mut asking = pin!(limiter.balances(ACME));
            drop(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())));
        })
        .build()
        .unwrap();
    itself.set(limiter.clone()).expect("only once");
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    for _ in 0..10 {
        drop(limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap());
        tokio::time::sleep(DEADLINE).await;
    }
    store.come_back();
    tokio::time::sleep(secs(10)).await;
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    for is_it in [
        |event: &LimitEvent| matches!(event, LimitEvent::Degraded { .. }),
        |event: &LimitEvent| matches!(event, LimitEvent::StoreAway { .. }),
        |event: &LimitEvent| matches!(event, LimitEvent::StoreBack),
        |event: &LimitEvent| matches!(event, LimitEvent::Unsettled { .. }),
    ] {
        assert!(events.count(is_it) > 0);
    }
    assert_eq!(limiter.stats().panics, 0);
}

#[tokio::test(start_paused = true)]
async fn remote_lease_reports_last_known_balances() {
    let store = calm();
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    let limiter = over(&store).defaults(limits).build().unwrap();
    let balances_of = |lease: &tidegate::Lease| -> Vec<(String, i64)> {
        lease.balances().iter().map(|balance| (balance.limit.to_string(), balance.available)).collect()
    };
    let mut lease = limiter.try_acquire(ACME, [("rpm", 10)]).await.unwrap();
    assert_eq!(balances_of(&lease), [("rpm".to_owned(), 90)]);
    limiter.spend(ACME, [("rpm", 5)]).await.unwrap();
    assert_eq!(balances_of(&lease), [("rpm".to_owned(), 90)], "draws of others are not visible");
    lease.extend([("rpm", 1), ("tpm", 30)]).await.unwrap();
    assert_eq!(balances_of(&lease), [("rpm".to_owned(), 84), ("tpm".to_owned(), 70)]);
    lease.adjust([("tpm", -10)]).await.unwrap();
    assert_eq!(balances_of(&lease)[1], ("tpm".to_owned(), 80));
}
