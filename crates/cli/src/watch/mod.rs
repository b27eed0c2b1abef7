//! `tidegate watch`: a live view of limits in a terminal.
//!
//! `source → model → view`. A source ([`remote`] or [`local`]) sends updates, the [`model`] applies them and
//! handles keys, and the [`view`] draws it. All but the sources and the [`screen`] is pure. This file has the
//! event loop.

mod codec;
mod columns;
mod json_lines;
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

use std::io::{self, IsTerminal as _};
use std::time::Duration;
use tidegate_core::duration::Period;

use clap::Args;
use tidegate::{EntityId, Subject};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::backend::Backend;
use crate::child;
use crate::failure::{Exit, Failure};
use crate::format;
use crate::output::{Format, Output, Table, Tint};
use crate::parse;
use crate::remote::Remote;
use crate::signals::Signals;
use local::StoreScan;
use model::{Flow, Health, Kind, Model, Update};
use remote::{Focus, now};
use screen::{Screen, TerminalEvent};
use subjects::Level;
use view::Theme;

/// Capacity of the channel of updates; a source that is ahead waits.
const UPDATES_MAX: usize = 1_024;
/// Minimum interval between redraws, except after keys.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

const KEYS: &str = "\
Keys:
  /            filter by name; Enter keeps the filter, Esc clears it
  s            sort by count, speed, last, name
  p            pause or resume the display; no event is lost
  arrows, j k  select the row whose levels are shown
  ?            help
  q, Esc       quit, or Ctrl-C; Esc clears the filter first
  Ctrl-Z       suspend, until `fg`
  A server (--server) sends decisions as they are made. A store (--store) has no
  events: its levels are polled.
  A lost connection is retried. The exit code is 1 if the token becomes invalid,
  and 4 if the server or store is unavailable at the start.";

/// Arguments of `watch`.
#[derive(Debug, Args)]
#[command(after_help = KEYS)]
pub(crate) struct WatchArgs {
    /// Watch only this entity; at a store, it needs no record
    #[arg(value_parser = parse::entity)]
    entity: Option<EntityId>,
    /// Print a table once, and exit
    #[arg(long)]
    once: bool,
    /// Interval between updates, from 100ms to 1m
    #[arg(long, value_name = "SPAN", default_value = "1s", value_parser = every)]
    every: Duration,
}

fn every(text: &str) -> Result<Duration, String> {
    let bounds = Duration::from_millis(100)..=Duration::from_mins(1);
    let span = parse::duration(text).ok().filter(|span| bounds.contains(span));
    span.ok_or_else(|| "must be from 100ms to 1m".to_owned())
}

/// Watches a server.
pub(crate) async fn at_server(args: WatchArgs, server: Remote, format: Format) -> Result<Output, Failure> {
    if args.once {
        return once_at_server(&server, args.entity.as_ref()).await;
    }
    let place = server.client().url().to_owned();
    let model = Model::new(Kind::Server, &place).only(args.entity.as_ref());
    let focus = Focus { entity: args.entity, every: args.every };
    let source = async |sender, wanted| remote::run(&server, focus, wanted, sender).await;
    run_live(model, format, source).await
}

/// Watches a store.
pub(crate) async fn at_store(
    args: WatchArgs,
    store: impl Backend,
    place: String,
    format: Format,
) -> Result<Output, Failure> {
    if args.once {
        return once_at_store(&store, args.entity.as_ref()).await;
    }
    let model = Model::new(Kind::Store, &place).only(args.entity.as_ref());
    let focus = Focus { entity: args.entity, every: args.every };
    let source = async |sender, _| local::run(&store, focus, sender).await;
    run_live(model, format, source).await
}

async fn run_live(
    model: Model,
    format: Format,
    source: impl AsyncFnOnce(mpsc::Sender<Update>, watch::Receiver<Option<Subject>>) -> Failure,
) -> Result<Output, Failure> {
    let is_coloured = match format {
        Format::Json => return json_lines::run(source).await,
        Format::Text { is_coloured } => is_coloured,
    };
    if !io::stdout().is_terminal() {
        let what = "stdout is not a terminal, which a live view requires";
        return Err(Failure::usage(what).next("use --json for one line per event, or --once for a table"));
    }
    let (sender, updates) = mpsc::channel(UPDATES_MAX);
    let (want, wanted) = watch::channel(None);
    // Before the terminal is set up: from then on, no signal may end the program without restoring it.
    let signals = Signals::install()?;
    let screen = Screen::open(Theme { is_coloured })?;
    tokio::select! {
        failure = source(sender, wanted) => Err(failure),
        ended = event_loop(screen, model, updates, want, signals) => ended,
    }
}

