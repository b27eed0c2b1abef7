//! Retries of the reqwest middleware over real sockets: which requests are retried, with which body, and what
//! they are charged.

use reqwest::{Body, Client};
use reqwest_middleware::ClientWithMiddleware;
use tidegate::reqwest::{Hold, Replay, ThrottleError, Throttling, Tries};
use tidegate::{
    Authority, Backoff, Circuit, Classes, CompletionClass, Cost, Keyed, ManualClock, Rate, Refused, Retry,
    RetryBudget, Slots, Throttle,
};

use crate::kit::http::{Reply, TestServer, keyed_on, pass_time};
use crate::kit::{millis, secs};

/// Hosts with slots, a circuit that hardly ever opens, and this many attempts.
fn hosts(clock: &ManualClock, attempts: u32) -> Keyed<Authority> {
    let circuit = Circuit::after_failures(1_000);
    let retry = Retry::attempts(attempts).backoff(Backoff::exponential(millis(200), secs(5)));
    let builder = Throttle::builder().slots(Slots::fixed(4)).circuit(circuit).retry(retry);
    keyed_on(clock, Keyed::builder(builder.limits().expect("within the bounds")))
}

fn client(throttling: Throttling) -> ClientWithMiddleware {
    throttling.client(Client::builder()).expect("a client")
}

/// A server that returns these statuses in turn, and then repeats the last one.
async fn respond_with(clock: &ManualClock, statuses: &'static [u16]) -> TestServer {
    TestServer::start(clock, |seen| Reply::status(statuses[seen.number.min(statuses.len() - 1)])).await
}

#[tokio::test]
async fn ordinary_program_needs_three_lines() -> Result<(), Box<dyn std::error::Error>> {
    let server = TestServer::start(&ManualClock::new(), |_| Reply::status(200).header("x-from", "far")).await;
    let hosts = Keyed::hosts().build()?;
    let client = Throttling::by_host(hosts.clone()).client(Client::builder())?;
    let response = client.get(server.url("/page?q=1")).send().await?;
    assert_eq!((response.status().as_u16(), &response.headers()["x-from"]), (200, &"far".parse()?));
    // The body wrapper that holds the slot loses nothing of the response.
    assert_eq!(response.url().as_str(), server.url("/page?q=1"));
    assert_eq!(response.content_length(), Some(5));
    assert!(response.remote_addr().is_some());
    assert_eq!(response.text().await?, "hello");
    assert_eq!(hosts.snapshot(1).top[0].key, server.authority());
    Ok(())
}

#[tokio::test]
async fn transient_failures_are_retried_and_admitted_anew() {
    let clock = ManualClock::new();
    let (hosts, server) = (hosts(&clock, 5), respond_with(&clock, &[503, 500, 200]).await);
    let client = client(Throttling::by_host(hosts.clone()));
    let response = pass_time(&clock, &hosts, client.get(server.url("/")).send()).await.expect("a response");
    assert_eq!(response.status(), 200);
    assert_eq!(
        response.extensions().get::<Tries>().map(|tries| (tries.attempts, tries.redirects)),
        Some((3, 0))
    );
    let seen = hosts.snapshot(1);
    assert_eq!((seen.admitted, seen.retries, server.count()), (3, 2, 3));
    // 200 ms, then 400 ms.
    let times: Vec<_> = server.requests().iter().map(|seen| seen.at).collect();
    assert_eq!((times[1].since(times[0]), times[2].since(times[1])), (millis(200), millis(400)));
}

#[tokio::test]
async fn last_response_is_returned_and_4xx_not_retried() {
    let clock = ManualClock::new();
    for (statuses, attempts, status) in [(&[503][..], 3, 503), (&[404], 1, 404), (&[200], 1, 200)] {
        let (hosts, server) = (hosts(&clock, 3), respond_with(&clock, statuses).await);
        let client = client(Throttling::by_host(hosts.clone()));
        let response =
            pass_time(&clock, &hosts, client.get(server.url("/")).send()).await.expect("a response");
        assert_eq!((response.status().as_u16(), server.count()), (status, attempts));
    }
}

