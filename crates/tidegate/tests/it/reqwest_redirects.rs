//! Redirects, over real sockets: a hop to another host is that host's request, and what another origin says changes no limit
//! but its own.

use reqwest::{Client, redirect};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use tidegate::reqwest::{ThrottleError, Throttling, Tries};
use tidegate::{Authority, Circuit, Cost, Keyed, ManualClock, Refused, Slots, Throttle};

use crate::kit::http::{Far, Reply, on};
use crate::kit::secs;

fn hosts(clock: &ManualClock) -> Keyed<Authority> {
    let builder = Throttle::builder().slots(Slots::fixed(4)).circuit(Circuit::after_failures(3));
    on(clock, Keyed::builder(builder.limits().expect("within the bounds")))
}

fn client(hosts: &Keyed<Authority>) -> ClientWithMiddleware {
    Throttling::by_host(hosts.clone()).client(Client::builder()).expect("a client")
}

/// Sends everybody to `target`.
async fn sends(clock: &ManualClock, status: u16, target: impl Into<String>) -> Far {
    let target = target.into();
    Far::start(clock, move |_| Reply::status(status).header("location", &target)).await
}

#[tokio::test]
async fn a_hop_to_another_host_is_that_hosts_request_and_credentials_stay() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let second = Far::start(&clock, |_| Reply::status(200)).await;
    let first = sends(&clock, 302, second.url("/there").replace("http://", "http://eve:secret@")).await;
    let call = client(&hosts)
        .get(first.url("/here"))
        .bearer_auth("mine")
        .header("cookie", "a=b")
        .header("x-other", "1");
    let response = call.send().await.expect("an answer");
    assert_eq!(response.url().as_str(), second.url("/there"));
    let tries = response.extensions().get::<Tries>().copied().expect("told");
    assert_eq!((tries.attempts, tries.redirects), (1, 1));
    for far in [&first, &second] {
        assert_eq!(hosts.throttle(&far.authority()).snapshot().admitted, 1);
    }
    let (asked, sent) = (&first.seen()[0].headers, &second.seen()[0].headers);
    assert_eq!(asked["authorization"], "Bearer mine");
    assert!(!sent.contains_key("authorization") && !sent.contains_key("cookie"), "{sent:?}");
    assert_eq!(sent["x-other"], "1");
    drop(response);
    assert_eq!(hosts.snapshot(0).in_flight, 0);
}

#[tokio::test]
async fn a_hop_on_the_same_host_keeps_its_credentials_and_is_a_request_of_its_own() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let far = Far::start(&clock, |seen| match seen.path.as_str() {
        "/a" => Reply::status(307).header("location", "/b?c"),
        _ => Reply::status(200),
    });
    let far = far.await;
    let call = client(&hosts).post(far.url("/a")).bearer_auth("mine").body("order");
    assert_eq!(call.send().await.expect("an answer").status(), 200);
    let seen = far.seen();
    assert_eq!(
        (seen[1].method.as_str(), seen[1].path.as_str(), seen[1].body.as_str()),
        ("POST", "/b?c", "order")
    );
    assert_eq!(seen[1].headers["authorization"], "Bearer mine");
    assert_eq!(hosts.throttle(&far.authority()).snapshot().admitted, 2);
}

#[tokio::test]
async fn methods_change_as_http_has_it() {
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
        let target = Far::start(&clock, |_| Reply::status(200)).await;
        let far = sends(&clock, status, target.url("/")).await;
        let method = method.parse().expect("a method");
        let call =
            client(&hosts(&clock)).request(method, far.url("/")).header("content-type", "text/x").body("b");
        call.send().await.expect("an answer");
        let seen = &target.seen()[0];
        let has_body = seen.headers.contains_key("content-type");
        assert_eq!((seen.method.as_str(), has_body), (becomes, becomes != "GET"), "{status}");
    }
}

