//! Threads without any runtime: they wait in one line, try again, give up in time, and are drained.
//!
//! `cargo run --example blocking`
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Backoff, Cost, Outcome, Pace, Refused, Retry, Slots, Throttle};

/// A far side that takes its time.
fn call() {
    thread::sleep(Duration::from_millis(120));
}

/// A far side that resets every third connection.
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
    let say = |line: &str| println!("{:>5} ms  {line}", start.elapsed().as_millis());

    say("five threads, two slots: acquire_blocking");
    thread::scope(|scope| {
        for name in ["anna", "ben", "cleo", "dora", "emil"] {
            let (throttle, say) = (&throttle, &say);
            scope.spawn(move || -> Result<(), Refused> {
                let permit = throttle.acquire_blocking(Cost::request())?;
                say(&format!("  {name} enters, {} in flight", throttle.snapshot().in_flight));
                call();
                permit.settle(Outcome::success());
                Ok(())
            });
        }
    });

    say("a far side that fails now and then: run_blocking");
    thread::scope(|scope| {
        for name in ["anna", "ben", "cleo"] {
            let (throttle, say) = (&throttle, &say);
            scope.spawn(move || {
                let reply = throttle.run_blocking(Cost::request(), |attempt| {
                    let reply = flaky();
                    say(&format!("  {name}, attempt {}: {reply:?}", attempt.number + 1));
                    reply
                });
                if let Err(error) = reply {
                    say(&format!("  {name} gives up: {error}"));
                }
            });
        }
    });

    say("no slot is free, and time is short: acquire_blocking_within");
    let held = [throttle.acquire_blocking(Cost::request())?, throttle.acquire_blocking(Cost::request())?];
    if let Err(refused) = throttle.acquire_blocking_within(Cost::request(), Duration::from_millis(100)) {
        say(&format!("  refused: {refused}"));
    }
    drop(held);

    throttle.drain_blocking();
    say(&format!(
        "drained: {} admitted in all, {:?}",
        throttle.snapshot().admitted,
        throttle.snapshot().state
    ));
    Ok(())
}
