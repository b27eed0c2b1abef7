//! The tower contract of `WaitLayer` with keyed throttles and varying costs: always ready, waiting inside the
//! call.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use http::Request;
use tidegate::tower::{CallError, ThrottleLayer, WaitLayer};
use tidegate::{
    Authority, Budget, CircuitState, Classes, Completion, Cost, HttpClasses, Keyed, Outcome, Random, Rate,
    Refused, Slots, Throttle,
};
use tokio::time::{Instant, advance};
use tower_test::mock::{self, Spawn};

use crate::kit::tower::{MockRequest, MockResponse, broken, get, is_idle, mock_response, next, request};
use crate::kit::{millis, secs, settle_tasks};

fn hosts(slots: u32) -> Keyed<Authority> {
    let limits = Throttle::builder().slots(Slots::fixed(slots)).limits().expect("within the bounds");
    Keyed::builder(limits).random(Random::fixed(0.0)).build().expect("within the bounds")
}

fn host(name: &str) -> Authority {
    Authority::new(name).expect("a host")
}

/// Polls a call by hand with a no-op waker.
fn poll<F: Future + ?Sized>(call: &mut Pin<Box<F>>) -> Poll<F::Output> {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test(start_paused = true)]
async fn keyed_service_is_always_ready_and_isolates_hosts() {
    let hosts = hosts(1);
    let (mut service, mut handle): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    let held = hosts.try_acquire(&host("busy.example"), Cost::request()).expect("a slot");
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let mut waits = service.call(request("https://busy.example/"));
    assert!(poll(&mut waits).is_pending() && is_idle(&mut handle));
    assert!(service.poll_ready::<MockRequest>().is_ready());
    let mut goes = service.call(request("https://free.example/"));
    assert!(poll(&mut goes).is_pending());
    next(&mut handle).send_response(mock_response(200, 0));
    goes.await.expect("a response");
    assert!(poll(&mut waits).is_pending() && is_idle(&mut handle));
    drop(held);
    assert!(poll(&mut waits).is_pending());
    next(&mut handle).send_response(mock_response(200, 0));
    waits.await.expect("a response");
}

