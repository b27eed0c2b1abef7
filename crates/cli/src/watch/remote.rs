//! A server as a source: its events as they come, and what it has counted, looked at again and again.
//!
//! Events have no numbers, so nobody can ask for those that were missed: what was refused while the connection was lost is
//! in the rates, which come from what the server has counted, and not among those who are limited.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::LazyLock;
use std::time::Duration;

use tidegate::{Balance, EntityId, Stamp, Subject};
use tidegate_client::{Backoff, Cause, ClientError, Event, Events, Jitter, Snapshot};
use tidegate_core::random::Random;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::model::{Health, Totals, Update};
use super::subjects::Level;
use crate::backend::Backend as _;
use crate::failure::{Exit, Failure};
use crate::remote::Remote;

/// Subjects of one entity that are looked at.
const SUBJECTS_MAX: usize = 100;

/// Between two looks at levels is at least so much time, unless looks are wanted more often: whoever is first in a table
/// changes with every event.
const LOOKS_APART: Duration = Duration::from_millis(250);

/// What to look at.
#[derive(Debug, Clone)]
pub(crate) struct Focus {
    /// Only at this one.
    pub(crate) entity: Option<EntityId>,
    pub(crate) every: Duration,
}

/// Why a connection has ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// It may come back.
    Lost(String),
    /// It will not: the token is not good, or may not.
    Denied(Failure),
}

impl From<ClientError> for Ended {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Unauthorized { .. } | ClientError::Forbidden { .. } => Self::Denied(error.into()),
            ClientError::Away(away) => Self::Lost(away.cause.to_string()),
            error => Self::Lost(error.to_string()),
        }
    }
}

impl From<Ended> for Failure {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Lost(why) => Self::new(Exit::Away, why),
            Ended::Denied(failure) => failure,
        }
    }
}

/// How far a server was reached.
#[derive(Debug, Default)]
struct Reached {
    /// It has said once what it has counted.
    ever: Cell<bool>,
    /// And on this connection.
    now: Cell<bool>,
}

/// Tells what happens until it cannot: a server that was never there, or one that lets the token in no more.
pub(crate) async fn run(
    server: &Remote,
    focus: Focus,
    wanted: watch::Receiver<Option<Subject>>,
    tell: mpsc::Sender<Update>,
) -> Failure {
    let backoff = Backoff::exponential(Duration::from_millis(250), Duration::from_secs(5));
    let backoff = backoff.jitter(Jitter::Full);
    let mut random = Random::seeded(seed());
    let (mut is_first, mut tries) = (true, 0);
    let reached = Reached::default();
    loop {
        let ended = match server.client().events().await {
            Ok(events) => {
                is_first = false;
                connected(server, events, &focus, wanted.clone(), &tell, &reached).await
            }
            Err(error) if is_first || is_final(&error, &reached) => return error.into(),
            Err(error) => error.into(),
        };
        // Not before it has answered: what only takes connections would be asked without end.
        if reached.now.take() {
            tries = 0;
        }
        match ended {
            Ended::Denied(failure) => return failure,
            Ended::Lost(why) => {
                if tell.send(Update::Lost { why }).await.is_err() {
                    return Failure::failed("nobody listens any more");
                }
            }
        }
        sleep(backoff.delay(tries, &mut random)).await;
        tries = tries.saturating_add(1);
    }
}

/// What answers as no server does, and never did otherwise, is none.
fn is_final(error: &ClientError, reached: &Reached) -> bool {
    !reached.ever.get() && matches!(error, ClientError::Garbled { .. })
}

/// Delays are spread by the time at which this began: it is no secret.
fn seed() -> u64 {
    wall().as_micros()
}

/// The time as it passes here: that of the clock when it was first asked for, and what has passed since. A clock that is set
/// changes no rate.
pub(crate) fn now() -> Stamp {
    static BEGAN: LazyLock<(Stamp, Instant)> = LazyLock::new(|| (wall(), Instant::now()));
    BEGAN.0 + BEGAN.1.elapsed()
}

