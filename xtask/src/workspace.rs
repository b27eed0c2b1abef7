//! Where things are: the checkout, the build directories, the cargo that started us.
//!
//! Every command runs from the root of the checkout, whatever folder it was typed in.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the checkout this program was built from.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// The folder builds go to; `CARGO_TARGET_DIR` moves it, as it does for cargo.
pub(crate) fn target() -> PathBuf {
    // An absolute value replaces the root, a relative one is taken from it.
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Cargo, the same one that started us, ready to run at the root with `arguments` split at their spaces.
pub(crate) fn cargo(arguments: &str) -> Command {
    let mut command = at_root(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments.split_whitespace());
    command
}

/// Any program, ready to run at the root.
pub(crate) fn at_root(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_folder_with_the_lock_file() {
        assert!(root().join("Cargo.lock").is_file());
    }
}
