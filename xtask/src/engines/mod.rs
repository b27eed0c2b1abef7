//! `cargo xtask engines`: private servers for the tests, on free ports.
//!
//! A store must pass its tests on a real engine, so starting one takes a single command. Servers that already
//! run on the machine are not touched: ours have their own ports and folders, `target/engines/state.json`
//! records their process ids, and only recorded processes are ever stopped.

mod dynamodb;
mod fetch;
mod owner;
mod postgres;
mod process;
mod redis;
mod state;

use std::fmt;
use std::fs::{self, File};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::workspace;
use state::{Running, State};

/// The engines to test on. The first two need no server and are always available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Engine {
    /// In the test process
    Memory,
    /// Built in
    Sqlite,
    /// One Redis server
    Redis,
    /// One Valkey server
    Valkey,
    /// Six Redis nodes: three primaries, each with a replica
    RedisCluster,
    /// A primary, a replica and three sentinels that watch them; only if named
    Sentinel,
    /// One PostgreSQL server
    Postgres,
    /// DynamoDB Local, Amazon's own
    Dynamodb,
    /// A server with DynamoDB's API
    Dynoxide,
}

impl Engine {
    /// The servers that a full test run needs.
    pub(crate) const SERVERS: [Self; 6] =
        [Self::Redis, Self::Valkey, Self::RedisCluster, Self::Postgres, Self::Dynamodb, Self::Dynoxide];

    /// The variable with its address, which the tests read.
    const fn variable(self) -> Option<&'static str> {
        match self {
            Self::Memory | Self::Sqlite => None,
            Self::Redis => Some("TIDEGATE_TEST_REDIS"),
            Self::Valkey => Some("TIDEGATE_TEST_VALKEY"),
            Self::RedisCluster => Some("TIDEGATE_TEST_CLUSTER"),
            Self::Sentinel => Some("TIDEGATE_TEST_SENTINEL"),
            Self::Postgres => Some("TIDEGATE_TEST_POSTGRES"),
            Self::Dynamodb => Some("TIDEGATE_TEST_DYNAMODB"),
            Self::Dynoxide => Some("TIDEGATE_TEST_DYNOXIDE"),
        }
    }
}

impl Engine {
    /// The variable with its server's program, for tests that start and kill their own servers.
    const fn program_variable(self) -> Option<&'static str> {
        match self {
            Self::Redis => Some("TIDEGATE_TEST_REDIS_SERVER"),
            Self::Valkey => Some("TIDEGATE_TEST_VALKEY_SERVER"),
            Self::Postgres => Some("TIDEGATE_TEST_POSTGRES_SERVER"),
            _ => None,
        }
    }

    /// All variables that tests of this engine read.
    pub(crate) fn variables(self) -> impl Iterator<Item = &'static str> {
        self.variable().into_iter().chain(self.program_variable())
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
            Self::Redis => "redis",
            Self::Valkey => "valkey",
            Self::RedisCluster => "redis-cluster",
            Self::Sentinel => "sentinel",
            Self::Postgres => "postgres",
            Self::Dynamodb => "dynamodb",
            Self::Dynoxide => "dynoxide",
        })
    }
}

/// The output format of `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatusFormat {
    /// A table, for people.
    Table,
    /// The state file, for programs.
    Json,
    /// Shell exports, so that `cargo test` finds the engines.
    Env,
}

/// Starts the named engines that are not running; without names, those of a full test run.
pub(crate) fn up(engines: &[Engine]) -> Result<()> {
    let engines = if engines.is_empty() { &Engine::SERVERS[..] } else { engines };
    let _lock = lock()?;
    let mut state = State::read()?;
    state.remove_dead();
    for &engine in engines.iter().filter(|engine| engine.variable().is_some()) {
        if state.is_up(engine) {
            continue;
        }
        // Servers left over from a partly dead engine hold its ports and folder.
        stop(&mut state, &[engine])?;
        eprintln!("starting {engine}");
        let running = start(engine).with_context(|| format!("could not start the engine {engine}"))?;
        state.engines.push(running);
        state.write()?;
    }
    state.write()
}

