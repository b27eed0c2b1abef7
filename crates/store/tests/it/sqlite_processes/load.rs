//! Four processes draw, extend, adjust, settle, cancel, spend and abandon leases on one file: the checker
//! finds no mismatch in their logs, the ledger has exactly the settled units, and each process gets its
//! share.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::exactness::{Entry, check, check_ledger};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Across;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::wrap::Observed;
use tidegate_store::{
    Adjust, Buckets, Cancel, Draw, DrawResult, Extend, Ledger, Lookup, Paging, Settle, Sqlite, SqliteOptions,
    UsageOf, UsageQuery,
};

use crate::kit::child::{Child, ChildArgs, test_name};
use crate::kit::common::{OPEN, levels, subject};
use crate::kit::log::{endings, from_line, to_line};
use crate::kit::sqlite::{TIMEOUT, TempFile};

const PROCESSES: u64 = 4;
/// Callers per process.
const CALLERS: u64 = 6;
/// Leases per progress report of a process, and the reports that make a fair share.
const LEASES: u64 = 60;
const SHARE: usize = 5;
/// The bound of the ratio between the shares of two processes.
const MORE_MAX: usize = 20;
const SHORT: Duration = Duration::from_millis(40);

#[test]
fn four_processes_on_one_file_are_exact_and_fair() {
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(run_child(&args));
    }
    let place = TempFile::new();
    let name = test_name!(four_processes_on_one_file_are_exact_and_fair);
    let mut children: Vec<_> =
        (0..PROCESSES).map(|number| Child::start(name, &place.path, number, 20_270_115 + number)).collect();
    children.iter().for_each(Child::wait_ready);
    let began = Instant::now();
    children.iter_mut().for_each(Child::go);
    // Runs until each process has its share.
    for child in &children {
        (0..SHARE).for_each(|_| assert_eq!(child.next_line().as_deref(), Some("did")));
    }
    let shares: Vec<_> = children.iter().map(|child| SHARE + child.lines_so_far().len()).collect();
    println!("{LEASES} leases per report, reports {shares:?}, in {:?}", began.elapsed());
    children.iter_mut().for_each(Child::go);
    for child in &children {
        let report = std::iter::from_fn(|| child.next_line()).find(|line| line != "did");
        println!("{}", report.expect("a child reports its result"));
    }
    children.into_iter().for_each(Child::wait);
    println!("{}", runtime().block_on(check_logs(&place)));
    assert!(
        shares.iter().all(|share| *share * MORE_MAX >= SHARE.max(shares.iter().copied().max().unwrap_or(0)))
    );
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

async fn run_child(args: &ChildArgs) {
    let opened = SqliteOptions::file(&args.path).deadline(TIMEOUT).open().await;
    let store = opened.expect("the file is opened");
    let observed = Arc::new(Observed::new(store.clone()));
    ChildArgs::wait_for_go();
    let began = Instant::now();
    let (done, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let random = Random::seeded(args.seed * 1_000 + caller);
            let number = u128::from(args.number * CALLERS + caller) << 40;
            let mut caller = Caller { store: Arc::clone(&observed), random, number, abandoned: Vec::new() };
            let (done, is_over) = (Arc::clone(&done), Arc::clone(&is_over));
            tokio::spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    caller.lease().await;
                    if (done.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(LEASES) {
                        ChildArgs::report("did");
                    }
                }
                caller.abandoned
            })
        })
        .collect();
    let stopped = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
    drop(stopped.await);
    is_over.store(true, Ordering::Relaxed);
    let mut text = String::new();
    for caller in callers {
        for (lease, on_expiry) in caller.await.expect("a caller gets contractual answers") {
            writeln!(text, "abandoned\t{lease}\t{}", u8::from(on_expiry == OnExpiry::Return))
                .expect("a text");
        }
    }
    let took = began.elapsed();
    assert_eq!(observed.missed(), 0);
    for entry in observed.log() {
        writeln!(text, "{}", to_line(&entry)).expect("a text");
    }
    std::fs::write(args.path.with_extension(format!("log-{}", args.number)), text).expect("a log");
    let (number, stats, done) = (args.number, store.stats(), done.load(Ordering::Relaxed));
    ChildArgs::report(&format!("process {number}: {done} leases in {took:?}, {stats:?}"));
    store.close().await;
}

struct Caller {
    store: Arc<Observed<Sqlite>>,
    random: Random,
    number: u128,
    abandoned: Vec<(LeaseId, OnExpiry)>,
}

impl Caller {
    fn levels(&mut self) -> Arc<Levels> {
        let own = [
            Limit::per_second("rpm", 300).burst(20),
            Limit::per_second("tpm", 20_000).burst(400),
            Limit::per_second("tpm", 45_000).burst(700).across(Across::Entities),
        ];
        let shared = [Limit::per_second("rpm", 900).burst(30), Limit::per_second("tpm", 50_000).burst(900)];
        let root = [Limit::per_second("tpm", 40_000).burst(800)];
        let child = format!("child-{}", self.random.below(5));
        let parent = format!("parent-{}", self.random.below(2));
        levels(&[(&child, &own), (&parent, &shared), ("root", &root)])
    }

