//! What is counted instead of timed: instructions, by callgrind, and bytes, by an allocator that counts. Both are
//! the same on a busy machine as on an idle one.

use std::collections::BTreeMap;
use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Instructions one operation of the hot path `name` takes: the difference of two runs, so that starting up
/// does not count.
///
/// # Errors
/// If valgrind is not there, or says nothing.
pub fn instructions(name: &str) -> Result<f64> {
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

/// Bytes by name, as a program beside this one counts them: a counting allocator would slow the timings.
///
/// # Errors
/// If that program is not there, or says something else.
pub fn bytes_by(program: &str, arguments: &[&str]) -> Result<BTreeMap<String, f64>> {
    let program = env::current_exe()?.with_file_name(program);
    let output = Command::new(&program)
        .args(arguments)
        .output()
        .with_context(|| format!("{} is built beside this program", program.display()))?;
    let text = String::from_utf8(output.stdout)?;
    let line = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        Some((name.to_owned(), bytes.parse().ok()?))
    };
    Ok(text.lines().filter_map(line).collect())
}
