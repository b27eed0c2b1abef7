//! Shared parts of the benchmarks: rows, timing, counting, and the runner.
//!
//! Other code in a program changes what the compiler inlines. So a benchmark that calls the same paths as
//! another is a separate program.
#![allow(clippy::print_stdout, reason = "a command line program talks on its terminal")]

pub mod counters;
pub mod latencies;
pub mod measure;
pub mod report;
pub mod side;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use report::Row;

/// A name prefix of rows, and a function that measures them with so many rounds.
pub type Case = (&'static str, fn(u32) -> Result<Vec<Row>>);

/// Options of a benchmark run.
#[derive(Debug, Args)]
pub struct Options {
    /// Where to write the rows as JSON; target/bench/NAME.json by default.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Rounds of each side; the best one counts.
    #[arg(long, default_value_t = 40)]
    pub rounds: u32,
    /// Only the rows whose name contains this.
    #[arg(long)]
    pub only: Option<String>,
}

/// Measures the cases, prints a table and writes the rows as JSON.
///
/// # Errors
/// If a measurement fails or the rows cannot be written.
pub fn run(name: &str, cases: &[Case], options: &Options) -> Result<()> {
    let rows = measure_cases(cases, options.rounds, options.only.as_deref())?;
    report::print(&rows);
    let out = options.out.clone().unwrap_or_else(|| format!("target/bench/{name}.json").into());
    report::write(&rows, &out)
}

/// Measures the cases whose name contains `only`.
fn measure_cases(cases: &[Case], rounds: u32, only: Option<&str>) -> Result<Vec<Row>> {
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
