//! Clocks: read once per decision and only where time matters, and never trusted to run forward.

use std::thread;

use tidegate::store::wrap::Verb;
use tidegate::{
    Auto, Budget, Builder, Circuit, Clock, Controller, Cost, FastClock, Instant, Keyed, Limit, ManualClock,
    Memory, Outcome, Pace, Random, Rate, Refused, Slots, Throttle, TokioClock,
};

use crate::kit::limiter::{ACME, Act, HookStore, Moment, over};
use crate::kit::{Caller, REQUEST, millis, secs, settle_tasks};

#[test]
fn throttle_without_timed_gates_reads_no_clock() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(clock.clone()).build().unwrap();
    let permit = throttle.try_acquire(REQUEST).unwrap();
    let mut waiter = Caller::queued(&throttle, REQUEST);
    permit.settle(Outcome::success());
    drop(waiter.permit().unwrap());
    assert_eq!((clock.readings(), clock.sleeps()), (0, 0));
    let held = throttle.try_acquire(REQUEST).unwrap();
    assert!(throttle.try_acquire(REQUEST).is_err());
    drop(held);
    assert_eq!(clock.readings(), 0, "a refusal does not read the clock either");
    // The clock is read only while a pause lasts.
    throttle.pause(secs(5));
    assert!(throttle.try_acquire(REQUEST).is_err());
    clock.advance(secs(60));
    drop(throttle.try_acquire(REQUEST).unwrap());
    let readings = clock.readings();
    drop(throttle.try_acquire(REQUEST).unwrap());
    assert_eq!(clock.readings(), readings);
}

#[test]
fn decision_reads_clock_once() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .rate(Rate::per_second(9))
        .pace(Pace::every(millis(1)))
        .budget(Budget::tokens(9, secs(1)))
        .clock(clock.clone())
        .build()
        .unwrap();
    let permit = throttle.try_acquire(REQUEST).unwrap();
    assert_eq!(clock.readings(), 1);
    permit.settle(Outcome::success());
    assert_eq!(clock.readings(), 2);
    // The fast path of a plain throttle passes its reading to the slow path when it cannot decide.
    let plain = Throttle::builder().rate(Rate::per_hour(1)).clock(clock.clone()).build().unwrap();
    plain.try_acquire(REQUEST).unwrap().settle(Outcome::success());
    assert_eq!(clock.readings(), 3);
    let _waiter = Caller::queued(&plain, REQUEST);
    assert_eq!(clock.readings(), 6, "one on acquire, one on entering the queue, and one for the timer");
}

#[test]
fn clock_step_back_refills_nothing() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(4))
        .rate(Rate::per_second(1))
        .budget(Budget::tokens(10, secs(10)))
        .circuit(Circuit::after_failures(1).open_for(secs(5)))
        .total(10)
        .clock(clock.clone())
        .build()
        .unwrap();
    clock.advance(secs(100));
    let permit = throttle.try_acquire(REQUEST).unwrap();
    clock.set(Instant::ZERO);
    assert!(throttle.try_acquire(REQUEST).is_err(), "the bucket is as empty as before");
    permit.settle(Outcome::failure());
    assert_eq!(
        throttle.try_acquire(REQUEST).err(),
        Some(Refused::CircuitOpen { retry_after: secs(105) }),
        "the clock has to catch up first"
    );
    clock.set(Instant::ZERO + secs(104));
    assert!(throttle.try_acquire(REQUEST).is_err());
    clock.set(Instant::ZERO + secs(105));
    assert!(throttle.try_acquire(REQUEST).is_ok(), "refills resume once the clock has caught up");
}

#[tokio::test]
async fn sleeper_is_served_on_time_after_clock_step_back() {
    let clock = ManualClock::new();
    clock.advance(secs(50));
    let throttle = Throttle::builder().rate(Rate::per_second(1)).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut waiter = Caller::queued(&throttle, REQUEST);
    settle_tasks().await;
    clock.set(Instant::ZERO);
    settle_tasks().await;
    assert!(waiter.permit().is_none());
    clock.set(Instant::ZERO + secs(51));
    settle_tasks().await;
    assert!(waiter.permit().is_some());
}

