//! A store of its own for a test, and the program as its users run it.
#![allow(dead_code, reason = "each test file uses some of it")]

pub(crate) mod codec;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

pub(crate) use codec::Json;

/// A folder with a store in it.
pub(crate) struct Shop {
    folder: TempDir,
}

/// What a run of the program came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Shop {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::new().expect("a folder for a test") }
    }

    /// The store's file, which is not there before it is used.
    pub(crate) fn file(&self) -> PathBuf {
        self.path("limits.db")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, with an environment that no machine changes.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("TIDEGATE_STORE", format!("sqlite:{}", self.file().display()));
        command.env("TIDEGATE_ACTOR", "ops").stdin(Stdio::null());
        command
    }

    /// Runs it with words that hold no spaces.
    pub(crate) fn run(&self, line: &str) -> Run {
        self.run_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    pub(crate) fn run_words(&self, arguments: &[&str]) -> Run {
        run(&mut self.command(arguments))
    }

    /// Runs what must work, and answers what it wrote.
    pub(crate) fn ok(&self, line: &str) -> String {
        let run = self.run(line);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{line}: {run:?}");
        run.stdout
    }

    /// The same for programs.
    pub(crate) fn json(&self, line: &str) -> Json {
        codec::parse(&self.ok(&format!("--json {line}")))
    }

    /// What is there of a limit.
    pub(crate) fn available(&self, entity: &str, resource: &str, limit: &str) -> i64 {
        let balance = self.json(&format!("balance {entity} {resource}"));
        let lines = balance["limits"].as_array().expect("a list of limits");
        let line = lines.iter().find(|line| line["limit"] == limit && line["entity"] == entity);
        line.and_then(|line| line["available"].as_i64()).expect("the limit is there")
    }
}

pub(crate) fn run(command: &mut Command) -> Run {
    told(command.output().expect("the program starts"))
}

pub(crate) fn told(output: Output) -> Run {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let code = output.status.code().expect("it ends by itself");
    Run { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}
