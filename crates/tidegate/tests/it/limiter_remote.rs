//! Leases whose holder is elsewhere: they go on by their id and step, through lost answers, restarts and a store that is
//! away.

use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::{
    Degraded, LeaseId, Limit, LimitError, Limiter, Memory, OnUnavailable, Scope, Share, Sqlite,
    SqliteOptions, Stamp, StoreError,
};

use crate::kit::limiter::{ACME, calm, level, memory, over, policy, settled};
use crate::kit::{millis, secs};

const START: Stamp = Stamp::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3_600);

/// A hundred requests and a thousand tokens, and hardly any more.
fn limits() -> [Limit; 2] {
    [Limit::per_day("rpm", 1).burst(100), Limit::per_day("tpm", 1).burst(1_000)]
}

fn limiter(store: &Memory) -> Limiter {
    Limiter::builder(store.clone()).defaults(limits()).build().expect("valid")
}

fn how_it_ended<T: std::fmt::Debug>(answer: Result<T, LimitError>) -> String {
    match answer {
        Err(LimitError::Store(error @ StoreError::Ended { .. })) => {
            error.to_string().split("it was ").last().unwrap_or_default().to_owned()
        }
        other => panic!("a lease that has ended answers {other:?}"),
    }
}

#[tokio::test]
async fn a_lease_that_was_let_go_of_stays_drawn_and_goes_on_by_its_id() {
    let store = Memory::new();
    let limiter = limiter(&store);
    let id = limiter.acquire(ACME, [("rpm", 1), ("tpm", 500)]).await.unwrap().detach();
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

    // In whatever order, and with what is not named as it is held.
    let first = limiter.settle_lease(id, 3, [("tpm", 420)]).await.unwrap();
    let again = limiter.settle_lease(id, 3, [("tpm", 420)]).await.unwrap();
    assert_eq!((first.is_repeat, again.is_repeat, again.at), (false, true, first.at));
    assert_eq!(
        (level(&store, ACME, "rpm").await, level(&store, ACME, "tpm").await),
        (Some((96, 4)), Some((580, 420)))
    );
    assert_eq!((settled(&store, ACME, "rpm").await, settled(&store, ACME, "tpm").await), ((4, 1), (420, 1)));
    assert_eq!(how_it_ended(limiter.settle_lease(id, 3, [("tpm", 421)]).await), "settled");
    assert_eq!(how_it_ended(limiter.settle_lease(id, 4, [("tpm", 420)]).await), "settled");
    assert_eq!(how_it_ended(limiter.cancel_lease(id, 4).await), "settled");
    assert_eq!(how_it_ended(limiter.renew_lease(id, 4, HOUR).await), "settled");
    assert_eq!(how_it_ended(limiter.find_lease(id).await), "settled");
}

#[tokio::test]
async fn a_settle_is_known_again_in_whatever_order_it_names_its_limits() {
    let limiter = limiter(&Memory::new());
    let id = limiter.acquire(ACME, [("rpm", 1), ("tpm", 500)]).await.unwrap().detach();
    assert!(!limiter.settle_lease(id, 1, [("rpm", 2), ("tpm", 7)]).await.unwrap().is_repeat);
    assert!(limiter.settle_lease(id, 1, [("tpm", 7), ("rpm", 2)]).await.unwrap().is_repeat);
    assert_eq!(how_it_ended(limiter.settle_lease(id, 1, [("tpm", 2), ("rpm", 7)]).await), "settled");
}

#[tokio::test]
async fn a_cancel_by_id_returns_all_of_it_once() {
    let store = Memory::new();
    let limiter = limiter(&store);
    let id = limiter.acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    assert!(!limiter.cancel_lease(id, 1).await.unwrap().is_repeat);
    assert!(limiter.cancel_lease(id, 1).await.unwrap().is_repeat);
    assert_eq!(level(&store, ACME, "tpm").await, Some((1_000, 0)));
    assert_eq!(how_it_ended(limiter.settle_lease(id, 1, []).await), "cancelled");
}

