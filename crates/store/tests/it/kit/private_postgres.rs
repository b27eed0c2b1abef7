//! A PostgreSQL server of the test's own, which it can kill and restart.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::kit::engine::{POSTGRES_SERVER, address, free_port};

/// Start attempts, with a pause after each: about a minute.
const TRIES: usize = 3_000;
const PAUSE: Duration = Duration::from_millis(20);

/// A server and its data, removed on drop.
pub(crate) struct PrivatePostgres {
    program: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
    /// The user to run it as if we are root, which the server refuses.
    owner: Option<(u32, u32)>,
    process: Child,
}

impl PrivatePostgres {
    pub(crate) fn start() -> Self {
        Self::start_with(|_| ())
    }

    /// Starts it after `prepare` has changed its data folder.
    pub(crate) fn start_with(prepare: impl FnOnce(&Path)) -> Self {
        let program = PathBuf::from(address(POSTGRES_SERVER));
        let folder = tempfile::tempdir().expect("a folder for a test");
        let owner = owner();
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::chown(folder.path(), Some(uid), Some(gid)).expect("root may change the owner");
        }
        let mut initdb = Command::new(program.with_file_name("initdb"));
        initdb.arg("-D").arg(folder.path().join("data")).args([
            "-U",
            "tidegate",
            "-A",
            "trust",
            "--locale=C",
        ]);
        let made = as_owner(owner, initdb.args(["-E", "UTF8", "-N"]).stdout(Stdio::null()))
            .current_dir("/")
            .status();
        assert!(made.expect("initdb starts").success(), "initdb failed");
        prepare(&folder.path().join("data"));
        let port = free_port();
        let process = launch(&program, folder.path(), port, owner);
        Self { program, folder, port, owner, process }
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://tidegate@127.0.0.1:{}/postgres", self.port)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("the server is running");
        self.process.wait().expect("the server was started");
    }

    /// Restarts it with the data on disk.
    pub(crate) fn start_again(&mut self) {
        self.process = launch(&self.program, self.folder.path(), self.port, self.owner);
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        // The test may have killed it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts the server, and returns when it accepts connections.
fn launch(program: &Path, folder: &Path, port: u16, owner: Option<(u32, u32)>) -> Child {
    for _ in 0..TRIES {
        match try_to_launch(program, folder, port, owner) {
            Ok(process) => return process,
            // The child processes of the killed server have not exited yet.
            Err(output) => assert!(output.contains("shared memory"), "the server does not start: {output}"),
        }
        std::thread::sleep(PAUSE);
    }
    panic!("the processes of the killed server do not exit");
}

fn try_to_launch(
    program: &Path,
    folder: &Path,
    port: u16,
    owner: Option<(u32, u32)>,
) -> Result<Child, String> {
    let mut command = Command::new(program);
    command.arg("-D").arg(folder.join("data")).args(["-h", "127.0.0.1", "-p", &port.to_string()]);
    command.args(["-c", "unix_socket_directories=", "-c", "log_min_messages=log"]);
    let mut process =
        as_owner(owner, command.current_dir("/").stderr(Stdio::piped())).spawn().expect("postgres starts");
    let mut lines = BufReader::new(process.stderr.take().expect("stderr is piped")).lines();
    let mut output = String::new();
    while let Some(Ok(line)) = lines.next() {
        if line.contains("database system is ready to accept connections") {
            // Its output must be read, or it blocks.
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(process);
        }
        output.push_str(&line);
    }
    process.wait().expect("the server was started");
    Err(output)
}

fn as_owner(owner: Option<(u32, u32)>, command: &mut Command) -> &mut Command {
    match owner {
        Some((uid, gid)) => command.uid(uid).gid(gid),
        None => command,
    }
}

/// An unprivileged user, if we are root.
fn owner() -> Option<(u32, u32)> {
    if fs::metadata("/proc/self").expect("this is Linux").uid() != 0 {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").expect("/etc/passwd is readable");
    let user = users.lines().find(|line| line.starts_with("nobody:")).expect("an unprivileged user exists");
    let mut numbers = user.split(':').skip(2).map(|number| number.parse().expect("a number"));
    Some((numbers.next().expect("a user id"), numbers.next().expect("a group id")))
}
