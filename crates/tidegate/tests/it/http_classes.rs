//! Responses of the `http` crate under a throttle: retried by status, delayed by headers.

use std::cell::Cell;
use std::io::{Error, ErrorKind};

use http::Response;
use tidegate::{
    Backoff, Circuit, CircuitState, Classes, Completion, CompletionClass, HttpClasses, Kind, Outcome, Random,
    Rate, Refused, Retry, RunError, Stamp, StopReason, Throttle,
};
use tokio::time::Instant;

use crate::kit::{REQUEST, millis, secs};

/// 2026-01-31T09:30:00Z.
const NOW: Stamp = Stamp::from_secs(1_769_851_800);

type Reply = Response<&'static str>;

fn response(status: u16, headers: &[(&str, &str)]) -> Reply {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    response.body("body").expect("headers without mistakes")
}

fn unlimited() -> Throttle {
    Throttle::builder().random(Random::fixed(0.0)).build().expect("within the bounds")
}

/// Runs a scripted call to its end, repeating the last response. Returns the number of attempts.
async fn run(
    throttle: &Throttle,
    script: &[(u16, &[(&str, &str)])],
) -> (Result<Reply, RunError<Error>>, usize) {
    let attempts = Cell::new(0);
    let result = throttle
        .runner()
        .retry(Retry::attempts(3).backoff(Backoff::fixed(millis(200))))
        .classified_by(HttpClasses::default().wall(|| NOW))
        .run(REQUEST, |_| {
            let (status, headers) = script[attempts.get().min(script.len() - 1)];
            attempts.set(attempts.get() + 1);
            async move { Ok(response(status, headers)) }
        })
        .await;
    (result, attempts.get())
}

#[tokio::test(start_paused = true)]
async fn transient_status_is_retried() {
    for status in [408, 429, 500, 502, 503, 504] {
        let start = Instant::now();
        let (result, attempts) = run(&unlimited(), &[(status, &[]), (200, &[])]).await;
        assert_eq!((result.unwrap().status().as_u16(), attempts), (200, 2), "{status}");
        assert_eq!(start.elapsed(), millis(200), "{status}: its own back-off");
    }
}

