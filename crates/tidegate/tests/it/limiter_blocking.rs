//! Threads without a runtime: they are limited like everybody else, and what they drop is settled all the same.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use tidegate::{
    Adjusted, Cost, Limit, LimitError, Limiter, Memory, Outcome, Settled, Slots, Sqlite, Throttle, blocking,
};
use tokio::runtime::{Builder, Runtime};

use crate::kit::limiter::{ACME, Hooked, calm, level, memory, over, settled};
use crate::kit::secs;

const THREADS: u64 = 6;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime can be made")
}

/// A limiter on the memory store, and one behind a network. Its deadline is long: threads may be slow to run.
fn both(limits: &[Limit]) -> [(Limiter, Memory); 2] {
    let here = Memory::new();
    let at_once =
        Limiter::builder(here.clone()).defaults(limits.to_vec()).build().expect("within the bounds");
    let network = calm();
    let away = memory(&network).clone();
    let builder = over(&network).defaults(limits.to_vec()).store_deadline(secs(60));
    [(at_once, here), (builder.build().expect("within the bounds"), away)]
}

/// Closes, and waits until nothing is under way.
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
            // Time to queue behind the other threads, and too little for a refill: only a spent limit refuses.
            let one = || limiter.blocking().acquire_within(ACME, [("rpm", 1)], secs(600));
            let leases: Vec<_> = (0..20).filter_map(|_| one().ok()).collect();
            let count = leases.len();
            for mut lease in leases {
                assert_eq!(lease.settle_as_held().expect("the store is available"), Settled::Now);
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
fn every_step_of_a_lease_needs_no_runtime() {
    let limits = [Limit::per_day("rpm", 100), Limit::per_day("tpm", 100)];
    let opened = Limiter::over(blocking::open("sqlite::memory:").unwrap()).store_deadline(secs(60));
    let opened = opened.defaults(limits.clone()).build().unwrap();
    for limiter in both(&limits).map(|(limiter, _)| limiter).into_iter().chain([opened]) {
        let limiter = limiter.blocking();
        limiter.spend(ACME, [("tpm", 1)]).unwrap();
        let mut lease = limiter.acquire(ACME, [("rpm", 10)]).unwrap();
        assert!(lease.degraded().is_none() && lease.subject().entity.as_str() == "acme");
        lease.extend([("rpm", 5), ("tpm", 2)]).unwrap();
        assert_eq!(lease.adjust([("rpm", -3)]).unwrap(), Adjusted::Now);
        lease.renew(secs(600)).unwrap();
        assert_eq!((lease.held("rpm"), lease.held("tpm")), (Some(12), Some(2)));
        assert_eq!(lease.settle([("rpm", 7)]).unwrap(), Settled::Now);
        let mut cancelled = limiter.acquire_within(ACME, [("rpm", 50)], secs(1)).unwrap();
        assert_eq!(cancelled.cancel().unwrap(), Settled::Now);
        let left: Vec<i64> =
            limiter.balances(ACME).unwrap().iter().map(|line| line.balance.available).collect();
        assert_eq!(left, [93, 97]);
        limiter.acquire(ACME, [("rpm", 1)]).unwrap().detach();
        assert_eq!(limiter.limiter().stats().open_leases, 0);
        limiter.drain();
    }
}

#[test]
fn a_lease_dropped_on_a_plain_thread_returns() {
    for (limiter, store) in both(&[Limit::per_day("rpm", 1_000)]) {
        let own = limiter.clone();
        let work = move || {
            for _ in 0..20 {
                drop(own.blocking().acquire_within(ACME, [("rpm", 10)], secs(600)).expect("there is enough"));
            }
            let _panics =
                own.blocking().acquire_within(ACME, [("rpm", 10)], secs(600)).expect("there is enough");
            panic!("the work has a bug, as the test planned");
        };
        assert!(thread::spawn(work).join().is_err());
        check_idle(&limiter);
        assert_eq!(runtime().block_on(level(&store, ACME, "rpm")), Some((1_000, 0)));
    }
}

#[test]
fn a_thread_waits_for_what_is_short() {
    for (limiter, store) in both(&[Limit::per_second("rpm", 1_000).burst(2)]) {
        let work = |limiter: &Limiter| {
            let mut lease = limiter
                .blocking()
                .acquire_within(ACME, [("rpm", 2)], secs(600))
                .expect("ten minutes will do");
            lease.settle_as_held().expect("the store is available");
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
fn refusals_are_the_same_as_elsewhere() {
    for (limiter, _) in both(&[Limit::per_day("rpm", 50)]) {
        let ask = |name: &'static str, units: u64| {
            limiter.blocking().acquire_within(ACME, [(name, units)], secs(60)).map(drop)
        };
        assert!(matches!(ask("rpm", 51), Err(LimitError::TooLarge(_))));
        assert!(matches!(ask("typo", 1), Err(LimitError::Cost(_))));
        runtime().block_on(limiter.spend(ACME, [("rpm", 50)])).unwrap();
        assert!(matches!(ask("rpm", 1), Err(LimitError::Limited(_))));
        limiter.close();
        assert!(matches!(ask("rpm", 1), Err(LimitError::Closed)));
    }
}

#[test]
fn a_store_that_hangs_does_not_hold_a_thread_beyond_its_deadline() {
    let store = Hooked::new(&Memory::new(), |_, _| crate::kit::limiter::Act::Hang);
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 50)])
        .store_deadline(Duration::from_millis(1))
        .build()
        .unwrap();
    let error = limiter.blocking().acquire_within(ACME, [("rpm", 1)], secs(600)).unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "{error}");
}

