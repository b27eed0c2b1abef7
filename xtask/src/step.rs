//! Runs child commands, and reports the time of each step.
//!
//! The output shows where the time goes, and a failure names the step and the command, so that it can be
//! repeated alone. Output that people follow (tests, compilers) is streamed; output that matters only on
//! failure is captured, behind a spinner.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;

/// The passed steps of one command, in order.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    passed: Vec<PassedStep>,
}

#[derive(Debug)]
struct PassedStep {
    name: &'static str,
    took: Duration,
}

impl Steps {
    /// Runs `work` as the step `name`; an error names the step.
    pub(crate) fn run(&mut self, name: &'static str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        println!("==> {name}");
        let started = Instant::now();
        let result = work();
        let took = started.elapsed();
        result.with_context(|| format!("step {name} failed after {:.1} s", took.as_secs_f64()))?;
        println!("    {name} passed in {:.1} s", took.as_secs_f64());
        self.passed.push(PassedStep { name, took });
        Ok(())
    }

    /// A table of the passed steps and their times.
    pub(crate) fn summary(&self) -> String {
        let mut table = format!("\n{:<16} {:>8}\n", "step", "seconds");
        for PassedStep { name, took } in &self.passed {
            let _ = writeln!(table, "{name:<16} {:>8.1}", took.as_secs_f64());
        }
        let total: Duration = self.passed.iter().map(|passed| passed.took).sum();
        let _ = writeln!(table, "{:<16} {:>8.1}", "total", total.as_secs_f64());
        let _ = write!(table, "\nall {} steps passed", self.passed.len());
        table
    }
}

/// Runs `command` with inherited output.
pub(crate) fn stream(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| could_not_start(command))?;
    ensure_success(command, status)
}

/// Runs `command` silently and returns its stdout; on failure prints its output to stderr.
pub(crate) fn capture(doing: &str, command: &mut Command) -> Result<String> {
    let spinner = spinner(doing);
    let output = command.output();
    spinner.finish_and_clear();
    let output = output.with_context(|| could_not_start(command))?;
    if !output.status.success() {
        // Programs report errors on stderr; stdout may be meant for machines.
        let report = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
        // Nothing else can be done if stderr is closed.
        let _ = io::stderr().write_all(report);
    }
    ensure_success(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("`{}` wrote invalid UTF-8", line(command)))
}

fn spinner(doing: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let spinner = ProgressBar::new_spinner().with_message(doing.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

fn ensure_success(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` ended with {status}", line(command));
    }
    Ok(())
}

fn could_not_start(command: &Command) -> String {
    format!("`{}` could not be started", line(command))
}

/// The command as typed in a shell, with its extra environment, so that it can be repeated.
fn line(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        Some(format!("{}={}", name.to_string_lossy(), quoted(&value?.to_string_lossy())))
    });
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let program = program.to_string_lossy().into_owned();
    let arguments = command.get_args().map(|argument| quoted(&argument.to_string_lossy()));
    variables.chain([program]).chain(arguments).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    if word.is_empty() || word.contains(char::is_whitespace) { format!("'{word}'") } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_step_is_named_and_not_counted() {
        let mut steps = Steps::default();
        let error = steps.run("docs", || bail!("no luck")).unwrap_err();
        let message = format!("{error:#}");
        assert!(message.starts_with("step docs failed after "), "{message}");
        assert!(message.ends_with(": no luck"), "{message}");
        assert!(steps.summary().ends_with("all 0 steps passed"));
    }

    #[test]
    fn summary_lists_every_passed_step() {
        let mut steps = Steps::default();
        steps.run("fmt", || Ok(())).unwrap();
        steps.run("tests", || Ok(())).unwrap();
        let summary = steps.summary();
        let words: Vec<_> = summary.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(words, ["step", "fmt", "tests", "total", "all"]);
        assert!(summary.ends_with("all 2 steps passed"));
    }

    #[test]
    fn captured_command_returns_its_output() {
        assert_eq!(capture("asking", Command::new("echo").arg("hello")).unwrap(), "hello\n");
    }

    #[test]
    fn failing_command_is_shown_as_typed() {
        let mut command = Command::new("/usr/bin/env");
        command.args(["sh", "-c", "exit 3"]).env("FLAGS", "-D warnings");
        let message = stream(&mut command).unwrap_err().to_string();
        assert_eq!(message, "`FLAGS='-D warnings' env sh -c 'exit 3'` ended with exit status: 3");
    }

    #[test]
    fn missing_program_is_an_error_with_its_name() {
        let error = capture("looking", &mut Command::new("no-such-program-anywhere")).unwrap_err();
        assert_eq!(error.to_string(), "`no-such-program-anywhere` could not be started");
    }
}
