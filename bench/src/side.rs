//! One of two servers that are measured: a program that is started, told apart by its process, and killed.

use std::ffi::OsStr;
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A server that answers. Dropping it kills it.
#[derive(Debug)]
pub struct Side {
    child: Child,
    /// What it said when it was ready: one document.
    pub ready: Value,
    /// How long it took from its start.
    pub ready_after: Duration,
}

impl Side {
    /// Starts it, and waits until it says that it answers.
    ///
    /// # Errors
    /// If it does not start, or says anything else.
    pub async fn start(program: &OsStr, arguments: &[&str]) -> Result<Self> {
        let began = Instant::now();
        let mut child = Command::new(program)
            .args(arguments)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} is built beside this program", program.display()))?;
        let stdout = child.stdout.take().context("its stdout is ours")?;
        let line =
            BufReader::new(stdout).lines().next_line().await?.context("it ended and never answered")?;
        let ready_after = began.elapsed();
        let ready = serde_json::from_str(&line).with_context(|| format!("it said `{line}`"))?;
        Ok(Self { child, ready, ready_after })
    }

    /// A text of what it said.
    ///
    /// # Errors
    /// If it did not say it.
    pub fn said(&self, name: &str) -> Result<&str> {
        self.ready[name].as_str().with_context(|| format!("there is no {name} in `{}`", self.ready))
    }

    /// The processor's time that all of its threads have had.
    ///
    /// # Errors
    /// If it has ended.
    pub fn cpu(&self) -> Result<Duration> {
        let pid = self.child.id().context("it has ended")?;
        let mut nanos = 0;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            // One that has ended meanwhile has done nothing since.
            let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
            let first = text.split(' ').next().unwrap_or_default();
            nanos += first.parse::<u64>().with_context(|| format!("schedstat says `{text}`"))?;
        }
        Ok(Duration::from_nanos(nanos))
    }
}