#[tokio::test(start_paused = true)]
async fn throttle_follows_paused_tokio_time() {
    let throttle = Throttle::builder().pace(Pace::every(secs(3_600))).build().unwrap();
    let start = tokio::time::Instant::now();
    for _ in 0..24 {
        drop(throttle.acquire(REQUEST).await.unwrap());
    }
    assert_eq!(start.elapsed(), secs(23 * 3_600));
}

/// The timer is a task of the head's runtime. When that runtime shuts down, the next head takes the timer
/// over in its own runtime.
#[test]
fn timer_moves_when_its_runtime_shuts_down() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().pace(Pace::every(secs(1))).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let first = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let second = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let doomed = throttle.clone();
    let head = first.spawn(async move { doomed.acquire(REQUEST).await.map(|_| ()) });
    first.block_on(async {
        while throttle.snapshot().waiting == 0 || clock.sleeping() == 0 {
            tokio::task::yield_now().await;
        }
    });
    let survivor = throttle.clone();
    let task = second.spawn(async move { survivor.acquire(REQUEST).await.map(|_| ()) });
    second.block_on(settle_tasks());
    assert_eq!(throttle.snapshot().waiting, 2);
    // Returns when the worker has ended, and all tasks of the runtime with it.
    first.shutdown_timeout(secs(60));
    assert!(second.block_on(head).is_err(), "the head is cancelled with its runtime");
    second.block_on(settle_tasks());
    assert_eq!((throttle.snapshot().waiting, clock.sleeping()), (1, 1), "the timer has moved");
    clock.advance(secs(1));
    second.block_on(task).unwrap().unwrap();
}

/// Two current-thread runtimes run only inside `block_on`: a timer task left behind in the first would sleep
/// forever.
#[test]
fn timer_leaves_runtime_that_is_not_driven() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().pace(Pace::every(secs(1))).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let one = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let two = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (first, second) = (throttle.clone(), throttle.clone());
    let head = one.spawn(async move { first.acquire(REQUEST).await.map(|_| ()) });
    one.block_on(settle_tasks());
    let next = two.spawn(async move { second.acquire(REQUEST).await.map(|_| ()) });
    two.block_on(settle_tasks());
    clock.advance(secs(1));
    one.block_on(head).unwrap().unwrap();
    // The first runtime is not driven from here on.
    two.block_on(settle_tasks());
    clock.advance(secs(1));
    two.block_on(next).unwrap().unwrap();
}

#[test]
fn blocking_threads_share_the_queue() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().pace(Pace::every(secs(1))).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let threads: Vec<_> = (0..4)
        .map(|index| {
            let worker = throttle.clone();
            let thread = thread::spawn(move || worker.acquire_blocking(REQUEST).map(|_| ()));
            while throttle.snapshot().waiting <= index {
                thread::yield_now();
            }
            thread
        })
        .collect();
    for (index, thread) in threads.into_iter().enumerate() {
        assert_eq!(usize::try_from(throttle.snapshot().waiting).unwrap(), 4 - index);
        clock.advance(secs(1));
        thread.join().unwrap().unwrap();
    }
}

#[test]
fn blocking_acquire_times_out_at_deadline() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).clock(clock.clone()).build().unwrap();
    let held = throttle.try_acquire(REQUEST).unwrap();
    let worker = throttle.clone();
    let thread = thread::spawn(move || worker.acquire_blocking_within(REQUEST, secs(2)).map(|_| ()));
    while clock.sleeping() == 0 {
        thread::yield_now();
    }
    clock.advance(secs(2));
    assert!(matches!(thread.join().unwrap(), Err(Refused::Limited { .. })));
    assert_eq!(throttle.snapshot().waiting, 0);
    drop(held);
    assert!(throttle.acquire_blocking(REQUEST).is_ok());
}

