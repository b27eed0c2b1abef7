//! Threads without an async runtime: they wait in one queue, retry, time out, and drain.
//!
//! `cargo run --example blocking`
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Backoff, Cost, Outcome, Pace, Refused, Retry, Slots, Throttle};

/// A slow call to an upstream.
fn call() {
    thread::sleep(Duration::from_millis(120));
}

/// An upstream that resets every third connection.
fn flaky() -> Result<&'static str, &'static str> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    call();
    if CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
        Err("connection reset")
    } else {
        Ok("hello")
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(2))
        .pace(Pace::every(Duration::from_millis(40)))
        .retry(Retry::attempts(3).backoff(Backoff::fixed(Duration::from_millis(50))))
        .build()?;
    let start = Instant::now();
    let log = |line: &str| println!("{:>5} ms  {line}", start.elapsed().as_millis());

    log("five threads, two slots: acquire_blocking");
    thread::scope(|scope| {
        for name in ["anna", "ben", "cleo", "dora", "emil"] {
            let (throttle, log) = (&throttle, &log);
            scope.spawn(move || -> Result<(), Refused> {
                let permit = throttle.acquire_blocking(Cost::request())?;
                log(&format!("  {name} is admitted, {} in flight", throttle.snapshot().in_flight));
                call();
                permit.settle(Outcome::success());
                Ok(())
            });
        }
    });

    log("a flaky upstream: run_blocking");
    thread::scope(|scope| {
        for name in ["anna", "ben", "cleo"] {
            let (throttle, log) = (&throttle, &log);
            scope.spawn(move || {
                let reply = throttle.run_blocking(Cost::request(), |attempt| {
                    let reply = flaky();
                    log(&format!("  {name}, attempt {}: {reply:?}", attempt.number + 1));
                    reply
                });
                if let Err(error) = reply {
                    log(&format!("  {name} failed: {error}"));
                }
            });
        }
    });

    log("no free slot, and a timeout of 100 ms: acquire_blocking_within");
    let held = [throttle.acquire_blocking(Cost::request())?, throttle.acquire_blocking(Cost::request())?];
    if let Err(refused) = throttle.acquire_blocking_within(Cost::request(), Duration::from_millis(100)) {
        log(&format!("  refused: {refused}"));
    }
    drop(held);

    throttle.drain_blocking();
    log(&format!(
        "drained: {} admitted in total, state {:?}",
        throttle.snapshot().admitted,
        throttle.snapshot().state
    ));
    Ok(())
}