#[tokio::test]
async fn cloneable_bodies_are_resent_and_streams_are_not() {
    let clock = ManualClock::new();
    let (hosts, server) = (hosts(&clock, 3), respond_with(&clock, &[429, 200, 429]).await);
    let client = client(Throttling::by_host(hosts.clone()));
    let call = client.post(server.url("/")).body("all of it").send();
    assert_eq!(pass_time(&clock, &hosts, call).await.expect("a response").status(), 200);
    let bodies: Vec<_> = server.requests().into_iter().map(|seen| seen.body).collect();
    assert_eq!(bodies, ["all of it", "all of it"]);

    let stream = Body::wrap(http_body_util::StreamBody::new(SingleFrame(Some("a stream"))));
    let call = client.post(server.url("/")).body(stream).send();
    assert_eq!(pass_time(&clock, &hosts, call).await.expect("a response").status(), 429);
    assert_eq!(server.count(), 3, "a stream is sent once");
}

/// A stream of one frame.
struct SingleFrame(Option<&'static str>);

impl futures_core::Stream for SingleFrame {
    type Item = Result<http_body::Frame<&'static [u8]>, std::convert::Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(self.0.take().map(|text| Ok(http_body::Frame::data(text.as_bytes()))))
    }
}

#[tokio::test]
async fn post_is_resent_only_if_surely_not_executed() {
    let clock = ManualClock::new();
    let table = [
        // The first response, the replay policy, an idempotency key, and the expected requests.
        (Reply::status(500), Replay::Careful, None, 1),
        (Reply::hang_up(), Replay::Careful, None, 1),
        (Reply::status(429), Replay::Careful, None, 2),
        // Proxies also return this for an upstream that closed the connection midway.
        (Reply::status(503), Replay::Careful, None, 1),
        (Reply::status(503).header("retry-after", 1), Replay::Careful, None, 2),
        (Reply::status(500), Replay::Careful, Some("4711"), 2),
        (Reply::hang_up(), Replay::Careful, Some("4711"), 2),
        (Reply::status(500), Replay::Always, None, 2),
    ];
    for (number, (first, replay, key, times)) in table.into_iter().enumerate() {
        let hosts = hosts(&clock, 2);
        let reply = move |seen: &crate::kit::http::RecordedRequest| {
            if seen.number == 0 { first.clone() } else { Reply::status(200) }
        };
        let server = TestServer::start(&clock, reply).await;
        let client = client(Throttling::by_host(hosts.clone()).replay(replay));
        let mut call = client.post(server.url("/")).body("order");
        if let Some(key) = key {
            call = call.header("idempotency-key", key);
        }
        let result = pass_time(&clock, &hosts, call.send()).await;
        assert_eq!(server.count(), times, "row {number}: {result:?}");
    }
}

/// The final error is reqwest's own.
#[tokio::test]
async fn failed_connection_resends_even_a_post() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock, 3);
    let client = client(Throttling::by_host(hosts.clone()));
    // Bound but not listening, so that no other process listens on the port.
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let port = socket.local_addr().expect("one");
    let call = client.post(format!("http://{port}/")).body("order").send();
    let error = pass_time(&clock, &hosts, call).await.expect_err("no server listens");
    assert!(error.is_connect() && ThrottleError::of(&error).is_none(), "{error}");
    let seen = hosts.snapshot(1);
    assert_eq!((seen.admitted, seen.top[0].throttle.outcomes.network), (3, 3));
}

#[tokio::test]
async fn retry_budget_bounds_retries() {
    let clock = ManualClock::new();
    let (hosts, server) = (hosts(&clock, 1), respond_with(&clock, &[503]).await);
    let budget = RetryBudget::new(0.0, 7, secs(3_600));
    let client = client(Throttling::by_host(hosts.clone()).retry(Retry::attempts(4).budget(budget)));
    for _ in 0..20 {
        let call = client.get(server.url("/")).send();
        assert_eq!(pass_time(&clock, &hosts, call).await.expect("a response").status(), 503);
    }
    assert_eq!(server.count(), 20 + 7);
}