#[tokio::test(start_paused = true)]
async fn permanent_status_is_returned_at_once() {
    for status in [200, 302, 400, 401, 404, 501, 505, 700] {
        let (result, attempts) = run(&unlimited(), &[(status, &[])]).await;
        assert_eq!((result.unwrap().status().as_u16(), attempts), (status, 1), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn exhausted_attempts_return_last_response() {
    let (result, attempts) = run(&unlimited(), &[(503, &[]), (502, &[]), (503, &[("x-last", "1")])]).await;
    let response = result.unwrap();
    assert_eq!((response.status().as_u16(), attempts), (503, 3));
    assert!(response.headers().contains_key("x-last"));
    assert_eq!(response.into_body(), "body");
}

#[tokio::test(start_paused = true)]
async fn opened_circuit_returns_last_response() {
    let circuit = Circuit::after_failures(2);
    let throttle = Throttle::builder().circuit(circuit).total(1).random(Random::fixed(0.0)).build().unwrap();
    let (result, attempts) = run(&throttle, &[(500, &[])]).await;
    assert_eq!((result.unwrap().status().as_u16(), attempts), (500, 2));
    assert_eq!(throttle.snapshot().completed, 1);
    let (refused, attempts) = run(&throttle, &[(500, &[])]).await;
    assert!(matches!(refused, Err(RunError::Refused(Refused::CircuitOpen { .. }))));
    assert_eq!(attempts, 0);
}

#[tokio::test(start_paused = true)]
async fn retry_after_replaces_backoff() {
    for header in
        [("retry-after", "2"), ("retry-after-ms", "2000"), ("retry-after", "Sat, 31 Jan 2026 09:30:02 GMT")]
    {
        let start = Instant::now();
        let (result, _) = run(&unlimited(), &[(503, &[header]), (200, &[])]).await;
        assert_eq!((result.unwrap().status().as_u16(), start.elapsed()), (200, secs(2)), "{header:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_on_success_delays_the_next_request() {
    let throttle =
        Throttle::builder().rate(Rate::per_second(1).burst(1)).random(Random::fixed(0.0)).build().unwrap();
    let permit = throttle.acquire(REQUEST).await.unwrap();
    permit.settle(Outcome::from_response(&response(200, &[("retry-after", "2")]), NOW));
    let start = Instant::now();
    let _permit = throttle.acquire(REQUEST).await.unwrap();
    assert!(start.elapsed() >= secs(2), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn overload_with_retry_after_keeps_circuit_closed() {
    let circuit = Circuit::after_failures(1);
    let throttle = Throttle::builder().circuit(circuit).random(Random::fixed(0.0)).build().unwrap();
    let (result, attempts) = run(&throttle, &[(429, &[("retry-after", "1")]), (200, &[])]).await;
    assert_eq!((result.unwrap().status().as_u16(), attempts), (200, 2));
    assert_eq!(throttle.snapshot().circuit.unwrap().state, CircuitState::Closed);
}

#[tokio::test(start_paused = true)]
async fn custom_function_classifies_errors() {
    let table = [(ErrorKind::TimedOut, 3), (ErrorKind::ConnectionReset, 3), (ErrorKind::InvalidInput, 1)];
    let classes = HttpClasses::default().errors(|error: &Error| match error.kind() {
        ErrorKind::TimedOut => Completion::Timeout,
        ErrorKind::InvalidInput => Completion::Unsent,
        _ => Completion::Connection,
    });
    for (kind, attempts_made) in table {
        let result: Result<Reply, _> = unlimited()
            .runner()
            .retry(Retry::attempts(3))
            .classified_by(classes.clone())
            .run(REQUEST, |_| async { Err(Error::from(kind)) })
            .await;
        let Err(RunError::Failed { error, attempts, why }) = result else { panic!("{kind:?}") };
        assert_eq!((error.kind(), attempts), (kind, attempts_made));
        assert_eq!(why, if attempts == 1 { StopReason::NotRetryable } else { StopReason::Spent });
    }
}

#[tokio::test(start_paused = true)]
async fn errors_default_to_network_failures() {
    let throttle = unlimited();
    let result: Result<Reply, RunError<&str>> = throttle
        .runner()
        .retry(Retry::attempts(2))
        .classified_by(HttpClasses::default())
        .run(REQUEST, |_| async { Err("lost") })
        .await;
    assert_eq!(result.unwrap_err(), RunError::Failed { error: "lost", attempts: 2, why: StopReason::Spent });
}

#[test]
fn blocking_work_is_classified_alike() {
    let classes = HttpClasses::new(Classes::new().status(404, CompletionClass::Transient).unwrap());
    assert_eq!(classes.classes().outcome(Completion::Status(404)).kind(), Kind::Failure);
    let result = unlimited()
        .runner()
        .retry(Retry::attempts(3).backoff(Backoff::fixed(millis(0))))
        .classified_by(classes)
        .run_blocking(REQUEST, |attempt| {
            Ok::<_, Error>(response(if attempt.number < 2 { 404 } else { 200 }, &[]))
        });
    assert_eq!(result.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn unreadable_headers_are_counted() {
    let throttle = unlimited();
    for status in [200, 404, 501] {
        let (_, attempts) =
            run(&throttle, &[(status, &[("retry-after", "soon"), ("x-ratelimit-limit", "-1")])]).await;
        assert_eq!(attempts, 1);
    }
    assert_eq!(throttle.snapshot().headers_malformed, 6);
    throttle.record(Outcome::from_response(&response(200, &[("ratelimit", "\"p")]), NOW));
    assert_eq!(throttle.snapshot().headers_malformed, 7);
}
