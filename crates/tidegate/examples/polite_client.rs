//! A reqwest program, throttled by three lines.
//!
//! `cargo run --example polite_client`
//!
//! Two upstreams: one accepts twenty requests per second and returns 429 with a retry delay to the rest, the
//! other fails one request in ten. All pages are fetched, each host at its own pace, and no retry comes
//! early.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::get;
// The first of the three lines.
use tidegate::{Keyed, reqwest::Throttling};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let (strict, flaky) = (strict().await?, flaky().await?);

    // The second and the third line, instead of `reqwest::Client::builder().build()?`.
    let hosts = Keyed::hosts().build()?;
    let client = Throttling::by_host(hosts.clone()).client(reqwest::Client::builder())?;

    let mut pages = JoinSet::new();
    for address in [&strict, &flaky].into_iter().flat_map(|address| vec![address.clone(); 8]) {
        let client = client.clone();
        pages.spawn(async move {
            Ok::<_, Box<dyn Error + Send + Sync>>(client.get(address).send().await?.text().await?)
        });
    }
    let mut fetched = 0;
    while let Some(page) = pages.join_next().await {
        page??;
        fetched += 1;
    }
    println!("{fetched} pages");
    for host in hosts.snapshot(10).top {
        let outcomes = host.throttle.outcomes;
        println!(
            "{}: {} attempts, {} succeeded, {} throttled, {} failed",
            host.key, host.throttle.admitted, outcomes.successes, outcomes.throttled, outcomes.server
        );
    }
    Ok(())
}

/// Accepts three requests per 150 ms; the rest get 429 with a retry delay.
async fn strict() -> Result<String> {
    let accepted: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let handler = move || async move {
        let mut accepted = accepted.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        accepted.retain(|at| at.elapsed() < Duration::from_millis(150));
        if accepted.len() >= 3 {
            return (StatusCode::TOO_MANY_REQUESTS, [("retry-after-ms", "150")], "slow down").into_response();
        }
        accepted.push(Instant::now());
        "hello".into_response()
    };
    serve(Router::new().route("/", get(handler))).await
}

/// Fails one request in ten.
async fn flaky() -> Result<String> {
    let calls = Arc::new(AtomicU32::new(0));
    let handler = move || async move {
        if calls.fetch_add(1, Ordering::Relaxed) % 10 == 4 {
            Err(StatusCode::BAD_GATEWAY)
        } else {
            Ok("hello")
        }
    };
    serve(Router::new().route("/", get(handler))).await
}

async fn serve(app: Router) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}
