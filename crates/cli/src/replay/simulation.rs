//! Simulates the requests of a log: an in-memory store with the tried limits, and a manual clock that follows
//! the log.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::{ManualWall, PolicyChange};
use tidegate::{
    Entity, EntityId, Expect, Lease, LimitError, Limiter, Memory, MemoryOptions, Policy, Retention, Scope,
    Stamp, Store as _,
};
use tidegate_client::Cost;

use super::log::{Line, Origin};
use super::tally::LongestWait;
use crate::failure::Failure;
use crate::format;

/// Maximum open leases.
const OPEN_LEASES_MAX: usize = 100_000;
/// Maximum time that a lease is held.
const LEASE_TIME_MAX: Duration = Duration::from_hours(24 * 7);
/// Added to a lease's deadline, so that the log ends it and not the deadline.
const DEADLINE_MARGIN: Duration = Duration::from_hours(1);
/// Policies per write.
const BATCH_MAX: usize = 500;
/// Requests between sweeps of the store.
const SWEEP_EVERY: u32 = 4_096;
const SWEEP_MAX: usize = 10_000;
/// The actor that writes the limits.
const ACTOR: &str = "replay";
const HOUR: Duration = Duration::from_hours(1);

/// The decision on a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Granted,
    Refused(Vec<Shortage>),
    /// The request is invalid: it names an unknown limit, or its cost is zero.
    Invalid,
    /// The request had limits of its own, and was not replayed.
    OwnLimits,
}

/// A limit that refused a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) limit: String,
    pub(crate) wait: LongestWait,
    /// Its source, and its pool, or its entity if that is not the requesting one.
    pub(crate) by: String,
}

/// A lease that the log ends later.
#[derive(Debug)]
struct OpenLease {
    until: (Stamp, u64),
    lease: Lease,
    actual: Cost,
}

impl PartialEq for OpenLease {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until
    }
}

impl Eq for OpenLease {}

impl PartialOrd for OpenLease {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for OpenLease {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.until.cmp(&other.until)
    }
}

/// A simulated store.
#[derive(Debug)]
pub(crate) struct Simulation {
    clock: ManualWall,
    store: Memory,
    limiter: Limiter,
    held: BinaryHeap<Reverse<OpenLease>>,
    requests: u32,
}

impl Simulation {
    /// Creates a store with these entities and limits, and full buckets.
    pub(crate) async fn new(
        entities: Vec<Entity>,
        policies: BTreeMap<Scope, Policy>,
    ) -> Result<Self, Failure> {
        let clock = ManualWall::new(Stamp::ZERO);
        // Usage is never read, so it is kept for the minimum time.
        let retention = Retention {
            minutes: Some(HOUR),
            hours: Some(HOUR),
            days: Some(HOUR),
            months: Some(HOUR),
            audit: Some(HOUR),
        };
        let store = Memory::with(MemoryOptions::new().clock(clock.clone()).retention(retention))?;
        let limiter = Limiter::over(Arc::new(store.clone())).build();
        let limiter = limiter.map_err(|error| Failure::failed(error.to_string()))?;
        let admin = limiter.admin(ACTOR);
        for entity in parents_first(entities) {
            admin.put_entity(&entity, Expect::Any).await?;
        }
        let mut changes = policies
            .into_iter()
            .map(|(scope, policy)| PolicyChange { scope, expect: Expect::Any, policy: Some(policy) })
            .peekable();
        while changes.peek().is_some() {
            admin.change(changes.by_ref().take(BATCH_MAX).collect()).await?;
        }
        Ok(Self { clock, store, limiter, held: BinaryHeap::new(), requests: 0 })
    }