/// The event loop: applies updates, handles keys and draws the screen.
async fn event_loop(
    mut screen: Screen,
    mut model: Model,
    mut updates: mpsc::Receiver<Update>,
    want: watch::Sender<Option<Subject>>,
    mut signals: Signals,
) -> Result<Output, Failure> {
    let mut terminal_events = screen::terminal_events()?;
    let mut ticks = interval(REDRAW_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut is_changed, mut drawn_at) = (true, 0);
    loop {
        tokio::select! {
            signal = signals.next() => return Ok(Output::silent(child::exit_by(signal))),
            event = terminal_events.recv() => {
                match event {
                    Some(TerminalEvent::Key(key)) => match model.key(key, now()) {
                        Flow::Continue => {}
                        Flow::Quit => return Ok(Output::silent(Exit::Done)),
                        Flow::Suspend => screen.suspend()?,
                    },
                    Some(TerminalEvent::Stopped) => screen.suspend()?,
                    Some(TerminalEvent::Resized) => {}
                    Some(TerminalEvent::Closed(error)) => {
                        return Err(Failure::failed(format!("the terminal was closed: {error}")));
                    }
                    None => return Err(Failure::failed("the keyboard thread has ended")),
                }
                screen.draw(&model, now())?;
            }
            Some(update) = updates.recv() => {
                // There may be thousands per second: they are drawn at the next tick.
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
        // Only after keys and ticks, since finding the selected row sorts all rows.
        let wanted = model.wanted(now());
        want.send_if_modified(|want| {
            let is_other = *want != wanted;
            *want = wanted;
            is_other
        });
    }
}

async fn once_at_server(server: &Remote, entity: Option<&EntityId>) -> Result<Output, Failure> {
    let snapshot = server.client().snapshot().await?;
    // An unavailable store is part of the output.
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
    let output = Output::new(codec::snapshot(&snapshot, &health, &subjects));
    let output = output.line(decisions).line(leases).line(store_line(&health));
    Ok(if subjects.is_empty() { output } else { output.table(table(&subjects)) })
}

async fn once_at_store(store: &impl Backend, entity: Option<&EntityId>) -> Result<Output, Failure> {
    let StoreScan { subjects, has_more, health } = local::scan(store, entity).await?;
    let output = Output::new(codec::scan(&health, &subjects, has_more)).line(store_line(&health));
    let output = if subjects.is_empty() {
        output.line("no entity in the store has drawn units")
    } else {
        output.table(table(&subjects))
    };
    Ok(if has_more {
        output.line(format!("there are more than {} entities: choose one", local::ENTITIES_MAX))
    } else {
        output
    })
}

fn store_line(health: &Health) -> String {
    match health {
        Health::Good { engine, version, took } => {
            let (engine, latency) = (format::escape(engine), format::latency(*took));
            format!("store      {engine}, latency {latency}, {version} changes")
        }
        Health::Away { why } => format!("store      unavailable: {}", format::escape(why)),
    }
}

fn table(subjects: &[(Subject, Vec<Level>)]) -> Table {
    let mut table = Table::new(["ENTITY", "RESOURCE", "LIMIT", ">AVAILABLE", ">BURST", "RATE", ">CONSUMED"]);
    for (subject, levels) in subjects {
        for level in levels {
            let [entity, resource] = format::bucket(subject);
            let cells = [
                entity,
                resource,
                level.limit.clone(),
                level.available.to_string(),
                level.burst.to_string(),
                format!("{}/{}", level.amount, Period(level.period)),
                level.consumed.to_string(),
            ];
            table.tinted(if level.available > 0 { Tint::Plain } else { Tint::Bad }, cells);
        }
    }
    table
}