#[test]
fn it_panics_within_a_runtime_and_takes_nothing() {
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
fn a_thread_for_blocking_work_may_block() {
    for (limiter, store) in both(&[Limit::per_second("rpm", 1_000).burst(1)]) {
        let own = limiter.clone();
        runtime().block_on(async move {
            let work = move || {
                for _ in 0..3 {
                    drop(
                        own.blocking()
                            .acquire_within(ACME, [("rpm", 1)], secs(600))
                            .expect("ten minutes will do"),
                    );
                }
            };
            tokio::task::spawn_blocking(work).await.expect("it does not panic there");
        });
        check_idle(&limiter);
        assert_eq!(runtime().block_on(settled(&store, ACME, "rpm")), (0, 0));
    }
}

#[test]
fn threads_use_the_runtime_that_was_chosen() {
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

/// Runs a future on this thread, with no runtime anywhere near.
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
fn a_thread_that_polls_for_itself_is_served_where_nothing_has_to_be_waited_for_but_the_store() {
    // Nothing was said of a panic, and the first call of a store that was not in this process did: it wanted a timer.
    let folder = tempfile::tempdir().unwrap();
    let store = runtime().block_on(Sqlite::open(folder.path().join("limits.db"))).unwrap();
    let limiter = crate::kit::limiter::patient(store).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let mut lease = block_on(limiter.acquire(ACME, [("rpm", 2)])).unwrap();
    block_on(lease.extend([("rpm", 1)])).unwrap();
    assert_eq!(block_on(lease.settle_as_held()).unwrap(), Settled::Now);
    block_on(limiter.spend(ACME, [("rpm", 1)])).unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(2)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    for permit in
        [block_on(joined.try_acquire(ACME, Cost::request())), block_on(joined.acquire(ACME, Cost::request()))]
    {
        block_on(permit.unwrap().settle(Outcome::success())).unwrap();
    }
    let hangs = Hooked::new(&Memory::new(), |_, _| crate::kit::limiter::Act::Hang);
    let limiter_of_none = over(&hangs).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let error = block_on(limiter_of_none.acquire(ACME, [("rpm", 1)])).unwrap_err();
    assert!(matches!(error, LimitError::Unavailable { .. }), "its deadline holds there too: {error}");
    check_idle(&limiter);
}
