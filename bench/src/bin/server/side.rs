//! The two servers under test: ours, and the minimal peer.

use std::env;
use std::net::SocketAddr;
use std::ops::Deref;

use anyhow::{Context as _, Result};
use tidegate_bench::side::Side as Program;

/// A running HTTP server. Dropping it kills the process.
pub(crate) struct Side {
    program: Program,
    pub(crate) addr: SocketAddr,
    pub(crate) token: String,
}

impl Side {
    /// Starts ours on this store.
    pub(crate) async fn tidegate(store: &str) -> Result<Self> {
        let program = env::current_exe()?.with_file_name("tidegate");
        let arguments =
            ["serve", "--json", "--store", store, "--listen", "127.0.0.1:0", "--log-level", "warn"];
        Self::of(Program::start(program.as_os_str(), &arguments).await?)
    }

    /// Starts the peer.
    pub(crate) async fn peer() -> Result<Self> {
        Self::of(Program::start(env::current_exe()?.as_os_str(), &["--peer", "127.0.0.1:0"]).await?)
    }

    fn of(program: Program) -> Result<Self> {
        let addr = program.ready_field("url")?.strip_prefix("http://").context("an HTTP address")?.parse()?;
        let token = program.ready_field("token")?.to_owned();
        Ok(Self { program, addr, token })
    }
}

impl Deref for Side {
    type Target = Program;

    fn deref(&self) -> &Program {
        &self.program
    }
}
