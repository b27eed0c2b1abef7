//! A server as a source of updates: its event stream, and its counters by polling.
//!
//! Events have no sequence numbers, so missed ones cannot be requested again. Refusals during a lost
//! connection are in the rates, which come from the counters, but not in the table of subjects.

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

/// Maximum subjects of a watched entity.
const SUBJECTS_MAX: usize = 100;

/// Maximum upstreams that are sent.
const UPSTREAMS_MAX: usize = 100;

/// Minimum interval between readings of levels, unless polls are more frequent: the first row of the table
/// may change with every event.
const LEVELS_INTERVAL: Duration = Duration::from_millis(250);

/// What to watch.
#[derive(Debug, Clone)]
pub(crate) struct Focus {
    /// Only this entity.
    pub(crate) entity: Option<EntityId>,
    pub(crate) every: Duration,
}

/// Why a connection ended.
#[derive(Debug)]
pub(crate) enum Disconnect {
    /// A retry may succeed.
    Lost(String),
    /// The token is invalid or lacks the scope.
    Denied(Failure),
}

impl From<ClientError> for Disconnect {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Unauthorized { .. } | ClientError::Forbidden { .. } => Self::Denied(error.into()),
            ClientError::Unavailable(unavailable) => Self::Lost(unavailable.cause.to_string()),
            error => Self::Lost(error.to_string()),
        }
    }
}

impl From<Disconnect> for Failure {
    fn from(disconnect: Disconnect) -> Self {
        match disconnect {
            Disconnect::Lost(why) => Self::new(Exit::Unavailable, why),
            Disconnect::Denied(failure) => failure,
        }
    }
}

/// Whether the server has returned its counters.
#[derive(Debug, Default)]
struct Reachability {
    /// On any connection.
    ever: Cell<bool>,
    /// On this connection.
    now: Cell<bool>,
}

/// Sends updates until the server fails for good: it was never available, or it rejects the token.
pub(crate) async fn run(
    server: &Remote,
    focus: Focus,
    wanted: watch::Receiver<Option<Subject>>,
    sender: mpsc::Sender<Update>,
) -> Failure {
    let backoff = Backoff::exponential(Duration::from_millis(250), Duration::from_secs(5));
    let backoff = backoff.jitter(Jitter::Full);
    let mut random = Random::seeded(seed());
    let (mut is_first, mut tries) = (true, 0);
    let reached = Reachability::default();
    loop {
        let disconnect = match server.client().events().await {
            Ok(events) => {
                is_first = false;
                run_connection(server, events, &focus, wanted.clone(), &sender, &reached).await
            }
            Err(error) if is_first || is_final(&error, &reached) => return error.into(),
            Err(error) => error.into(),
        };
        // Reset only after a response: otherwise a host that only accepts connections would be retried
        // without backoff.
        if reached.now.take() {
            tries = 0;
        }
        match disconnect {
            Disconnect::Denied(failure) => return failure,
            Disconnect::Lost(why) => {
                if sender.send(Update::Lost { why }).await.is_err() {
                    return Failure::failed("the receiver was dropped");
                }
            }
        }
        sleep(backoff.delay(tries, &mut random)).await;
        tries = tries.saturating_add(1);
    }
}

/// Whether an error is final: an invalid response from an address that never returned a valid one.
fn is_final(error: &ClientError, reached: &Reachability) -> bool {
    !reached.ever.get() && matches!(error, ClientError::Garbled { .. })
}

/// The seed of the jitter, which need not be secret.
fn seed() -> u64 {
    wall().as_micros()
}

/// A monotonic time: the wall clock at the first call plus the time since, so that setting the clock changes
/// no rate.
pub(crate) fn now() -> Stamp {
    static BEGAN: LazyLock<(Stamp, Instant)> = LazyLock::new(|| (wall(), Instant::now()));
    BEGAN.0 + BEGAN.1.elapsed()
}

/// The time of the wall clock.
pub(crate) fn wall() -> Stamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Stamp::ZERO + since.unwrap_or_default()
}

