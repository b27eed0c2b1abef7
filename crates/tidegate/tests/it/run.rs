//! `run` and retries: every attempt is admitted anew, backoff holds no permit, and the error says why it
//! stopped.

use std::cell::Cell;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use tidegate::{
    Backoff, Brake, Budget, Circuit, Class, Controller, Cost, Jitter, ManualClock, Outcome, Random, Refused,
    Retry, RetryBudget, RunError, Slots, State, StopReason, Throttle, WhenRefused,
};
use tokio::time::Instant;

use crate::kit::{REQUEST, millis, secs, settle_tasks, slots};

fn immediate_retries(attempts: u32) -> Retry {
    Retry::attempts(attempts).backoff(Backoff::fixed(Duration::ZERO))
}

/// Sixteen slots with a brake at three failures.
fn braking() -> Throttle {
    Throttle::builder()
        .slots(Slots::adaptive(1..=16))
        .retry(immediate_retries(3))
        .build()
        .expect("within the bounds")
}

#[tokio::test(start_paused = true)]
async fn each_attempt_is_admitted_and_last_error_returned() {
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=16))
        .controller(Controller::Brake(Brake::default().at(9, secs(60))))
        .retry(immediate_retries(3))
        .build()
        .unwrap();
    let result: Result<(), _> =
        throttle.run(REQUEST, |attempt| async move { Err(format!("fail-{}", attempt.number + 1)) }).await;
    let error = result.unwrap_err();
    assert_eq!(format!("{error:#}"), "failed after 3 attempts (no attempts are left): fail-3");
    assert_eq!(error, RunError::Failed { error: "fail-3".to_owned(), attempts: 3, why: StopReason::Spent });
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.admitted, snapshot.failures, snapshot.in_flight), (3, 3, 0));
}

#[tokio::test(start_paused = true)]
async fn success_on_third_attempt_slows_nothing() {
    let throttle = braking();
    let result = throttle
        .run(
            REQUEST,
            |attempt| async move { if attempt.number < 2 { Err("no") } else { Ok(attempt.number) } },
        )
        .await;
    assert_eq!(result, Ok(2));
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.slots, snapshot.state), (Some(16), State::Running));
}

#[tokio::test(start_paused = true)]
async fn open_circuit_ends_run_with_the_works_error() {
    let throttle = Throttle::builder()
        .circuit(Circuit::after_failures(2))
        .retry(immediate_retries(5))
        .total(1)
        .build()
        .unwrap();
    let calls = Cell::new(0);
    let result: Result<(), _> = throttle
        .run(REQUEST, |_| {
            calls.set(calls.get() + 1);
            async { Err("down") }
        })
        .await;
    assert_eq!(calls.get(), 2);
    let why = StopReason::Refused(Refused::CircuitOpen { retry_after: secs(30) });
    assert_eq!(result, Err(RunError::Failed { error: "down", attempts: 2, why }));
    assert_eq!(throttle.snapshot().completed, 1, "the run has ended, although no attempt was final");
    let never: Result<(), RunError<&str>> = throttle.run(REQUEST, |_| async { Ok(()) }).await;
    assert!(matches!(never, Err(RunError::Refused(Refused::CircuitOpen { .. }))));
}

#[tokio::test(start_paused = true)]
async fn run_that_may_wait_waits_out_a_refusal() {
    let throttle =
        Throttle::builder().circuit(Circuit::after_failures(2)).random(Random::fixed(0.0)).build().unwrap();
    let start = Instant::now();
    let result = throttle
        .runner()
        .retry(immediate_retries(3).when_refused(WhenRefused::Wait))
        .run(REQUEST, |attempt| async move { if attempt.number < 2 { Err("down") } else { Ok(()) } })
        .await;
    assert_eq!((result, start.elapsed()), (Ok(()), secs(30)));
    throttle.close();
    let closed: Result<(), RunError<()>> = throttle
        .runner()
        .retry(immediate_retries(3).when_refused(WhenRefused::Wait))
        .run(REQUEST, |_| async { Ok(()) })
        .await;
    assert_eq!(closed, Err(RunError::Refused(Refused::Closed)), "waiting would not help");
}

