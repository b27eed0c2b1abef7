//! The DynamoDB store against zae-limiter, whose table keys it uses too: `cargo xtask bench dynamodb`.
//!
//! Both sides serve the same number of callers and entities on the same server, each in its own table. The
//! server is the bottleneck, so the rows compare the requests that each side sends and the CPU time of the
//! client.

mod ours;
mod peer;

use anyhow::{Context, Result};
use clap::Parser;
use tidegate_bench::report::Row;
use tidegate_bench::{Case, Options};

/// Concurrent callers.
const CALLERS: usize = 32;
/// Entities that they draw from in turn.
const ENTITIES: usize = 1_000;
/// Acquires per round: six for each entity.
const ACQUIRES: usize = 6_016;
/// Rounds are long: few are enough.
const ROUNDS_MAX: u32 = 3;
/// Requests per acquire to stay below. The peer does not report its own count.
const REQUESTS: f64 = 1.1;

const CASES: [Case; 1] = [("dynamodb", rows)];

/// Measures the store in a table of DynamoDB.
#[derive(Debug, Parser)]
#[command(name = "dynamodb")]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    tidegate_bench::run("dynamodb", &CASES, &Arguments::parse().options)
}

/// The cost of one acquire.
#[derive(Debug, Clone, Copy)]
struct Cost {
    requests: f64,
    /// CPU microseconds of the side's process.
    cpu_micros: f64,
    /// Acquires per second.
    rate: f64,
}

impl Cost {
    /// The better of two rounds, field by field.
    const fn best(self, other: Self) -> Self {
        Self {
            requests: self.requests.max(other.requests),
            cpu_micros: self.cpu_micros.min(other.cpu_micros),
            rate: self.rate.max(other.rate),
        }
    }
}

fn rows(rounds: u32) -> Result<Vec<Row>> {
    let endpoint = variable("TIDEGATE_TEST_DYNOXIDE")?;
    let python = variable("TIDEGATE_BENCH_ZAE_LIMITER")?;
    let ours = ours::Side::open(&endpoint)?;
    let mut best: Option<([Cost; 3], Cost)> = None;
    for _ in 0..rounds.clamp(1, ROUNDS_MAX) {
        let round = (ours.round()?, peer::round(&python, &endpoint)?);
        best = Some(best.map_or(round, |best| {
            let each = |at: usize| best.0[at].best(round.0[at]);
            ([each(0), each(1), each(2)], best.1.best(round.1))
        }));
    }
    let ([acquire, lease, spend], peer) = best.context("one round at least")?;
    let note = "requests per acquire, background requests included; 32 callers, 1,000 entities, half of them refilled since";
    let cpu = "CPU time of the client per acquire, lease included, vs zae-limiter's";
    let micros = |name: &str, ours: Cost, target, what: &str| {
        Row::new(name, (ours.cpu_micros, peer.cpu_micros), target, "µs", what)
    };
    let requests = |name: &str, ours: Cost, peer: f64, target, what: &str| {
        Row::new(name, (ours.requests, peer), target, "requests", what)
    };
    let rate = |name: &str, ours: Cost, what: &str| {
        Row::at_least(name, (ours.rate, peer.rate), None, "acquires/s", what)
    };
    Ok(vec![
        requests("requests_per_acquire", acquire, REQUESTS, Some(1.0), note),
        micros("client_cpu", acquire, Some(0.2), cpu),
        requests("requests_per_lease", lease, 2.0, None, "the same with its settle, vs two"),
        requests("requests_per_spend", spend, REQUESTS, None, "the same as a spend"),
        micros("client_cpu_lease", lease, None, "the same with its settle"),
        micros("client_cpu_spend", spend, None, "the same as a spend"),
        rate("rate_acquire", acquire, "on dynoxide, which is the bottleneck"),
        rate("rate_lease", lease, "the same with its settle"),
        rate("rate_spend", spend, "the same as a spend"),
    ])
}

fn variable(name: &str) -> Result<String> {
    std::env::var(name)
        .with_context(|| format!("{name} is not set: run it with `cargo xtask bench dynamodb`"))
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^53")]
const fn to_f64(count: usize) -> f64 {
    count as f64
}
