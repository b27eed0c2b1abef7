//! Regression tests of the limiter, each with the defect that it guards against.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::store::wrap::{FaultPlan, Faulty};
use tidegate::{
    Entity, EntityId, Expect, Limit, LimitError, Limiter, Memory, Policy, Scope, SettleStatus, Stamp,
    StoreError,
};
use tokio::time::Instant;

fn id(name: &str) -> EntityId {
    EntityId::new(name).expect("a valid name")
}

/// A limiter over a networked store, and the fault injector of that store.
fn over_network(limit: Limit, settler_max: usize) -> (Limiter, Arc<Faulty<Memory>>) {
    let store = Arc::new(Faulty::new(Memory::new(), FaultPlan::seeded(1)).expect("no faults"));
    let limiter = Limiter::builder(Arc::clone(&store)).defaults([limit]).settler_max(settler_max).build();
    (limiter.expect("within the bounds"), store)
}

async fn available(limiter: &Limiter) -> i64 {
    limiter.balances(("acme", "gpt")).await.expect("the store is available")[0].balance.available
}

/// Ids carry their creation time, so that the store knows which ones it may have evicted. With the store's
/// clock ahead of the system's, every new id looked evicted once enough leases had ended.
#[tokio::test]
async fn new_lease_can_draw_after_many_have_ended() {
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
    // This limiter has not read the store's time for long.
    idle.spend(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
}

/// A return to a parent woke only one of its waiters, and the others slept until their own timers.
#[tokio::test(start_paused = true)]
async fn return_to_parent_wakes_all_it_can_serve() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let admin = limiter.admin("ops");
    admin.put_entity(&Entity::new(id("org")), Expect::Any).await.unwrap();
    for child in 0..10 {
        let child = Entity::new(id(&format!("child-{child}"))).parent(id("org")).cascade();
        admin.put_entity(&child, Expect::Any).await.unwrap();
    }
    let all = limiter.try_acquire(("org", "gpt"), [("rpm", 100)]).await.unwrap();
    let start = Instant::now();
    let mut waiting = tokio::task::JoinSet::new();
    for child in 0..10 {
        let limiter = limiter.clone();
        waiting.spawn(async move {
            let name = format!("child-{child}");
            let lease = limiter
                .acquire_within((name.as_str(), "gpt"), [("rpm", 10)], Duration::from_secs(86_400))
                .await;
            lease.unwrap().settle_full().await.unwrap();
            start.elapsed()
        });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(all);
    while let Some(served) = waiting.join_next().await {
        assert!(served.unwrap() < Duration::from_secs(2), "all waiters are served when the lease returns");
    }
}

/// A settled lease that was still held kept a drain waiting.
#[tokio::test(start_paused = true)]
async fn settled_lease_in_scope_does_not_block_drain() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 100)]).build().unwrap();
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("rpm", 1)]).await.unwrap();
    lease.settle_full().await.unwrap();
    assert_eq!(limiter.stats().open_leases, 0);
    tokio::time::timeout(Duration::from_secs(60), limiter.drain()).await.unwrap();
    drop(lease);
    assert_eq!(limiter.stats().open_leases, 0);
}

/// An extension after a dropped settle made the settle arrive too late, so it was lost.
#[tokio::test(start_paused = true)]
async fn no_step_is_accepted_after_a_dropped_settle() {
    let (limiter, store) = over_network(Limit::per_day("rpm", 100), 16);
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
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
    assert!(lease.settle([("rpm", 5)]).await.is_err(), "it was settled at another amount");
    assert_eq!(lease.settle([("rpm", 4)]).await.unwrap(), SettleStatus::Now);
    drop(lease);
    limiter.drain().await;
    assert_eq!((available(&limiter).await, limiter.stats().unsettled), (96, 0));
}

