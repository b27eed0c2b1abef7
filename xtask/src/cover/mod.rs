//! `cargo xtask cover`: line coverage of each crate by its tests, on all engines.
//!
//! The compiler instruments; the LLVM tools of the same major version count. A separate build
//! (`target/cover`) keeps the usual one valid. Every crate has a floor; core is pure, so its floor is the
//! highest.

mod lines;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::engines::{self, Engine, EngineGuard};
use crate::workspace::{self, at_root, cargo};
use crate::{install, step};
use lines::{Crate, Lines};

/// The packages that are measured, with their folder and floor.
const CRATES: [Crate; 7] = [
    Crate { name: "tidegate-core", folder: "crates/core/src/", floor_permille: 950 },
    Crate { name: "tidegate-store", folder: "crates/store/src/", floor_permille: 940 },
    Crate { name: "tidegate", folder: "crates/tidegate/src/", floor_permille: 940 },
    Crate { name: "tidegate-client", folder: "crates/client/src/", floor_permille: 930 },
    Crate { name: "tidegate-server", folder: "crates/server/src/", floor_permille: 940 },
    Crate { name: "tidegate-proxy", folder: "crates/proxy/src/", floor_permille: 900 },
    Crate { name: "tidegate-cli", folder: "crates/cli/src/", floor_permille: 915 },
];

/// Whether to write annotated sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// As web pages.
    Write,
    /// Only the table.
    Skip,
}

/// Measures, prints the table, and fails if a crate is below its floor.
pub(crate) fn run(pages: Pages) -> Result<()> {
    let tools = Tools::installed()?;
    let folder = workspace::target().join("cover");
    let profiles = folder.join("profiles");
    let merged = folder.join("merged.profdata");
    // An old profile describes old code, and would count it as covered.
    if profiles.exists() {
        fs::remove_dir_all(&profiles).with_context(|| format!("could not remove {}", profiles.display()))?;
    }

    let programs = step::capture(
        "building the instrumented tests",
        instrumented(&tools, &folder, &profiles)
            .args(["--no-run", "--message-format=json-render-diagnostics"]),
    )?;
    let engines = EngineGuard::up(&Engine::SERVERS)?;
    let mut tests = instrumented(&tools, &folder, &profiles);
    step::stream(tests.envs(engines.variables()?).envs([engines::envoy()?]))?;
    drop(engines);

    let mut merge = at_root(&tools.profdata);
    merge.args(["merge", "-sparse", "-o"]).arg(&merged).args(files_in(&profiles)?);
    step::capture("merging profiles", &mut merge)?;
    let report = Report { tools, merged, programs: test_programs(&programs)? };
    if pages == Pages::Write {
        let html = folder.join("html");
        let mut show = report.command("show");
        show.arg("-format=html")
            .arg("-output-dir")
            .arg(&html)
            .arg("-sources")
            .args(CRATES.map(|measured| measured.folder));
        step::capture("writing the pages", &mut show)?;
        println!("wrote {}", html.join("index.html").display());
    }
    let lines = step::capture("counting lines", report.command("export").arg("-format=lcov"))?;
    let lines = Lines::read(&lines, &workspace::root(), |file| fs::read_to_string(file).ok());
    println!("{}", lines.table(&CRATES));
    lines.check_floors(&CRATES)
}

/// The LLVM tools that match this compiler.
struct Tools {
    profdata: String,
    cov: String,
    host: String,
}

impl Tools {
    fn installed() -> Result<Self> {
        let compiler = step::capture("asking rustc", at_root("rustc").arg("-vV"))?;
        let major = llvm_major(&compiler)?;
        let host = value(&compiler, "host").context("rustc reports no host")?.to_owned();
        let tools =
            Self { profdata: format!("llvm-profdata-{major}"), cov: format!("llvm-cov-{major}"), host };
        for tool in [&tools.profdata, &tools.cov] {
            install::ensure_tool(tool, &format!("llvm-{major}"))?;
        }
        Ok(tools)
    }
}

/// Runs reports on the merged profiles.
struct Report {
    tools: Tools,
    merged: PathBuf,
    programs: Vec<String>,
}

impl Report {
    fn command(&self, verb: &str) -> Command {
        let mut command = at_root(&self.tools.cov);
        command.arg(verb).arg("-instr-profile").arg(&self.merged);
        for program in &self.programs {
            command.arg("-object").arg(program);
        }
        command
    }
}

/// The tests of the measured crates, instrumented.
fn instrumented(tools: &Tools, folder: &Path, profiles: &Path) -> Command {
    let mut command = cargo("test --all-features --tests");
    for measured in CRATES {
        command.args(["-p", measured.name]);
    }
    // Naming the target keeps the flags off build scripts and macros, which would write profiles too.
    command.args(["--target", &tools.host]);
    command.env("RUSTFLAGS", "-C instrument-coverage").env("CARGO_TARGET_DIR", folder);
    // Profiles of one program are merged when it exits: the tests start some programs thousands of times.
    command.env("LLVM_PROFILE_FILE", profiles.join("%8m.profraw"));
    command
}

fn llvm_major(compiler: &str) -> Result<&str> {
    let version = value(compiler, "LLVM version").context("rustc reports no LLVM version")?;
    Ok(version.split('.').next().unwrap_or(version))
}

/// The value of a `name: value` line in the output of `rustc -vV`.
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// The test programs and the CLI that they start, from cargo's build messages.
fn test_programs(messages: &str) -> Result<Vec<String>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).context("cargo wrote a line that is not JSON")?;
        if message["profile"]["test"] == true || message["target"]["name"] == "tidegate" {
            programs.extend(message["executable"].as_str().map(str::to_owned));
        }
    }
    ensure!(!programs.is_empty(), "cargo built no test program");
    Ok(programs)
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = || format!("the tests wrote no profiles to {}", folder.display());
    let entries = fs::read_dir(folder).with_context(unreadable)?;
    entries.map(|entry| Ok(entry.with_context(unreadable)?.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_tools_match_the_compilers_major_version() {
        assert_eq!(llvm_major("host: x86_64\nLLVM version: 22.1.2\n").unwrap(), "22");
        assert!(llvm_major("release: 1.95.0\n").is_err());
    }

    #[test]
    fn only_test_programs_are_measured() {
        let messages = r#"{"reason":"compiler-artifact","profile":{"test":true},"executable":"/t/a"}
{"reason":"compiler-artifact","profile":{"test":false},"executable":"/t/example"}
{"reason":"compiler-artifact","profile":{"test":false},"target":{"name":"tidegate"},"executable":"/t/tidegate"}
{"reason":"compiler-artifact","profile":{"test":true},"executable":null}
{"reason":"build-finished","success":true}"#;
        assert_eq!(test_programs(messages).unwrap(), ["/t/a", "/t/tidegate"]);
        assert!(test_programs("").is_err());
    }
}
