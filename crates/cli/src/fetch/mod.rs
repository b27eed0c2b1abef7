//! `tidegate fetch`: fetches files from many hosts, each at the rate it sustains.
//!
//! `input → frontier → attempt → writer → summary`. A thread reads addresses. The `frontier` knows every host
//! and its queues. An attempt is one request under the host's throttle in `gates`; it writes the body to a
//! `part_file`. The `writer` syncs parts and renames them. `crawl` is the event loop that drives them, and
//! the only place that awaits more than one thing.

mod address;
mod attempt;
mod codec;
mod crawl;
mod file_name;
mod folder;
mod frontier;
mod gates;
mod header;
mod host;
mod input;
mod part_file;
mod partial;
mod progress;
mod result;
mod robots;
mod spill_queue;
mod tally;
mod writer;

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use reqwest::Client;
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::redirect::Policy;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate::{Config, Random, Retry};

use crate::child;
use crate::failure::{Exit, Failure};
use crate::format;
use crate::output::{Format, Output};
use crate::parse;
use crate::signals::Signals;
use crawl::{Counts, Crawl, CrawlResult};
use folder::Folder;
use frontier::{Frontier, HostOptions};
use gates::{Gates, LimitOptions};
use input::Input;
use progress::Progress;
use tally::Summary;
use writer::Writer;

/// The default user agent.
const USER_AGENT: &str = concat!("tidegate/", env!("CARGO_PKG_VERSION"));
/// The default of concurrent requests to all hosts, and the most.
const CONCURRENCY: u32 = 64;
const COUNT_MAX: u32 = 10_000;
/// The default timeout for a response, and for each further chunk of its body.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle connections are closed after this time, since there may be many hosts.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

const HELP: &str = "\
Each host is fetched at the rate it sustains: the rate adapts to its responses,
429 and 503 slow it down, and Retry-After and quota headers are obeyed. Hosts
do not block each other.

Run the same command again to resume after an interruption, or to retry failed
pages: a file under its name in DIR is complete, and is not fetched again. The
first Ctrl-C waits for requests in flight, the second stops at once.

A host that sends nothing for --timeout (30s by default) counts as unavailable.

Files are named after their addresses: https://example.com/docs/page.html is
DIR/example.com/docs/page.html. An address without an extension gets that of
its content type. DIR/.tidegate holds the state of the fetch: its journal has
one line per page.

Exit codes:
  0    every page is fetched, or disallowed by robots.txt
  1    a page cannot be fetched, or the disk cannot be written
  4    a page cannot be fetched for now: run the same command again later
  130  interrupted (128 plus the number of the signal)

Examples:
  tidegate fetch https://example.com/a.html https://example.com/b.html
  tidegate fetch -i urls.txt --out pages --rate-max 2
  zcat urls.gz | tidegate fetch - --out pages --json > log.jsonl";

/// Arguments of `fetch`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct FetchArgs {
    /// Addresses to fetch; `-` reads them from stdin
    #[arg(value_name = "URL", required_unless_present = "input")]
    urls: Vec<String>,
    /// Read addresses from a file, one per line; blank lines and lines that begin with # are ignored
    #[arg(short, long, value_name = "FILE", conflicts_with = "urls")]
    input: Option<PathBuf>,
    /// Write the files to this folder, which is created if it does not exist
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Limit concurrent requests to all hosts, from 1 to 10000 [default: 64, or more if a host may have more]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=i64::from(COUNT_MAX)))]
    concurrency: Option<u32>,
    /// Limit concurrent requests per host, from 1 to 10000; fewer while the host fails [default: 8]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=i64::from(COUNT_MAX)))]
    per_host: Option<u32>,
    /// Start with this many requests per second and host, at most --rate-max [default: 10]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate: Option<f64>,
    /// Limit requests per second and host, from 0.01 to 1000000 [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    rate_max: Option<f64>,
    /// Try each page at most COUNT times, from 1 to 100 [default: 4]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    tries: Option<u32>,
    /// Read limits for each host from a TOML file; options override them
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Give up a host, for this run, that asks for a longer pause or fails for longer
    #[arg(long, value_name = "SPAN", default_value = "10m", value_parser = parse::duration)]
    patience: Duration,
    /// Limit the size of a file, such as 500k, 20M or 1G
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = bytes)]
    max_bytes: u64,
    /// Send a header such as 'Authorization: Bearer TOKEN' with each page; not after a redirect to another host
    #[arg(long, value_name = "HEADER", value_parser = header::parse)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// Send this user agent; robots.txt rules are looked up by its first word
    #[arg(long, value_name = "TEXT", default_value = USER_AGENT)]
    user_agent: String,
    /// Ignore robots.txt; for your own sites
    #[arg(long)]
    ignore_robots: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| (0.01..=1e6).contains(rate));
    rate.ok_or_else(|| "must be a number from 0.01 to 1000000".to_owned())
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
    bytes.ok_or_else(|| "must be a number of bytes from 1, such as 500k, 20M or 1G".to_owned())
}

