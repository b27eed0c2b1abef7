//! Redis servers of the test's own, which it can kill: a server, and a sentinel.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::kit::engine::{REDIS_SERVER, free_port};

/// Another process may take a port before the server does.
const TRIES: usize = 50;
/// Attempts to restart a server on its port, with a pause after each: about a minute.
const RESTARTS: usize = 3_000;
const PAUSE: Duration = Duration::from_millis(20);

/// A server and its data, removed on drop.
pub(crate) struct Server {
    pub(crate) port: u16,
    child: Child,
    folder: TempDir,
    args: Vec<String>,
}

impl Server {
    /// Starts a server that syncs every write to disk before it responds, so that it survives a kill.
    pub(crate) async fn start(args: &[&str]) -> Self {
        Self::start_with(&[&["--appendonly", "yes", "--appendfsync", "always"], args].concat()).await
    }

    /// Starts a server without persistence, unless the settings enable it.
    pub(crate) async fn start_with(args: &[&str]) -> Self {
        Self::start_as(|port, _| {
            let mut all = vec!["--port".to_owned(), port.to_string()];
            all.extend(["--save", "", "--bind", "127.0.0.1"].map(str::to_owned));
            all.extend(args.iter().map(|arg| (*arg).to_owned()));
            all
        })
        .await
    }

    /// Starts a sentinel that replaces a primary one second after its last response.
    pub(crate) async fn watch(primary: u16, name: &str) -> Self {
        Self::start_as(|port, folder| {
            let (file, host) = (folder.join("sentinel.conf"), Ipv4Addr::LOCALHOST);
            let text = format!(
                "port {port}\nbind {host}\nsentinel monitor {name} {host} {primary} 1\n\
                 sentinel down-after-milliseconds {name} 1000\nsentinel failover-timeout {name} 10000\n"
            );
            std::fs::write(&file, text).expect("the folder exists");
            vec![file.display().to_string(), "--sentinel".to_owned()]
        })
        .await
    }

    /// Starts a server on a free port, with settings for that port and a folder.
    pub(crate) async fn start_as(settings: impl Fn(u16, &Path) -> Vec<String>) -> Self {
        let folder = tempfile::tempdir().expect("a folder for a test");
        for _ in 0..TRIES {
            let port = free_port();
            let args = settings(port, folder.path());
            if let Some(child) = run(folder.path(), &args) {
                return Self { port, child, folder, args };
            }
            tokio::time::sleep(PAUSE).await;
        }
        panic!("a server does not start");
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the server is running");
        self.child.wait().expect("the server was started");
    }

    /// Restarts it with the data on disk.
    pub(crate) async fn restart(&mut self) {
        for _ in 0..RESTARTS {
            if let Some(child) = run(self.folder.path(), &self.args) {
                self.child = child;
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
        panic!("the server on port {} does not restart", self.port);
    }
}

/// Starts a server and returns it when it accepts connections, or `None` if it exits before.
fn run(folder: &Path, args: &[String]) -> Option<Child> {
    let program = std::env::var(REDIS_SERVER).unwrap_or_else(|_| "redis-server".to_owned());
    // Its files are in the current folder.
    let mut command = Command::new(program);
    command.args(args).current_dir(folder).stdout(Stdio::piped());
    let mut child = command.spawn().expect("redis-server is installed");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
    while let Some(Ok(line)) = lines.next() {
        if ["Ready to accept connections", "+monitor"].iter().any(|mark| line.contains(mark)) {
            // Its output must be read, or it blocks.
            std::thread::spawn(move || lines.for_each(drop));
            return Some(child);
        }
    }
    child.wait().expect("the server was started");
    None
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
