//! Random callers of several tenants behind one throttle, at random moments, on good and bad networks: whatever they
//! do, both halves end as they began, everybody is served or told, and the store's log is exact.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use proptest::prelude::*;
use tidegate::store::wrap::Plan;
use tidegate::{
    Budget, Controller, Cost, Joined, JoinedError, Kind, Limit, Limiter, Memory, Outcome, Pace, Random, Rate,
    Scope, Slots, Throttle,
};
use tidegate_core::limit::check::check;
use tokio::task::JoinSet;

use crate::kit::limiter::{child, id, level, memory, network, over, policy, settled};
use crate::kit::{millis, secs};

const TENANTS: [&str; 3] = ["left", "right", "alone"];
const BUDGET: u64 = 1 << 30;

/// What one caller does.
#[derive(Debug, Clone)]
struct Life {
    comes: u64,
    tenant: usize,
    tokens: u64,
    way: Way,
    works: u64,
    reports: Option<u64>,
    ends: Ends,
    /// It is aborted this long after it came, if it is still there.
    aborted: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
enum Way {
    Wait,
    Within(u64),
    Try,
}

#[derive(Debug, Clone, Copy)]
enum Ends {
    Settles(Kind, Option<u64>),
    Drops,
}

fn any_life() -> impl Strategy<Value = Life> {
    let way = prop_oneof![
        4 => Just(Way::Wait),
        2 => (0_u64..3_000).prop_map(Way::Within),
        1 => Just(Way::Try),
    ];
    let kind = prop_oneof![
        3 => Just(Kind::Success),
        1 => Just(Kind::Failure),
        1 => Just(Kind::Overload),
        1 => Just(Kind::Ignored),
    ];
    let ends = prop_oneof![
        4 => (kind, prop::option::of(0_u64..40)).prop_map(|(kind, spent)| Ends::Settles(kind, spent)),
        1 => Just(Ends::Drops),
    ];
    let some = (0_u64..2_000, 0..TENANTS.len(), 0_u64..30, way);
    let others =
        (0_u64..500, prop::option::weighted(0.3, 0_u64..40), ends, prop::option::weighted(0.2, 0_u64..2_000));
    (some, others).prop_map(|((comes, tenant, tokens, way), (works, reports, ends, aborted))| Life {
        comes,
        tenant,
        tokens,
        way,
        works,
        reports,
        ends,
        aborted,
    })
}

/// What the callers know: permits they had, tokens that stay used, and units that stay settled by tenant.
#[derive(Default)]
struct Known {
    permits: AtomicU64,
    tokens: AtomicU64,
    requests: [AtomicI64; 3],
    units: [AtomicI64; 3],
}

/// What was used in the end, by the outcome table: `None` where all returns.
fn used(life: &Life) -> Option<u64> {
    match life.ends {
        Ends::Settles(_, Some(spent)) => Some(spent),
        Ends::Settles(Kind::Success, None) => Some(life.reports.unwrap_or(life.tokens)),
        Ends::Settles(_, None) | Ends::Drops => life.reports,
    }
}

impl Known {
    fn books(&self, life: &Life, tokens: Option<u64>) {
        if let Some(tokens) = tokens {
            self.tokens.fetch_add(tokens, Ordering::Relaxed);
            self.requests[life.tenant].fetch_add(1, Ordering::Relaxed);
            let units = i64::try_from(tokens).expect("a small number");
            self.units[life.tenant].fetch_add(units, Ordering::Relaxed);
        }
    }
}

/// A caller that was aborted reports only what it had reported.
struct Working<'a> {
    known: &'a Known,
    life: &'a Life,
    tokens: Option<u64>,
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.known.books(self.life, self.tokens);
    }
}

/// How a life passes its time: on a clock that is paused, or on threads by letting others run.
#[derive(Debug, Clone, Copy)]
enum Passing {
    Time,
    Turns,
}

