//! The body of a rejection names the quota that is cut, unless the caller does not read it, and reaches the caller whole.

use reqwest::Client;
use reqwest_middleware::ClientWithMiddleware;
use tidegate::reqwest::Throttling;
use tidegate::{Authority, Backoff, Cost, Keyed, Limits, ManualClock, Phase, Retry, Slots, Throttle};

use crate::kit::http::{Reply, TestServer, keyed_on, pass_time};
use crate::kit::{millis, secs};

const BODY: &str = r#"{"error": {"message": "Rate limit reached on tokens per min (TPM): Limit 9"}}"#;

/// Throttles with this many attempts, and a client whose requests cost this many tokens.
fn setup(clock: &ManualClock, attempts: u32, tokens: u64) -> (Keyed<Authority>, ClientWithMiddleware) {
    let retry = Retry::attempts(attempts).backoff(Backoff::exponential(millis(200), secs(5)));
    let limits = Throttle::auto().retry(retry).limits().expect("within the bounds");
    setup_with(clock, limits, tokens)
}

fn setup_with(clock: &ManualClock, limits: Limits, tokens: u64) -> (Keyed<Authority>, ClientWithMiddleware) {
    let hosts = keyed_on(clock, Keyed::builder(limits));
    let throttling = Throttling::by_host(hosts.clone()).cost(move |_| Cost::request().tokens(tokens));
    (hosts, throttling.client(Client::builder()).expect("a client"))
}

/// Whether requests were cut, and whether tokens were.
fn cuts(hosts: &Keyed<Authority>) -> (bool, bool) {
    let control = hosts.snapshot(1).top[0].throttle.control.expect("it learns");
    (control.requests.quota.is_some(), control.tokens.quota.is_some())
}

#[tokio::test]
async fn body_of_a_rejection_names_what_is_cut() {
    // Whether the caller reads the body, and the tokens of the request.
    let cases = [(true, 100, (false, true)), (false, 100, (true, false)), (true, 0, (true, false))];
    for (is_read, tokens, wanted) in cases {
        let clock = ManualClock::new();
        let server = TestServer::start(&clock, |_| Reply::status(429).body(BODY)).await;
        let (hosts, client) = setup(&clock, 1, tokens);
        let response = client.post(server.url("/")).send().await.expect("a response");
        if is_read {
            assert_eq!(response.text().await.expect("a body"), BODY);
        } else {
            drop(response);
        }
        assert_eq!(cuts(&hosts), wanted, "{is_read} {tokens}");
        assert_eq!(hosts.snapshot(0).in_flight, 0);
    }
}

#[tokio::test]
async fn rejection_that_is_retried_names_what_is_cut() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |seen| match seen.number {
        0 => Reply::status(429).body(BODY),
        _ => Reply::status(200),
    })
    .await;
    let (hosts, client) = setup(&clock, 2, 100);
    let response = pass_time(&clock, &hosts, client.post(server.url("/")).send()).await.expect("a response");
    assert_eq!((response.status().as_u16(), server.count()), (200, 2));
    assert_eq!(cuts(&hosts), (false, true));
}

/// Regression: the piece of the body that was read for the quota's name was lost.
#[tokio::test]
async fn rejection_whose_retry_is_refused_is_whole() {
    // In many pieces.
    let body = BODY.repeat(4_000);
    for is_cut in [false, true] {
        let clock = ManualClock::new();
        let retry = Retry::attempts(2).backoff(Backoff::fixed(millis(0)));
        let throttle = Throttle::auto().retry(retry).clock(clock.clone()).build().expect("within the bounds");
        let (closing, sent) = (throttle.clone(), body.clone());
        let server = TestServer::start(&clock, move |_| {
            closing.close();
            let reply = Reply::status(429).header("x-from", "far").body(&sent);
            if is_cut { reply.cut() } else { reply }
        })
        .await;
        let throttling = Throttling::one(throttle).cost(|_| Cost::from(100));
        let client = throttling.client(Client::builder()).expect("a client");
        let response = client.post(server.url("/v1")).send().await.expect("a response");
        assert_eq!((response.status().as_u16(), server.count()), (429, 1));
        assert_eq!((response.url().path(), &response.headers()["x-from"]), ("/v1", &"far".parse().unwrap()));
        if is_cut {
            response.text().await.expect_err("the body breaks");
        } else {
            assert_eq!(response.content_length(), Some(body.len() as u64));
            assert_eq!(response.text().await.expect("a body"), body);
        }
    }
}

/// Regression: the retry time counted from when the body was read or dropped.
#[tokio::test]
async fn pause_of_a_rejection_does_not_wait_for_its_body() {
    for builder in [Throttle::builder().slots(Slots::fixed(4)), Throttle::auto()] {
        let clock = ManualClock::new();
        let server = TestServer::start(&clock, |_| Reply::status(429).header("retry-after", 30).body(BODY));
        let server = server.await;
        let limits = builder.retry(Retry::off()).limits().expect("within the bounds");
        let (hosts, client) = setup_with(&clock, limits, 100);
        let throttle = hosts.throttle(&server.authority());
        let mut held = None;
        // `Auto` pauses if nothing was accepted since the rejection before.
        for _ in 0..5 {
            drop(held.take());
            let call = client.post(server.url("/")).send();
            held = Some(pass_time(&clock, &hosts, call).await.expect("a response"));
            if throttle.snapshot().phase == Phase::Paused {
                break;
            }
        }
        assert_eq!(throttle.snapshot().phase, Phase::Paused, "while the response is held");
        clock.advance(secs(10));
        drop(held);
        let refused = throttle.try_acquire(100).expect_err("it is paused");
        assert_eq!(refused.retry_after(), Some(secs(20)));
    }
}
