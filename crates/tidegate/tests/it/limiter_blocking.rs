//! Threads without a runtime: the same limits apply, and dropped leases are settled.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use tidegate::{
    AdjustStatus, Cost, Limit, LimitError, Limiter, Memory, Outcome, SettleStatus, Slots, Sqlite, Throttle,
    blocking,
};
use tokio::runtime::{Builder, Runtime};

use crate::kit::limiter::{ACME, HookStore, calm, level, memory, over, settled};
use crate::kit::secs;

const THREADS: u64 = 6;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime can be made")
}

/// A limiter on the memory store, and one behind a network with a long deadline, because threads may be slow
/// to run.
fn both(limits: &[Limit]) -> [(Limiter, Memory); 2] {
    let here = Memory::new();
    let at_once =
        Limiter::builder(here.clone()).defaults(limits.to_vec()).build().expect("within the bounds");
    let network = calm();
    let away = memory(&network).clone();
    let builder = over(&network).defaults(limits.to_vec()).store_deadline(secs(60));
    [(at_once, here), (builder.build().expect("within the bounds"), away)]
}

/// Closes the limiter, and checks that nothing is left.
fn check_idle(limiter: &Limiter) {
    runtime().block_on(limiter.drain());
    let stats = limiter.stats();
    let left = (stats.open_leases, stats.waiting, stats.settling, stats.unsettled);
    assert_eq!(left, (0, 0, 0, 0));
}

#[test]
fn threads_on_one_limit_get_exactly_the_burst() {
    for (limiter, store) in both(&[Limit::per_day("rpm", 50)]) {
        let work = |limiter: Limiter| {
            // Enough time to queue behind the other threads and too little for a refill, so only an exhausted
            // limit refuses.
            let one = || limiter.blocking().acquire_within(ACME, [("rpm", 1)], secs(600));
            let leases: Vec<_> = (0..20).filter_map(|_| one().ok()).collect();
            let count = leases.len();
            for mut lease in leases {
                assert_eq!(lease.settle_full().expect("the store is available"), SettleStatus::Now);
            }
            count
        };
        let threads: Vec<_> =
            (0..THREADS).map(|_| limiter.clone()).map(|own| thread::spawn(move || work(own))).collect();
        let granted: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(granted, 50);
        check_idle(&limiter);
        assert_eq!(runtime().block_on(settled(&store, ACME, "rpm")), (50, 50));
        assert_eq!(runtime().block_on(level(&store, ACME, "rpm")), Some((0, 50)));
    }
}

#[test]
fn lease_lifecycle_needs_no_runtime() {
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    let opened = Limiter::over(blocking::open("sqlite::memory:").unwrap()).store_deadline(secs(60));
    let opened = opened.defaults(limits.clone()).build().unwrap();
    for limiter in both(&limits).map(|(limiter, _)| limiter).into_iter().chain([opened]) {
        let limiter = limiter.blocking();
        limiter.spend(ACME, [("tpm", 1)]).unwrap();
        let mut lease = limiter.try_acquire(ACME, [("rpm", 10)]).unwrap();
        assert!(lease.degraded().is_none() && lease.subject().entity.as_str() == "acme");
        lease.extend([("rpm", 5), ("tpm", 2)]).unwrap();
        assert_eq!(lease.adjust([("rpm", -3)]).unwrap(), AdjustStatus::Now);
        lease.renew(secs(600)).unwrap();
        assert_eq!((lease.held("rpm"), lease.held("tpm")), (Some(12), Some(2)));
        assert_eq!(lease.settle([("rpm", 7)]).unwrap(), SettleStatus::Now);
        let mut cancelled = limiter.acquire_within(ACME, [("rpm", 50)], secs(1)).unwrap();
        assert_eq!(cancelled.cancel().unwrap(), SettleStatus::Now);
        let left: Vec<i64> =
            limiter.balances(ACME).unwrap().iter().map(|line| line.balance.available).collect();
        assert_eq!(left, [93, 97]);
        limiter.try_acquire(ACME, [("rpm", 1)]).unwrap().detach();
        assert_eq!(limiter.limiter().stats().open_leases, 0);
        limiter.drain();
    }
}

#[test]
fn request_with_a_known_id_returns_its_lease() {
    for (limiter, _) in both(&[Limit::per_day("rpm", 100)]) {
        let limiter = limiter.blocking();
        let request = || limiter.request(ACME, &[("rpm", 10)]).id(7).deadline(secs(600));
        let lease = request().try_acquire().unwrap();
        let id = lease.id();
        lease.detach();
        let again = request().acquire_within(secs(1)).unwrap();
        assert_eq!((again.id(), again.held("rpm")), (id, Some(10)));
        again.detach();
        let error = limiter.request(ACME, &[("rpm", 1)]).deadline(secs(0)).spend().unwrap_err();
        assert!(matches!(error, LimitError::Deadline { .. }), "{error}");
        assert_eq!(limiter.balances(ACME).unwrap()[0].balance.available, 90, "drawn once");
    }
}

