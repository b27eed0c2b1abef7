//! The project's own commands, so that people and CI run the same checks in the same way.
//!
//! `cargo xtask test` is the check before a push; the other commands are its parts and its tools. Written in
//! Rust, because a fresh machine with only Rust, git and a C compiler must be able to run them.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program talks on its terminal")]

mod bench;
mod cover;
mod docs;
mod engines;
mod examples;
mod fuzz;
mod install;
mod sdk;
mod step;
mod test;
mod tidy;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use engines::{Engine, StatusFormat};
use test::Depth;

const EXIT_CODES: &str = "Exit codes:
  0  every check passed
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
    /// Starts real servers first and stops them afterwards; a missing server fails the run. The steps: fmt, tidy, clippy, tests,
    /// doc tests, examples, fuzzing of the server by its own OpenAPI document, concurrency models, docs, and the feature
    /// combinations that users pick. Ends with the seconds of each step. CI runs exactly this.
    #[command(after_help = EXIT_CODES)]
    Test {
        /// After an edit: fmt, tidy and the tests that need no server
        #[arg(long, conflicts_with_all = ["deep", "engines"])]
        quick: bool,
        /// Search longer: ten times as many model schedules, 20,000 cases for each property; also check licences
        #[arg(long)]
        deep: bool,
        /// Run the tests beside two busy loops, to find those that depend on speed
        #[arg(long)]
        beside_load: bool,
        /// Run the tests of these engines only, for instance `memory,sqlite`; the end of the run says so
        #[arg(long, value_delimiter = ',', value_enum)]
        engines: Vec<Engine>,
    },
    /// Fuzz the server with requests derived from its OpenAPI document
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
    /// Installs missing servers, and never touches a server that it did not start.
    #[command(after_help = EXIT_CODES)]
    Engines {
        #[command(subcommand)]
        what: Engines,
    },
    /// Check the rules of STYLE.md that a program can check, and list every breach as `path:line: sentence`
    ///
    /// Reads the files that git tracks or would track: their length, module docs, what core may use, where
    /// features and serde may be named, machine paths, placeholders, links, docs/contracts.md, and the number
    /// of lines in indirect English, which may only fall.
    #[command(after_help = EXIT_CODES)]
    Tidy {
        /// Record the number of lines in indirect English where it has fallen
        #[arg(long)]
        ratchet: bool,
    },
    /// Measure which lines of each crate the tests reach
    ///
    /// Fails if a crate falls below its floor. Starts the engines, and installs the matching LLVM tools with
    /// apt-get if they are missing. Neither doc tests nor the lines of unit tests count.
    #[command(after_help = EXIT_CODES)]
    Cover {
        /// Also write the annotated sources, as web pages under target/cover/html
        #[arg(long)]
        html: bool,
    },
    /// Build the book of docs/SUMMARY.md with mdBook, to target/book/html
    ///
    /// Builds mdBook under target/tools with cargo if it is missing.
    #[command(after_help = EXIT_CODES)]
    Docs,
    /// Run a benchmark, print its table and write target/bench/NAME.json
    ///
    /// Installs valgrind with apt-get if it is missing; `lab` does not need it. `proxy` installs nginx too, and
    /// `LiteLLM` from PyPI.
    #[command(after_help = EXIT_CODES)]
    Bench {
        /// Which benchmark: `local`, `keyed`, `shared`, `sqlite`, `server`, `rls`, `engines`, `dynamodb`, `http`, `proxy` or `lab`
        name: String,
        /// Arguments passed to the benchmark
        #[arg(last = true, value_name = "ARGS")]
        extra: Vec<OsString>,
    },
}

#[derive(Debug, Subcommand)]
enum Engines {
    /// Start engines that are not running, and show the running ones
    Up {
        /// Which engines; by default all but `sentinel`
        #[arg(long, value_delimiter = ',', value_enum)]
        engines: Vec<Engine>,
        #[command(flatten)]
        format: FormatArgs,
    },
    /// Stop engines that `up` started, and remove their files
    Down {
        /// Which engines; by default all
        #[arg(long, value_delimiter = ',', value_enum)]
        engines: Vec<Engine>,
    },
    /// Show the running engines
    Status {
        #[command(flatten)]
        format: FormatArgs,
    },
}

#[derive(Debug, Clone, Copy, Args)]
#[group(multiple = false)]
struct FormatArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print shell exports: `eval "$(cargo xtask engines status --env)"` lets `cargo test` find the engines
    #[arg(long)]
    env: bool,
}

impl From<FormatArgs> for StatusFormat {
    fn from(format: FormatArgs) -> Self {
        match format {
            FormatArgs { json: true, .. } => Self::Json,
            FormatArgs { env: true, .. } => Self::Env,
            FormatArgs { .. } => Self::Table,
        }
    }
}

fn main() -> ExitCode {
    let result = match CommandLine::parse().command {
        Command::Test { quick, deep, beside_load, engines } => {
            let depth = if quick { Depth::Quick } else { depth(deep) };
            test::run(&test::Options { depth, engines, is_beside_load: beside_load })
        }
        Command::Fuzz { deep } => fuzz::run(depth(deep)),
        Command::Engines { what } => match what {
            Engines::Up { engines, format } => {
                engines::up(&engines).and_then(|()| engines::status(format.into()))
            }
            Engines::Down { engines } => engines::down(&engines),
            Engines::Status { format } => engines::status(format.into()),
        },
        Command::Tidy { ratchet } => {
            tidy::run(if ratchet { tidy::Ratchet::Record } else { tidy::Ratchet::Check })
        }
        Command::Cover { html } => cover::run(if html { cover::Pages::Write } else { cover::Pages::Skip }),
        Command::Docs => docs::run(),
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

const fn depth(deep: bool) -> Depth {
    if deep { Depth::Deep } else { Depth::Usual }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_well_formed() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn arguments_after_dashes_go_to_the_benchmark() {
        let line = ["cargo xtask", "bench", "local", "--", "--seconds", "3"];
        let Command::Bench { name, extra } = CommandLine::try_parse_from(line).unwrap().command else {
            panic!("expected the command bench");
        };
        assert_eq!(name, "local");
        assert_eq!(extra, ["--seconds", "3"]);
    }

    #[test]
    fn test_run_can_be_narrowed_to_some_engines() {
        let line = ["cargo xtask", "test", "--engines", "memory,sqlite"];
        let Command::Test { engines, .. } = CommandLine::try_parse_from(line).unwrap().command else {
            panic!("expected the command test");
        };
        assert_eq!(engines, [Engine::Memory, Engine::Sqlite]);
        assert!(CommandLine::try_parse_from(["cargo xtask", "test", "--engines", "oracle"]).is_err());
    }

    #[test]
    fn quick_run_takes_neither_depth_nor_engines() {
        for other in ["--deep", "--engines=redis"] {
            assert!(CommandLine::try_parse_from(["cargo xtask", "test", "--quick", other]).is_err());
        }
    }

    #[test]
    fn misspelt_command_is_a_usage_error() {
        let error = CommandLine::try_parse_from(["cargo xtask", "tests"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
    }
}
