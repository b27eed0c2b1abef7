//! `cargo xtask test`: all checks, cheap ones first, stopping at the first failure.
//!
//! CI runs exactly this command. Every step that needs the workspace's code uses the same packages, features
//! and profile (`--workspace --all-features`, dev), so that cargo builds it once: the examples, the fuzzed
//! server and the doc tests run the artifacts of the test build.

mod features;

use std::env;
use std::num::NonZero;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::engines::{self, Engine, EngineGuard};
use crate::examples;
use crate::fuzz;
use crate::install;
use crate::sdk;
use crate::step::{self, Steps};
use crate::tidy;
use crate::workspace::{self, cargo};

/// The variables of engines that may be missing, separated by commas. Tests of any other missing engine fail
/// instead of being skipped.
const MAY_SKIP: &str = "TIDEGATE_TEST_MAY_SKIP";
/// Busy loops beside the tests, one per core of the smallest supported machine.
const BUSY_LOOPS: usize = 2;

const THREADS_PER_CORE: usize = 3;

/// How much to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// After an edit: without servers and models.
    Quick,
    /// Before a push.
    Usual,
    /// Before a release, or to find a rare bug.
    Deep,
}

/// What to run.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) depth: Depth,
    /// The engines to test on; all of them if empty.
    pub(crate) engines: Vec<Engine>,
    pub(crate) is_beside_load: bool,
}

/// Runs the steps and prints their times, whether or not one failed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut steps = Steps::default();
    let result = run_steps(&mut steps, options);
    println!("{}", steps.summary());
    result?;
    if options.depth == Depth::Quick {
        println!(
            "QUICK: servers, models, doc tests, examples, fuzzing, docs and feature checks were left out"
        );
    }
    let skipped: Vec<_> = left_out(&options.engines).iter().map(ToString::to_string).collect();
    if !skipped.is_empty() {
        println!("NARROWED: not tested on {}", skipped.join(", "));
    }
    Ok(())
}

fn run_steps(steps: &mut Steps, options: &Options) -> Result<()> {
    let Options { depth, .. } = *options;
    steps.run("fmt", || step::stream(&mut cargo("fmt --all --check")))?;
    steps.run("tidy", || tidy::run(tidy::Ratchet::Check))?;
    if depth == Depth::Quick {
        steps.run("build", build)?;
        let _load = Load::start(options.is_beside_load);
        return steps.run("tests", || step::stream(&mut test_programs()));
    }
    steps.run("clippy", || {
        step::stream(&mut cargo("clippy --workspace --all-targets --all-features -- -D warnings"))
    })?;
    steps.run("build", build)?;
    steps.run("install", install_tools)?;
    let load = Load::start(options.is_beside_load);
    steps.run("tests", || tests(options))?;
    // Without the engines' variables: the configuration examples read every variable with our prefix.
    steps.run("doc tests", || step::stream(&mut cargo("test --workspace --all-features --doc")))?;
    steps.run("examples", examples::run)?;
    steps.run("fuzz", || fuzz::run(depth))?;
    steps.run("sdks", sdk::run)?;
    drop(load);
    steps.run("model", || model(depth))?;
    steps.run("model clippy", model_clippy)?;
    steps.run("docs", || {
        step::stream(cargo("doc --workspace --no-deps --all-features").env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.run("features", || features::check(&metadata()?))?;
    if depth == Depth::Deep {
        steps.run("licences", licences)?;
    }
    Ok(())
}

/// Builds test programs, examples and the CLI in a step of their own, so that the table shows build time and
/// test time.
fn build() -> Result<()> {
    step::stream(&mut cargo("test --workspace --all-features --no-run --quiet"))
}

/// Runs what [`build`] built, except examples and doc tests.
fn test_programs() -> Command {
    let mut tests = cargo("test --workspace --all-features --lib --bins --tests");
    // Most tests wait for a server or a child process, not for a core.
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    if env::var_os("RUST_TEST_THREADS").is_none() {
        tests.env("RUST_TEST_THREADS", (THREADS_PER_CORE * cores).to_string());
    }
    tests
}

fn install_tools() -> Result<()> {
    // The command tours of the docs use curl, and the tests of `tidegate watch` use tmux.
    install::ensure_tool("curl", "curl")?;
    install::ensure_tool("tmux", "tmux")
}

fn tests(options: &Options) -> Result<()> {
    let left_out = left_out(&options.engines);
    let wanted: Vec<_> = Engine::SERVERS.into_iter().filter(|engine| !left_out.contains(engine)).collect();
    let engines = EngineGuard::up(&wanted)?;
    let mut tests = test_programs();
    tests.envs(engines.variables()?).envs([engines::envoy()?]);
    let may_skip: Vec<_> = left_out.iter().flat_map(|engine| engine.variables()).collect();
    tests.env(MAY_SKIP, may_skip.join(","));
    if options.depth == Depth::Deep {
        tests.env("PROPTEST_CASES", "20000").env("TIDEGATE_DEEP", "1");
    }
    step::stream(&mut tests)
}

/// The servers that a run leaves out, because others were named.
fn left_out(only: &[Engine]) -> Vec<Engine> {
    let is_left_out = |engine: &Engine| !only.is_empty() && !only.contains(engine);
    Engine::SERVERS.into_iter().filter(is_left_out).collect()
}

fn model(depth: Depth) -> Result<()> {
    let mut model = cargo("test --release -p tidegate-model --lib");
    if depth == Depth::Deep {
        model.env("MODEL_DEEP", "1");
    }
    step::stream(as_model(&mut model))
}

fn model_clippy() -> Result<()> {
    // In release, like the models, so that the two share build scripts and macros of dependencies.
    let mut clippy = cargo("clippy --release -p tidegate-model --all-targets -- -D warnings");
    step::stream(as_model(&mut clippy))
}

/// Other flags mean a full rebuild: a separate target folder keeps the usual build valid.
fn as_model(command: &mut Command) -> &mut Command {
    command
        .env("RUSTFLAGS", "--cfg tidegate_model")
        .env("CARGO_TARGET_DIR", workspace::target().join("model"))
}

/// Licences, banned crates and sources of all dependencies. Advisories need a database that is not always
/// reachable.
fn licences() -> Result<()> {
    install::ensure_cargo_tool("cargo-deny")?;
    let mut deny = cargo("deny --all-features check licenses bans sources");
    step::stream(deny.env("PATH", install::path_with_cargo_tools()?))
}

fn metadata() -> Result<Value> {
    let metadata = step::capture("cargo metadata", &mut cargo("metadata --no-deps --format-version 1"))?;
    serde_json::from_str(&metadata).context("cargo metadata wrote invalid JSON")
}

/// Threads that spin until dropped, so that tests which depend on speed fail here and not in CI.
struct Load {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(is_wanted: bool) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let spin = |_| {
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..if is_wanted { BUSY_LOOPS } else { 0 }).map(spin).collect();
        Self { is_over, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A busy loop has nothing to report.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowed_run_leaves_out_other_servers() {
        assert!(left_out(&[]).is_empty());
        let left_out = left_out(&[Engine::Memory, Engine::Redis]);
        assert!(!left_out.contains(&Engine::Redis) && left_out.contains(&Engine::Postgres));
        assert_eq!(left_out.len(), Engine::SERVERS.len() - 1);
    }

    #[test]
    fn load_stops_when_dropped() {
        let load = Load::start(true);
        assert_eq!(load.threads.len(), BUSY_LOOPS);
        drop(load);
        assert!(Load::start(false).threads.is_empty());
    }
}
