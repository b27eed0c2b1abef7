//! HTTP clients: `cargo xtask bench http`. The fetcher is in `fetch.rs`; this file measures layers.
//!
//! Both sides wrap a service that responds at once with a small body, which is dropped. Ours reads the status
//! and headers, and holds the slot until the body ends; the peer reads nothing and releases its slot with the
//! response. Ours has a target on our fast clock, as keyed throttles do, and none on the default clock; the
//! peer uses its own clock.

mod fetch;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::path::PathBuf;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use http::{Request, Response};
use http_body_util::Full;
use tidegate::tower::ThrottleLayer;
use tidegate::{Builder, FastClock, Rate, Slots, Throttle};
use tidegate_bench::measure::best_of_batches;
use tidegate_bench::report::Row;
use tidegate_bench::{Case, Options};
use tokio::runtime::Runtime;
use tower::{Layer as _, Service, ServiceBuilder, ServiceExt as _};

const SLOTS: u32 = 1_024;
const PLENTY: u32 = u32::MAX;
const TARGET: f64 = 1.3;

const CASES: [Case; 4] = [
    ("tower_layer", |rounds| {
        let what = "a call through our layer (slots + rate) vs tower's ConcurrencyLimit + RateLimit";
        Ok(vec![tower_layer("tower_layer", rounds, limits().clock(FastClock::new()), Some(TARGET), what)?])
    }),
    ("tower_layer_std_clock", |rounds| {
        Ok(vec![tower_layer(
            "tower_layer_std_clock",
            rounds,
            limits(),
            None,
            "the same on the default clock",
        )?])
    }),
    ("fetch_overhead", fetch::overhead),
    ("fetch_hidden", fetch::hidden),
];

/// Measures HTTP clients against the peers.
#[derive(Debug, Parser)]
#[command(name = "http")]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Fetches the addresses of a file into a folder as plainly as possible: the peer of the fetcher.
    #[arg(long, hide = true, num_args = 2, value_names = ["URLS", "OUT"])]
    plain: Option<Vec<PathBuf>>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.plain.as_deref() {
        Some([urls, out]) => fetch::run_plain(urls, out.clone()),
        _ => tidegate_bench::run("http", &CASES, &arguments.options),
    }
}

/// Responds at once.
#[derive(Debug, Clone, Copy)]
struct NoOp;

impl Service<Request<()>> for NoOp {
    type Response = Response<Full<&'static [u8]>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(Full::new(b"hello"))))
    }
}

/// Slots and a rate that never limit.
fn limits() -> Builder {
    Throttle::builder().slots(Slots::fixed(SLOTS)).rate(Rate::per_second(u64::from(PLENTY)))
}

fn tower_layer(name: &str, rounds: u32, ours: Builder, target: Option<f64>, what: &str) -> Result<Row> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let _entered = runtime.enter();
    let mut ours = ThrottleLayer::new(ours.build().context("within the bounds")?).layer(NoOp);
    let slots = usize::try_from(SLOTS)?;
    let peer = ServiceBuilder::new().concurrency_limit(slots);
    let mut peer = peer.rate_limit(u64::from(PLENTY), Duration::from_secs(1)).service(NoOp);
    let pair = best_of_batches(
        rounds,
        |times| call(&runtime, &mut ours, times),
        |times| call(&runtime, &mut peer, times),
    );
    Ok(Row::new(name, pair, target, "ns", what))
}

/// Sequential calls.
fn call<S: Service<Request<()>>>(runtime: &Runtime, service: &mut S, times: u32) {
    runtime.block_on(async {
        for _ in 0..times {
            let Ok(service) = service.ready().await else { unreachable!("the service is always ready") };
            drop(black_box(service.call(Request::new(())).await));
        }
    });
}
