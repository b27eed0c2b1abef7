//! Runs the examples to their end, and kills the one with a store to check that it continues from the stored
//! usage.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};

use crate::step;
use crate::workspace;

/// Examples without arguments. Their output is for people.
const PLAIN: [&str; 10] = [
    "hello",
    "layered",
    "shutdown",
    "blocking",
    "llm_batch",
    "llm_stream",
    "tenants",
    "polite_client",
    "tower_client",
    "limited_server",
];
/// Ten calls use more than this.
const TEN_CALLS: u64 = 10;

/// Runs all examples concurrently, as built by `cargo test`: most of their time is spent waiting.
pub(crate) fn run() -> Result<()> {
    let outputs: Vec<Result<String>> = thread::scope(|scope| {
        let start = |name: &'static str| scope.spawn(move || step::capture(name, &mut program(name)));
        let running: Vec<_> = PLAIN.into_iter().map(start).collect();
        let joined = |thread: thread::ScopedJoinHandle<'_, Result<String>>| {
            thread.join().unwrap_or_else(|_| bail!("a thread that runs an example panicked"))
        };
        running.into_iter().map(joined).collect()
    });
    for (name, output) in PLAIN.into_iter().zip(outputs) {
        println!("--- {name}\n{}", output?.trim_end());
    }
    per_host()?;
    gateway()
}

/// An example's program.
fn program(name: &str) -> Command {
    Command::new(workspace::target().join("debug/examples").join(name))
}

/// When piped, it prints one table of all hosts and no control characters.
fn per_host() -> Result<()> {
    let output = step::capture("per_host", program("per_host").args(["--seconds", "3"]))?;
    print!("{output}");
    let hosts = output.lines().filter(|line| line.contains(".test ")).count();
    ensure!(hosts == 5, "a table of {hosts} hosts, expected 5");
    let is_plain = !output.contains(|letter: char| letter.is_control() && letter != '\n');
    ensure!(is_plain, "control characters in a pipe:\n{output:?}");
    Ok(())
}

/// Usage continues from the stored value after the process was killed during its work.
fn gateway() -> Result<()> {
    let folder = workspace::target().join("gateway");
    if folder.exists() {
        fs::remove_dir_all(&folder).context("could not remove the old folder of the gateway")?;
    }
    fs::create_dir_all(&folder).context("could not create a folder for the gateway")?;
    let file = folder.join("limits.db");
    let first = tokens(&finish(&file, 1)?)?;
    ensure!(first[0] == 0 && first[1] > 0, "expected usage to start at 0 and to grow: {first:?}");
    kill(&file)?;
    let again = tokens(&finish(&file, 1)?)?;
    println!("gateway: {} tokens, killed, {} after the restart, {} at the end", first[1], again[0], again[1]);
    let has_grown = again[0] >= first[1] + TEN_CALLS && again[1] > again[0];
    ensure!(has_grown, "usage went from {first:?} to {again:?}");
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

/// Starts it, waits until it has made ten calls, and kills it.
fn kill(file: &Path) -> Result<()> {
    let mut child =
        command(file, 600).stdout(Stdio::piped()).spawn().context("could not start the gateway")?;
    let lines = child.stdout.take().context("the gateway's stdout is not piped")?;
    let mut lines = BufReader::new(lines).lines();
    let serves = lines.any(|line| line.is_ok_and(|line| line == "10 calls"));
    // SIGKILL on Linux: it cannot clean up.
    child.kill().context("could not kill the gateway")?;
    child.wait().context("could not wait for the killed gateway")?;
    ensure!(serves, "the gateway ended before it made ten calls");
    Ok(())
}

/// The usage of `house`, from each printed report.
fn tokens(output: &str) -> Result<Vec<u64>> {
    let rows = output.lines().filter(|line| line.starts_with("house"));
    let used = |line: &str| line.split_whitespace().nth(2).and_then(|used| used.parse().ok());
    let used: Option<Vec<u64>> = rows.map(used).collect();
    let used = used.with_context(|| format!("a report shows no tokens:\n{output}"))?;
    ensure!(used.len() == 2, "{} reports, expected 2:\n{output}", used.len());
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn house_usage_is_read_from_both_reports() {
        let output = "acme 1 300 5\nhouse   1   300   7\nserving\nhouse 4 1200 -5\n";
        assert_eq!(tokens(output).unwrap(), [300, 1_200]);
        assert!(tokens("house 1 300 7\n").is_err());
        assert!(tokens("house 1 x 7\nhouse 1 2 3\n").is_err());
    }
}
