//! A limiter over a SQLite file, alone and joined to a throttle: persistence, concurrent use, and a file that
//! is temporarily unavailable.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::wrap::Observed;
use tidegate::store::{ManualWall, Store};
use tidegate::{
    Cost, Entity, Expect, JoinedError, Limit, LimitError, Limiter, Outcome, Scope, SettleStatus, Slots,
    Sqlite, SqliteOptions, Stamp, Subject, Throttle, UsageOf, UsageQuery, Window,
};
use tidegate_core::limit::exactness::check;

use crate::kit::limiter::{ACME, child, flushed, id, policy, poll_and_drop, with_long_deadline};
use crate::kit::secs;

const START: Stamp = Stamp::from_secs(1_800_000_000);

async fn open(path: &Path, clock: &ManualWall) -> Sqlite {
    SqliteOptions::file(path).clock(clock.clone()).open().await.expect("the file is opened")
}

/// The available units of a subject's first limit.
async fn available(limiter: &Limiter) -> i64 {
    limiter.balances(ACME).await.expect("the file is available")[0].balance.available
}

/// Units of a limit settled this month, and the number of leases.
async fn settled(limiter: &Limiter, entity: &str, limit: &str) -> (u64, u64) {
    let range = Stamp::ZERO..Stamp::MAX;
    let query = UsageQuery { of: UsageOf::Entity(id(entity)), window: Window::Month, range };
    let sum = limiter.usage_sum(&query).await.expect("the file is available");
    sum.limits.get(&limit.parse().expect("a valid name")).map_or((0, 0), |tally| (tally.units, tally.leases))
}

#[tokio::test]
async fn new_process_finds_all_state_unchanged() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let path = folder.path().join("limits.db");
    let store = open(&path, &clock).await;
    let old = with_long_deadline(store.clone()).build().unwrap();
    child(&old, "acme", "org").await;
    let subject = Scope::Subject(Subject::new("org", "gpt").unwrap());
    old.admin("ops").set_policy(subject, policy([Limit::per_day("rpm", 500)])).await.unwrap();
    old.admin("ops").set_policy(Scope::System, policy([Limit::per_day("rpm", 100)])).await.unwrap();
    old.try_acquire(ACME, [("rpm", 60)]).await.unwrap().settle([("rpm", 45)]).await.unwrap();
    // The process is killed while it holds this lease.
    std::mem::forget(old.try_acquire(ACME, [("rpm", 20)]).await.unwrap());
    drop(old);
    store.close().await;

    let new = with_long_deadline(open(&path, &clock).await).build().unwrap();
    assert_eq!(available(&new).await, 35);
    assert_eq!((settled(&new, "acme", "rpm").await, settled(&new, "org", "rpm").await), ((45, 1), (45, 1)));
    let refused = new.try_acquire(ACME, [("rpm", 36)]).await.unwrap_err();
    assert!(refused.retry_after().is_some(), "{refused}");
    clock.advance(Duration::from_secs(3_600));
    // Four per hour, of a hundred a day; the lease of the killed process was settled in full.
    assert_eq!(available(&new).await, 39);
    assert_eq!((settled(&new, "acme", "rpm").await, settled(&new, "org", "rpm").await), ((65, 2), (65, 2)));
}

#[tokio::test]
async fn ending_without_file_is_delivered_on_its_return() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let (path, aside) = (folder.path().join("limits.db"), folder.path().join("aside.db"));
    let store = open(&path, &clock).await;
    let limiter = with_long_deadline(store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut settles = limiter.try_acquire(ACME, [("rpm", 30)]).await.unwrap();
    let dropped = limiter.try_acquire(ACME, [("rpm", 20)]).await.unwrap();

    std::fs::rename(&path, &aside).unwrap();
    let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    let sentence = error.to_string();
    assert!(
        matches!(error, LimitError::Unavailable { .. }) && sentence.contains("has vanished"),
        "{sentence}"
    );
    assert_eq!(settles.settle([("rpm", 25)]).await.unwrap(), SettleStatus::Later);
    drop(dropped);

    std::fs::rename(&aside, &path).unwrap();
    flushed(&limiter).await;
    // The breaker may still be open briefly.
    let answered = async {
        while limiter.balances(ACME).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), answered).await.expect("the file is available again");
    assert_eq!(available(&limiter).await, 75);
    assert_eq!(settled(&limiter, "acme", "rpm").await, (25, 1));
    assert_eq!(limiter.stats().unsettled, 0);
}

