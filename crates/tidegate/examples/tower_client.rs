//! A throttled tower client: one throttle for a single upstream, and one throttle per host.
//!
//! `cargo run --example tower_client`
//!
//! The upstream serves at most four concurrent requests and rejects the rest with 503. The throttle learns
//! this from the responses, and holds each slot until the body has been read.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use http::Request;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tidegate::tower::{ThrottleLayer, WaitLayer};
use tidegate::{Keyed, Slots, Throttle};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tower::{BoxError, Layer as _, Service as _, ServiceExt as _};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = start_upstream().await?;
    let client = Client::builder(TokioExecutor::new()).build_http::<String>();

    // One throttle: up to sixteen in flight, fewer while the upstream rejects requests.
    let throttle = Throttle::builder().slots(Slots::adaptive(1..=16).start(16)).build()?;
    let service = ThrottleLayer::new(throttle.clone()).layer(client.clone());
    let mut calls = JoinSet::new();
    for _ in 0..120 {
        let (mut service, request) = (service.clone(), Request::get(&url).body(String::new())?);
        calls.spawn(async move {
            // `ready` waits for the permit, so `call` sends at once.
            let response = service.ready().await?.call(request).await?;
            let status = response.status();
            response.into_body().collect().await?;
            Ok::<_, BoxError>(status)
        });
    }
    let (mut succeeded, mut rejected) = (0, 0);
    while let Some(status) = calls.join_next().await {
        if status?? == StatusCode::OK { succeeded += 1 } else { rejected += 1 }
    }
    let snapshot = throttle.snapshot();
    println!(
        "one throttle: {succeeded} succeeded, {rejected} rejected, {} of 16 slots at the end",
        snapshot.slots.unwrap_or(0)
    );

    // One throttle per host: the service is always ready, and `call` waits.
    let hosts = Keyed::hosts().build()?;
    let service = WaitLayer::by_host(hosts.clone()).layer(client);
    for _ in 0..6 {
        let response = service.clone().oneshot(Request::get(&url).body(String::new())?).await?;
        println!("{} {:?}", response.status(), response.into_body().collect().await?.to_bytes());
    }
    for host in hosts.snapshot(10).top {
        let rate = host.throttle.rate.map_or_else(String::new, |rate| rate.to_string());
        println!("{}: {} admitted, now at {rate}", host.key, host.throttle.admitted);
    }
    Ok(())
}

/// Starts a server that serves four requests at a time and rejects the rest with 503.
async fn start_upstream() -> Result<String, BoxError> {
    let workers = Arc::new(Semaphore::new(4));
    let handler = async |State(workers): State<Arc<Semaphore>>| {
        let Ok(_worker) = workers.try_acquire() else { return (StatusCode::SERVICE_UNAVAILABLE, "busy") };
        tokio::time::sleep(Duration::from_millis(5)).await;
        (StatusCode::OK, "hello")
    };
    let app = Router::new().route("/", get(handler)).with_state(workers);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}
