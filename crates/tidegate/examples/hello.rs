//! The shortest complete use: an upstream with an undocumented limit of 200 requests per second, and a
//! throttle that finds it.
//!
//! `cargo run --example hello`
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{Cost, Outcome, Throttle};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// An upstream with a hidden token bucket: its tokens, and when they were last refilled.
struct Upstream(Mutex<(f64, Instant)>);

impl Upstream {
    const PER_SECOND: f64 = 200.0;

    async fn call(&self) -> Result<(), u16> {
        sleep(Duration::from_millis(50)).await;
        let Ok(mut bucket) = self.0.lock() else { return Err(500) };
        let (tokens, refilled) = *bucket;
        let tokens = (tokens + Self::PER_SECOND * refilled.elapsed().as_secs_f64()).min(20.0);
        let is_accepted = tokens >= 1.0;
        *bucket = (if is_accepted { tokens - 1.0 } else { tokens }, Instant::now());
        if is_accepted { Ok(()) } else { Err(429) }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let upstream = Arc::new(Upstream(Mutex::new((20.0, Instant::now()))));
    let throttle = Throttle::new();
    let mut workers = JoinSet::new();
    for _ in 0..50 {
        let (throttle, upstream) = (throttle.clone(), Arc::clone(&upstream));
        workers.spawn(async move {
            while let Ok(permit) = throttle.acquire(Cost::request()).await {
                permit.settle(match upstream.call().await {
                    Ok(()) => Outcome::success(),
                    Err(429) => Outcome::overload(),
                    Err(_) => Outcome::failure(),
                });
            }
        });
    }
    let mut before = throttle.snapshot().outcomes;
    for second in 1..=5 {
        sleep(Duration::from_secs(1)).await;
        let snapshot = throttle.snapshot();
        let (succeeded, rejected) =
            (snapshot.outcomes.successes - before.successes, snapshot.outcomes.throttled - before.throttled);
        let reason = snapshot.control.map(|control| control.reason.to_string()).unwrap_or_default();
        println!("second {second}: {succeeded:>3} succeeded, {rejected:>2} rejected, {reason}");
        before = snapshot.outcomes;
    }
    throttle.drain().await;
    workers.join_all().await;
    let quota = throttle.snapshot().control.and_then(|control| control.requests.quota);
    println!("estimate: {}", quota.map_or("none".to_owned(), |quota| format!("{:.0}/s", quota.as_f64())));
    Ok(())
}
