//! Units returned by leases of this process: which waiters are woken, and that no wake-up is lost.

use tidegate::store::wrap::Verb;
use tidegate::{Limit, Memory, Outcome, Scope};
use tokio::time::Instant;

use crate::kit::joined::{EntryLog, limiter, one, slots, wait};
use crate::kit::limiter::{ACME, Act, HookStore, Moment, calm, child, id, over, policy};
use crate::kit::{millis, secs, settle_tasks};

#[tokio::test(start_paused = true)]
async fn returned_lease_admits_head_early() {
    for is_remote in [false, true] {
        let store = calm();
        let hourly = Limit::per_hour("rpm", 2);
        let limiter =
            if is_remote { over(&store).defaults([hourly]).build().unwrap() } else { limiter(hourly) };
        let joined = slots(4).limited_by(&limiter);
        let first = joined.acquire(ACME, one()).await.unwrap();
        let second = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
        let entries = EntryLog::default();
        let tasks: Vec<_> = ["a", "b"].map(|name| wait(&joined, ACME, name, &entries)).into();
        settle_tasks().await;
        let start = Instant::now();
        // One return comes from a joined permit, the other from a lease of the limiter.
        first.settle(Outcome::failure()).await.unwrap();
        drop(second);
        for task in tasks {
            task.await.unwrap();
        }
        assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
        assert_eq!(entries.names(), ["a", "b"]);
    }
}

#[tokio::test(start_paused = true)]
async fn return_to_parent_wakes_its_waiters() {
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.unwrap();
    let mut lease = limiter.try_acquire(("one", "gpt"), [("rpm", 10)]).await.unwrap();
    let joined = slots(4).limited_by(&limiter);
    let entries = EntryLog::default();
    let tasks =
        [wait(&joined, ("two", "gpt"), "two", &entries), wait(&joined, ("three", "gpt"), "three", &entries)];
    settle_tasks().await;
    let start = Instant::now();
    lease.cancel().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(start.elapsed() < secs(1), "enough for two wakes two: {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn return_during_a_draw_is_not_missed() {
    // A lease is returned after the store has refused the draw, and before its reply arrives.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 1)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap();
    let joined = slots(1).limited_by(&limiter);
    let entries = EntryLog::default();
    let start = Instant::now();
    let waiting = wait(&joined, ACME, "waiting", &entries);
    tokio::time::sleep(millis(10)).await;
    assert_eq!(joined.throttle().snapshot().in_flight, 1, "the draw is in progress");
    lease.cancel().await.unwrap();
    waiting.await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn aborted_wakeup_is_passed_to_next_waiter() {
    // Regression: a waiter was woken by the return and then aborted while it waited for a slot. The other
    // subject at the same parent slept until its own timer.
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.unwrap();
    let mut lease = limiter.try_acquire(("one", "gpt"), [("rpm", 10)]).await.unwrap();
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter);
    let entries = EntryLog::default();
    let leaving = wait(&joined, ("two", "gpt"), "two", &entries);
    settle_tasks().await;
    let staying = wait(&slots(1).limited_by(&limiter), ("three", "gpt"), "three", &entries);
    settle_tasks().await;
    let slot = throttle.acquire(one()).await.unwrap();
    let start = Instant::now();
    lease.cancel().await.unwrap();
    settle_tasks().await;
    assert_eq!(throttle.snapshot().waiting, 1, "woken by the return, it waits for the slot");
    leaving.abort();
    staying.await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    drop(slot);
}

#[tokio::test(start_paused = true)]
async fn policy_change_during_a_draw_is_not_missed() {
    // Regression: a refused caller was drawing again when its limit was raised. The store had already
    // decided, and the wake-up arrived while the caller was not listening.
    let memory = Memory::new();
    let store = HookStore::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 36)]).build().unwrap();
    let elsewhere = over(&store).defaults([Limit::per_hour("rpm", 36)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 36)]).await.unwrap();
    let joined = slots(1).limited_by(&limiter);
    let entries = EntryLog::default();
    let start = Instant::now();
    let waiting = wait(&joined, ACME, "waiting", &entries);
    // Another process draws first.
    tokio::time::sleep(millis(100_005)).await;
    elsewhere.spend(ACME, [("rpm", 1)]).await.unwrap();
    while joined.throttle().snapshot().in_flight == 0 {
        tokio::time::sleep(millis(1)).await;
    }
    // The caller draws again, and the store has decided.
    limiter.admin("ops").set_policy(Scope::System, policy([Limit::per_second("rpm", 36)])).await.unwrap();
    waiting.await.unwrap();
    assert!(start.elapsed() < secs(102), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn return_too_small_for_one_wakes_another() {
    // Regression: the return woke a waiter that needed ten units. The other, which needed one, slept until
    // policies were read again although a unit was available.
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.unwrap();
    let rest = limiter.try_acquire(("one", "gpt"), [("rpm", 9)]).await.unwrap();
    let mut lease = limiter.try_acquire(("one", "gpt"), [("rpm", 1)]).await.unwrap();
    let entries = EntryLog::default();
    let needs_ten = slots(4).limited_by(&limiter).costs(|_| [("rpm", 10)]);
    let large = wait(&needs_ten, ("two", "gpt"), "large", &entries);
    settle_tasks().await;
    let small = wait(&slots(4).limited_by(&limiter), ("three", "gpt"), "small", &entries);
    settle_tasks().await;
    let start = Instant::now();
    lease.cancel().await.unwrap();
    small.await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    assert_eq!(entries.names(), ["small"]);
    large.abort();
    drop(rest);
}