/// The time by the clock of this machine.
pub(crate) fn wall() -> Stamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Stamp::ZERO + since.unwrap_or_default()
}

/// Tells what happens while the server is there.
async fn connected(
    server: &Remote,
    events: Events,
    focus: &Focus,
    wanted: watch::Receiver<Option<Subject>>,
    tell: &mpsc::Sender<Update>,
    reached: &Reached,
) -> Ended {
    let listening = listen(events, focus, tell, reached);
    let counting = count(server, focus, tell, reached);
    let looking = look(server, focus, wanted, tell);
    match tokio::try_join!(listening, counting, looking) {
        Err(ended) => ended,
        Ok(never) => match never.0 {},
    }
}

async fn send(tell: &mpsc::Sender<Update>, update: Update) -> Result<(), Ended> {
    // Whoever listened has ended, and everything with it.
    tell.send(update).await.map_err(|_| Ended::Lost("nobody listens any more".to_owned()))
}

async fn listen(
    mut events: Events,
    focus: &Focus,
    tell: &mpsc::Sender<Update>,
    reached: &Reached,
) -> Result<Infallible, Ended> {
    let mut unknown = 0;
    loop {
        let event = match events.next().await {
            Err(error) if is_final(&error, reached) => return Err(Ended::Denied(error.into())),
            heard => heard?,
        };
        let count = events.unknown() - unknown;
        if count > 0 {
            unknown += count;
            send(tell, Update::Unknown { count }).await?;
        }
        match event {
            Some(Event::Stopping) => return Err(Ended::Lost("the server is stopping".to_owned())),
            Some(event) if is_about(&event, focus.entity.as_ref()) => {
                send(tell, Update::Event(event)).await?;
            }
            Some(_) => {}
            None => return Err(Ended::Lost("the server has ended the connection".to_owned())),
        }
    }
}

/// Whether an event is about the one who is looked at, or about nobody.
fn is_about(event: &Event, entity: Option<&EntityId>) -> bool {
    match (event, entity) {
        (Event::Refused { entity, of, .. }, Some(wanted)) => entity.0 == *wanted || of.0 == *wanted,
        (Event::Degraded { entity, .. } | Event::RulesStale { entity, .. }, Some(wanted)) => {
            entity.0 == *wanted
        }
        _ => true,
    }
}

async fn count(
    server: &Remote,
    focus: &Focus,
    tell: &mpsc::Sender<Update>,
    reached: &Reached,
) -> Result<Infallible, Ended> {
    let mut ticks = interval(focus.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let snapshot = match server.client().snapshot().await {
            Ok(snapshot) => snapshot,
            Err(error) if is_final(&error, reached) => return Err(Ended::Denied(error.into())),
            Err(error) if is_end(&error) => return Err(error.into()),
            // It has said something, and goes on telling events: one that is busy is not away.
            Err(error) => {
                send(tell, Update::Silent { why: Failure::from(error).what }).await?;
                continue;
            }
        };
        reached.ever.set(true);
        reached.now.set(true);
        // Only now: a server that listens and does not answer is not there.
        send(tell, Update::Up).await?;
        send(tell, Update::Totals(totals(&snapshot))).await?;
    }
}

/// Whether an error says that there is no connection any more, or that none is allowed.
fn is_end(error: &ClientError) -> bool {
    match error {
        ClientError::Unauthorized { .. } | ClientError::Forbidden { .. } => true,
        ClientError::Away(away) => is_gone(&away.cause),
        _ => false,
    }
}

/// Whether nobody was there: what has said a status was.
const fn is_gone(cause: &Cause) -> bool {
    !matches!(cause, Cause::Status { .. })
}

/// What a snapshot has of what is shown.
pub(crate) fn totals(snapshot: &Snapshot) -> Totals {
    Totals {
        up_since: snapshot.up_since.0,
        granted: snapshot.granted,
        refused: snapshot.refused,
        degraded: snapshot.degraded,
        unsettled: snapshot.unsettled,
        expired: snapshot.expired_settled.saturating_add(snapshot.expired_returned),
        open_leases: snapshot.open_leases,
        waiting: snapshot.waiting,
        store_away: snapshot.store_away.map(tidegate_client::Seconds::as_duration),
    }
}

