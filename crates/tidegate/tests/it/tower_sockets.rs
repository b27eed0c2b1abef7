//! The tower layers over real sockets with hyper's client: the guarantees of the reqwest middleware hold for
//! any tower client.

use http::Request;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tidegate::tower::{CallError, ThrottleLayer, WaitLayer};
use tidegate::{Authority, Circuit, Keyed, ManualClock, Outcome, Refused, Slots, Throttle};
use tokio::task::JoinSet;
use tower::{Layer as _, Service as _, ServiceExt as _};

use crate::kit::http::{Reply, TestServer, keyed_on, pass_time, seconds};
use crate::kit::secs;

fn client() -> Client<HttpConnector, String> {
    Client::builder(TokioExecutor::new()).build_http()
}

fn get(server: &TestServer) -> Request<String> {
    Request::get(server.url("/")).body(String::new()).expect("a request")
}

fn hosts(clock: &ManualClock) -> Keyed<Authority> {
    let builder = Throttle::builder().slots(Slots::fixed(3)).circuit(Circuit::after_failures(3));
    keyed_on(clock, Keyed::builder(builder.limits().expect("within the bounds")))
}

#[tokio::test]
async fn no_request_is_sent_during_a_retry_after() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |seen| match seen.number {
        4 => Reply::status(429).header("retry-after", 9),
        _ => Reply::status(200),
    });
    let (server, hosts) = (server.await, hosts(&clock));
    let service = WaitLayer::by_host(hosts.clone()).layer(client());
    let mut calls = JoinSet::new();
    for _ in 0..20 {
        let (service, request) = (service.clone(), get(&server));
        calls.spawn(async move {
            let response = service.oneshot(request).await.expect("a response");
            response.into_body().collect().await.expect("a body").to_bytes()
        });
    }
    let bodies = pass_time(&clock, &hosts, calls.join_all()).await;
    assert!(bodies.iter().all(|body| &body[..] == b"hello"));
    let times: Vec<_> = server.requests().iter().map(|seen| seconds(seen.at)).collect();
    // Requests in flight at that moment complete; no other starts until the hint is over.
    let begun = times.iter().filter(|at| **at == 0.0).count();
    assert!((5..=7).contains(&begun), "{times:?}");
    assert!(times.iter().all(|at| *at == 0.0 || *at >= 9.0), "{times:?}");
}

#[tokio::test]
async fn open_circuit_sends_nothing_to_its_host() {
    let clock = ManualClock::new();
    let server =
        TestServer::start(&clock, |seen| if seen.number < 2 { Reply::hang_up() } else { Reply::status(500) });
    let (server, hosts) = (server.await, hosts(&clock));
    let service = WaitLayer::by_host(hosts.clone()).layer(client());
    let mut errors = 0;
    for _ in 0..3 {
        errors += u32::from(service.clone().oneshot(get(&server)).await.is_err());
    }
    assert_eq!((errors, server.count()), (2, 3));
    for _ in 0..10 {
        let error = service.clone().oneshot(get(&server)).await.expect_err("the circuit is open");
        assert!(matches!(error, CallError::Refused(Refused::CircuitOpen { .. })), "{error}");
    }
    assert_eq!(server.count(), 3);
}

#[tokio::test]
async fn slot_is_held_until_the_body_is_received() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |_| Reply::status(200)).await;
    let throttle =
        Throttle::builder().slots(Slots::fixed(1)).clock(clock.clone()).build().expect("in bounds");
    let mut service = ThrottleLayer::new(throttle.clone()).layer(client());
    let response = service.ready().await.expect("ready").call(get(&server)).await.expect("a response");
    assert_eq!(throttle.snapshot().in_flight, 1);
    let mut other = service.clone();
    let waits = tokio::spawn(async move {
        let response = other.ready().await.expect("ready").call(get(&server)).await.expect("a response");
        (response.status().as_u16(), server.count())
    });
    crate::kit::settle_tasks().await;
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().waiting), (1, 1));
    response.into_body().collect().await.expect("a body");
    assert_eq!(waits.await.expect("no panic"), (200, 2));
    throttle.record(Outcome::overload().retry_after(secs(5)));
    assert!(throttle.try_acquire(tidegate::Cost::request()).is_err());
}
