//! Leases held by a remote client: they continue by id and step across lost replies, restarts and outages.

use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::store::wrap::Verb;
use tidegate::{
    Degraded, LeaseId, Limit, LimitError, Limiter, Memory, OnUnavailable, Scope, Share, Sqlite,
    SqliteOptions, Stamp, StoreError,
};

use crate::kit::limiter::{ACME, Act, HookStore, Moment, calm, level, memory, over, policy, settled};
use crate::kit::{millis, secs};

const START: Stamp = Stamp::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3_600);

/// A hundred requests and a thousand tokens, with hardly any refill.
fn limits() -> [Limit; 2] {
    [Limit::per_day("rpm", 1).burst(100), Limit::per_day("tpm", 1).burst(1_000)]
}

fn limiter(store: &Memory) -> Limiter {
    Limiter::builder(store.clone()).defaults(limits()).build().expect("valid")
}

fn end_reason<T: std::fmt::Debug>(answer: Result<T, LimitError>) -> String {
    match answer {
        Err(LimitError::Store(error @ StoreError::Ended { .. })) => {
            error.to_string().split("it was ").last().unwrap_or_default().to_owned()
        }
        other => panic!("an ended lease returned {other:?}"),
    }
}

#[tokio::test]
async fn detached_lease_stays_drawn_and_continues_by_id() {
    let store = Memory::new();
    let limiter = limiter(&store);
    let id = limiter.try_acquire(ACME, [("rpm", 1), ("tpm", 500)]).await.unwrap().detach();
    assert_eq!(limiter.stats().open_leases, 0);
    assert_eq!(level(&store, ACME, "tpm").await, Some((500, 500)));

    let extended = limiter.extend_lease(id, 1, [("tpm", 100)]).await.unwrap();
    assert!(!extended.is_repeat);
    assert_eq!(extended.balances.len(), 1);
    assert_eq!((extended.balances[0].limit.as_str(), extended.balances[0].available), ("tpm", 400));
    assert!(limiter.extend_lease(id, 1, [("tpm", 100)]).await.unwrap().is_repeat);
    limiter.adjust_lease(id, 2, [("rpm", 3), ("tpm", -50)]).await.unwrap();
    let found = limiter.find_lease(id).await.unwrap();
    let held: Vec<_> = found.held.iter().map(|(name, units)| (name.as_str(), *units)).collect();
    assert_eq!((held, found.step), (vec![("rpm", 4), ("tpm", 550)], 2));
    assert_eq!((found.id, found.subject.entity.as_str()), (id, "acme"));
    assert_eq!(found.deadline, found.drawn_at + HOUR);

    // In any order; limits that are not named settle in full.
    let first = limiter.settle_lease(id, 3, [("tpm", 420)]).await.unwrap();
    let again = limiter.settle_lease(id, 3, [("tpm", 420)]).await.unwrap();
    assert_eq!((first.is_repeat, again.is_repeat, again.at), (false, true, first.at));
    assert_eq!(
        (level(&store, ACME, "rpm").await, level(&store, ACME, "tpm").await),
        (Some((96, 4)), Some((580, 420)))
    );
    assert_eq!((settled(&store, ACME, "rpm").await, settled(&store, ACME, "tpm").await), ((4, 1), (420, 1)));
    assert_eq!(end_reason(limiter.settle_lease(id, 3, [("tpm", 421)]).await), "settled");
    assert_eq!(end_reason(limiter.settle_lease(id, 4, [("tpm", 420)]).await), "settled");
    assert_eq!(end_reason(limiter.cancel_lease(id, 4).await), "settled");
    assert_eq!(end_reason(limiter.renew_lease(id, 4, HOUR).await), "settled");
    assert_eq!(end_reason(limiter.find_lease(id).await), "settled");
}

