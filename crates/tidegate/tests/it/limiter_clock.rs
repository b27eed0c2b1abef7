//! Clocks that are set back and processes that restart: the limiter continues from the stored state.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tidegate::store::{AnchoredWall, ManualWall, Store, WallClock};
use tidegate::{Limit, LimitError, Limiter, Memory, OnExpiry, Scope, Stamp, StoreError};

use crate::kit::limiter::{ACME, HookStore, level, over, policy, settled};
use crate::kit::secs;

const START: Stamp = Stamp::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3_600);

/// The host's clock, which the tests set.
static HOST: LazyLock<ManualWall> = LazyLock::new(|| ManualWall::new(START));

#[tokio::test]
async fn clock_set_back_grants_no_extra_refill() {
    let clock = AnchoredWall::new((|| HOST.now()) as fn() -> Stamp);
    let limiter =
        Limiter::builder(Memory::with_clock(clock)).defaults([Limit::per_minute("rpm", 60)]).build().unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 60)]).await.unwrap();
    HOST.advance(secs(10));
    assert_eq!(limiter.balances(ACME).await.unwrap()[0].balance.available, 10);
    HOST.set(Stamp::from_secs(1_800_000_010 - 3_600));
    // Nothing was refilled or lost.
    assert_eq!(limiter.balances(ACME).await.unwrap()[0].balance.available, 10);
    let error = limiter.try_acquire(ACME, [("rpm", 11)]).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(secs(1)), "and not an hour");
    // Refills continue from there, and leases expire on time.
    HOST.advance(secs(1));
    limiter.spend(ACME, [("rpm", 11)]).await.unwrap();
    lease.settle([("rpm", 50)]).await.unwrap();
    assert_eq!(limiter.balances(ACME).await.unwrap()[0].balance.available, 10);
    for back in 1..=3 {
        HOST.set(Stamp::from_secs(1_700_000_000 - back * 1_000));
        drop(limiter.try_acquire(ACME, [("rpm", 1)]).await.unwrap());
        // Second by second, because idle time would be absorbed.
        for _ in 0..5 {
            HOST.advance(secs(1));
            limiter.balances(ACME).await.unwrap();
        }
        let refilled = i64::try_from(back * 5).unwrap();
        assert_eq!(limiter.balances(ACME).await.unwrap()[0].balance.available, 10 + refilled);
    }
}

#[tokio::test]
async fn clock_jump_ahead_refills_at_most_the_burst() {
    let clock = ManualWall::new(START);
    let limiter = Limiter::builder(Memory::with_clock(clock.clone()))
        .defaults([Limit::per_minute("rpm", 60)])
        .build()
        .unwrap();
    let mut lease = limiter.try_acquire(ACME, [("rpm", 60)]).await.unwrap();
    clock.advance(HOUR * 24 * 365);
    assert_eq!(limiter.balances(ACME).await.unwrap()[0].balance.available, 60);
    let error = lease.settle([("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Store(StoreError::Ended { .. })), "{error}");
}

#[tokio::test(start_paused = true)]
async fn new_process_continues_and_expires_old_leases() {
    for (on_expiry, left) in [(OnExpiry::Settle, 30), (OnExpiry::Return, 70)] {
        let clock = ManualWall::new(START);
        let memory = Memory::with_clock(clock.clone());
        // The store outlives the processes, like a networked store.
        let store = HookStore::new(&memory, |_, _| crate::kit::limiter::Act::Pass);
        let old = over(&store).build().unwrap();
        let rules = policy([Limit::per_day("rpm", 100)]).on_expiry(on_expiry);
        old.admin("ops").set_policy(Scope::System, rules).await.unwrap();
        old.spend(ACME, [("rpm", 30)]).await.unwrap();
        // The old process is killed: its lease is neither settled nor dropped.
        std::mem::forget(old.try_acquire(ACME, [("rpm", 40)]).await.unwrap());
        drop(old);
        let new = Limiter::over(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
        assert_eq!(new.balances(ACME).await.unwrap()[0].balance.available, 30);
        assert!(new.try_acquire(ACME, [("rpm", 31)]).await.is_err());
        clock.advance(secs(3_599));
        new.store().sweep(100).await.unwrap();
        assert_eq!(settled(&memory, ACME, "rpm").await, (30, 1), "its deadline is an hour away");
        clock.advance(secs(1));
        new.store().sweep(100).await.unwrap();
        // An hour refills four, rounded down.
        let (available, _) = level(&memory, ACME, "rpm").await.unwrap();
        assert_eq!(available, left + 4);
        let (units, leases) = settled(&memory, ACME, "rpm").await;
        assert_eq!((units, leases), if on_expiry == OnExpiry::Settle { (70, 2) } else { (30, 1) });
    }
}
