//! External programs that some tests run.
//!
//! `cargo xtask test` installs them. Bare `cargo test` may run without: tests that need one begin with
//! [`skip_without_tool!`], which reports one line per tool on stderr.

use std::collections::BTreeSet;
use std::env;
use std::io::Write as _;
use std::sync::Mutex;

/// Used by the tours of pages.
pub(crate) const CURL: &str = "curl";
/// The terminal in which `tidegate watch` runs.
pub(crate) const TMUX: &str = "tmux";

/// Set by `cargo xtask test`, which installs the tools: under it, none may be missing.
const MAY_SKIP: &str = "TIDEGATE_TEST_MAY_SKIP";

/// Returns from a test whose tool is not installed.
macro_rules! skip_without_tool {
    ($tool:expr) => {
        if !$crate::kit::tool::is_available($tool) {
            return;
        }
    };
}
pub(crate) use skip_without_tool;

static REPORTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Whether a tool is on the path. Reports the first skip of each tool.
///
/// # Panics
/// Under `cargo xtask test`, if it is missing.
pub(crate) fn is_available(tool: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&path).any(|folder| folder.join(tool).is_file()) {
        return true;
    }
    assert!(env::var_os(MAY_SKIP).is_none(), "`{tool}` is not installed, and {MAY_SKIP} is set");
    if REPORTED.lock().expect("no test panics here").insert(tool.to_owned()) {
        // The handle is not captured by the test harness, as the macros are.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: tests that need `{tool}`, which is not installed (`cargo xtask test` installs it)"
        );
    }
    false
}