/// Sends updates while the connection lasts.
async fn run_connection(
    server: &Remote,
    events: Events,
    focus: &Focus,
    wanted: watch::Receiver<Option<Subject>>,
    sender: &mpsc::Sender<Update>,
    reached: &Reachability,
) -> Disconnect {
    let events = forward_events(events, focus, sender, reached);
    let counters = poll_counters(server, focus, sender, reached);
    let levels = poll_levels(server, focus, wanted, sender);
    match tokio::try_join!(events, counters, levels) {
        Err(disconnect) => disconnect,
        Ok(never) => match never.0 {},
    }
}

async fn send(sender: &mpsc::Sender<Update>, update: Update) -> Result<(), Disconnect> {
    // The receiver has ended, and so does everything else.
    sender.send(update).await.map_err(|_| Disconnect::Lost("the receiver was dropped".to_owned()))
}

async fn forward_events(
    mut events: Events,
    focus: &Focus,
    sender: &mpsc::Sender<Update>,
    reached: &Reachability,
) -> Result<Infallible, Disconnect> {
    let mut unknown = 0;
    loop {
        let event = match events.next().await {
            Err(error) if is_final(&error, reached) => return Err(Disconnect::Denied(error.into())),
            event => event?,
        };
        let count = events.unknown() - unknown;
        if count > 0 {
            unknown += count;
            send(sender, Update::Unknown { count }).await?;
        }
        match event {
            Some(Event::Stopping) => return Err(Disconnect::Lost("the server is stopping".to_owned())),
            Some(event) if is_about(&event, focus.entity.as_ref()) => {
                send(sender, Update::Event(event)).await?;
            }
            Some(_) => {}
            None => return Err(Disconnect::Lost("the server closed the connection".to_owned())),
        }
    }
}

/// Whether an event is about the watched entity, or about none.
fn is_about(event: &Event, entity: Option<&EntityId>) -> bool {
    match (event, entity) {
        (Event::Refused { entity, of, .. }, Some(wanted)) => {
            entity.0 == *wanted || of.as_ref().is_some_and(|of| of.0 == *wanted)
        }
        (Event::DebtBound { entity: Some(entity), .. }, Some(wanted)) => entity.0 == *wanted,
        (Event::Degraded { entity, .. } | Event::RulesStale { entity, .. }, Some(wanted)) => {
            entity.0 == *wanted
        }
        _ => true,
    }
}

