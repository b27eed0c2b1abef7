//! Processes draw from one pool and are killed at random moments: the checker finds no excess in the steps that
//! the engine has applied.
//!
//! A child reports each answered step, and each ending before it sends it. The parent asks the engine about
//! endings without an answer. A draw without an answer can only make the real level lower than the checked one.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, check};
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::Across;
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{Cancel, Draw, DrawResult, LeaseStatus, Movement, Settle, Store, StoreError};

use crate::kit::child::{Child, ChildArgs};
use crate::kit::common::{OPEN, levels};
use crate::kit::log::{from_line, to_line};

const PROCESSES: u64 = 4;
/// Callers per process.
const CALLERS: u64 = 4;
/// The marks of a report: the effect of a step, and the ending that is sent next.
const DONE: &str = "done\t";
const ENDING: &str = "ending\t";

/// Limits of which the pool is reached first.
fn levels_of(process: u64) -> Arc<Levels> {
    let own = Limit::per_second("tpm", 2_000).burst(300);
    let pool = Limit::per_second("tpm", 3_000).burst(400).across(Across::Entities);
    levels(&[(&format!("child-{}", process % 3), &[own, pool])])
}

/// Draws and ends leases until it is killed.
pub(crate) async fn run_child<S: Store + Clone>(args: &ChildArgs, store: S) {
    ChildArgs::wait_for_go();
    let callers = (0..CALLERS).map(|caller| {
        let (store, number, seed) = (store.clone(), args.number * CALLERS + caller, args.seed);
        let levels = levels_of(args.number);
        tokio::spawn(async move {
            let mut random = Random::seeded(seed * 1_000 + number);
            for count in 0_u64.. {
                let lease = LeaseId::new(1_800_000_000_000 + number, count.into());
                run_lease(&store, lease, &levels, &mut random).await.expect("the engine responds");
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.expect("a caller runs until it is killed");
    }
}

async fn run_lease(
    store: &impl Store,
    lease: LeaseId,
    levels: &Arc<Levels>,
    random: &mut Random,
) -> Result<(), StoreError> {
    let held = 1 + random.below(80);
    let units = levels.amounts(&[("tpm", held)]).expect("a cost");
    let draw = Draw { lease, levels: Arc::clone(levels), units, terms: OPEN, is_watched: true };
    let DrawResult::Granted(moved) = store.draw(&draw).await? else {
        tokio::task::yield_now().await;
        return Ok(());
    };
    report(levels, &moved, Move::new(Kind::Draw, lease, 0, units_of(held)).one_of(2));
    let (levels, used) = (Arc::clone(levels), random.below(120));
    if random.below(3) == 0 {
        ChildArgs::report(&format!("{ENDING}{lease}\t{held}\t-"));
        let cancel = Cancel { lease, step: 1, levels: Arc::clone(&levels), is_watched: true };
        let moved = store.cancel(&cancel).await?;
        report(&levels, &moved, Move::new(Kind::Return, lease, 1, -units_of(held)));
    } else {
        ChildArgs::report(&format!("{ENDING}{lease}\t{held}\t{used}"));
        let actual = levels.amounts(&[("tpm", used)]).expect("amounts");
        let settle = Settle { lease, step: 1, levels: Arc::clone(&levels), actual, is_watched: true };
        let moved = store.settle(&settle).await?;
        report(&levels, &moved, Move::new(Kind::Settle, lease, 1, units_of(used)));
    }
    Ok(())
}

fn units_of(units: u64) -> i64 {
    i64::try_from(units).expect("it is small")
}

/// Reports a movement of every bucket in one line.
fn report(levels: &Levels, moved: &Movement, movement: Move) {
    let lines: Vec<_> = entries(levels, moved.at, movement).iter().map(to_line).collect();
    ChildArgs::report(&format!("{DONE}{}", lines.join("\x1f")));
}

fn entries(levels: &Levels, at: Stamp, movement: Move) -> Vec<Entry> {
    let level = levels.levels().iter().flat_map(|level| level.limits.iter().map(move |line| (level, line)));
    level.map(|(level, line)| Entry::moved(at, BucketId::new(&level.subject, &line.rule), movement)).collect()
}

/// Starts the children, kills each after a random number of its reports, and returns all reports with the number
/// of the process.
pub(crate) fn kill_children(test: &str, path: &Path, seed: u64) -> Vec<(u64, String)> {
    let mut random = Random::seeded(seed);
    let mut children: Vec<_> =
        (0..PROCESSES).map(|number| (number, Child::start(test, path, number, seed % 1_000_000))).collect();
    for (_, child) in &children {
        child.wait_ready();
    }
    for (_, child) in &mut children {
        child.go();
    }
    let mut reports = Vec::new();
    // The others continue while one is killed.
    for (number, child) in children {
        for _ in 0..200 + random.below(400) {
            reports.push((number, child.next_line().expect("a child runs until it is killed")));
        }
        reports.extend(child.kill().into_iter().map(|line| (number, line)));
    }
    reports
}

/// Checks the reports of killed children, and returns a summary line.
pub(crate) async fn check_reports(reports: &[(u64, String)], store: &dyn Store) -> String {
    let (mut log, mut unanswered) = (Vec::new(), BTreeMap::new());
    for number in 0..PROCESSES {
        for level in levels_of(number).levels() {
            for line in &level.limits {
                let bucket = BucketId::new(&level.subject, &line.rule);
                log.push(Entry::shape(Stamp::ZERO, bucket, *line.rule.shape()));
            }
        }
    }
    for (number, line) in reports {
        if let Some(lines) = line.strip_prefix(DONE) {
            log.extend(lines.split('\x1f').map(from_line));
        } else if let Some(ending) = line.strip_prefix(ENDING) {
            let parts: Vec<&str> = ending.split('\t').collect();
            let lease: LeaseId = parts[0].parse().expect("a lease");
            let (held, used): (i64, Option<i64>) = (parts[1].parse().expect("units"), parts[2].parse().ok());
            unanswered.insert(lease, (*number, held, used));
        }
    }
    for entry in &log {
        if let tidegate_core::limit::exactness::What::Moved(movement) = entry.what
            && movement.kind != Kind::Draw
        {
            unanswered.remove(&movement.lease);
        }
    }
    let asked = unanswered.len();
    for (lease, (number, held, used)) in unanswered {
        let LeaseStatus::Ended(ended) = store.lease(lease).await.expect("the lease is known") else {
            continue;
        };
        let movement = match ended.how {
            Ending::Settled => Move::new(Kind::Settle, lease, 1, used.expect("it was to be settled")),
            _ => Move::new(Kind::Return, lease, 1, -held),
        };
        log.extend(entries(&levels_of(number), ended.at, movement));
    }
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    format!("{report}; {} entries, {asked} endings without an answer", log.len())
}