#[test]
fn timer_moves_between_thread_and_task() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().pace(Pace::every(secs(1))).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let waits_for = |waiting: u32| {
        while throttle.snapshot().waiting != waiting {
            thread::yield_now();
        }
    };
    let (one, two, three) = (throttle.clone(), throttle.clone(), throttle.clone());
    let first = thread::spawn(move || one.acquire_blocking(REQUEST).map(|_| ()));
    waits_for(1);
    let second = runtime.spawn(async move { two.acquire(REQUEST).await.map(|_| ()) });
    waits_for(2);
    let third = thread::spawn(move || three.acquire_blocking(REQUEST).map(|_| ()));
    waits_for(3);
    // The current head sleeps on the clock; each step admits exactly one caller.
    let steps = |waiting: u32| {
        while clock.sleeping() == 0 {
            thread::yield_now();
        }
        clock.advance(secs(1));
        waits_for(waiting);
    };
    steps(2);
    first.join().unwrap().unwrap();
    steps(1);
    runtime.block_on(second).unwrap().unwrap();
    steps(0);
    third.join().unwrap().unwrap();
}

#[tokio::test]
async fn fast_clock_advances_and_wakes_sleepers() {
    let clock = FastClock::new();
    let start = clock.now();
    clock.sleep_until(start + millis(3)).await;
    assert!(clock.now() >= start + millis(3), "the clock has reached the wake-up time");
    let throttle =
        Throttle::builder().rate(Rate::per_second(200).burst(1)).clock(clock.clone()).build().unwrap();
    for _ in 0..4 {
        drop(throttle.acquire(REQUEST).await.unwrap());
    }
    assert!(clock.now() >= start + millis(18), "four entries at 200/s take at least 15 ms more");
    assert!(thread::spawn(move || throttle.acquire_blocking(REQUEST).is_ok()).join().unwrap());
}

#[tokio::test]
async fn sleep_until_max_instant_stays_pending() {
    for clock in [Box::new(TokioClock::new()) as Box<dyn Clock>, Box::new(FastClock::new())] {
        let mut sleep = clock.sleep_until(Instant::MAX);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(sleep.as_mut().poll(&mut context).is_pending());
    }
}

/// A panic inside the timer task would go unnoticed, so the call that needs the timer starts its first sleep.
#[test]
fn runtime_without_timer_panics_in_caller() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let throttle = Throttle::builder().rate(Rate::per_day(1)).build().unwrap();
    let worker = throttle.clone();
    let ended = runtime.block_on(async move {
        drop(worker.try_acquire(REQUEST).unwrap());
        tokio::spawn(async move { worker.acquire(REQUEST).await.map(|_| ()) }).await
    });
    assert!(ended.unwrap_err().is_panic());
    assert_eq!(throttle.snapshot().waiting, 0, "the caller has left the queue");
}

/// A sleep that returns too early is restarted, with a yield in between.
#[tokio::test]
async fn early_returning_sleeps_do_not_spin() {
    #[derive(Debug)]
    struct EarlyClock(ManualClock);
    impl Clock for EarlyClock {
        fn now(&self) -> Instant {
            self.0.now()
        }
        fn sleep_until(&self, _: Instant) -> tidegate::Sleep {
            Box::pin(std::future::ready(()))
        }
    }
    let time = ManualClock::new();
    let throttle =
        Throttle::builder().rate(Rate::per_second(1)).clock(EarlyClock(time.clone())).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut waiter = Caller::queued(&throttle, REQUEST);
    settle_tasks().await;
    assert!(waiter.permit().is_none());
    time.advance(secs(1));
    settle_tasks().await;
    assert!(waiter.permit().is_some());
}

/// The clock before it is set back by 90,000 s.
const LATE: Instant = Instant::from_nanos(100_000 * 1_000_000_000);

