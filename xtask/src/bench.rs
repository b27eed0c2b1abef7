//! `cargo xtask bench NAME`: a benchmark, measured the same way on every machine.
//!
//! The bench binary measures, prints and writes; this only brings what it needs (a release build,
//! valgrind for instruction counts) and says where the numbers go, so that runs can be compared.

use std::ffi::OsString;
use std::fs;

use anyhow::{Context as _, Result};

use crate::engines::{Borrowed, Engine};
use crate::{install, step, workspace};

/// Runs the benchmark `name`, handing it `extra` arguments.
pub(crate) fn run(name: &str, extra: &[OsString]) -> Result<()> {
    install::ensure_tool("valgrind", "valgrind")?;
    let folder = workspace::target().join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("could not create {}", folder.display()))?;
    let out = folder.join(format!("{name}.json"));
    // All of its programs: the one that counts bytes is started by the one that measures time. And ours, which is served.
    step::stream(&mut workspace::cargo("build --release -p tidegate-bench -p tidegate-cli --bins"))
        .with_context(|| format!("benchmark {name} does not build"))?;
    // The servers that it is measured on, for as long as it takes.
    let servers: &[Engine] = if name == "engines" { &Engine::SERVERS } else { &[] };
    let engines = Borrowed::up(servers)?;
    let mut bench = workspace::cargo("run --release -p tidegate-bench --");
    bench.envs(engines.variables()?);
    bench.arg(name).arg("--out").arg(&out).args(extra);
    step::stream(&mut bench).with_context(|| format!("benchmark {name} failed"))
}
