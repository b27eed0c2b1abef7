//! Processes of this program that run one test as a child of it.
//!
//! The orders are in an environment variable. Without it, the test is the parent.

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

/// Where a child finds what it is to do.
const ORDERS: &str = "TIDEGATE_TEST_CHILD";
/// What begins a line that is meant for the parent.
const MARK: &str = "@";

/// What a child is to do.
#[derive(Debug, Clone)]
pub(crate) struct Orders {
    pub(crate) path: PathBuf,
    pub(crate) number: u64,
    pub(crate) seed: u64,
}

impl Orders {
    /// None where this process is no child.
    pub(crate) fn read() -> Option<Self> {
        let text = std::env::var(ORDERS).ok()?;
        let mut parts = text.splitn(3, ' ');
        let mut next = || parts.next().expect("orders have three parts");
        let (number, seed) = (next().parse().expect("a number"), next().parse().expect("a seed"));
        Some(Self { number, seed, path: next().into() })
    }

    /// Reports a line to the parent.
    pub(crate) fn tell(line: &str) {
        let mut out = std::io::stdout().lock();
        // Without its parent it has nothing to do.
        if writeln!(out, "\n{MARK}{line}").and_then(|()| out.flush()).is_err() {
            std::process::exit(0);
        }
    }

    /// Returns when the parent calls [`Child::go`].
    pub(crate) fn wait_for_go() {
        Self::tell("ready");
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line);
        if read.is_ok_and(|read| read == 0) {
            std::process::exit(0);
        }
    }
}

/// A process of this program.
#[derive(Debug)]
pub(crate) struct Child {
    process: Process,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Child {
    /// Starts a test of this program as a child, by its full name: see [`test_name!`].
    pub(crate) fn start(test: &str, path: &Path, number: u64, seed: u64) -> Self {
        let program = std::env::current_exe().expect("a program knows where it is");
        let mut process = Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ORDERS, format!("{number} {seed} {}", path.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process is started");
        let input = process.stdin.take().expect("it has an input");
        let output = BufReader::new(process.stdout.take().expect("it has an output"));
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

    /// Its next line, or `None` once it has ended.
    pub(crate) fn hears(&self) -> Option<String> {
        self.lines.recv().ok()
    }

    /// Waits for it to be ready, and for others with it.
    pub(crate) fn is_ready(&self) {
        assert_eq!(self.hears().as_deref(), Some("ready"));
    }

    /// The lines it has reported by now.
    pub(crate) fn has_told(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// Tells it to begin, and at the next time to stop.
    pub(crate) fn go(&mut self) {
        writeln!(self.input, "go").and_then(|()| self.input.flush()).expect("it listens");
    }

    /// Waits for its end, which must be a good one.
    pub(crate) fn ends(mut self) {
        drop(self.input);
        let status = self.process.wait().expect("it was started");
        assert!(status.success(), "a child ended with {status}");
    }

    /// Kills it at any moment of its work, and returns what it had reported by then.
    pub(crate) fn kill(mut self) -> Vec<String> {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it was started");
        self.lines.iter().collect()
    }
}