/// During an outage with a full settler a settle failed, and the next one reported success.
#[tokio::test(start_paused = true)]
async fn failed_settle_can_be_retried() {
    let (limiter, store) = over_network(Limit::per_day("rpm", 100), 1);
    let mut first = limiter.try_acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    let mut second = limiter.try_acquire(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    store.go_away();
    assert_eq!(first.settle([("rpm", 1)]).await.unwrap(), SettleStatus::Later);
    for _ in 0..2 {
        let failed = second.settle([("rpm", 2)]).await;
        assert!(matches!(failed, Err(LimitError::Unavailable { .. })), "{failed:?}");
    }
    store.come_back();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(second.settle([("rpm", 2)]).await.unwrap(), SettleStatus::Now);
    drop((first, second));
    limiter.drain().await;
    assert_eq!(available(&limiter).await, 97);
}

/// A policy of two limits, drawn by a limiter that knows only the first: on an in-process store, a version
/// reported by a draw is read at once.
#[tokio::test]
async fn policy_of_another_limiter_in_process_applies_now() {
    let store = Memory::new();
    let (one, other) = (Limiter::new(store.clone()), Limiter::new(store));
    let policy = |amount| Policy::new([Limit::per_day("rpm", amount)]).expect("valid");
    one.admin("ops").set_policy(Scope::System, policy(10)).await.unwrap();
    other.spend(("acme", "gpt"), [("rpm", 10)]).await.unwrap();
    one.admin("ops").set_policy(Scope::System, policy(5)).await.unwrap();
    assert!(other.spend(("acme", "gpt"), [("rpm", 6)]).await.unwrap_err().is_final());
}

/// A refusal reported the limits after the first exhausted one by the old policy: "never", although it was
/// possible.
#[tokio::test(start_paused = true)]
async fn refusal_reports_every_limit_by_current_policy() {
    let limiter = Limiter::new(Memory::new());
    let admin = limiter.admin("ops");
    let policy =
        |tpm| Policy::new([Limit::per_minute("rpm", 1), Limit::per_minute("tpm", tpm)]).expect("valid");
    admin.set_policy(Scope::System, policy(100)).await.unwrap();
    limiter.spend(("acme", "gpt"), [("rpm", 1), ("tpm", 1)]).await.unwrap();
    admin.set_policy(Scope::System, policy(1_000)).await.unwrap();
    let error = limiter.try_acquire(("acme", "gpt"), [("rpm", 1), ("tpm", 500)]).await.unwrap_err();
    assert!(!error.is_final(), "{error}");
    let tpm = &error.limited().unwrap().lines[1].balance;
    assert_eq!((tpm.limit.as_str(), tpm.burst), ("tpm", 1_000));
    let within = Duration::from_secs(600);
    drop(limiter.acquire_within(("acme", "gpt"), [("rpm", 1), ("tpm", 500)], within).await.unwrap());
}

/// Every per-call limit kept its bucket forever.
#[tokio::test]
async fn full_per_call_buckets_are_evicted_without_usage() {
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
    // Their number is bounded while none is full again, and reaching the bound is an error.
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

/// A waiter slept through another process's policy change until its earlier retry time.
#[tokio::test(start_paused = true)]
async fn waiter_notices_remote_policy_within_cache_ttl() {
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

/// A debt of more years than time can represent was lost on return, and the draws of others with it.
#[tokio::test]
async fn adjustments_are_bounded_by_representable_debt() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let mut lease = limiter.try_acquire(("acme", "gpt"), [("rpm", 5)]).await.unwrap();
    let error = lease.adjust([("rpm", 1 << 40)]).await.unwrap_err();
    assert_eq!(error.to_string(), "1099511627776 units of `rpm`, more than 3652500");
    lease.adjust([("rpm", 3_652_495)]).await.unwrap();
    assert!(lease.adjust([("rpm", 1)]).await.is_err(), "it could not be settled in full");
    let held = lease.held("rpm").unwrap();
    lease.settle([("rpm", held)]).await.unwrap();
}
