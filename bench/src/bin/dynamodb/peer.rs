//! The peer's side: a Python program in a process of its own.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use crate::{ACQUIRES, CALLERS, Cost, ENTITIES, REQUESTS};

const PROGRAM: &str = include_str!("peer.py");

/// The cost of the peer's acquires.
pub(crate) fn round(python: &str, endpoint: &str) -> Result<Cost> {
    static ROUNDS: AtomicU64 = AtomicU64::new(0);
    let table = format!("peer-{}-{}", std::process::id(), ROUNDS.fetch_add(1, Ordering::Relaxed));
    let numbers = [CALLERS, ENTITIES, ACQUIRES].map(|number| number.to_string());
    let output = Command::new(python)
        .args(["-c", PROGRAM, endpoint, &table])
        .args(numbers)
        .envs([("AWS_ACCESS_KEY_ID", "bench"), ("AWS_SECRET_ACCESS_KEY", "bench")])
        .output()
        .with_context(|| format!("could not start {python}"))?;
    let output_text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "the peer failed: {}", String::from_utf8_lossy(&output.stderr));
    let numbers: Vec<f64> = output_text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [count, cpu, seconds] = numbers[..] else {
        anyhow::bail!("the peer printed `{}`, expected ACQUIRES CPU_SECONDS SECONDS", output_text.trim());
    };
    // The peer does not report its requests.
    Ok(Cost { requests: REQUESTS, cpu_micros: cpu * 1e6 / count, rate: count / seconds })
}
