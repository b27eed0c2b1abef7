//! Four processes draw, extend, settle and cancel over connections that are cut every few leases: the checker
//! finds no mismatch in their combined logs, the ledger has exactly the settled units, and the buckets have
//! consumed them.
//!
//! The work is fixed and the cuts follow its progress, so nothing depends on speed. `TIDEGATE_DEEP` makes it
//! longer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, check, check_ledger};
use tidegate_core::limit::name::Across;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Cancel, Draw, DrawResult, Extend, Lookup, Paging, Reply, Settle, Store, StoreError, UsageOf, UsageQuery,
};

use crate::kit::child::{Child, ChildArgs};
use crate::kit::common::{OPEN, levels, next_lease, subject, until_answered};
use crate::kit::log::{from_line, to_line};

const PROCESSES: u64 = 4;
/// Callers per process.
const CALLERS: u64 = 4;
/// Leases of a process between two cuts.
const CUT_EVERY: u64 = 8;

/// Leases per caller.
fn leases() -> u64 {
    if std::env::var_os("TIDEGATE_DEEP").is_some() { 1_000 } else { 25 }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// A folder for logs, whose name is also the namespace, with the address of the server.
pub(crate) fn soak_folder(url: &str) -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("soak_").tempdir().expect("a folder for a test");
    std::fs::write(folder.path().join("url"), url).expect("the folder exists");
    folder
}

/// The name of the namespace.
pub(crate) fn name(folder: &Path) -> String {
    folder.file_name().expect("it has a name").to_string_lossy().into_owned()
}

pub(crate) fn url(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("url")).expect("the parent wrote it")
}

/// Runs `test` in four child processes and waits until they exit. Returns a report line of each.
pub(crate) fn run_children(test: &str, folder: &Path) -> Vec<String> {
    let start = |number| Child::start(test, folder, number, 20_270_115 + number);
    let mut children: Vec<_> = (0..PROCESSES).map(start).collect();
    children.iter().for_each(Child::wait_ready);
    children.iter_mut().for_each(Child::go);
    let reports =
        children.iter().map(|child| child.next_line().expect("a child reports its result")).collect();
    children.into_iter().for_each(Child::wait);
    reports
}

/// The body of a child; `cut` is called after every few leases.
pub(crate) async fn run_child<S: Store + Clone>(args: &ChildArgs, store: S, mut cut: impl AsyncFnMut(u64)) {
    ChildArgs::wait_for_go();
    let (done, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let (store, done) = (store.clone(), Arc::clone(&done));
            let random = Random::seeded(args.seed * 1_000 + number);
            let mut caller = Caller { store, random, seen: BTreeSet::new(), log: Vec::new(), retries: 0 };
            tokio::spawn(async move {
                for _ in 0..leases() {
                    caller.lease().await;
                    done.fetch_add(1, Ordering::SeqCst);
                }
                (caller.log, caller.retries)
            })
        })
        .collect();
    let cutting = async {
        for number in 1.. {
            while done.load(Ordering::SeqCst) < number * CUT_EVERY && !is_over.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            if is_over.load(Ordering::SeqCst) {
                return;
            }
            cut(number).await;
        }
    };
    let working = async {
        let (mut log, mut retries) = (Vec::new(), 0);
        for caller in callers {
            let (seen, again) = caller.await.expect("a caller gets contractual answers");
            log.extend(seen);
            retries += again;
        }
        is_over.store(true, Ordering::SeqCst);
        (log, retries)
    };
    let ((log, retries), ()) = tokio::join!(working, cutting);
    let mut text = String::new();
    for entry in &log {
        writeln!(text, "{}", to_line(entry)).expect("a text");
    }
    std::fs::write(args.path.join(format!("log-{}", args.number)), text).expect("a log");
    ChildArgs::report(&format!("process {}: {} entries, {retries} retries", args.number, log.len()));
}

struct Caller<S> {
    store: S,
    random: Random,
    seen: BTreeSet<BucketId>,
    log: Vec<Entry>,
    retries: u64,
}

impl<S: Store> Caller<S> {
    fn levels(&mut self) -> Arc<Levels> {
        let mut own =
            vec![Limit::per_second("rpm", 400).burst(6), Limit::per_second("tpm", 20_000).burst(300)];
        if self.store.pool_refusal(Across::Entities).is_none() {
            own.push(Limit::per_second("tpm", 40_000).burst(400).across(Across::Entities));
        }
        let shared = [Limit::per_second("tpm", 50_000).burst(500), Limit::per_second("rpm", 900).burst(12)];
        let child = format!("child-{}", self.random.below(4));
        levels(&[(&child, &own), ("parent", &shared)])
    }

