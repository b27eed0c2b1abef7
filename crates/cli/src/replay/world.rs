//! The world as it would have been: a store in memory with limits of its own, and a clock that shows the time of the log.

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
use super::tally::Longest;
use crate::failure::Failure;
use crate::words::shown;

/// Requests that may be under way at once.
const HELD_MAX: usize = 100_000;
/// A request is under way for at most so long.
const HELD_FOR_MAX: Duration = Duration::from_hours(24 * 7);
/// A lease that is ended by its time in the log does not end by its deadline before.
const SPARE: Duration = Duration::from_hours(1);
/// Policies that are written at once.
const WRITTEN_MAX: usize = 500;
/// How often the store forgets what it need not know, in requests.
const SWEPT_EVERY: u32 = 4_096;
const SWEPT_MAX: usize = 10_000;
/// In whose name limits are written.
const ACTOR: &str = "replay";
const HOUR: Duration = Duration::from_hours(1);

/// What a request was answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Granted,
    Refused(Vec<Short>),
    /// The request is none that can be granted: it names what there is not, or asks for nothing.
    Invalid,
    /// It brought limits of its own, and was not asked again.
    OwnLimits,
}

/// A limit that was short.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Short {
    pub(crate) limit: String,
    pub(crate) wait: Longest,
    /// Where it is written and, if it is another's, whose it is.
    pub(crate) by: String,
}

/// A request that is under way.
#[derive(Debug)]
struct Held {
    until: (Stamp, u64),
    lease: Lease,
    actual: Cost,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.until == other.until
    }
}

impl Eq for Held {}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.until.cmp(&other.until)
    }
}

/// The world.
#[derive(Debug)]
pub(crate) struct World {
    clock: ManualWall,
    store: Memory,
    limiter: Limiter,
    held: BinaryHeap<Reverse<Held>>,
    asked: u32,
}

impl World {
    /// With these entities and these limits, and everything full.
    pub(crate) async fn new(
        entities: Vec<Entity>,
        policies: BTreeMap<Scope, Policy>,
    ) -> Result<Self, Failure> {
        let clock = ManualWall::new(Stamp::ZERO);
        // What was used is not asked for: no more of it is kept than must be.
        let retention =
            Retention { hours: Some(HOUR), days: Some(HOUR), months: Some(HOUR), audit: Some(HOUR) };
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
            admin.change(changes.by_ref().take(WRITTEN_MAX).collect()).await?;
        }
        Ok(Self { clock, store, limiter, held: BinaryHeap::new(), asked: 0 })
    }

    /// Asks for what a line asks for, at its time.
    pub(crate) async fn ask(&mut self, line: &Line) -> Result<Verdict, Failure> {
        if line.origin == Origin::OwnLimits {
            return Ok(Verdict::OwnLimits);
        }
        self.until(line.at).await?;
        self.clock.set(line.at);
        self.asked = self.asked.wrapping_add(1);
        if self.asked.is_multiple_of(SWEPT_EVERY) {
            self.store.sweep(SWEPT_MAX).await?;
        }
        let cost = line.cost.pairs();
        let request = self.limiter.request(&line.subject, &cost);
        let answer = match &line.actual {
            None => request.spend().await.map(|()| None),
            Some(actual) => {
                let held = line.held.min(HELD_FOR_MAX);
                request
                    .deadline(held + SPARE)
                    .acquire()
                    .await
                    .map(|lease| Some((lease, actual.clone(), held)))
            }
        };
        match answer {
            Ok(None) => Ok(Verdict::Granted),
            Ok(Some((lease, actual, held))) => {
                if self.held.len() >= HELD_MAX {
                    let what =
                        format!("line {}: more than {HELD_MAX} requests are held at once", line.number);
                    return Err(Failure::usage(what).next("leave `held` out"));
                }
                self.held.push(Reverse(Held { until: (line.at + held, line.number), lease, actual }));
                self.until(line.at).await?;
                Ok(Verdict::Granted)
            }
            Err(error) => refused(line, error),
        }
    }

    /// Ends what ends until then.
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

    /// Ends everything.
    pub(crate) async fn end(&mut self) -> Result<(), Failure> {
        self.until(Stamp::MAX).await
    }
}

/// What a refusal says; what is wrong with the request itself is wrong with its line.
fn refused(line: &Line, error: LimitError) -> Result<Verdict, Failure> {
    if let Some(limited) = error.limited() {
        let short = limited.short().map(|line_of| {
            let balance = &line_of.balance;
            let of = if balance.subject.entity == line.subject.entity {
                String::new()
            } else {
                format!(", of {}", balance.subject.entity)
            };
            Short {
                limit: balance.limit.to_string(),
                wait: balance.retry_after.map_or(Longest::Never, Longest::For),
                by: shown(&format!("{}{of}", line_of.source)),
            }
        });
        return Ok(Verdict::Refused(short.collect()));
    }
    match error {
        // What nothing limits is refused.
        LimitError::NoLimits { .. } => {
            let short = |(limit, _): (&str, u64)| Short {
                limit: limit.to_owned(),
                wait: Longest::Never,
                by: "nothing limits it".to_owned(),
            };
            Ok(Verdict::Refused(line.cost.pairs().into_iter().map(short).collect()))
        }
        LimitError::Store(error) => Err(error.into()),
        // A server tells what it was asked before it judges it: such a line is not its fault.
        _ if line.origin == Origin::Server => Ok(Verdict::Invalid),
        error => Err(Failure::usage(format!("line {}: `cost`: {}", line.number, shown(&error.to_string())))
            .next("correct the log, or declare the limits that it names")),
    }
}

/// Those above before those below them.
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