/// Looks at the store behind the server, and at the levels that are shown.
async fn look(
    server: &Remote,
    focus: &Focus,
    mut wanted: watch::Receiver<Option<Subject>>,
    tell: &mpsc::Sender<Update>,
) -> Result<Infallible, Ended> {
    let mut ticks = interval(focus.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => send(tell, Update::Store(health(server).await?)).await?,
            // Somebody has selected another: it is looked at now.
            changed = wanted.changed() => if changed.is_err() {
                return Err(Ended::Lost("nobody listens any more".to_owned()));
            },
        }
        let mut found = BTreeMap::new();
        if let Some(entity) = &focus.entity {
            // What cannot be had now is looked at again: how the store is, is told beside.
            grouped(server.balances_of_entity(entity).await.unwrap_or_default(), &mut found);
        }
        let subject = wanted.borrow_and_update().clone();
        if let Some(subject) = subject
            && let Some(levels) = levels_of(server, &subject).await
        {
            found.insert(subject, levels);
        }
        if focus.entity.is_some() {
            send(tell, Update::More { has_more: found.len() > SUBJECTS_MAX }).await?;
        }
        for (subject, levels) in found.into_iter().take(SUBJECTS_MAX) {
            send(tell, Update::Levels { subject, levels }).await?;
        }
        sleep(focus.every.min(LOOKS_APART)).await;
    }
}

/// The levels of what limits a subject, its parents' included. Where nothing is written that does, callers brought limits
/// with them, and those that they drew from are there.
async fn levels_of(server: &Remote, subject: &Subject) -> Option<Vec<Level>> {
    let lines = server.balances(subject).await.ok()?;
    if !lines.is_empty() {
        return Some(lines.iter().map(|line| Level::of(&line.balance, subject)).collect());
    }
    let mut found = BTreeMap::new();
    grouped(server.balances_of_entity(&subject.entity).await.ok()?, &mut found);
    found.remove(subject)
}

/// Balances by subject.
pub(crate) fn grouped(balances: Vec<Balance>, into: &mut BTreeMap<Subject, Vec<Level>>) {
    for balance in balances {
        let level = Level::of(&balance, &balance.subject);
        let levels = into.entry(balance.subject).or_default();
        if levels.iter().all(|other| other.limit != level.limit) {
            levels.push(level);
        }
    }
}

/// How the store behind the server is.
pub(crate) async fn health(server: &Remote) -> Result<Health, Ended> {
    let began = Instant::now();
    match server.client().status().await {
        Ok(status) => {
            Ok(Health::Good { engine: status.engine, version: status.version, took: began.elapsed() })
        }
        Err(error @ (ClientError::Unauthorized { .. } | ClientError::Forbidden { .. })) => Err(error.into()),
        Err(error) => Ok(Health::Away { why: Failure::from(error).what }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn garbled() -> ClientError {
        let (method, why) = ("GET".to_owned(), "it is a page".to_owned());
        ClientError::Garbled { method, route: "/v1/events", status: 200, why, retry_after: None }
    }

    #[test]
    fn a_busy_server_is_not_away_and_one_without_a_connection_is() {
        let busy = Cause::Status { status: 503, problem: None, retry_after: None };
        assert!(!is_gone(&busy));
        assert!(!is_end(&garbled()), "once it was there, what stands before it may say anything");
        assert!(is_gone(&Cause::Timeout(Duration::from_secs(1))));
        assert!(is_gone(&Cause::Cut("cut".into())));
        assert!(is_gone(&Cause::Connect("refused".into())));
    }

    #[test]
    fn what_answers_as_no_server_does_is_final_until_a_server_was_there() {
        let reached = Reached::default();
        assert!(is_final(&garbled(), &reached));
        reached.ever.set(true);
        assert!(!is_final(&garbled(), &reached));
    }
}
