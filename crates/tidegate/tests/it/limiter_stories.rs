//! Stories of defects that the limiter once had, each with the test that tells when it comes back.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::store::wrap::{Faulty, Plan};
use tidegate::{
    Entity, EntityId, Expect, Limit, LimitError, Limiter, Memory, Policy, Scope, Settled, Stamp, StoreError,
};
use tokio::time::Instant;

fn id(name: &str) -> EntityId {
    EntityId::new(name).expect("a valid name")
}

/// A limiter whose store is not in the process, and the switch of that store.
fn over_network(limit: Limit, settler_max: usize) -> (Limiter, Arc<Faulty<Memory>>) {
    let store = Arc::new(Faulty::new(Memory::new(), Plan::seeded(1)).expect("no faults"));
    let limiter = Limiter::builder(Arc::clone(&store)).defaults([limit]).settler_max(settler_max).build();
    (limiter.expect("within the bounds"), store)
}

async fn available(limiter: &Limiter) -> i64 {
    limiter.balances(("acme", "gpt")).await.expect("the store is there")[0].balance.available
}

/// Ids carry the time they were made at, so that the store knows which it may have forgotten. A clock of the store
/// that was ahead of the system's made every new id look forgotten once as many leases had ended.
#[tokio::test]
async fn however_many_leases_have_ended_a_new_one_may_draw() {
    let clock = ManualWall::new(Stamp::from_secs(4_000_000_000));
    let store = Memory::with_clock(clock.clone());
    let build = || Limiter::builder(store.clone()).defaults([Limit::per_second("rpm", 1 << 40)]).build();
    let (busy, idle) = (build().unwrap(), build().unwrap());
    idle.spend(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    for number in 0..100_000_u32 {
        busy.spend(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
        if number % 1_000 == 0 {
            clock.advance(Duration::from_secs(1));
        }
    }
    // This one has not heard of the time for long.
    idle.spend(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
}

/// A return to a parent woke one of those who waited for it, and the others slept until the times they were told.
#[tokio::test(start_paused = true)]
async fn what_returns_to_a_parent_serves_all_it_is_enough_for() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let admin = limiter.admin("ops");
    admin.put_entity(&Entity::new(id("org")), Expect::Any).await.unwrap();
    for child in 0..10 {
        let child = Entity::new(id(&format!("child-{child}"))).parent(id("org")).cascade();
        admin.put_entity(&child, Expect::Any).await.unwrap();
    }
    let all = limiter.acquire(("org", "gpt"), [("rpm", 100)]).await.unwrap();
    let start = Instant::now();
    let mut waiting = tokio::task::JoinSet::new();
    for child in 0..10 {
        let limiter = limiter.clone();
        waiting.spawn(async move {
            let name = format!("child-{child}");
            let lease = limiter
                .acquire_within((name.as_str(), "gpt"), [("rpm", 10)], Duration::from_secs(86_400))
                .await;
            lease.unwrap().settle_as_held().await.unwrap();
            start.elapsed()
        });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(all);
    while let Some(served) = waiting.join_next().await {
        assert!(served.unwrap() < Duration::from_secs(2), "everybody is served when the lease returns");
    }
}

/// A settled lease that somebody still had in hand kept a drain waiting.
#[tokio::test(start_paused = true)]
async fn a_settled_lease_in_somebodys_hand_holds_up_no_drain() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    lease.settle_as_held().await.unwrap();
    assert_eq!(limiter.stats().open_leases, 0);
    tokio::time::timeout(Duration::from_secs(60), limiter.drain()).await.unwrap();
    drop(lease);
    assert_eq!(limiter.stats().open_leases, 0);
}

/// A settle that nobody waited for, and an extension after it: the settle was then told too late, and lost.
#[tokio::test(start_paused = true)]
async fn after_an_ending_that_nobody_waited_for_nothing_else_is_done() {
    let (limiter, store) = over_network(Limit::per_day("rpm", 100), 16);
    let mut lease = limiter.acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    store.hang();
    {
        let mut settle = pin!(lease.settle([("rpm", 4)]));
        let polled = settle.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Pending));
    }
    store.come_back();
    for refused in [lease.extend([("rpm", 5)]).await, lease.adjust([("rpm", 5)]).await.map(drop)] {
        assert!(matches!(refused, Err(LimitError::Store(StoreError::Ended { .. }))), "{refused:?}");
    }
    assert!(lease.settle([("rpm", 5)]).await.is_err(), "it was settled at something else");
    assert_eq!(lease.settle([("rpm", 4)]).await.unwrap(), Settled::Now);
    drop(lease);
    limiter.drain().await;
    assert_eq!((available(&limiter).await, limiter.stats().unsettled), (96, 0));
}

/// With the store away and the settler full a settle failed, and settling again was answered as if it had not.
#[tokio::test(start_paused = true)]
async fn a_settle_that_failed_can_be_said_again() {
    let (limiter, store) = over_network(Limit::per_day("rpm", 100), 1);
    let mut first = limiter.acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    let mut second = limiter.acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    store.go_away();
    assert_eq!(first.settle([("rpm", 1)]).await.unwrap(), Settled::Later);
    for _ in 0..2 {
        let failed = second.settle([("rpm", 2)]).await;
        assert!(matches!(failed, Err(LimitError::Unavailable { .. })), "{failed:?}");
    }
    store.come_back();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(second.settle([("rpm", 2)]).await.unwrap(), Settled::Now);
    drop((first, second));
    limiter.drain().await;
    assert_eq!(available(&limiter).await, 97);
}

