//! The peer's side: a program of its own, in its own language.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use crate::{ACQUIRES, CALLERS, Cost, ENTITIES, REQUESTS};

const PROGRAM: &str = include_str!("peer.py");

/// What the peer's acquires take.
pub(crate) fn round(python: &str, endpoint: &str) -> Result<Cost> {
    static ROUNDS: AtomicU64 = AtomicU64::new(0);
    let table = format!("peer-{}-{}", std::process::id(), ROUNDS.fetch_add(1, Ordering::Relaxed));
    let numbers = [CALLERS, ENTITIES, ACQUIRES].map(|number| number.to_string());
    let output = Command::new(python)
        .args(["-c", PROGRAM, endpoint, &table])
        .args(numbers)
        .envs([("AWS_ACCESS_KEY_ID", "bench"), ("AWS_SECRET_ACCESS_KEY", "bench")])
        .output()
        .with_context(|| format!("{python} does not start"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "the peer fails: {}", String::from_utf8_lossy(&output.stderr));
    let numbers: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [count, processor, seconds] = numbers[..] else {
        anyhow::bail!("the peer says `{}`, and not how many, in what time", said.trim());
    };
    // It does not tell how many it sends.
    Ok(Cost { requests: REQUESTS, processor: processor * 1e6 / count, rate: count / seconds })
}
