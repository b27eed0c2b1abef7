//! `tidegate acquire`: draw units, or hold them while a command runs.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::time::Duration;

use clap::Args;
use tidegate::{EntityId, ResourceName, Settled, Subject};
use tokio::process::Child;
use tokio::time::{MissedTickBehavior, interval};

use crate::answer::Answer;
use crate::backend::{Ask, Backend, Granted, Hold};
use crate::failure::{Exit, Failure};
use crate::signals::Signals;
use crate::words::{self, Units};
use crate::{child, codec};

/// A lease is renewed so often before it would expire.
const RENEWALS: u32 = 3;

const HOW: &str = "\
Without a command the units are spent at once. Refused, it ends with 3, and
tells when to come back.

With a command after `--` a lease is held while it runs, and renewed. Then
  it ends with 0                   what was drawn is spent
  it ends otherwise, or is killed  all of it is given back
and this program ends as the command did:
  with its exit code
  128 and the number of a signal   the signal killed it
  127 or 126                       it is not there, or cannot be run
Signals that are sent to this program are passed on. Stdout is the command's,
with --json too.

Examples:
  tidegate acquire acme gpt-4 rpm=1 tpm=800
  tidegate acquire acme gpt-4 rpm=1 --within 30s -- ./call-the-model";

/// What to draw.
#[derive(Debug, Args)]
#[command(after_help = HOW)]
pub(crate) struct AcquireArgs {
    /// Who draws
    #[arg(value_parser = words::entity)]
    entity: EntityId,
    /// Of what
    #[arg(value_parser = words::resource)]
    resource: ResourceName,
    /// How much of which limit, such as tpm=800
    #[arg(required = true, value_name = "LIMIT=UNITS", value_parser = words::units)]
    cost: Vec<Units>,
    /// Wait for so long for what is short, such as 5s; without it, be refused at once
    #[arg(long, value_name = "SPAN", value_parser = words::span)]
    within: Option<Duration>,
    /// If this program is killed, the lease ends by itself after so long: from 1s to 24h
    #[arg(long, value_name = "SPAN", value_parser = deadline, default_value = "1m")]
    deadline: Duration,
    /// A command to run while the units are held
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn deadline(text: &str) -> Result<Duration, String> {
    let span = words::span(text)?;
    let bounds = Duration::from_secs(1)..=Duration::from_hours(24);
    if bounds.contains(&span) { Ok(span) } else { Err("it must be from 1s to 24h".to_owned()) }
}

pub(crate) async fn run(backend: impl Backend, args: AcquireArgs) -> Result<Answer, Failure> {
    let subject = Subject { entity: args.entity, resource: args.resource };
    let ask = Ask { subject, cost: args.cost, within: args.within, deadline: args.deadline };
    let mut signals = Signals::hear()?;
    let answer = if args.command.is_empty() {
        spend(&backend, &ask, &mut signals).await
    } else {
        hold(&backend, &ask, &args.command, &mut signals).await
    };
    // Whatever became of it: what is to be given back has arrived before we end.
    let unheard = backend.close().await;
    if unheard > 0 {
        warn("the end was not heard of: what may have been given is held until its deadline");
    }
    answer
}

async fn spend(backend: &impl Backend, ask: &Ask, signals: &mut Signals) -> Result<Answer, Failure> {
    let granted = tokio::select! {
        // What is done counts, though a signal has come too.
        biased;
        answer = backend.spend(ask) => answer?,
        heard = signals.next() => return Ok(Answer::silent(child::exit_by(heard))),
    };
    let cost: Vec<String> = ask.pairs().iter().map(|(limit, units)| format!("{limit}={units}")).collect();
    let without = match granted {
        Granted::ByStore => "",
        Granted::WithoutStore => ", without the store, which is away",
    };
    let line = format!("granted to {}: {}{without}", ask.subject, cost.join(" "));
    Ok(Answer::new(codec::spent(ask, granted)).line(line))
}

async fn hold(
    backend: &impl Backend,
    ask: &Ask,
    command: &[OsString],
    signals: &mut Signals,
) -> Result<Answer, Failure> {
    let mut lease = tokio::select! {
        biased;
        heard = signals.next() => return Ok(Answer::silent(child::exit_by(heard))),
        lease = backend.acquire(ask) => lease?,
    };
    if lease.granted() == Granted::WithoutStore {
        warn("the store is away, and the policy lets the command run without it");
    }
    let mut running = match child::start(command) {
        Ok(running) => running,
        Err(failure) => {
            told(lease.cancel().await);
            return Err(failure);
        }
    };
    let exit = attend(&mut running, &mut lease, ask.deadline, signals).await?;
    told(if exit == Exit::Command(0) { lease.settle().await } else { lease.cancel().await });
    Ok(Answer::silent(exit))
}

/// Waits for the command, renews the lease and passes signals on.
async fn attend(
    running: &mut Child,
    lease: &mut impl Hold,
    deadline: Duration,
    signals: &mut Signals,
) -> Result<Exit, Failure> {
    let mut renewal = interval(deadline / RENEWALS);
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first one comes at once.
    renewal.tick().await;
    let mut is_warned = false;
    loop {
        tokio::select! {
            status = running.wait() => {
                let status = status.map_err(|error| Failure::failed(format!("the command was lost: {error}")))?;
                return Ok(child::exit_of(status));
            }
            heard = signals.next() => child::pass_on(running, heard),
            _ = renewal.tick() => {
                if let Err(failure) = lease.renew(deadline).await && !is_warned {
                    is_warned = true;
                    warn(&format!("the lease is not renewed, and the command goes on: {}", failure.what));
                }
            }
        }
    }
}

/// An ending that the store did not do is told; the command has ended as it has.
fn told(ended: Result<Settled, Failure>) {
    if let Err(failure) = ended {
        warn(&format!("the lease has not ended as it should: {}", failure.what));
    }
}

/// Tells on stderr, which the command has too.
fn warn(what: &str) {
    // Where it is gone there is nobody left to tell.
    drop(writeln!(io::stderr(), "tidegate: {what}"));
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use tokio::process::{ChildStdin, Command};

    use super::*;

    /// A lease whose command ends with the third renewal.
    struct Renewed {
        command: Option<ChildStdin>,
        renewals: u32,
    }

    impl Hold for Renewed {
        fn granted(&self) -> Granted {
            Granted::ByStore
        }

        async fn renew(&mut self, span: Duration) -> Result<(), Failure> {
            assert_eq!(span, Duration::from_mins(1));
            self.renewals += 1;
            if self.renewals == 3 {
                self.command = None;
            }
            // Those that fail are tried again.
            if self.renewals == 1 { Err(Failure::failed("away")) } else { Ok(()) }
        }

        async fn settle(&mut self) -> Result<Settled, Failure> {
            Ok(Settled::Now)
        }

        async fn cancel(&mut self) -> Result<Settled, Failure> {
            Ok(Settled::Now)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_renewed_for_as_long_as_its_command_runs() {
        let mut running = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lease = Renewed { command: running.stdin.take(), renewals: 0 };
        let mut signals = Signals::hear().unwrap();
        let exit = attend(&mut running, &mut lease, Duration::from_mins(1), &mut signals).await.unwrap();
        assert_eq!(exit, Exit::Command(0));
        assert!(lease.renewals >= 3, "{}", lease.renewals);
    }

    #[test]
    fn a_deadline_has_bounds() {
        assert_eq!(deadline("90s"), Ok(Duration::from_secs(90)));
        for bad in ["999ms", "25h"] {
            assert_eq!(deadline(bad), Err("it must be from 1s to 24h".to_owned()));
        }
        assert!(deadline("5").unwrap_err().starts_with("it is a number and a unit"));
    }
}
