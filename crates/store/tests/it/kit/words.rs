//! What the tests of stores are written with: limits, leases and what is seen of them, in few words.

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
    Adjust, Cancel, Draw, Drawn, Lookup, Moved, Paging, Settle, Store, StoreError, Terms, UsageOf, UsageQuery,
};

/// 2027-01-15T08:00:00Z.
pub(crate) const START: Stamp = Stamp::from_secs(1_800_000_000);
/// A lease that no test outlives.
pub(crate) const OPEN: Terms = Terms { deadline: Duration::from_secs(3_600), on_expiry: OnExpiry::Settle };

/// A store that is unavailable for longer without a cause hangs.
const STUCK_AFTER: Duration = Duration::from_secs(300);

/// A store whose answers take so long that a case repeats calls less often, unless `TIDEGATE_DEEP` is set.
pub(crate) fn quick(fixture: Fixture) -> Fixture {
    if std::env::var_os("TIDEGATE_DEEP").is_some() { fixture } else { fixture.slow() }
}

/// The levels of these entities, the drawing one first.
pub(crate) fn levels(rows: &[(&str, &[Limit])]) -> Arc<Levels> {
    levels_of_version(0, rows)
}

/// The same by policies of a version.
pub(crate) fn levels_of_version(version: u64, rows: &[(&str, &[Limit])]) -> Arc<Levels> {
    let row = |(entity, limits): &(&str, &[Limit])| {
        let subject = subject(entity);
        let policy = Policy::new(limits.iter().cloned()).expect("a valid policy");
        let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
        (subject, resolved)
    };
    Arc::new(Levels::new(Version::new(version), rows.iter().map(row).collect()))
}

/// `burst` requests, and one more a day.
pub(crate) fn slow(burst: u64) -> Limit {
    Limit::per_day("rpm", 1).burst(burst)
}

/// One entity with so many requests.
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

/// A draw of so many requests, under a lease of its own.
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

/// A grant, or the test fails.
pub(crate) fn granted(answer: Result<Drawn, StoreError>) -> Moved {
    match answer {
        Ok(Drawn::Granted(moved)) => moved,
        other => panic!("what is there is not granted: {other:?}"),
    }
}

pub(crate) fn is_granted(answer: &Result<Drawn, StoreError>) -> bool {
    matches!(answer, Ok(Drawn::Granted(_)))
}

/// What an entity's requests are: left, and consumed; all of them where it was never used.
pub(crate) async fn shows(store: &dyn Store, entity: &str) -> Option<(i64, i64)> {
    let lookup = Lookup::Subjects(vec![subject(entity)]);
    let seen = store.balances(&lookup).await.expect("balances are answered");
    let meter = seen.buckets.first()?.meters.first()?;
    Some((meter.available(seen.at), meter.consumed()))
}

/// What the ledger has of an entity's requests.
pub(crate) async fn used(store: &dyn Store, entity: &str) -> u64 {
    let of = UsageOf::Resource(ResourceName::new("gpt").expect("a valid name"));
    let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let mut paging = Paging::default();
    let mut sum = 0;
    loop {
        let page = store.usage(&query, &paging).await.expect("usage is answered");
        let lines = page.items.iter().filter(|line| line.subject == subject(entity));
        sum += lines.map(|line| line.tally.units).sum::<u64>();
        let Some(next) = page.next else { return sum };
        paging = Paging::default().after(next);
    }
}

/// What it says of trouble.
pub(crate) fn said<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> String {
    answer.expect_err("it is refused").to_string()
}

/// Asks the same again while the store is unavailable, and returns the first other answer.
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

/// Waits until a condition holds. Fails if it does not for so long that the test hangs.
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < STUCK_AFTER, "it never holds: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for all of them at once.
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
