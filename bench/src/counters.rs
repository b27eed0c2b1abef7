//! Deterministic measures: instructions counted by callgrind, and bytes counted by an allocator. A busy
//! machine does not change them.

use std::collections::BTreeMap;
use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Instructions per operation of the hot path `name`: the difference of two runs, which cancels the start-up.
///
/// # Errors
/// If valgrind is missing or reports no count.
pub fn instructions(name: &str) -> Result<f64> {
    let (few, many) = (2_000_u32, 12_000_u32);
    let difference = run(name, many)? - run(name, few)?;
    Ok(difference / f64::from(many - few))
}

fn run(name: &str, times: u32) -> Result<f64> {
    let program = env::current_exe().context("could not find the path of this program")?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .args([name, "--hot", &times.to_string()])
        .output()
        .context("valgrind is missing: install the package valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    let count = text.lines().find_map(|line| line.split_once("Collected :").map(|(_, count)| count.trim()));
    match count.and_then(|count| count.parse().ok()) {
        Some(count) => Ok(count),
        None => bail!("callgrind reported no count for `{name}`: {text}"),
    }
}

/// Numbers by name, measured by a separate program: a counting allocator would distort the timings, and other code
/// changes what the compiler inlines.
///
/// # Errors
/// If that program does not start or prints something else.
pub fn numbers_by(program: &str, arguments: &[&str]) -> Result<BTreeMap<String, f64>> {
    let program = env::current_exe()?.with_file_name(program);
    let output = Command::new(&program).args(arguments).output().with_context(|| {
        format!("could not start {}, which must be built beside this program", program.display())
    })?;
    let text = String::from_utf8(output.stdout)?;
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    Ok(text.lines().filter_map(line).collect())
}
