//! An axum server with limits per tenant: 429 with problem details, `Retry-After` and `RateLimit` fields.
//!
//! `cargo run --example limited_server` sends requests to itself and prints the responses; with an address,
//! as in `cargo run --example limited_server 127.0.0.1:3000`, it serves until Ctrl-C:
//! `curl -i -H 'x-tenant: acme' http://127.0.0.1:3000/complete`.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use tidegate::axum::{LimitLayer, UnitsUsed};
use tidegate::{Limit, Limiter, Memory, ResourceName};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Any store works: `sqlite:`, `redis:` and `postgres:` share the limits with other processes.
    let limits = [Limit::per_minute("rpm", 60).burst(4), Limit::per_minute("tpm", 1_000)];
    let limiter = Limiter::builder(Memory::new()).defaults(limits).build()?;
    let layer = LimitLayer::by_header(limiter, ResourceName::new("completions")?, "x-tenant".parse()?)
        .cost(|request: &Request<Body>| match request.uri().path() {
            "/health" => Vec::new(),
            "/complete" => vec![("rpm", 1), ("tpm", 300)],
            _ => vec![("rpm", 1)],
        })
        // Server errors are not charged to the tenant.
        .settle(|status, _| if status.is_server_error() { UnitsUsed::Nothing } else { UnitsUsed::All });
    let app = Router::new()
        .route("/complete", get(|| async { "a long text\n" }))
        .route("/broken", get(|| async { StatusCode::BAD_GATEWAY }))
        .route("/health", get(|| async { "fine\n" }))
        .layer(layer);

    let address = std::env::args().nth(1);
    let listener = TcpListener::bind(address.as_deref().unwrap_or("127.0.0.1:0")).await?;
    let base = format!("http://{}", listener.local_addr()?);
    if address.is_some() {
        println!("serving {base}");
        return Ok(axum::serve(listener, app).await?);
    }
    tokio::spawn(async move { axum::serve(listener, app).await });

    let client = reqwest::Client::new();
    for path in ["/complete", "/complete", "/broken", "/complete", "/complete", "/health"] {
        let response = client.get(format!("{base}{path}")).header("x-tenant", "acme").send().await?;
        let field =
            |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("-");
        let (rate_limit, retry_after) = (field("ratelimit").to_owned(), field("retry-after").to_owned());
        println!("{path:<10} {} ratelimit {rate_limit}, retry-after {retry_after}", response.status());
        if response.status() == StatusCode::TOO_MANY_REQUESTS {
            println!("           {}", response.text().await?);
        }
    }
    Ok(())
}
