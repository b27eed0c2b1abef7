//! The contract of tower, for one throttle and requests of one unit: readiness, clones, cancellation and drop, each seen
//! through a probe in the place of the client.

use std::task::Poll;

use http_body_util::BodyExt as _;
use tidegate::tower::{CallError, Hold, ThrottleLayer};
use tidegate::{Circuit, CircuitState, Gate, Outcome, Random, Rate, Refused, Slots, Throttle};
use tokio::time::{Instant, advance};
use tower::Service as _;
use tower_test::mock::Spawn;

use crate::kit::tower::{Asked, answer, broken, get, is_quiet, next, spawn};
use crate::kit::{REQUEST, millis, secs, settle_tasks, slots};

fn circuit() -> Throttle {
    let circuit = Circuit::after_failures(2).open_for(secs(5)).probes(1);
    let builder = Throttle::builder().slots(Slots::fixed(2)).circuit(circuit).random(Random::fixed(0.0));
    builder.build().expect("within the bounds")
}

#[tokio::test(start_paused = true)]
async fn a_ready_service_has_its_slot_and_nobody_else_is_ready_before_it_returns() {
    let throttle = slots(1);
    let (mut one, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut other = one.clone();
    assert!(one.poll_ready::<Asked>().is_ready());
    assert_eq!(throttle.snapshot().in_flight, 1);
    assert!(other.poll_ready::<Asked>().is_pending());
    let call = one.call(get());
    next(&mut far).send_response(answer(200, 2));
    let response = call.await.expect("an answer");
    assert!(!other.is_woken() && other.poll_ready::<Asked>().is_pending());
    drop(response);
    assert!(other.is_woken());
    assert!(other.poll_ready::<Asked>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_asked_twice_whether_it_is_ready_reserves_once() {
    let throttle = slots(2);
    let (mut service, _far) = spawn(ThrottleLayer::new(throttle.clone()));
    for _ in 0..3 {
        assert!(service.poll_ready::<Asked>().is_ready());
    }
    assert_eq!(throttle.snapshot().in_flight, 1);
}

#[tokio::test(start_paused = true)]
async fn a_clone_of_a_ready_service_is_not_ready() {
    let throttle = slots(1);
    let (mut service, _far) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<Asked>().is_ready());
    let mut clone = service.clone();
    assert!(clone.poll_ready::<Asked>().is_pending());
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().waiting), (1, 1));
    drop(service);
    assert!(clone.is_woken() && clone.poll_ready::<Asked>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_ready_service_that_is_dropped_gives_back_slot_and_rate_as_nothing_went_out() {
    let builder = Throttle::builder().slots(Slots::fixed(1)).rate(Rate::per_second(1).burst(1));
    let throttle = builder.build().expect("within the bounds");
    let (service, _far) = spawn(ThrottleLayer::new(throttle.clone()));
    for _ in 0..5 {
        let mut service = service.clone();
        assert!(service.poll_ready::<Asked>().is_ready());
        assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().rate_level), (1, Some(0)));
    }
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.rate_level, seen.admitted), (0, Some(1), 0));
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_dropped_while_it_waits_leaves_the_line() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).expect("a slot");
    let (mut first, _far) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut second = first.clone();
    assert!(first.poll_ready::<Asked>().is_pending() && second.poll_ready::<Asked>().is_pending());
    assert_eq!(throttle.snapshot().waiting, 2);
    drop(first);
    assert_eq!(throttle.snapshot().waiting, 1);
    drop(held);
    assert!(second.poll_ready::<Asked>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_a_dropped_service_has_not_seen_goes_to_the_next() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).expect("a slot");
    let (mut first, _far) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut second = first.clone();
    assert!(first.poll_ready::<Asked>().is_pending() && second.poll_ready::<Asked>().is_pending());
    drop(held);
    drop(first);
    assert!(second.is_woken() && second.poll_ready::<Asked>().is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_while_it_runs_returns_its_slot_and_teaches_nothing() {
    let throttle = circuit();
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    for _ in 0..5 {
        assert!(service.poll_ready::<Asked>().is_ready());
        let mut call = tokio_test_task(service.call(get()));
        assert!(call.poll().is_pending());
        drop(next(&mut far));
        drop(call);
    }
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.admitted, seen.outcomes.total()), (0, 5, 0));
}

