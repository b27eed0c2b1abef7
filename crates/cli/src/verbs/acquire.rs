//! `tidegate acquire`: draws units, or holds a lease while a command runs.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::time::Duration;

use clap::Args;
use tidegate::{EntityId, ResourceName, SettleStatus, Subject};
use tokio::process::Child;
use tokio::time::{MissedTickBehavior, interval};

use crate::backend::{AcquireRequest, Backend, Grant, LeaseHandle};
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::parse::{self, Units};
use crate::signals::Signals;
use crate::{child, codec};

/// Renewals per deadline of a lease.
const RENEWALS: u32 = 3;

const HELP: &str = "\
Without a command, the units are spent at once. If a limit refuses, the exit
code is 3, and the error says when to retry.

With a command after `--`, a lease is held and renewed while the command runs:
  it exits with 0                  the units are spent
  it fails or is killed            the units are returned
The exit code is that of the command:
  its own exit code                it exited
  128 plus the signal's number     a signal killed it
  127 or 126                       it was not found, or cannot be run
Signals are forwarded to the command. Stdout belongs to the command, even with
--json.

Examples:
  tidegate acquire acme gpt-4 rpm=1 tpm=800
  tidegate acquire acme gpt-4 rpm=1 --within 30s -- ./call-the-model";

/// Arguments of `acquire`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct AcquireArgs {
    /// The entity that draws
    #[arg(value_parser = parse::entity)]
    entity: EntityId,
    /// The resource to draw from
    #[arg(value_parser = parse::resource)]
    resource: ResourceName,
    /// Units to draw from each limit, such as tpm=800
    #[arg(required = true, value_name = "LIMIT=UNITS", value_parser = parse::units)]
    cost: Vec<Units>,
    /// Wait at most this long for the units, such as 5s [default: do not wait]
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    within: Option<Duration>,
    /// End the lease after this time if this program is killed, from 1s to 24h
    #[arg(long, value_name = "SPAN", value_parser = deadline, default_value = "1m")]
    deadline: Duration,
    /// Run this command while the units are held
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn deadline(text: &str) -> Result<Duration, String> {
    let span = parse::duration(text)?;
    let bounds = Duration::from_secs(1)..=Duration::from_hours(24);
    if bounds.contains(&span) { Ok(span) } else { Err("must be from 1s to 24h".to_owned()) }
}

pub(crate) async fn run(backend: impl Backend, args: AcquireArgs) -> Result<Output, Failure> {
    let subject = Subject { entity: args.entity, resource: args.resource };
    let request = AcquireRequest { subject, cost: args.cost, within: args.within, deadline: args.deadline };
    let mut signals = Signals::install()?;
    let output = if args.command.is_empty() {
        spend(&backend, &request, &mut signals).await
    } else {
        hold(&backend, &request, &args.command, &mut signals).await
    };
    // In every case: returned units must reach the store before this program exits.
    let unconfirmed = backend.close().await;
    if unconfirmed > 0 {
        warn("the end of the lease was not confirmed: its units may stay held until its deadline");
    }
    output
}

async fn spend(
    backend: &impl Backend,
    request: &AcquireRequest,
    signals: &mut Signals,
) -> Result<Output, Failure> {
    let grant = tokio::select! {
        // A completed draw is reported, even if a signal has arrived too.
        biased;
        grant = backend.spend(request) => grant?,
        signal = signals.next() => return Ok(Output::silent(child::exit_by(signal))),
    };
    let cost: Vec<String> = request.pairs().iter().map(|(limit, units)| format!("{limit}={units}")).collect();
    let without = match grant {
        Grant::ByStore => "",
        Grant::WithoutStore => ", without the store, which is unavailable",
    };
    let line = format!("granted to {}: {}{without}", request.subject, cost.join(" "));
    Ok(Output::new(codec::spent(request, grant)).line(line))
}

