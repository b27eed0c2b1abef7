//! `tidegate lab`: strategies against simulated upstreams with hidden limits, in virtual time.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _};
use std::num::NonZero;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate_lab::{
    Scenario, Score, ScoreOptions, Strategy, page, scenarios_json, score, scores_json, summary_json, table,
    targets,
};

use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table};
use crate::plot::write;

/// A file of scenarios has at most this many bytes.
const FILE_MAX: u64 = 1 << 20;

const FILE: &str = "\
A file of scenarios is TOML:
  [[scenario]]
  name = \"mine\"
  upstream = { bucket = { depth = 1 } }  # seconds of its rate
  capacity = [[0, 50], [60, 200]]        # from a second on
  seconds = 240
  workers = 40                           # or arrivals = 15, per second
  latency = 0.2
Upstreams: { bucket = { depth = 1 } }, { window = { length = 60 } },
  { sliding = { length = 60 } }, \"cap\", { knee = { power = 1.5 } }, \"free\"
Also: clients, stagger, sigma, slower, reject-latency, errors, burns,
  retry-after (none, exact, seconds, ten-times), headers (none, right,
  stale, lying), background, tokens, token-quota, ideal";

/// Subcommands of `lab`.
#[derive(Debug, Subcommand)]
pub(crate) enum LabVerb {
    /// List the scenarios
    List,
    /// Run scenarios, and show goodput, 429s, fairness, latency and settling time
    #[command(after_help = FILE)]
    Run(RunArgs),
    /// Compare all strategies, and write a page with tables and plots
    ///
    /// Without names it runs all scenarios, which takes minutes.
    Score(ScoreArgs),
}

/// Arguments of `lab run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Scenarios by name; all of them with --scenario
    #[arg(value_name = "NAME", required_unless_present = "scenario")]
    names: Vec<String>,
    /// The strategy; may be repeated [default: auto]
    #[arg(long, value_name = "STRATEGY", value_parser = strategy_parser())]
    strategy: Vec<Strategy>,
    #[command(flatten)]
    seeds: SeedsArgs,
    /// Read scenarios from this file instead of the built-in ones
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
}

/// Arguments of `lab score`.
#[derive(Debug, Args)]
pub(crate) struct ScoreArgs {
    /// Scenarios by name [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Write index.html and scores.json to this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    seeds: SeedsArgs,
}

/// The number of runs that are averaged.
#[derive(Debug, Args)]
struct SeedsArgs {
    /// Seeds of each strategy, from 1 to 1000 [default: 20 for auto and host, 3 for others]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    seeds: Option<u32>,
}

pub(crate) fn run(verb: LabVerb) -> Result<Output, Failure> {
    match verb {
        LabVerb::List => Ok(list()),
        LabVerb::Run(args) => run_scenarios(args),
        LabVerb::Score(args) => compare(args),
    }
}

fn list() -> Output {
    let scenarios = Scenario::built_in();
    let mut table = Table::new(["NAME", "SCENARIO"]);
    for scenario in &scenarios {
        table.row([scenario.name.clone(), scenario.summary()]);
    }
    Output::new(scenarios_json(&scenarios)).table(table)
}

fn run_scenarios(args: RunArgs) -> Result<Output, Failure> {
    let all = match &args.scenario {
        Some(file) => read_scenarios(file)?,
        None => Scenario::built_in(),
    };
    let scenarios = choose(all, &args.names)?;
    let strategies = if args.strategy.is_empty() { vec![Strategy::Auto] } else { unique(args.strategy) };
    let scores = scored(&scenarios, strategies, &args.seeds);
    Ok(with_table(Output::new(scores_json(&scores)), &scores))
}

fn compare(args: ScoreArgs) -> Result<Output, Failure> {
    let scenarios = choose(Scenario::built_in(), &args.names)?;
    let failed = |path: &Path, error: &io::Error| {
        let path = format::escape(&path.display().to_string());
        Failure::failed(format!("`{path}` cannot be written: {error}"))
            .next("choose another directory with --out")
    };
    // Before the runs: they take minutes.
    if let Some(out) = &args.out {
        fs::create_dir_all(out).map_err(|error| failed(out, &error))?;
    }
    let scores = scored(&scenarios, Strategy::ALL.to_vec(), &args.seeds);
    let output = with_table(Output::new(summary_json(&scores)), &scores);
    let output = with_targets(output, &scores);
    let Some(out) = args.out else { return Ok(output) };
    let files =
        [("index.html", page(&scenarios, &scores)), ("scores.json", scores_json(&scores).to_string() + "\n")];
    for (name, text) in files {
        let path = out.join(name);
        write(&path, &text).map_err(|error| failed(&path, &error))?;
    }
    Ok(output.line(format!("written to {}", format::escape(&out.join("index.html").display().to_string()))))
}

