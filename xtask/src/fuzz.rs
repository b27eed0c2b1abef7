//! Fuzzes `tidegate serve` with schemathesis, from its own OpenAPI document.
//!
//! Every operation is tried with examples, with values at every bound, with random values, and in sequences
//! along the document's links. No response may be a server error or differ from the document, no forbidden
//! request may be accepted, and no request may be authorized without a token.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::install;
use crate::step;
use crate::test::Depth;
use crate::workspace::{self, at_root, cargo};

/// Pinned, so that a failure can be reproduced.
const VERSION: &str = "4.32.5";
const SEED: &str = "1";
/// Ample system limits: the limit names of the examples, and the one that is generated most often.
const LIMITS: [&str; 3] = ["rpm:1G/min", "0:1G/min", "tpm:1G/min"];

/// Runs schemathesis against a fresh server; an error lists the mismatches.
pub(crate) fn run(depth: Depth) -> Result<()> {
    let schemathesis = schemathesis()?;
    // The same build as for the tests, so that nothing is built twice.
    step::stream(&mut cargo("test --quiet --workspace --all-features --no-run"))?;
    let folder = workspace::target().join("fuzz");
    let server = Server::start(&folder)?;
    let examples = match depth {
        Depth::Quick | Depth::Usual => "15",
        Depth::Deep => "500",
    };
    let mut command = at_root(schemathesis);
    // It writes its own files to the current folder.
    command.current_dir(&folder).arg("--config-file").arg(workspace::root().join("xtask/schemathesis.toml"));
    command
        .env("PYTHONPATH", workspace::root().join("xtask"))
        .env("SCHEMATHESIS_HOOKS", "schemathesis_hooks");
    command.env("PYTHONDONTWRITEBYTECODE", "1").arg("run");
    command.arg(format!("{}/v1/openapi.json", server.url));
    // The token is valid for this server only, which stops in a few minutes.
    command.args(["--header", &format!("Authorization: Bearer {}", server.token)]);
    command.args(["--checks", "all", "--seed", SEED, "--max-examples", examples, "--request-timeout", "70"]);
    command.args(["--continue-on-failure", "--no-color"]);
    step::stream(&mut command).context("the server does not match its OpenAPI document")?;
    server.end()
}

/// The program, installed with pip into its own folder if it is missing.
fn schemathesis() -> Result<PathBuf> {
    let folder = workspace::target().join(format!("schemathesis-{VERSION}"));
    let program = folder.join("bin/schemathesis");
    if program.is_file() {
        return Ok(program);
    }
    println!("schemathesis {VERSION} is missing, installing it from PyPI");
    install::python_packages(&folder, &[&format!("schemathesis=={VERSION}")])?;
    ensure!(program.is_file(), "schemathesis is installed, but {} is missing", program.display());
    Ok(program)
}

/// A server with a new store file on a free port. Drop kills it.
struct Server {
    child: Child,
    url: String,
    token: String,
    log: PathBuf,
}

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder).context("could not remove the old folder of the server")?;
        }
        fs::create_dir_all(folder).context("could not create a folder for the server")?;
        let program = || {
            let mut program = Command::new(workspace::target().join("debug/tidegate"));
            program
                .arg("--json")
                // A slow disk is not a failure of the server.
                .args(["--timeout", "1m"])
                .arg("--store")
                .arg(format!("sqlite:{}", folder.join("limits.db").display()));
            program
        };
        step::capture("tidegate limits set", program().args(["limits", "set", "system"]).args(LIMITS))?;
        let log = folder.join("log");
        let file = File::create(&log).context("could not create the log")?;
        let mut child = program()
            .args(["serve", "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .context("could not start the server")?;
        let mut ready = String::new();
        let output = child.stdout.take().context("the server's stdout is not piped")?;
        let read = BufReader::new(output).read_line(&mut ready);
        // From here on drop kills it.
        let mut server = Self { child, url: String::new(), token: String::new(), log };
        read.context("could not read the ready line")?;
        (server.url, server.token) = ready_line(&ready)?;
        Ok(server)
    }

    /// Checks that the server is still running and has logged no error.
    fn end(mut self) -> Result<()> {
        let ended = self.child.try_wait().context("could not query the server's status")?;
        ensure!(ended.is_none(), "the server exited: {ended:?}; see {}", self.log.display());
        let log = fs::read_to_string(&self.log).context("could not read the log")?;
        let is_bad = |line: &&str| line.contains("panicked") || line.contains("ERROR");
        let bad: Vec<_> = log.lines().filter(is_bad).take(10).collect();
        ensure!(bad.is_empty(), "the server logged errors:\n{}", bad.join("\n"));
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address and the first token, from the ready line.
fn ready_line(line: &str) -> Result<(String, String)> {
    let ready: Value = serde_json::from_str(line).with_context(|| format!("the server printed `{line}`"))?;
    let text = |name: &str| {
        let text = ready[name].as_str().map(str::to_owned);
        text.with_context(|| format!("`{name}` is missing in the ready line"))
    };
    Ok((text("url")?, text("token")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_line_has_the_address_and_the_token() {
        let line = r#"{"namespace": "default", "token": "tg_admin_00", "url": "http://127.0.0.1:1"}"#;
        assert_eq!(ready_line(line).unwrap(), ("http://127.0.0.1:1".to_owned(), "tg_admin_00".to_owned()));
        assert!(ready_line("").is_err() && ready_line("{}").is_err());
    }
}
