//! Timing two sides on a noisy machine: interleaved rounds, and the best round of each.

use std::time::Instant;

/// Operations per round: a round of a few milliseconds fits between most disturbances.
const BATCH: u32 = 20_000;

/// Nanoseconds per operation of both sides, each the best of its rounds.
pub fn best_of(rounds: u32, mut ours: impl FnMut(), mut peer: impl FnMut()) -> (f64, f64) {
    best_of_batches(rounds, |times| (0..times).for_each(|_| ours()), |times| (0..times).for_each(|_| peer()))
}

/// The same for sides that do so many operations when called: entering a runtime is then not what is measured.
pub fn best_of_batches(rounds: u32, mut ours: impl FnMut(u32), mut peer: impl FnMut(u32)) -> (f64, f64) {
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..rounds {
        best.0 = best.0.min(round(&mut ours));
        best.1 = best.1.min(round(&mut peer));
    }
    best
}

fn round(operation: &mut impl FnMut(u32)) -> f64 {
    operation(BATCH / 20);
    let start = Instant::now();
    operation(BATCH);
    start.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH)
}

/// Seconds of the processor that this process has taken; none where the system does not tell.
pub fn own_seconds() -> f64 {
    let told = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name of the program, which may be anything, in hundredths.
    let fields = told.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
