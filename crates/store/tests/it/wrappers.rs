//! Runs the suite on the wrappers, and tests the features that they add to a store.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::exactness::{Kind, What, check};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::conformance::random_calls::{RandomCalls, check_exact, run_random_calls};
use tidegate_store::conformance::{self, Fixture};
use tidegate_store::wrap::{CallEnd, FaultPlan, Faulty, Measured, Observed, Verb, Watcher};
use tidegate_store::{
    Buckets, Cancel, Draw, DrawResult, Lookup, ManualWall, Memory, Policies, Settle, Store, StoreError, Terms,
};

const START: Stamp = Stamp::from_secs(1_800_000_000);

fn memory(namespace: &str) -> (Memory, Arc<ManualWall>) {
    let clock = ManualWall::new(START);
    let store = Memory::with_clock(clock.clone()).namespace(namespace).expect("a case's name is valid");
    (store, Arc::new(clock))
}

async fn open_observed(namespace: &str) -> Fixture {
    let (store, clock) = memory(namespace);
    Fixture::new(Arc::new(Observed::new(store)), clock)
}

async fn open_faulty(namespace: &str) -> Fixture {
    let (store, clock) = memory(namespace);
    let faulty = Faulty::new(store, FaultPlan::seeded(0)).expect("a plan without faults");
    Fixture::new(Arc::new(faulty), clock)
}

/// A watcher that ignores every event.
#[derive(Debug)]
struct NullWatcher;