/// Regression: a request whose body was streamed had used no tokens, so the time left ignored the budget.
#[tokio::test(start_paused = true)]
async fn time_left_counts_tokens_of_streamed_answers() {
    for (pieces, status, tokens) in [(0, 200, 5), (2, 200, 5), (2, 500, 0)] {
        let builder = Throttle::builder().slots(Slots::fixed(50)).budget(Budget::tokens(50, secs(10)));
        let throttle = builder.total(100).build().expect("within the bounds");
        let layer = ThrottleLayer::new(throttle.clone()).cost(|_: &MockRequest| Cost::from(5));
        let (mut service, mut handle): (Spawn<_>, _) = mock::spawn_layer(layer);
        assert!(service.poll_ready::<MockRequest>().is_ready());
        let mut call = service.call(get());
        assert!(poll(&mut call).is_pending());
        advance(secs(1)).await;
        next(&mut handle).send_response(mock_response(status, pieces));
        drop(call.await.expect("a response"));
        // 99 requests need 495 tokens, of which 45 remain; without any, the slots need two rounds.
        let wanted = if tokens > 0 { secs(90)..=secs(92) } else { secs(1)..=secs(3) };
        let eta = throttle.snapshot().eta.expect("one has completed");
        assert!(wanted.contains(&eta), "{status}, {pieces} pieces: {eta:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_waiting_call_leaves_the_queue() {
    let hosts = hosts(1);
    let (mut service, mut handle): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    let held = hosts.try_acquire(&host("far.example"), Cost::request()).expect("a slot");
    let mut calls: Vec<_> = (0..3).map(|_| service.call(get())).collect();
    assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
    let throttle = hosts.throttle(&host("far.example"));
    assert_eq!(throttle.snapshot().waiting, 3);
    drop(calls.remove(1));
    assert_eq!(throttle.snapshot().waiting, 2);
    drop(held);
    assert!(poll(&mut calls[0]).is_pending());
    drop(next(&mut handle));
    drop(calls);
    assert_eq!((throttle.snapshot().waiting, throttle.snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn call_returns_its_permit_if_inner_is_never_ready() {
    let limits = Throttle::builder().rate(Rate::per_second(1).burst(1)).slots(Slots::fixed(1)).limits();
    let hosts = Keyed::builder(limits.expect("within the bounds")).build().expect("within the bounds");
    let (mut service, mut handle): (Spawn<_>, mock::Handle<MockRequest, MockResponse>) =
        mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    handle.allow(0);
    let mut call = service.call(get());
    assert!(poll(&mut call).is_pending());
    let throttle = hosts.throttle(&host("far.example"));
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().rate_level), (1, Some(0)));
    drop(call);
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.rate_level, seen.admitted), (0, Some(1), 0));
}

#[tokio::test(start_paused = true)]
async fn pause_during_inner_poll_ready_is_respected() {
    let hosts = hosts(2);
    let (mut service, mut handle): (Spawn<_>, mock::Handle<MockRequest, MockResponse>) =
        mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    handle.allow(0);
    let began = Instant::now();
    let call = tokio::spawn(service.call(get()));
    settle_tasks().await;
    hosts.record(&host("far.example"), Outcome::overload().retry_after(secs(4)));
    handle.allow(1);
    settle_tasks().await;
    assert!(is_idle(&mut handle), "it is not sent before the pause is over");
    let (_, reply) = handle.next_request().await.expect("it is sent after the pause");
    assert!(began.elapsed() >= secs(4));
    reply.send_response(mock_response(200, 0));
    call.await.expect("no panic").expect("a response");
}

#[tokio::test(start_paused = true)]
async fn response_headers_affect_their_host_alone() {
    let hosts = hosts(4);
    let (mut service, mut handle): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    let mut call = service.call(request("http://one.example:80/"));
    assert!(poll(&mut call).is_pending());
    let mut too_many = mock_response(429, 3);
    too_many.headers_mut().insert("retry-after", "60".parse().expect("a value"));
    next(&mut handle).send_response(too_many);
    // The pause has begun although the body has not been read.
    let response = call.await.expect("a response");
    let seen = |name| hosts.throttle(&host(name)).snapshot();
    assert_eq!((seen("one.example").in_flight, seen("two.example").in_flight), (1, 0));
    let refused = hosts.try_acquire(&host("one.example"), Cost::request()).expect_err("a pause");
    assert_eq!(refused.retry_after(), Some(secs(60)));
    assert!(hosts.try_acquire(&host("two.example"), Cost::request()).is_ok());
    drop(response);
    assert_eq!(seen("one.example").in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn open_circuit_sends_nothing_to_its_host() {
    let hosts = Keyed::hosts().build().expect("within the bounds");
    let (mut service, mut handle): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    for _ in 0..5 {
        hosts.record(&host("far.example"), Outcome::failure());
    }
    let error = service.call(get()).await.expect_err("the circuit is open");
    assert!(matches!(error, CallError::Refused(Refused::CircuitOpen { .. })), "{error}");
    assert!(is_idle(&mut handle));
    let circuit = hosts.throttle(&host("far.example")).snapshot().circuit.expect("a circuit");
    assert_eq!(circuit.state, CircuitState::Open);
}

#[tokio::test(start_paused = true)]
async fn weighted_service_charges_the_cost_of_each_request() {
    let throttle =
        Throttle::builder().budget(Budget::tokens(100, secs(60))).build().expect("within the bounds");
    let weigh = |request: &Request<()>| {
        let tokens = request.headers().get("x-tokens").and_then(|tokens| tokens.to_str().ok()?.parse().ok());
        Cost::request().tokens(tokens.unwrap_or(0))
    };
    let (mut service, mut handle): (Spawn<_>, mock::Handle<MockRequest, MockResponse>) =
        mock::spawn_layer(ThrottleLayer::new(throttle.clone()).cost(weigh));
    let with = |tokens: &str| Request::get("/").header("x-tokens", tokens).body(()).expect("a request");
    let call = tokio::spawn(service.call(with("80")));
    let (_, reply) = handle.next_request().await.expect("sent");
    reply.send_response(mock_response(200, 1));
    let response = call.await.expect("no panic").expect("a response");
    assert_eq!(throttle.snapshot().tokens_used, 80);
    drop(response);
    // The estimated tokens stay used after the request.
    assert_eq!(throttle.snapshot().tokens_used, 80);

    let error = service.call(with("101")).await.expect_err("more than the whole budget");
    assert!(matches!(error, CallError::Refused(Refused::TooLarge { tokens: 101, capacity: 100 })));
    let mut waits = service.call(with("30"));
    assert!(poll(&mut waits).is_pending() && is_idle(&mut handle));
    advance(secs(61)).await;
    settle_tasks().await;
    assert!(poll(&mut waits).is_pending());
    next(&mut handle).send_response(mock_response(500, 1));
    drop(waits.await.expect("a response"));
    assert_eq!(throttle.snapshot().tokens_used, 0, "a failure without reported usage is charged nothing");
}

#[tokio::test(start_paused = true)]
async fn key_function_can_use_any_part_of_the_request() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().expect("within the bounds");
    let keyed: Keyed<String> = Keyed::builder(limits).build().expect("within the bounds");
    let key = |request: &Request<()>| {
        request.headers().get("x-account").map_or(String::new(), |key| format!("{key:?}"))
    };
    let (mut service, mut handle): (Spawn<_>, mock::Handle<MockRequest, MockResponse>) =
        mock::spawn_layer(WaitLayer::by_key(keyed.clone(), key));
    let of = |account: &str| Request::get("/").header("x-account", account).body(()).expect("a request");
    let mut calls: Vec<_> = ["a", "a", "b"].map(|account| service.call(of(account))).into();
    assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
    for _ in 0..2 {
        next(&mut handle).send_response(mock_response(200, 0));
    }
    assert!(is_idle(&mut handle), "the second of one account waits for the first");
    assert_eq!(keyed.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn error_function_classifies_and_missing_host_fails() {
    let limits = Throttle::host().limits().expect("within the bounds");
    let hosts = Keyed::builder(limits).build().expect("within the bounds");
    let unsent = HttpClasses::new(Classes::new()).errors(|_: &tidegate::tower::BoxError| Completion::Unsent);
    let layer = WaitLayer::by_host(hosts.clone()).classes(unsent);
    let (mut service, mut handle): (Spawn<_>, mock::Handle<MockRequest, MockResponse>) =
        mock::spawn_layer(layer);
    let mut call = service.call(get());
    assert!(poll(&mut call).is_pending());
    next(&mut handle).send_error(broken());
    assert!(matches!(call.await, Err(CallError::Inner(_))));
    assert_eq!(hosts.throttle(&host("far.example")).snapshot().outcomes.total(), 0);

    let error = service.call(request("/only/a/path")).await.expect_err("no host");
    assert!(matches!(error, CallError::NoHost(_)), "{error}");
    let named = Request::get("/path").header("host", "Named.Example:443").body(()).expect("a request");
    let mut call = service.call(named);
    assert!(poll(&mut call).is_pending());
    drop(next(&mut handle));
    assert!(hosts.get(&host("named.example")).is_some());
}

#[tokio::test(start_paused = true)]
async fn calls_are_sent_at_the_rate_in_fifo_order() {
    let throttle = Throttle::builder().rate(Rate::per_second(2).burst(1)).build().expect("within the bounds");
    let unit = |_: &Request<()>| Cost::request();
    let (mut service, mut handle): (Spawn<_>, mock::Handle<MockRequest, MockResponse>) =
        mock::spawn_layer(ThrottleLayer::new(throttle).cost(unit));
    let began = Instant::now();
    for number in 0..5 {
        tokio::spawn(service.call(request(&format!("https://far.example/{number}"))));
    }
    for number in 0..5_u32 {
        let (request, _) = handle.next_request().await.expect("sent");
        assert_eq!(request.uri().path(), format!("/{number}"));
        assert_eq!(began.elapsed(), millis(500) * number);
    }
}
