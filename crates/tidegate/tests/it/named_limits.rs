//! Several rates and budgets of one throttle, as callers meet them: waiting, refusals, settling, retune.

use std::time::Duration;

use tidegate::{Budget, Builder, Cost, Gate, GateName, NAMED_MAX, Outcome, Rate, Refused, Slots, Throttle};
use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);

/// The limits of an LLM provider, small.
fn provider() -> Builder {
    Throttle::builder()
        .slots(Slots::fixed(8))
        .rate_named("rpm", Rate::per_minute(3))
        .rate_named("rpd", Rate::per_day(5))
        .budget_named("itpm", Budget::input_tokens(1_000, MINUTE))
        .budget_named("otpm", Budget::output_tokens(200, MINUTE))
}

fn call(input: u64, output: u64) -> Cost {
    Cost::request().input_tokens(input).output_tokens(output)
}

fn by(name: &str) -> Gate {
    Gate::Named(GateName::new(name).expect("a valid name"))
}

fn available(throttle: &Throttle) -> Vec<i64> {
    throttle.snapshot().limits.iter().map(|limit| limit.available).collect()
}

#[tokio::test(start_paused = true)]
async fn caller_waits_for_the_last_of_its_limits() {
    let throttle = provider().build().unwrap();
    let start = Instant::now();
    throttle.acquire(call(600, 150)).await.unwrap().settle(Outcome::success());
    throttle.acquire(call(300, 100)).await.unwrap().settle(Outcome::success());
    assert_eq!(start.elapsed().as_secs(), 60, "150 + 100 output tokens do not fit in one window");
    for _ in 0..3 {
        throttle.acquire(()).await.unwrap().settle(Outcome::success());
    }
    let before_the_sixth = start.elapsed();
    assert!(before_the_sixth < Duration::from_secs(180), "{before_the_sixth:?}");
    throttle.acquire(()).await.unwrap().settle(Outcome::success());
    assert_eq!(start.elapsed().as_secs(), 86_400 / 5, "one request of the day refills in a fifth of it");
}

#[tokio::test(start_paused = true)]
async fn refusal_names_the_limit_and_when_to_retry() {
    let throttle = provider().build().unwrap();
    throttle.acquire(call(900, 10)).await.unwrap().settle(Outcome::success());
    let refused = throttle.try_acquire(call(101, 10)).unwrap_err();
    assert_eq!(refused.to_string(), "limited by the limit \"itpm\"; retry after 1m1s");
    let never = throttle.try_acquire(Cost::requests(4)).unwrap_err();
    assert_eq!(never, Refused::AboveCapacity { by: by("rpm"), requested: 4, capacity: 3 });
    assert_eq!(never.to_string(), "4 units requested, but the limit \"rpm\" holds 3 at most");
    assert!(never.is_final());
}

#[tokio::test(start_paused = true)]
async fn tokens_that_return_admit_the_waiter() {
    let throttle = provider().build().unwrap();
    let first = throttle.acquire(call(600, 150)).await.unwrap();
    let start = Instant::now();
    let (second, ()) = tokio::join!(throttle.acquire(call(300, 100)), async {
        tokio::task::yield_now().await;
        first.settle(Outcome::success().spent(call(600, 40)));
    });
    assert_eq!(start.elapsed(), Duration::ZERO, "110 output tokens returned");
    drop(second.unwrap());
    assert_eq!(available(&throttle), [1, 3, 400, 160]);
}

#[tokio::test(start_paused = true)]
async fn streamed_kinds_of_tokens_stay_used() {
    let throttle = provider().build().unwrap();
    let mut permit = throttle.acquire(call(600, 150)).await.unwrap();
    permit.spend(call(580, 0));
    permit.spend(Cost::request().output_tokens(20));
    permit.spend(Cost::request().output_tokens(10));
    assert_eq!((permit.reported(), permit.cost()), (610, call(600, 150)));
    drop(permit.into_owned());
    assert_eq!(available(&throttle), [2, 4, 420, 170]);
    throttle.record_tokens(call(20, 70));
    assert_eq!(available(&throttle)[2..], [400, 100]);
}

#[tokio::test(start_paused = true)]
async fn attempts_of_run_report_kinds_of_tokens() {
    let throttle = provider().build().unwrap();
    let result = throttle
        .run(call(300, 50), |attempt| async move {
            attempt.spend(call(250, 5));
            if attempt.number == 0 { Err("connection lost") } else { Ok("text") }
        })
        .await;
    assert_eq!(result, Ok("text"));
    assert_eq!(available(&throttle)[2..], [500, 190]);
}

#[tokio::test(start_paused = true)]
async fn cancelled_waiter_takes_from_no_limit() {
    let throttle = provider().build().unwrap();
    let full = throttle.acquire(call(1_000, 0)).await.unwrap();
    let before = available(&throttle);
    let waited = tokio::time::timeout(Duration::from_secs(1), throttle.acquire(call(1, 1))).await;
    assert!(waited.is_err());
    assert_eq!(available(&throttle), before);
    drop(full);
    assert_eq!(available(&throttle), [2, 4, 1_000, 200]);
}

#[tokio::test(start_paused = true)]
async fn retune_admits_and_refuses_waiters_by_name() {
    let throttle = provider().build().unwrap();
    let held = throttle.acquire(call(900, 0)).await.unwrap();
    let start = Instant::now();
    let retune = |tokens| {
        throttle.retune(|draft| {
            *draft = draft.clone().budget_named("itpm", Budget::input_tokens(tokens, MINUTE));
        })
    };
    let (admitted, ()) = tokio::join!(throttle.acquire(call(500, 0)), async {
        tokio::task::yield_now().await;
        retune(1_500).unwrap();
    });
    drop(admitted.unwrap());
    let (refused, ()) = tokio::join!(throttle.acquire(call(1_200, 0)), async {
        tokio::task::yield_now().await;
        retune(1_000).unwrap();
    });
    let wanted = Refused::AboveCapacity { by: by("itpm"), requested: 1_200, capacity: 1_000 };
    assert_eq!(refused.unwrap_err(), wanted);
    assert_eq!(start.elapsed(), Duration::ZERO);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn several_requests_take_one_slot_and_rate_units() {
    let throttle = Throttle::builder().slots(Slots::fixed(2)).rate(Rate::per_second(10)).build().unwrap();
    let batch = throttle.acquire(Cost::requests(8)).await.unwrap();
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.rate_level), (1, Some(2)));
    let start = Instant::now();
    drop(throttle.acquire(Cost::requests(5)).await.unwrap());
    assert_eq!(start.elapsed(), Duration::from_millis(300), "three more units at ten per second");
    drop(batch);
    let never = throttle.acquire(Cost::requests(11)).await.unwrap_err();
    assert_eq!(never, Refused::AboveCapacity { by: Gate::Rate, requested: 11, capacity: 10 });
}

#[test]
fn too_many_named_limits_are_refused() {
    let rate = Rate::per_minute(5);
    let many = |count| {
        (0..count).fold(Throttle::builder(), |builder, index| builder.rate_named(format!("r{index}"), rate))
    };
    assert!(many(NAMED_MAX).build().is_ok());
    let error = many(NAMED_MAX + 1).build().unwrap_err().to_string();
    assert!(error.starts_with("`rates` is one of 9 named limits, and must be at most 8 in all"), "{error}");
}
