//! The project's own commands, so that everybody and CI run the same checks in the same way.
//!
//! `cargo xtask test` is the gate before a push; the other commands are its parts and its instruments.
//! Written in Rust, because a fresh machine with nothing but Rust, git and a C compiler must be able to run
//! them.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program talks on its terminal")]

mod bench;
mod cover;
mod engines;
mod examples;
mod fuzz;
mod install;
mod step;
mod test;
mod tidy;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use engines::{Engine, Shown};

const EXIT_CODES: &str = "Exit codes:
  0  everything asked for passed
  1  a check failed or could not be run; the last line says which
  2  the command line was not understood";

/// The project's own commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = EXIT_CODES)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every check, in order, and stop at the first that fails
    ///
    /// Real servers are brought up first and stopped after: those that `engines up` starts. A missing one fails the
    /// run. The steps: fmt, tidy, clippy, tests (doc tests too), the concurrency models and their clippy, the
    /// examples, the server asked from its own document, docs, and each feature alone. CI runs exactly this.
    #[command(after_help = EXIT_CODES)]
    Test {
        /// Look longer: ten times as many model schedules, 20,000 cases for each property, 500 for each operation
        #[arg(long)]
        deep: bool,
        /// Run the tests of these engines only, for instance `memory,sqlite`; the end of the run says so
        #[arg(long, value_delimiter = ',', value_enum)]
        engines: Vec<Engine>,
    },
    /// Ask the server whatever its OpenAPI document allows, and what it does not
    ///
    /// Installs schemathesis with pip under target when it is missing.
    #[command(after_help = EXIT_CODES)]
    Fuzz {
        /// Look longer: 500 cases for each operation
        #[arg(long)]
        deep: bool,
    },
    /// Start, stop or show private servers for the tests
    ///
    /// Installs what is missing by its package's name, and never touches a server that it did not start.
    #[command(after_help = EXIT_CODES)]
    Engines {
        #[command(subcommand)]
        what: Engines,
    },
    /// Check the house rules that no compiler knows, and list every breach as `path:line: sentence`
    ///
    /// Reads the files git tracks or would track: their length, module docs, what core may use, where
    /// features and serde may be named, machine paths, placeholders, links and docs/contracts.md.
    #[command(after_help = EXIT_CODES)]
    Tidy,
    /// Measure which lines the tests of tidegate-core and tidegate reach
    ///
    /// Fails when tidegate-core falls below its floor. Installs the matching LLVM tools with apt-get when
    /// they are missing. Doc tests do not count, nor do the lines of the unit tests themselves.
    #[command(after_help = EXIT_CODES)]
    Cover {
        /// Also write the annotated sources, as web pages under target/cover/html
        #[arg(long)]
        html: bool,
    },
    /// Run a benchmark, print its table and write target/bench/NAME.json
    ///
    /// Installs valgrind with apt-get when it is missing.
    #[command(after_help = EXIT_CODES)]
    Bench {
        /// Which benchmark: `local`, `keyed`, `shared`, `sqlite`, `server`, `engines` or `http`
        name: String,
        /// Handed to the benchmark as they are
        #[arg(last = true, value_name = "ARGS")]
        extra: Vec<OsString>,
    },
}

#[derive(Debug, Subcommand)]
enum Engines {
    /// Start those that do not run yet, and show what runs
    Up {
        /// Which, by default all but `sentinel`
        #[arg(long, value_delimiter = ',', value_enum)]
        engines: Vec<Engine>,
        #[command(flatten)]
        shown: ShownAs,
    },
    /// Stop those that `up` started, and remove their files
    Down {
        /// Which, by default all
        #[arg(long, value_delimiter = ',', value_enum)]
        engines: Vec<Engine>,
    },
    /// Show what runs
    Status {
        #[command(flatten)]
        shown: ShownAs,
    },
}

#[derive(Debug, Clone, Copy, Args)]
#[group(multiple = false)]
struct ShownAs {
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// As lines for a shell: `eval "$(cargo xtask engines status --env)"` lets `cargo test` find them
    #[arg(long)]
    env: bool,
}

impl From<ShownAs> for Shown {
    fn from(shown: ShownAs) -> Self {
        match shown {
            ShownAs { json: true, .. } => Self::Json,
            ShownAs { env: true, .. } => Self::Env,
            ShownAs { .. } => Self::Table,
        }
    }
}

fn main() -> ExitCode {
    let result = match CommandLine::parse().command {
        Command::Test { deep, engines } => test::run(depth(deep), &engines),
        Command::Fuzz { deep } => fuzz::run(depth(deep)),
        Command::Engines { what } => match what {
            Engines::Up { engines, shown } => {
                engines::up(&engines).and_then(|()| engines::status(shown.into()))
            }
            Engines::Down { engines } => engines::down(&engines),
            Engines::Status { shown } => engines::status(shown.into()),
        },
        Command::Tidy => tidy::run(),
        Command::Cover { html } => cover::run(if html { cover::Pages::Write } else { cover::Pages::Skip }),
        Command::Bench { name, extra } => bench::run(&name, &extra),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

const fn depth(deep: bool) -> test::Depth {
    if deep { test::Depth::Deep } else { test::Depth::Usual }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn what_follows_two_dashes_belongs_to_the_benchmark() {
        let line = ["cargo xtask", "bench", "local", "--", "--seconds", "3"];
        let Command::Bench { name, extra } = CommandLine::try_parse_from(line).unwrap().command else {
            panic!("bench was asked for");
        };
        assert_eq!(name, "local");
        assert_eq!(extra, ["--seconds", "3"]);
    }

    #[test]
    fn a_test_run_may_be_narrowed_to_some_engines() {
        let line = ["cargo xtask", "test", "--engines", "memory,sqlite"];
        let Command::Test { engines, .. } = CommandLine::try_parse_from(line).unwrap().command else {
            panic!("test was asked for");
        };
        assert_eq!(engines, [Engine::Memory, Engine::Sqlite]);
        assert!(CommandLine::try_parse_from(["cargo xtask", "test", "--engines", "oracle"]).is_err());
    }

    #[test]
    fn a_misspelt_command_is_a_usage_error() {
        let error = CommandLine::try_parse_from(["cargo xtask", "tests"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
