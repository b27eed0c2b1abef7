//! The shortest complete use: a flaky far side, and a throttle that slows down and speeds up again.
//!
//! `cargo run --example hello`
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate::{Brake, Controller, Cost, Outcome, Pace, Slots, Throttle};

/// A far side that fails for a while and then heals.
async fn call(number: u32) -> Result<(), &'static str> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    tokio::time::sleep(Duration::from_millis(20)).await;
    match CALLS.fetch_add(1, Ordering::Relaxed) {
        8..=13 => Err("503"),
        _ if number == 3 => Err("404"),
        _ => Ok(()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=4))
        .pace(Pace::every(Duration::from_millis(10)).slowest(Duration::from_millis(80)))
        .controller(Controller::Brake(
            Brake::default().at(3, Duration::from_secs(1)).cooling(Duration::from_millis(100)),
        ))
        .total(60)
        .on_state_change(|notice| println!("  {:?}", notice.event))
        .build()?;

    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..60 {
        let throttle = throttle.clone();
        tasks.spawn(async move {
            let permit = throttle.acquire(Cost::request()).await?;
            let reply = call(number).await;
            // Our own mistakes (404) say nothing about the far side's health.
            permit.settle(Outcome::of(&reply, |error| *error == "503"));
            Ok::<_, tidegate::Refused>(reply)
        });
    }
    let (mut good, mut bad) = (0, 0);
    while let Some(reply) = tasks.join_next().await {
        if reply??.is_ok() {
            good += 1;
        } else {
            bad += 1;
        }
        if (good + bad) % 15 == 0 {
            let seen = throttle.snapshot();
            println!(
                "{:>3} done, {} of {} slots, {:?} between entries, {:?}",
                good + bad,
                seen.slots.unwrap_or(0),
                seen.slots_max.unwrap_or(0),
                seen.interval,
                seen.state,
            );
        }
    }
    throttle.drain().await;
    println!("{good} succeeded, {bad} failed, {:?}", throttle.snapshot().state);
    Ok(())
}
