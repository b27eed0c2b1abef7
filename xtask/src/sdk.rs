//! Runs the providers' own SDKs through `tidegate proxy`, before `tidegate mock`: their answers are to be the
//! same as without it.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::workspace::{self, at_root};
use crate::{install, step};

/// Pinned, so that a failure can be reproduced.
const PACKAGES: [&str; 2] = ["openai==3.51.0", "anthropic==2.10.0"];
/// The package of the same name for Node.
const NODE_OPENAI: &str = "7.55.0";
/// Where the tests of the SDKs are.
const TESTS: &str = "crates/proxy/tests/sdk";

/// Runs the SDKs against the program of the test build.
pub(crate) fn run() -> Result<()> {
    let folder = workspace::target().join("sdk");
    let python = python(&folder)?;
    install::ensure_tool("node", "nodejs")?;
    let tests = workspace::root().join(TESTS);
    let script = folder.join("sdk.mjs");
    std::fs::copy(tests.join("sdk.mjs"), script).context("could not copy the test for Node")?;
    let mut sdks = at_root(python);
    sdks.arg(tests.join("sdk.py")).arg(workspace::target().join("debug/tidegate"));
    sdks.arg(&folder).arg(NODE_OPENAI).env("PYTHONDONTWRITEBYTECODE", "1");
    step::stream(&mut sdks).context("an SDK gets other answers through the proxy")
}

/// Python with the SDKs, installed into their own folder if they are missing.
fn python(folder: &Path) -> Result<PathBuf> {
    let versions = PACKAGES.map(|package| package.replace("==", "-")).join("-");
    let packages = folder.join(versions);
    let (python, marker) = (packages.join("bin/python"), packages.join("complete"));
    if !marker.is_file() {
        println!("the SDKs are missing, installing them from PyPI");
        install::python_packages(&packages, &PACKAGES)?;
        std::fs::write(&marker, "").context("could not mark the installation as complete")?;
    }
    Ok(python)
}
