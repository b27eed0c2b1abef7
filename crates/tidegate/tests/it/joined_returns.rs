//! A lease of this process gives something back: who is woken by it, and that nobody sleeps through it.

use tidegate::store::wrap::Verb;
use tidegate::{Limit, Memory, Outcome, Scope};
use tokio::time::Instant;

use crate::kit::joined::{Entered, limiter, one, slots, wait};
use crate::kit::limiter::{ACME, Act, Hooked, Moment, calm, child, id, over, policy};
use crate::kit::{millis, secs, settle_tasks};

#[tokio::test(start_paused = true)]
async fn a_lease_that_returns_lets_the_first_in_before_its_time() {
    for is_remote in [false, true] {
        let store = calm();
        let hourly = Limit::per_hour("rpm", 2);
        let limiter =
            if is_remote { over(&store).defaults([hourly]).build().unwrap() } else { limiter(hourly) };
        let joined = slots(4).limited_by(&limiter);
        let first = joined.acquire(ACME, one()).await.unwrap();
        let second = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
        let entered = Entered::default();
        let tasks: Vec<_> = ["a", "b"].map(|name| wait(&joined, ACME, name, &entered)).into();
        settle_tasks().await;
        let start = Instant::now();
        // Once by a permit of the throttle, once by a lease of the limiter's own.
        first.settle(Outcome::failure()).await.unwrap();
        drop(second);
        for task in tasks {
            task.await.unwrap();
        }
        assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
        assert_eq!(entered.names(), ["a", "b"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_return_to_the_parent_wakes_those_who_are_stuck_there() {
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.unwrap();
    let mut lease = limiter.acquire(("one", "gpt"), [("rpm", 10)]).await.unwrap();
    let joined = slots(4).limited_by(&limiter);
    let entered = Entered::default();
    let tasks =
        [wait(&joined, ("two", "gpt"), "two", &entered), wait(&joined, ("three", "gpt"), "three", &entered)];
    settle_tasks().await;
    let start = Instant::now();
    lease.cancel().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(start.elapsed() < secs(1), "enough for two wakes two: {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn what_returns_while_the_store_is_asked_is_not_missed() {
    // The store has decided to refuse, and its answer is on the way, when a lease gives back.
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 1)]).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap();
    let joined = slots(1).limited_by(&limiter);
    let entered = Entered::default();
    let start = Instant::now();
    let asking = wait(&joined, ACME, "asking", &entered);
    tokio::time::sleep(millis(10)).await;
    assert_eq!(joined.throttle().snapshot().in_flight, 1, "it is asking");
    lease.cancel().await.unwrap();
    asking.await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_return_that_woke_one_who_then_left_wakes_the_next() {
    // It was told of the return, and was aborted while it waited for a slot. The other subject, stuck at the same
    // parent, slept until its time.
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.unwrap();
    let mut lease = limiter.acquire(("one", "gpt"), [("rpm", 10)]).await.unwrap();
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter);
    let entered = Entered::default();
    let leaving = wait(&joined, ("two", "gpt"), "two", &entered);
    settle_tasks().await;
    let staying = wait(&slots(1).limited_by(&limiter), ("three", "gpt"), "three", &entered);
    settle_tasks().await;
    let slot = throttle.acquire(one()).await.unwrap();
    let start = Instant::now();
    lease.cancel().await.unwrap();
    settle_tasks().await;
    assert_eq!(throttle.snapshot().waiting, 1, "woken by the return, it wants the slot");
    leaving.abort();
    staying.await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    drop(slot);
}

#[tokio::test(start_paused = true)]
async fn a_policy_changed_while_the_first_asks_is_not_missed() {
    // It had been refused before, and was asking again, when its limit was raised. The store had decided by then, and
    // those who were to ask again were called while it could not hear.
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::After) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 36)]).build().unwrap();
    let elsewhere = over(&store).defaults([Limit::per_hour("rpm", 36)]).build().unwrap();
    limiter.spend(ACME, [("rpm", 36)]).await.unwrap();
    let joined = slots(1).limited_by(&limiter);
    let entered = Entered::default();
    let start = Instant::now();
    let asking = wait(&joined, ACME, "asking", &entered);
    // Another process is a moment faster.
    tokio::time::sleep(millis(100_005)).await;
    elsewhere.spend(ACME, [("rpm", 1)]).await.unwrap();
    while joined.throttle().snapshot().in_flight == 0 {
        tokio::time::sleep(millis(1)).await;
    }
    // It is asking again, and the store has decided.
    limiter.admin("ops").set_policy(Scope::System, policy([Limit::per_second("rpm", 36)])).await.unwrap();
    asking.await.unwrap();
    assert!(start.elapsed() < secs(102), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_return_too_small_for_one_reaches_another() {
    // It woke one who needed ten. The other, who needed one, slept until policies were read again, with a unit there all
    // the while.
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    for name in ["one", "two", "three"] {
        child(&limiter, name, "org").await;
    }
    let narrow = policy([Limit::per_day("rpm", 10)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("org")), narrow).await.unwrap();
    let rest = limiter.acquire(("one", "gpt"), [("rpm", 9)]).await.unwrap();
    let mut lease = limiter.acquire(("one", "gpt"), [("rpm", 1)]).await.unwrap();
    let entered = Entered::default();
    let needs_ten = slots(4).limited_by(&limiter).costs(|_| [("rpm", 10)]);
    let large = wait(&needs_ten, ("two", "gpt"), "large", &entered);
    settle_tasks().await;
    let small = wait(&slots(4).limited_by(&limiter), ("three", "gpt"), "small", &entered);
    settle_tasks().await;
    let start = Instant::now();
    lease.cancel().await.unwrap();
    small.await.unwrap();
    assert!(start.elapsed() < secs(1), "{:?}", start.elapsed());
    assert_eq!(entered.names(), ["small"]);
    large.abort();
    drop(rest);
}
