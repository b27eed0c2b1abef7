//! An orderly end: workers run until Ctrl-C, or for two seconds; then nobody new, and then nobody at all.
//!
//! `cargo run --example shutdown`
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tidegate::{Cost, Outcome, Refused, Slots, Throttle};
use tokio::task::JoinSet;

/// More than there are slots, so that some wait in line when the end comes.
const WORKERS: u32 = 9;

/// What the far side saw.
#[derive(Default)]
struct FarSide {
    begun: AtomicU32,
    ended: AtomicU32,
}

impl FarSide {
    /// A call that must not be torn off in the middle.
    async fn write(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(350)).await;
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes until the throttle is closed.
async fn work(throttle: Throttle, far_side: Arc<FarSide>) -> Refused {
    loop {
        match throttle.acquire(Cost::request()).await {
            Ok(permit) => {
                far_side.write().await;
                permit.settle(Outcome::success());
            }
            Err(refused) => return refused,
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let throttle = Throttle::builder().slots(Slots::fixed(6)).build()?;
    let far_side = Arc::new(FarSide::default());
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        workers.spawn(work(throttle.clone(), Arc::clone(&far_side)));
    }

    println!("{WORKERS} workers, 6 slots. Press Ctrl-C, or wait two seconds.");
    let why = tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.map(|()| "Ctrl-C")?,
        () = tokio::time::sleep(Duration::from_secs(2)) => "Time is up",
    };
    let seen = throttle.snapshot();
    println!("{why}: {} in flight, {} waiting. Draining.", seen.in_flight, seen.waiting);

    let start = Instant::now();
    throttle.drain().await;
    let (begun, ended) = (far_side.begun.load(Ordering::Relaxed), far_side.ended.load(Ordering::Relaxed));
    println!("Drained in {} ms: {begun} calls begun, {ended} ended.", start.elapsed().as_millis());

    // Those who waited were refused, and those who ran find the throttle closed when they come back.
    let mut closed = 0;
    while let Some(refused) = workers.join_next().await {
        closed += u32::from(refused? == Refused::Closed);
    }
    println!("{closed} of {WORKERS} workers went home because the throttle is closed.");
    if begun == ended && closed == WORKERS {
        println!("Nobody was left behind.");
        Ok(())
    } else {
        Err("somebody was left behind".into())
    }
}
