//! Redirects over real sockets: a hop to another host is charged to that host, and its response affects that
//! host's limits alone.

use reqwest::{Client, redirect};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use tidegate::reqwest::{ThrottleError, Throttling, Tries};
use tidegate::{Authority, Circuit, Cost, Keyed, ManualClock, Refused, Retry, Slots, Throttle};

use crate::kit::http::{Reply, TestServer, keyed_on};
use crate::kit::secs;

fn hosts(clock: &ManualClock) -> Keyed<Authority> {
    let circuit = Circuit::after_failures(3);
    let builder = Throttle::builder().slots(Slots::fixed(4)).circuit(circuit).retry(Retry::off());
    keyed_on(clock, Keyed::builder(builder.limits().expect("within the bounds")))
}

fn client(hosts: &Keyed<Authority>) -> ClientWithMiddleware {
    Throttling::by_host(hosts.clone()).client(Client::builder()).expect("a client")
}

/// A server that redirects every request to `target`.
async fn redirect_to(clock: &ManualClock, status: u16, target: impl Into<String>) -> TestServer {
    let target = target.into();
    TestServer::start(clock, move |_| Reply::status(status).header("location", &target)).await
}

/// The hop is charged to the other host.
#[tokio::test]
async fn cross_host_redirect_drops_credentials() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let second = TestServer::start(&clock, |_| Reply::status(200)).await;
    let first = redirect_to(&clock, 302, second.url("/there").replace("http://", "http://eve:secret@")).await;
    let call = client(&hosts)
        .get(first.url("/here"))
        .bearer_auth("mine")
        .header("cookie", "a=b")
        .header("x-other", "1");
    let response = call.send().await.expect("a response");
    assert_eq!(response.url().as_str(), second.url("/there"));
    let tries = response.extensions().get::<Tries>().copied().expect("told");
    assert_eq!((tries.attempts, tries.redirects), (1, 1));
    for server in [&first, &second] {
        assert_eq!(hosts.throttle(&server.authority()).snapshot().admitted, 1);
    }
    let (received, sent) = (&first.requests()[0].headers, &second.requests()[0].headers);
    assert_eq!(received["authorization"], "Bearer mine");
    assert!(!sent.contains_key("authorization") && !sent.contains_key("cookie"), "{sent:?}");
    assert_eq!(sent["x-other"], "1");
    drop(response);
    assert_eq!(hosts.snapshot(0).in_flight, 0);
}

/// The hop is a request of its own.
#[tokio::test]
async fn same_host_redirect_keeps_credentials() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let server = TestServer::start(&clock, |seen| match seen.path.as_str() {
        "/a" => Reply::status(307).header("location", "/b?c"),
        _ => Reply::status(200),
    });
    let server = server.await;
    let call = client(&hosts).post(server.url("/a")).bearer_auth("mine").body("order");
    assert_eq!(call.send().await.expect("a response").status(), 200);
    let seen = server.requests();
    assert_eq!(
        (seen[1].method.as_str(), seen[1].path.as_str(), seen[1].body.as_str()),
        ("POST", "/b?c", "order")
    );
    assert_eq!(seen[1].headers["authorization"], "Bearer mine");
    assert_eq!(hosts.throttle(&server.authority()).snapshot().admitted, 2);
}

#[tokio::test]
async fn redirect_changes_method_per_http() {
    let clock = ManualClock::new();
    let table = [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (303, "PUT", "GET"),
        (302, "PUT", "PUT"),
        (307, "POST", "POST"),
        (308, "DELETE", "DELETE"),
        (303, "HEAD", "HEAD"),
    ];
    for (status, method, becomes) in table {
        let target = TestServer::start(&clock, |_| Reply::status(200)).await;
        let server = redirect_to(&clock, status, target.url("/")).await;
        let method = method.parse().expect("a method");
        let call = client(&hosts(&clock))
            .request(method, server.url("/"))
            .header("content-type", "text/x")
            .body("b");
        call.send().await.expect("a response");
        let seen = &target.requests()[0];
        let has_body = seen.headers.contains_key("content-type");
        assert_eq!((seen.method.as_str(), has_body), (becomes, becomes != "GET"), "{status}");
    }
}

