//! `Joined::run`: each attempt is admitted by both halves, and the lease ends as the attempt did.

use tidegate::{
    Class, JoinedError, Limit, Limiter, Memory, Outcome, Retry, RunError, Slots, StopReason, Throttle,
};

use crate::kit::secs;

const ACME: (&str, &str) = ("acme", "gpt-4");

fn limiter(requests: u64) -> Limiter {
    let limits = [Limit::per_day("rpm", requests), Limit::per_day("tpm", 10_000)];
    Limiter::builder(Memory::new()).defaults(limits).build().expect("within the bounds")
}

/// Requests and tokens left.
async fn left(limiter: &Limiter) -> [i64; 2] {
    let balances = limiter.balances(ACME).await.expect("a store");
    [0, 1].map(|index| balances[index].balance.available)
}

#[tokio::test(start_paused = true)]
async fn failed_attempt_returns_unreported_units() {
    let limiter = limiter(60);
    let joined = Throttle::builder().slots(Slots::fixed(1)).build().unwrap().limited_by(&limiter);
    let result = joined
        .run(ACME, 800, |attempt| async move {
            if attempt.number == 1 {
                attempt.spend(30);
            }
            if attempt.number < 2 { Err("503") } else { Ok("text") }
        })
        .await;
    assert!(matches!(result, Ok("text")), "{result:?}");
    // The second attempt and the third used a request each, the last one its estimate.
    assert_eq!(left(&limiter).await, [58, 10_000 - 30 - 800]);
    assert_eq!(joined.throttle().snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn joined_backoff_holds_neither_permit_nor_lease() {
    let limiter = limiter(60);
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .retry(Retry::attempts(2).backoff(tidegate::Backoff::fixed(secs(100))))
        .build()
        .unwrap();
    let joined = throttle.limited_by(&limiter);
    let worker = joined.clone();
    let task = tokio::spawn(async move {
        worker.run(ACME, (), |_| async { Err::<(), _>("down") }).await.map_err(RunError::into_error)
    });
    tokio::time::sleep(secs(1)).await;
    assert_eq!((throttle.snapshot().in_flight, left(&limiter).await), (0, [60, 10_000]));
    assert_eq!(task.await.unwrap(), Err(Some("down")));
}

#[tokio::test(start_paused = true)]
async fn joined_run_ends_with_the_limiters_refusal() {
    let limiter = limiter(1);
    let joined = Throttle::builder().slots(Slots::fixed(1)).build().unwrap().limited_by(&limiter);
    let refused: Result<(), RunError<&str, _>> = joined.run(ACME, 10_001, |_| async { Ok(()) }).await;
    let Err(RunError::Refused(error @ JoinedError::Limit(_))) = refused else { panic!("{refused:?}") };
    assert!(error.is_final(), "{error}");
}

#[tokio::test(start_paused = true)]
async fn joined_runner_classifies_results() {
    let limiter = limiter(60);
    let joined = Throttle::builder().slots(Slots::fixed(1)).build().unwrap().limited_by(&limiter);
    let result: Result<(), _> = joined
        .runner()
        .retry(Retry::attempts(9))
        .classify(|_: &Result<(), u16>| Class::end(Outcome::ignored()))
        .run(ACME, (), |_| async { Err(404) })
        .await;
    let Err(RunError::Failed { error, attempts, why }) = result else { panic!("{result:?}") };
    assert!(matches!((error, attempts, why), (404, 1, StopReason::NotRetryable)));
}
