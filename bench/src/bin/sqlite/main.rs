//! The SQLite store, and a throttle joined to a limiter: `cargo xtask bench sqlite`.

mod file;
mod joined;

use anyhow::Result;
use clap::Parser;
use tidegate_bench::{Case, Options};

const CASES: [Case; 4] = [
    ("draws_per_transaction", file::draws_per_transaction),
    ("group_commit", file::group_commit),
    ("pooled_sqlite", file::pooled),
    ("joined_overhead", joined::rows),
];

/// Measures the SQLite store, and a throttle joined to a limiter.
#[derive(Debug, Parser)]
#[command(name = "sqlite")]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    tidegate_bench::run("sqlite", &CASES, &Arguments::parse().options)
}
