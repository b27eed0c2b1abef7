//! A limiter, alone and joined to a throttle, over a file: what is remembered, what a crowd may have, and what happens
//! when the file is away for a while.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::wrap::Observed;
use tidegate::store::{ManualWall, Store};
use tidegate::{
    Cost, Entity, Expect, JoinedError, Limit, LimitError, Limiter, Outcome, Scope, Settled, Slots, Sqlite,
    SqliteOptions, Stamp, Subject, Throttle, UsageOf, UsageQuery, Window,
};
use tidegate_core::limit::check::check;

use crate::kit::limiter::{ACME, child, flushed, id, patient, policy, poll_and_drop};
use crate::kit::secs;

const START: Stamp = Stamp::from_secs(1_800_000_000);

async fn open(path: &Path, clock: &ManualWall) -> Sqlite {
    SqliteOptions::file(path).clock(clock.clone()).open().await.expect("the file is opened")
}

/// What a subject has of its first limit.
async fn there(limiter: &Limiter) -> i64 {
    limiter.balances(ACME).await.expect("the file is there")[0].balance.available
}

/// What was settled of a limit this month, and with how many leases.
async fn settled(limiter: &Limiter, entity: &str, limit: &str) -> (u64, u64) {
    let range = Stamp::ZERO..Stamp::MAX;
    let query = UsageQuery { of: UsageOf::Entity(id(entity)), window: Window::Month, range };
    let sum = limiter.usage_sum(&query).await.expect("the file is there");
    sum.limits.get(limit).map_or((0, 0), |tally| (tally.units, tally.leases))
}

#[tokio::test]
async fn a_new_process_finds_policies_entities_limits_and_usage_as_they_were() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let path = folder.path().join("limits.db");
    let store = open(&path, &clock).await;
    let old = patient(store.clone()).build().unwrap();
    child(&old, "acme", "org").await;
    let subject = Scope::Subject(Subject::new("org", "gpt").unwrap());
    old.admin("ops").set_policy(subject, policy([Limit::per_day("rpm", 500)])).await.unwrap();
    old.admin("ops").set_policy(Scope::System, policy([Limit::per_day("rpm", 100)])).await.unwrap();
    old.acquire(ACME, [("rpm", 60)]).await.unwrap().settle([("rpm", 45)]).await.unwrap();
    // Killed with this one in hand: nobody ends it.
    std::mem::forget(old.acquire(ACME, [("rpm", 20)]).await.unwrap());
    drop(old);
    store.close().await;

    let new = patient(open(&path, &clock).await).build().unwrap();
    assert_eq!(there(&new).await, 35);
    assert_eq!((settled(&new, "acme", "rpm").await, settled(&new, "org", "rpm").await), ((45, 1), (45, 1)));
    let refused = new.acquire(ACME, [("rpm", 36)]).await.unwrap_err();
    assert!(refused.retry_after().is_some(), "{refused}");
    clock.advance(Duration::from_secs(3_600));
    // Four an hour, of a hundred a day; and what the dead one held was settled at what it drew.
    assert_eq!(there(&new).await, 39);
    assert_eq!((settled(&new, "acme", "rpm").await, settled(&new, "org", "rpm").await), ((65, 2), (65, 2)));
}

#[tokio::test]
async fn an_ending_that_finds_no_file_is_told_when_it_is_back() {
    let (folder, clock) = (tempfile::tempdir().unwrap(), ManualWall::new(START));
    let (path, aside) = (folder.path().join("limits.db"), folder.path().join("aside.db"));
    let store = open(&path, &clock).await;
    let limiter = patient(store).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut settles = limiter.acquire(ACME, [("rpm", 30)]).await.unwrap();
    let dropped = limiter.acquire(ACME, [("rpm", 20)]).await.unwrap();

    std::fs::rename(&path, &aside).unwrap();
    let error = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    let sentence = error.to_string();
    assert!(
        matches!(error, LimitError::Unavailable { .. }) && sentence.contains("has vanished"),
        "{sentence}"
    );
    assert_eq!(settles.settle([("rpm", 25)]).await.unwrap(), Settled::Later);
    drop(dropped);

    std::fs::rename(&aside, &path).unwrap();
    flushed(&limiter).await;
    // The breaker may be open for a moment still.
    let answered = async {
        while limiter.balances(ACME).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), answered).await.expect("the file is available again");
    assert_eq!(there(&limiter).await, 75);
    assert_eq!(settled(&limiter, "acme", "rpm").await, (25, 1));
    assert_eq!(limiter.stats().unsettled, 0);
}

