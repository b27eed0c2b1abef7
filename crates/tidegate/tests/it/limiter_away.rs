//! When the store is away: what callers get, how long it takes, and what is made good when it is back.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{
    Adjusted, Degraded, Limit, LimitError, LimitEvent, Limiter, Memory, OnUnavailable, Scope, Settled, Share,
    StoreError,
};
use tokio::time::Instant;

use crate::kit::limiter::{
    ACME, Act, DEADLINE, Heard, Hooked, Moment, calm, flushed, level, memory, over, policy, settled,
};
use crate::kit::{millis, secs, settle_tasks};

fn is_away(error: &LimitError) -> bool {
    matches!(error, LimitError::Unavailable { .. })
}

fn lost() -> StoreError {
    StoreError::TimedOut { millis: 50 }
}

/// Answers with an error, once for each time it was loaded, to calls of one verb at one moment.
#[derive(Clone, Default)]
struct Gun(Arc<AtomicU32>);

impl Gun {
    fn load(&self, shots: u32) {
        self.0.store(shots, Ordering::SeqCst);
    }

    fn fires(&self) -> bool {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |shots| shots.checked_sub(1)).is_ok()
    }
}

/// A store that loses the answers to one verb when it is told to: the call was made.
fn losing(memory: &Memory, lost_verb: Verb) -> (Arc<Hooked>, Gun) {
    let gun = Gun::default();
    let trigger = gun.clone();
    let store = Hooked::new(memory, move |verb, moment| {
        let is_it = (verb, moment) == (lost_verb, Moment::After);
        if is_it && trigger.fires() { Act::Fail(lost()) } else { Act::Pass }
    });
    (store, gun)
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_blocks_lets_nobody_in_and_says_when_to_try_again() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    let error = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(is_away(&error) && !error.is_final(), "{error}");
    assert!(error.retry_after() >= Some(DEADLINE));
    assert!(is_away(&limiter.spend(ACME, [("rpm", 1)]).await.unwrap_err()));
    assert!(is_away(&limiter.acquire_within(ACME, [("rpm", 1)], secs(60)).await.unwrap_err()));
    assert!(is_away(&limiter.balances(ACME).await.unwrap_err()));
    store.come_back();
    flushed(&limiter).await;
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((9, 1)));
    assert_eq!((limiter.stats().degraded, limiter.stats().open_leases), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn allowing_policy_grants_a_degraded_lease() {
    let (memory, heard) = (Memory::new(), Heard::default());
    let (store, gun) = losing(&memory, Verb::Draw);
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 10)])
        .on_unavailable(OnUnavailable::Allow)
        .on_event(heard.ear())
        .build()
        .unwrap();
    // The engine fails during the write: it had drawn, and nobody was told.
    gun.load(1);
    let mut lease = limiter.acquire(ACME, [("rpm", 4)]).await.unwrap();
    assert_eq!((lease.degraded(), lease.held("rpm")), (Some(Degraded::Allowed), Some(4)));
    assert_eq!(
        heard.count(|event| matches!(event, LimitEvent::Degraded { lease: id, .. } if *id == lease.id())),
        1
    );
    lease.extend([("rpm", 100)]).await.unwrap();
    lease.adjust([("rpm", -50)]).await.unwrap();
    assert_eq!(lease.settle_as_held().await.unwrap(), Settled::Now);
    drop(lease);
    flushed(&limiter).await;
    // What the store had drawn has returned, and what nobody drew is in no ledger.
    assert_eq!(level(&memory, ACME, "rpm").await, Some((10, 0)));
    assert_eq!(settled(&memory, ACME, "rpm").await, (0, 0));
    assert_eq!((limiter.stats().degraded, limiter.stats().open_leases), (1, 0));
    assert!(limiter.acquire(ACME, [("rpm", 1)]).await.unwrap().degraded().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_local_share_is_a_share_of_amount_and_burst_and_its_limits_hold() {
    let store = calm();
    let limiter = over(&store).build().unwrap();
    let quarter = OnUnavailable::LocalShare(Share::new(0.25).unwrap());
    let limits = [Limit::per_minute("rpm", 40).burst(80), Limit::per_day("tpm", 2)];
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, policy(limits).on_unavailable(quarter)).await.unwrap();
    limiter.spend(ACME, [("rpm", 80)]).await.unwrap();
    store.go_away();
    let mut lease = limiter.acquire(ACME, [("rpm", 15), ("tpm", 1)]).await.unwrap();
    assert_eq!(lease.degraded(), Some(Degraded::LocalShare));
    let balance = &lease.balances()[0];
    assert_eq!((balance.burst, balance.amount, balance.available), (20, 10, 5));
    assert_eq!(lease.balances()[1].burst, 1, "a share is never nothing");
    let error = limiter.acquire(ACME, [("rpm", 6)]).await.unwrap_err();
    assert_eq!((error.retry_after(), error.limited().unwrap().lines.len()), (Some(secs(6)), 1));
    assert!(limiter.acquire(ACME, [("rpm", 21)]).await.is_err(), "more than the share ever holds");
    assert!(lease.extend([("rpm", 6)]).await.is_err());
    lease.extend([("rpm", 5)]).await.unwrap();
    assert_eq!(lease.settle([("rpm", 10)]).await.unwrap(), Settled::Now);
    let spent = limiter.spend(ACME, [("rpm", 10)]).await;
    spent.unwrap();
    // Waiting works as it does with the store, and by the share's own rate.
    let start = Instant::now();
    let waited = limiter.acquire_within(ACME, [("rpm", 5)], secs(60)).await.unwrap();
    assert_eq!((start.elapsed(), waited.degraded()), (secs(30), Some(Degraded::LocalShare)));
    drop(waited);
    drop(limiter.acquire(ACME, [("rpm", 5)]).await.unwrap());
    // Nothing of it reaches the store.
    drop(lease);
    store.come_back();
    flushed(&limiter).await;
    assert_eq!(settled(memory(&store), ACME, "rpm").await, (80, 1));
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_costs_one_deadline_even_when_policies_must_be_read_first() {
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
        let lease = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
        assert_eq!((lease.degraded(), start.elapsed()), (Some(Degraded::Allowed), DEADLINE));
        let start = Instant::now();
        limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
        assert_eq!(start.elapsed(), DEADLINE);
    }
}