    /// Logs the effect of a step on every bucket that it names.
    fn note(&mut self, at: Stamp, kind: Kind, draw: &Draw, step: u32, units: &Units) {
        let lines = || draw.levels.levels().iter().flat_map(|level| &level.limits);
        let buckets = lines().filter(|line| units[line.name].is_some()).count();
        for level in draw.levels.levels() {
            for line in &level.limits {
                let Some(units) = units[line.name] else { continue };
                let bucket = BucketId::new(&level.subject, &line.rule);
                if self.seen.insert(bucket.clone()) {
                    self.log.push(Entry::shape(Stamp::ZERO, bucket.clone(), *line.rule.shape()));
                }
                let units = i64::try_from(units).expect("it is small");
                let units = if kind == Kind::Return { -units } else { units };
                let movement = Move::new(kind, draw.lease, step, units);
                let movement = match kind {
                    Kind::Draw | Kind::Extend => {
                        movement.one_of(u32::try_from(buckets).expect("they are few"))
                    }
                    _ => movement,
                };
                self.log.push(Entry::moved(at, bucket, movement));
            }
        }
    }

    /// One lease from its draw to its end.
    async fn lease(&mut self) {
        let levels = self.levels();
        let mut held = levels.amounts(&[("rpm", 1), ("tpm", self.random.below(80))]).expect("a cost");
        let draw = Draw {
            lease: next_lease(),
            levels: Arc::clone(&levels),
            units: held.clone(),
            terms: OPEN,
            is_watched: true,
        };
        let lease = draw.lease;
        let before = self.retries;
        match answered(&mut self.retries, || self.store.draw(&draw)).await {
            DrawResult::Granted(moved) => self.note(moved.at, Kind::Draw, &draw, 0, &held),
            DrawResult::Refused(_) => {
                if self.retries > before {
                    // An earlier attempt may still be under way, and find more units than this one.
                    let cancel = Cancel { lease, step: 1, levels, is_watched: true };
                    answered(&mut self.retries, || self.store.cancel(&cancel)).await;
                }
                return tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        let mut step = 1;
        if self.random.below(2) == 0 {
            let units = levels.amounts(&[("tpm", self.random.below(60))]).expect("a cost");
            let extend = Extend { lease, step, levels: Arc::clone(&levels), units: units.clone() };
            if let DrawResult::Granted(moved) =
                answered(&mut self.retries, || self.store.extend(&extend)).await
            {
                self.note(moved.at, Kind::Extend, &draw, step, &units);
                for (held, more) in held.iter_mut().zip(&units) {
                    *held = Some(held.unwrap_or(0) + more.unwrap_or(0));
                }
            }
            step += 1;
        }
        if self.random.below(3) == 0 {
            let cancel = Cancel { lease, step, levels, is_watched: true };
            let moved = answered(&mut self.retries, || self.store.cancel(&cancel)).await;
            self.note(moved.at, Kind::Return, &draw, step, &held);
        } else {
            let actual = levels.amounts(&[("rpm", 1), ("tpm", self.random.below(120))]).expect("amounts");
            let settle = Settle { lease, step, levels, actual: actual.clone(), is_watched: true };
            let moved = answered(&mut self.retries, || self.store.settle(&settle)).await;
            self.note(moved.at, Kind::Settle, &draw, step, &actual);
        }
    }
}

/// Retries until there is an answer, and counts the retries.
async fn answered<'a, T: Unpin>(retries: &mut u64, ask: impl Fn() -> Reply<'a, T>) -> T {
    let mut attempts = 0;
    let answer = until_answered(|| {
        attempts += 1;
        ask()
    });
    let answer = answer.await.unwrap_or_else(|error| panic!("a fault is not transient: {error:?}"));
    *retries += attempts - 1;
    answer
}

/// Checks the logs of all processes against the store, and returns a summary line.
pub(crate) async fn check_logs(folder: &Path, store: &dyn Store) -> Result<String, StoreError> {
    let mut log = Vec::new();
    for number in 0..PROCESSES {
        let text = std::fs::read_to_string(folder.join(format!("log-{number}"))).expect("a child's log");
        log.extend(text.lines().map(from_line));
    }
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    assert!(report.open.is_empty(), "{:?}", report.open);
    let of = UsageOf::Resource(subject("any").resource);
    let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
    let page = store.usage(&query, &Paging::default()).await?;
    assert!(page.next.is_none(), "one page has all usage");
    let mut used = BTreeMap::new();
    for line in page.items {
        *used.entry((line.subject, line.limit)).or_default() += line.tally.units;
    }
    let wrong = check_ledger(&log, &used);
    assert!(wrong.is_empty(), "{wrong:?}");
    let subjects: Vec<_> = used.keys().map(|(subject, _)| subject.clone()).collect();
    assert!(!subjects.is_empty());
    for bucket in store.balances(&Lookup::Subjects(subjects)).await?.buckets {
        for meter in bucket.meters {
            let key = (bucket.subject.clone(), meter.rule().name().clone());
            let settled = used.get(&key).copied().unwrap_or_default();
            assert_eq!(meter.consumed(), i64::try_from(settled).expect("it is small"), "{key:?}");
        }
    }
    Ok(format!("{report}; {} entries", log.len()))
}