async fn hold(
    backend: &impl Backend,
    request: &AcquireRequest,
    command: &[OsString],
    signals: &mut Signals,
) -> Result<Output, Failure> {
    let mut lease = tokio::select! {
        biased;
        signal = signals.next() => return Ok(Output::silent(child::exit_by(signal))),
        lease = backend.acquire(request) => lease?,
    };
    if lease.grant() == Grant::WithoutStore {
        warn("the store is unavailable, and the policy lets the command run without it");
    }
    let mut running = match child::start(command) {
        Ok(running) => running,
        Err(failure) => {
            warn_if_failed(lease.cancel().await);
            return Err(failure);
        }
    };
    let exit = supervise(&mut running, &mut lease, request.deadline, signals).await?;
    warn_if_failed(if exit == Exit::Command(0) { lease.settle().await } else { lease.cancel().await });
    Ok(Output::silent(exit))
}

/// Waits for the command, while renewing the lease and forwarding signals.
async fn supervise(
    running: &mut Child,
    lease: &mut impl LeaseHandle,
    deadline: Duration,
    signals: &mut Signals,
) -> Result<Exit, Failure> {
    let mut renewal = interval(deadline / RENEWALS);
    renewal.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick completes at once.
    renewal.tick().await;
    let mut is_warned = false;
    loop {
        tokio::select! {
            status = running.wait() => {
                let status = status.map_err(|error| Failure::failed(format!("the exit status of the command is unknown: {error}")))?;
                return Ok(child::exit_of(status));
            }
            signal = signals.next() => child::forward(running, signal),
            _ = renewal.tick() => {
                if let Err(failure) = lease.renew(deadline).await && !is_warned {
                    is_warned = true;
                    warn(&format!("the lease was not renewed, and the command continues: {}", failure.what));
                }
            }
        }
    }
}

/// Warns if the lease could not be ended. The exit code stays that of the command.
fn warn_if_failed(ended: Result<SettleStatus, Failure>) {
    if let Err(failure) = ended {
        warn(&format!("the lease could not be ended: {}", failure.what));
    }
}

/// Prints a warning to stderr, which the command shares.
fn warn(what: &str) {
    // If stderr is closed, the warning is lost.
    drop(writeln!(io::stderr(), "tidegate: {what}"));
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use tokio::process::{ChildStdin, Command};

    use super::*;

    /// A lease that ends its command at the third renewal.
    struct Renewed {
        command: Option<ChildStdin>,
        renewals: u32,
    }

    impl LeaseHandle for Renewed {
        fn grant(&self) -> Grant {
            Grant::ByStore
        }

        async fn renew(&mut self, span: Duration) -> Result<(), Failure> {
            assert_eq!(span, Duration::from_mins(1));
            self.renewals += 1;
            if self.renewals == 3 {
                self.command = None;
            }
            // A failed renewal is retried.
            if self.renewals == 1 { Err(Failure::failed("unavailable")) } else { Ok(()) }
        }

        async fn settle(&mut self) -> Result<SettleStatus, Failure> {
            Ok(SettleStatus::Now)
        }

        async fn cancel(&mut self) -> Result<SettleStatus, Failure> {
            Ok(SettleStatus::Now)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lease_is_renewed_while_its_command_runs() {
        let mut running = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lease = Renewed { command: running.stdin.take(), renewals: 0 };
        let mut signals = Signals::install().unwrap();
        let exit = supervise(&mut running, &mut lease, Duration::from_mins(1), &mut signals).await.unwrap();
        assert_eq!(exit, Exit::Command(0));
        assert!(lease.renewals >= 3, "{}", lease.renewals);
    }

    #[test]
    fn deadline_is_bounded() {
        assert_eq!(deadline("90s"), Ok(Duration::from_secs(90)));
        for bad in ["999ms", "25h"] {
            assert_eq!(deadline(bad), Err("must be from 1s to 24h".to_owned()));
        }
        assert!(deadline("5").unwrap_err().starts_with("expected a number and a unit"));
    }
}
