//! `tidegate fetch`: files from many hosts, each at the rate it bears.
//!
//! `input → book → attempt → keeper → summary`. A thread reads addresses; `book` knows every host, what is to be fetched there and
//! when; an attempt is one request under the host's `gates`, and writes what comes to a `part`; the `keeper` brings parts to the disk
//! and gives them their names. `crawl` is the one loop that drives all of it, and the only place that awaits more than one thing.

mod address;
mod ahead;
mod attempt;
mod book;
mod codec;
mod crawl;
mod ended;
mod folder;
mod gates;
mod host;
mod input;
mod keeper;
mod name;
mod part;
mod rules;
mod show;
mod tally;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use reqwest::Client;
use reqwest::redirect::Policy;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate::Random;

use crate::answer::{Answer, Format};
use crate::child;
use crate::failure::{Exit, Failure};
use crate::signals::Signals;
use crate::words::{self, span_words};
use book::{Book, Manners};
use crawl::{Count, Crawl, Outcome};
use folder::Folder;
use gates::Gates;
use input::Input;
use keeper::Keeper;
use show::Show;
use tally::Summary;

/// What we call ourselves.
const USER_AGENT: &str = concat!("tidegate/", env!("CARGO_PKG_VERSION"));
/// Nobody waits longer for an answer, or for more of it, unless they say so.
const SILENCE: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(10);
/// A connection that nobody uses is closed after this: there may be many hosts.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

const HOW: &str = "\
Each host is asked as fast as it allows: the rate is found by how it answers,
429 and 503 slow it down, and Retry-After and quota headers are obeyed. A host
that waits keeps no other from being asked.

Run the same command again to go on after an interruption, or to try again
what has failed: a file that has its name in DIR is whole, and is not fetched
again. The first Ctrl-C lets what is under way end, the second ends at once.

A host that is silent for --timeout, 30s unless said otherwise, counts as away.

Files are named after their addresses: https://example.com/docs/page.html is
DIR/example.com/docs/page.html. What is in DIR/.tidegate is ours: the journal
there has a line for each page.

Exit codes:
  0    everything is there, or was left out as robots.txt asks
  1    something could not be fetched, or the disk could not be written to
  4    something could not be fetched for now: run the same again later
  130  it was interrupted (128 and the number of the signal)

Examples:
  tidegate fetch https://example.com/a.html https://example.com/b.html --out d
  tidegate fetch -i urls.txt --out pages --rate-max 2
  zcat urls.gz | tidegate fetch - --out pages --json > log.jsonl";

/// What to fetch, and how.
#[derive(Debug, Args)]
#[command(after_help = HOW)]
pub(crate) struct FetchArgs {
    /// Addresses; `-` reads them from stdin
    #[arg(value_name = "URL", required_unless_present = "input")]
    urls: Vec<String>,
    /// A file with an address on each line; blank lines, and those that begin with #, are left out
    #[arg(short, long, value_name = "FILE", conflicts_with = "urls")]
    input: Option<PathBuf>,
    /// The folder for the files: it is made if it is not there
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
    /// Requests at once, to all hosts, from 1 to 10000
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
    /// Requests at once to one host, from 1 to 10000; fewer while it fails
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    per_host: u32,
    /// Requests a second to one host, to begin with
    #[arg(long, value_name = "RATE", default_value_t = 10.0, value_parser = rate)]
    rate: f64,
    /// Requests a second to one host, at most: from 0.01 to 1000000; no ceiling unless given
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate_max: Option<f64>,
    /// Attempts at one page, from 1 to 100
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    tries: u32,
    /// Give a host up, for this run, that asks to be left alone for longer, or fails for so long
    #[arg(long, value_name = "SPAN", default_value = "10m", value_parser = words::span)]
    patience: Duration,
    /// The most bytes that a file may have: 500k, 20M, 1G
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = bytes)]
    max_bytes: u64,
    /// What to call ourselves; rules of robots.txt are looked up by its first word
    #[arg(long, value_name = "TEXT", default_value = USER_AGENT)]
    user_agent: String,
    /// Do not ask for robots.txt, and fetch whatever it says; for sites of your own
    #[arg(long)]
    ignore_robots: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.01..=1e6).contains(rate));
    rate.ok_or_else(|| "it must be a number from 0.01 to 1000000".to_owned())
}

fn bytes(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.char_indices().next_back() {
        Some((end, 'k' | 'K')) => (&text[..end], 1_000),
        Some((end, 'M')) => (&text[..end], 1_000_000),
        Some((end, 'G')) => (&text[..end], 1_000_000_000),
        _ => (text, 1),
    };
    let bytes =
        digits.parse::<u64>().ok().and_then(|bytes| bytes.checked_mul(unit)).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| "it must be a number of bytes from 1, such as 500k, 20M or 1G".to_owned())
}

