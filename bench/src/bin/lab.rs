//! The controllers against simulated upstreams with hidden limits: `cargo xtask bench lab`.
//!
//! Nothing is timed: runs use virtual time and fixed seeds, so the rows are the same on every machine.
//! `--rounds` has no effect.
#![allow(clippy::print_stdout, reason = "a command line program talks on its terminal")]

use anyhow::{Result, ensure};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use tidegate_bench::Options;
use tidegate_bench::report::{self, Row};
use tidegate_lab::{Scenario, ScoreOptions, Strategy, score, table, targets};

/// Scores the default controller in the lab's scenarios and compares it with its targets.
#[derive(Debug, Parser)]
#[command(name = "lab")]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    let Options { out, only, .. } = Arguments::parse().options;
    let has_target = |name: &str| targets::targeted().any(|target| target == name);
    let mut scenarios = Scenario::built_in();
    scenarios.retain(|scenario| has_target(&scenario.name));
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    // The oracle is the baseline for latencies.
    let strategies = vec![Strategy::Auto, Strategy::Oracle];
    let scores = score(&scenarios, &ScoreOptions { strategies, ..ScoreOptions::default() }, &|progress| {
        bar.set_length(progress.total as u64);
        bar.set_message(progress.scenario.to_owned());
        bar.inc(1);
    });
    bar.finish_and_clear();
    print!("{}", table(&scores));
    let is_wanted = |name: &str| only.as_deref().is_none_or(|only| name.contains(only));
    let rows: Vec<Row> =
        targets::rows(&scores).iter().filter(|row| is_wanted(&row.name)).map(as_bench_row).collect();
    ensure!(!rows.is_empty(), "no row has `{}` in its name", only.unwrap_or_default());
    report::print(&rows);
    report::write(&rows, &out.unwrap_or_else(|| "target/bench/lab.json".into()))
}

fn as_bench_row(row: &targets::Row) -> Row {
    let make = if row.is_at_least { Row::at_least } else { Row::new };
    make(&row.name, (row.ours, row.peer), row.target, row.unit, row.what)
}
