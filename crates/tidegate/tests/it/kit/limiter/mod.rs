//! Shared by the limiter's tests: stores behind simulated networks, recorded events, and direct reads of the
//! store.

mod hook_store;

use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

pub(crate) use hook_store::{Act, HookStore, Moment};
use tidegate::store::wrap::{FaultPlan, Faulty, Observed, Verb};
use tidegate::store::{Buckets, Ledger, Lookup, Store};
use tidegate::{
    Entity, EntityId, Expect, Lease, Limit, LimitError, LimitEvent, Limiter, LimiterBuilder, Memory, Paging,
    Policy, Stamp, Subject, UsageOf, UsageQuery, Window,
};
use tokio::task::JoinHandle;

use crate::kit::{millis, secs};

/// The subject of most tests.
pub(crate) const ACME: (&str, &str) = ("acme", "gpt");
/// The deadline of stores behind a network.
pub(crate) const DEADLINE: Duration = Duration::from_millis(50);

/// An observed memory store behind a simulated network.
pub(crate) type Network = Arc<Faulty<Observed<Memory>>>;

pub(crate) fn id(name: &str) -> EntityId {
    EntityId::new(name).expect("a valid name")
}

pub(crate) fn policy(limits: impl IntoIterator<Item = Limit>) -> Policy {
    Policy::new(limits).expect("valid limits")
}

pub(crate) fn network(plan: FaultPlan) -> Network {
    Arc::new(Faulty::new(Observed::new(Memory::new()), plan).expect("no more faults than calls"))
}

/// A network without faults, unless a test injects some.
pub(crate) fn calm() -> Network {
    network(FaultPlan::seeded(1))
}

pub(crate) fn memory(network: &Network) -> &Memory {
    network.inner().inner()
}

pub(crate) fn calls(network: &Network, verb: Verb) -> u64 {
    network.inner().calls().of(verb)
}

/// A limiter over a store that the test shares.
pub(crate) fn over<S: Store>(store: &Arc<S>) -> LimiterBuilder {
    Limiter::over(Arc::clone(store) as Arc<dyn Store>)
}

/// A limiter with a long deadline, so that a busy disk does not count as unavailable.
pub(crate) fn with_long_deadline(store: impl Store) -> LimiterBuilder {
    Limiter::builder(store).store_deadline(secs(60))
}

/// Makes `parent` the parent of `child`, so that draws charge both.
pub(crate) async fn child(limiter: &Limiter, child: &str, parent: &str) {
    let admin = limiter.admin("tests");
    admin.put_entity(&Entity::new(id(parent)), Expect::Any).await.expect("the parent is written");
    let entity = Entity::new(id(child)).parent(id(parent)).cascade();
    admin.put_entity(&entity, Expect::Any).await.expect("the child is written");
}

/// Available and consumed units of a limit in the store; `None` before the first draw.
pub(crate) async fn level(store: &Memory, subject: (&str, &str), limit: &str) -> Option<(i64, i64)> {
    let subject = Subject::new(subject.0, subject.1).expect("valid names");
    let seen = store.balances(&Lookup::Subjects(vec![subject])).await.expect("memory is available");
    let meters = seen.buckets.iter().flat_map(|bucket| &bucket.meters);
    let meter = meters.into_iter().find(|meter| meter.rule().row() == limit)?;
    Some((meter.available(seen.at), meter.consumed()))
}

/// Settled units and leases of a limit in the ledger, for a subject and its children.
pub(crate) async fn settled(store: &Memory, subject: (&str, &str), limit: &str) -> (u64, u64) {
    let query = UsageQuery {
        of: UsageOf::Entity(id(subject.0)),
        window: Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let paging = Paging::first(1_000).expect("a page of a thousand");
    let page = store.usage(&query, &paging).await.expect("memory is available");
    let lines = page
        .items
        .iter()
        .filter(|line| line.subject.resource.as_str() == subject.1 && line.limit.as_str() == limit);
    lines.fold((0, 0), |(units, leases), line| (units + line.tally.units, leases + line.tally.leases))
}

/// Recorded events of a limiter.
#[derive(Clone, Default)]
pub(crate) struct EventLog(Arc<Mutex<Vec<LimitEvent>>>);

impl EventLog {
    pub(crate) fn listener(&self) -> impl Fn(&LimitEvent) + Send + Sync + 'static {
        let events = Arc::clone(&self.0);
        move |event| events.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone())
    }

    pub(crate) fn count(&self, matches: impl Fn(&LimitEvent) -> bool) -> usize {
        let events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.iter().filter(|event| matches(event)).count()
    }
}

/// Polls a future at most `polls` times, then drops it. Returns its output if it completed.
pub(crate) async fn poll_and_drop<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Spawns a task that waits for a lease.
pub(crate) fn wait(
    limiter: &Limiter,
    subject: (&'static str, &'static str),
    units: u64,
    within: Duration,
) -> JoinHandle<Result<Lease, LimitError>> {
    let limiter = limiter.clone();
    tokio::spawn(async move { limiter.acquire_within(subject, [("rpm", units)], within).await })
}

/// Waits until the settler has nothing to do, without closing the limiter.
pub(crate) async fn flushed(limiter: &Limiter) {
    let idle = async {
        while limiter.stats().settling > 0 {
            tokio::time::sleep(millis(1)).await;
        }
    };
    let is_idle = tokio::time::timeout(secs(120), idle).await.is_ok();
    assert!(is_idle, "the settler still has work: {:?}", limiter.stats());
}
