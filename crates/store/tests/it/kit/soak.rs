//! Four processes that draw, extend, settle and cancel, each over a wire that is cut every so many leases: the checker finds
//! nothing in what they have seen together, the ledger has what was settled, and the buckets have consumed that.
//!
//! How much they do is fixed, and how often they are cut goes by what they have done: nothing depends on how fast it goes.
//! `TIDEGATE_DEEP` makes it longer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::check::{BucketId, Entry, Kind, Move, check, check_ledger};
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Cancel, Draw, Drawn, Extend, Lookup, Paging, Reply, Settle, Store, StoreError, UsageOf, UsageQuery,
};

use crate::kit::child::{Child, Orders};
use crate::kit::log::{from_line, to_line};
use crate::kit::words::{OPEN, levels, next_lease, subject, until_answered};

const PROCESSES: u64 = 4;
/// In each process.
const CALLERS: u64 = 4;
/// Something is cut each time a process has done so many leases.
const CUT_EVERY: u64 = 8;

/// Leases of each caller.
fn leases() -> u64 {
    if std::env::var_os("TIDEGATE_DEEP").is_some() { 1_000 } else { 25 }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Where a soak is: a folder for logs, whose name is that of the namespace, and the address of the server.
pub(crate) fn place(url: &str) -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("soak_").tempdir().expect("a folder for a test");
    std::fs::write(folder.path().join("url"), url).expect("the folder is there");
    folder
}

/// The name of the namespace.
pub(crate) fn name(folder: &Path) -> String {
    folder.file_name().expect("it has a name").to_string_lossy().into_owned()
}

pub(crate) fn url(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("url")).expect("the parent wrote it")
}

/// Starts `test` of this program four times, lets them go at once, and waits until they are done. Says in a line each how it
/// went.
pub(crate) fn at_once(test: &str, folder: &Path) -> Vec<String> {
    let start = |number| Child::start(test, folder, number, 20_270_115 + number);
    let mut children: Vec<_> = (0..PROCESSES).map(start).collect();
    children.iter().for_each(Child::is_ready);
    children.iter_mut().for_each(Child::go);
    let told = children.iter().map(|child| child.hears().expect("a child reports how it went")).collect();
    children.into_iter().for_each(Child::ends);
    told
}

/// Does what a child does, while `cut` is called for every few leases that were done.
pub(crate) async fn be_a_child<S: Store + Clone>(orders: &Orders, store: S, mut cut: impl AsyncFnMut(u64)) {
    Orders::wait_for_go();
    let (done, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let (store, done) = (store.clone(), Arc::clone(&done));
            let random = Random::seeded(orders.seed * 1_000 + number);
            let mut caller = Caller { store, random, seen: BTreeSet::new(), log: Vec::new(), asked_again: 0 };
            tokio::spawn(async move {
                for _ in 0..leases() {
                    caller.lease().await;
                    done.fetch_add(1, Ordering::SeqCst);
                }
                (caller.log, caller.asked_again)
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
        let (mut log, mut asked_again) = (Vec::new(), 0);
        for caller in callers {
            let (seen, again) = caller.await.expect("a caller is answered as the contract says");
            log.extend(seen);
            asked_again += again;
        }
        is_over.store(true, Ordering::SeqCst);
        (log, asked_again)
    };
    let ((log, asked_again), ()) = tokio::join!(working, cutting);
    let mut text = String::new();
    for entry in &log {
        writeln!(text, "{}", to_line(entry)).expect("a text");
    }
    std::fs::write(orders.path.join(format!("log-{}", orders.number)), text).expect("a log");
    Orders::tell(&format!(
        "process {}: {} entries, asked again {asked_again} times",
        orders.number,
        log.len()
    ));
}

struct Caller<S> {
    store: S,
    random: Random,
    seen: BTreeSet<BucketId>,
    log: Vec<Entry>,
    asked_again: u64,
}

impl<S: Store> Caller<S> {
    fn levels(&mut self) -> Arc<Levels> {
        let own = [Limit::per_second("rpm", 400).burst(6), Limit::per_second("tpm", 20_000).burst(300)];
        let shared = [Limit::per_second("tpm", 50_000).burst(500), Limit::per_second("rpm", 900).burst(12)];
        let child = format!("child-{}", self.random.below(4));
        levels(&[(&child, &own), ("parent", &shared)])
    }

    /// Notes what a step did to every bucket it named.
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
        let before = self.asked_again;
        match answered(&mut self.asked_again, || self.store.draw(&draw)).await {
            Drawn::Granted(moved) => self.note(moved.at, Kind::Draw, &draw, 0, &held),
            Drawn::Refused(_) => {
                if self.asked_again > before {
                    // An earlier try may still be on its way, and find more there than this one.
                    let cancel = Cancel { lease, step: 1, levels, is_watched: true };
                    answered(&mut self.asked_again, || self.store.cancel(&cancel)).await;
                }
                return tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        let mut step = 1;
        if self.random.below(2) == 0 {
            let units = levels.amounts(&[("tpm", self.random.below(60))]).expect("a cost");
            let extend = Extend { lease, step, levels: Arc::clone(&levels), units: units.clone() };
            if let Drawn::Granted(moved) =
                answered(&mut self.asked_again, || self.store.extend(&extend)).await
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
            let moved = answered(&mut self.asked_again, || self.store.cancel(&cancel)).await;
            self.note(moved.at, Kind::Return, &draw, step, &held);
        } else {
            let actual = levels.amounts(&[("rpm", 1), ("tpm", self.random.below(120))]).expect("amounts");
            let settle = Settle { lease, step, levels, actual: actual.clone(), is_watched: true };
            let moved = answered(&mut self.asked_again, || self.store.settle(&settle)).await;
            self.note(moved.at, Kind::Settle, &draw, step, &actual);
        }
    }
}

/// Asks until there is an answer, and counts how often it is asked again.
async fn answered<'a, T: Unpin>(asked_again: &mut u64, ask: impl Fn() -> Reply<'a, T>) -> T {
    let mut asked = 0;
    let answer = until_answered(|| {
        asked += 1;
        ask()
    });
    let answer = answer.await.unwrap_or_else(|error| panic!("a fault is not transient: {error:?}"));
    *asked_again += asked - 1;
    answer
}

/// Judges what all of them have seen, and says so in a line.
pub(crate) async fn judge(folder: &Path, store: &dyn Store) -> Result<String, StoreError> {
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
    assert!(page.next.is_none(), "there are few");
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