#[tokio::test]
async fn what_is_refused_late_or_unknown_says_so_and_changes_nothing() {
    let store = Memory::new();
    let limiter = limiter(&store);
    let id = limiter.acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
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
    assert_eq!(late.to_string(), format!("step 4 of the lease {id} comes after step 5"));
    let long = limiter.renew_lease(id, 6, 25 * HOUR).await.unwrap_err();
    assert_eq!(long.to_string(), "a renewal for 90000s, more than 86400s");
    let nobody = LeaseId::from_number(7);
    for answer in [
        limiter.find_lease(nobody).await.err(),
        limiter.settle_lease(nobody, 1, []).await.err(),
        limiter.cancel_lease(nobody, 1).await.err(),
    ] {
        assert_eq!(answer.unwrap().to_string(), format!("there is no lease {nobody}"));
    }
    assert_eq!(level(&store, ACME, "tpm").await, Some((500, 500)));
}

#[tokio::test]
async fn a_lease_is_renewed_by_its_handle_and_by_its_id() {
    let clock = ManualWall::new(START);
    let store = Memory::with_clock(clock.clone());
    let limiter = limiter(&store);
    let mut held = limiter.acquire(ACME, [("tpm", 100)]).await.unwrap();
    let remote = limiter.acquire(ACME, [("tpm", 10)]).await.unwrap().detach();
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
    assert_eq!(how_it_ended(limiter.renew_lease(remote, 4, HOUR).await), "expired");
    assert_eq!(settled(&store, ACME, "tpm").await, (100, 2));
}

#[tokio::test(start_paused = true)]
async fn what_is_returned_by_id_is_had_by_whoever_waits() {
    let limiter = limiter(&Memory::new());
    let id = limiter.acquire(ACME, [("tpm", 1_000)]).await.unwrap().detach();
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire_within(ACME, [("tpm", 500)], Duration::from_secs(24 * 900 * 3_600)).await }
    });
    crate::kit::settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 1);
    let before = tokio::time::Instant::now();
    limiter.settle_lease(id, 1, [("tpm", 400)]).await.unwrap();
    waiting.await.unwrap().unwrap().settle_as_held().await.unwrap();
    assert_eq!(before.elapsed(), Duration::ZERO);
}

async fn open(path: &std::path::Path, clock: &ManualWall) -> (Sqlite, Limiter) {
    let store = SqliteOptions::file(path).clock(clock.clone()).open().await.expect("the file is opened");
    let limiter = crate::kit::limiter::patient(store.clone()).defaults(limits()).build().expect("valid");
    (store, limiter)
}

#[tokio::test]
async fn a_restart_finds_every_lease_where_it_was_and_each_step_counts_once() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let path = folder.path().join("limits.db");
    let (store, old) = open(&path, &clock).await;
    let id = old.acquire(ACME, [("rpm", 1), ("tpm", 500)]).await.unwrap().detach();
    let lost = old.acquire(ACME, [("tpm", 200)]).await.unwrap().detach();
    old.extend_lease(id, 1, [("tpm", 100)]).await.unwrap();
    old.renew_lease(id, 2, 3 * HOUR).await.unwrap();
    // Nobody is waited for: they are not held here.
    old.drain().await;
    store.close().await;

    let (store, new) = open(&path, &clock).await;
    let found = new.find_lease(id).await.unwrap();
    assert_eq!((found.step, found.deadline), (2, START + 3 * HOUR));
    // The answer was lost with the process: said again, it counts once.
    assert!(new.renew_lease(id, 2, 3 * HOUR).await.unwrap().is_repeat);
    assert!(matches!(
        new.extend_lease(id, 1, [("tpm", 100)]).await,
        Err(LimitError::Store(StoreError::Late { .. }))
    ));
    // The policies are others by now, and what it drew from is not.
    new.admin("ops").set_policy(Scope::System, policy([Limit::per_day("usd", 5)]).only()).await.unwrap();
    clock.advance(2 * HOUR);
    assert_eq!(how_it_ended(new.find_lease(lost).await), "expired");
    assert!(!new.settle_lease(id, 3, [("tpm", 250)]).await.unwrap().is_repeat);
    store.close().await;

    let (_store, newer) = open(&path, &clock).await;
    assert!(newer.settle_lease(id, 3, [("tpm", 250)]).await.unwrap().is_repeat);
    assert_eq!(how_it_ended(newer.settle_lease(id, 3, [("tpm", 251)]).await), "settled");
    let query = tidegate::UsageQuery {
        of: tidegate::UsageOf::Entity(crate::kit::limiter::id("acme")),
        window: tidegate::Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let sum = newer.usage_sum(&query).await.unwrap();
    assert_eq!(sum.limits.get("tpm").map(|tally| (tally.units, tally.leases)), Some((450, 2)));
}

