//! One of the two servers: a program that is started, told apart by its process, and killed.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// A server that answers. Dropping it kills it.
pub(crate) struct Side {
    child: Child,
    pub(crate) addr: SocketAddr,
    pub(crate) token: String,
    /// How long it took from its start.
    pub(crate) ready_after: Duration,
}

/// What both say when they answer.
#[derive(Deserialize)]
struct Ready {
    url: String,
    token: String,
}

impl Side {
    /// Ours, on this store.
    pub(crate) async fn tidegate(store: &str) -> Result<Self> {
        let program = env::current_exe()?.with_file_name("tidegate");
        let arguments =
            ["serve", "--json", "--store", store, "--listen", "127.0.0.1:0", "--log-level", "warn"];
        Self::start(program.as_os_str(), &arguments).await
    }

    /// The other.
    pub(crate) async fn peer() -> Result<Self> {
        Self::start(env::current_exe()?.as_os_str(), &["--peer", "127.0.0.1:0"]).await
    }

    async fn start(program: &OsStr, arguments: &[&str]) -> Result<Self> {
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
        let Ready { url, token } =
            serde_json::from_str(&line).with_context(|| format!("it said `{line}`"))?;
        let addr = url.strip_prefix("http://").context("an address of HTTP")?.parse()?;
        Ok(Self { child, addr, token, ready_after })
    }

    /// The processor's time that all of its threads have had.
    pub(crate) fn cpu(&self) -> Result<Duration> {
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
