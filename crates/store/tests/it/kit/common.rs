//! Short constructors for limits and leases, and helpers to read a store.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::conformance::Fixture;
use tidegate_store::{
    Adjust, Cancel, Draw, DrawResult, Lookup, Movement, Paging, Settle, Store, StoreError, Terms, UsageOf,
    UsageQuery,
};

/// 2027-01-15T08:00:00Z.
pub(crate) const START: Stamp = Stamp::from_secs(1_800_000_000);
/// Terms that no test outlives.
pub(crate) const OPEN: Terms = Terms { deadline: Duration::from_secs(3_600), on_expiry: OnExpiry::Settle };

/// A store that is unavailable for longer without a cause hangs.
const STUCK_AFTER: Duration = Duration::from_secs(300);

/// For slow stores: the suite repeats fewer calls, unless `TIDEGATE_DEEP` is set.
pub(crate) fn quick(fixture: Fixture) -> Fixture {
    if std::env::var_os("TIDEGATE_DEEP").is_some() { fixture } else { fixture.slow() }
}

/// The levels of these entities, the drawing one first.
pub(crate) fn levels(rows: &[(&str, &[Limit])]) -> Arc<Levels> {
    levels_of_version(0, rows)
}

/// The same under policies of a version.
pub(crate) fn levels_of_version(version: u64, rows: &[(&str, &[Limit])]) -> Arc<Levels> {
    let row = |(entity, limits): &(&str, &[Limit])| {
        let subject = subject(entity);
        let policy = Policy::new(limits.iter().cloned()).expect("a valid policy");
        let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
        (subject, resolved)
    };
    Arc::new(Levels::new(Version::new(version), rows.iter().map(row).collect()))
}

/// A burst of `burst` requests, refilled by one a day.
pub(crate) fn slow(burst: u64) -> Limit {
    Limit::per_day("rpm", 1).burst(burst)
}

/// One entity with a burst of requests.
pub(crate) fn own(entity: &str, burst: u64) -> Arc<Levels> {
    levels(&[(entity, &[slow(burst)])])
}

pub(crate) fn subject(entity: &str) -> Subject {
    Subject::new(entity, "gpt").expect("a valid name")
}

/// A lease id that is unique in this process.
pub(crate) fn next_lease() -> LeaseId {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    LeaseId::new(1_800_000_000_000 + number, u128::from(std::process::id()) << 40 | u128::from(number))
}

/// A draw of so many requests, under a new lease.
pub(crate) fn draw_of(levels: &Arc<Levels>, requests: u64) -> Draw {
    draw_on(OPEN, levels, requests)
}

pub(crate) fn draw_on(terms: Terms, levels: &Arc<Levels>, requests: u64) -> Draw {
    let units = levels.amounts(&[("rpm", requests)]).expect("a valid cost");
    Draw { lease: next_lease(), levels: Arc::clone(levels), units, terms, is_watched: true }
}

pub(crate) fn settle_of(draw: &Draw, requests: u64) -> Settle {
    let actual = draw.levels.amounts(&[("rpm", requests)]).expect("a valid cost");
    Settle { lease: draw.lease, step: 9, levels: Arc::clone(&draw.levels), actual, is_watched: true }
}

pub(crate) fn cancel_of(draw: &Draw) -> Cancel {
    Cancel { lease: draw.lease, step: 9, levels: Arc::clone(&draw.levels), is_watched: true }
}

pub(crate) fn adjust_of(draw: &Draw, step: u32, more: i64) -> Adjust {
    let deltas = draw.levels.deltas(&[("rpm", more)]).expect("a valid change");
    Adjust { lease: draw.lease, step, levels: Arc::clone(&draw.levels), deltas }
}

/// The grant, or the test fails.
pub(crate) fn granted(answer: Result<DrawResult, StoreError>) -> Movement {
    match answer {
        Ok(DrawResult::Granted(moved)) => moved,
        other => panic!("expected a grant: {other:?}"),
    }
}

pub(crate) fn is_granted(answer: &Result<DrawResult, StoreError>) -> bool {
    matches!(answer, Ok(DrawResult::Granted(_)))
}

/// The available and consumed requests of an entity; `None` if it was never used.
pub(crate) async fn balance(store: &dyn Store, entity: &str) -> Option<(i64, i64)> {
    let lookup = Lookup::Subjects(vec![subject(entity)]);
    let seen = store.balances(&lookup).await.expect("balances are returned");
    let meter = seen.buckets.first()?.meters.first()?;
    Some((meter.available(seen.at), meter.consumed()))
}

/// The settled requests of an entity in the ledger.
pub(crate) async fn used(store: &dyn Store, entity: &str) -> u64 {
    let of = UsageOf::Resource(ResourceName::new("gpt").expect("a valid name"));
    let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let mut paging = Paging::default();
    let mut sum = 0;
    loop {
        let page = store.usage(&query, &paging).await.expect("usage is returned");
        let lines = page.items.iter().filter(|line| line.subject == subject(entity));
        sum += lines.map(|line| line.tally.units).sum::<u64>();
        let Some(next) = page.next else { return sum };
        paging = Paging::default().after(next);
    }
}

/// The message of an expected error.
pub(crate) fn error_text<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> String {
    answer.expect_err("expected an error").to_string()
}

/// Retries while the store is unavailable, and returns the first other answer.
pub(crate) async fn until_answered<T, F>(mut ask: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let began = Instant::now();
    loop {
        match ask().await {
            Err(error) if error.is_transient() && began.elapsed() < STUCK_AFTER => {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            answer => return answer,
        }
    }
}

/// Polls until a condition holds; fails if the test hangs.
pub(crate) async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !condition().await {
        assert!(began.elapsed() < STUCK_AFTER, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Awaits all futures concurrently.
pub(crate) async fn join_all<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let mut answers: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut is_done = true;
        for (future, answer) in futures.iter_mut().zip(&mut answers) {
            if answer.is_none() {
                match Pin::new(future).poll(context) {
                    Poll::Ready(output) => *answer = Some(output),
                    Poll::Pending => is_done = false,
                }
            }
        }
        if is_done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}
