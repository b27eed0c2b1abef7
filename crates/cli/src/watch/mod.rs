//! `tidegate watch`: what happens to limits, live in a terminal.
//!
//! `source → model → view`. A source ([`remote`] or [`local`]) tells what it sees, the [`model`] takes it in and does what
//! keys say, the [`view`] draws it; all but the sources and the [`screen`] is pure. This file owns the loop.

mod codec;
mod lines;
mod local;
mod model;
#[cfg(test)]
mod model_tests;
mod rates;
mod remote;
mod screen;
mod subjects;
mod view;
#[cfg(test)]
mod view_tests;
mod words;

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use clap::Args;
use tidegate::{EntityId, Subject};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::answer::{Answer, Format, Table, Tint};
use crate::backend::Backend;
use crate::child;
use crate::failure::{Exit, Failure};
use crate::remote::Remote;
use crate::signals::Signals;
use crate::words::shown;
use local::Found;
use model::{Flow, Health, Kind, Model, Update};
use remote::{Focus, now};
use screen::{Screen, Typed};
use subjects::Level;
use view::Theme;

/// What was told and is not taken in yet; a source that tells more waits.
const UPDATES_MAX: usize = 1_024;
/// The screen is drawn at most so often, but for keys.
const DRAWN_EVERY: Duration = Duration::from_millis(100);

const KEYS: &str = "\
Keys:
  /            only names that hold a text; Enter keeps it, Esc drops it
  s            sort by count, speed, last, name
  p            pause what is shown, and go on; nothing is missed meanwhile
  arrows, j k  select whose levels are shown
  ?            help
  q, Esc       quit, or Ctrl-C; Esc first drops a filter
  Ctrl-Z       back to the shell, until `fg`
A server (--server) tells decisions as they are made. A store (--store)
tells none: its levels are looked at again and again.
A connection that is lost is made again. A token that is good no more ends
it with 1, a server or a store that is not there at the start with 4.";

/// What to watch.
#[derive(Debug, Args)]
#[command(after_help = KEYS)]
pub(crate) struct WatchArgs {
    /// Only this entity; at a store, one that need not be written there
    #[arg(value_parser = crate::words::entity)]
    entity: Option<EntityId>,
    /// Look once, and print a table
    #[arg(long)]
    once: bool,
    /// How often to look, from 100ms to 1m
    #[arg(long, value_name = "SPAN", default_value = "1s", value_parser = every)]
    every: Duration,
}

fn every(text: &str) -> Result<Duration, String> {
    let bounds = Duration::from_millis(100)..=Duration::from_mins(1);
    let span = crate::words::span(text).ok().filter(|span| bounds.contains(span));
    span.ok_or_else(|| "it must be from 100ms to 1m".to_owned())
}

/// Watches a server.
pub(crate) async fn at_server(args: WatchArgs, server: Remote, format: Format) -> Result<Answer, Failure> {
    if args.once {
        return once_at_server(&server, args.entity.as_ref()).await;
    }
    let place = server.client().url().to_owned();
    let model = Model::new(Kind::Server, &place).only(args.entity.as_ref());
    let focus = Focus { entity: args.entity, every: args.every };
    let source = async |tell, wanted| remote::run(&server, focus, wanted, tell).await;
    watched(model, format, source).await
}

/// Watches a store.
pub(crate) async fn at_store(
    args: WatchArgs,
    store: impl Backend,
    place: String,
    format: Format,
) -> Result<Answer, Failure> {
    if args.once {
        return once_at_store(&store, args.entity.as_ref()).await;
    }
    let model = Model::new(Kind::Store, &place).only(args.entity.as_ref());
    let focus = Focus { entity: args.entity, every: args.every };
    let source = async |tell, _| local::run(&store, focus, tell).await;
    watched(model, format, source).await
}

async fn watched(
    model: Model,
    format: Format,
    source: impl AsyncFnOnce(mpsc::Sender<Update>, watch::Receiver<Option<Subject>>) -> Failure,
) -> Result<Answer, Failure> {
    let is_coloured = match format {
        Format::Json => return lines::written(source).await,
        Format::Text { is_coloured } => is_coloured,
    };
    if !io::stdout().is_terminal() {
        let what = "stdout is no terminal, and a live view needs one";
        return Err(Failure::usage(what)
            .next("say --json for a line for each event, or --once for one look as a table"));
    }
    let (tell, updates) = mpsc::channel(UPDATES_MAX);
    let (want, wanted) = watch::channel(None);
    // Before the terminal is taken: from then on no signal may end us without giving it back.
    let signals = Signals::hear()?;
    let screen = Screen::open(Theme { is_coloured })?;
    tokio::select! {
        failure = source(tell, wanted) => Err(failure),
        ended = show(screen, model, updates, want, signals) => ended,
    }
}

