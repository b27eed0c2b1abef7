//! Random callers of several tenants behind one throttle, on good and bad networks: all slots and units
//! return, every caller gets a result, and the store's log is exact.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use proptest::prelude::*;
use tidegate::store::wrap::FaultPlan;
use tidegate::{
    Budget, Controller, Cost, Joined, JoinedError, Kind, Limit, Limiter, Memory, Outcome, Pace, Random, Rate,
    Scope, Slots, Throttle,
};
use tidegate_core::limit::exactness::check;
use tokio::task::JoinSet;

use crate::kit::limiter::{child, id, level, memory, network, over, policy, settled};
use crate::kit::{millis, secs};

const TENANTS: [&str; 3] = ["left", "right", "alone"];
const BUDGET: u64 = 1 << 30;

/// The script of one caller.
#[derive(Debug, Clone)]
struct CallerScript {
    arrives_after: u64,
    tenant: usize,
    tokens: u64,
    mode: AcquireMode,
    works_for: u64,
    reported: Option<u64>,
    ending: Ending,
    /// It is aborted this long after its arrival, if it is still running.
    aborted_after: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
enum AcquireMode {
    Wait,
    Within(u64),
    Try,
}

#[derive(Debug, Clone, Copy)]
enum Ending {
    Settle(Kind, Option<u64>),
    Drop,
}

fn any_script() -> impl Strategy<Value = CallerScript> {
    let mode = prop_oneof![
        4 => Just(AcquireMode::Wait),
        2 => (0_u64..3_000).prop_map(AcquireMode::Within),
        1 => Just(AcquireMode::Try),
    ];
    let kind = prop_oneof![
        3 => Just(Kind::Success),
        1 => Just(Kind::Failure),
        1 => Just(Kind::Overload),
        1 => Just(Kind::Ignored),
    ];
    let ending = prop_oneof![
        4 => (kind, prop::option::of(0_u64..40)).prop_map(|(kind, spent)| Ending::Settle(kind, spent)),
        1 => Just(Ending::Drop),
    ];
    let some = (0_u64..2_000, 0..TENANTS.len(), 0_u64..30, mode);
    let others = (
        0_u64..500,
        prop::option::weighted(0.3, 0_u64..40),
        ending,
        prop::option::weighted(0.2, 0_u64..2_000),
    );
    (some, others).prop_map(
        |((arrives_after, tenant, tokens, mode), (works_for, reported, ending, aborted_after))| {
            CallerScript { arrives_after, tenant, tokens, mode, works_for, reported, ending, aborted_after }
        },
    )
}

/// Totals over all callers: permits granted, tokens that stay used, and settled units per tenant.
#[derive(Default)]
struct Totals {
    permits: AtomicU64,
    tokens: AtomicU64,
    requests: [AtomicI64; 3],
    units: [AtomicI64; 3],
}

/// The tokens that stay used, by the outcome table; `None` if all are returned.
fn used(script: &CallerScript) -> Option<u64> {
    match script.ending {
        Ending::Settle(_, Some(spent)) => Some(spent),
        Ending::Settle(Kind::Success, None) => Some(script.reported.unwrap_or(script.tokens)),
        Ending::Settle(_, None) | Ending::Drop => script.reported,
    }
}

impl Totals {
    fn record(&self, script: &CallerScript, tokens: Option<u64>) {
        if let Some(tokens) = tokens {
            self.tokens.fetch_add(tokens, Ordering::Relaxed);
            self.requests[script.tenant].fetch_add(1, Ordering::Relaxed);
            let units = i64::try_from(tokens).expect("a small number");
            self.units[script.tenant].fetch_add(units, Ordering::Relaxed);
        }
    }
}

/// Records the usage of a caller, also if it is aborted.
struct UsageGuard<'a> {
    totals: &'a Totals,
    script: &'a CallerScript,
    tokens: Option<u64>,
}

impl Drop for UsageGuard<'_> {
    fn drop(&mut self) {
        self.totals.record(self.script, self.tokens);
    }
}

/// How a caller waits: on a paused clock, or on threads by yielding.
#[derive(Debug, Clone, Copy)]
enum Delay {
    Time,
    Yields,
}

