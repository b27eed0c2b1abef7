//! `tidegate explain --replay`: which requests of a log other limits would have refused.
//!
//! `log → lines in time order → in-memory store with a manual clock → tally`. Nothing waits: the clock
//! follows the log, and memory is bounded however long the log is.

mod codec;
mod log;
mod simulation;
mod tally;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tidegate::store::Listing;
use tidegate::{Entity, Paging, Policy, Scope};

use crate::backend::Backend;
use crate::failure::{Exit, Failure};
use crate::format;
use crate::output::{Output, Table, Tint};
use crate::verbs::limits;
use log::Log;
use simulation::Simulation;
use tally::{Row, Tally};

/// Maximum rows in the table for people.
const ROWS_SHOWN: usize = 100;
/// Maximum items per page.
const PAGE_MAX: u32 = 1_000;
/// Lines between progress updates.
const PROGRESS_EVERY: u64 = 4_096;

/// Help about the format of a log.
pub(crate) const LOG_FORMAT: &str = "\
A log has one JSON object per line:
  {\"at\": \"2026-01-31T09:30:00Z\", \"entity\": \"acme\", \"resource\": \"gpt-4\",
   \"cost\": {\"rpm\": 1, \"tpm\": 800}}
`at` may be seconds since 1970. `actual` is the units used in the end, and
`held` the seconds until they were known. Other fields are ignored. The log of
`serve --log json --log-level debug` can be replayed as it is; it has no
`actual`. Lines may be out of order by up to 10,000 lines. The exit code is 3
if any request would have been refused, and 2 if a line is invalid.";

/// Arguments of `explain --replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Report which requests of a log would have been refused; `-` reads stdin
    #[arg(long, value_name = "LOG")]
    replay: Option<PathBuf>,
    /// Replay with the limits of this file, in the format of `limits apply`, instead of the stored ones
    #[arg(long, value_name = "FILE", requires = "replay")]
    manifest: Option<PathBuf>,
    /// Ignore stored limits that the file does not declare
    #[arg(long, requires = "manifest")]
    prune: bool,
}

impl ReplayArgs {
    pub(crate) const fn is_requested(&self) -> bool {
        self.replay.is_some()
    }
}

/// Replays a log. Entities and limits come from the `backend`, if any, and the manifest overrides limits.
pub(crate) async fn run(backend: Option<&impl Backend>, args: ReplayArgs) -> Result<Output, Failure> {
    let Some(path) = args.replay else { return Err(Failure::usage("no log is given to replay")) };
    let declared = args.manifest.as_deref().map(limits::manifest).transpose()?;
    if declared.is_none() && backend.is_none() {
        let what = "there are no limits to replay with: neither a manifest nor a store or a server is given";
        return Err(Failure::usage(what).next("use --manifest FILE, --store URL or --server URL"));
    }
    let mut policies: BTreeMap<Scope, Policy> = BTreeMap::new();
    let mut entities = Vec::new();
    if let Some(backend) = backend {
        entities = all_entities(backend).await?;
        if !args.prune {
            policies = all_policies(backend).await?;
        }
    }
    policies.extend(declared.iter().flat_map(|manifest| manifest.policies().iter().cloned()));
    let mut simulation = Simulation::new(entities, policies).await?;
    let mut log = Log::open(&path)?;
    let bar = bar(log.size());
    let mut tally = Tally::default();
    let result = replay(&mut log, &mut simulation, &mut tally, &bar).await;
    bar.finish_and_clear();
    result?;
    Ok(report(&tally))
}

async fn replay(
    log: &mut Log,
    simulation: &mut Simulation,
    tally: &mut Tally,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    while let Some(line) = log.next()? {
        let verdict = simulation.run(&line).await?;
        tally.count(&line, &verdict);
        if tally.asked.is_multiple_of(PROGRESS_EVERY) {
            bar.set_position(log.read());
            bar.set_message(format!(
                "{} requests, {} refused",
                format::number(tally.asked),
                format::number(tally.refused)
            ));
        }
    }
    simulation.end().await
}

/// A progress bar, shown on a terminal.
fn bar(size: Option<u64>) -> ProgressBar {
    let (bar, template) = match size {
        Some(size) => (ProgressBar::new(size), "{bar:24.cyan/blue} {percent}% {msg}"),
        None => (ProgressBar::no_length(), "{spinner} {msg}"),
    };
    // An invalid template falls back to the default style.
    bar.with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

async fn all_entities(backend: &impl Backend) -> Result<Vec<Entity>, Failure> {
    let (mut all, mut paging) = (Vec::new(), Paging::first(PAGE_MAX)?);
    loop {
        let page = backend.entities(&paging).await?;
        all.extend(page.items.into_iter().map(|entity| entity.value));
        let Some(next) = page.next else { return Ok(all) };
        paging = Paging::first(PAGE_MAX)?.after(next);
    }
}

async fn all_policies(backend: &impl Backend) -> Result<BTreeMap<Scope, Policy>, Failure> {
    let (mut all, mut paging) = (BTreeMap::new(), Paging::first(PAGE_MAX)?);
    loop {
        let page = backend.policies(&Listing::All, &paging).await?;
        all.extend(page.items.into_iter().map(|(scope, policy)| (scope, (*policy.value).clone())));
        let Some(next) = page.next else { return Ok(all) };
        paging = Paging::first(PAGE_MAX)?.after(next);
    }
}

fn report(tally: &Tally) -> Output {
    let rows = tally.rows();
    let output = Output::new(codec::tally(tally, &rows));
    let (Some(first), Some(last)) = (tally.first, tally.last) else {
        return output.line("the log is empty");
    };
    let invalid = if tally.invalid > 0 { format!(", {} invalid", tally.invalid) } else { String::new() };
    let own = if tally.own_limits > 0 {
        format!(", {} with limits of their own", tally.own_limits)
    } else {
        String::new()
    };
    let sum = format!(
        "{} requests from {first} to {last}: {} granted, {} refused{invalid}{own}",
        tally.asked, tally.granted, tally.refused
    );
    let output = output.line(sum);
    if tally.refused == 0 {
        return output;
    }
    let mut table = Table::new([
        "ENTITY",
        "RESOURCE",
        "LIMIT",
        ">REQUESTS",
        ">GRANTED",
        ">REFUSED",
        "FIRST REFUSED",
        "LONGEST WAIT",
        "BY",
    ]);
    let refused: Vec<_> = rows.iter().filter(|(_, row)| row.refused > 0).collect();
    for (key, row) in refused.iter().take(ROWS_SHOWN) {
        table.tinted(Tint::Bad, cells(key, row));
    }
    let output = output.table(table).exit(Exit::Refused);
    match refused.len().saturating_sub(ROWS_SHOWN) {
        0 => output,
        more => output.line(format!("and {more} more: use --json for all")),
    }
}

fn cells(key: &tally::Key, row: &Row) -> Vec<String> {
    let [entity, resource, limit] = key.words();
    vec![
        format::escape(entity),
        format::escape(resource),
        format::escape(limit),
        row.asked.to_string(),
        row.granted.to_string(),
        row.refused.to_string(),
        row.first.map(format::time).unwrap_or_default(),
        row.longest.words(),
        row.by.clone(),
    ]
}
