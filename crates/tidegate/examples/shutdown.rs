//! Graceful shutdown: workers run until Ctrl-C or for two seconds; then the throttle closes and drains.
//!
//! `cargo run --example shutdown`
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tidegate::{Cost, Outcome, Refused, Slots, Throttle};
use tokio::task::JoinSet;

/// More workers than slots, so that some are queued at shutdown.
const WORKERS: u32 = 9;

/// The upstream, which counts its calls.
#[derive(Default)]
struct Upstream {
    started: AtomicU32,
    finished: AtomicU32,
}

impl Upstream {
    /// A call that must not be cut off halfway.
    async fn write(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(350)).await;
        self.finished.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes until the throttle is closed.
async fn work(throttle: Throttle, upstream: Arc<Upstream>) -> Refused {
    loop {
        match throttle.acquire(Cost::request()).await {
            Ok(permit) => {
                upstream.write().await;
                permit.settle(Outcome::success());
            }
            Err(refused) => return refused,
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let throttle = Throttle::builder().slots(Slots::fixed(6)).build()?;
    let upstream = Arc::new(Upstream::default());
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        workers.spawn(work(throttle.clone(), Arc::clone(&upstream)));
    }

    println!("{WORKERS} workers, 6 slots. Press Ctrl-C, or wait two seconds.");
    let reason = tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.map(|()| "Ctrl-C")?,
        () = tokio::time::sleep(Duration::from_secs(2)) => "Time is up",
    };
    let snapshot = throttle.snapshot();
    println!("{reason}: {} in flight, {} waiting. Draining.", snapshot.in_flight, snapshot.waiting);

    let start = Instant::now();
    throttle.drain().await;
    let (started, finished) =
        (upstream.started.load(Ordering::Relaxed), upstream.finished.load(Ordering::Relaxed));
    println!("Drained in {} ms: {started} calls started, {finished} finished.", start.elapsed().as_millis());

    // Queued workers were refused at once; the others found the throttle closed at their next acquire.
    let mut closed = 0;
    while let Some(refused) = workers.join_next().await {
        closed += u32::from(refused? == Refused::Closed);
    }
    println!("{closed} of {WORKERS} workers stopped because the throttle is closed.");
    if started == finished && closed == WORKERS {
        println!("Every call finished, and every worker stopped.");
        Ok(())
    } else {
        Err("a call did not finish, or a worker did not stop".into())
    }
}