#[tokio::test]
async fn two_processes_of_one_service_take_turns_with_a_lease() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let path = folder.path().join("limits.db");
    let ((_one, one), (_other, other)) = (open(&path, &clock).await, open(&path, &clock).await);
    let id = one.acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    for (step, limiter) in (1..).zip([&other, &one, &other]) {
        limiter.extend_lease(id, step, [("tpm", 10)]).await.unwrap();
    }
    let settled = one.settle_lease(id, 4, []).await.unwrap();
    assert_eq!(settled.balances[0].available, 470);
    assert!(other.settle_lease(id, 4, []).await.unwrap().is_repeat);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_is_said_and_the_same_step_again_is_done() {
    let network = calm();
    let limiter = over(&network).defaults(limits()).build().unwrap();
    let id = limiter.acquire(ACME, [("tpm", 500)]).await.unwrap().detach();
    network.fail_next(1);
    let away = limiter.settle_lease(id, 1, [("tpm", 300)]).await.unwrap_err();
    assert!(matches!(away, LimitError::Unavailable { .. }), "{away}");
    // It was found, and the settle was not heard.
    network.go_away_after(1);
    let away = limiter.settle_lease(id, 1, [("tpm", 300)]).await.unwrap_err();
    assert!(away.retry_after().is_some(), "{away}");
    network.come_back();
    assert!(!limiter.settle_lease(id, 1, [("tpm", 300)]).await.unwrap().is_repeat);
    assert_eq!(settled(memory(&network), ACME, "tpm").await, (300, 1));
    assert_eq!(limiter.stats().settling, 0);
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_this_process_share_is_ended_by_its_id_while_the_store_is_away() {
    let network = calm();
    let half = policy([Limit::per_day("tpm", 1_000)])
        .on_unavailable(OnUnavailable::LocalShare(Share::new(0.5).unwrap()));
    let limiter = over(&network).build().unwrap();
    limiter.admin("ops").set_policy(Scope::System, half).await.unwrap();
    limiter.acquire(ACME, [("tpm", 1)]).await.unwrap().cancel().await.unwrap();
    network.go_away();
    let lease = limiter.acquire(ACME, [("tpm", 500)]).await.unwrap();
    assert_eq!(lease.degraded(), Some(Degraded::LocalShare));
    let id = lease.detach();
    limiter.renew_lease(id, 1, HOUR).await.unwrap();
    assert!(limiter.acquire(ACME, [("tpm", 1)]).await.is_err());
    limiter.settle_lease(id, 2, [("tpm", 100)]).await.unwrap();
    let mut rest = limiter.acquire(ACME, [("tpm", 400)]).await.unwrap();
    rest.cancel().await.unwrap();
    network.come_back();
    tokio::time::advance(millis(5_000)).await;
    assert!(limiter.settle_lease(id, 2, [("tpm", 100)]).await.unwrap().is_repeat);
    assert_eq!(settled(memory(&network), ACME, "tpm").await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_lease_whose_end_has_begun_is_not_let_go_of() {
    let network = calm();
    let limiter = over(&network).defaults(limits()).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("tpm", 500)]).await.unwrap();
    network.hang();
    assert!(tokio::time::timeout(millis(1), lease.settle([("tpm", 200)])).await.is_err());
    network.come_back();
    let id = lease.detach();
    crate::kit::limiter::flushed(&limiter).await;
    assert_eq!(how_it_ended(limiter.find_lease(id).await), "settled");
    assert_eq!(settled(memory(&network), ACME, "tpm").await, (200, 1));
}