/// A policy of two limits, drawn and written by one who knows the first only: a version that is told by a draw is
/// read at once, where the store is in the process.
#[tokio::test]
async fn a_policy_written_by_another_limiter_of_this_process_counts_at_once() {
    let store = Memory::new();
    let (one, other) = (Limiter::new(store.clone()), Limiter::new(store));
    let policy = |amount| Policy::new([Limit::per_day("rpm", amount)]).expect("valid");
    one.admin("ops").set_policy(Scope::System, policy(10)).await.unwrap();
    other.spend(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    one.admin("ops").set_policy(Scope::System, policy(5)).await.unwrap();
    assert!(other.spend(("acme", "gpt"), [("rpm", 6)]).await.unwrap_err().is_final());
}

/// A refusal told of the limits that came after the first short one by the rules of before: "never", though it could be
/// had.
#[tokio::test(start_paused = true)]
async fn a_refusal_tells_of_every_limit_by_the_rule_that_holds() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let policy =
        |tpm| Policy::new([Limit::per_minute("rpm", 1), Limit::per_minute("tpm", tpm)]).expect("valid");
    admin.set_policy(Scope::System, policy(100)).await.unwrap();
    limiter.spend(("acme", "gpt"), [("rpm", 1), ("tpm", 1)]).await.unwrap();
    admin.set_policy(Scope::System, policy(1_000)).await.unwrap();
    let error = limiter.acquire(("acme", "gpt"), [("rpm", 1), ("tpm", 500)]).await.unwrap_err();
    assert!(!error.is_final(), "{error}");
    let tpm = &error.limited().unwrap().lines[1].balance;
    assert_eq!((tpm.limit.as_str(), tpm.burst), ("tpm", 1_000));
    let within = Duration::from_secs(600);
    drop(limiter.acquire_within(("acme", "gpt"), [("rpm", 1), ("tpm", 500)], within).await.unwrap());
}

/// Every shape of a limit given with a call had a bucket of its own, for ever.
#[tokio::test]
async fn limits_of_calls_that_are_full_again_are_forgotten_and_their_usage_is_not() {
    let clock = ManualWall::new(Stamp::from_secs(1_800_000_000));
    let store = Memory::with_clock(clock.clone());
    let limiter = Limiter::builder(store).defaults([Limit::per_second("rpm", 1_000)]).build().unwrap();
    let cost = [("rpm", 1)];
    limiter.spend(("acme", "gpt"), cost).await.unwrap();
    for shape in 0..1_000 {
        let limit = Limit::per_second("rpm", 2_000 + shape);
        limiter.request(("acme", "gpt"), &cost).limits([limit]).spend().await.unwrap();
        clock.advance(Duration::from_secs(1));
    }
    assert!(limiter.balances_of_entity("acme").await.unwrap().len() <= 64);
    let (all, paging) = (Stamp::ZERO..Stamp::MAX, tidegate::Paging::default());
    let usage = limiter.usage_of_entity("acme", tidegate::Window::Month, all, &paging).await.unwrap();
    assert_eq!(usage.items[0].tally.units, 1_001);
    // While none is full again there is a bound, and it is told.
    for shape in 0..100 {
        let limit = Limit::per_day("rpm", 2_000 + shape);
        let spent = limiter.request(("acme", "gpt"), &cost).limits([limit]).spend().await;
        if let Err(error) = spent {
            assert_eq!(error.to_string(), "the store is full: 64 limits of one subject");
            return;
        }
    }
    panic!("a hundred limits of one subject at once");
}

/// One who waited slept through another process's change of the policy until the time it was told before.
#[tokio::test(start_paused = true)]
async fn one_who_waits_notices_a_policy_of_others_within_the_time_it_is_remembered() {
    let store = Memory::new();
    let (one, other) = (Limiter::new(store.clone()), Limiter::new(store));
    let policy = |limit| Policy::new([limit]).expect("valid");
    one.admin("ops").set_policy(Scope::System, policy(Limit::per_day("rpm", 24))).await.unwrap();
    one.spend(("acme", "gpt"), [("rpm", 24)]).await.unwrap();
    let start = Instant::now();
    let waiting = tokio::spawn({
        let one = one.clone();
        async move { one.acquire_within(("acme", "gpt"), [("rpm", 1)], Duration::from_secs(7_200)).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    other.admin("ops").set_policy(Scope::System, policy(Limit::per_second("rpm", 24))).await.unwrap();
    drop(waiting.await.unwrap().unwrap());
    assert!(start.elapsed() < Duration::from_secs(62), "{:?}", start.elapsed());
}

/// A debt of more years than there is time was forgotten when it returned, and others' draws with it.
#[tokio::test]
async fn no_more_is_adjusted_or_held_than_can_be_counted() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let mut lease = limiter.acquire(("acme", "gpt"), [("rpm", 5)]).await.unwrap();
    let error = lease.adjust([("rpm", 1 << 40)]).await.unwrap_err();
    assert_eq!(error.to_string(), "1099511627776 units of `rpm`, more than 3652500");
    lease.adjust([("rpm", 3_652_495)]).await.unwrap();
    assert!(lease.adjust([("rpm", 1)]).await.is_err(), "it could not be settled at what it holds");
    let held = lease.held("rpm").unwrap();
    lease.settle([("rpm", held)]).await.unwrap();
}