fn start(engine: Engine) -> Result<Running> {
    match engine {
        Engine::Redis => redis::single(engine, &fetch::redis()?),
        Engine::Valkey => redis::single(engine, &fetch::valkey()?),
        Engine::RedisCluster => redis::cluster(&fetch::redis()?),
        Engine::Sentinel => redis::sentinel(&fetch::redis()?),
        Engine::Postgres => postgres::start(&fetch::postgres()?),
        Engine::Dynamodb => dynamodb::local(&fetch::dynamodb_local()?),
        Engine::Dynoxide => dynamodb::dynoxide(&fetch::dynoxide()?),
        Engine::Memory | Engine::Sqlite => unreachable!("they have no server"),
    }
}

/// Stops the named engines, or all without names: only those in the state file.
pub(crate) fn down(engines: &[Engine]) -> Result<()> {
    let _lock = lock()?;
    let mut state = State::read()?;
    let all: Vec<_> = state.engines.iter().map(|running| running.engine).collect();
    stop(&mut state, if engines.is_empty() { &all } else { engines })
}

fn stop(state: &mut State, engines: &[Engine]) -> Result<()> {
    for running in state.engines.iter().filter(|running| engines.contains(&running.engine)) {
        running.stop()?;
    }
    state.engines.retain(|running| !engines.contains(&running.engine));
    state.write()
}

/// Prints the running engines.
pub(crate) fn status(format: StatusFormat) -> Result<()> {
    let mut state = State::read()?;
    state.remove_dead();
    match format {
        StatusFormat::Table => print!("{}", state.table()),
        StatusFormat::Json => println!("{}", serde_json::to_string_pretty(&state)?),
        StatusFormat::Env => {
            for (name, value) in state.variables() {
                println!("export {name}='{value}'");
            }
            let (name, program) = envoy()?;
            println!("export {name}='{program}'");
        }
    }
    Ok(())
}

/// The variable with Envoy's program, and the program: tests start it themselves.
pub(crate) fn envoy() -> Result<(&'static str, String)> {
    let program = fetch::envoy().context("could not install Envoy")?;
    Ok(("TIDEGATE_TEST_ENVOY", program.display().to_string()))
}

/// Engines for the duration of some work: drop stops those that this guard started.
#[derive(Debug)]
pub(crate) struct EngineGuard {
    started: Vec<Engine>,
}

impl EngineGuard {
    /// Starts the engines that are not running.
    pub(crate) fn up(engines: &[Engine]) -> Result<Self> {
        let mut before = State::read()?;
        before.remove_dead();
        let started: Vec<_> = engines.iter().copied().filter(|engine| !before.is_up(*engine)).collect();
        let guard = Self { started };
        if !engines.is_empty() {
            up(engines)?;
        }
        Ok(guard)
    }

    /// The variables that the tests read.
    pub(crate) fn variables(&self) -> Result<Vec<(&'static str, String)>> {
        let state = State::read()?;
        let missing: Vec<_> = self.started.iter().filter(|engine| !state.is_up(**engine)).collect();
        ensure!(missing.is_empty(), "engines did not start: {missing:?}");
        Ok(state.variables())
    }
}

impl Drop for EngineGuard {
    fn drop(&mut self) {
        if self.started.is_empty() {
            return;
        }
        if let Err(error) = down(&self.started) {
            eprintln!("could not stop the engines: {error:#}");
        }
    }
}

/// Serializes commands that change which engines run.
fn lock() -> Result<File> {
    let folder = folder();
    fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
    let path = folder.join("lock");
    let file = File::create(&path).with_context(|| format!("could not create {}", path.display()))?;
    file.lock().with_context(|| format!("could not lock {}", path.display()))?;
    Ok(file)
}

/// An empty folder for the files of an engine.
fn empty_folder(engine: Engine) -> Result<std::path::PathBuf> {
    let folder = folder().join(engine.to_string());
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("could not empty {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
    Ok(folder)
}

/// The folder of all engine files.
fn folder() -> std::path::PathBuf {
    workspace::target().join("engines")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_name_is_the_same_on_cli_and_in_state() {
        for engine in Engine::value_variants() {
            let typed = engine.to_possible_value().expect("none is hidden");
            assert_eq!(typed.get_name(), engine.to_string());
            assert_eq!(serde_json::to_value(engine).unwrap(), engine.to_string());
        }
    }

    #[test]
    fn every_server_has_a_variable() {
        for engine in Engine::SERVERS {
            assert!(engine.variables().count() > 0, "{engine}");
        }
    }
}
