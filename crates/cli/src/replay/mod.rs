//! `tidegate explain --replay`: who would have been refused, had other limits been written.
//!
//! `log → lines in the order of their time → a store in memory with a clock of its own → tally`. Nothing waits: the time of
//! the log passes as fast as its lines are read, and nothing but the tally grows with them, up to its bound.

mod codec;
mod log;
mod tally;
mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tidegate::store::Listing;
use tidegate::{Entity, Paging, Policy, Scope};

use crate::answer::{Answer, Table, Tint};
use crate::backend::Backend;
use crate::failure::{Exit, Failure};
use crate::verbs::limits;
use crate::words::{number, shown};
use log::Log;
use tally::{Row, Tally};
use world::World;

/// Rows that are shown to people.
const ROWS_SHOWN: usize = 100;
/// The most that a page holds.
const PAGE_MAX: u32 = 1_000;
/// How often it is shown how far it has come, in lines.
const SHOWN_EVERY: u64 = 4_096;

/// How the log is written.
pub(crate) const FORM: &str = "\
A log is JSON, an object on a line:
  {\"at\": \"2026-01-31T09:30:00Z\", \"entity\": \"acme\", \"resource\": \"gpt-4\",
   \"cost\": {\"rpm\": 1, \"tpm\": 800}}
`at` may be seconds since 1970. `actual` says what was used in the end, and
`held` after how many seconds that was known. Other fields are passed over.
The log of `serve --log json --log-level debug` is one, without `actual`.
Lines may be out of order by 10,000 lines. It ends with 3 if anybody would
have been refused, and with 2 if a line cannot be read.";

/// What to replay.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Tell who would have been refused in this log of requests; `-` is stdin
    #[arg(long, value_name = "LOG")]
    replay: Option<PathBuf>,
    /// With the limits of this file, as `limits apply` takes it, in the place of those that are written
    #[arg(long, value_name = "FILE", requires = "replay")]
    manifest: Option<PathBuf>,
    /// Without the limits that are written and that the file does not declare
    #[arg(long, requires = "manifest")]
    prune: bool,
}

impl ReplayArgs {
    pub(crate) const fn is_asked(&self) -> bool {
        self.replay.is_some()
    }
}

/// Replays a log. Entities and limits come from the `backend`, where there is one, and limits from the manifest.
pub(crate) async fn run(backend: Option<&impl Backend>, args: ReplayArgs) -> Result<Answer, Failure> {
    let Some(path) = args.replay else { return Err(Failure::usage("no log is given to replay")) };
    let declared = args.manifest.as_deref().map(limits::manifest).transpose()?;
    if declared.is_none() && backend.is_none() {
        let what =
            "there are no limits to replay it with: neither a manifest nor a store or a server is given";
        return Err(Failure::usage(what).next("say --manifest FILE, --store URL or --server URL"));
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
    let mut world = World::new(entities, policies).await?;
    let mut log = Log::open(&path)?;
    let bar = bar(log.size());
    let mut tally = Tally::default();
    let ended = replay(&mut log, &mut world, &mut tally, &bar).await;
    bar.finish_and_clear();
    ended?;
    Ok(told(&tally))
}

async fn replay(
    log: &mut Log,
    world: &mut World,
    tally: &mut Tally,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    while let Some(line) = log.next()? {
        let verdict = world.ask(&line).await?;
        tally.count(&line, &verdict);
        if tally.asked.is_multiple_of(SHOWN_EVERY) {
            bar.set_position(log.read());
            bar.set_message(format!("{} asked, {} refused", number(tally.asked), number(tally.refused)));
        }
    }
    world.end().await
}

/// How far it has come, on a terminal.
fn bar(size: Option<u64>) -> ProgressBar {
    let (bar, form) = match size {
        Some(size) => (ProgressBar::new(size), "{bar:24.cyan/blue} {percent}% {msg}"),
        None => (ProgressBar::no_length(), "{spinner} {msg}"),
    };
    // A form that is wrong is the usual one.
    bar.with_style(ProgressStyle::with_template(form).unwrap_or_else(|_| ProgressStyle::default_bar()))
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

fn told(tally: &Tally) -> Answer {
    let rows = tally.rows();
    let answer = Answer::new(codec::tally(tally, &rows));
    let (Some(first), Some(last)) = (tally.first, tally.last) else {
        return answer.line("the log is empty");
    };
    let invalid = if tally.invalid > 0 { format!(", {} invalid", tally.invalid) } else { String::new() };
    let own = if tally.own_limits > 0 {
        format!(", {} with limits of their own", tally.own_limits)
    } else {
        String::new()
    };
    let sum = format!(
        "{} asked from {first} to {last}: {} granted, {} refused{invalid}{own}",
        tally.asked, tally.granted, tally.refused
    );
    let answer = answer.line(sum);
    if tally.refused == 0 {
        return answer;
    }
    let mut table = Table::new([
        "ENTITY",
        "RESOURCE",
        "LIMIT",
        ">ASKED",
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
    let answer = answer.table(table).exit(Exit::Refused);
    match refused.len().saturating_sub(ROWS_SHOWN) {
        0 => answer,
        more => answer.line(format!("and {more} more: all are in --json")),
    }
}

fn cells(key: &tally::Key, row: &Row) -> Vec<String> {
    let [entity, resource, limit] = key.words();
    vec![
        shown(entity),
        shown(resource),
        shown(limit),
        row.asked.to_string(),
        row.granted.to_string(),
        row.refused.to_string(),
        row.first.map(|at| at.to_string()).unwrap_or_default(),
        row.longest.words(),
        row.by.clone(),
    ]
}
