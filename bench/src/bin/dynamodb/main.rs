//! The store in a table of DynamoDB, against zae-limiter, which its table's keys are from: `cargo xtask bench dynamodb`.
//!
//! Both sides are asked by as many callers for as many entities, on the same server, each in a table of its own. The server is
//! the bottleneck, so that what is compared is what each side asks of it and what that costs the side that asks.

mod ours;
mod peer;

use anyhow::{Context, Result};
use clap::Parser;
use tidegate_bench::report::Row;
use tidegate_bench::{Case, Options};

/// Callers at a time.
const CALLERS: usize = 32;
/// Entities that they draw from in turn.
const ENTITIES: usize = 1_000;
/// Acquires of a round: six of each entity.
const ACQUIRES: usize = 6_016;
/// Rounds are long: few are enough.
const ROUNDS_MAX: u32 = 3;
/// The requests for each acquire that are to be undercut. The peer does not tell its own.
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

/// What a side took for each acquire.
#[derive(Debug, Clone, Copy)]
struct Cost {
    requests: f64,
    /// Microseconds of the processor, of the side's process alone.
    processor: f64,
    /// Acquires a second.
    rate: f64,
}

impl Cost {
    /// The least of each that two rounds took.
    const fn best(self, other: Self) -> Self {
        Self {
            requests: self.requests.max(other.requests),
            processor: self.processor.min(other.processor),
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
    let told = "requests for each acquire, all that were sent meanwhile included; 32 callers, 1,000 entities, half of them refilled since";
    let cpu = "processor of the client for each acquire, its lease included, vs zae-limiter's";
    let micros = |name: &str, ours: Cost, target, what: &str| {
        Row::new(name, (ours.processor, peer.processor), target, "µs", what)
    };
    let requests = |name: &str, ours: Cost, peer: f64, target, what: &str| {
        Row::new(name, (ours.requests, peer), target, "requests", what)
    };
    let rate = |name: &str, ours: Cost, what: &str| {
        Row::at_least(name, (ours.rate, peer.rate), None, "acquires/s", what)
    };
    Ok(vec![
        requests("requests_per_acquire", acquire, REQUESTS, Some(1.0), told),
        micros("client_cpu", acquire, Some(0.2), cpu),
        requests("requests_per_lease", lease, 2.0, None, "the same with its settle, against two"),
        requests("requests_per_spend", spend, REQUESTS, None, "the same where it is spent at once"),
        micros("client_cpu_lease", lease, None, "the same with its settle"),
        micros("client_cpu_spend", spend, None, "the same where it is spent at once"),
        rate("rate_acquire", acquire, "on dynoxide, which is the bottleneck"),
        rate("rate_lease", lease, "the same with its settle"),
        rate("rate_spend", spend, "the same where it is spent at once"),
    ])
}

fn variable(name: &str) -> Result<String> {
    std::env::var(name)
        .with_context(|| format!("{name} is not set: run this by `cargo xtask bench dynamodb`"))
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^53")]
const fn counted(count: usize) -> f64 {
    count as f64
}