#[tokio::test]
async fn repeated_settle_ignores_order_of_limits() {
    let limiter = limiter(&Memory::new());
    let id = limiter.try_acquire(ACME, [("rpm", 1), ("tpm", 500)]).await.unwrap().detach();
    assert!(!limiter.settle_lease(id, 1, [("rpm", 2), ("tpm", 7)]).await.unwrap().is_repeat);
    assert!(limiter.settle_lease(id, 1, [("tpm", 7), ("rpm", 2)]).await.unwrap().is_repeat);
    assert_eq!(end_reason(limiter.settle_lease(id, 1, [("tpm", 2), ("rpm", 7)]).await), "settled");
}

#[tokio::test]
async fn cancel_by_id_returns_all_units_once() {
    let store = Memory::new();
    let limiter = limiter(&store);
    let id = limiter.try_acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    assert!(!limiter.cancel_lease(id, 1).await.unwrap().is_repeat);
    assert!(limiter.cancel_lease(id, 1).await.unwrap().is_repeat);
    assert_eq!(level(&store, ACME, "tpm").await, Some((1_000, 0)));
    assert_eq!(end_reason(limiter.settle_lease(id, 1, []).await), "cancelled");
}

#[tokio::test]
async fn late_or_unknown_steps_are_refused_without_effect() {
    let store = Memory::new();
    let limiter = limiter(&store);
    let id = limiter.try_acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    let refused = limiter.extend_lease(id, 1, [("tpm", 501)]).await.unwrap_err();
    assert!(matches!(refused, LimitError::Limited(_)) && refused.retry_after().is_some(), "{refused}");
    let never = limiter.extend_lease(id, 1, [("tpm", 1_001)]).await.unwrap_err();
    assert!(matches!(never, LimitError::TooLarge(_)), "{never}");
    let unknown = limiter.settle_lease(id, 1, [("usd", 5)]).await.unwrap_err();
    assert!(unknown.to_string().contains("`usd`"), "{unknown}");
    let too_many = limiter.adjust_lease(id, 1, [("tpm", 1 << 40)]).await.unwrap_err();
    assert!(matches!(too_many, LimitError::Cost(_)), "{too_many}");
    limiter.renew_lease(id, 5, HOUR).await.unwrap();
    let late = limiter.adjust_lease(id, 4, [("tpm", 1)]).await.unwrap_err();
    assert_eq!(late.to_string(), format!("step 4 of the lease {id} arrived after step 5"));
    let long = limiter.renew_lease(id, 6, 25 * HOUR).await.unwrap_err();
    assert_eq!(long.to_string(), "a renewal for 90000s, more than 86400s");
    let unknown = LeaseId::from_number(7);
    for answer in [
        limiter.find_lease(unknown).await.err(),
        limiter.settle_lease(unknown, 1, []).await.err(),
        limiter.cancel_lease(unknown, 1).await.err(),
    ] {
        assert_eq!(answer.unwrap().to_string(), format!("there is no lease {unknown}"));
    }
    assert_eq!(level(&store, ACME, "tpm").await, Some((500, 500)));
}

#[tokio::test]
async fn lease_is_renewed_by_handle_or_id() {
    let clock = ManualWall::new(START);
    let store = Memory::with_clock(clock.clone());
    let limiter = limiter(&store);
    let mut held = limiter.try_acquire(ACME, [("tpm", 100)]).await.unwrap();
    let remote = limiter.try_acquire(ACME, [("tpm", 10)]).await.unwrap().detach();
    for step in 1..=3 {
        clock.advance(secs(3_599));
        held.renew(HOUR).await.unwrap();
        let renewed = limiter.renew_lease(remote, step, HOUR).await.unwrap();
        assert_eq!(renewed.deadline, renewed.at + HOUR);
    }
    held.extend([("tpm", 1)]).await.unwrap();
    held.settle([("tpm", 90)]).await.unwrap();
    let ended = held.renew(HOUR).await.unwrap_err();
    assert!(ended.to_string().ends_with("it was settled"), "{ended}");
    clock.advance(HOUR);
    assert_eq!(end_reason(limiter.renew_lease(remote, 4, HOUR).await), "expired");
    assert_eq!(settled(&store, ACME, "tpm").await, (100, 2));
}