impl FetchArgs {
    fn take_input(&mut self) -> Result<Input, Failure> {
        if let Some(file) = self.input.take() {
            return Ok(if file.as_os_str() == "-" { Input::Stdin } else { Input::File(file) });
        }
        let urls = std::mem::take(&mut self.urls);
        match urls.iter().filter(|url| *url == "-").count() {
            0 => Ok(Input::Words(urls)),
            _ if urls.len() == 1 => Ok(Input::Stdin),
            _ => Err(Failure::usage(
                "`-` is among addresses: it reads all of them from stdin, and stands alone",
            )),
        }
    }
}

/// Fetches until everything is there, or a signal stops it.
pub(crate) async fn run(
    mut args: FetchArgs,
    timeout: Option<Duration>,
    format: Format,
) -> Result<Answer, Failure> {
    let input = args.take_input()?;
    let silence = timeout.unwrap_or(SILENCE);
    let client = Client::builder()
        .user_agent(&args.user_agent)
        .redirect(Policy::none())
        .retry(reqwest::retry::never())
        .connect_timeout(silence.min(CONNECT))
        .read_timeout(silence)
        .pool_idle_timeout(KEEP_ALIVE)
        .build()
        .map_err(|error| Failure::usage(format!("requests cannot be made like this: {error}")))?;
    let rate = args.rate_max.map_or(args.rate, |rate_max| args.rate.min(rate_max));
    let gates = Gates::new(rate, args.rate_max, args.per_host)?;
    let signals = Signals::hear()?;
    raise_file_limit();
    let mut folder = Folder::open(&args.out)?;
    let journal = folder.take_journal().map_err(|error| folder::trouble(&args.out, &error))?;
    let folder = Arc::new(folder);
    let lines = input.read(&folder)?;
    let manners = Manners {
        ignores_robots: args.ignore_robots,
        patience: args.patience,
        tries_max: args.tries,
        user_agent: args.user_agent,
    };
    let crawl = Crawl {
        book: Book::new(gates, Arc::clone(&folder), manners),
        client,
        keeper: Keeper::start(&folder, journal, format == Format::Json)?,
        folder: Arc::clone(&folder),
        show: Show::new(),
        at_once: usize::try_from(args.concurrency).unwrap_or(usize::MAX),
        bytes_max: args.max_bytes,
        random: Random::seeded(RandomState::new().build_hasher().finish()),
        count: Count::default(),
    };
    let outcome = crawl.run(lines, signals).await?;
    answer(outcome, &folder, format)
}

/// Many hosts are many connections; most systems let programs have far more than they do at first.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If it may not, it goes on with what it has.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn answer(outcome: Outcome, folder: &Folder, format: Format) -> Result<Answer, Failure> {
    let Outcome { summary, heard, broken } = outcome;
    let exit = match heard {
        Some(heard) => child::exit_by(heard),
        None if broken.is_some() => Exit::Failed,
        None if summary.total.failed == 0 => Exit::Done,
        None if summary.final_failures == 0 => Exit::Away,
        None => Exit::Failed,
    };
    if let (Some(error), None) = (broken, heard) {
        let what = format!("the input cannot be read to its end: {error}; what was read of it is seen to");
        return Err(Failure::failed(what).next("run the same command again with the whole input"));
    }
    if format == Format::Json {
        return Ok(Answer::raw(codec::summary(&summary).into_bytes()).exit(exit));
    }
    Ok(told(&summary, folder).exit(exit))
}

/// What people are told at the end.
fn told(summary: &Summary, folder: &Folder) -> Answer {
    let mut answer = Answer::new(crate::codec::Json::Null);
    if !summary.hosts.is_empty() {
        answer = answer.table(summary.table()).line("");
    }
    for line in &summary.hosts {
        if let Some(why) = &line.gave_up {
            answer = answer.line(format!("given up: {}: {why}", line.host));
        }
    }
    for (url, why) in &summary.failures {
        answer = answer.line(format!("failed: {url}: {why}"));
    }
    let total = &summary.total;
    if total.failed > summary.failures.len() as u64 {
        answer = answer.line(format!("all that failed: {}", folder.journal_path().display()));
    }
    let part = |count: u64, what: &str| (count > 0).then(|| format!("{count} {what}"));
    let parts = [
        Some(format!("{} fetched ({})", total.done, tally::size(total.bytes))),
        part(total.there, "there already"),
        part(total.twice, "twice in the input"),
        part(total.robots, "left out as robots.txt asks"),
        part(total.failed, "failed"),
        part(summary.unfinished, "not begun"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let took = format!("{:.1} s", summary.took.as_secs_f64());
    let took = if summary.took < Duration::from_mins(1) { took } else { span_words(summary.took) };
    let answer = answer.line(format!("{} in {took}", parts.join(", ")));
    if summary.is_interrupted {
        answer.line("interrupted: run the same command again, and it goes on where it was")
    } else if total.failed > summary.final_failures {
        answer.line("some of it failed for now: run the same command again to try once more")
    } else {
        answer
    }
}
