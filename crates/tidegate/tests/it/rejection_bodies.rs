//! The body of a rejection names the quota that is cut, unless the caller does not read it.

use reqwest::Client;
use reqwest_middleware::ClientWithMiddleware;
use tidegate::reqwest::Throttling;
use tidegate::{Authority, Backoff, Cost, Keyed, ManualClock, Retry, Throttle};

use crate::kit::http::{Reply, TestServer, keyed_on, pass_time};
use crate::kit::{millis, secs};

const BODY: &str = r#"{"error": {"message": "Rate limit reached on tokens per min (TPM): Limit 9"}}"#;

/// Throttles with this many attempts, and a client whose requests cost this many tokens.
fn setup(clock: &ManualClock, attempts: u32, tokens: u64) -> (Keyed<Authority>, ClientWithMiddleware) {
    let retry = Retry::attempts(attempts).backoff(Backoff::exponential(millis(200), secs(5)));
    let limits = Throttle::auto().retry(retry).limits().expect("within the bounds");
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
