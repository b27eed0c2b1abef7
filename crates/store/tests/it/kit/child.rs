//! Child processes of this test program, each running one test.
//!
//! The arguments are in an environment variable. Without it, the test is the parent.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child as Process, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// The full name of a test of the same module, as the test harness knows it.
macro_rules! test_name {
    ($test:ident) => {
        $crate::kit::child::without_crate(concat!(module_path!(), "::", stringify!($test)))
    };
}
pub(crate) use test_name;

pub(crate) fn without_crate(path: &'static str) -> &'static str {
    path.split_once("::").expect("a test is in a module").1
}

/// The variable with the arguments of a child.
const ARGS: &str = "TIDEGATE_TEST_CHILD";
/// The prefix of a line for the parent.
const MARK: &str = "@";

/// The arguments of a child.
#[derive(Debug, Clone)]
pub(crate) struct ChildArgs {
    pub(crate) path: PathBuf,
    pub(crate) number: u64,
    pub(crate) seed: u64,
}

impl ChildArgs {
    /// `None` in the parent.
    pub(crate) fn from_env() -> Option<Self> {
        let text = std::env::var(ARGS).ok()?;
        let mut parts = text.splitn(3, ' ');
        let mut next = || parts.next().expect("the arguments have three parts");
        let (number, seed) = (next().parse().expect("a number"), next().parse().expect("a seed"));
        Some(Self { number, seed, path: next().into() })
    }

    /// Reports a line to the parent.
    pub(crate) fn report(line: &str) {
        let mut out = std::io::stdout().lock();
        // Without its parent the child exits.
        if writeln!(out, "\n{MARK}{line}").and_then(|()| out.flush()).is_err() {
            std::process::exit(0);
        }
    }

    /// Returns when the parent calls [`Child::go`].
    pub(crate) fn wait_for_go() {
        Self::report("ready");
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line);
        if read.is_ok_and(|read| read == 0) {
            std::process::exit(0);
        }
    }
}

/// A child process.
#[derive(Debug)]
pub(crate) struct Child {
    process: Process,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    /// Starts a test of this program as a child, by its full name: see [`test_name!`].
    pub(crate) fn start(test: &str, path: &Path, number: u64, seed: u64) -> Self {
        let program = std::env::current_exe().expect("the path of this program");
        let mut process = Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ARGS, format!("{number} {seed} {}", path.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the child starts");
        let input = process.stdin.take().expect("stdin is piped");
        let output = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, line)) = line.split_once(MARK)
                    && sender.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self { process, input, lines }
    }

    /// The next line from the child, or `None` after it exited.
    pub(crate) fn next_line(&self) -> Option<String> {
        self.lines.recv().ok()
    }

    /// Waits until the child reports that it is ready.
    pub(crate) fn wait_ready(&self) {
        assert_eq!(self.next_line().as_deref(), Some("ready"));
    }

    /// The lines received so far, without waiting.
    pub(crate) fn lines_so_far(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// Lets the child continue; by convention the first time to begin, the second time to stop.
    pub(crate) fn go(&mut self) {
        writeln!(self.input, "go").and_then(|()| self.input.flush()).expect("the child reads stdin");
    }

    /// Waits until the child exits successfully.
    pub(crate) fn wait(mut self) {
        drop(self.input);
        let status = self.process.wait().expect("the child was started");
        assert!(status.success(), "a child exited with {status}");
    }

    /// Kills the child and returns the lines that it had reported.
    pub(crate) fn kill(mut self) -> Vec<String> {
        self.process.kill().expect("the child is running");
        self.process.wait().expect("the child was started");
        self.lines.iter().collect()
    }
}