#[tokio::test(start_paused = true)]
async fn units_returned_by_id_wake_waiters() {
    let limiter = limiter(&Memory::new());
    let id = limiter.try_acquire(ACME, [("tpm", 1_000)]).await.unwrap().detach();
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire_within(ACME, [("tpm", 500)], Duration::from_secs(24 * 900 * 3_600)).await }
    });
    crate::kit::settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 1);
    let before = tokio::time::Instant::now();
    limiter.settle_lease(id, 1, [("tpm", 400)]).await.unwrap();
    waiting.await.unwrap().unwrap().settle_full().await.unwrap();
    assert_eq!(before.elapsed(), Duration::ZERO);
}

async fn open(path: &std::path::Path, clock: &ManualWall) -> (Sqlite, Limiter) {
    let store = SqliteOptions::file(path).clock(clock.clone()).open().await.expect("the file is opened");
    let limiter =
        crate::kit::limiter::with_long_deadline(store.clone()).defaults(limits()).build().expect("valid");
    (store, limiter)
}

#[tokio::test]
async fn restart_keeps_leases_and_counts_steps_once() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let path = folder.path().join("limits.db");
    let (store, old) = open(&path, &clock).await;
    let id = old.try_acquire(ACME, [("rpm", 1), ("tpm", 500)]).await.unwrap().detach();
    let lost = old.try_acquire(ACME, [("tpm", 200)]).await.unwrap().detach();
    old.extend_lease(id, 1, [("tpm", 100)]).await.unwrap();
    old.renew_lease(id, 2, 3 * HOUR).await.unwrap();
    // The drain does not wait, because the leases are held elsewhere.
    old.drain().await;
    store.close().await;

    let (store, new) = open(&path, &clock).await;
    let found = new.find_lease(id).await.unwrap();
    assert_eq!((found.step, found.deadline), (2, START + 3 * HOUR));
    // The reply was lost with the process; the retried step counts once.
    assert!(new.renew_lease(id, 2, 3 * HOUR).await.unwrap().is_repeat);
    assert!(matches!(
        new.extend_lease(id, 1, [("tpm", 100)]).await,
        Err(LimitError::Store(StoreError::Late { .. }))
    ));
    // The policies have changed since, but the buckets that it drew from have not.
    new.admin("ops").set_policy(Scope::System, policy([Limit::per_day("usd", 5)]).only()).await.unwrap();
    clock.advance(2 * HOUR);
    assert_eq!(end_reason(new.find_lease(lost).await), "expired");
    assert!(!new.settle_lease(id, 3, [("tpm", 250)]).await.unwrap().is_repeat);
    store.close().await;

    let (_store, newer) = open(&path, &clock).await;
    assert!(newer.settle_lease(id, 3, [("tpm", 250)]).await.unwrap().is_repeat);
    assert_eq!(end_reason(newer.settle_lease(id, 3, [("tpm", 251)]).await), "settled");
    let query = tidegate::UsageQuery {
        of: tidegate::UsageOf::Entity(crate::kit::limiter::id("acme")),
        window: tidegate::Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let sum = newer.usage_sum(&query).await.unwrap();
    assert_eq!(
        sum.limits.get(&"tpm".parse().unwrap()).map(|tally| (tally.units, tally.leases)),
        Some((450, 2))
    );
}

#[tokio::test]
async fn two_processes_can_alternate_on_a_lease() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let path = folder.path().join("limits.db");
    let ((_one, one), (_other, other)) = (open(&path, &clock).await, open(&path, &clock).await);
    let id = one.try_acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    for (step, limiter) in (1..).zip([&other, &one, &other]) {
        limiter.extend_lease(id, step, [("tpm", 10)]).await.unwrap();
    }
    let settled = one.settle_lease(id, 4, []).await.unwrap();
    assert_eq!(settled.balances[0].available, 470);
    assert!(other.settle_lease(id, 4, []).await.unwrap().is_repeat);
}