#[tokio::test(start_paused = true)]
async fn each_answer_may_take_its_deadline_and_slow_ones_are_waited_for() {
    let memory = Memory::new();
    let store = Hooked::new(&memory, |_, moment| match moment {
        Moment::Before => Act::Sleep(millis(40)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let start = Instant::now();
    // Three reads and a draw, each of them in time: such a store is slow, and not away.
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(start.elapsed(), millis(160));
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(start.elapsed(), millis(200), "what limits is known by now");
}

#[tokio::test(start_paused = true)]
async fn a_change_or_a_report_may_take_longer_than_a_decision_and_opens_no_breaker() {
    let memory = Memory::new();
    let store = Hooked::new(&memory, |_, moment| match moment {
        Moment::Before => Act::Sleep(secs(3)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let start = Instant::now();
    let policy = policy([Limit::per_day("rpm", 5)]);
    for change in 1..=6 {
        limiter.admin("ops").set_policy(Scope::System, policy.clone()).await.unwrap();
        // What is there is read, and the change is written.
        assert_eq!(start.elapsed(), secs(6 * change));
    }
    assert_eq!(limiter.admin("ops").policies().await.unwrap().len(), 1);
    assert_eq!(limiter.stats().store_away, None);
    let start = Instant::now();
    assert!(is_away(&limiter.balances(ACME).await.unwrap_err()));
    assert_eq!(start.elapsed(), DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn breaker_opens_after_three_slow_round_trips() {
    let (store, heard) = (calm(), Heard::default());
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).on_event(heard.ear()).build().unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.hang();
    let is_gone = |event: &LimitEvent| matches!(event, LimitEvent::StoreAway { span } if *span == secs(1));
    let mut lengths = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        // Spends leave the settler nothing but cancels, which fail too: it is told apart by its own pace.
        assert!(is_away(&limiter.balances(ACME).await.unwrap_err()));
        lengths.push(start.elapsed());
    }
    assert_eq!(lengths[..3], [DEADLINE; 3]);
    assert_eq!(lengths[3..], [Duration::ZERO; 3]);
    assert_eq!(heard.count(is_gone), 1);
    let error = limiter.balances(ACME).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(secs(1)));
    // Half-open: one asks, and the others are answered at once.
    tokio::time::advance(secs(1)).await;
    let start = Instant::now();
    let probe = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.balances(ACME).await }
    });
    settle_tasks().await;
    assert!(is_away(&limiter.balances(ACME).await.unwrap_err()));
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(is_away(&probe.await.unwrap().unwrap_err()));
    assert_eq!(start.elapsed(), DEADLINE);
    // It failed: left alone again. Then the store is back, and so is everybody.
    store.come_back();
    assert!(is_away(&limiter.balances(ACME).await.unwrap_err()));
    tokio::time::advance(secs(10)).await;
    limiter.balances(ACME).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(heard.count(|event| matches!(event, LimitEvent::StoreBack)), 1);
}

#[tokio::test(start_paused = true)]
async fn what_was_last_known_is_used_when_the_store_is_away() {
    let store = calm();
    let limiter = over(&store).build().unwrap();
    let allowing = policy([Limit::per_day("rpm", 10)]).on_unavailable(OnUnavailable::Allow);
    limiter.admin("ops").set_policy(Scope::System, allowing).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    tokio::time::advance(secs(3_600)).await;
    for number in 1..=8 {
        let lease = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
        assert_eq!(lease.degraded(), Some(Degraded::Allowed));
        assert_eq!(limiter.stats().cache.stale, number);
    }
    let error = limiter.acquire(ACME, [("typo", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Cost(_)), "what is known is known: {error}");
    store.come_back();
    tokio::time::advance(secs(60)).await;
    assert!(limiter.acquire(ACME, [("rpm", 1)]).await.unwrap().degraded().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_change_that_fails_because_the_store_is_away_does_not_make_it_forget() {
    // An operator tried to write a policy during an outage; all that was known was forgotten with it, and whoever
    // had been let in by a policy that allows was blocked from then on.
    let store = calm();
    let limiter = over(&store).build().unwrap();
    let allowing = policy([Limit::per_day("rpm", 10)]).on_unavailable(OnUnavailable::Allow);
    let admin = limiter.admin("ops");
    admin.set_policy(Scope::System, allowing.clone()).await.unwrap();
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    assert!(is_away(&admin.set_policy(Scope::System, allowing).await.unwrap_err()));
    let lease = limiter.acquire(ACME, [("rpm", 1)]).await;
    assert_eq!(lease.unwrap().degraded(), Some(Degraded::Allowed));
}

#[tokio::test(start_paused = true)]
async fn who_was_never_seen_is_treated_by_the_limiters_own_defaults() {
    let store = calm();
    store.go_away();
    let blocking = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    assert!(is_away(&blocking.acquire(ACME, [("rpm", 1)]).await.unwrap_err()));
    let allow = OnUnavailable::Allow;
    let without_limits = over(&store).on_unavailable(allow).build().unwrap();
    assert!(is_away(&without_limits.acquire(ACME, [("rpm", 1)]).await.unwrap_err()));
    let allowing = over(&store).defaults([Limit::per_day("rpm", 10)]).on_unavailable(allow).build().unwrap();
    let lease = allowing.acquire(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(lease.degraded(), Some(Degraded::Allowed));
    let half = OnUnavailable::LocalShare(Share::new(0.5).unwrap());
    let sharing = over(&store).defaults([Limit::per_day("rpm", 10)]).on_unavailable(half).build().unwrap();
    sharing.spend(ACME, [("rpm", 5)]).await.unwrap();
    assert!(matches!(sharing.spend(ACME, [("rpm", 1)]).await.unwrap_err(), LimitError::Limited(_)));
}

#[tokio::test(start_paused = true)]
async fn denied_and_corrupt_are_errors_and_never_away() {
    let errors: [fn() -> StoreError; 2] = [
        || StoreError::Denied { what: "no password".into() },
        || StoreError::Corrupt { what: "half a row".into() },
    ];
    for error in errors {
        for failing in [Verb::Version, Verb::Draw, Verb::Spend] {
            let (memory, heard) = (Memory::new(), Heard::default());
            let store = Hooked::new(&memory, move |verb, moment| {
                if (verb, moment) == (failing, Moment::Before) { Act::Fail(error()) } else { Act::Pass }
            });
            let limiter = over(&store)
                .defaults([Limit::per_day("rpm", 10)])
                .on_unavailable(OnUnavailable::Allow)
                .on_event(heard.ear())
                .build()
                .unwrap();
            for _ in 0..10 {
                let answer = match failing {
                    Verb::Spend => limiter.spend(ACME, [("rpm", 1)]).await,
                    _ => limiter.acquire(ACME, [("rpm", 1)]).await.map(drop),
                };
                let refused = answer.unwrap_err();
                assert!(matches!(refused, LimitError::Store(_)) && refused.is_final(), "{refused}");
                assert_eq!(refused.to_string(), error().to_string());
            }
            assert_eq!(heard.count(|_| true), 0, "neither degraded nor away");
            let stats = limiter.stats();
            assert_eq!((stats.degraded, stats.granted, stats.settling, stats.unsettled), (0, 0, 0, 0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_draw_whose_answer_was_lost_is_cancelled_and_its_units_return() {
    let memory = Memory::new();
    let (store, gun) = losing(&memory, Verb::Draw);
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    gun.load(1);
    let error = limiter.acquire(ACME, [("rpm", 7)]).await.unwrap_err();
    assert!(is_away(&error), "{error}");
    assert_eq!(level(&memory, ACME, "rpm").await, Some((3, 7)), "the store had drawn");
    assert_eq!(limiter.stats().settling, 1);
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((10, 0)));
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_draw_that_arrives_after_its_cancel_is_refused() {
    // The draw takes longer than the deadline, and the cancel overtakes it.
    let (memory, is_slow) = (Memory::new(), Arc::new(AtomicBool::new(true)));
    let slow = Arc::clone(&is_slow);
    let store = Hooked::new(&memory, move |verb, moment| {
        let waits = (verb, moment) == (Verb::Draw, Moment::Before) && slow.swap(false, Ordering::SeqCst);
        if waits { Act::Sleep(millis(60)) } else { Act::Pass }
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    assert!(is_away(&limiter.acquire(ACME, [("rpm", 7)]).await.unwrap_err()));
    flushed(&limiter).await;
    tokio::time::advance(secs(1)).await;
    assert_eq!(level(&memory, ACME, "rpm").await.map_or(0, |(_, consumed)| consumed), 0);
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn settling_while_the_store_is_away_is_done_when_it_is_back() {
    let store = calm();
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut leases = Vec::new();
    for _ in 0..3 {
        leases.push(limiter.acquire(ACME, [("rpm", 20)]).await.unwrap());
    }
    store.go_away();
    assert_eq!(leases[0].settle([("rpm", 5)]).await.unwrap(), Settled::Later);
    assert_eq!(leases[0].settle([("rpm", 5)]).await.unwrap(), Settled::Later, "as the first time");
    assert_eq!(leases[1].cancel().await.unwrap(), Settled::Later);
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
async fn an_adjustment_that_is_not_heard_is_told_with_the_end() {
    let store = calm();
    let limiter =
        over(&store).defaults([Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)]).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 20)]).await.unwrap();
    assert_eq!(lease.adjust([("rpm", 1)]).await.unwrap(), Adjusted::Now);
    store.go_away();
    assert_eq!(lease.adjust([("rpm", 14), ("tpm", 3)]).await.unwrap(), Adjusted::WithSettle);
    assert_eq!(lease.adjust([("rpm", -5)]).await.unwrap(), Adjusted::WithSettle);
    assert_eq!((lease.held("rpm"), lease.held("tpm")), (Some(30), Some(3)));
    store.come_back();
    tokio::time::advance(secs(2)).await;
    assert_eq!(lease.settle_as_held().await.unwrap(), Settled::Now);
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((70, 30)));
    assert_eq!(settled(memory(&store), ACME, "tpm").await, (3, 1));
}

#[tokio::test(start_paused = true)]
async fn an_extension_while_the_store_is_away_leaves_the_lease_as_it_was() {
    let memory = Memory::new();
    let (store, gun) = losing(&memory, Verb::Extend);
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 20)]).await.unwrap();
    gun.load(1);
    let error = lease.extend([("rpm", 30)]).await.unwrap_err();
    assert!(is_away(&error), "{error}");
    assert_eq!((lease.held("rpm"), level(&memory, ACME, "rpm").await), (Some(20), Some((50, 50))));
    lease.extend([("rpm", 1)]).await.unwrap();
    // What the store drew and nobody was told returns with the end.
    lease.settle_as_held().await.unwrap();
    assert_eq!(level(&memory, ACME, "rpm").await, Some((79, 21)));
    assert_eq!(settled(&memory, ACME, "rpm").await, (21, 1));
}

#[tokio::test(start_paused = true)]
async fn a_settle_that_was_denied_can_be_tried_again() {
    // It was taken for done: the second settle answered that it was, and nobody ever told the store.
    let (memory, gun) = (Memory::new(), Gun::default());
    let trigger = gun.clone();
    let store = Hooked::new(&memory, move |verb, moment| {
        let is_it = (verb, moment) == (Verb::Settle, Moment::Before);
        if is_it && trigger.fires() {
            Act::Fail(StoreError::Denied { what: "read only".into() })
        } else {
            Act::Pass
        }
    });
    let limiter = over(&store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 40)]).await.unwrap();
    gun.load(1);
    assert!(matches!(lease.settle([("rpm", 5)]).await, Err(LimitError::Store(StoreError::Denied { .. }))));
    assert_eq!(lease.settle([("rpm", 5)]).await.unwrap(), Settled::Now);
    drop(lease);
    assert_eq!(settled(&memory, ACME, "rpm").await, (5, 1));
    // One that is never tried again is settled when it is dropped: the work was done.
    let mut lease = limiter.acquire(ACME, [("rpm", 40)]).await.unwrap();
    gun.load(1);
    assert!(lease.settle([("rpm", 5)]).await.is_err());
    drop(lease);
    flushed(&limiter).await;
    assert_eq!(level(&memory, ACME, "rpm").await, Some((90, 10)));
}

#[tokio::test(start_paused = true)]
async fn a_listener_may_use_the_limiter_that_tells_it() {
    let (store, heard) = (calm(), Heard::default());
    let (itself, ear) = (Arc::new(OnceLock::<Limiter>::new()), heard.ear());
    let own = Arc::clone(&itself);
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 100)])
        .on_unavailable(OnUnavailable::Allow)
        .settler_max(1)
        .on_event(move |event| {
            ear(event);
            let limiter: &Limiter = own.get().expect("it is built by now");
            assert!(limiter.stats().granted > 0);
            if matches!(event, LimitEvent::StoreBack) {
                limiter.invalidate();
            }
            // Not awaited, but begun: it would stand still if a lock were held.
            let mut asking = pin!(limiter.balances(ACME));
            drop(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())));
        })
        .build()
        .unwrap();
    itself.set(limiter.clone()).expect("only once");
    limiter.spend(ACME, [("rpm", 1)]).await.unwrap();
    store.go_away();
    for _ in 0..10 {
        drop(limiter.acquire(ACME, [("rpm", 1)]).await.unwrap());
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
        assert!(heard.count(is_it) > 0);
    }
    assert_eq!(limiter.stats().panics, 0);
}

#[tokio::test(start_paused = true)]
async fn a_lease_from_afar_tells_its_balances_as_the_store_last_told() {
    let store = calm();
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    let limiter = over(&store).defaults(limits).build().unwrap();
    let told = |lease: &tidegate::Lease| -> Vec<(String, i64)> {
        lease.balances().iter().map(|balance| (balance.limit.to_string(), balance.available)).collect()
    };
    let mut lease = limiter.acquire(ACME, [("rpm", 10)]).await.unwrap();
    assert_eq!(told(&lease), [("rpm".to_owned(), 90)]);
    limiter.spend(ACME, [("rpm", 5)]).await.unwrap();
    assert_eq!(told(&lease), [("rpm".to_owned(), 90)], "it was not told of what others took");
    lease.extend([("rpm", 1), ("tpm", 30)]).await.unwrap();
    assert_eq!(told(&lease), [("rpm".to_owned(), 84), ("tpm".to_owned(), 70)]);
    lease.adjust([("tpm", -10)]).await.unwrap();
    assert_eq!(told(&lease)[1], ("tpm".to_owned(), 80));
}
