//! The contract of tower, for throttles by key and requests of different costs: always ready, waiting inside the call.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use http::Request;
use tidegate::tower::{CallError, ThrottleLayer, WaitLayer};
use tidegate::{
    Authority, Budget, CircuitState, Classes, Cost, Ended, HttpClasses, Keyed, Outcome, Random, Rate,
    Refused, Slots, Throttle,
};
use tokio::time::{Instant, advance};
use tower_test::mock::{self, Spawn};

use crate::kit::tower::{Answer, Asked, answer, broken, get, is_quiet, next, request};
use crate::kit::{millis, secs, settle_tasks};

fn hosts(slots: u32) -> Keyed<Authority> {
    let limits = Throttle::builder().slots(Slots::fixed(slots)).limits().expect("within the bounds");
    Keyed::builder(limits).random(Random::fixed(0.0)).build().expect("within the bounds")
}

fn host(name: &str) -> Authority {
    Authority::new(name).expect("a host")
}

/// Polls a call by hand, with nobody to wake.
fn poll<F: Future + ?Sized>(call: &mut Pin<Box<F>>) -> Poll<F::Output> {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test(start_paused = true)]
async fn a_keyed_service_is_always_ready_and_a_host_that_waits_holds_up_no_other() {
    let hosts = hosts(1);
    let (mut service, mut far): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    let held = hosts.try_acquire(&host("busy.example"), Cost::request()).expect("a slot");
    assert!(service.poll_ready::<Asked>().is_ready());
    let mut waits = service.call(request("https://busy.example/"));
    assert!(poll(&mut waits).is_pending() && is_quiet(&mut far));
    assert!(service.poll_ready::<Asked>().is_ready());
    let mut goes = service.call(request("https://free.example/"));
    assert!(poll(&mut goes).is_pending());
    next(&mut far).send_response(answer(200, 0));
    goes.await.expect("an answer");
    assert!(poll(&mut waits).is_pending() && is_quiet(&mut far));
    drop(held);
    assert!(poll(&mut waits).is_pending());
    next(&mut far).send_response(answer(200, 0));
    waits.await.expect("an answer");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_while_it_waits_leaves_the_line() {
    let hosts = hosts(1);
    let (mut service, mut far): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    let held = hosts.try_acquire(&host("far.example"), Cost::request()).expect("a slot");
    let mut calls: Vec<_> = (0..3).map(|_| service.call(get())).collect();
    assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
    let throttle = hosts.throttle(&host("far.example"));
    assert_eq!(throttle.snapshot().waiting, 3);
    drop(calls.remove(1));
    assert_eq!(throttle.snapshot().waiting, 2);
    drop(held);
    assert!(poll(&mut calls[0]).is_pending());
    drop(next(&mut far));
    drop(calls);
    assert_eq!((throttle.snapshot().waiting, throttle.snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn what_was_taken_returns_whole_where_the_service_behind_never_became_ready() {
    let limits = Throttle::builder().rate(Rate::per_second(1).burst(1)).slots(Slots::fixed(1)).limits();
    let hosts = Keyed::builder(limits.expect("within the bounds")).build().expect("within the bounds");
    let (mut service, mut far): (Spawn<_>, mock::Handle<Asked, Answer>) =
        mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    far.allow(0);
    let mut call = service.call(get());
    assert!(poll(&mut call).is_pending());
    let throttle = hosts.throttle(&host("far.example"));
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().rate_level), (1, Some(0)));
    drop(call);
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.rate_level, seen.admitted), (0, Some(1), 0));
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_begins_while_the_service_behind_is_not_ready_is_waited_for() {
    let hosts = hosts(2);
    let (mut service, mut far): (Spawn<_>, mock::Handle<Asked, Answer>) =
        mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    far.allow(0);
    let began = Instant::now();
    let call = tokio::spawn(service.call(get()));
    settle_tasks().await;
    hosts.record(&host("far.example"), Outcome::overload().retry_after(secs(4)));
    far.allow(1);
    settle_tasks().await;
    assert!(is_quiet(&mut far), "it is not sent before the pause is over");
    let (_, reply) = far.next_request().await.expect("in the end it is sent");
    assert!(began.elapsed() >= secs(4));
    reply.send_response(answer(200, 0));
    call.await.expect("no panic").expect("an answer");
}

#[tokio::test(start_paused = true)]
async fn the_headers_of_a_host_change_that_host_alone() {
    let hosts = hosts(4);
    let (mut service, mut far): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    let mut call = service.call(request("http://one.example:80/"));
    assert!(poll(&mut call).is_pending());
    let mut too_many = answer(429, 3);
    too_many.headers_mut().insert("retry-after", "60".parse().expect("a value"));
    next(&mut far).send_response(too_many);
    // The body is still out, and the pause has begun.
    let response = call.await.expect("an answer");
    let seen = |name| hosts.throttle(&host(name)).snapshot();
    assert_eq!((seen("one.example").in_flight, seen("two.example").in_flight), (1, 0));
    let refused = hosts.try_acquire(&host("one.example"), Cost::request()).expect_err("a pause");
    assert_eq!(refused.retry_after(), Some(secs(60)));
    assert!(hosts.try_acquire(&host("two.example"), Cost::request()).is_ok());
    drop(response);
    assert_eq!(seen("one.example").in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_to_a_host_whose_circuit_is_open() {
    let hosts = Keyed::hosts().build().expect("within the bounds");
    let (mut service, mut far): (Spawn<_>, _) = mock::spawn_layer(WaitLayer::by_host(hosts.clone()));
    for _ in 0..5 {
        hosts.record(&host("far.example"), Outcome::failure());
    }
    let error = service.call(get()).await.expect_err("it is open");
    assert!(matches!(error, CallError::Refused(Refused::CircuitOpen { .. })), "{error}");
    assert!(is_quiet(&mut far));
    let circuit = hosts.throttle(&host("far.example")).snapshot().circuit.expect("a circuit");
    assert_eq!(circuit.state, CircuitState::Open);
}

#[tokio::test(start_paused = true)]
async fn a_weighted_service_takes_what_each_request_costs() {
    let throttle =
        Throttle::builder().budget(Budget::tokens(100, secs(60))).build().expect("within the bounds");
    let weigh = |request: &Request<()>| {
        let tokens = request.headers().get("x-tokens").and_then(|tokens| tokens.to_str().ok()?.parse().ok());
        Cost::request().tokens(tokens.unwrap_or(0))
    };
    let (mut service, mut far): (Spawn<_>, mock::Handle<Asked, Answer>) =
        mock::spawn_layer(ThrottleLayer::new(throttle.clone()).cost(weigh));
    let with = |tokens: &str| Request::get("/").header("x-tokens", tokens).body(()).expect("a request");
    let call = tokio::spawn(service.call(with("80")));
    let (_, reply) = far.next_request().await.expect("sent");
    reply.send_response(answer(200, 1));
    let response = call.await.expect("no panic").expect("an answer");
    assert_eq!(throttle.snapshot().tokens_used, 80);
    drop(response);
    // What it was thought to use stays used when it has ended.
    assert_eq!(throttle.snapshot().tokens_used, 80);

    let error = service.call(with("101")).await.expect_err("more than there ever is");
    assert!(matches!(error, CallError::Refused(Refused::TooLarge { tokens: 101, capacity: 100 })));
    let mut waits = service.call(with("30"));
    assert!(poll(&mut waits).is_pending() && is_quiet(&mut far));
    advance(secs(61)).await;
    settle_tasks().await;
    assert!(poll(&mut waits).is_pending());
    next(&mut far).send_response(answer(500, 1));
    drop(waits.await.expect("an answer"));
    assert_eq!(throttle.snapshot().tokens_used, 0, "a failure that says nothing has used nothing");
}

#[tokio::test(start_paused = true)]
async fn a_key_may_be_anything_that_a_function_finds_in_the_request() {
    let limits = Throttle::builder().slots(Slots::fixed(1)).limits().expect("within the bounds");
    let keyed: Keyed<String> = Keyed::builder(limits).build().expect("within the bounds");
    let key = |request: &Request<()>| {
        request.headers().get("x-account").map_or(String::new(), |key| format!("{key:?}"))
    };
    let (mut service, mut far): (Spawn<_>, mock::Handle<Asked, Answer>) =
        mock::spawn_layer(WaitLayer::by_key(keyed.clone(), key));
    let of = |account: &str| Request::get("/").header("x-account", account).body(()).expect("a request");
    let mut calls: Vec<_> = ["a", "a", "b"].map(|account| service.call(of(account))).into();
    assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
    for _ in 0..2 {
        next(&mut far).send_response(answer(200, 0));
    }
    assert!(is_quiet(&mut far), "the second of one account waits for the first");
    assert_eq!(keyed.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn errors_mean_what_a_function_says_and_a_request_to_nowhere_is_told() {
    let limits = Throttle::host().limits().expect("within the bounds");
    let hosts = Keyed::builder(limits).build().expect("within the bounds");
    let unsent = HttpClasses::new(Classes::new()).errors(|_: &tidegate::tower::BoxError| Ended::Unsent);
    let layer = WaitLayer::by_host(hosts.clone()).classes(unsent);
    let (mut service, mut far): (Spawn<_>, mock::Handle<Asked, Answer>) = mock::spawn_layer(layer);
    let mut call = service.call(get());
    assert!(poll(&mut call).is_pending());
    next(&mut far).send_error(broken());
    assert!(matches!(call.await, Err(CallError::Inner(_))));
    assert_eq!(hosts.throttle(&host("far.example")).snapshot().outcomes.total(), 0);

    let error = service.call(request("/only/a/path")).await.expect_err("no host");
    assert!(matches!(error, CallError::NoHost(_)), "{error}");
    let named = Request::get("/path").header("host", "Named.Example:443").body(()).expect("a request");
    let mut call = service.call(named);
    assert!(poll(&mut call).is_pending());
    drop(next(&mut far));
    assert!(hosts.get(&host("named.example")).is_some());
}

#[tokio::test(start_paused = true)]
async fn calls_come_at_the_rate_and_in_the_order_of_asking() {
    let throttle = Throttle::builder().rate(Rate::per_second(2).burst(1)).build().expect("within the bounds");
    let unit = |_: &Request<()>| Cost::request();
    let (mut service, mut far): (Spawn<_>, mock::Handle<Asked, Answer>) =
        mock::spawn_layer(ThrottleLayer::new(throttle).cost(unit));
    let began = Instant::now();
    for number in 0..5 {
        tokio::spawn(service.call(request(&format!("https://far.example/{number}"))));
    }
    for number in 0..5_u32 {
        let (asked, _) = far.next_request().await.expect("sent");
        assert_eq!(asked.uri().path(), format!("/{number}"));
        assert_eq!(began.elapsed(), millis(500) * number);
    }
}