#[tokio::test(start_paused = true)]
async fn retried_error_need_not_count_as_failure() {
    let throttle = braking();
    let calls = Cell::new(0);
    let result: Result<(), RunError<&str>> = throttle
        .runner()
        .classify(|result: &Result<(), &str>| match result {
            Err("A") => Class::again(Outcome::ignored()),
            _ => Class::end(Outcome::failure()),
        })
        .run(REQUEST, |_| {
            calls.set(calls.get() + 1);
            async { Err("A") }
        })
        .await;
    assert!(result.is_err());
    assert_eq!((calls.get(), throttle.snapshot().failures), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn permanent_error_is_not_retried() {
    let throttle = braking();
    let result: Result<(), RunError<u16>> = throttle
        .runner()
        .classify(|_: &Result<(), u16>| Class::end(Outcome::ignored()))
        .run(REQUEST, |_| async { Err(404) })
        .await;
    let error = result.unwrap_err();
    assert_eq!(format!("{error:#}"), "failed after 1 attempt (not retryable): 404");
    assert_eq!(error.into_error(), Some(404));
}

#[tokio::test(start_paused = true)]
async fn ok_value_can_be_retried_and_last_is_returned() {
    let throttle = slots(1);
    let runner =
        throttle.runner().retry(immediate_retries(3)).classify(|reply: &Result<u16, ()>| match reply {
            Ok(200) => Class::end(Outcome::success()),
            _ => Class::again(Outcome::overload()),
        });
    let reply =
        runner.run(REQUEST, |attempt| async move { Ok([503, 503, 200][attempt.number as usize]) }).await;
    assert_eq!(reply, Ok(200));
    let reply = runner.run(REQUEST, |_| async { Ok(503) }).await;
    assert_eq!(reply, Ok(503));
}

#[tokio::test(start_paused = true)]
async fn cancelled_work_is_not_retried() {
    let throttle = Arc::new(braking());
    let calls = Arc::new(AtomicU32::new(0));
    let (worker, counter) = (Arc::clone(&throttle), Arc::clone(&calls));
    let task = tokio::spawn(async move {
        let result: Result<(), RunError<()>> = worker
            .run(REQUEST, |_| {
                counter.fetch_add(1, Ordering::SeqCst);
                std::future::pending()
            })
            .await;
        result
    });
    settle_tasks().await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    tokio::time::sleep(secs(100)).await;
    let snapshot = throttle.snapshot();
    assert_eq!((calls.load(Ordering::SeqCst), snapshot.in_flight, snapshot.failures), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn backoff_holds_no_permit() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .retry(Retry::attempts(3).backoff(Backoff::fixed(secs(10))))
        .build()
        .unwrap();
    let (worker, start) = (throttle.clone(), Instant::now());
    let task = tokio::spawn(async move {
        let result: Result<(), _> = worker.run(REQUEST, |_| async { Err("no") }).await;
        (result.is_err(), start.elapsed())
    });
    settle_tasks().await;
    assert_eq!(throttle.snapshot().in_flight, 0, "no permit during backoff");
    assert!(throttle.try_acquire(REQUEST).is_ok());
    assert_eq!(task.await.unwrap(), (true, secs(20)));
}

#[tokio::test(start_paused = true)]
async fn shared_pause_replaces_backoff() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(4))
        .retry(Retry::attempts(2).backoff(Backoff::fixed(secs(100))))
        .random(Random::fixed(0.0))
        .build()
        .unwrap();
    let start = Instant::now();
    let result = throttle
        .runner()
        .classify(|reply: &Result<(), ()>| match reply {
            Ok(()) => Class::end(Outcome::success()),
            Err(()) => Class::again(Outcome::overload().retry_after(secs(3))),
        })
        .run(REQUEST, |attempt| async move { if attempt.number == 0 { Err(()) } else { Ok(()) } })
        .await;
    assert_eq!((result, start.elapsed().as_secs()), (Ok(()), 3));
}

/// Regression: the wait was capped like the shared pause, so that an hour was retried every ten minutes.
#[tokio::test(start_paused = true)]
async fn rejected_request_waits_for_its_full_hint() {
    let throttle = Throttle::builder().slots(Slots::fixed(4)).random(Random::fixed(0.0)).build().unwrap();
    let start = Instant::now();
    let runner = throttle.runner().classify(|reply: &Result<(), ()>| match reply {
        Ok(()) => Class::end(Outcome::success()),
        Err(()) => Class::again(Outcome::overload().retry_after(secs(3_600))),
    });
    let retried =
        runner.run(REQUEST, |attempt| async move { if attempt.number == 0 { Err(()) } else { Ok(()) } });
    let other = async {
        tokio::task::yield_now().await;
        drop(throttle.acquire(REQUEST).await);
        start.elapsed().as_secs()
    };
    let (retried, paused) = tokio::join!(retried, other);
    assert_eq!((retried, start.elapsed().as_secs(), paused), (Ok(()), 3_600, 600));
}

#[tokio::test(start_paused = true)]
async fn backoff_delays_grow_within_their_range() {
    let backoff = Backoff::exponential(millis(500), secs(10)).jitter(Jitter::Range(0.75..=1.0));
    let throttle = Throttle::builder().retry(Retry::attempts(3).backoff(backoff)).build().unwrap();
    let start = Instant::now();
    let result: Result<(), _> = throttle.run(REQUEST, |_| async { Err("no") }).await;
    assert!(result.is_err());
    let waited = start.elapsed();
    assert!((millis(1_125)..=millis(1_502)).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn retry_budget_bounds_retries() {
    let budget = RetryBudget::new(0.2, 5, secs(10));
    let throttle = Throttle::builder()
        .slots(Slots::fixed(9))
        .retry(immediate_retries(4).budget(budget))
        .build()
        .unwrap();
    let calls = Cell::new(0);
    let mut out_of_budget = 0;
    for _ in 0..100 {
        let result: Result<(), _> = throttle
            .run(REQUEST, |_| {
                calls.set(calls.get() + 1);
                async { Err("down") }
            })
            .await;
        if let Err(RunError::Failed { why: StopReason::Budget, .. }) = result {
            out_of_budget += 1;
        }
    }
    // 100 runs, so 20 retries in total instead of 300.
    assert_eq!(calls.get(), 120);
    assert!(out_of_budget > 80, "{out_of_budget} stopped by the budget");
}

#[tokio::test]
async fn clock_step_back_restores_no_retry_budget() {
    let clock = ManualClock::new();
    clock.advance(secs(1_000));
    let budget = RetryBudget::new(0.0, 1, secs(10));
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .retry(immediate_retries(2).budget(budget))
        .total(0)
        .clock(clock.clone())
        .build()
        .unwrap();
    for step in 0..5 {
        clock.set(tidegate::Instant::ZERO + secs(1_000 - 100 * step));
        let _: Result<(), _> = throttle.run(REQUEST, |_| async { Err("down") }).await;
    }
    assert_eq!(throttle.snapshot().admitted, 6, "five runs, and one retry in total");
}

#[tokio::test(start_paused = true)]
async fn runners_with_other_budgets_do_not_reset_each_other() {
    let throttle = slots(1);
    for turn in 0..20 {
        let window = secs(if turn % 2 == 0 { 100 } else { 200 });
        let runner = throttle.runner().retry(immediate_retries(2).budget(RetryBudget::new(0.0, 1, window)));
        let _: Result<(), _> = runner.run(REQUEST, |_| async { Err("down") }).await;
    }
    assert_eq!(throttle.snapshot().admitted, 22, "twenty runs, and one retry for each of two budgets");
}

#[tokio::test(start_paused = true)]
async fn many_budgets_do_not_unbound_retries() {
    let throttle = slots(1);
    for turn in 0..40_u64 {
        let share = if turn % 2 == 0 { f64::NAN } else { 0.0 };
        let budget = RetryBudget::new(share, 1, secs(100 + turn));
        let _: Result<(), _> = throttle
            .runner()
            .retry(immediate_retries(2).budget(budget))
            .run(REQUEST, |_| async { Err("down") })
            .await;
    }
    assert!(throttle.snapshot().admitted <= 40 + 8, "one retry for each of eight windows");
}

#[tokio::test(start_paused = true)]
async fn refused_work_earns_no_retry_budget() {
    let throttle = Throttle::builder().budget(Budget::tokens(10, secs(60))).build().unwrap();
    let retry = immediate_retries(9).budget(RetryBudget::new(0.2, 0, secs(60)));
    for _ in 0..500 {
        let refused: Result<(), RunError<()>> =
            throttle.runner().retry(retry.clone()).run(REQUEST.tokens(11), |_| async { Ok(()) }).await;
        assert!(matches!(refused, Err(RunError::Refused(Refused::TooLarge { .. }))));
    }
    let failed: Result<(), _> = throttle.runner().retry(retry).run(REQUEST, |_| async { Err("down") }).await;
    assert_eq!(failed, Err(RunError::Failed { error: "down", attempts: 1, why: StopReason::Budget }));
}

#[tokio::test(start_paused = true)]
async fn progress_counts_runs_and_not_attempts() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .circuit(Circuit::after_failures(9))
        .retry(immediate_retries(3))
        .total(10)
        .build()
        .unwrap();
    let classes = [
        (Class::again(Outcome::success()), 1),
        (Class::again(Outcome::failure()), 2),
        (Class::again(Outcome::ignored()), 2),
        (Class::end(Outcome::ignored()), 2),
    ];
    for (class, completed) in classes {
        let _: Result<(), _> = throttle
            .runner()
            .classify(move |_: &Result<(), ()>| class)
            .run(REQUEST, |_| async { Err(()) })
            .await;
        assert_eq!(throttle.snapshot().completed, completed, "{class:?}");
    }
}

#[test]
fn blocking_work_runs_by_the_same_rules() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .retry(Retry::attempts(3).backoff(Backoff::fixed(secs(5))))
        .clock(clock.clone())
        .build()
        .unwrap();
    let worker = throttle.clone();
    let thread = std::thread::spawn(move || {
        worker.run_blocking(REQUEST, |attempt| if attempt.number < 2 { Err("no") } else { Ok("yes") })
    });
    for _ in 0..2 {
        while clock.sleeping() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(throttle.snapshot().in_flight, 0);
        clock.advance(secs(5));
    }
    assert_eq!(thread.join().unwrap(), Ok("yes"));
}

#[tokio::test(start_paused = true)]
async fn wrapped_function_is_throttled_per_call() {
    let throttle = slots(2);
    let running = Arc::new(AtomicU32::new(0));
    let (counter, most) = (Arc::clone(&running), Arc::new(AtomicU32::new(0)));
    let peak = Arc::clone(&most);
    let call = throttle.wrap(REQUEST, move |number: u32| {
        let (running, peak) = (Arc::clone(&counter), Arc::clone(&peak));
        async move {
            peak.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(millis(10)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, ()>(number * 2)
        }
    });
    let tasks: Vec<_> = (0..6).map(|number| tokio::spawn(call(number))).collect();
    for (number, task) in (0..).zip(tasks) {
        assert_eq!(task.await.unwrap(), Ok(number * 2));
    }
    assert_eq!((most.load(Ordering::SeqCst), throttle.snapshot().admitted), (2, 6));
}

proptest! {
    /// For any pattern of failures: never too many attempts, no permit during backoff, and nothing held
    /// afterwards.
    #[test]
    fn run_is_bounded_and_ends_with_nothing_held(
        attempts in 1_u32..6,
        patterns in prop::collection::vec(prop::collection::vec(0_u8..4, 6), 1..12),
        cancel_at in prop::option::of(0_u64..400),
        budget in prop::option::of(0_u32..6),
        waits in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let mut retry = Retry::attempts(attempts).backoff(Backoff::fixed(millis(30)));
        if let Some(at_least) = budget {
            retry = retry.budget(RetryBudget::new(0.0, at_least, secs(1_000)));
        }
        if waits {
            retry = retry.when_refused(WhenRefused::Wait);
        }
        runtime.block_on(async move {
            let throttle = Throttle::builder()
                .slots(Slots::fixed(2))
                .circuit(Circuit::after_failures(8).open_for(millis(50)))
                .retry(retry)
                .build()
                .expect("within the bounds");
            let retries = Arc::new(AtomicU32::new(0));
            let inside = Arc::new(AtomicU32::new(0));
            let mut tasks = tokio::task::JoinSet::new();
            for pattern in patterns {
                let (throttle, inside) = (throttle.clone(), Arc::clone(&inside));
                let retries = Arc::clone(&retries);
                tasks.spawn(async move {
                    let mut made = 0;
                    let result: Result<(), RunError<u8>> = throttle
                        .runner()
                        .classify(|result: &Result<(), u8>| match result {
                            Ok(()) => Class::end(Outcome::success()),
                            Err(1) => Class::again(Outcome::failure()),
                            Err(2) => Class::again(Outcome::overload().retry_after(millis(20))),
                            Err(_) => Class::end(Outcome::ignored()),
                        })
                        .run(Cost::request(), |attempt| {
                            made += 1;
                            retries.fetch_add(u32::from(attempt.number > 0), Ordering::SeqCst);
                            let (kind, inside) = (pattern[attempt.number as usize], Arc::clone(&inside));
                            async move {
                                inside.fetch_add(1, Ordering::SeqCst);
                                let _leaves = WorkGuard(inside);
                                tokio::time::sleep(millis(7)).await;
                                if kind == 0 { Ok(()) } else { Err(kind) }
                            }
                        })
                        .await;
                    assert!(made <= attempts, "{made} of {attempts} attempts");
                    if let Err(RunError::Failed { attempts: reported, .. }) = result {
                        assert_eq!(reported, made);
                    }
                });
            }
            for step in 0..200 {
                tokio::time::sleep(millis(3)).await;
                // Every permit belongs to running work or to an unpolled grant.
                let seen = throttle.snapshot();
                assert!(inside.load(Ordering::SeqCst) <= seen.in_flight);
                if cancel_at == Some(step) {
                    tasks.abort_all();
                }
            }
            while let Some(ended) = tasks.join_next().await {
                assert!(ended.is_ok() || ended.is_err_and(|error| error.is_cancelled()));
            }
            assert_eq!(inside.load(Ordering::SeqCst), 0);
            let made = retries.load(Ordering::SeqCst);
            assert!(budget.is_none_or(|budget| made <= budget), "{made} retries of {budget:?}");
            let seen = throttle.snapshot();
            assert_eq!((seen.in_flight, seen.waiting), (0, 0));
        });
    }
}

#[tokio::test(start_paused = true)]
async fn unit_and_integer_literals_are_costs() {
    let throttle = Throttle::builder().budget(Budget::tokens(1_000, secs(60))).build().unwrap();
    assert_eq!(throttle.acquire(()).await.unwrap().cost(), Cost::request());
    assert_eq!(throttle.acquire(800).await.unwrap().cost(), Cost::request().tokens(800));
    assert!(matches!(throttle.try_acquire(1_001), Err(Refused::TooLarge { .. })));
}

#[tokio::test(start_paused = true)]
async fn failed_work_is_retried_by_default() {
    let throttle = Throttle::new();
    let start = Instant::now();
    let result: Result<(), _> = throttle.run((), |_| async { Err("down") }).await;
    assert_eq!(result, Err(RunError::Failed { error: "down", attempts: 3, why: StopReason::Spent }));
    assert!(start.elapsed() < millis(610), "at most 200 ms, then 400 ms");
}

#[tokio::test(start_paused = true)]
async fn default_backoffs_differ_between_tasks() {
    let throttle = Throttle::builder().random(Random::seeded(7)).build().unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    let start = Instant::now();
    for _ in 0..5 {
        let throttle = throttle.clone();
        tasks.spawn(async move {
            let _: Result<(), _> = throttle.run((), |_| async { Err("down") }).await;
            start.elapsed()
        });
    }
    let mut delays = tasks.join_all().await;
    delays.sort_unstable();
    delays.dedup();
    assert!(delays.len() > 1, "all retried after {delays:?}");
}

#[tokio::test(start_paused = true)]
async fn default_budget_bounds_retries() {
    let throttle = slots(1_000);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let throttle = throttle.clone();
        tasks.spawn(async move {
            let _: Result<(), _> = throttle.run((), |_| async { Err("down") }).await;
        });
    }
    tasks.join_all().await;
    assert_eq!(throttle.snapshot().admitted, 240, "a fifth of 200 runs is retried");
}

#[tokio::test(start_paused = true)]
async fn error_reports_that_retry_is_off() {
    let throttle = Throttle::builder().retry(Retry::off()).build().unwrap();
    let result: Result<(), _> = throttle.run((), |_| async { Err("down") }).await;
    let error = result.unwrap_err();
    assert_eq!(format!("{error:#}"), "failed after 1 attempt (retry is off): down");
    assert_eq!(error, RunError::Failed { error: "down", attempts: 1, why: StopReason::Off });
}

#[tokio::test(start_paused = true)]
async fn error_source_is_the_works_own_error() {
    let throttle = Throttle::builder().retry(Retry::off()).build().unwrap();
    let reset = || std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    let result: Result<(), _> = throttle.run((), |_| async { Err(reset()) }).await;
    let error = result.unwrap_err();
    assert_eq!(error.to_string(), "failed after 1 attempt (retry is off)");
    let source = error.source().and_then(<dyn Error>::downcast_ref::<std::io::Error>);
    assert_eq!(source.map(std::io::Error::kind), Some(std::io::ErrorKind::ConnectionReset));
}

#[tokio::test(start_paused = true)]
async fn boxed_work_errors_pass_through_question_mark() {
    type BoxError = Box<dyn Error + Send + Sync>;

    async fn anyhow_run(throttle: &Throttle) -> anyhow::Result<()> {
        let work = || async { Err(anyhow::anyhow!("reset").context("no page")) };
        throttle.run((), |_| work()).await.map_err(RunError::boxed)?;
        Ok(())
    }
    async fn boxed_run(throttle: &Throttle) -> Result<(), BoxError> {
        let work = || async { Err(BoxError::from(std::io::Error::other("reset"))) };
        throttle.run((), |_| work()).await.map_err(RunError::boxed)?;
        Ok(())
    }

    let throttle = Throttle::builder().retry(Retry::off()).build().unwrap();
    let error = anyhow_run(&throttle).await.unwrap_err();
    assert_eq!(format!("{error:#}"), "failed after 1 attempt (retry is off): no page: reset");
    let error = boxed_run(&throttle).await.unwrap_err();
    let source = error.source().and_then(<dyn Error>::downcast_ref::<std::io::Error>);
    assert_eq!(source.map(ToString::to_string).as_deref(), Some("reset"));
}

/// Decrements the count of running work on drop.
struct WorkGuard(Arc<AtomicU32>);

impl Drop for WorkGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
