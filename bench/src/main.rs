//! Side-by-side benchmarks: our side and a peer's in the same run, as ratios.
//!
//! `tidegate-bench local --out FILE` measures, prints a table and writes the rows as JSON. Run it by
//! `cargo xtask bench local`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program talks on its terminal")]

mod counted;
mod local;
mod measure;
mod report;
mod shared;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use report::Row;

/// Rows by name, and how they are measured with so many rounds.
pub(crate) type Case = (&'static str, fn(u32) -> Result<Vec<Row>>);

/// Measures tidegate against its peers in one run.
#[derive(Debug, Parser)]
#[command(name = "tidegate-bench")]
struct Arguments {
    /// What to measure: `local` or `shared`.
    name: String,
    /// Where to write the rows as JSON; target/bench/NAME.json unless said otherwise.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Rounds of each side; the best one counts.
    #[arg(long, default_value_t = 40)]
    rounds: u32,
    /// Only the rows whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Runs one hot path so many times and nothing else: what callgrind counts.
    #[arg(long, hide = true)]
    hot: Option<u32>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(times) = arguments.hot {
        return match arguments.name.strip_prefix("shared_") {
            Some(_) => shared::run_hot(&arguments.name, times),
            None => local::run_hot(&arguments.name, times),
        };
    }
    let cases: &[Case] = match arguments.name.as_str() {
        "local" => &local::CASES,
        "shared" => &shared::CASES,
        other => bail!("there is no benchmark called `{other}`; there are `local` and `shared`"),
    };
    let rows = measured(cases, arguments.rounds, arguments.only.as_deref())?;
    report::print(&rows);
    let out = arguments.out.unwrap_or_else(|| format!("target/bench/{}.json", arguments.name).into());
    report::write(&rows, &out)
}

/// Measures the cases whose name contains `only`.
fn measured(cases: &[Case], rounds: u32, only: Option<&str>) -> Result<Vec<Row>> {
    let wanted = cases.iter().filter(|(name, _)| only.is_none_or(|only| name.contains(only)));
    let wanted: Vec<&Case> = wanted.collect();
    let bar = ProgressBar::new(wanted.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut rows = Vec::new();
    for (name, measure) in wanted {
        bar.set_message(*name);
        rows.extend(measure(rounds)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}
