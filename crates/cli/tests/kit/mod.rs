//! A store of its own for a test, and the program as its users run it.
#![allow(dead_code, reason = "each test file uses some of it")]

pub(crate) mod codec;
#[path = "../../../store/tests/engine_kit/mod.rs"]
pub(crate) mod engine;
pub(crate) mod life;
pub(crate) mod serving;
pub(crate) mod tour;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

pub(crate) use codec::Json;
use serving::Serving;

/// A folder with a store in it, and perhaps a server before it.
pub(crate) struct Shop {
    folder: TempDir,
    /// What the program asks in the place of the store.
    pub(crate) server: Option<Serving>,
    /// A token of the store that may do everything.
    pub(crate) token: Option<String>,
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
        Self { folder: TempDir::new().expect("a folder for a test"), server: None, token: None }
    }

    /// Two with the same past, a token: one is asked as a store, the other as a server.
    pub(crate) fn both() -> [Self; 2] {
        let [mut store, server] = [Self::served(), Self::served()];
        // Whoever serves leaves something behind: both have had a server.
        store.server.take().expect("it serves").stop();
        [store, server]
    }

    /// One that is asked as a server.
    pub(crate) fn served() -> Self {
        let mut shop = Self::new();
        let made = shop.json("token create ops --scopes acquire,read,admin");
        shop.token = made["secret"].as_str().map(str::to_owned);
        shop.server = Some(shop.serve(&[]));
        shop
    }

    /// A server over the store, with these arguments too.
    pub(crate) fn serve(&self, arguments: &[&str]) -> Serving {
        let line = [&["serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"], arguments].concat();
        let mut command = self.program(&line);
        Serving::start(command.env("TIDEGATE_STORE", self.store()))
    }

    /// Where the program asks, for whoever reads why a test failed.
    pub(crate) fn place(&self) -> &'static str {
        if self.server.is_some() { "at a server" } else { "at a store" }
    }

    /// The store's address.
    pub(crate) fn store(&self) -> String {
        format!("sqlite:{}", self.file().display())
    }

    /// The store's file, which is not there before it is used.
    pub(crate) fn file(&self) -> PathBuf {
        self.path("limits.db")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, with an environment that no machine changes, and what it asks.
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

    /// The program, with an environment that no machine changes.
    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        // As a server calls the holder of the token `ops`, so that both sides answer the same.
        let actor = if self.token.is_some() { "token:ops" } else { "ops" };
        command.env("TIDEGATE_ACTOR", actor).stdin(Stdio::null());
        // A disk that is busy is no store that is away.
        command.env("TIDEGATE_TIMEOUT", "1m");
        // DynamoDB is asked by nobody without keys, and servers of tests take any.
        command.env("AWS_ACCESS_KEY_ID", "tidegate").env("AWS_SECRET_ACCESS_KEY", "tidegate");
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
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{line} {}: {run:?}", self.place());
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
