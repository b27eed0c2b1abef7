//! Timing of two sides on a noisy machine: interleaved rounds, and the best round of each.

use std::time::Instant;

/// Operations per round: a round of a few milliseconds fits between most disturbances.
const BATCH: u32 = 20_000;

/// Nanoseconds per operation of both sides, each the best of its rounds.
pub fn best_of(rounds: u32, mut ours: impl FnMut(), mut peer: impl FnMut()) -> (f64, f64) {
    best_of_batches(rounds, |times| (0..times).for_each(|_| ours()), |times| (0..times).for_each(|_| peer()))
}

/// The same for sides that run a batch per call, so that entering a runtime is not measured.
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

/// CPU seconds that this process has used, or 0 where the system does not report them.
pub fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields are in hundredths of a second and follow the program's name, which may contain anything.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum::<f64>() / 100.0
}
