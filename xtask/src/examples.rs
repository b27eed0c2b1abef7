//! The examples: each runs to its end, and the one with a store is killed and continues from what it had stored.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};

use crate::step;
use crate::workspace;

/// Examples that need no arguments. Their output is for people.
const PLAIN: [&str; 9] = [
    "hello",
    "layered",
    "shutdown",
    "blocking",
    "llm_batch",
    "tenants",
    "polite_client",
    "tower_client",
    "limited_server",
];
/// Whatever a call uses, ten of them use more than this.
const TEN_CALLS: u64 = 10;

/// Runs all of them at once, as `cargo test` built them: most of their time is spent waiting.
pub(crate) fn run() -> Result<()> {
    let outputs: Vec<Result<String>> = thread::scope(|scope| {
        let start = |name: &'static str| scope.spawn(move || step::capture(name, &mut program(name)));
        let running: Vec<_> = PLAIN.into_iter().map(start).collect();
        let joined = |thread: thread::ScopedJoinHandle<'_, Result<String>>| {
            thread.join().unwrap_or_else(|_| bail!("an example could not be watched"))
        };
        running.into_iter().map(joined).collect()
    });
    for (name, output) in PLAIN.into_iter().zip(outputs) {
        println!("--- {name}\n{}", output?.trim_end());
    }
    per_host()?;
    gateway()
}

/// An example.
fn program(name: &str) -> Command {
    Command::new(workspace::target().join("debug/examples").join(name))
}

/// In a pipe it prints one table of all hosts, and no control characters.
fn per_host() -> Result<()> {
    let output = step::capture("per_host", program("per_host").args(["--seconds", "3"]))?;
    print!("{output}");
    let hosts = output.lines().filter(|line| line.contains(".test ")).count();
    ensure!(hosts == 5, "a table of {hosts} hosts, expected 5");
    let is_plain = !output.contains(|letter: char| letter.is_control() && letter != '\n');
    ensure!(is_plain, "control characters in a pipe:\n{output:?}");
    Ok(())
}

/// Usage goes on where it was, though the process was killed in the middle of its work.
fn gateway() -> Result<()> {
    let folder = workspace::target().join("gateway");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("an old folder of the gateway cannot be removed")?;
    }
    fs::create_dir_all(&folder).context("a folder for the gateway cannot be made")?;
    let file = folder.join("limits.db");
    let first = tokens(&finish(&file, 1)?)?;
    ensure!(first[0] == 0 && first[1] > 0, "a new file begins at nothing, and something is used: {first:?}");
    kill(&file)?;
    let again = tokens(&finish(&file, 1)?)?;
    println!("gateway: {} tokens, killed, {} when it went on, {} at the end", first[1], again[0], again[1]);
    let is_all_there = again[0] >= first[1] + TEN_CALLS && again[1] > again[0];
    ensure!(is_all_there, "usage went on from {first:?} to {again:?}");
    Ok(())
}

fn command(file: &Path, seconds: u32) -> Command {
    let mut command = program("gateway");
    command.arg(file).arg(seconds.to_string());
    command
}

fn finish(file: &Path, seconds: u32) -> Result<String> {
    step::capture("gateway", &mut command(file, seconds))
}

/// Starts it, waits until it has done some calls, and kills it in the middle of others.
fn kill(file: &Path) -> Result<()> {
    let mut child =
        command(file, 600).stdout(Stdio::piped()).spawn().context("the gateway does not start")?;
    let lines = child.stdout.take().context("it has an output")?;
    let mut lines = BufReader::new(lines).lines();
    let serves = lines.any(|line| line.is_ok_and(|line| line == "10 calls"));
    // On this system that is a SIGKILL: it has no time for anything.
    child.kill().context("the gateway cannot be killed")?;
    child.wait().context("the gateway was killed and does not end")?;
    ensure!(serves, "the gateway ended before it had done ten calls");
    Ok(())
}

/// What the house has used, by each report that was printed.
fn tokens(output: &str) -> Result<Vec<u64>> {
    let rows = output.lines().filter(|line| line.starts_with("house"));
    let used = |line: &str| line.split_whitespace().nth(2).and_then(|used| used.parse().ok());
    let used: Option<Vec<u64>> = rows.map(used).collect();
    let used = used.with_context(|| format!("a report has no number of tokens:\n{output}"))?;
    ensure!(used.len() == 2, "{} reports, and not one before and one after:\n{output}", used.len());
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_house_used_is_read_from_both_reports() {
        let output = "acme 1 300 5\nhouse   1   300   7\nserving\nhouse 4 1200 -5\n";
        assert_eq!(tokens(output).unwrap(), [300, 1_200]);
        assert!(tokens("house 1 300 7\n").is_err());
        assert!(tokens("house 1 x 7\nhouse 1 2 3\n").is_err());
    }
}
