//! Paths of the checkout and the build folders, and the cargo that started us.
//!
//! Every command runs at the root of the checkout, whatever the current folder.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the checkout that this program was built from.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// The build folder; `CARGO_TARGET_DIR` moves it, as it does for cargo.
pub(crate) fn target() -> PathBuf {
    // `join` replaces the root by an absolute value and resolves a relative one.
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The cargo that started us, at the root, with `arguments` split at spaces.
pub(crate) fn cargo(arguments: &str) -> Command {
    let mut command = at_root(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments.split_whitespace());
    // Removes the variables of our own package. Build scripts that track them would rerun whenever people run
    // cargo themselves in between, and rebuild ring and all its dependents.
    for (name, _) in env::vars_os() {
        let is_ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if name.to_str().is_some_and(is_ours) {
            command.env_remove(name);
        }
    }
    command
}

/// Any program, at the root.
pub(crate) fn at_root(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_the_folder_with_the_lock_file() {
        assert!(root().join("Cargo.lock").is_file());
    }

    #[test]
    fn cargo_gets_no_variables_of_our_own_package() {
        assert!(env::var_os("CARGO_PKG_NAME").is_some(), "cargo runs this test");
        let command = cargo("build");
        let removed: Vec<_> = command.get_envs().filter(|(_, value)| value.is_none()).collect();
        assert!(removed.iter().any(|(name, _)| *name == "CARGO_PKG_NAME"), "{removed:?}");
        assert!(removed.iter().any(|(name, _)| *name == "CARGO_MANIFEST_DIR"), "{removed:?}");
    }
}