#[tokio::test]
async fn a_circle_ends_at_the_bound_and_an_address_of_another_kind_is_told() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let circle = sends(&clock, 301, "/again").await;
    let error = client(&hosts).get(circle.url("/")).send().await.expect_err("a circle");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::TooManyRedirects { redirects_max: 10 }));
    assert_eq!((circle.count(), hosts.snapshot(0).in_flight), (11, 0));
    let mail = sends(&clock, 301, "mailto:eve@example.com").await;
    let error = client(&hosts).get(mail.url("/")).send().await.expect_err("no place to go");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::RedirectScheme));
    // What leads nowhere is an answer.
    let nowhere = sends(&clock, 301, "http://[").await;
    let response = client(&hosts).get(nowhere.url("/")).send().await.expect("an answer");
    assert_eq!(response.status(), 301);
    let none = Throttling::by_host(hosts.clone()).redirects(0).client(Client::builder()).expect("a client");
    let error = none.get(circle.url("/")).send().await.expect_err("none is followed");
    assert_eq!(ThrottleError::of(&error), Some(&ThrottleError::TooManyRedirects { redirects_max: 0 }));
}

#[tokio::test]
async fn what_a_far_side_says_where_a_hop_leads_pauses_that_one_alone() {
    let clock = ManualClock::new();
    let second = Far::start(&clock, |_| Reply::status(429).header("retry-after", 60)).await;
    let first = sends(&clock, 302, second.url("/")).await;
    // Ours follows. And then a client that follows by itself, as reqwest does unless told otherwise.
    for is_ours in [true, false] {
        let hosts = hosts(&clock);
        let client = if is_ours {
            client(&hosts)
        } else {
            let client = Client::builder().redirect(redirect::Policy::limited(10)).build().expect("a client");
            ClientBuilder::new(client).with(Throttling::by_host(hosts.clone())).build()
        };
        let response = client.get(first.url("/")).send().await.expect("an answer");
        assert_eq!((response.status().as_u16(), response.url().as_str()), (429, second.url("/").as_str()));
        let refused = hosts.try_acquire(&second.authority(), Cost::request()).expect_err("it said so");
        assert!(
            matches!(refused, Refused::Limited { retry_after: Some(wait), .. } if wait >= secs(60)),
            "{refused}"
        );
        let throttle = hosts.throttle(&first.authority());
        assert!(throttle.try_acquire(Cost::request()).is_ok(), "nobody said so of the first");
        assert_eq!(throttle.snapshot().outcomes.successes, 1);
    }
}

#[tokio::test]
async fn one_throttle_for_all_does_not_learn_from_another_origin() {
    let clock = ManualClock::new();
    let second = Far::start(&clock, |_| Reply::status(429).header("retry-after", 60)).await;
    let first = sends(&clock, 302, second.url("/")).await;
    let throttle =
        Throttle::builder().slots(Slots::fixed(2)).clock(clock.clone()).build().expect("in bounds");
    let client = Client::builder().build().expect("a client");
    let client = ClientBuilder::new(client).with(Throttling::one(throttle.clone())).build();
    assert_eq!(client.get(first.url("/")).send().await.expect("an answer").status(), 429);
    assert!(throttle.try_acquire(Cost::request()).is_ok(), "who was asked has not said it");
}

#[tokio::test]
async fn a_hop_to_a_host_whose_circuit_is_open_is_not_made() {
    let clock = ManualClock::new();
    let hosts = hosts(&clock);
    let second = Far::start(&clock, |_| Reply::status(200)).await;
    let first = sends(&clock, 302, second.url("/")).await;
    for _ in 0..3 {
        hosts.record(&second.authority(), tidegate::Outcome::failure());
    }
    let error = client(&hosts).get(first.url("/")).send().await.expect_err("it is open");
    let open = matches!(ThrottleError::of(&error), Some(ThrottleError::Refused(Refused::CircuitOpen { .. })));
    assert!(open, "{error}");
    assert_eq!((first.count(), second.count(), hosts.snapshot(0).in_flight), (1, 0, 0));
}
