//! Running child commands, and telling what each step cost.
//!
//! A gate people wait for has to show where the time goes, and a failure has to name the step and the
//! command, so that it can be repeated alone. Output people follow (tests, compilers) streams through;
//! output that only matters on failure is captured, and only then may a spinner turn.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;

/// The steps of one command, in the order they passed.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    passed: Vec<Passed>,
}

#[derive(Debug)]
struct Passed {
    name: &'static str,
    took: Duration,
}

impl Steps {
    /// Does `work` as the step `name`; an error says which step it was.
    pub(crate) fn run(&mut self, name: &'static str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        println!("==> {name}");
        let started = Instant::now();
        let result = work();
        let took = started.elapsed();
        result.with_context(|| format!("step {name} failed after {:.1} s", took.as_secs_f64()))?;
        println!("    {name} passed in {:.1} s", took.as_secs_f64());
        self.passed.push(Passed { name, took });
        Ok(())
    }

    /// A table of what passed and how long it took.
    pub(crate) fn summary(&self) -> String {
        let mut table = format!("\n{:<16} {:>8}\n", "step", "seconds");
        for Passed { name, took } in &self.passed {
            let _ = writeln!(table, "{name:<16} {:>8.1}", took.as_secs_f64());
        }
        let total: Duration = self.passed.iter().map(|passed| passed.took).sum();
        let _ = writeln!(table, "{:<16} {:>8.1}", "total", total.as_secs_f64());
        let _ = write!(table, "\nall {} steps passed", self.passed.len());
        table
    }
}

/// Runs `command` with its output going where ours goes.
pub(crate) fn stream(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| could_not_start(command))?;
    demand_success(command, status)
}

/// Runs `command` in silence and returns what it wrote to stdout; when it fails, its complaint is shown.
pub(crate) fn capture(doing: &str, command: &mut Command) -> Result<String> {
    let spinner = spinner(doing);
    let output = command.output();
    spinner.finish_and_clear();
    let output = output.with_context(|| could_not_start(command))?;
    if !output.status.success() {
        // Programs complain on stderr, and what is on stdout may be meant for machines.
        let complaint = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
        // If our own stderr is closed there is no place to report to.
        let _ = io::stderr().write_all(complaint);
    }
    demand_success(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("`{}` wrote no valid UTF-8", line(command)))
}

fn spinner(doing: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let spinner = ProgressBar::new_spinner().with_message(doing.to_owned());
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

fn demand_success(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` ended with {status}", line(command));
    }
    Ok(())
}

fn could_not_start(command: &Command) -> String {
    format!("`{}` could not be started", line(command))
}

/// The command as one would type it, its own environment included, so that it can be repeated.
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
    fn a_failing_step_is_named_and_not_counted() {
        let mut steps = Steps::default();
        let error = steps.run("docs", || bail!("no luck")).unwrap_err();
        let message = format!("{error:#}");
        assert!(message.starts_with("step docs failed after "), "{message}");
        assert!(message.ends_with(": no luck"), "{message}");
        assert!(steps.summary().ends_with("all 0 steps passed"));
    }

    #[test]
    fn the_summary_lists_every_step_that_passed() {
        let mut steps = Steps::default();
        steps.run("fmt", || Ok(())).unwrap();
        steps.run("tests", || Ok(())).unwrap();
        let summary = steps.summary();
        let words: Vec<_> = summary.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(words, ["step", "fmt", "tests", "total", "all"]);
        assert!(summary.ends_with("all 2 steps passed"));
    }

    #[test]
    fn a_captured_command_returns_what_it_wrote() {
        assert_eq!(capture("asking", Command::new("echo").arg("hello")).unwrap(), "hello\n");
    }

    #[test]
    fn a_failing_command_is_shown_as_one_would_type_it() {
        let mut command = Command::new("/usr/bin/env");
        command.args(["sh", "-c", "exit 3"]).env("FLAGS", "-D warnings");
        let message = stream(&mut command).unwrap_err().to_string();
        assert_eq!(message, "`FLAGS='-D warnings' env sh -c 'exit 3'` ended with exit status: 3");
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_with_its_name() {
        let error = capture("looking", &mut Command::new("no-such-program-anywhere")).unwrap_err();
        assert_eq!(error.to_string(), "`no-such-program-anywhere` could not be started");
    }
}
