//! Installs tools that cargo does not provide, from Debian packages.
//!
//! A fresh machine has Rust, Python and git. A command that needs more installs it, or says what to install
//! by hand where it cannot; a page of instructions would go stale.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{step, workspace};

/// Ensures that `tool` is installed, from the Debian package `package` if necessary.
pub(crate) fn ensure_tool(tool: &str, package: &str) -> Result<()> {
    ensure(package, tool, || on_path(tool).is_some())
}

/// Ensures that `is_installed` holds for `what`, by installing the Debian package `package` if necessary.
pub(crate) fn ensure(package: &str, what: &str, is_installed: impl Fn() -> bool) -> Result<()> {
    if is_installed() {
        return Ok(());
    }
    println!("{what} is missing, installing the Debian package {package}");
    let by_hand = || format!("{what} is missing: install the package {package} by hand, as root");
    ensure!(on_path("apt-get").is_some(), "{} (apt-get is missing)", by_hand());

    // A fresh machine has no package lists. A broken third-party repository fails the update too, so only the
    // installation counts.
    let _ = step::capture("apt-get update", apt_get().arg("update"));
    let mut install = apt_get();
    install.args(["install", "--yes", "--no-install-recommends", package]);
    step::capture(&format!("apt-get install {package}"), &mut install).with_context(by_hand)?;
    ensure!(is_installed(), "the package {package} is installed, but {what} is missing");
    Ok(())
}

/// Ensures that a Rust tool is installed, built under `target/tools` if necessary.
pub(crate) fn ensure_cargo_tool(name: &str) -> Result<()> {
    if on_path(name).is_some() || is_program(&cargo_tools().join("bin").join(name)) {
        return Ok(());
    }
    println!("{name} is missing, building it with cargo install");
    let mut install = workspace::cargo("install --locked --root");
    step::stream(install.arg(cargo_tools()).arg(name))
}

/// Installs packages from PyPI into a folder of their own.
pub(crate) fn python_packages(folder: &Path, packages: &[&str]) -> Result<()> {
    ensure_tool("python3", "python3")?;
    let by_hand =
        "could not create a folder for Python packages: install the package python3-venv by hand, as root";
    let mut folder_made = workspace::at_root("python3");
    folder_made.args(["-m", "venv", "--clear"]).arg(folder);
    step::capture("python3 -m venv", &mut folder_made).context(by_hand)?;
    let mut install = workspace::at_root(folder.join("bin/pip"));
    install.args(["install", "--quiet", "--disable-pip-version-check"]).args(packages);
    step::capture(&format!("pip install {}", packages.join(" ")), &mut install)?;
    Ok(())
}

/// PATH with the tools that [`ensure_cargo_tool`] built.
pub(crate) fn path_with_cargo_tools() -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([cargo_tools().join("bin")]);
    env::join_paths(folders).context("the path of the checkout cannot be part of PATH")
}

fn cargo_tools() -> PathBuf {
    workspace::target().join("tools")
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("--quiet").env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// The path of `tool`, if it is an executable in PATH.
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
    fn program_is_found_in_any_folder_of_path() {
        let found = in_one_of(OsStr::new("/nowhere:/usr/bin:/bin"), "sh").unwrap();
        assert!(found.ends_with("bin/sh"));
        assert!(in_one_of(OsStr::new("/nowhere"), "sh").is_none());
    }

    #[test]
    fn non_executable_file_is_not_a_program() {
        assert!(in_one_of(OsStr::new("/etc"), "passwd").is_none());
    }
}