impl Passing {
    async fn pass(self, span: u64) {
        match self {
            Self::Time => tokio::time::sleep(millis(span)).await,
            Self::Turns => {
                for _ in 0..span {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
}

async fn live(joined: Joined, life: Life, known: Arc<Known>, passing: Passing) {
    passing.pass(life.comes).await;
    let (subject, cost) = ((TENANTS[life.tenant], "gpt"), Cost::request().tokens(life.tokens));
    let permit = match life.way {
        Way::Wait => joined.acquire(subject, cost).await,
        Way::Within(span) => joined.acquire_within(subject, cost, millis(span)).await,
        Way::Try => joined.try_acquire(subject, cost).await,
    };
    let mut permit = match permit {
        Ok(permit) => permit,
        Err(error) => {
            let is_away = matches!(&error, JoinedError::Limit(tidegate::LimitError::Unavailable { .. }));
            assert!(is_away || !matches!(life.way, Way::Wait), "whoever waits is served: {error}");
            assert!(!error.is_final(), "{error}");
            return;
        }
    };
    known.permits.fetch_add(1, Ordering::Relaxed);
    let mut working = Working { known: &known, life: &life, tokens: None };
    if let Some(tokens) = life.reports {
        permit.spend(tokens);
        working.tokens = Some(tokens);
    }
    passing.pass(life.works).await;
    working.tokens = used(&life);
    match life.ends {
        Ends::Drops => drop(permit),
        Ends::Settles(kind, spent) => {
            let outcome = match kind {
                Kind::Success => Outcome::success(),
                Kind::Failure => Outcome::failure(),
                Kind::Overload => Outcome::overload(),
                _ => Outcome::ignored(),
            };
            let outcome = spent.map_or(outcome, |tokens| outcome.spent(Cost::request().tokens(tokens)));
            // From here on it is told, whether anybody waits for it or not.
            permit.settle(outcome).await.expect("heard now or later");
        }
    }
}

/// Two tenants of one organisation and one by itself, each with a few units a second.
async fn populate(store: &Memory) {
    let admin = Limiter::new(store.clone());
    for name in ["left", "right"] {
        child(&admin, name, "org").await;
    }
    let own = [Limit::per_second("rpm", 4).burst(3), Limit::per_second("tpm", 60).burst(40)];
    let above = [Limit::per_second("rpm", 6).burst(4), Limit::per_second("tpm", 90).burst(60)];
    let ops = admin.admin("ops");
    ops.set_policy(Scope::System, policy(own)).await.expect("memory is there");
    ops.set_policy(Scope::Entity(id("org")), policy(above)).await.expect("memory is there");
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

/// Lives all lives, and checks what is to hold when all have gone.
async fn check_lives(throttle: Throttle, limiter: &Limiter, store: &Memory, lives: Vec<Life>) {
    let joined = throttle.limited_by(limiter);
    let known = Arc::new(Known::default());
    let mut tasks = JoinSet::new();
    for life in lives {
        let aborted = life.aborted.map(|after| life.comes + after);
        let handle = tasks.spawn(live(joined.clone(), life, Arc::clone(&known), Passing::Time));
        if let Some(after) = aborted {
            tokio::spawn(async move {
                Passing::Time.pass(after).await;
                handle.abort();
            });
        }
    }
    // A line that forgets somebody would be waited for until here.
    let all = tokio::time::timeout(secs(3_600), async {
        while let Some(ended) = tasks.join_next().await {
            assert!(ended.is_ok() || ended.is_err_and(|error| error.is_cancelled()), "nobody panics");
        }
    });
    all.await.expect("everybody is served or told");
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0));
    assert_eq!(snapshot.admitted, known.permits.load(Ordering::Relaxed), "what never went out was undone");
    assert_eq!(snapshot.tokens_used, known.tokens.load(Ordering::Relaxed));
    limiter.drain().await;
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, stats.waiting, stats.settling, stats.unsettled), (0, 0, 0, 0));
    let mut org = BTreeMap::new();
    for (number, tenant) in TENANTS.into_iter().enumerate() {
        for (limit, sums) in [("rpm", &known.requests), ("tpm", &known.units)] {
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

/// Consumed and in the ledger is what was settled: nothing is held any more.
async fn check_level(store: &Memory, subject: (&str, &str), limit: &str, units: i64) {
    let consumed = level(store, subject, limit).await.map_or(0, |(_, consumed)| consumed);
    assert_eq!(consumed, units, "{limit} of {subject:?}");
    let in_ledger = settled(store, subject, limit).await.0;
    assert_eq!(i64::try_from(in_ledger), Ok(units), "{limit} of {subject:?} in the ledger");
}

proptest! {
    /// Invariants 1, 2, 3 and 5 over both halves: conservation, all or nothing, exactness.
    #[test]
    fn any_interleaving_of_tenants_conserves_both_halves_and_is_exact(
        lives in prop::collection::vec(any_life(), 1..50),
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
            let mut plan = Plan::seeded(seed).delays(500, millis(15)).repeats(50);
            if is_bad {
                plan = plan.fails(40).loses(40).defers(20);
            }
            let store = network(plan);
            populate(memory(&store)).await;
            let limiter = over(&store).build().expect("within the bounds");
            check_lives(throttle(slots, rate, pace), &limiter, memory(&store), lives).await;
            store.deliver().await;
            let report = check(&store.inner().log());
            assert!(report.is_exact() && report.open.is_empty(), "{report}");
        });
    }

    /// The same where the store answers at once.
    #[test]
    fn any_interleaving_on_the_memory_store_conserves_both_halves(
        lives in prop::collection::vec(any_life(), 1..50),
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
            check_lives(throttle(slots, rate, pace), &limiter, &store, lives).await;
        });
    }
}

