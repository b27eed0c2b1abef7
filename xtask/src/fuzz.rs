//! The program `tidegate serve`, asked whatever its own OpenAPI document allows, and what it does not, by schemathesis.
//!
//! Every operation is tried with examples, with values at every bound, with values made up at random, and one after the other
//! as the document links them. No answer may be a server's error or differ from the document, nothing that the document
//! forbids may be accepted, and no request may enter without its token.

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

/// The same everywhere, so that a failure can be repeated.
const VERSION: &str = "4.32.5";
const SEED: &str = "1";
/// Everybody's limits while it is asked: the names of the examples, the one that is made up most often, and enough of each.
const LIMITS: [&str; 3] = ["rpm:1G/min", "0:1G/min", "tpm:1G/min"];

/// Runs schemathesis against a fresh server; an error lists the mismatches.
pub(crate) fn run(depth: Depth) -> Result<()> {
    let schemathesis = schemathesis()?;
    // As the tests build it, so that nothing is built twice.
    step::stream(&mut cargo("test --quiet --workspace --all-features --no-run"))?;
    let folder = workspace::target().join("fuzz");
    let server = Server::start(&folder)?;
    let examples = match depth {
        Depth::Quick | Depth::Usual => "15",
        Depth::Deep => "500",
    };
    let mut asks = at_root(schemathesis);
    // What it writes for itself goes where it is started.
    asks.current_dir(&folder).arg("--config-file").arg(workspace::root().join("xtask/schemathesis.toml"));
    asks.env("PYTHONPATH", workspace::root().join("xtask")).env("SCHEMATHESIS_HOOKS", "schemathesis_hooks");
    asks.env("PYTHONDONTWRITEBYTECODE", "1").arg("run");
    asks.arg(format!("{}/v1/openapi.json", server.url));
    // It is good for nothing but this server, which is gone in a few minutes.
    asks.args(["--header", &format!("Authorization: Bearer {}", server.token)]);
    asks.args(["--checks", "all", "--seed", SEED, "--max-examples", examples, "--request-timeout", "70"]);
    asks.args(["--continue-on-failure", "--no-color"]);
    step::stream(&mut asks).context("the server and its document do not say the same")?;
    server.end()
}

/// The program, installed with pip into a folder of its own if it is missing.
fn schemathesis() -> Result<PathBuf> {
    let folder = workspace::target().join(format!("schemathesis-{VERSION}"));
    let program = folder.join("bin/schemathesis");
    if program.is_file() {
        return Ok(program);
    }
    println!("schemathesis {VERSION} is missing, installing it from PyPI");
    install::ensure_tool("python3", "python3")?;
    let by_hand =
        "a folder for Python packages cannot be made: install the package python3-venv by hand, as root";
    let mut folder_made = at_root("python3");
    folder_made.args(["-m", "venv", "--clear"]).arg(&folder);
    step::capture("python3 -m venv", &mut folder_made).context(by_hand)?;
    let mut install = at_root(folder.join("bin/pip"));
    install.args(["install", "--quiet", "--disable-pip-version-check", &format!("schemathesis=={VERSION}")]);
    step::capture("pip install schemathesis", &mut install)?;
    ensure!(program.is_file(), "schemathesis is installed, yet there is no {}", program.display());
    Ok(program)
}

/// A server over a new file, on a port that was free. Dropped, it is killed.
struct Server {
    child: Child,
    url: String,
    token: String,
    log: PathBuf,
}

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder).context("an old folder of the server cannot be removed")?;
        }
        fs::create_dir_all(folder).context("a folder for the server cannot be made")?;
        let program = || {
            let mut program = Command::new(workspace::target().join("debug/tidegate"));
            program
                .arg("--json")
                // A disk that is busy is no failure of the server.
                .args(["--timeout", "1m"])
                .arg("--store")
                .arg(format!("sqlite:{}", folder.join("limits.db").display()));
            program
        };
        step::capture("tidegate limits set", program().args(["limits", "set", "system"]).args(LIMITS))?;
        let log = folder.join("log");
        let file = File::create(&log).context("a log cannot be made")?;
        let mut child = program()
            .args(["serve", "--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .context("the server does not start")?;
        let mut ready = String::new();
        let output = child.stdout.take().context("it has an output")?;
        let read = BufReader::new(output).read_line(&mut ready);
        // From here on it is killed, whatever happens.
        let mut server = Self { child, url: String::new(), token: String::new(), log };
        read.context("the server says nothing")?;
        (server.url, server.token) = ready_line(&ready)?;
        Ok(server)
    }

    /// It has to be there still, and nothing may have gone wrong unseen.
    fn end(mut self) -> Result<()> {
        let ended = self.child.try_wait().context("the server cannot be looked at")?;
        ensure!(ended.is_none(), "the server ended by itself: {ended:?}; see {}", self.log.display());
        let log = fs::read_to_string(&self.log).context("the log cannot be read")?;
        let is_bad = |line: &&str| line.contains("panicked") || line.contains("ERROR");
        let bad: Vec<_> = log.lines().filter(is_bad).take(10).collect();
        ensure!(bad.is_empty(), "the server logged errors:\n{}", bad.join("\n"));
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address and the first token, from the line that says that it is ready.
fn ready_line(line: &str) -> Result<(String, String)> {
    let ready: Value = serde_json::from_str(line).with_context(|| format!("the server says `{line}`"))?;
    let text = |name: &str| {
        let text = ready[name].as_str().map(str::to_owned);
        text.with_context(|| format!("there is no {name} in what the server says"))
    };
    Ok((text("url")?, text("token")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_and_the_token_are_in_the_ready_line() {
        let line = r#"{"namespace": "default", "token": "tg_admin_00", "url": "http://127.0.0.1:1"}"#;
        assert_eq!(ready_line(line).unwrap(), ("http://127.0.0.1:1".to_owned(), "tg_admin_00".to_owned()));
        assert!(ready_line("").is_err() && ready_line("{}").is_err());
    }
}