    /// Replays a request at its time.
    pub(crate) async fn run(&mut self, line: &Line) -> Result<Verdict, Failure> {
        if line.origin == Origin::OwnLimits {
            return Ok(Verdict::OwnLimits);
        }
        self.until(line.at).await?;
        self.clock.set(line.at);
        self.requests = self.requests.wrapping_add(1);
        if self.requests.is_multiple_of(SWEEP_EVERY) {
            self.store.sweep(SWEEP_MAX).await?;
        }
        let cost = line.cost.pairs();
        let request = self.limiter.request(&line.subject, &cost);
        let result = match &line.actual {
            None => request.spend().await.map(|()| None),
            Some(actual) => {
                let held = line.held.min(LEASE_TIME_MAX);
                request
                    .deadline(held + DEADLINE_MARGIN)
                    .try_acquire()
                    .await
                    .map(|lease| Some((lease, actual.clone(), held)))
            }
        };
        match result {
            Ok(None) => Ok(Verdict::Granted),
            Ok(Some((lease, actual, held))) => {
                if self.held.len() >= OPEN_LEASES_MAX {
                    let what =
                        format!("line {}: more than {OPEN_LEASES_MAX} leases are open at once", line.number);
                    return Err(Failure::usage(what).next("omit `held`"));
                }
                self.held.push(Reverse(OpenLease { until: (line.at + held, line.number), lease, actual }));
                self.until(line.at).await?;
                Ok(Verdict::Granted)
            }
            Err(error) => verdict_of(line, error),
        }
    }

    /// Settles the leases that end until `at`.
    async fn until(&mut self, at: Stamp) -> Result<(), Failure> {
        while self.held.peek().is_some_and(|Reverse(held)| held.until.0 <= at) {
            let Some(Reverse(mut held)) = self.held.pop() else { break };
            self.clock.set(held.until.0);
            held.lease.settle(held.actual.pairs()).await.map_err(|error| {
                let what = format!("line {}: `actual`: {error}", held.until.1);
                Failure::usage(what).next("`actual` names limits of `cost`")
            })?;
        }
        Ok(())
    }

    /// Settles all leases.
    pub(crate) async fn end(&mut self) -> Result<(), Failure> {
        self.until(Stamp::MAX).await
    }
}

/// Maps an error to a verdict. An invalid request of a user is an error of its line.
fn verdict_of(line: &Line, error: LimitError) -> Result<Verdict, Failure> {
    if let Some(limited) = error.limited() {
        let short = limited.short().map(|line_of| {
            let balance = &line_of.balance;
            let of = match balance.subject.across() {
                Some(_) => format!(", for {}", balance.subject),
                None if balance.subject.entity == line.subject.entity => String::new(),
                None => format!(", of {}", balance.subject.entity),
            };
            Shortage {
                limit: balance.limit.to_string(),
                wait: balance.retry_after.map_or(LongestWait::Never, LongestWait::For),
                by: format::escape(&format!("{}{of}", line_of.source)),
            }
        });
        return Ok(Verdict::Refused(short.collect()));
    }
    match error {
        // A subject without limits is refused.
        LimitError::NoLimits { .. } => {
            let short = |(limit, _): (&str, u64)| Shortage {
                limit: limit.to_owned(),
                wait: LongestWait::Never,
                by: "no limit applies".to_owned(),
            };
            Ok(Verdict::Refused(line.cost.pairs().into_iter().map(short).collect()))
        }
        LimitError::Store(error) => Err(error.into()),
        // A server logs requests before it validates them, so an invalid one is no error of the log.
        _ if line.origin == Origin::Server => Ok(Verdict::Invalid),
        error => Err(Failure::usage(format!(
            "line {}: `cost`: {}",
            line.number,
            format::escape(&error.to_string())
        ))
        .next("correct the log, or declare the limits that it names")),
    }
}

/// Sorts entities so that parents come before their children.
fn parents_first(entities: Vec<Entity>) -> Vec<Entity> {
    let mut by_id: BTreeMap<EntityId, Entity> =
        entities.into_iter().map(|entity| (entity.id().clone(), entity)).collect();
    let mut sorted = Vec::with_capacity(by_id.len());
    while let Some(id) = by_id.keys().next().cloned() {
        let mut chain = Vec::new();
        let mut next = by_id.remove(&id);
        while let Some(entity) = next {
            next = entity.parent_id().cloned().and_then(|parent| by_id.remove(&parent));
            chain.push(entity);
        }
        sorted.extend(chain.into_iter().rev());
    }
    sorted
}
