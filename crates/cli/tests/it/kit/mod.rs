//! A store per test, and a runner of the program.

pub(crate) mod codec;
#[path = "../../../../store/tests/it/kit/engine.rs"]
#[allow(dead_code, reason = "tests of other crates use more of it")]
pub(crate) mod engine;
pub(crate) mod fetch;
pub(crate) mod lifecycle;
#[path = "../../../../server/tests/it/kit/pki.rs"]
pub(crate) mod pki;
pub(crate) mod server;
pub(crate) mod tool;
pub(crate) mod tour;
pub(crate) mod watch;

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub(crate) use codec::Json;
use server::TestServer;

/// Timeout of a wait: longer than any successful one.
const HANGS: Duration = Duration::from_mins(2);
/// Interval between checks of a condition.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A temporary store, with an optional server in front of it.
pub(crate) struct Fixture {
    folder: TempDir,
    /// The server that the program uses instead of the store.
    pub(crate) server: Option<TestServer>,
    /// A token with every scope.
    pub(crate) token: Option<String>,
}

/// The result of a run of the program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::new().expect("a folder for a test"), server: None, token: None }
    }

    /// A store and a server with equal state, so that their output can be compared.
    pub(crate) fn both() -> [Self; 2] {
        let [mut store, server] = [Self::served(), Self::served()];
        // A server writes to its store when it starts, so both had one.
        store.server.take().expect("it serves").stop();
        [store, server]
    }

    /// A store that is accessed through a server.
    pub(crate) fn served() -> Self {
        let mut fixture = Self::new();
        let made = fixture.json("token create ops --scopes acquire,read,admin");
        fixture.token = made["secret"].as_str().map(str::to_owned);
        fixture.server = Some(fixture.serve(&[]));
        fixture
    }

    /// Starts a server over the store, with additional arguments. A later one can listen on the same address.
    pub(crate) fn serve(&self, arguments: &[&str]) -> TestServer {
        self.serve_at(&format!("{}:0", server::own_address()), arguments)
    }

    /// Starts a server that listens on this address.
    pub(crate) fn serve_at(&self, listen: &str, arguments: &[&str]) -> TestServer {
        let line = [&["serve", "--listen", listen, "--metrics", "127.0.0.1:0"], arguments].concat();
        let mut command = self.program(&line);
        TestServer::start(command.env("TIDEGATE_STORE", self.store()))
    }

    /// What the program uses, for the message of a failed test.
    pub(crate) fn place(&self) -> &'static str {
        if self.server.is_some() { "at a server" } else { "at a store" }
    }

    /// The store's address.
    pub(crate) fn store(&self) -> String {
        format!("sqlite:{}", self.file().display())
    }

    /// The store's file, which does not exist before it is used.
    pub(crate) fn file(&self) -> PathBuf {
        self.path("limits.db")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, with a reproducible environment that names the store or the server.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.program(arguments);
        match (&self.server, &self.token) {
            (Some(server), Some(token)) => {
                command.env("TIDEGATE_SERVER", server.url()).env("TIDEGATE_TOKEN", token)
            }
            _ => command.env("TIDEGATE_STORE", self.store()),
        };
        command
    }

    /// The program, with a reproducible environment.
    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        clear_environment(command.args(arguments));
        // A server's name for the token `ops`, so that output is equal at store and server.
        let actor = if self.token.is_some() { "token:ops" } else { "ops" };
        command.env("TIDEGATE_ACTOR", actor).stdin(Stdio::null());
        // Long enough for a store on a busy disk.
        command.env("TIDEGATE_TIMEOUT", "1m");
        // Requests to DynamoDB need keys, and the test servers accept any.
        command.env("AWS_ACCESS_KEY_ID", "tidegate").env("AWS_SECRET_ACCESS_KEY", "tidegate");
        command
    }

    /// Runs a command line, split at whitespace.
    pub(crate) fn run(&self, line: &str) -> Run {
        self.run_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    pub(crate) fn run_words(&self, arguments: &[&str]) -> Run {
        run(&mut self.command(arguments))
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn ok(&self, line: &str) -> String {
        let run = self.run(line);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{line} {}: {run:?}", self.place());
        run.stdout
    }

    /// Runs a command that must succeed, and returns its JSON output.
    pub(crate) fn json(&self, line: &str) -> Json {
        codec::parse(&self.ok(&format!("--json {line}")))
    }

    /// The available units of a limit.
    pub(crate) fn available(&self, entity: &str, resource: &str, limit: &str) -> i64 {
        let balance = self.json(&format!("balance {entity} {resource}"));
        let lines = balance["limits"].as_array().expect("a list of limits");
        let line = lines.iter().find(|line| line["limit"] == limit && line["entity"] == entity);
        line.and_then(|line| line["available"].as_i64()).expect("the limit exists")
    }
}

pub(crate) fn run(command: &mut Command) -> Run {
    ended(command.output().expect("the program starts"))
}

/// Waits until a program has ended.
pub(crate) fn finish(child: Child) -> Run {
    ended(child.wait_with_output().expect("it ends"))
}

/// The result of a program that no signal killed.
fn ended(output: Output) -> Run {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let code = output.status.code().expect("no signal kills it");
    Run { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

pub(crate) fn send(child: &Child, signal: Signal) {
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("it has an id");
    kill_process(id, signal).expect("it was not waited for");
}

/// Waits until a program has a handler for a signal, which Linux shows in `/proc`.
pub(crate) fn wait_until_it_catches(child: &Child, signal: Signal) {
    let status = format!("/proc/{}/status", child.id());
    wait_until("a handler for the signal", || {
        let text = fs::read_to_string(&status).expect("it runs");
        let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("a line of Linux");
        let caught = u64::from_str_radix(caught.trim(), 16).expect("a mask");
        (caught >> (signal.as_raw() - 1)) & 1 == 1
    });
}

/// Clears the environment of a command, except the search path and the output path of coverage.
pub(crate) fn clear_environment(command: &mut Command) -> &mut Command {
    command.env_clear();
    let kept = ["PATH", "LLVM_PROFILE_FILE"].into_iter();
    command.envs(kept.filter_map(|name| Some((name, std::env::var_os(name)?))))
}

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    wait_for(what, || is_so().then_some(()));
}

/// Waits until `find` returns a value.
pub(crate) fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(began.elapsed() < HANGS, "never: {what}");
        thread::sleep(LOOK_AGAIN);
    }
}
