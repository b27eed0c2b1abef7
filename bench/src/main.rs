//! Side-by-side benchmarks: our side and a peer's in the same run, as ratios.
//!
//! `tidegate-bench local --out FILE` measures, prints a table and writes the rows as JSON. Run it by
//! `cargo xtask bench local`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program talks on its terminal")]

mod counted;
mod local;
mod measure;
mod report;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Parser;

/// Measures tidegate against its peers in one run.
#[derive(Debug, Parser)]
#[command(name = "tidegate-bench")]
struct Arguments {
    /// What to measure: `local`.
    name: String,
    /// Where to write the rows as JSON.
    #[arg(long, default_value = "target/bench/local.json")]
    out: PathBuf,
    /// Rounds of each side; the best one counts.
    #[arg(long, default_value_t = 40)]
    rounds: u32,
    /// Only the rows whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Runs one hot path so many times and nothing else: what callgrind counts.
    #[arg(long, hide = true)]
    hot: Option<u64>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(times) = arguments.hot {
        return local::run_hot(&arguments.name, times);
    }
    let rows = match arguments.name.as_str() {
        "local" => local::rows(arguments.rounds, arguments.only.as_deref())?,
        other => bail!("there is no benchmark called `{other}`; there is `local`"),
    };
    report::print(&rows);
    report::write(&rows, &arguments.out)
}
