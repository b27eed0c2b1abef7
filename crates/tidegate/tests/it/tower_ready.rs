//! The tower contract of `ThrottleLayer` with one throttle and unit costs: readiness, clones, cancellation
//! and drop, observed through a mock service.

use std::task::Poll;

use http_body_util::BodyExt as _;
use tidegate::tower::{CallError, Hold, ThrottleLayer};
use tidegate::{Circuit, CircuitState, Gate, Outcome, Random, Rate, Refused, Slots, Throttle};
use tokio::time::{Instant, advance};
use tower::Service as _;
use tower_test::mock::Spawn;

use crate::kit::tower::{MockRequest, broken, get, is_idle, mock_response, next, spawn};
use crate::kit::{REQUEST, millis, secs, settle_tasks, slots};

fn circuit() -> Throttle {
    let circuit = Circuit::after_failures(2).open_for(secs(5)).probes(1);
    let builder = Throttle::builder().slots(Slots::fixed(2)).circuit(circuit).random(Random::fixed(0.0));
    builder.build().expect("within the bounds")
}

#[tokio::test(start_paused = true)]
async fn ready_service_holds_the_slot_until_it_returns() {
    let throttle = slots(1);
    let (mut one, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut other = one.clone();
    assert!(one.poll_ready::<MockRequest>().is_ready());
    assert_eq!(throttle.snapshot().in_flight, 1);
    assert!(other.poll_ready::<MockRequest>().is_pending());
    let call = one.call(get());
    next(&mut handle).send_response(mock_response(200, 2));
    let response = call.await.expect("a response");
    assert!(!other.is_woken() && other.poll_ready::<MockRequest>().is_pending());
    drop(response);
    assert!(other.is_woken());
    assert!(other.poll_ready::<MockRequest>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn repeated_poll_ready_reserves_once() {
    let throttle = slots(2);
    let (mut service, _handle) = spawn(ThrottleLayer::new(throttle.clone()));
    for _ in 0..3 {
        assert!(service.poll_ready::<MockRequest>().is_ready());
    }
    assert_eq!(throttle.snapshot().in_flight, 1);
}

#[tokio::test(start_paused = true)]
async fn clone_of_ready_service_is_not_ready() {
    let throttle = slots(1);
    let (mut service, _handle) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let mut clone = service.clone();
    assert!(clone.poll_ready::<MockRequest>().is_pending());
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().waiting), (1, 1));
    drop(service);
    assert!(clone.is_woken() && clone.poll_ready::<MockRequest>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn dropped_ready_service_returns_slot_and_rate() {
    let builder = Throttle::builder().slots(Slots::fixed(1)).rate(Rate::per_second(1).burst(1));
    let throttle = builder.build().expect("within the bounds");
    let (service, _handle) = spawn(ThrottleLayer::new(throttle.clone()));
    for _ in 0..5 {
        let mut service = service.clone();
        assert!(service.poll_ready::<MockRequest>().is_ready());
        assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().rate_level), (1, Some(0)));
    }
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.rate_level, seen.admitted), (0, Some(1), 0));
}

#[tokio::test(start_paused = true)]
async fn dropped_waiting_service_leaves_the_queue() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).expect("a slot");
    let (mut first, _handle) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut second = first.clone();
    assert!(
        first.poll_ready::<MockRequest>().is_pending() && second.poll_ready::<MockRequest>().is_pending()
    );
    assert_eq!(throttle.snapshot().waiting, 2);
    drop(first);
    assert_eq!(throttle.snapshot().waiting, 1);
    drop(held);
    assert!(second.poll_ready::<MockRequest>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn unpolled_grant_of_dropped_service_is_passed_on() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).expect("a slot");
    let (mut first, _handle) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut second = first.clone();
    assert!(
        first.poll_ready::<MockRequest>().is_pending() && second.poll_ready::<MockRequest>().is_pending()
    );
    drop(held);
    drop(first);
    assert!(second.is_woken() && second.poll_ready::<MockRequest>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn dropped_call_returns_slot_without_outcome() {
    let throttle = circuit();
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    for _ in 0..5 {
        assert!(service.poll_ready::<MockRequest>().is_ready());
        let mut call = tokio_test_task(service.call(get()));
        assert!(call.poll().is_pending());
        drop(next(&mut handle));
        drop(call);
    }
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.admitted, seen.outcomes.total()), (0, 5, 0));
}

