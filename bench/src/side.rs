//! A server under test as a child process: started, measured by its process id, and killed.

use std::ffi::OsStr;
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A running server. Dropping it kills the process.
#[derive(Debug)]
pub struct Side {
    child: Child,
    /// The JSON document that it printed when it was ready.
    pub ready: Value,
    /// The time from its start until it was ready.
    pub ready_after: Duration,
}

impl Side {
    /// Starts the program and waits until it reports that it is ready.
    ///
    /// # Errors
    /// If it does not start or prints anything else.
    pub async fn start(program: &OsStr, arguments: &[&str]) -> Result<Self> {
        let start = Instant::now();
        let mut child = Command::new(program)
            .args(arguments)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| {
                format!("could not start {}, which must be built beside this program", program.display())
            })?;
        let stdout = child.stdout.take().context("its stdout is not piped")?;
        let line = BufReader::new(stdout)
            .lines()
            .next_line()
            .await?
            .context("the server ended before it was ready")?;
        let ready_after = start.elapsed();
        let ready = serde_json::from_str(&line).with_context(|| format!("the server printed `{line}`"))?;
        Ok(Self { child, ready, ready_after })
    }

    /// A text field of its ready document.
    ///
    /// # Errors
    /// If the field is missing.
    pub fn ready_field(&self, name: &str) -> Result<&str> {
        self.ready[name].as_str().with_context(|| format!("`{name}` is missing in `{}`", self.ready))
    }

    /// The CPU time of all its threads.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn cpu(&self) -> Result<Duration> {
        cpu(self.child.id().context("the server has ended")?)
    }
}

/// The CPU time of all threads of a process.
///
/// # Errors
/// If the process has ended.
pub fn cpu(pid: u32) -> Result<Duration> {
    let mut nanos = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended since the listing uses no more CPU time.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let first = text.split(' ').next().unwrap_or_default();
        nanos += first.parse::<u64>().with_context(|| format!("schedstat contains `{text}`"))?;
    }
    Ok(Duration::from_nanos(nanos))
}