impl FetchArgs {
    fn take_input(&mut self) -> Result<Input, Failure> {
        if let Some(file) = self.input.take() {
            return Ok(if file.as_os_str() == "-" { Input::Stdin } else { Input::File(file) });
        }
        let urls = std::mem::take(&mut self.urls);
        match urls.iter().filter(|url| *url == "-").count() {
            0 => Ok(Input::Args(urls)),
            _ if urls.len() == 1 => Ok(Input::Stdin),
            _ => {
                Err(Failure::usage("`-` cannot be combined with addresses: it reads all of them from stdin"))
            }
        }
    }

    /// The throttles of all hosts, and the retry policy.
    fn gates(&self, file: Config) -> Result<(Gates, Retry), Failure> {
        if let (Some(rate), Some(rate_max)) = (self.rate, self.rate_max)
            && rate > rate_max
        {
            return Err(Failure::usage(format!("--rate {rate} is above --rate-max {rate_max}")));
        }
        let (rate, rate_max, per_host, tries) = (self.rate, self.rate_max, self.per_host, self.tries);
        Gates::new(file, &LimitOptions { rate, rate_max, per_host, tries })
    }

    /// The limits of the configuration file.
    fn file(&self) -> Result<Config, Failure> {
        match &self.config {
            Some(path) => {
                let invalid = |why: String| Failure::usage(format!("--config {}: {why}", path.display()));
                let text = fs::read_to_string(path).map_err(|error| invalid(error.to_string()))?;
                Config::from_toml(&text).map_err(|error| invalid(error.to_string()))
            }
            None => Ok(Config::default()),
        }
    }

    /// Concurrent requests to all hosts: at least as many as one host may have.
    fn concurrency(&self, file: &Config) -> Result<u32, Failure> {
        let in_file = || file.to_map().get("slots.max").and_then(|slots| slots.parse::<u32>().ok());
        let per_host = self.per_host.or_else(in_file).unwrap_or_default();
        match self.concurrency {
            None => Ok(per_host.clamp(CONCURRENCY, COUNT_MAX)),
            Some(all) if per_host <= all => Ok(all),
            Some(all) => {
                let given = if self.per_host.is_some() {
                    format!("--per-host {per_host}")
                } else {
                    format!("slots.max = {per_host} in --config")
                };
                Err(Failure::usage(format!("{given} is above --concurrency {all}")))
            }
        }
    }
}