#[tokio::test(start_paused = true)]
async fn step_during_outage_fails_and_its_retry_succeeds() {
    let network = calm();
    let limiter = over(&network).defaults(limits()).build().unwrap();
    let id = limiter.try_acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    network.fail_next(1);
    let away = limiter.settle_lease(id, 1, [("tpm", 300)]).await.unwrap_err();
    assert!(matches!(away, LimitError::Unavailable { .. }), "{away}");
    // The lease was found, and the settle was lost.
    network.go_away_after(1);
    let away = limiter.settle_lease(id, 1, [("tpm", 300)]).await.unwrap_err();
    assert!(away.retry_after().is_some(), "{away}");
    network.come_back();
    assert!(!limiter.settle_lease(id, 1, [("tpm", 300)]).await.unwrap().is_repeat);
    assert_eq!(settled(memory(&network), ACME, "tpm").await, (300, 1));
    assert_eq!(limiter.stats().settling, 0);
}

#[tokio::test(start_paused = true)]
async fn local_share_lease_ends_by_id_during_outage() {
    let network = calm();
    let half = policy([Limit::per_day("tpm", 1_000)])
        .on_unavailable(OnUnavailable::LocalShare(Share::new(0.5).unwrap()));
    let limiter = over(&network).build().unwrap();
    limiter.admin("ops").set_policy(Scope::System, half).await.unwrap();
    limiter.try_acquire(ACME, [("tpm", 1)]).await.unwrap().cancel().await.unwrap();
    network.go_away();
    let lease = limiter.try_acquire(ACME, [("tpm", 500)]).await.unwrap();
    assert_eq!(lease.degraded(), Some(Degraded::LocalShare));
    let id = lease.detach();
    limiter.renew_lease(id, 1, HOUR).await.unwrap();
    assert!(limiter.try_acquire(ACME, [("tpm", 1)]).await.is_err());
    limiter.settle_lease(id, 2, [("tpm", 100)]).await.unwrap();
    let mut rest = limiter.try_acquire(ACME, [("tpm", 400)]).await.unwrap();
    rest.cancel().await.unwrap();
    network.come_back();
    tokio::time::advance(millis(5_000)).await;
    assert!(limiter.settle_lease(id, 2, [("tpm", 100)]).await.unwrap().is_repeat);
    assert_eq!(settled(memory(&network), ACME, "tpm").await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn settling_lease_cannot_be_detached() {
    let network = calm();
    let limiter = over(&network).defaults(limits()).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("tpm", 500)]).await.unwrap();
    network.hang();
    assert!(tokio::time::timeout(millis(1), lease.settle([("tpm", 200)])).await.is_err());
    network.come_back();
    let id = lease.detach();
    crate::kit::limiter::flushed(&limiter).await;
    assert_eq!(end_reason(limiter.find_lease(id).await), "settled");
    assert_eq!(settled(memory(&network), ACME, "tpm").await, (200, 1));
}

/// Regression: a store that searched for a lease of another process for longer than the deadline of decisions
/// was reported unavailable, and three such lookups opened the breaker.
#[tokio::test(start_paused = true)]
async fn slow_lookup_of_a_lease_is_awaited() {
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Lease, Moment::Before) => Act::Sleep(millis(850)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults(limits()).build().unwrap();
    for _ in 0..4 {
        let id = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap().detach();
        limiter.settle_lease(id, 1, [("rpm", 1)]).await.unwrap();
    }
    assert_eq!(limiter.stats().store_away, None);
    assert_eq!(level(&memory, ACME, "rpm").await, Some((96, 4)));
}