/// Leases are settled, cancelled, dropped and given up by tasks that end in the middle of everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crowd_on_a_file_gets_no_more_than_was_agreed_and_the_ledger_is_the_sum() {
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
                    // Given up in the middle: before its turn, or with its draw under way.
                    drop(poll_and_drop(wait, 1 + usize::try_from(turn % 3).expect("at most two")).await);
                    continue;
                }
                let mut lease = wait.await.expect("a second brings two hundred units");
                match (number + turn) % 4 {
                    0 => drop(lease.settle([("tpm", 5)]).await.expect("the file is there")),
                    1 => drop(lease.cancel().await.expect("the file is there")),
                    2 => drop(lease),
                    _ => {
                        lease.adjust([("tpm", 3)]).await.expect("the file is there");
                        lease.settle_as_held().await.expect("the file is there");
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
        assert_eq!((own.0.0 + own.1.0, own.0.1 + own.1.1), org, "what is above is the sum of what is below");
        let capacity = limiter.capacity("gpt").await.unwrap();
        let consumed: i64 =
            capacity.iter().filter(|(name, _)| name.as_str() == limit).map(|(_, c)| c.consumed).sum();
        assert_eq!(u64::try_from(consumed), Ok(2 * org.0), "consumed on two levels is what was settled");
    }
}

#[tokio::test]
async fn a_joined_permit_ends_both_halves_on_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = Sqlite::open(folder.path().join("limits.db")).await.unwrap();
    let limits = [Limit::per_day("rpm", 3), Limit::per_day("tpm", 1_000)];
    let limiter = patient(store).defaults(limits).build().unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(4)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    let cost = Cost::request().tokens(300);
    let permit = joined.acquire(ACME, cost).await.unwrap();
    assert_eq!((throttle.snapshot().in_flight, limiter.stats().open_leases), (1, 1));
    permit.settle(Outcome::success().spent(Cost::request().tokens(120))).await.unwrap();
    joined.acquire(ACME, cost).await.unwrap().settle(Outcome::overload()).await.unwrap();
    drop(joined.acquire(ACME, cost).await.unwrap());
    // Given up at every moment up to the answer: nothing stays behind.
    for polls in 0..4 {
        drop(poll_and_drop(joined.acquire(ACME, cost), polls).await);
    }
    flushed(&limiter).await;
    assert_eq!(settled(&limiter, "acme", "tpm").await, (120, 1));
    let refused = joined.try_acquire(ACME, Cost::request().tokens(900)).await.unwrap_err();
    assert!(matches!(refused, JoinedError::Limit(LimitError::Limited(_))), "{refused}");
    limiter.drain().await;
    assert_eq!((throttle.snapshot().in_flight, limiter.stats().open_leases), (0, 0));
    assert_eq!(there(&limiter).await, 2);
}

/// Another process holds the file for longer than a call may take: whoever asks is told, and nothing is half done.
#[tokio::test]
async fn a_file_that_another_process_holds_is_away_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("limits.db");
    let store = Sqlite::open(&path).await.unwrap();
    let limiter = patient(store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    limiter.admin("ops").put_entity(&Entity::new(id("acme")), Expect::Any).await.unwrap();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "{error}");
    assert_eq!(
        limiter.store().get(&id("acme")).await.unwrap().unwrap().value.id(),
        &id("acme"),
        "reading goes on"
    );
    other.execute_batch("ROLLBACK").unwrap();
    flushed(&limiter).await;
    limiter.spend(ACME, [("rpm", 10)]).await.unwrap();
    assert_eq!(there(&limiter).await, 0);
}

/// What was dropped was told to a store that was closed, again and again, and a drain waited ten minutes for it.
#[tokio::test]
async fn a_drain_after_the_file_was_closed_ends() {
    let folder = tempfile::tempdir().unwrap();
    let store = Sqlite::open(folder.path().join("limits.db")).await.unwrap();
    let limiter = patient(store.clone()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let lease = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
    store.close().await;
    drop(lease);
    tokio::time::timeout(secs(60), limiter.drain()).await.expect("a store that was closed is not waited for");
    assert_eq!((limiter.stats().open_leases, limiter.stats().unsettled), (0, 1));
}