impl Watcher for NullWatcher {
    fn ended(&self, _: Verb, _: Duration, _: CallEnd<'_>) {}
}

async fn open_measured(namespace: &str) -> Fixture {
    let (store, clock) = memory(namespace);
    Fixture::new(Arc::new(Measured::new(store, Arc::new(NullWatcher))), clock)
}

conformance::suite!(measured, open_measured, jumps);
conformance::suite!(observed, open_observed, jumps);
conformance::suite!(faulty, open_faulty, jumps);

fn levels() -> Arc<Levels> {
    let subject = Subject::new("acme", "gpt").expect("valid");
    let policy = Policy::new([Limit::per_day("rpm", 10)]).expect("valid");
    let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
    Arc::new(Levels::new(Version::ZERO, vec![(subject, resolved)]))
}

fn draw(fixture: &Fixture, units: u64) -> Draw {
    let terms = Terms { deadline: Duration::from_secs(3_600), on_expiry: OnExpiry::Settle };
    Draw {
        lease: fixture.next_lease(),
        levels: levels(),
        units: [Some(units)].into_iter().collect(),
        terms,
        is_watched: true,
    }
}

fn cancel(draw: &Draw) -> Cancel {
    Cancel { lease: draw.lease, step: 1, levels: draw.levels.clone(), is_watched: true }
}

async fn consumed(store: &impl Store) -> i64 {
    let lookup = Lookup::Subjects(vec![Subject::new("acme", "gpt").expect("valid")]);
    let seen = store.balances(&lookup).await.expect("balances are returned");
    seen.buckets.iter().flat_map(|bucket| &bucket.meters).map(Meter::consumed).sum()
}

fn faulty(plan: FaultPlan) -> (Arc<Faulty<Memory>>, Fixture) {
    let (store, clock) = memory("faulty");
    let faulty = Arc::new(Faulty::new(store, plan).expect("a valid plan"));
    (faulty.clone(), Fixture::new(faulty, clock))
}

#[tokio::test]
async fn observed_log_has_each_move_once() {
    let (store, clock) = memory("observed");
    let observed = Arc::new(Observed::new(store));
    let fixture = Fixture::new(observed.clone(), clock);
    let kept = draw(&fixture, 6);
    for _ in 0..3 {
        assert!(matches!(observed.draw(&kept).await.unwrap(), DrawResult::Granted(_)));
    }
    assert!(matches!(observed.draw(&draw(&fixture, 5)).await.unwrap(), DrawResult::Refused(_)));
    let returned = draw(&fixture, 4);
    observed.draw(&returned).await.unwrap();
    observed.cancel(&cancel(&returned)).await.unwrap();
    let settle = Settle {
        lease: kept.lease,
        step: 1,
        levels: levels(),
        actual: [Some(2)].into_iter().collect(),
        is_watched: true,
    };
    observed.settle(&settle).await.unwrap();
    observed.settle(&settle).await.unwrap();
    observed.spend(&draw(&fixture, 3)).await.unwrap();
    let log = observed.log();
    let moves: Vec<_> = log
        .iter()
        .filter_map(|entry| match entry.what {
            What::Moved(moved) => Some((moved.kind, moved.step, moved.units)),
            What::Shape(_) | What::Set(_) => None,
        })
        .collect();
    let expected = [
        (Kind::Draw, 0, 6),
        (Kind::Draw, 0, 4),
        (Kind::Return, 1, -4),
        (Kind::Settle, 1, 2),
        (Kind::Draw, 0, 3),
        (Kind::Settle, 1, 3),
    ];
    assert_eq!(moves, expected);
    assert_eq!(log.len(), expected.len() + 1, "one shape");
    let report = check(&log);
    assert!(report.is_exact() && report.open.is_empty(), "{report}");
    let calls = observed.calls();
    assert_eq!((calls.of(Verb::Draw), calls.of(Verb::Settle), calls.of(Verb::Spend)), (5, 2, 1));
    assert_eq!((calls.of(Verb::Sweep), calls.total()), (0, 9));
}

#[tokio::test]
async fn full_log_counts_missed_entries() {
    let (store, clock) = memory("observed");
    let observed = Arc::new(Observed::new(store).log_max(3));
    let fixture = Fixture::new(observed.clone(), clock);
    for _ in 0..4 {
        observed.draw(&draw(&fixture, 1)).await.unwrap();
    }
    assert_eq!((observed.log().len(), observed.missed()), (3, 2));
}

#[tokio::test]
async fn early_cancel_is_logged_as_an_empty_return() {
    let (store, clock) = memory("observed");
    let observed = Arc::new(Observed::new(store));
    let fixture = Fixture::new(observed.clone(), clock.clone());
    let late = draw(&fixture, 1);
    observed.cancel(&cancel(&late)).await.unwrap();
    clock.advance(Duration::from_millis(1));
    assert!(observed.draw(&late).await.is_err());
    let log = observed.log();
    assert_eq!(log.len(), 1);
    assert!(matches!(log[0].what, What::Moved(moved) if (moved.kind, moved.units) == (Kind::Return, 0)));
    assert!(check(&log).is_exact());
}

#[tokio::test]
async fn unavailable_store_does_nothing_until_it_returns() {
    let (store, fixture) = faulty(FaultPlan::seeded(1));
    store.go_away();
    let one = draw(&fixture, 1);
    for _ in 0..3 {
        assert!(store.draw(&one).await.unwrap_err().is_transient());
        assert!(store.version().await.unwrap_err().is_transient());
    }
    store.come_back();
    assert_eq!(consumed(store.inner()).await, 0);
    store.fail_next(2);
    let answers =
        [store.draw(&one).await.is_ok(), store.draw(&one).await.is_ok(), store.draw(&one).await.is_ok()];
    assert_eq!(answers, [false, false, true]);
    assert_eq!(consumed(store.inner()).await, 1);
    store.go_away_after(1);
    let mut answers = [false; 3];
    for answer in &mut answers {
        *answer = store.version().await.is_ok();
    }
    assert_eq!(answers, [true, false, false]);
    store.come_back();
    assert!(store.version().await.is_ok());
    let capabilities = store.capabilities();
    assert!(!capabilities.is_immediate);
    assert_eq!(capabilities.deadline, Duration::from_millis(50));
}

#[tokio::test(start_paused = true)]
async fn hanging_store_never_answers() {
    let (store, fixture) = faulty(FaultPlan::seeded(1));
    store.hang();
    let one = draw(&fixture, 1);
    let hour = Duration::from_secs(3_600);
    assert!(tokio::time::timeout(hour, store.draw(&one)).await.is_err());
    store.come_back();
    assert_eq!(consumed(store.inner()).await, 0);
    assert!(store.draw(&one).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn delays_use_tokio_time() {
    let (store, fixture) = faulty(FaultPlan::seeded(5).delays(1_000, Duration::from_secs(60)));
    let start = tokio::time::Instant::now();
    for _ in 0..5 {
        store.draw(&draw(&fixture, 1)).await.unwrap();
    }
    assert!(start.elapsed() > Duration::from_secs(30), "{:?}", start.elapsed());
    assert_eq!(store.faults().delayed, 5);
}

#[tokio::test]
async fn lost_reply_was_applied_and_failed_call_was_not() {
    let (store, fixture) = faulty(FaultPlan::seeded(1).loses(1_000));
    assert!(store.draw(&draw(&fixture, 3)).await.unwrap_err().is_transient());
    assert_eq!((consumed(store.inner()).await, store.faults().lost), (3, 1));
    let (store, fixture) = faulty(FaultPlan::seeded(1).fails(1_000));
    assert!(store.draw(&draw(&fixture, 3)).await.unwrap_err().is_transient());
    assert_eq!((consumed(store.inner()).await, store.faults().failed), (0, 1));
}

#[tokio::test]
async fn repeated_call_returns_the_second_answer() {
    let (store, fixture) = faulty(FaultPlan::seeded(1).repeats(1_000));
    match store.draw(&draw(&fixture, 3)).await.unwrap() {
        DrawResult::Granted(moved) => assert!(moved.is_repeat),
        DrawResult::Refused(moved) => panic!("{moved:?}"),
    }
    assert_eq!(consumed(store.inner()).await, 3);
}

#[tokio::test]
async fn deferred_draw_after_its_cancel_takes_nothing() {
    let (store, fixture) = faulty(FaultPlan::seeded(1).defers(1_000));
    let late = draw(&fixture, 3);
    assert!(store.draw(&late).await.unwrap_err().is_transient());
    assert_eq!(consumed(store.inner()).await, 0);
    store.inner().cancel(&cancel(&late)).await.unwrap();
    assert_eq!(store.deliver().await, 1);
    assert_eq!(consumed(store.inner()).await, 0);
    // A deferred draw that was not cancelled takes units when it arrives.
    assert!(store.draw(&draw(&fixture, 3)).await.is_err());
    assert_eq!((store.deliver().await, store.deliver().await), (1, 0));
    assert_eq!(consumed(store.inner()).await, 3);
    let again = store.inner().draw(&late).await;
    assert!(matches!(again, Err(StoreError::Ended { .. })), "{again:?}");
}

/// Whatever the network does, callers that retry with the same step, and cancel draws with an unknown result,
/// are charged once and refunded once.
#[test]
fn bad_network_conserves_units() {
    for seed in 0..6 {
        let case = async |fixture: Fixture| {
            let observed = Arc::new(Observed::new(fixture.store.clone()));
            let delay = Duration::from_micros(300);
            let plan =
                FaultPlan::seeded(seed).fails(100).loses(100).repeats(100).defers(150).delays(50, delay);
            let faulty = Arc::new(Faulty::new(observed.clone(), plan).unwrap());
            let faulty_fixture = fixture.clone().with_store(faulty.clone());
            run_random_calls(&faulty_fixture, RandomCalls { callers: 6, leases: 30, seed }).await;
            faulty.deliver().await;
            let counts = faulty.faults();
            let least = counts.failed.min(counts.lost).min(counts.repeated).min(counts.deferred);
            assert!(least > 20, "seed {seed}: {counts:?}");
            check_exact(&fixture.with_store(observed.clone()), &observed).await;
        };
        conformance::run(&format!("seed {seed}"), open, case);
    }
}

async fn open(namespace: &str) -> Fixture {
    let (store, clock) = memory(namespace);
    Fixture::new(Arc::new(store), clock)
}
