//! Server layer and client middleware over a real socket: the client obeys the headers that the server sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::routing::get;
use reqwest::Client;
use tidegate::axum::LimitLayer;
use tidegate::reqwest::{Throttling, Tries};
use tidegate::store::WallClock;
use tidegate::{Clock as _, Instant, Keyed, Limit, Limiter, ManualClock, Memory, ResourceName, Stamp};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::kit::http::{keyed_on, pass_time};

/// Wall time of the server, driven by the client's clock.
#[derive(Debug)]
struct ClientTime(ManualClock);

impl WallClock for ClientTime {
    fn now(&self) -> Stamp {
        Stamp::from_secs(1_800_000_000) + self.0.now().since(Instant::ZERO)
    }
}

#[tokio::test]
async fn client_middleware_obeys_server_limit_headers() {
    let clock = ManualClock::new();
    // Two per second with a burst of five, for all callers together.
    let limits = [Limit::per_minute("rpm", 120).burst(5)];
    let store = Memory::with_clock(ClientTime(clock.clone()));
    let limiter = Limiter::builder(store).defaults(limits).build().expect("within the bounds");
    let refused = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&refused);
    let layer = LimitLayer::by_header(
        limiter,
        ResourceName::new("api").expect("a name"),
        "x-tenant".parse().expect("a name"),
    )
    .on_refused(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let app = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, app).await });

    let hosts = keyed_on(&clock, Keyed::hosts());
    let client = Throttling::by_host(hosts.clone()).client(Client::builder()).expect("a client");
    let mut workers = JoinSet::new();
    for _ in 0..5 {
        let (client, url) = (client.clone(), url.clone());
        workers.spawn(async move {
            let mut attempts = 0;
            for _ in 0..30 {
                let response = client.get(&url).header("x-tenant", "acme").send().await.expect("an answer");
                assert_eq!(response.status(), 200, "a request that waited for its retry-after succeeds");
                attempts += response.extensions().get::<Tries>().expect("told").attempts;
            }
            attempts
        });
    }
    let attempts: u32 = pass_time(&clock, &hosts, workers.join_all()).await.into_iter().sum();
    // The headers say when nothing is left, so few requests are refused.
    let refused = refused.load(Ordering::SeqCst);
    assert_eq!(u64::from(attempts), 150 + refused);
    assert!(refused <= 15, "{refused} of {attempts} were refused");
}
