//! Many concurrent tasks, subjects and parents on good and bad networks: the checker finds no excess, and the
//! ledger matches the usage that the tasks report.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate::store::wrap::FaultPlan;
use tidegate::{
    Lease, Limit, LimitError, LimitName, Limiter, Memory, OnUnavailable, Random, Scope, SettleStatus,
    StoreError, Subject,
};
use tidegate_core::limit::exactness::{Entry, check, check_ledger};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::kit::limiter::{ACME, Network, child, id, level, memory, network, over, policy, settled};
use crate::kit::secs;

const ORGS: u64 = 2;
const USERS: u64 = 6;
const LIMITS: [&str; 2] = ["rpm", "tpm"];

fn runtime(workers: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(workers).enable_all().build().expect("a runtime can be made")
}

fn user(number: u64) -> String {
    format!("user{number}")
}

fn org(user: u64) -> String {
    format!("org{}", user % ORGS)
}

/// Six users of two organisations, each with its own limits that refill fast enough to matter.
async fn populate(store: &Memory) {
    let admin = Limiter::new(store.clone());
    for number in 0..USERS {
        child(&admin, &user(number), &org(number)).await;
    }
    let own = [Limit::per_second("rpm", 500).burst(60), Limit::per_second("tpm", 9_000).burst(3_000)];
    let above = [Limit::per_second("rpm", 900).burst(90), Limit::per_second("tpm", 20_000).burst(6_000)];
    let ops = admin.admin("ops");
    ops.set_policy(Scope::System, policy(own)).await.expect("memory is available");
    for number in 0..ORGS {
        let scope = Scope::Entity(id(&format!("org{number}")));
        ops.set_policy(scope, policy(above.clone())).await.expect("memory is available");
    }
}