#[tokio::test]
async fn slot_is_held_until_body_is_read_dropped_or_broken() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock, 1);
    let server = TestServer::start(&clock, |seen| match seen.path.as_str() {
        "/cut" => Reply::status(200).cut(),
        _ => Reply::status(200),
    });
    let server = server.await;
    let in_flight = || hosts.snapshot(0).in_flight;
    let slow = client(Throttling::by_host(hosts.clone()));
    let get = async |path: &str| slow.get(server.url(path)).send().await.expect("a response");
    let (read, dropped, cut) = (get("/").await, get("/").await, get("/cut").await);
    assert_eq!(in_flight(), 3);
    assert_eq!(read.text().await.expect("a body"), "hello");
    assert_eq!(in_flight(), 2);
    drop(dropped);
    assert_eq!(in_flight(), 1);
    cut.text().await.expect_err("the body breaks");
    let seen = hosts.snapshot(1);
    assert_eq!((seen.in_flight, seen.top[0].throttle.outcomes.network), (0, 1));

    let quick = client(Throttling::by_host(hosts.clone()).hold(Hold::Headers));
    let response = quick.get(server.url("/")).send().await.expect("a response");
    assert_eq!(in_flight(), 0);
    assert_eq!(response.text().await.expect("a body"), "hello");
}

#[tokio::test]
async fn dropped_request_releases_permit_without_retry() {
    let clock = ManualClock::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let hosts = hosts(&clock, 5);
    let client = client(Throttling::by_host(hosts.clone()));
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let call = tokio::spawn(client.get(url).send());
    let (stream, _) = listener.accept().await.expect("a caller");
    assert_eq!(hosts.snapshot(0).in_flight, 1);
    call.abort();
    call.await.expect_err("it was aborted");
    let seen = hosts.snapshot(1);
    assert_eq!((seen.in_flight, seen.admitted, seen.top[0].throttle.outcomes.total()), (0, 1, 0));
    drop(stream);
}

#[tokio::test]
async fn custom_key_cost_and_class_functions_apply() {
    let clock = ManualClock::new();
    let server =
        TestServer::start(&clock, |seen| Reply::status(if seen.number == 0 { 420 } else { 200 })).await;
    let limits = Throttle::builder().slots(Slots::fixed(2)).bytes(tidegate::Bytes::in_flight(1_000)).limits();
    let keyed: Keyed<String> = Keyed::builder(limits.expect("within the bounds")).build().expect("in bounds");
    let throttling = Throttling::by_key(keyed.clone(), |request| request.url().path().to_owned())
        .cost(|request| Cost::request().bytes(request.url().path().len() as u64))
        .classes(Classes::new().status(420, CompletionClass::Overload).expect("a status"))
        .retry(Retry::attempts(2).backoff(Backoff::fixed(std::time::Duration::ZERO)));
    let response = client(throttling).get(server.url("/account")).send().await.expect("a response");
    assert_eq!((response.status().as_u16(), server.count()), (200, 2));
    let seen = keyed.snapshot(1);
    assert_eq!(seen.top[0].key, "/account");
    assert_eq!(seen.top[0].throttle.bytes_in_flight, 8);
}

#[tokio::test]
async fn refusals_are_typed_errors() {
    let clock = ManualClock::new();
    let server = respond_with(&clock, &[200]).await;
    let builder = Throttle::builder().rate(Rate::per_second(1).burst(1)).waiters_max(1);
    let throttle = builder.clock(clock.clone()).build().expect("within the bounds");
    let client = client(Throttling::one(throttle.clone()));
    client.get(server.url("/")).send().await.expect("a response");
    throttle.close();
    let error = client.get(server.url("/")).send().await.expect_err("closed");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::Refused(Refused::Closed)));
    assert_eq!(error.to_string(), "the throttle is closed");
    assert_eq!(server.count(), 1);
}

/// Time is virtual and advances when all tasks are idle. The server never responds, so the timeout elapses.
#[tokio::test(start_paused = true)]
async fn timeout_is_a_network_failure_and_retried() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let builder = Throttle::builder().slots(Slots::fixed(1)).circuit(Circuit::after_failures(9));
    let throttle = builder.retry(Retry::attempts(2)).build().expect("within the bounds");
    let client = client(Throttling::one(throttle.clone()));
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    let error = client.get(url).timeout(secs(3)).send().await.expect_err("a timeout");
    assert!(error.is_timeout(), "{error}");
    let seen = throttle.snapshot();
    assert_eq!((seen.admitted, seen.outcomes.network, seen.in_flight), (2, 2, 0));
}