    /// One lease from its draw to its end. Every call must succeed: none may be unavailable.
    async fn lease(&mut self) {
        let levels = self.levels();
        self.number += 1;
        let units = levels.amounts(&[("rpm", 1), ("tpm", self.random.below(80))]).expect("a cost");
        let lease = LeaseId::new(1_800_000_000_000, self.number);
        let mut draw = Draw { lease, levels, units, terms: OPEN, is_watched: true };
        let choice = self.random.below(10);
        if choice == 0 {
            self.store.spend(&draw).await.expect("a spend is answered");
            return;
        }
        if choice <= 2 {
            draw.terms.deadline = SHORT;
            draw.terms.on_expiry = if choice == 1 { OnExpiry::Settle } else { OnExpiry::Return };
        }
        if let DrawResult::Refused(_) = self.store.draw(&draw).await.expect("the store responds") {
            return;
        }
        if choice <= 2 {
            self.abandoned.push((lease, draw.terms.on_expiry));
            return;
        }
        let step = self.steps(&draw).await;
        let levels = Arc::clone(&draw.levels);
        if choice <= 5 {
            let cancel = Cancel { lease, step, levels, is_watched: true };
            self.store.cancel(&cancel).await.expect("the store responds");
        } else {
            let used = [("rpm", 1), ("tpm", self.random.below(120))];
            let named = usize::try_from(self.random.below(3)).expect("it is small");
            let actual = levels.amounts(&used[..named]).expect("an amount");
            let settle = Settle { lease, step, levels, actual, is_watched: true };
            self.store.settle(&settle).await.expect("the store responds");
        }
    }

    /// Takes up to two steps between the draw and the end. Returns the number of the next step.
    async fn steps(&mut self, draw: &Draw) -> u32 {
        let count = u32::try_from(self.random.below(3)).expect("it is small");
        for step in 1..=count {
            let (lease, levels) = (draw.lease, Arc::clone(&draw.levels));
            if self.random.below(2) == 0 {
                let units = levels.amounts(&[("tpm", self.random.below(60))]).expect("a cost");
                let extend = Extend { lease, step, levels, units };
                self.store.extend(&extend).await.expect("the store responds");
            } else {
                let more = i64::try_from(self.random.below(80)).expect("it is small") - 40;
                let deltas = levels.deltas(&[("tpm", more)]).expect("a change");
                let adjust = Adjust { lease, step, levels, deltas };
                self.store.adjust(&adjust).await.expect("the store responds");
            }
        }
        count + 1
    }
}

/// Checks all logs against the store, and returns a summary line.
async fn check_logs(place: &TempFile) -> String {
    let mut abandoned = HashMap::new();
    let mut logs: Vec<Vec<Entry>> = Vec::new();
    for number in 0..PROCESSES {
        let text = std::fs::read_to_string(place.path.with_extension(format!("log-{number}")));
        let mut log = Vec::new();
        for line in text.expect("a child wrote its log").lines() {
            if let Some(line) = line.strip_prefix("abandoned\t") {
                let (lease, returns) = line.split_once('\t').expect("a lease and its expiry");
                let on_expiry = if returns == "1" { OnExpiry::Return } else { OnExpiry::Settle };
                abandoned.insert(lease.parse().expect("a lease"), (SHORT, on_expiry));
            } else {
                log.push(from_line(line));
            }
        }
        logs.push(log);
    }
    let mut log = logs.concat();
    log.extend(endings(&log, &abandoned));
    let store = Sqlite::open(&place.path).await.expect("the file is opened");
    wait_until_all_ended(place, &store).await;
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    assert!(report.open.is_empty(), "{:?}", report.open);
    let used = usage(&store).await;
    let wrong = check_ledger(&log, &used);
    assert!(wrong.is_empty(), "{wrong:?}");
    let subjects = used.keys().map(|(subject, _)| subject.clone()).collect();
    let seen = store.balances(&Lookup::Subjects(subjects)).await.expect("balances are returned");
    for bucket in seen.buckets {
        for meter in bucket.meters {
            let key = (bucket.subject.clone(), meter.rule().name().clone());
            let settled = used.get(&key).copied().unwrap_or_default();
            assert_eq!(meter.consumed(), i64::try_from(settled).expect("it is small"), "{key:?}");
        }
    }
    let (entries, abandoned) = (log.len(), abandoned.len());
    format!("{report}; {entries} entries, {abandoned} leases abandoned to their deadlines")
}

/// Waits for the deadlines of abandoned leases, by the store's own clock.
async fn wait_until_all_ended(place: &TempFile, store: &Sqlite) {
    let open = "SELECT COUNT(*) FROM leases WHERE how IS NULL";
    for _ in 0..12_000 {
        if place.outside().query_row(open, [], |row| row.get::<_, i64>(0)).expect("a count") == 0 {
            return;
        }
        store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are returned");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("leases are open a minute after their deadlines");
}

/// The units in the ledger, by subject and limit.
pub(crate) async fn usage(
    store: &Sqlite,
) -> BTreeMap<(tidegate_core::limit::name::Subject, tidegate_core::limit::name::LimitName), u64> {
    let of = UsageOf::Resource(subject("any").resource);
    let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let page = store.usage(&query, &Paging::default()).await.expect("usage is returned");
    assert!(page.next.is_none(), "one page has all usage");
    let mut used = BTreeMap::new();
    for line in page.items {
        *used.entry((line.subject, line.limit)).or_default() += line.tally.units;
    }
    used
}
