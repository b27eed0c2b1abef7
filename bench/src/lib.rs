//! What the benchmarks share: rows, timing, counting, and the way a program of them runs.
//!
//! What else is in a program changes what the compiler inlines. So a benchmark that calls the same paths as another is a
//! program of its own.
#![allow(clippy::print_stdout, reason = "a command line program talks on its terminal")]

pub mod counted;
pub mod measure;
pub mod report;
pub mod side;
pub mod waits;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use report::Row;

/// Rows by name, and how they are measured with so many rounds.
pub type Case = (&'static str, fn(u32) -> Result<Vec<Row>>);

/// How a benchmark is run.
#[derive(Debug, Args)]
pub struct Options {
    /// Where to write the rows as JSON; target/bench/NAME.json unless said otherwise.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Rounds of each side; the best one counts.
    #[arg(long, default_value_t = 40)]
    pub rounds: u32,
    /// Only the rows whose name contains this.
    #[arg(long)]
    pub only: Option<String>,
}

/// Measures, prints and writes.
///
/// # Errors
/// If something cannot be measured, or the rows cannot be written.
pub fn run(name: &str, cases: &[Case], options: &Options) -> Result<()> {
    let rows = measured(cases, options.rounds, options.only.as_deref())?;
    report::print(&rows);
    let out = options.out.clone().unwrap_or_else(|| format!("target/bench/{name}.json").into());
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
