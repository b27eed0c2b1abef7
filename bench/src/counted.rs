//! Instructions per operation, counted by callgrind: the same on a busy machine as on an idle one.

use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Instructions one operation of the hot path `name` takes: the difference of two runs, so that starting up
/// does not count.
pub(crate) fn instructions(name: &str) -> Result<f64> {
    let (few, many) = (2_000_u32, 12_000_u32);
    let difference = run(name, many)? - run(name, few)?;
    Ok(difference / f64::from(many - few))
}

fn run(name: &str, times: u32) -> Result<f64> {
    let program = env::current_exe().context("where this program is")?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args([name, "--hot", &times.to_string()])
        .output()
        .context("valgrind counts the instructions, and is not there: install the package valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    let count = text.lines().find_map(|line| line.split_once("Collected :").map(|(_, count)| count.trim()));
    match count.and_then(|count| count.parse().ok()) {
        Some(count) => Ok(count),
        None => bail!("callgrind said nothing of `{name}`: {text}"),
    }
}
