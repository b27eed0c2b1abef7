//! A tower client behind a throttle: one for a single far side, and one with a throttle for each host.
//!
//! `cargo run --example tower_client`
//!
//! The far side takes no more than four requests at a time; whoever comes on top is told 503. The throttle finds that out by
//! the answers, and holds each slot until the body has been read.
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

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
    let far = far_side().await?;
    let client = Client::builder(TokioExecutor::new()).build_http::<String>();

    // One throttle: up to sixteen at a time, fewer when the far side says that it is too much.
    let throttle = Throttle::builder().slots(Slots::adaptive(1..=16).start(16)).build()?;
    let service = ThrottleLayer::new(throttle.clone()).layer(client.clone());
    let mut calls = JoinSet::new();
    for _ in 0..120 {
        let (mut service, request) = (service.clone(), Request::get(&far).body(String::new())?);
        calls.spawn(async move {
            // Ready when it is its turn: the permit is there, and nothing is queued behind it.
            let response = service.ready().await?.call(request).await?;
            let status = response.status();
            response.into_body().collect().await?;
            Ok::<_, BoxError>(status)
        });
    }
    let (mut good, mut busy) = (0, 0);
    while let Some(status) = calls.join_next().await {
        if status?? == StatusCode::OK { good += 1 } else { busy += 1 }
    }
    let seen = throttle.snapshot();
    println!("one throttle: {good} good, {busy} busy, {} of 16 slots at the end", seen.slots.unwrap_or(0));

    // A throttle for each host: always ready, and waiting inside the call.
    let hosts = Keyed::hosts().build()?;
    let service = WaitLayer::by_host(hosts.clone()).layer(client);
    for _ in 0..6 {
        let response = service.clone().oneshot(Request::get(&far).body(String::new())?).await?;
        println!("{} {:?}", response.status(), response.into_body().collect().await?.to_bytes());
    }
    for host in hosts.snapshot(10).top {
        let rate = host.throttle.rate.map_or_else(String::new, |rate| rate.to_string());
        println!("{}: {} admitted, now at {rate}", host.key, host.throttle.admitted);
    }
    Ok(())
}

/// Serves four at a time, and says 503 to the rest.
async fn far_side() -> Result<String, BoxError> {
    let places = Arc::new(Semaphore::new(4));
    let answer = async |State(places): State<Arc<Semaphore>>| {
        let Ok(_place) = places.try_acquire() else { return (StatusCode::SERVICE_UNAVAILABLE, "busy") };
        tokio::time::sleep(Duration::from_millis(5)).await;
        (StatusCode::OK, "hello")
    };
    let app = Router::new().route("/", get(answer)).with_state(places);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}