#[test]
fn a_crowd_on_many_threads_loses_nothing_and_nobody() {
    for (seed, workers) in [(1, 2), (2, 3), (3, 4)] {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .enable_time()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let store = Memory::new();
            let admin = Limiter::new(store.clone());
            // Refilled fast enough to matter: a thousandth of a second brings a unit.
            let limits =
                [Limit::per_second("rpm", 1_000).burst(3), Limit::per_second("tpm", 9_000).burst(100)];
            admin.admin("ops").set_policy(Scope::System, policy(limits)).await.expect("memory is there");
            let limiter = Limiter::new(store.clone());
            let mut random = Random::seeded(seed);
            let lives = (0..300).map(|_| Life {
                comes: random.below(20),
                tenant: usize::try_from(random.below(3)).expect("three"),
                tokens: random.below(30),
                way: if random.below(4) == 0 { Way::Within(random.below(5)) } else { Way::Wait },
                works: random.below(3),
                reports: (random.below(3) == 0).then(|| random.below(10)),
                ends: if random.below(3) == 0 { Ends::Drops } else { Ends::Settles(Kind::Success, None) },
                aborted: (random.below(5) == 0).then(|| random.below(40)),
            });
            let all = check_lives_on_threads(throttle(4, None, None), &limiter, lives.collect());
            tokio::time::timeout(secs(60), all).await.expect("nobody is forgotten");
        });
    }
}

/// On threads, an abort may fall between a permit and its note: only what is held is compared.
async fn check_lives_on_threads(throttle: Throttle, limiter: &Limiter, lives: Vec<Life>) {
    let joined = throttle.limited_by(limiter);
    let known = Arc::new(Known::default());
    let mut tasks = JoinSet::new();
    for life in lives {
        let aborted = life.aborted.map(|after| life.comes + after);
        let handle = tasks.spawn(live(joined.clone(), life, Arc::clone(&known), Passing::Turns));
        if let Some(after) = aborted {
            tokio::spawn(async move {
                Passing::Turns.pass(after).await;
                handle.abort();
            });
        }
    }
    while let Some(ended) = tasks.join_next().await {
        assert!(ended.is_ok() || ended.is_err_and(|error| error.is_cancelled()), "nobody panics");
    }
    limiter.drain().await;
    let (snapshot, stats) = (throttle.snapshot(), limiter.stats());
    assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0));
    assert_eq!((stats.open_leases, stats.waiting, stats.settling, stats.unsettled), (0, 0, 0, 0));
    assert_eq!(snapshot.tokens_used, known.tokens.load(Ordering::Relaxed));
}