/// Tasks settle, cancel and drop leases, and are aborted at arbitrary points.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_use_never_exceeds_limits_on_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = Sqlite::open(folder.path().join("limits.db")).await.unwrap();
    let store = Arc::new(Observed::new(file));
    let limiter = Limiter::over(Arc::clone(&store) as Arc<dyn Store>)
        .defaults([Limit::per_second("rpm", 200).burst(40), Limit::per_minute("tpm", 60_000)])
        .store_deadline(secs(60))
        .build()
        .unwrap();
    child(&limiter, "acme", "org").await;
    child(&limiter, "birch", "org").await;
    let caller = |number: u64| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let entity = if number.is_multiple_of(2) { "acme" } else { "birch" };
            for turn in 0..30 {
                let cost = [("rpm", 1), ("tpm", 10 + turn)];
                let wait = limiter.acquire_within((entity, "gpt"), cost, Duration::from_secs(600));
                if (number + turn).is_multiple_of(7) {
                    // Dropped before its turn, or with its draw in progress.
                    drop(poll_and_drop(wait, 1 + usize::try_from(turn % 3).expect("at most two")).await);
                    continue;
                }
                let mut lease = wait.await.expect("a second brings two hundred units");
                match (number + turn) % 4 {
                    0 => drop(lease.settle([("tpm", 5)]).await.expect("the file is available")),
                    1 => drop(lease.cancel().await.expect("the file is available")),
                    2 => drop(lease),
                    _ => {
                        lease.adjust([("tpm", 3)]).await.expect("the file is available");
                        lease.settle_full().await.expect("the file is available");
                    }
                }
            }
        })
    };
    let callers: Vec<_> = (0..12).map(caller).collect();
    for caller in callers {
        caller.await.unwrap();
    }
    limiter.drain().await;
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 0));
    let report = check(&store.log());
    assert!(report.is_exact(), "{report}");
    for limit in ["rpm", "tpm"] {
        let own = (settled(&limiter, "acme", limit).await, settled(&limiter, "birch", limit).await);
        let org = settled(&limiter, "org", limit).await;
        assert_eq!(
            (own.0.0 + own.1.0, own.0.1 + own.1.1),
            org,
            "the parent's usage is the sum of its children's"
        );
        let capacity = limiter.capacity("gpt").await.unwrap();
        let consumed: i64 =
            capacity.iter().filter(|(key, _)| key.name.as_str() == limit).map(|(_, c)| c.consumed).sum();
        assert_eq!(u64::try_from(consumed), Ok(2 * org.0), "both levels consumed the settled units");
    }
}

#[tokio::test]
async fn joined_permit_settles_lease_on_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = Sqlite::open(folder.path().join("limits.db")).await.unwrap();
    let limits = [Limit::per_day("rpm", 3), Limit::per_day("tpm", 1_000)];
    let limiter = with_long_deadline(store).defaults(limits).build().unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(4)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    let cost = Cost::request().tokens(300);
    let permit = joined.acquire(ACME, cost).await.unwrap();
    assert_eq!((throttle.snapshot().in_flight, limiter.stats().open_leases), (1, 1));
    permit.settle(Outcome::success().spent(Cost::request().tokens(120))).await.unwrap();
    joined.acquire(ACME, cost).await.unwrap().settle(Outcome::overload()).await.unwrap();
    drop(joined.acquire(ACME, cost).await.unwrap());
    // Dropped at every await point up to the reply: nothing is left behind.
    for polls in 0..4 {
        drop(poll_and_drop(joined.acquire(ACME, cost), polls).await);
    }
    flushed(&limiter).await;
    assert_eq!(settled(&limiter, "acme", "tpm").await, (120, 1));
    let refused = joined.try_acquire(ACME, Cost::request().tokens(900)).await.unwrap_err();
    assert!(matches!(refused, JoinedError::Limit(LimitError::Limited(_))), "{refused}");
    limiter.drain().await;
    assert_eq!((throttle.snapshot().in_flight, limiter.stats().open_leases), (0, 0));
    assert_eq!(available(&limiter).await, 2);
}

/// Another process locks the file for longer than a call may take: callers get an error, and nothing is half
/// done.
#[tokio::test]
async fn locked_file_is_unavailable_until_released() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("limits.db");
    let store = Sqlite::open(&path).await.unwrap();
    let limiter = with_long_deadline(store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    limiter.admin("ops").put_entity(&Entity::new(id("acme")), Expect::Any).await.unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "{error}");
    assert_eq!(
        limiter.store().get(&id("acme")).await.unwrap().unwrap().value.id(),
        &id("acme"),
        "reads still work"
    );
    other.execute_batch("ROLLBACK").unwrap();
    flushed(&limiter).await;
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    assert_eq!(available(&limiter).await, 0);
}

/// Regression: a dropped lease was retried against a closed store, and a drain waited ten minutes for it.
#[tokio::test]
async fn drain_returns_after_the_file_was_closed() {
    let folder = tempfile::tempdir().unwrap();
    let store = Sqlite::open(folder.path().join("limits.db")).await.unwrap();
    let limiter = with_long_deadline(store.clone()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let lease = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
    store.close().await;
    drop(lease);
    tokio::time::timeout(secs(60), limiter.drain())
        .await
        .expect("the drain does not wait for a closed store");
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 1));
}