#[test]
fn lease_dropped_on_plain_thread_is_cancelled() {
    for (limiter, store) in both(&[Limit::per_day("rpm", 1_000)]) {
        let own = limiter.clone();
        let work = move || {
            for _ in 0..20 {
                drop(own.blocking().acquire_within(ACME, [("rpm", 10)], secs(600)).expect("enough units"));
            }
            let _panics =
                own.blocking().acquire_within(ACME, [("rpm", 10)], secs(600)).expect("enough units");
            panic!("injected panic");
        };
        assert!(thread::spawn(work).join().is_err());
        check_idle(&limiter);
        assert_eq!(runtime().block_on(level(&store, ACME, "rpm")), Some((1_000, 0)));
    }
}

#[test]
fn blocking_acquire_waits_for_units() {
    for (limiter, store) in both(&[Limit::per_second("rpm", 1_000).burst(2)]) {
        let work = |limiter: &Limiter| {
            let mut lease = limiter
                .blocking()
                .acquire_within(ACME, [("rpm", 2)], secs(600))
                .expect("ten minutes is enough");
            lease.settle_full().expect("the store is available");
        };
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| work(&limiter));
            }
        });
        check_idle(&limiter);
        assert_eq!(runtime().block_on(settled(&store, ACME, "rpm")), (2 * THREADS, THREADS));
    }
}

#[test]
fn blocking_refusals_match_async_ones() {
    for (limiter, _) in both(&[Limit::per_day("rpm", 50)]) {
        let acquire = |name: &'static str, units: u64| {
            limiter.blocking().acquire_within(ACME, [(name, units)], secs(60)).map(drop)
        };
        assert!(matches!(acquire("rpm", 51), Err(LimitError::TooLarge(_))));
        assert!(matches!(acquire("typo", 1), Err(LimitError::Cost(_))));
        runtime().block_on(limiter.spend(ACME, [("rpm", 50)])).unwrap();
        assert!(matches!(acquire("rpm", 1), Err(LimitError::Limited(_))));
        limiter.close();
        assert!(matches!(acquire("rpm", 1), Err(LimitError::Closed)));
    }
}

#[test]
fn silent_store_blocks_thread_only_until_deadline() {
    let store = HookStore::new(&Memory::new(), |_, _| crate::kit::limiter::Act::Hang);
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 50)])
        .store_deadline(Duration::from_millis(1))
        .build()
        .unwrap();
    let error = limiter.blocking().acquire_within(ACME, [("rpm", 1)], secs(600)).unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "{error}");
}

#[test]
fn blocking_call_inside_runtime_panics() {
    for (limiter, store) in both(&[Limit::per_day("rpm", 50)]) {
        let answer = runtime().block_on(async {
            catch_unwind(AssertUnwindSafe(|| {
                limiter.blocking().acquire_within(ACME, [("rpm", 1)], secs(1)).map(drop)
            }))
        });
        assert!(answer.is_err());
        check_idle(&limiter);
        assert_eq!(runtime().block_on(level(&store, ACME, "rpm")), None);
    }
}

#[test]
fn blocking_call_in_spawn_blocking_works() {
    for (limiter, store) in both(&[Limit::per_second("rpm", 1_000).burst(1)]) {
        let own = limiter.clone();
        runtime().block_on(async move {
            let work = move || {
                for _ in 0..3 {
                    drop(
                        own.blocking()
                            .acquire_within(ACME, [("rpm", 1)], secs(600))
                            .expect("ten minutes is enough"),
                    );
                }
            };
            tokio::task::spawn_blocking(work).await.expect("no panic in `spawn_blocking`");
        });
        check_idle(&limiter);
        assert_eq!(runtime().block_on(settled(&store, ACME, "rpm")), (0, 0));
    }
}

#[test]
fn threads_use_the_configured_runtime() {
    let chosen = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let store = calm();
    let limiter = over(&store)
        .defaults([Limit::per_second("rpm", 1_000).burst(1)])
        .store_deadline(secs(60))
        .runtime(chosen.handle().clone())
        .build()
        .unwrap();
    let limiter = Arc::new(limiter);
    for _ in 0..3 {
        drop(limiter.blocking().acquire_within(ACME, [("rpm", 1)], secs(600)).unwrap());
    }
    check_idle(&limiter);
}

/// Runs a future on this thread, without a runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn polling_without_runtime_works_unless_it_must_wait() {
    // Regression: an undocumented panic, because the first call of a remote store needed a timer.
    let folder = tempfile::tempdir().unwrap();
    let store = runtime().block_on(Sqlite::open(folder.path().join("limits.db"))).unwrap();
    let limiter =
        crate::kit::limiter::with_long_deadline(store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let mut lease = block_on(limiter.try_acquire(ACME, [("rpm", 2)])).unwrap();
    block_on(lease.extend([("rpm", 1)])).unwrap();
    assert_eq!(block_on(lease.settle_full()).unwrap(), SettleStatus::Now);
    block_on(limiter.spend(ACME, [("rpm", 1)])).unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(2)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    for permit in
        [block_on(joined.try_acquire(ACME, Cost::request())), block_on(joined.acquire(ACME, Cost::request()))]
    {
        block_on(permit.unwrap().settle(Outcome::success())).unwrap();
    }
    let hangs = HookStore::new(&Memory::new(), |_, _| crate::kit::limiter::Act::Hang);
    let limiter_of_none = over(&hangs).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let error = block_on(limiter_of_none.try_acquire(ACME, [("rpm", 1)])).unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "its deadline applies as well: {error}");
    check_idle(&limiter);
}