#[tokio::test(start_paused = true)]
async fn the_slot_is_held_until_the_body_ends() {
    let throttle = slots(1);
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<Asked>().is_ready());
    let call = service.call(get());
    next(&mut far).send_response(answer(200, 2));
    let mut body = call.await.expect("an answer").into_body();
    assert!(body.is_held());
    body.frame().await.expect("a piece").expect("whole");
    assert_eq!(throttle.snapshot().in_flight, 1);
    body.frame().await.expect("a piece").expect("whole");
    // The last piece says that it is the last one.
    assert_eq!((throttle.snapshot().in_flight, body.is_held()), (0, false));
}

#[tokio::test(start_paused = true)]
async fn the_slot_returns_at_the_headers_where_that_is_asked_for_or_there_is_no_body() {
    let throttle = slots(1);
    let layers = [
        (ThrottleLayer::new(throttle.clone()).hold(Hold::Headers), 2),
        (ThrottleLayer::new(throttle.clone()), 0),
    ];
    for (layer, pieces) in layers {
        let (mut service, mut far) = spawn(layer);
        assert!(service.poll_ready::<Asked>().is_ready());
        let call = service.call(get());
        next(&mut far).send_response(answer(200, pieces));
        let response = call.await.expect("an answer");
        assert!(!response.body().is_held());
        assert_eq!(throttle.snapshot().in_flight, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_good_answer_whose_body_breaks_is_a_failure_and_a_bad_one_fails_once() {
    let throttle = circuit();
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    for (status, successes, errors) in [(200, 1, 1), (500, 1, 2)] {
        assert!(service.poll_ready::<Asked>().is_ready());
        let call = service.call(get());
        let broken = answer(status, 0).map(|_| crate::kit::tower::Pieces::broken_after(1));
        next(&mut far).send_response(broken);
        let body = call.await.expect("an answer").into_body();
        body.collect().await.expect_err("it breaks");
        let seen = throttle.snapshot();
        assert_eq!((seen.outcomes.successes, seen.outcomes.errors()), (successes, errors), "{status}");
        assert_eq!(seen.in_flight, 0);
    }
    assert_eq!(throttle.snapshot().circuit.expect("a circuit").state, CircuitState::Open);
}

#[tokio::test(start_paused = true)]
async fn a_retry_after_holds_all_clones_until_it_is_over() {
    let throttle = Throttle::builder().slots(Slots::fixed(4)).random(Random::fixed(0.0)).build();
    let throttle = throttle.expect("within the bounds");
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut clone = service.clone();
    assert!(service.poll_ready::<Asked>().is_ready());
    let call = service.call(get());
    let mut too_many = answer(429, 1);
    too_many.headers_mut().insert("retry-after", "7".parse().expect("a value"));
    next(&mut far).send_response(too_many);
    let began = Instant::now();
    // Though nobody has read the body.
    let _response = call.await.expect("an answer");
    assert!(clone.poll_ready::<Asked>().is_pending() && service.poll_ready::<Asked>().is_pending());
    advance(millis(6_999)).await;
    settle_tasks().await;
    assert!(clone.poll_ready::<Asked>().is_pending() && is_quiet(&mut far));
    std::future::poll_fn(|context| clone.get_mut().poll_ready(context)).await.expect("its turn");
    assert!(began.elapsed() >= secs(7));
}

#[tokio::test(start_paused = true)]
async fn a_call_after_a_pause_has_begun_is_refused_with_when_to_come_back_and_nothing_is_sent() {
    let throttle = slots(2);
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<Asked>().is_ready());
    throttle.pause(secs(3));
    let error = service.call(get()).await.expect_err("a pause");
    let pause = Refused::Limited { by: Gate::Pause, retry_after: Some(secs(3)) };
    assert_eq!(error.refused(), Some(&pause));
    assert!(is_quiet(&mut far));
    assert_eq!(throttle.snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_ready_when_the_throttle_is_closed_is_refused_and_lets_it_drain() {
    let throttle = slots(2);
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut ready = service.clone();
    assert!(service.poll_ready::<Asked>().is_ready() && ready.poll_ready::<Asked>().is_ready());
    throttle.close();
    let error = service.call(get()).await.expect_err("closed");
    assert_eq!(error.refused(), Some(&Refused::Closed));
    drop(ready);
    // Woken by the last of them, and not by time.
    throttle.drain().await;
    assert!(is_quiet(&mut far));
}

#[tokio::test(start_paused = true)]
async fn behind_an_open_circuit_calls_are_refused_and_the_service_stays_of_use() {
    let throttle = circuit();
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    let mut early = service.clone();
    assert!(early.poll_ready::<Asked>().is_ready());
    for _ in 0..2 {
        throttle.record(Outcome::failure());
    }
    // One that was ready before it opened, and one that asks now.
    assert!(matches!(service.poll_ready::<Asked>(), Poll::Ready(Ok(()))));
    for service in [&mut early, &mut service] {
        let error = service.call(get()).await.expect_err("it is open");
        assert_eq!(error.refused(), Some(&Refused::CircuitOpen { retry_after: secs(5) }));
    }
    assert!(is_quiet(&mut far));
    // Asked again before it is called, it asks the throttle again.
    assert!(service.poll_ready::<Asked>().is_ready());
    advance(secs(5)).await;
    assert!(service.poll_ready::<Asked>().is_ready());
    let call = service.call(get());
    next(&mut far).send_response(answer(200, 0));
    call.await.expect("a probe passes");
    assert_eq!(throttle.snapshot().circuit.expect("a circuit").state, CircuitState::Closed);
}

#[tokio::test(start_paused = true)]
async fn the_latency_is_the_time_from_the_call_to_the_headers() {
    let throttle = circuit();
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<Asked>().is_ready());
    advance(secs(20)).await;
    let call = service.call(get());
    advance(millis(300)).await;
    next(&mut far).send_response(answer(200, 1));
    let response = call.await.expect("an answer");
    advance(secs(40)).await;
    drop(response);
    assert_eq!(throttle.snapshot().latency_mean, Some(millis(300)));
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_service_behind_is_its_own_and_is_learned_from() {
    let throttle = circuit();
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    assert!(service.poll_ready::<Asked>().is_ready());
    let call = service.call(get());
    next(&mut far).send_error(broken());
    let error = call.await.expect_err("it broke");
    assert!(matches!(error, CallError::Inner(_)) && error.refused().is_none());
    let inner = error.inner::<std::io::Error>().expect("of its own type");
    assert_eq!(inner.kind(), std::io::ErrorKind::ConnectionReset);
    let seen = throttle.snapshot();
    assert_eq!((seen.outcomes.network, seen.in_flight), (1, 0));
    // What is wrong before a call is told as it is, too.
    far.send_error(broken());
    assert!(matches!(service.poll_ready::<Asked>(), Poll::Ready(Err(CallError::Inner(_)))));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_asked_for_is_admitted_now_or_refused() {
    let throttle = slots(1);
    let (mut service, mut far) = spawn(ThrottleLayer::new(throttle.clone()));
    // The probe behind wants to be asked, so only ours is not.
    assert!(service.poll_ready::<Asked>().is_ready());
    let call = service.call(get());
    assert!(matches!(service.call(get()).await, Err(CallError::Refused(Refused::Limited { .. }))));
    next(&mut far).send_response(answer(204, 0));
    call.await.expect("an answer");
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

/// Services are shared and sent as far as what is behind them can be.
#[test]
fn services_can_be_sent_and_shared() {
    fn is_sent_and_shared<T: Send + Sync>(_: &T) {}
    let (service, _far) = tower_test::mock::pair::<Asked, crate::kit::tower::Answer>();
    let service = tower::Layer::layer(&ThrottleLayer::new(slots(1)), service);
    is_sent_and_shared(&service);
    drop(Spawn::new(service));
}
