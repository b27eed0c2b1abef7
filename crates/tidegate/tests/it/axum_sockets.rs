//! Both ends over a real socket: what our layer says on a server, our middleware understands in a client.

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

use crate::kit::http::{on, pass_time};

/// The server has the time of the client.
#[derive(Debug)]
struct SameTime(ManualClock);

impl WallClock for SameTime {
    fn now(&self) -> Stamp {
        Stamp::from_secs(1_800_000_000) + self.0.now().since(Instant::ZERO)
    }
}

#[tokio::test]
async fn what_the_layer_says_the_middleware_obeys() {
    let clock = ManualClock::new();
    // Two a second and five at once, for all of them together.
    let limits = [Limit::per_minute("rpm", 120).burst(5)];
    let store = Memory::with_clock(SameTime(clock.clone()));
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

    let hosts = on(&clock, Keyed::hosts());
    let client = Throttling::by_host(hosts.clone()).client(Client::builder()).expect("a client");
    let mut workers = JoinSet::new();
    for _ in 0..5 {
        let (client, url) = (client.clone(), url.clone());
        workers.spawn(async move {
            let mut attempts = 0;
            for _ in 0..30 {
                let response = client.get(&url).header("x-tenant", "acme").send().await.expect("an answer");
                assert_eq!(response.status(), 200, "whoever is told when to come back is served then");
                attempts += response.extensions().get::<Tries>().expect("told").attempts;
            }
            attempts
        });
    }
    let attempts: u32 = pass_time(&clock, &hosts, workers.join_all()).await.into_iter().sum();
    // The fields say when there is nothing left, so hardly anybody asks in vain.
    let refused = refused.load(Ordering::SeqCst);
    assert_eq!(u64::from(attempts), 150 + refused);
    assert!(refused <= 15, "{refused} of {attempts} were refused");
}
