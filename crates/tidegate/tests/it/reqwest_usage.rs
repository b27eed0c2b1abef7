//! Requests are settled with what their responses say was used.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use reqwest_middleware::ClientWithMiddleware;
use tidegate::reqwest::{Hold, Throttling};
use tidegate::{Budget, Cost, ManualClock, Throttle};

use crate::kit::http::{Reply, TestServer};
use crate::kit::secs;

/// The tokens that are reserved for a request.
const ESTIMATE: u64 = 500;

fn budget(clock: &ManualClock) -> Throttle {
    let builder = Throttle::builder().budget(Budget::tokens(10_000, secs(60)));
    builder.clock(clock.clone()).build().expect("within the bounds")
}

/// A client that reads the usage as the body's number of bytes, and counts how often it does.
fn client(throttle: &Throttle, hold: Hold) -> (ClientWithMiddleware, Arc<AtomicUsize>) {
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let throttling = Throttling::one(throttle.clone()).hold(hold).cost(|_| Cost::from(ESTIMATE));
    let throttling = throttling.used(move |headers, body| {
        counted.fetch_add(1, Ordering::SeqCst);
        let is_known = headers.get("x-usage").is_some();
        is_known.then(|| Cost::from(body.len() as u64))
    });
    (throttling.client(reqwest::Client::builder()).expect("a client"), reads)
}

#[tokio::test]
async fn response_settles_with_the_usage_in_its_body() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |_| Reply::status(200).header("x-usage", 1)).await;
    for hold in [Hold::Body, Hold::Headers] {
        let throttle = budget(&clock);
        let (client, reads) = client(&throttle, hold);
        let response = client.get(server.url("/")).send().await.expect("a response");
        assert_eq!(throttle.snapshot().tokens_used, ESTIMATE, "until the body has ended");
        assert_eq!(response.text().await.expect("a body"), "hello");
        assert_eq!((throttle.snapshot().tokens_used, reads.load(Ordering::SeqCst)), (5, 1));
        assert_eq!(throttle.snapshot().outcomes.successes, 1);
    }
}

/// Bodies of APIs are JSON: without the feature of `reqwest-middleware`, its requests have no `json`.
#[tokio::test]
async fn request_with_a_json_body_is_throttled() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |_| Reply::status(200).header("x-usage", 1)).await;
    let throttle = budget(&clock);
    let (client, _) = client(&throttle, Hold::Body);
    let request = client.post(server.url("/")).json(&BTreeMap::from([("model", "gpt-4")]));
    request.send().await.expect("a response").bytes().await.expect("a body");
    let [seen] = <[_; 1]>::try_from(server.requests()).expect("one request");
    assert_eq!(
        (seen.body.as_str(), seen.headers["content-type"].as_str()),
        (r#"{"model":"gpt-4"}"#, "application/json")
    );
    assert_eq!(throttle.snapshot().tokens_used, 5);
}

#[tokio::test]
async fn unknown_usage_settles_with_the_estimate() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |request| match request.path.as_str() {
        "/cut" => Reply::status(200).header("x-usage", 1).cut(),
        "/dropped" => Reply::status(200).header("x-usage", 1),
        _ => Reply::status(200),
    })
    .await;
    for (path, reads_wanted) in [("/unknown", 1), ("/cut", 0), ("/dropped", 0)] {
        let throttle = budget(&clock);
        let (client, reads) = client(&throttle, Hold::Body);
        let response = client.get(server.url(path)).send().await.expect("a response");
        if path == "/dropped" {
            drop(response);
        } else {
            assert_eq!(response.bytes().await.is_err(), path == "/cut");
        }
        let used = (throttle.snapshot().tokens_used, reads.load(Ordering::SeqCst));
        assert_eq!(used, (ESTIMATE, reads_wanted), "{path}");
        assert_eq!(throttle.snapshot().outcomes.network, u64::from(path == "/cut"), "{path}");
    }
}

/// Regression: a stream above 1 MiB was settled with the estimate, although its usage is in the last chunk.
#[tokio::test]
async fn long_body_is_read_for_its_usage_at_its_end() {
    const BODY_MAX: usize = 1 << 20;
    const TAIL: usize = 64 << 10;
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |request| {
        let length: usize = request.path[1..].parse().expect("a length");
        Reply::status(200).body(&("x".repeat(length - 6) + "used 7"))
    })
    .await;
    for (length, seen) in [(BODY_MAX, BODY_MAX), (BODY_MAX + 1, TAIL), (3 * BODY_MAX + 5, TAIL)] {
        let throttle = budget(&clock);
        let lengths = Arc::new(AtomicUsize::new(0));
        let read = Arc::clone(&lengths);
        let throttling = Throttling::one(throttle.clone()).cost(|_| Cost::from(ESTIMATE));
        let throttling = throttling.used(move |_, body| {
            read.store(body.len(), Ordering::SeqCst);
            Some(Cost::from(u64::from(body.last()? - b'0')))
        });
        let client = throttling.client(reqwest::Client::builder()).expect("a client");
        let response = client.get(server.url(&format!("/{length}"))).send().await.expect("a response");
        assert_eq!(response.bytes().await.expect("a body").len(), length, "the caller gets all of it");
        assert_eq!((throttle.snapshot().tokens_used, lengths.load(Ordering::SeqCst)), (7, seen), "{length}");
    }
}

#[tokio::test]
async fn rejected_request_uses_nothing() {
    let clock = ManualClock::new();
    let server = TestServer::start(&clock, |_| Reply::status(404).header("x-usage", 1)).await;
    let throttle = budget(&clock);
    let (client, reads) = client(&throttle, Hold::Body);
    client.get(server.url("/")).send().await.expect("a response").bytes().await.expect("a body");
    assert_eq!(reads.load(Ordering::SeqCst), 0, "only successes are read");
    assert_eq!(throttle.snapshot().in_flight, 0);
}
