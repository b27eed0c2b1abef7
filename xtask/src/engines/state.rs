//! The state file: running engines, so that the next command finds them and stops nothing else.

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::process::Process;
use super::{Engine, folder};

/// Engines that were started and not stopped.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) engines: Vec<Running>,
}

/// An engine that was started.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Running {
    pub(super) engine: Engine,
    /// The address for clients.
    pub(super) url: String,
    /// The server's program: tests that kill a server start their own.
    pub(super) program: PathBuf,
    /// The folder of its files; outside `target` where the server's user cannot reach that.
    pub(super) folder: PathBuf,
    pub(super) processes: Vec<Process>,
}

impl Running {
    fn is_alive(&self) -> bool {
        self.processes.iter().all(Process::is_alive)
    }

    /// Stops its processes and removes its files.
    pub(super) fn stop(&self) -> Result<()> {
        for process in &self.processes {
            process.stop().with_context(|| format!("could not stop a server of {}", self.engine))?;
        }
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("could not remove {}", self.folder.display()))
            }
            _ => Ok(()),
        }
    }
}

impl State {
    /// Reads the state file; a missing one is an empty state.
    pub(super) fn read() -> Result<Self> {
        let path = path();
        match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text)
                .with_context(|| format!("{} is not a valid state file: remove it", path.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("could not read {}", path.display())),
        }
    }

    pub(super) fn write(&self) -> Result<()> {
        let path = path();
        let text = serde_json::to_string_pretty(self)?;
        fs::write(&path, text).with_context(|| format!("could not write {}", path.display()))
    }

    /// Whether all servers of an engine are running.
    pub(super) fn is_up(&self, engine: Engine) -> bool {
        self.engines.iter().any(|running| running.engine == engine && running.is_alive())
    }

    /// Removes engines without a running process.
    pub(super) fn remove_dead(&mut self) {
        self.engines.retain(|running| running.processes.iter().any(Process::is_alive));
    }

    /// The variables for the tests: the address of each engine, and its server's program.
    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        for running in &self.engines {
            let program = running.engine.program_variable();
            variables.extend(running.engine.variable().map(|name| (name, running.url.clone())));
            variables.extend(program.map(|name| (name, running.program.display().to_string())));
        }
        variables
    }

    /// One line per engine.
    pub(super) fn table(&self) -> String {
        let mut table = format!("{:<14} {:<10} {:<24} {}\n", "engine", "state", "pids", "url");
        for running in &self.engines {
            let state = if running.is_alive() { "up" } else { "partly up" };
            let pids: Vec<_> = running.processes.iter().map(|process| process.pid.to_string()).collect();
            let Running { engine, url, .. } = running;
            let _ = writeln!(table, "{engine:<14} {state:<10} {:<24} {url}", pids.join(","));
        }
        if self.engines.is_empty() {
            table.push_str("none: `cargo xtask engines up` starts them\n");
        }
        table
    }
}

fn path() -> PathBuf {
    folder().join("state.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(pid: i32) -> State {
        let process = Process { pid, port: 5_432, started: 1 };
        let (program, folder) = ("/nowhere/bin/postgres".into(), "/nowhere/data".into());
        let url = "postgres://localhost:5432/postgres".to_owned();
        State {
            engines: vec![Running {
                engine: Engine::Postgres,
                url,
                program,
                folder,
                processes: vec![process],
            }],
        }
    }

    #[test]
    fn state_file_round_trips() {
        let text = serde_json::to_string(&state(7)).unwrap();
        let read: State = serde_json::from_str(&text).unwrap();
        assert_eq!(read.table(), state(7).table());
    }

    #[test]
    fn reused_process_id_is_not_ours() {
        let own = i32::try_from(std::process::id()).unwrap();
        let mut state = state(own);
        assert!(!state.is_up(Engine::Postgres), "it started at another time");
        state.engines[0].stop().unwrap();
        state.remove_dead();
        assert!(state.engines.is_empty());
        assert!(state.table().ends_with("starts them\n"));
    }

    #[test]
    fn variables_hold_the_address_and_the_program() {
        assert_eq!(
            state(7).variables(),
            [
                ("TIDEGATE_TEST_POSTGRES", "postgres://localhost:5432/postgres".to_owned()),
                ("TIDEGATE_TEST_POSTGRES_SERVER", "/nowhere/bin/postgres".to_owned()),
            ]
        );
    }
}
