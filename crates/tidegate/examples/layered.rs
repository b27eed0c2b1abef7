//! Layered dispatch, scaled down to a few seconds: small and large requests, and one 429 in the middle.
//!
//! `cargo run --example layered`
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate::{
    Bytes, Class, EstimateBytes, Event, Outcome, Part, Pause, Phase, Random, Retry, RetryBudget, SizeRule,
    Slots, Throttle,
};
use tokio::task::JoinSet;

const REQUESTS: u64 = 400;
const KIB: u64 = 1 << 10;
/// Requests with images have more than this; the 429 is met by one of them.
const LARGE: u64 = 32 * KIB;

/// "429 Too Many Requests", without a `Retry-After`.
#[derive(Debug)]
struct TooMany;

/// A far side that is slower the more it is sent, and says once that it is too much.
#[derive(Default)]
struct FarSide {
    calls: AtomicU64,
    said: AtomicU64,
}

impl FarSide {
    async fn call(&self, bytes: u64) -> Result<(), TooMany> {
        tokio::time::sleep(Duration::from_millis(60) + Duration::from_micros(bytes / 2)).await;
        let late = self.calls.fetch_add(1, Ordering::Relaxed) >= REQUESTS / 3;
        if late && bytes > LARGE && self.said.fetch_add(1, Ordering::Relaxed) == 0 {
            return Err(TooMany);
        }
        Ok(())
    }
}

/// What went on in one phase.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    entered: u32,
    most_in_flight: u32,
    most_bytes: u64,
}

/// Text in most requests, and an image in every eighth.
fn prompt(number: u64, random: &mut Random) -> Vec<Part<'static>> {
    let mut parts = vec![Part::Text { tokens: 20 + random.below(400) }];
    if number.is_multiple_of(8) {
        parts.push(Part::Image { bytes: LARGE + random.below(160 * KIB) });
    }
    parts
}

/// [`Throttle::layered`], a tenth as large and several times as fast.
fn throttle(start: Instant) -> Result<Throttle, Box<dyn Error>> {
    let sizes = SizeRule::new(LARGE, Duration::from_millis(300), Duration::from_millis(900));
    let throttle = Throttle::layered()
        .slots(Slots::fixed(40))
        .recovery_slots(4)
        .bytes(Bytes::in_flight(512 * KIB).recovering_price(20))
        .pause(Pause::default().tail(Duration::from_millis(1_500)).sizes(sizes))
        .retry(Retry::attempts(3).budget(RetryBudget::unlimited()))
        .on_state_change(move |notice| {
            if let Event::Paused { span, .. } = notice.event {
                say(start, &format!("paused for {span:?}: nobody enters"));
            }
        })
        .build()?;
    Ok(throttle)
}

fn say(start: Instant, line: &str) {
    println!("{:>5.2} s  {line}", start.elapsed().as_secs_f64());
}

fn classify(reply: &Result<(), TooMany>) -> Class {
    match reply {
        Ok(()) => Class::end(Outcome::success()),
        Err(TooMany) => Class::again(Outcome::overload()),
    }
}

/// Says when the phase changes. A pause and its tail end by time alone, so somebody has to look.
async fn watch(throttle: Throttle, start: Instant) {
    let mut last = Phase::Normal;
    loop {
        let seen = throttle.snapshot();
        if seen.phase != last {
            match seen.phase {
                Phase::Recovering => {
                    let waiting = seen.waiting;
                    say(
                        start,
                        &format!("recovering: 4 at a time, bytes at 20 times the price; {waiting} wait"),
                    );
                }
                Phase::Normal => say(start, &format!("back to full speed: {} wait", seen.waiting)),
                _ => {}
            }
            last = seen.phase;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let throttle = throttle(start)?;
    let far_side = Arc::new(FarSide::default());
    let tallies = Arc::new(Mutex::new([Tally::default(); 2]));
    let mut random = Random::seeded(7);
    let watcher = tokio::spawn(watch(throttle.clone(), start));

    say(start, &format!("{REQUESTS} requests, 40 slots, 512 KiB in flight; every eighth has an image"));
    let mut tasks = JoinSet::new();
    for number in 0..REQUESTS {
        let cost = prompt(number, &mut random).to_cost();
        let (throttle, far_side, tallies) = (throttle.clone(), Arc::clone(&far_side), Arc::clone(&tallies));
        tasks.spawn(async move {
            let work = async |_| {
                enter(&throttle, &tallies);
                let reply = far_side.call(cost.bytes).await;
                if reply.is_err() {
                    say(start, &format!("429 for a request of {} KiB", cost.bytes / KIB));
                }
                reply
            };
            throttle.runner().classify(classify).run(cost, work).await.is_ok()
        });
    }
    let mut done = 0;
    while let Some(ok) = tasks.join_next().await {
        done += u32::from(ok?);
    }
    watcher.abort();
    say(
        start,
        &format!(
            "{done} of {REQUESTS} done; {} were admitted, retries included",
            throttle.snapshot().admitted
        ),
    );
    summary(*tallies.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(())
}

/// Counts an entry in the phase it belongs to.
fn enter(throttle: &Throttle, tallies: &Mutex<[Tally; 2]>) {
    let seen = throttle.snapshot();
    let is_recovering = seen.phase == Phase::Recovering;
    let in_flight = if is_recovering { seen.recovering_in_flight } else { seen.in_flight };
    let tally = &mut tallies.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(is_recovering)];
    tally.entered += 1;
    tally.most_in_flight = tally.most_in_flight.max(in_flight);
    tally.most_bytes = tally.most_bytes.max(seen.bytes_in_flight);
}

fn summary(tallies: [Tally; 2]) {
    for (phase, tally) in ["normally", "while recovering"].into_iter().zip(tallies) {
        let Tally { entered, most_in_flight, most_bytes } = tally;
        println!(
            "{phase}: {entered} entered, at most {most_in_flight} at a time, {} KiB as priced",
            most_bytes / KIB
        );
    }
}