async fn poll_counters(
    server: &Remote,
    focus: &Focus,
    sender: &mpsc::Sender<Update>,
    reached: &Reachability,
) -> Result<Infallible, Disconnect> {
    let mut ticks = interval(focus.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_empty = true;
    loop {
        ticks.tick().await;
        let snapshot = match server.client().snapshot().await {
            Ok(snapshot) => snapshot,
            Err(error) if is_final(&error, reached) => return Err(Disconnect::Denied(error.into())),
            Err(error) if is_end(&error) => return Err(error.into()),
            // The server responded, and still sends events: a busy server is not lost.
            Err(error) => {
                send(sender, Update::Silent { why: Failure::from(error).what }).await?;
                continue;
            }
        };
        reached.ever.set(true);
        reached.now.set(true);
        // Only now: a server that accepts connections but does not respond is not up.
        send(sender, Update::Up).await?;
        send(sender, Update::Totals(totals(&snapshot))).await?;
        let busiest = snapshot.busiest.into_iter();
        let busiest =
            busiest.filter(|grants| focus.entity.as_ref().is_none_or(|wanted| grants.entity.0 == *wanted));
        let busiest: Vec<(Subject, u64)> = busiest
            .map(|grants| (Subject { entity: grants.entity.0, resource: grants.resource.0 }, grants.granted))
            .collect();
        if !busiest.is_empty() {
            send(sender, Update::Busiest(busiest)).await?;
        }
        // Older servers have none.
        if let Ok(mut listed) = server.client().upstreams().await {
            listed.upstreams.truncate(UPSTREAMS_MAX);
            if !(is_empty && listed.upstreams.is_empty()) {
                is_empty = listed.upstreams.is_empty();
                send(sender, Update::Upstreams(listed.upstreams)).await?;
            }
        }
    }
}

/// Whether an error means that the connection is lost or denied.
fn is_end(error: &ClientError) -> bool {
    match error {
        ClientError::Unauthorized { .. } | ClientError::Forbidden { .. } => true,
        ClientError::Unavailable(unavailable) => is_gone(&unavailable.cause),
        _ => false,
    }
}

/// Whether there was no response at all.
const fn is_gone(cause: &Cause) -> bool {
    !matches!(cause, Cause::Status { .. })
}

/// The displayed counters of a snapshot.
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

/// Polls the health of the store behind the server, and the displayed levels.
async fn poll_levels(
    server: &Remote,
    focus: &Focus,
    mut wanted: watch::Receiver<Option<Subject>>,
    sender: &mpsc::Sender<Update>,
) -> Result<Infallible, Disconnect> {
    let mut ticks = interval(focus.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => send(sender, Update::Store(health(server).await?)).await?,
            // The user selected another row: read its levels now.
            changed = wanted.changed() => if changed.is_err() {
                return Err(Disconnect::Lost("the receiver was dropped".to_owned()));
            },
        }
        let mut found = BTreeMap::new();
        if let Some(entity) = &focus.entity {
            // An error is retried at the next poll; the health of the store is reported separately.
            grouped(server.balances_of_entity(entity).await.unwrap_or_default(), &mut found);
        }
        let subject = wanted.borrow_and_update().clone();
        if let Some(subject) = subject
            && let Some(levels) = levels_of(server, &subject).await
        {
            found.insert(subject, levels);
        }
        if focus.entity.is_some() {
            send(sender, Update::HasMore { has_more: found.len() > SUBJECTS_MAX }).await?;
        }
        for (subject, levels) in found.into_iter().take(SUBJECTS_MAX) {
            send(sender, Update::Levels { subject, levels }).await?;
        }
        sleep(focus.every.min(LEVELS_INTERVAL)).await;
    }
}

/// The levels of a subject, including those of its parents. Without stored limits, its requests had limits of
/// their own, whose buckets are returned.
async fn levels_of(server: &Remote, subject: &Subject) -> Option<Vec<Level>> {
    let lines = server.balances(subject).await.ok()?;
    if !lines.is_empty() {
        return Some(lines.iter().map(|line| Level::of(&line.balance, subject)).collect());
    }
    let mut found = BTreeMap::new();
    grouped(server.balances_of_entity(&subject.entity).await.ok()?, &mut found);
    found.remove(subject)
}

/// Groups balances by subject.
pub(crate) fn grouped(balances: Vec<Balance>, into: &mut BTreeMap<Subject, Vec<Level>>) {
    for balance in balances {
        let level = Level::of(&balance, &balance.subject);
        let levels = into.entry(balance.subject).or_default();
        if levels.iter().all(|other| other.limit != level.limit) {
            levels.push(level);
        }
    }
}

/// The health of the store behind the server.
pub(crate) async fn health(server: &Remote) -> Result<Health, Disconnect> {
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
    fn busy_server_is_not_lost_and_unreachable_one_is() {
        let busy = Cause::Status { status: 503, problem: None, retry_after: None };
        assert!(!is_gone(&busy));
        assert!(!is_end(&garbled()), "a proxy may return anything once the server was reached");
        assert!(is_gone(&Cause::Timeout(Duration::from_secs(1))));
        assert!(is_gone(&Cause::Cut("cut".into())));
        assert!(is_gone(&Cause::Connect("refused".into())));
    }

    #[test]
    fn invalid_response_is_final_before_any_valid_one() {
        let reached = Reachability::default();
        assert!(is_final(&garbled(), &reached));
        reached.ever.set(true);
        assert!(!is_final(&garbled(), &reached));
    }
}