impl Delay {
    async fn run(self, span: u64) {
        match self {
            Self::Time => tokio::time::sleep(millis(span)).await,
            Self::Yields => {
                for _ in 0..span {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
}

async fn run_caller(joined: Joined, script: CallerScript, totals: Arc<Totals>, delay: Delay) {
    delay.run(script.arrives_after).await;
    let (subject, cost) = ((TENANTS[script.tenant], "gpt"), Cost::request().tokens(script.tokens));
    let permit = match script.mode {
        AcquireMode::Wait => joined.acquire(subject, cost).await,
        AcquireMode::Within(span) => joined.acquire_within(subject, cost, millis(span)).await,
        AcquireMode::Try => joined.try_acquire(subject, cost).await,
    };
    let mut permit = match permit {
        Ok(permit) => permit,
        Err(error) => {
            let is_unavailable =
                matches!(&error, JoinedError::Limit(tidegate::LimitError::Unavailable { .. }));
            assert!(
                is_unavailable || !matches!(script.mode, AcquireMode::Wait),
                "a waiting caller is admitted: {error}"
            );
            assert!(!error.is_final(), "{error}");
            return;
        }
    };
    totals.permits.fetch_add(1, Ordering::Relaxed);
    let mut usage = UsageGuard { totals: &totals, script: &script, tokens: None };
    if let Some(tokens) = script.reported {
        permit.spend(tokens);
        usage.tokens = Some(tokens);
    }
    delay.run(script.works_for).await;
    usage.tokens = used(&script);
    match script.ending {
        Ending::Drop => drop(permit),
        Ending::Settle(kind, spent) => {
            let outcome = match kind {
                Kind::Success => Outcome::success(),
                Kind::Failure => Outcome::failure(),
                Kind::Overload => Outcome::overload(),
                _ => Outcome::ignored(),
            };
            let outcome = spent.map_or(outcome, |tokens| outcome.spent(Cost::request().tokens(tokens)));
            // From here on the settle is delivered, even if this future is dropped.
            permit.settle(outcome).await.expect("settled now or later");
        }
    }
}

/// Two tenants of one organisation and an independent one, each with a few units per second.
async fn populate(store: &Memory) {
    let admin = Limiter::new(store.clone());
    for name in ["left", "right"] {
        child(&admin, name, "org").await;
    }
    let own = [Limit::per_second("rpm", 4).burst(3), Limit::per_second("tpm", 60).burst(40)];
    let above = [Limit::per_second("rpm", 6).burst(4), Limit::per_second("tpm", 90).burst(60)];
    let ops = admin.admin("ops");
    ops.set_policy(Scope::System, policy(own)).await.expect("memory is available");
    ops.set_policy(Scope::Entity(id("org")), policy(above)).await.expect("memory is available");
}

fn throttle(slots: u32, rate: Option<u64>, pace: Option<u64>) -> Throttle {
    let mut builder = Throttle::builder()
        .slots(Slots::fixed(slots))
        .budget(Budget::tokens(BUDGET, secs(86_400)))
        .controller(Controller::Fixed)
        .random(Random::seeded(7));
    if let Some(rate) = rate {
        builder = builder.rate(Rate::per_second(rate));
    }
    if let Some(pace) = pace {
        builder = builder.pace(Pace::every(millis(pace)));
    }
    builder.build().expect("within the bounds")
}

/// Runs all callers, and checks the invariants after the last one.
async fn check_scripts(throttle: Throttle, limiter: &Limiter, store: &Memory, scripts: Vec<CallerScript>) {
    let joined = throttle.limited_by(limiter);
    let totals = Arc::new(Totals::default());
    let mut tasks = JoinSet::new();
    for script in scripts {
        let aborted_after = script.aborted_after.map(|after| script.arrives_after + after);
        let handle = tasks.spawn(run_caller(joined.clone(), script, Arc::clone(&totals), Delay::Time));
        if let Some(after) = aborted_after {
            tokio::spawn(async move {
                Delay::Time.run(after).await;
                handle.abort();
            });
        }
    }
    // A waiter lost in a queue would hit this timeout.
    let all = tokio::time::timeout(secs(3_600), async {
        while let Some(ended) = tasks.join_next().await {
            assert!(ended.is_ok() || ended.is_err_and(|error| error.is_cancelled()), "no caller panics");
        }
    });
    all.await.expect("every caller gets a result");
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0));
    assert_eq!(snapshot.admitted, totals.permits.load(Ordering::Relaxed), "cancelled admissions were undone");
    assert_eq!(snapshot.tokens_used, totals.tokens.load(Ordering::Relaxed));
    limiter.drain().await;
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, stats.waiting, stats.settling, stats.unsettled), (0, 0, 0, 0));
    let mut org = BTreeMap::new();
    for (number, tenant) in TENANTS.into_iter().enumerate() {
        for (limit, sums) in [("rpm", &totals.requests), ("tpm", &totals.units)] {
            let units = sums[number].load(Ordering::Relaxed);
            check_level(store, (tenant, "gpt"), limit, units).await;
            if tenant != "alone" {
                *org.entry(limit).or_insert(0) += units;
            }
        }
    }
    for (limit, units) in org {
        check_level(store, ("org", "gpt"), limit, units).await;
    }
}

