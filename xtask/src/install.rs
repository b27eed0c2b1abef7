//! Tools that cargo does not bring, fetched from Debian when they are missing.
//!
//! A fresh machine has Rust, Python and git. Rather than a page of instructions that goes stale, a command
//! that needs more gets it, and says plainly what to install where it cannot.

use std::env;
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::step;

/// Makes sure `tool` can be run, from the Debian package `package` if need be.
pub(crate) fn ensure_tool(tool: &str, package: &str) -> Result<()> {
    if is_on_path(tool) {
        return Ok(());
    }
    println!("{tool} is missing, installing the Debian package {package}");
    let by_hand = || format!("{tool} is missing: install the package {package} by hand, as root");
    ensure!(is_on_path("apt-get"), "{} (there is no apt-get here)", by_hand());

    // A fresh machine has no package lists. A stranger's broken repository fails the update too, so it
    // is the installation that decides.
    let _ = step::capture("apt-get update", apt_get().arg("update"));
    let mut install = apt_get();
    install.args(["install", "--yes", "--no-install-recommends", package]);
    step::capture(&format!("apt-get install {package}"), &mut install).with_context(by_hand)?;
    ensure!(is_on_path(tool), "the package {package} is installed, yet there is no {tool} on the PATH");
    Ok(())
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("--quiet").env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn is_on_path(tool: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| is_in_one_of(&path, tool))
}

fn is_in_one_of(path: &OsStr, tool: &str) -> bool {
    env::split_paths(path).any(|folder| is_program(&folder.join(tool)))
}

fn is_program(file: &Path) -> bool {
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_any_folder_of_the_path() {
        assert!(is_in_one_of(OsStr::new("/nowhere:/usr/bin:/bin"), "sh"));
        assert!(!is_in_one_of(OsStr::new("/nowhere"), "sh"));
    }

    #[test]
    fn a_file_that_cannot_be_run_is_not_a_program() {
        assert!(!is_in_one_of(OsStr::new("/etc"), "passwd"));
    }
}
