//! Layered dispatch, scaled down to a few seconds: small and large requests, and one 429 in the middle.
//!
//! `cargo run --example layered`
#![allow(clippy::print_stdout, reason = "an example prints its results")]

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
/// Requests with images are larger than this; one of them gets the 429.
const LARGE: u64 = 32 * KIB;

/// "429 Too Many Requests", without a `Retry-After`.
#[derive(Debug)]
struct TooManyRequests;

/// An upstream whose latency grows with the size of the request, and that rejects one large request.
#[derive(Default)]
struct Upstream {
    calls: AtomicU64,
    rejected: AtomicU64,
}

impl Upstream {
    async fn call(&self, bytes: u64) -> Result<(), TooManyRequests> {
        tokio::time::sleep(Duration::from_millis(60) + Duration::from_micros(bytes / 2)).await;
        let is_due = self.calls.fetch_add(1, Ordering::Relaxed) >= REQUESTS / 3;
        if is_due && bytes > LARGE && self.rejected.fetch_add(1, Ordering::Relaxed) == 0 {
            return Err(TooManyRequests);
        }
        Ok(())
    }
}

/// Counters of one phase.
#[derive(Debug, Clone, Copy, Default)]
struct PhaseStats {
    admitted: u32,
    max_in_flight: u32,
    max_bytes: u64,
}

/// A prompt with text, and with an image in every eighth request.
fn prompt(number: u64, random: &mut Random) -> Vec<Part<'static>> {
    let mut parts = vec![Part::Text { tokens: 20 + random.below(400) }];
    if number.is_multiple_of(8) {
        parts.push(Part::Image { bytes: LARGE + random.below(160 * KIB) });
    }
    parts
}

/// [`Throttle::layered`] with a tenth of its capacity and with shorter times.
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
                log(start, &format!("paused for {span:?}: no request is admitted"));
            }
        })
        .build()?;
    Ok(throttle)
}

fn log(start: Instant, line: &str) {
    println!("{:>5.2} s  {line}", start.elapsed().as_secs_f64());
}

fn classify(reply: &Result<(), TooManyRequests>) -> Class {
    match reply {
        Ok(()) => Class::end(Outcome::success()),
        Err(TooManyRequests) => Class::again(Outcome::overload()),
    }
}

/// Prints each change of phase. It polls, because a pause and its tail end by time alone, without an event.
async fn watch(throttle: Throttle, start: Instant) {
    let mut last = Phase::Normal;
    loop {
        let snapshot = throttle.snapshot();
        if snapshot.phase != last {
            match snapshot.phase {
                Phase::Recovering => {
                    let waiting = snapshot.waiting;
                    log(
                        start,
                        &format!("recovering: 4 at a time, bytes at 20 times the price; {waiting} waiting"),
                    );
                }
                Phase::Normal => log(start, &format!("back to full speed: {} waiting", snapshot.waiting)),
                _ => {}
            }
            last = snapshot.phase;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let throttle = throttle(start)?;
    let upstream = Arc::new(Upstream::default());
    let stats = Arc::new(Mutex::new([PhaseStats::default(); 2]));
    let mut random = Random::seeded(7);
    let watcher = tokio::spawn(watch(throttle.clone(), start));

    log(start, &format!("{REQUESTS} requests, 40 slots, 512 KiB in flight; every eighth has an image"));
    let mut tasks = JoinSet::new();
    for number in 0..REQUESTS {
        let cost = prompt(number, &mut random).to_cost();
        let (throttle, upstream, stats) = (throttle.clone(), Arc::clone(&upstream), Arc::clone(&stats));
        tasks.spawn(async move {
            let work = async |_| {
                record_admission(&throttle, &stats);
                let reply = upstream.call(cost.bytes).await;
                if reply.is_err() {
                    log(start, &format!("429 for a request of {} KiB", cost.bytes / KIB));
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
    log(
        start,
        &format!("{done} of {REQUESTS} done; {} admitted, including retries", throttle.snapshot().admitted),
    );
    summary(*stats.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(())
}

/// Counts an admission in the current phase.
fn record_admission(throttle: &Throttle, stats: &Mutex<[PhaseStats; 2]>) {
    let snapshot = throttle.snapshot();
    let is_recovering = snapshot.phase == Phase::Recovering;
    let in_flight = if is_recovering { snapshot.recovering_in_flight } else { snapshot.in_flight };
    let phase = &mut stats.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(is_recovering)];
    phase.admitted += 1;
    phase.max_in_flight = phase.max_in_flight.max(in_flight);
    phase.max_bytes = phase.max_bytes.max(snapshot.bytes_in_flight);
}

fn summary(stats: [PhaseStats; 2]) {
    for (name, phase) in ["normal", "recovering"].into_iter().zip(stats) {
        let PhaseStats { admitted, max_in_flight, max_bytes } = phase;
        println!(
            "{name}: {admitted} admitted, at most {max_in_flight} in flight and {} KiB as priced",
            max_bytes / KIB
        );
    }
}