/// Checks that bucket and ledger have exactly the settled units.
async fn check_level(store: &Memory, subject: (&str, &str), limit: &str, units: i64) {
    let consumed = level(store, subject, limit).await.map_or(0, |(_, consumed)| consumed);
    assert_eq!(consumed, units, "{limit} of {subject:?}");
    let in_ledger = settled(store, subject, limit).await.0;
    assert_eq!(i64::try_from(in_ledger), Ok(units), "{limit} of {subject:?} in the ledger");
}

proptest! {
    /// Invariants 1, 2, 3 and 5 over both halves: conservation, all or nothing, exactness.
    #[test]
    fn interleaved_tenants_conserve_slots_and_units(
        scripts in prop::collection::vec(any_script(), 1..50),
        slots in 1_u32..6,
        rate in prop::option::of(2_u64..20),
        pace in prop::option::of(1_u64..200),
        seed in any::<u64>(),
        is_bad in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let mut plan = FaultPlan::seeded(seed).delays(500, millis(15)).repeats(50);
            if is_bad {
                plan = plan.fails(40).loses(40).defers(20);
            }
            let store = network(plan);
            populate(memory(&store)).await;
            let limiter = over(&store).build().expect("within the bounds");
            check_scripts(throttle(slots, rate, pace), &limiter, memory(&store), scripts).await;
            store.deliver().await;
            let report = check(&store.inner().log());
            assert!(report.is_exact() && report.open.is_empty(), "{report}");
        });
    }

    /// The same on a store that replies at once.
    #[test]
    fn memory_store_conserves_slots_and_units(
        scripts in prop::collection::vec(any_script(), 1..50),
        slots in 1_u32..6,
        rate in prop::option::of(2_u64..20),
        pace in prop::option::of(1_u64..200),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let store = Memory::new();
            populate(&store).await;
            let limiter = Limiter::new(store.clone());
            check_scripts(throttle(slots, rate, pace), &limiter, &store, scripts).await;
        });
    }
}

#[test]
fn concurrent_callers_on_threads_all_complete() {
    for (seed, workers) in [(1, 2), (2, 3), (3, 4)] {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .enable_time()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let store = Memory::new();
            let admin = Limiter::new(store.clone());
            // Fast refill, so that it matters: one unit per millisecond.
            let limits =
                [Limit::per_second("rpm", 1_000).burst(3), Limit::per_second("tpm", 9_000).burst(100)];
            admin.admin("ops").set_policy(Scope::System, policy(limits)).await.expect("memory is available");
            let limiter = Limiter::new(store.clone());
            let mut random = Random::seeded(seed);
            let scripts = (0..300).map(|_| CallerScript {
                arrives_after: random.below(20),
                tenant: usize::try_from(random.below(3)).expect("three"),
                tokens: random.below(30),
                mode: if random.below(4) == 0 {
                    AcquireMode::Within(random.below(5))
                } else {
                    AcquireMode::Wait
                },
                works_for: random.below(3),
                reported: (random.below(3) == 0).then(|| random.below(10)),
                ending: if random.below(3) == 0 { Ending::Drop } else { Ending::Settle(Kind::Success, None) },
                aborted_after: (random.below(5) == 0).then(|| random.below(40)),
            });
            let all = check_scripts_on_threads(throttle(4, None, None), &limiter, scripts.collect());
            tokio::time::timeout(secs(60), all).await.expect("no waiter is lost");
        });
    }
}

/// On threads, an abort may fall between a grant and its record, so only held slots and units are compared.
async fn check_scripts_on_threads(throttle: Throttle, limiter: &Limiter, scripts: Vec<CallerScript>) {
    let joined = throttle.limited_by(limiter);
    let totals = Arc::new(Totals::default());
    let mut tasks = JoinSet::new();
    for script in scripts {
        let aborted_after = script.aborted_after.map(|after| script.arrives_after + after);
        let handle = tasks.spawn(run_caller(joined.clone(), script, Arc::clone(&totals), Delay::Yields));
        if let Some(after) = aborted_after {
            tokio::spawn(async move {
                Delay::Yields.run(after).await;
                handle.abort();
            });
        }
    }
    while let Some(ended) = tasks.join_next().await {
        assert!(ended.is_ok() || ended.is_err_and(|error| error.is_cancelled()), "no caller panics");
    }
    limiter.drain().await;
    let (snapshot, stats) = (throttle.snapshot(), limiter.stats());
    assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0));
    assert_eq!((stats.open_leases, stats.waiting, stats.settling, stats.unsettled), (0, 0, 0, 0));
    assert_eq!(snapshot.tokens_used, totals.tokens.load(Ordering::Relaxed));
}
