//! `tidegate aggregate`: what leases have used is counted by the stream of a DynamoDB table.

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tidegate::store::{AggregateOptions, Aggregated, Aggregator, Since};
use tokio::time::{MissedTickBehavior, interval};

use crate::answer::{Answer, Format};
use crate::child;
use crate::codec;
use crate::failure::Failure;
use crate::place::{Opened, Writes, open_store};
use crate::signals::{Heard, Signals};

const HOW: &str = "\
Only a table of DynamoDB needs it, and `tidegate serve` does it by itself.
Any number may run at once, now and then or always: nothing is counted twice.
The engine lets two read a stream at a time without slowing each other down.

The first SIGINT or SIGTERM: what it has heard of is counted, and it ends.
The second: it ends at once.

With --json it writes a line when something has changed, each second at most:
  {\"counted\":12,\"errors\":0,\"is_caught_up\":true,\"lag\":0.0,\"lost\":0, ...}";

/// How often is told how far it has come.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// How to count.
#[derive(Debug, Args)]
#[command(after_help = HOW)]
pub(crate) struct AggregateArgs {
    /// Count everything that is there, and end
    #[arg(long)]
    once: bool,
    /// From where on the stream is read; what was there before is found in either case
    #[arg(long, value_enum, value_name = "PLACE", default_value_t = FromArg::Now)]
    from: FromArg,
}

/// A place in a stream.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum FromArg {
    /// What comes from now on
    Now,
    /// The oldest record that there is, at most a day old
    Oldest,
}

/// Counts until it is done, or a signal stops it.
pub(crate) async fn run(
    args: &AggregateArgs,
    store: Option<String>,
    patience: Duration,
    format: Format,
) -> Result<Answer, Failure> {
    let opened = open_store(store, Writes::AsSaid, Some(patience)).await?;
    let since = match args.from {
        FromArg::Now => Since::Now,
        FromArg::Oldest => Since::Oldest,
    };
    let options = AggregateOptions { since, ..AggregateOptions::default() };
    let Some(aggregator) = opened.store.aggregator(&options) else {
        let what = format!("`{}` counts usage as leases end: there is nothing to aggregate", opened.url);
        return Err(Failure::usage(what).next("name a table with --store dynamodb://TABLE?region=REGION"));
    };
    // Before anything is read: from then on a signal means to end as it should.
    let mut signals = Signals::hear()?;
    let teller = Teller::new(format, args.once);
    teller.begin(&opened);
    let ended = if args.once {
        tokio::select! {
            ended = aggregator.catch_up() => ended.map(|()| None),
            heard = ending(&mut signals) => Ok(Some(heard)),
        }
    } else {
        follow(&aggregator, &mut signals, teller).await
    };
    let stats = aggregator.stats();
    teller.end();
    opened.close().await;
    match ended? {
        // Whoever wanted to be done is not.
        Some(heard) => Ok(Answer::silent(child::exit_by(heard))),
        None if args.once || !matches!(format, Format::Json) => {
            Ok(Answer::new(codec::aggregated(&stats)).line(line(&stats)))
        }
        None => Ok(Answer::raw(json_line(&stats).into_bytes())),
    }
}

/// Follows the stream, and tells how far it has come. Answers the signal that ended it at once, if one did.
async fn follow(
    aggregator: &Arc<dyn Aggregator>,
    signals: &mut Signals,
    teller: Teller,
) -> Result<Option<Heard>, tidegate::StoreError> {
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let mut stop = Some(stop);
    let mut running = aggregator.run(Box::pin(async { drop(stopped.await) }));
    let mut ticks = interval(TOLD_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = None;
    loop {
        tokio::select! {
            ended = &mut running => return ended.map(|()| None),
            heard = ending(signals) => match stop.take() {
                Some(stop) => drop(stop),
                None => return Ok(Some(heard)),
            },
            _ = ticks.tick() => {
                let stats = aggregator.stats();
                teller.progress(&stats, told.as_ref());
                told = Some(stats);
            }
        }
    }
}

/// The next signal that asks to end.
async fn ending(signals: &mut Signals) -> Heard {
    loop {
        let heard = signals.next().await;
        if heard.is_to_end() {
            return heard;
        }
    }
}

/// Who is told how far it has come.
#[derive(Debug, Clone, Copy)]
enum Teller {
    /// A person at a terminal, on one line of stderr that is written anew.
    Terminal,
    /// A program: a line of JSON for each change.
    Lines,
    /// Nobody.
    Nobody,
}

impl Teller {
    fn new(format: Format, is_once: bool) -> Self {
        match format {
            Format::Json if is_once => Self::Nobody,
            Format::Json => Self::Lines,
            Format::Text { .. } if io::stderr().is_terminal() && !is_once => Self::Terminal,
            Format::Text { .. } => Self::Nobody,
        }
    }

    fn begin(self, opened: &Opened) {
        if matches!(self, Self::Terminal) {
            say(&mut io::stderr(), &format!("follows {}, namespace {}\n", opened.url, opened.namespace));
        }
    }

    fn progress(self, stats: &Aggregated, told: Option<&Aggregated>) {
        match self {
            Self::Terminal => say(&mut io::stderr(), &format!("\r\x1b[K{}", line(stats))),
            Self::Lines if told != Some(stats) => say(&mut io::stdout(), &json_line(stats)),
            Self::Lines | Self::Nobody => {}
        }
    }

    fn end(self) {
        if matches!(self, Self::Terminal) {
            say(&mut io::stderr(), "\r\x1b[K");
        }
    }
}

/// A reader that has gone away is no failure.
fn say(to: &mut impl io::Write, text: &str) {
    drop(to.write_all(text.as_bytes()).and_then(|()| to.flush()));
}

fn json_line(stats: &Aggregated) -> String {
    codec::aggregated(stats).to_string() + "\n"
}

/// How far it has come, for people.
fn line(stats: &Aggregated) -> String {
    let Aggregated { counted, records, lag, errors, lost, .. } = *stats;
    let behind = if stats.is_caught_up {
        "caught up".to_owned()
    } else {
        format!("{:.1} s behind", lag.as_secs_f64())
    };
    let trouble = if errors > 0 { format!(", tried again {errors} times") } else { String::new() };
    let lost = if lost > 0 { format!(", {lost} expired uncounted") } else { String::new() };
    format!("{counted} leases counted, {records} records read, {behind}{trouble}{lost}")
}