/// Runs with a progress bar, which is hidden unless stderr is a terminal.
fn scored(scenarios: &[Scenario], strategies: Vec<Strategy>, seeds: &SeedsArgs) -> Vec<Score> {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(8));
    let style =
        ProgressStyle::with_template("{bar:24.cyan/blue} {pos}/{len} runs · about {eta} left · {msg}");
    bar.set_style(style.map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("━╸─")));
    let seeds = seeds.seeds.and_then(NonZero::new);
    let options = ScoreOptions { strategies, seeds, ..ScoreOptions::default() };
    let scores = score(scenarios, &options, &|progress| {
        bar.set_length(progress.total as u64);
        bar.set_message(format!("{} with {}", format::escape(progress.scenario), progress.strategy.name()));
        bar.inc(1);
    });
    bar.finish_and_clear();
    scores
}

fn with_table(output: Output, scores: &[Score]) -> Output {
    table(scores).lines().fold(output, Output::line)
}

/// How many targets are met, and which are not.
fn with_targets(output: Output, scores: &[Score]) -> Output {
    let rows = targets::rows(scores);
    let judged = rows.iter().filter(|row| row.met.is_some()).count();
    if judged == 0 {
        return output;
    }
    let missed: Vec<&str> =
        rows.iter().filter(|row| row.met == Some(false)).map(|row| row.name.as_str()).collect();
    let met = format!("auto meets {} of {judged} targets", judged - missed.len());
    output.line(if missed.is_empty() { met } else { format!("{met}; missed: {}", missed.join(", ")) })
}

/// The scenarios of these names, or all of them if there are none.
fn choose(all: Vec<Scenario>, names: &[String]) -> Result<Vec<Scenario>, Failure> {
    if names.is_empty() {
        return Ok(all);
    }
    let find = |name: &String| {
        all.iter().find(|scenario| scenario.name == *name).cloned().ok_or_else(|| unknown(name))
    };
    unique(names.to_vec()).iter().map(find).collect()
}

fn unknown(name: &str) -> Failure {
    let what = format!("there is no scenario `{}`", format::escape(name));
    Failure::usage(what).next("list them: tidegate lab list")
}

/// The same without repetitions, in order.
fn unique<T: Clone + Eq + std::hash::Hash>(values: Vec<T>) -> Vec<T> {
    let mut seen = HashSet::new();
    values.into_iter().filter(|value| seen.insert(value.clone())).collect()
}

/// The scenarios of a file.
pub(crate) fn read_scenarios(file: &Path) -> Result<Vec<Scenario>, Failure> {
    let path = format::escape(&file.display().to_string());
    let failed = |error: io::Error| {
        Failure::usage(format!("the file `{path}` cannot be read: {error}"))
            .next("choose a file of scenarios with --scenario")
    };
    let mut text = String::new();
    fs::File::open(file)
        .and_then(|file| file.take(FILE_MAX + 1).read_to_string(&mut text))
        .map_err(failed)?;
    if text.len() as u64 > FILE_MAX {
        return Err(Failure::usage(format!("the file `{path}` has more than {FILE_MAX} bytes")));
    }
    let invalid = |what: &str| {
        Failure::usage(format!("`{path}` is not a file of scenarios: {what}"))
            .next("see the format: tidegate lab run --help")
    };
    let scenarios = Scenario::parse(&text).map_err(|error| {
        // An error of TOML has several lines.
        let lines: Vec<String> = error.to_string().trim_end().lines().map(format::escape).collect();
        invalid(&lines.join("\n       "))
    })?;
    if scenarios.is_empty() {
        return Err(invalid("it has no [[scenario]]"));
    }
    Ok(scenarios)
}

fn strategy_parser() -> impl TypedValueParser<Value = Strategy> {
    let names = PossibleValuesParser::new(Strategy::ALL.map(Strategy::name));
    names.map(|name| Strategy::named(&name).expect("only names of strategies are accepted"))
}
