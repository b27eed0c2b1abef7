//! Side-by-side benchmarks: our side and a peer's in the same run, as ratios.
//!
//! `tidegate-bench local --out FILE` measures, prints a table and writes the rows as JSON. Run it with `cargo
//! xtask bench local`.

mod local;
mod shared;

use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use tidegate_bench::Options;

/// Measures tidegate against its peers in one run.
#[derive(Debug, Parser)]
#[command(name = "tidegate-bench")]
struct Arguments {
    /// What to measure: `local`, `keyed`, `shared`, `sqlite`, `server`, `rls`, `engines`, `dynamodb`, `http`, `proxy` or `lab`.
    name: String,
    #[command(flatten)]
    options: Options,
    /// Runs one hot path so many times and nothing else, for callgrind.
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
    match arguments.name.as_str() {
        "local" => tidegate_bench::run("local", &local::CASES, &arguments.options),
        "shared" => tidegate_bench::run("shared", &shared::CASES, &arguments.options),
        name
        @ ("dynamodb" | "engines" | "http" | "keyed" | "lab" | "proxy" | "rls" | "server" | "sqlite") => {
            run_beside(name)
        }
        other => {
            bail!(
                "unknown benchmark `{other}`: use `local`, `keyed`, `shared`, `sqlite`, `server`, `rls`, `engines`, `dynamodb`, `http`, `proxy` or `lab`"
            )
        }
    }
}

/// Runs a benchmark that is a separate program, with the same options.
fn run_beside(name: &str) -> Result<()> {
    let program = env::current_exe()?.with_file_name(name);
    let options = env::args_os().skip(1).filter(|argument| argument != name);
    let status = Command::new(&program).args(options).status().with_context(|| {
        format!("could not start {}, which must be built beside this program", program.display())
    })?;
    ensure!(status.success(), "the benchmark {name} ended with {status}");
    Ok(())
}