#[tokio::test(start_paused = true)]
async fn slot_is_held_until_the_body_ends() {
    let throttle = slots(1);
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let call = service.call(get());
    next(&mut handle).send_response(mock_response(200, 2));
    let mut body = call.await.expect("a response").into_body();
    assert!(body.holds_permit());
    body.frame().await.expect("a piece").expect("whole");
    assert_eq!(throttle.snapshot().in_flight, 1);
    body.frame().await.expect("a piece").expect("whole");
    // The body knows that this piece is its last.
    assert_eq!((throttle.snapshot().in_flight, body.holds_permit()), (0, false));
}

#[tokio::test(start_paused = true)]
async fn slot_returns_at_headers_if_configured_or_no_body() {
    let throttle = slots(1);
    let layers = [
        (ThrottleLayer::new(throttle.clone()).hold(Hold::Headers), 2),
        (ThrottleLayer::new(throttle.clone()), 0),
    ];
    for (layer, pieces) in layers {
        let (mut service, mut handle) = spawn(layer);
        assert!(service.poll_ready::<MockRequest>().is_ready());
        let call = service.call(get());
        next(&mut handle).send_response(mock_response(200, pieces));
        let response = call.await.expect("a response");
        assert!(!response.body().holds_permit());
        assert_eq!(throttle.snapshot().in_flight, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn broken_body_counts_as_one_failure() {
    let throttle = circuit();
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    for (status, successes, errors) in [(200, 1, 1), (500, 1, 2)] {
        assert!(service.poll_ready::<MockRequest>().is_ready());
        let call = service.call(get());
        let broken = mock_response(status, 0).map(|_| crate::kit::tower::Pieces::broken_after(1));
        next(&mut handle).send_response(broken);
        let body = call.await.expect("a response").into_body();
        body.collect().await.expect_err("the body breaks");
        let seen = throttle.snapshot();
        assert_eq!((seen.outcomes.successes, seen.outcomes.errors()), (successes, errors), "{status}");
        assert_eq!(seen.in_flight, 0);
    }
    assert_eq!(throttle.snapshot().circuit.expect("a circuit").state, CircuitState::Open);
}

#[tokio::test(start_paused = true)]
async fn retry_after_holds_all_clones() {
    let throttle = Throttle::builder().slots(Slots::fixed(4)).random(Random::fixed(0.0)).build();
    let throttle = throttle.expect("within the bounds");
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut clone = service.clone();
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let call = service.call(get());
    let mut too_many = mock_response(429, 1);
    too_many.headers_mut().insert("retry-after", "7".parse().expect("a value"));
    next(&mut handle).send_response(too_many);
    let began = Instant::now();
    // The body has not been read yet.
    let _response = call.await.expect("a response");
    assert!(
        clone.poll_ready::<MockRequest>().is_pending() && service.poll_ready::<MockRequest>().is_pending()
    );
    advance(millis(6_999)).await;
    settle_tasks().await;
    assert!(clone.poll_ready::<MockRequest>().is_pending() && is_idle(&mut handle));
    std::future::poll_fn(|context| clone.get_mut().poll_ready(context)).await.expect("its turn");
    assert!(began.elapsed() >= secs(7));
}

/// Nothing is sent.
#[tokio::test(start_paused = true)]
async fn call_during_a_pause_is_refused_with_retry_after() {
    let throttle = slots(2);
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<MockRequest>().is_ready());
    throttle.pause(secs(3));
    let error = service.call(get()).await.expect_err("a pause");
    let pause = Refused::Limited { by: Gate::Pause, retry_after: Some(secs(3)) };
    assert_eq!(error.refused(), Some(&pause));
    assert!(is_idle(&mut handle));
    assert_eq!(throttle.snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn closed_throttle_refuses_ready_service_and_drains() {
    let throttle = slots(2);
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut ready = service.clone();
    assert!(service.poll_ready::<MockRequest>().is_ready() && ready.poll_ready::<MockRequest>().is_ready());
    throttle.close();
    let error = service.call(get()).await.expect_err("closed");
    assert_eq!(error.refused(), Some(&Refused::Closed));
    drop(ready);
    // The last release wakes the drain, not a timer.
    throttle.drain().await;
    assert!(is_idle(&mut handle));
}

#[tokio::test(start_paused = true)]
async fn open_circuit_refuses_calls_and_service_recovers() {
    let throttle = circuit();
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut early = service.clone();
    assert!(early.poll_ready::<MockRequest>().is_ready());
    for _ in 0..2 {
        throttle.record(Outcome::failure());
    }
    // One service that was ready before it opened, and one that polls now.
    assert!(matches!(service.poll_ready::<MockRequest>(), Poll::Ready(Ok(()))));
    for service in [&mut early, &mut service] {
        let error = service.call(get()).await.expect_err("the circuit is open");
        assert_eq!(error.refused(), Some(&Refused::CircuitOpen { retry_after: secs(5) }));
    }
    assert!(is_idle(&mut handle));
    // Polled again before the call, it checks the throttle again.
    assert!(service.poll_ready::<MockRequest>().is_ready());
    advance(secs(5)).await;
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let call = service.call(get());
    next(&mut handle).send_response(mock_response(200, 0));
    call.await.expect("a probe passes");
    assert_eq!(throttle.snapshot().circuit.expect("a circuit").state, CircuitState::Closed);
}

#[tokio::test(start_paused = true)]
async fn latency_spans_call_to_headers() {
    let throttle = circuit();
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<MockRequest>().is_ready());
    advance(secs(20)).await;
    let call = service.call(get());
    advance(millis(300)).await;
    next(&mut handle).send_response(mock_response(200, 1));
    let response = call.await.expect("a response");
    advance(secs(40)).await;
    drop(response);
    assert_eq!(throttle.snapshot().latency_mean, Some(millis(300)));
}

#[tokio::test(start_paused = true)]
async fn inner_error_keeps_its_type_and_is_recorded() {
    let throttle = circuit();
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let call = service.call(get());
    next(&mut handle).send_error(broken());
    let error = call.await.expect_err("the connection broke");
    assert!(matches!(error, CallError::Inner(_)) && error.refused().is_none());
    let inner = error.inner::<std::io::Error>().expect("its own type");
    assert_eq!(inner.kind(), std::io::ErrorKind::ConnectionReset);
    let seen = throttle.snapshot();
    assert_eq!((seen.outcomes.network, seen.in_flight), (1, 0));
    // An error of the inner `poll_ready` is passed on as well.
    handle.send_error(broken());
    assert!(matches!(service.poll_ready::<MockRequest>(), Poll::Ready(Err(CallError::Inner(_)))));
}

#[tokio::test(start_paused = true)]
async fn call_without_poll_ready_is_admitted_or_refused() {
    let throttle = slots(1);
    let (mut service, mut handle) = spawn(ThrottleLayer::new(throttle.clone()));
    // The mock requires `poll_ready`, so only ours is skipped.
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let call = service.call(get());
    assert!(matches!(service.call(get()).await, Err(CallError::Refused(Refused::Limited { .. }))));
    next(&mut handle).send_response(mock_response(204, 0));
    call.await.expect("a response");
}

/// A future that is polled by hand.
fn tokio_test_task<F: Future>(future: F) -> Polled<F> {
    Polled(Box::pin(future))
}

struct Polled<F>(std::pin::Pin<Box<F>>);

impl<F: Future> Polled<F> {
    fn poll(&mut self) -> Poll<F::Output> {
        self.0.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }
}

/// Services are `Send` and `Sync` if their inner service is.
#[test]
fn services_are_send_and_sync() {
    fn assert_send_sync<T: Send + Sync>(_: &T) {}
    let (service, _handle) = tower_test::mock::pair::<MockRequest, crate::kit::tower::MockResponse>();
    let service = tower::Layer::layer(&ThrottleLayer::new(slots(1)), service);
    assert_send_sync(&service);
    drop(Spawn::new(service));
}