#[tokio::test]
async fn redirect_loop_and_foreign_scheme_are_errors() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let circle = redirect_to(&clock, 301, "/again").await;
    let error = client(&hosts).get(circle.url("/")).send().await.expect_err("a redirect loop");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::TooManyRedirects { redirects_max: 10 }));
    assert_eq!((circle.count(), hosts.snapshot(0).in_flight), (11, 0));
    let mail = redirect_to(&clock, 301, "mailto:eve@example.com").await;
    let error = client(&hosts).get(mail.url("/")).send().await.expect_err("no HTTP address");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::RedirectScheme));
    // An invalid location is returned as the response.
    let nowhere = redirect_to(&clock, 301, "http://[").await;
    let response = client(&hosts).get(nowhere.url("/")).send().await.expect("a response");
    assert_eq!(response.status(), 301);
    let none = Throttling::by_host(hosts.clone()).redirects(0).client(Client::builder()).expect("a client");
    let error = none.get(circle.url("/")).send().await.expect_err("no redirect is followed");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::TooManyRedirects { redirects_max: 0 }));
}

#[tokio::test]
async fn retry_after_of_redirect_target_pauses_it_alone() {
    let clock = ManualClock::new();
    let second = TestServer::start(&clock, |_| Reply::status(429).header("retry-after", 60)).await;
    let first = redirect_to(&clock, 302, second.url("/")).await;
    // First with our redirects, and then with a client that follows redirects itself, which is reqwest's
    // default.
    for is_ours in [true, false] {
        let hosts = hosts(&clock);
        let client = if is_ours {
            client(&hosts)
        } else {
            let client = Client::builder().redirect(redirect::Policy::limited(10)).build().expect("a client");
            ClientBuilder::new(client).with(Throttling::by_host(hosts.clone())).build()
        };
        let response = client.get(first.url("/")).send().await.expect("a response");
        assert_eq!((response.status().as_u16(), response.url().as_str()), (429, second.url("/").as_str()));
        let refused =
            hosts.try_acquire(&second.authority(), Cost::request()).expect_err("it sent a `Retry-After`");
        assert!(
            matches!(refused, Refused::Limited { retry_after: Some(wait), .. } if wait >= secs(60)),
            "{refused}"
        );
        let throttle = hosts.throttle(&first.authority());
        assert!(throttle.try_acquire(Cost::request()).is_ok(), "the first host is not paused");
        assert_eq!(throttle.snapshot().outcomes.successes, 1);
    }
}

#[tokio::test]
async fn single_throttle_ignores_responses_of_other_origins() {
    let clock = ManualClock::new();
    let second = TestServer::start(&clock, |_| Reply::status(429).header("retry-after", 60)).await;
    let first = redirect_to(&clock, 302, second.url("/")).await;
    let throttle =
        Throttle::builder().slots(Slots::fixed(2)).clock(clock.clone()).build().expect("in bounds");
    let client = Client::builder().build().expect("a client");
    let client = ClientBuilder::new(client).with(Throttling::one(throttle.clone())).build();
    assert_eq!(client.get(first.url("/")).send().await.expect("a response").status(), 429);
    assert!(throttle.try_acquire(Cost::request()).is_ok(), "the requested host did not send it");
}

#[tokio::test]
async fn redirect_to_host_with_open_circuit_is_refused() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let second = TestServer::start(&clock, |_| Reply::status(200)).await;
    let first = redirect_to(&clock, 302, second.url("/")).await;
    for _ in 0..3 {
        hosts.record(&second.authority(), tidegate::Outcome::failure());
    }
    let error = client(&hosts).get(first.url("/")).send().await.expect_err("the circuit is open");
    let open = matches!(ThrottleError::of(&error), Some(ThrottleError::Refused(Refused::CircuitOpen { .. })));
    assert!(open, "{error}");
    assert_eq!((first.count(), second.count(), hosts.snapshot(0).in_flight), (1, 0, 0));
}
