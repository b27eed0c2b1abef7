//! `cargo xtask bench NAME`: a benchmark, measured the same way on every machine.
//!
//! The bench binary measures, prints and writes; this command provides what it needs (a `dist` build,
//! servers, valgrind) and sets the output path, so that runs can be compared.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::engines::{Engine, EngineGuard};
use crate::{install, step, workspace};

/// Runs the benchmark `name` with `extra` arguments.
pub(crate) fn run(name: &str, extra: &[OsString]) -> Result<()> {
    // The lab simulates and counts no instructions.
    if name != "lab" {
        install::ensure_tool("valgrind", "valgrind")?;
    }
    let folder = workspace::target().join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
    let out = folder.join(format!("{name}.json"));
    // Both packages for every benchmark, so that shared dependencies are built once with the same features.
    let mut build =
        workspace::cargo("build --profile dist -p tidegate-bench -p tidegate-cli --bin tidegate-bench");
    for program in programs(name) {
        build.args(["--bin", program]);
    }
    step::stream(&mut build).with_context(|| format!("could not build benchmark {name}"))?;
    // The servers under test, which run for the duration of the benchmark.
    let servers: &[Engine] = match name {
        "engines" => &Engine::SERVERS,
        "dynamodb" => &[Engine::Dynoxide],
        _ => &[],
    };
    let engines = EngineGuard::up(servers)?;
    // Runs the built program: `cargo run` would build it again with other features.
    let mut bench = workspace::at_root(workspace::target().join("dist").join("tidegate-bench"));
    bench.envs(engines.variables()?);
    match name {
        "dynamodb" => drop(bench.env("TIDEGATE_BENCH_ZAE_LIMITER", zae_limiter()?)),
        "proxy" => {
            install::ensure_tool("nginx", "nginx-light")?;
            bench.env("TIDEGATE_BENCH_LITELLM", litellm()?);
        }
        _ => {}
    }
    bench.arg(name).arg("--out").arg(&out).args(extra);
    step::stream(&mut bench).with_context(|| format!("benchmark {name} failed"))
}

/// The programs of a benchmark other than its runner: counting bytes needs a process apart from timing, some
/// rows would change how others are compiled, and the server is a process too. Each takes minutes to link, so no others are built.
fn programs(name: &str) -> &'static [&'static str] {
    match name {
        "local" => &["burst", "memory"],
        "shared" => &["memory"],
        "keyed" => &["keyed", "memory"],
        "server" => &["server", "tidegate"],
        "rls" => &["rls", "tidegate"],
        "http" => &["http", "tidegate"],
        "proxy" => &["proxy", "tidegate"],
        "sqlite" => &["sqlite"],
        "engines" => &["engines"],
        "dynamodb" => &["dynamodb"],
        "lab" => &["lab"],
        // An unknown name: the runner prints the known ones.
        _ => &[],
    }
}

/// The Python of a virtual environment with zae-limiter.
fn zae_limiter() -> Result<PathBuf> {
    python_with("zae_limiter", "zae-limiter", "zae-limiter==0.17.*")
}

/// The Python of a virtual environment with `LiteLLM` and what its proxy needs.
fn litellm() -> Result<PathBuf> {
    python_with("litellm.proxy.proxy_cli, fastapi", "litellm", "litellm[proxy]==1.106.2")
}

/// The Python of a virtual environment with a package, which is created if it is missing.
fn python_with(module: &str, name: &str, package: &str) -> Result<PathBuf> {
    let place = workspace::target().join("bench").join(name);
    let python = place.join("bin").join("python");
    let has = |code: &str, python: &Path| {
        let output = Command::new(python).args(["-c", code]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if has(&format!("import {module}"), &python) {
        return Ok(python);
    }
    println!("{name} is missing, fetching it from PyPI");
    install::ensure("python3-venv", "venv", || has("import ensurepip, venv", Path::new("python3")))?;
    install::python_packages(&place, &[package])?;
    Ok(python)
}