/// The units that a task has settled, per user and limit.
type Sums = BTreeMap<(u64, &'static str), u64>;

/// One caller that acquires, adjusts, and ends its lease in a random way. Records what it settled.
async fn run_caller(limiter: Limiter, random: &mut Random, sums: &mut Sums) {
    let number = random.below(USERS);
    let name = user(number);
    let subject = (name.as_str(), "gpt");
    let cost = [("rpm", 1 + random.below(3)), ("tpm", random.below(200))];
    let drawn = match random.below(3) {
        0 => limiter.acquire_within(subject, cost, Duration::from_millis(random.below(20))).await,
        1 => limiter.try_acquire(subject, cost).await,
        _ => {
            if limiter.spend(subject, cost).await.is_ok() {
                add(sums, number, [("rpm", Some(cost[0].1)), ("tpm", Some(cost[1].1))]);
            }
            return;
        }
    };
    let Ok(mut lease) = drawn else { return };
    for _ in 0..random.below(3) {
        if random.below(2) == 0 {
            // If this is refused or the store is unavailable, the lease stays unchanged.
            drop(lease.extend([("tpm", 1 + random.below(100))]).await);
        } else {
            let delta = i64::try_from(random.below(200)).expect("small") - 100;
            lease.adjust([("tpm", delta)]).await.expect("never refused");
        }
        if random.below(4) == 0 {
            tokio::task::yield_now().await;
        }
    }
    match random.below(4) {
        0 => drop(lease),
        1 => drop(lease.cancel().await.expect("settled now or later")),
        2 => settle(&mut lease, None, number, sums).await,
        _ => settle(&mut lease, Some(random.below(300)), number, sums).await,
    }
}

async fn settle(lease: &mut Lease, tpm: Option<u64>, number: u64, sums: &mut Sums) {
    let actual: Vec<_> = tpm.map(|units| ("tpm", units)).into_iter().collect();
    lease.settle(actual).await.expect("settled now or later");
    add(sums, number, [("rpm", lease.held("rpm")), ("tpm", tpm.or(lease.held("tpm")))]);
}

fn add(sums: &mut Sums, number: u64, units: [(&'static str, Option<u64>); 2]) {
    for (limit, units) in units {
        *sums.entry((number, limit)).or_default() += units.unwrap_or(0);
    }
}

/// Runs tasks with separate seeds; some are aborted halfway and do not settle.
async fn run_tasks(limiter: &Limiter, seed: u64, tasks: u64, calls: u64) -> Sums {
    let mut working = JoinSet::new();
    let mut idle = JoinSet::new();
    for number in 0..tasks {
        let (limiter, idler) = (limiter.clone(), limiter.clone());
        let mut random = Random::seeded(seed.wrapping_mul(1_000).wrapping_add(number));
        working.spawn(async move {
            let mut sums = Sums::new();
            for _ in 0..calls {
                run_caller(limiter.clone(), &mut random, &mut sums).await;
            }
            sums
        });
        idle.spawn(async move {
            let name = user(number % USERS);
            let lease = idler.acquire_within((name.as_str(), "gpt"), [("rpm", 2)], secs(60)).await;
            std::future::pending::<()>().await;
            drop(lease);
        });
    }
    let mut sums = Sums::new();
    let mut ended = 0;
    while let Some(own) = working.join_next().await {
        for (key, units) in own.expect("no task panics") {
            *sums.entry(key).or_default() += units;
        }
        ended += 1;
        if ended == tasks / 2 {
            idle.abort_all();
        }
    }
    idle.shutdown().await;
    sums
}

/// Checks every invariant after the last task.
async fn check_all(store: &Memory, log: &[Entry], sums: &Sums, seed: u64) {
    let report = check(log);
    assert!(report.is_exact(), "seed {seed}: {report}");
    assert!(report.open.is_empty(), "seed {seed}: {} leases are open", report.open.len());
    let usage = check_sums(store, sums, seed).await;
    let differing = check_ledger(log, &usage);
    assert!(differing.is_empty(), "seed {seed}: {differing:?}");
}

/// Checks that ledger and buckets have what the tasks settled, for each user and organisation.
async fn check_sums(store: &Memory, sums: &Sums, seed: u64) -> BTreeMap<(Subject, LimitName), u64> {
    let mut by_name: BTreeMap<(String, &str), u64> = BTreeMap::new();
    for ((number, limit), units) in sums {
        for name in [user(*number), org(*number)] {
            *by_name.entry((name, limit)).or_default() += units;
        }
    }
    let mut usage = BTreeMap::new();
    for ((name, limit), units) in by_name {
        let subject = (name.as_str(), "gpt");
        assert_eq!(settled(store, subject, limit).await.0, units, "seed {seed}: {limit} of {name}");
        check_level(store, subject, limit, units, seed).await;
        let subject = Subject::new(subject.0, subject.1).expect("valid names");
        usage.insert((subject, LimitName::new(limit).expect("a valid name")), units);
    }
    usage
}

/// Checks that exactly the settled units are consumed.
async fn check_level(store: &Memory, subject: (&str, &str), limit: &str, units: u64, seed: u64) {
    let consumed = level(store, subject, limit).await.map_or(0, |(_, consumed)| consumed);
    let expected = i64::try_from(units).expect("a small number");
    assert_eq!(consumed, expected, "seed {seed}: {limit} of {subject:?}");
}

fn check_idle(limiter: &Limiter, seed: u64) {
    let stats = limiter.stats();
    let left = (stats.open_leases, stats.waiting, stats.settling, stats.unsettled);
    assert_eq!(left, (0, 0, 0, 0), "seed {seed}");
}

#[test]
fn concurrent_tasks_on_memory_store_lose_nothing() {
    for (seed, workers) in [(1, 2), (2, 3), (3, 4)] {
        runtime(workers).block_on(async {
            let store = Memory::new();
            populate(&store).await;
            let limiter = Limiter::new(store.clone());
            let sums = run_tasks(&limiter, seed, 12, 60).await;
            limiter.drain().await;
            check_idle(&limiter, seed);
            check_sums(&store, &sums, seed).await;
        });
    }
}

#[test]
fn concurrent_tasks_on_good_network_are_exact() {
    for (seed, workers) in [(4, 2), (5, 3), (6, 4)] {
        runtime(workers).block_on(async {
            let store = network(FaultPlan::seeded(seed));
            populate(memory(&store)).await;
            let limiter = over(&store).store_deadline(secs(60)).build().unwrap();
            let sums = run_tasks(&limiter, seed, 12, 60).await;
            limiter.drain().await;
            check_idle(&limiter, seed);
            assert_eq!(store.inner().missed(), 0);
            check_all(memory(&store), &store.inner().log(), &sums, seed).await;
        });
    }
}

/// A network that fails, loses, repeats, defers and delays calls. Its deadline is long, so that a slow
/// machine adds no faults.
fn bad_network(seed: u64) -> Network {
    let plan = FaultPlan::seeded(seed)
        .fails(40)
        .loses(40)
        .repeats(60)
        .defers(40)
        .delays(200, Duration::from_millis(1));
    network(plan)
}

/// One caller on a bad network: confirmed calls stay charged, and unconfirmed ones are returned.
async fn run_caller_on_bad_network(limiter: Limiter, random: &mut Random, sums: &mut Sums) {
    let number = random.below(USERS);
    let name = user(number);
    let cost = [("rpm", 1 + random.below(3)), ("tpm", 1 + random.below(200))];
    let Ok(mut lease) = limiter.try_acquire((name.as_str(), "gpt"), cost).await else { return };
    for _ in 0..random.below(3) {
        if random.below(2) == 0 {
            drop(lease.extend([("tpm", 1 + random.below(100))]).await);
        } else {
            let delta = i64::try_from(random.below(200)).expect("small") - 100;
            lease.adjust([("tpm", delta)]).await.expect("deferred if its reply is lost");
        }
    }
    match random.below(3) {
        0 => drop(lease),
        1 => assert!(matches!(
            lease.cancel().await.expect("now or later"),
            SettleStatus::Now | SettleStatus::Later
        )),
        _ => {
            let tpm = (random.below(2) == 0).then(|| random.below(300));
            settle(&mut lease, tpm, number, sums).await;
        }
    }
}

#[test]
fn concurrent_tasks_on_bad_network_are_exact() {
    for seed in [11, 12, 13, 14] {
        runtime(3).block_on(async {
            let store = bad_network(seed);
            populate(memory(&store)).await;
            let limiter = over(&store).store_deadline(secs(60)).build().unwrap();
            let mut tasks = JoinSet::new();
            for number in 0..8 {
                let limiter = limiter.clone();
                let mut random = Random::seeded(seed * 1_000 + number);
                tasks.spawn(async move {
                    let mut sums = Sums::new();
                    for _ in 0..30 {
                        run_caller_on_bad_network(limiter.clone(), &mut random, &mut sums).await;
                    }
                    sums
                });
            }
            let mut sums = Sums::new();
            for own in tasks.join_all().await {
                for (key, units) in own {
                    *sums.entry(key).or_default() += units;
                }
            }
            limiter.drain().await;
            check_idle(&limiter, seed);
            store.deliver().await;
            let faults = store.faults();
            assert!(faults.lost > 0 && faults.deferred > 0 && faults.repeated > 0, "seed {seed}: {faults:?}");
            assert_eq!(store.inner().missed(), 0);
            check_all(memory(&store), &store.inner().log(), &sums, seed).await;
        });
    }
}

#[test]
fn aborted_tasks_leave_only_settled_units() {
    for seed in [51, 52, 53] {
        runtime(3).block_on(async {
            let store =
                network(FaultPlan::seeded(seed).loses(30).repeats(30).delays(700, Duration::from_millis(1)));
            populate(memory(&store)).await;
            let limiter = over(&store).store_deadline(secs(60)).build().unwrap();
            let mut random = Random::seeded(seed);
            let mut tasks = Vec::new();
            for number in 0..200 {
                let limiter = limiter.clone();
                let mut own = Random::seeded(seed * 1_000 + number);
                tasks
                    .push(tokio::spawn(async move { run_caller(limiter, &mut own, &mut Sums::new()).await }));
                if random.below(2) == 0 {
                    tokio::task::yield_now().await;
                }
                let place = usize::try_from(random.below(tasks.len() as u64)).expect("a place in the list");
                tasks[place].abort();
            }
            for task in tasks {
                drop(task.await);
            }
            limiter.drain().await;
            check_idle(&limiter, seed);
            let users = (0..USERS).map(user);
            for name in users.chain((0..ORGS).map(org)) {
                for limit in LIMITS {
                    let subject = (name.as_str(), "gpt");
                    let (units, _) = settled(memory(&store), subject, limit).await;
                    check_level(memory(&store), subject, limit, units, seed).await;
                }
            }
        });
    }
}

#[test]
fn fifty_of_120_concurrent_draws_are_granted() {
    for over_network in [false, true] {
        runtime(4).block_on(async {
            let store = network(FaultPlan::seeded(5).repeats(300));
            let limits = [Limit::per_day("rpm", 50)];
            let limiter = if over_network {
                over(&store).defaults(limits).store_deadline(secs(60)).build().unwrap()
            } else {
                Limiter::builder(memory(&store).clone()).defaults(limits).build().unwrap()
            };
            let mut tasks = JoinSet::new();
            for _ in 0..120 {
                let limiter = limiter.clone();
                tasks.spawn(async move { limiter.try_acquire(ACME, [("rpm", 1)]).await });
            }
            let answers = tasks.join_all().await;
            let mut granted: Vec<_> = answers.into_iter().filter_map(Result::ok).collect();
            assert_eq!((granted.len(), limiter.stats().refused), (50, 70));
            for lease in &mut granted {
                lease.settle_full().await.unwrap();
            }
            assert_eq!(settled(memory(&store), ACME, "rpm").await, (50, 50));
            drop(granted);
            assert_eq!(limiter.stats().open_leases, 0);
        });
    }
}

#[test]
fn policy_changes_under_load_keep_levels_and_leases() {
    for seed in [21, 22] {
        runtime(3).block_on(async {
            let store = network(FaultPlan::seeded(seed).repeats(50));
            populate(memory(&store)).await;
            let limiter = over(&store).store_deadline(secs(60)).build().unwrap();
            // Another process: the cache of this one is stale for up to a minute, unless a draw reports the
            // change.
            let other = over(&store).store_deadline(secs(60)).build().unwrap();
            let changing = tokio::spawn({
                let other = other.clone();
                let mut random = Random::seeded(seed);
                async move {
                    for _ in 0..40 {
                        let (rpm, tpm) = (1 + random.below(100), 200 + random.below(5_000));
                        let limits = [
                            Limit::per_second("rpm", 1 + random.below(1_000)).burst(rpm),
                            Limit::per_second("tpm", 1 + random.below(20_000)).burst(tpm),
                        ];
                        let scope = match random.below(3) {
                            0 => Scope::System,
                            number => Scope::Entity(id(&user(number))),
                        };
                        other
                            .admin("ops")
                            .set_policy(scope, policy(limits))
                            .await
                            .expect("the store is available");
                        // It draws by the new policy at once.
                        let name = user(random.below(USERS));
                        drop(other.try_acquire((name.as_str(), "gpt"), [("rpm", 1)]).await);
                        tokio::task::yield_now().await;
                    }
                }
            });
            let sums = run_tasks(&limiter, seed, 8, 40).await;
            changing.await.unwrap();
            limiter.drain().await;
            other.drain().await;
            check_idle(&limiter, seed);
            check_idle(&other, seed);
            assert_eq!(store.inner().missed(), 0);
            check_all(memory(&store), &store.inner().log(), &sums, seed).await;
        });
    }
}

#[tokio::test(start_paused = true)]
async fn stale_process_neither_flips_bucket_nor_leases() {
    let store = network(FaultPlan::seeded(7));
    let (old, new) = (over(&store).build().unwrap(), over(&store).build().unwrap());
    let admin = new.admin("ops");
    admin
        .set_policy(Scope::System, policy([Limit::per_day("rpm", 100), Limit::per_day("tpm", 9)]))
        .await
        .unwrap();
    let mut held = old.try_acquire(ACME, [("rpm", 30), ("tpm", 2)]).await.unwrap();
    admin.set_policy(Scope::System, policy([Limit::per_day("rpm", 20)])).await.unwrap();
    new.spend(ACME, [("rpm", 1)]).await.unwrap();
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((19, 31)), "kept, and capped");
    // The old policy is not restored by a draw, an extension, an adjustment or a settle.
    let error = old.try_acquire(ACME, [("rpm", 21)]).await.unwrap_err();
    assert!(matches!(error, LimitError::TooLarge(_)), "the stored policy decides: {error}");
    held.extend([("rpm", 5)]).await.unwrap();
    held.adjust([("tpm", 1)]).await.unwrap();
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((14, 36)));
    held.settle([("rpm", 40)]).await.unwrap();
    assert_eq!(level(memory(&store), ACME, "rpm").await, Some((9, 41)));
    assert_eq!(settled(memory(&store), ACME, "tpm").await, (3, 1), "of a removed limit");
    assert_eq!(new.balances(ACME).await.unwrap()[0].balance.burst, 20);
    let report = check(&store.inner().log());
    assert!(report.is_exact(), "{report}");
}

#[tokio::test(start_paused = true)]
async fn degraded_leases_never_charge_the_store() {
    let store = network(FaultPlan::seeded(31).loses(80).fails(80).defers(80));
    populate(memory(&store)).await;
    let allow = policy([]).on_unavailable(OnUnavailable::Allow);
    Limiter::new(memory(&store).clone())
        .admin("ops")
        .set_policy(Scope::Entity(id("user1")), allow)
        .await
        .unwrap();
    let limiter = over(&store).build().unwrap();
    let mut random = Random::seeded(31);
    let mut units = 0;
    for _ in 0..300 {
        let cost = 1 + random.below(3);
        let drawn = limiter.try_acquire(("user1", "gpt"), [("rpm", cost)]).await;
        let mut lease = match drawn {
            Ok(lease) => lease,
            Err(LimitError::Limited(_) | LimitError::Unavailable { .. }) => continue,
            Err(error) => panic!("seed 31: {error}"),
        };
        if random.below(2) == 0 {
            let is_degraded = lease.degraded().is_some();
            lease.settle_full().await.unwrap();
            units += if is_degraded { 0 } else { cost };
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    limiter.drain().await;
    store.deliver().await;
    let degraded = limiter.stats().degraded;
    assert!(degraded > 0 && units > 0, "seed 31: {degraded} degraded, {units} units");
    assert_eq!(settled(memory(&store), ("user1", "gpt"), "rpm").await.0, units, "seed 31");
    let consumed = level(memory(&store), ("user1", "gpt"), "rpm").await.unwrap().1;
    assert_eq!(u64::try_from(consumed), Ok(units), "seed 31");
    let report = check(&store.inner().log());
    assert!(report.is_exact() && report.open.is_empty(), "seed 31: {report}");
}

#[tokio::test(start_paused = true)]
async fn repeated_or_late_steps_count_once() {
    let store = network(FaultPlan::seeded(41).repeats(500).defers(300));
    let limiter = over(&store).defaults(LIMITS.map(|name| Limit::per_day(name, 10_000_000))).build().unwrap();
    let mut sum = 0;
    for number in 0..100 {
        let Ok(mut lease) = limiter.try_acquire(ACME, [("rpm", 5)]).await else { continue };
        drop(lease.extend([("rpm", 3)]).await);
        lease.adjust([("rpm", -1)]).await.unwrap();
        if number % 2 == 0 {
            lease.settle_full().await.unwrap();
            sum += lease.held("rpm").unwrap();
        }
        let ended = lease.settle([("rpm", 1_000)]).await;
        if number % 2 == 0 {
            assert!(matches!(ended, Err(LimitError::Store(StoreError::Ended { .. }))), "{ended:?}");
        } else {
            ended.unwrap();
            sum += 1_000;
        }
        drop(lease);
        tokio::time::sleep(secs(2)).await;
    }
    limiter.drain().await;
    store.deliver().await;
    assert!(sum > 0);
    assert_eq!(settled(memory(&store), ACME, "rpm").await.0, sum, "seed 41");
}
