//! Tools that cargo does not bring, fetched from Debian when they are missing.
//!
//! A fresh machine has Rust, Python and git. Rather than a page of instructions that goes stale, a command
//! that needs more gets it, and says plainly what to install where it cannot.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{step, workspace};

/// Makes sure `tool` can be run, from the Debian package `package` if need be.
pub(crate) fn ensure_tool(tool: &str, package: &str) -> Result<()> {
    ensure(package, tool, || on_path(tool).is_some())
}

/// Makes sure that `what` `is_there`, from the Debian package `package` if need be.
pub(crate) fn ensure(package: &str, what: &str, is_there: impl Fn() -> bool) -> Result<()> {
    if is_there() {
        return Ok(());
    }
    println!("{what} is missing, installing the Debian package {package}");
    let by_hand = || format!("{what} is missing: install the package {package} by hand, as root");
    ensure!(on_path("apt-get").is_some(), "{} (there is no apt-get here)", by_hand());

    // A fresh machine has no package lists. A stranger's broken repository fails the update too, so it
    // is the installation that decides.
    let _ = step::capture("apt-get update", apt_get().arg("update"));
    let mut install = apt_get();
    install.args(["install", "--yes", "--no-install-recommends", package]);
    step::capture(&format!("apt-get install {package}"), &mut install).with_context(by_hand)?;
    ensure!(is_there(), "the package {package} is installed, yet there is no {what}");
    Ok(())
}

/// Makes sure that a tool written in Rust can be run, built from its crate under `target/tools` if need be.
pub(crate) fn ensure_cargo_tool(name: &str) -> Result<()> {
    if on_path(name).is_some() || is_program(&cargo_tools().join("bin").join(name)) {
        return Ok(());
    }
    println!("{name} is missing, building it with cargo install");
    let mut install = workspace::cargo("install --locked --root");
    step::stream(install.arg(cargo_tools()).arg(name))
}

/// The search path with the tools that [`ensure_cargo_tool`] built.
pub(crate) fn path_with_cargo_tools() -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([cargo_tools().join("bin")]);
    env::join_paths(folders).context("the folder of the checkout cannot be part of PATH")
}

fn cargo_tools() -> PathBuf {
    workspace::target().join("tools")
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("--quiet").env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Where `tool` is, if it can be run by its name.
pub(crate) fn on_path(tool: &str) -> Option<PathBuf> {
    in_one_of(&env::var_os("PATH")?, tool)
}

fn in_one_of(path: &OsStr, tool: &str) -> Option<PathBuf> {
    env::split_paths(path).map(|folder| folder.join(tool)).find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_any_folder_of_the_path() {
        let found = in_one_of(OsStr::new("/nowhere:/usr/bin:/bin"), "sh").unwrap();
        assert!(found.ends_with("bin/sh"));
        assert!(in_one_of(OsStr::new("/nowhere"), "sh").is_none());
    }

    #[test]
    fn a_file_that_cannot_be_run_is_not_a_program() {
        assert!(in_one_of(OsStr::new("/etc"), "passwd").is_none());
    }
}