/// Shows what is told, and does what is typed.
async fn show(
    mut screen: Screen,
    mut model: Model,
    mut updates: mpsc::Receiver<Update>,
    want: watch::Sender<Option<Subject>>,
    mut signals: Signals,
) -> Result<Answer, Failure> {
    let mut typed = screen::typed()?;
    let mut ticks = interval(DRAWN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut is_changed, mut drawn_at) = (true, 0);
    loop {
        tokio::select! {
            heard = signals.next() => return Ok(Answer::silent(child::exit_by(heard))),
            typed = typed.recv() => {
                match typed {
                    Some(Typed::Key(key)) => match model.key(key, now()) {
                        Flow::On => {}
                        Flow::Quit => return Ok(Answer::silent(Exit::Done)),
                        Flow::Suspend => screen.suspend()?,
                    },
                    Some(Typed::Stopped) => screen.suspend()?,
                    Some(Typed::Resized) => {}
                    Some(Typed::Gone(error)) => {
                        return Err(Failure::failed(format!("the terminal has gone: {error}")));
                    }
                    None => return Err(Failure::failed("keys are heard no more")),
                }
                screen.draw(&model, now())?;
            }
            Some(update) = updates.recv() => {
                // There may be thousands in a second: they are taken in, and looked at with the next tick.
                model.apply(update, now());
                is_changed = true;
                continue;
            }
            _ = ticks.tick() => {
                let second = now().as_micros() / 1_000_000;
                if !is_changed && second == drawn_at {
                    continue;
                }
                screen.draw(&model, now())?;
                (is_changed, drawn_at) = (false, second);
            }
        }
        // After a key and a tick, and not after each event: to know it, all rows are sorted.
        let wanted = model.wanted(now());
        want.send_if_modified(|want| {
            let is_other = *want != wanted;
            *want = wanted;
            is_other
        });
    }
}

async fn once_at_server(server: &Remote, entity: Option<&EntityId>) -> Result<Answer, Failure> {
    let snapshot = server.client().snapshot().await?;
    // A store that is away is part of what is seen.
    let health = remote::health(server).await?;
    let mut found = std::collections::BTreeMap::new();
    if let (Some(entity), Health::Good { .. }) = (entity, &health) {
        remote::grouped(server.balances_of_entity(entity).await?, &mut found);
    }
    let subjects: Vec<(Subject, Vec<Level>)> = found.into_iter().collect();
    let totals = remote::totals(&snapshot);
    let decisions = format!(
        "decisions  {} granted, {} refused, {} without the store, since {}",
        totals.granted, totals.refused, totals.degraded, totals.up_since
    );
    let leases = format!(
        "leases     {} open, {} waiting, {} expired, {} unsettled",
        totals.open_leases, totals.waiting, totals.expired, totals.unsettled
    );
    let answer = Answer::new(codec::snapshot(&snapshot, &health, &subjects));
    let answer = answer.line(decisions).line(leases).line(store_line(&health));
    Ok(if subjects.is_empty() { answer } else { answer.table(table(&subjects)) })
}

async fn once_at_store(store: &impl Backend, entity: Option<&EntityId>) -> Result<Answer, Failure> {
    let Found { subjects, has_more, health } = local::look(store, entity).await?;
    let answer = Answer::new(codec::looked(&health, &subjects, has_more)).line(store_line(&health));
    let answer = if subjects.is_empty() {
        answer.line("nothing was drawn by anybody who is written in the store")
    } else {
        answer.table(table(&subjects))
    };
    Ok(if has_more {
        answer.line(format!("there are more than {} entities: name one", local::ENTITIES_MAX))
    } else {
        answer
    })
}

fn store_line(health: &Health) -> String {
    match health {
        Health::Good { engine, version, took } => {
            let millis = took.as_secs_f64() * 1_000.0;
            format!("store      {}, answers in {millis:.1} ms, {version} changes", shown(engine))
        }
        Health::Away { why } => format!("store      away: {}", shown(why)),
    }
}

fn table(subjects: &[(Subject, Vec<Level>)]) -> Table {
    let mut table = Table::new(["ENTITY", "RESOURCE", "LIMIT", ">THERE", ">BURST", "RATE", ">TAKEN"]);
    for (subject, levels) in subjects {
        for level in levels {
            let cells = [
                subject.entity.to_string(),
                subject.resource.to_string(),
                level.limit.clone(),
                level.available.to_string(),
                level.burst.to_string(),
                format!("{}/{}", level.amount, humantime::format_duration(level.period)),
                level.consumed.to_string(),
            ];
            table.tinted(if level.available > 0 { Tint::Plain } else { Tint::Bad }, cells);
        }
    }
    table
}