/// Fetches until all pages have ended, or a signal stops it.
pub(crate) async fn run(
    mut args: FetchArgs,
    timeout: Option<Duration>,
    format: Format,
) -> Result<Output, Failure> {
    let input = args.take_input()?;
    let timeout = timeout.unwrap_or(DEFAULT_TIMEOUT);
    let client = Client::builder()
        .user_agent(&args.user_agent)
        .redirect(Policy::none())
        .retry(reqwest::retry::never())
        .connect_timeout(timeout.min(CONNECT_TIMEOUT))
        .read_timeout(timeout)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .build()
        .map_err(|error| Failure::usage(format!("invalid request options: {error}")))?;
    let file = args.file()?;
    let concurrency = args.concurrency(&file)?;
    let (gates, retry) = args.gates(file)?;
    let signals = Signals::install()?;
    raise_file_limit();
    let mut folder = Folder::open(&args.out)?;
    let journal = folder.take_journal().map_err(|error| folder::write_failure(&args.out, &error))?;
    let folder = Arc::new(folder);
    let lines = input.read(&folder)?;
    let options = HostOptions {
        ignores_robots: args.ignore_robots,
        patience: args.patience,
        retry,
        user_agent: args.user_agent,
    };
    let crawl = Crawl {
        frontier: Frontier::new(gates, Arc::clone(&folder), options),
        client,
        headers: args.header.into_iter().collect(),
        writer: Writer::start(&folder, journal, format == Format::Json)?,
        folder: Arc::clone(&folder),
        progress: Progress::new(),
        concurrency: usize::try_from(concurrency).unwrap_or(usize::MAX),
        bytes_max: args.max_bytes,
        random: Random::seeded(RandomState::new().build_hasher().finish()),
        counts: Counts::default(),
    };
    let result = crawl.run(lines, signals).await?;
    report(result, &folder, format)
}

/// Raises the soft limit of open files: many hosts need many connections, and the default is low on most
/// systems.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // On failure, the current limit applies.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn report(result: CrawlResult, folder: &Folder, format: Format) -> Result<Output, Failure> {
    let CrawlResult { summary, signal, input_error } = result;
    let exit = match signal {
        Some(signal) => child::exit_by(signal),
        None if input_error.is_some() => Exit::Failed,
        None if summary.total.failed == 0 => Exit::Done,
        None if summary.final_failures == 0 => Exit::Unavailable,
        None => Exit::Failed,
    };
    if let (Some(error), None) = (input_error, signal) {
        let what =
            format!("the input cannot be read to its end: {error}; the addresses read so far were processed");
        return Err(Failure::failed(what).next("run the same command again with the whole input"));
    }
    if format == Format::Json {
        return Ok(Output::raw(codec::summary(&summary).into_bytes()).exit(exit));
    }
    Ok(text_report(&summary, folder).exit(exit))
}

/// The final report for people.
fn text_report(summary: &Summary, folder: &Folder) -> Output {
    let mut output = Output::new(crate::codec::Json::Null);
    if !summary.hosts.is_empty() {
        output = output.table(summary.table()).line("");
    }
    for line in &summary.hosts {
        if let Some(why) = &line.gave_up {
            output = output.line(format!("given up: {}: {why}", line.host));
        }
    }
    let mut limited: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for line in &summary.hosts {
        if let Some(limit) = line.limited_by {
            limited.entry(limit.to_string()).or_default().push(&line.host);
        }
    }
    for (limit, hosts) in limited {
        let more = match hosts.len() - 1 {
            0 => String::new(),
            1 => " and 1 other".to_owned(),
            count => format!(" and {count} others"),
        };
        output = output.line(format!("limited by {limit}: {}{more}", hosts[0]));
    }
    for (url, why) in &summary.failures {
        output = output.line(format!("failed: {url}: {why}"));
    }
    let total = &summary.total;
    if total.failed > summary.failures.len() as u64 {
        output = output.line(format!("all failures: {}", folder.journal_path().display()));
    }
    let part = |count: u64, what: &str| (count > 0).then(|| format!("{count} {what}"));
    let parts = [
        Some(format!("{} fetched ({})", total.done, tally::size(total.bytes))),
        part(total.there, "already fetched"),
        part(total.twice, "twice in the input"),
        part(total.robots, "disallowed by robots.txt"),
        part(total.failed, "failed"),
        part(summary.unfinished, "not started"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    let output = output.line(format!("{} in {}", parts.join(", "), format::duration(summary.took)));
    if summary.is_interrupted {
        output.line("interrupted: run the same command again to resume")
    } else if total.failed > summary.final_failures {
        output.line("some pages failed for now: run the same command again to retry them")
    } else {
        output
    }
}