/// Sets the clock back after `use_up`, and fails unless the first refusal's retry time is enough.
#[track_caller]
fn check_set_back<P>(
    clock: &ManualClock,
    acquire: impl Fn() -> Result<P, Refused>,
    use_up: impl FnOnce(),
    refusals: u32,
) {
    use_up();
    clock.set(Instant::ZERO + secs(10_000));
    let mut seen = 0;
    while let Err(refused) = acquire() {
        let after = refused.retry_after().expect("time decides");
        assert!(seen > 0 || after >= secs(90_000), "{refused}");
        clock.advance(after);
        seen += 1;
        assert!(seen <= refusals, "{refused}");
    }
    assert!(seen > 0);
}

fn late_clock() -> ManualClock {
    let clock = ManualClock::new();
    clock.set(LATE);
    clock
}

/// Regression: the wait was counted from the latest time seen, so a caller was sent away again and again until
/// the clock had caught up.
#[test]
fn retry_after_counts_from_a_clock_that_was_set_back() {
    let budget = Budget::tokens(9, secs(5));
    let open = Circuit::after_failures(1).open_for(secs(30));
    let slow = Controller::Auto(Auto::default().within(1.0..=1.0).rate_start(1.0));
    let limited: [(Builder, u32); 8] = [
        (Throttle::builder().rate(Rate::per_second(1)), 1),
        (Throttle::builder().pace(Pace::every(secs(1))), 1),
        (Throttle::builder().circuit(open), 1),
        (Throttle::builder().budget(budget), 1),
        (Throttle::builder().rate_named("rps", Rate::per_second(1)), 1),
        (Throttle::builder().budget_named("tpm", budget), 1),
        (Throttle::builder().slots(Slots::unlimited()), 1),
        // A learned pace rises while callers wait, so they ask again early.
        (Throttle::builder().slots(Slots::adaptive(1..=8)).controller(slow), 100),
    ];
    for (index, (builder, refusals)) in limited.into_iter().enumerate() {
        let clock = late_clock();
        let throttle = builder.clock(clock.clone()).random(Random::fixed(0.0)).build().unwrap();
        let use_up = || {
            throttle.try_acquire(9).unwrap().settle(Outcome::failure().spent(Cost::from(9)));
            if index == 6 {
                throttle.pause(secs(5));
            }
            // Auto admits a burst first.
            while index == 7 && throttle.try_acquire(9).map(drop).is_ok() {}
        };
        check_set_back(&clock, || throttle.try_acquire(9), use_up, refusals);
    }

    // A key with only a rate has no throttle.
    let clock = late_clock();
    let limits = Throttle::builder().rate(Rate::per_second(1)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).clock(clock.clone()).build().unwrap();
    let use_up = || drop(keyed.try_acquire(&1, REQUEST).unwrap());
    check_set_back(&clock, || keyed.try_acquire(&1, REQUEST), use_up, 1);
}

/// Regression: a circuit that opened during the draw was reported with a wait from the latest time seen.
#[tokio::test]
async fn joined_retry_after_counts_from_a_clock_set_back() {
    let open = Circuit::after_failures(1).open_for(secs(30));
    for pauses in [false, true] {
        let clock = late_clock();
        let builder = Throttle::builder().slots(Slots::fixed(2)).circuit(open).clock(clock.clone());
        let throttle = builder.random(Random::fixed(0.0)).build().unwrap();
        let changed = throttle.clone();
        let store = HookStore::new(&Memory::new(), move |verb, moment| {
            if let (Verb::Draw, Moment::After) = (verb, moment) {
                // After the local half was admitted.
                if pauses {
                    changed.pause(secs(30));
                } else {
                    changed.record_failure();
                }
                clock.set(Instant::ZERO + secs(10_000));
            }
            Act::Pass
        });
        let limiter = over(&store).defaults([Limit::per_hour("rpm", 5)]).build().unwrap();
        let joined = throttle.limited_by(&limiter);
        let error = joined.try_acquire(ACME, REQUEST).await.map(drop).unwrap_err();
        assert_eq!(error.retry_after(), Some(secs(90_030)), "{error}");
    }
}
