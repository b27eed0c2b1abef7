//! What the limiter's tests share: stores with a network, ears, and the truth as the store has it.

mod hooked;

use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

pub(crate) use hooked::{Act, Hooked, Moment};
use tidegate::store::wrap::{Faulty, Observed, Plan, Verb};
use tidegate::store::{Buckets, Ledger, Lookup, Store};
use tidegate::{
    Entity, EntityId, Expect, Lease, Limit, LimitError, LimitEvent, Limiter, LimiterBuilder, Memory, Paging,
    Policy, Stamp, Subject, UsageOf, UsageQuery, Window,
};
use tokio::task::JoinHandle;

use crate::kit::{millis, secs};

/// Who asks, in most tests.
pub(crate) const ACME: (&str, &str) = ("acme", "gpt");
/// How long the stores with a network may take.
pub(crate) const DEADLINE: Duration = Duration::from_millis(50);

/// A memory store that is watched, behind a network.
pub(crate) type Network = Arc<Faulty<Observed<Memory>>>;

pub(crate) fn id(name: &str) -> EntityId {
    EntityId::new(name).expect("a valid name")
}

pub(crate) fn policy(limits: impl IntoIterator<Item = Limit>) -> Policy {
    Policy::new(limits).expect("valid limits")
}

pub(crate) fn network(plan: Plan) -> Network {
    Arc::new(Faulty::new(Observed::new(Memory::new()), plan).expect("no more faults than calls"))
}

/// A network that is as good as new: nothing goes wrong unless it is told to.
pub(crate) fn calm() -> Network {
    network(Plan::seeded(1))
}

pub(crate) fn memory(network: &Network) -> &Memory {
    network.inner().inner()
}

pub(crate) fn calls(network: &Network, verb: Verb) -> u64 {
    network.inner().calls().of(verb)
}

/// A limiter over a store that the test keeps too.
pub(crate) fn over<S: Store>(store: &Arc<S>) -> LimiterBuilder {
    Limiter::over(Arc::clone(store) as Arc<dyn Store>)
}

/// A limiter over a store whose disk may be busy: it is not away because of it.
pub(crate) fn patient(store: impl Store) -> LimiterBuilder {
    Limiter::builder(store).store_deadline(secs(60))
}

/// Puts `child` below `parent`, which it draws from too.
pub(crate) async fn child(limiter: &Limiter, child: &str, parent: &str) {
    let admin = limiter.admin("tests");
    admin.put_entity(&Entity::new(id(parent)), Expect::Any).await.expect("the parent is written");
    let entity = Entity::new(id(child)).parent(id(parent)).cascade();
    admin.put_entity(&entity, Expect::Any).await.expect("the child is written");
}

/// What the store itself has of a limit: whole units there, and consumed so far. A bucket that nobody has drawn
/// from is not there.
pub(crate) async fn level(store: &Memory, subject: (&str, &str), limit: &str) -> Option<(i64, i64)> {
    let subject = Subject::new(subject.0, subject.1).expect("valid names");
    let seen = store.balances(&Lookup::Subjects(vec![subject])).await.expect("memory is there");
    let meters = seen.buckets.iter().flat_map(|bucket| &bucket.meters);
    let meter = meters.into_iter().find(|meter| meter.rule().row() == limit)?;
    Some((meter.available(seen.at), meter.consumed()))
}

/// Units of a limit that the ledger has for a subject's own and its children's leases, and how many leases.
pub(crate) async fn settled(store: &Memory, subject: (&str, &str), limit: &str) -> (u64, u64) {
    let query = UsageQuery {
        of: UsageOf::Entity(id(subject.0)),
        window: Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let paging = Paging::first(1_000).expect("a page of a thousand");
    let page = store.usage(&query, &paging).await.expect("memory is there");
    let lines = page
        .items
        .iter()
        .filter(|line| line.subject.resource.as_str() == subject.1 && line.limit.as_str() == limit);
    lines.fold((0, 0), |(units, leases), line| (units + line.tally.units, leases + line.tally.leases))
}

/// What a limiter told.
#[derive(Clone, Default)]
pub(crate) struct Heard(Arc<Mutex<Vec<LimitEvent>>>);

impl Heard {
    pub(crate) fn ear(&self) -> impl Fn(&LimitEvent) + Send + Sync + 'static {
        let heard = Arc::clone(&self.0);
        move |event| heard.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone())
    }

    pub(crate) fn count(&self, is_it: impl Fn(&LimitEvent) -> bool) -> usize {
        let heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        heard.iter().filter(|event| is_it(event)).count()
    }
}

/// Polls a future at most so often, then drops it; its answer, if it had one by then.
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

/// One who waits in a task of its own.
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
