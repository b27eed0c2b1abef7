//! Processes are killed at random moments under load: every answered step is in the file, no other step is,
//! and the file remains usable.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{Across, DEFAULT, Subject};
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Buckets, Durability, HostWall, Lookup, ManualWall, Sqlite, SqliteOptions, Store, WallClock,
};

use super::load::usage;
use crate::kit::child::{Child, ChildArgs, test_name};
use crate::kit::common::{cancel_of, draw_of, granted, is_granted, levels, settle_of, subject};
use crate::kit::killed;
use crate::kit::sqlite::{TIMEOUT, TempFile};

const PROCESSES: u64 = 3;
const CALLERS: u64 = 4;
/// The entities of the buckets; the last is the pool of all of them.
const NAMES: [&str; 5] = ["child-0", "child-1", "child-2", "parent", DEFAULT];
/// More than all rounds together take.
const BURST: u64 = 800_000;

#[test]
fn killed_processes_keep_exactly_the_answered_steps() {
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(run_child(&args));
    }
    let rounds = if std::env::var_os("TIDEGATE_DEEP").is_some() { 50 } else { 5 };
    let seed = HostWall.now().as_micros();
    println!("the seed is {seed}");
    let (place, mut random) = (TempFile::new(), Random::seeded(seed));
    let mut answers = Answers::default();
    for round in 0..rounds {
        let name = test_name!(killed_processes_keep_exactly_the_answered_steps);
        let mut children: Vec<_> = (0..PROCESSES)
            .map(|number| Child::start(name, &place.path, round * PROCESSES + number, seed))
            .collect();
        children.iter().for_each(Child::wait_ready);
        children.iter_mut().for_each(Child::go);
        // Each child is killed after a random number of its answers, while the others continue or are dead.
        for child in children {
            for _ in 0..random.below(400) {
                answers.record(&child.next_line().expect("a child runs until it is killed"));
            }
            child.kill().iter().for_each(|line| answers.record(line));
        }
        runtime().block_on(check_answers(&place, &mut answers, round));
    }
    runtime().block_on(expire(&place));
    println!("{rounds} rounds, {} draws and {} settles were answered", answers.draws, answers.settles);
    assert!(answers.settles > 0);
}

#[test]
fn killed_processes_do_not_exceed_a_pool() {
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let opened = SqliteOptions::file(&args.path).deadline(TIMEOUT).open().await;
            killed::run_child(&args, opened.expect("the file is opened")).await;
        });
    }
    let (place, seed) = (TempFile::new(), HostWall.now().as_micros());
    let test = test_name!(killed_processes_do_not_exceed_a_pool);
    let reports = killed::kill_children(test, &place.path, seed);
    runtime().block_on(async {
        let store = Sqlite::open(&place.path).await.expect("the file is opened");
        println!("seed {seed}: {}", killed::check_reports(&reports, &store).await);
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn levels_of(child: u64) -> Arc<Levels> {
    let limit = Limit::per_hour("rpm", 1).burst(BURST);
    let pooled = [limit.clone(), limit.clone().across(Across::Entities)];
    levels(&[(&format!("child-{child}"), &pooled), ("parent", &[limit])])
}

/// Draws and settles until it is killed, and reports each answer.
async fn run_child(args: &ChildArgs) {
    let durable = if args.number.is_multiple_of(2) { Durability::EverySecond } else { Durability::Commit };
    let options = SqliteOptions::file(&args.path).durable(durable).deadline(TIMEOUT);
    let store = options.open().await.expect("the file is opened");
    ChildArgs::wait_for_go();
    let callers = (0..CALLERS).map(|caller| {
        let (store, number) = (store.clone(), args.number * CALLERS + caller);
        tokio::spawn(async move {
            for count in 0_u64.. {
                let mut draw = draw_of(&levels_of(number % 3), 1 + count % 5);
                draw.lease = LeaseId::new(1_800_000_000_000 + number, count.into());
                granted(store.draw(&draw).await);
                ChildArgs::report(&format!("drawn {} {} {}", draw.lease, number % 3, 1 + count % 5));
                match count % 4 {
                    // Left open.
                    0 => {}
                    1 => {
                        store.cancel(&cancel_of(&draw)).await.expect("the store responds");
                        ChildArgs::report(&format!("cancelled {}", draw.lease));
                    }
                    _ => {
                        store.settle(&settle_of(&draw, count % 7)).await.expect("the store responds");
                        ChildArgs::report(&format!("settled {} {}", draw.lease, count % 7));
                    }
                }
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.expect("a caller runs until it is killed");
    }
}

/// The answers that killed processes reported.
#[derive(Default)]
struct Answers {
    leases: BTreeMap<LeaseId, Lease>,
    draws: u64,
    settles: u64,
}

struct Lease {
    child: u64,
    units: u64,
    ended: LeaseEnd,
}

enum LeaseEnd {
    No,
    Cancelled,
    Settled(u64),
}

impl Answers {
    fn record(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |place: usize| words[place].parse::<u64>().expect("a number");
        let lease: LeaseId = words[1].parse().expect("a lease");
        match words[0] {
            "drawn" => {
                self.draws += 1;
                self.leases.insert(lease, Lease { child: number(2), units: number(3), ended: LeaseEnd::No });
            }
            "cancelled" => {
                self.leases.get_mut(&lease).expect("the lease was drawn").ended = LeaseEnd::Cancelled;
            }
            "settled" => {
                self.settles += 1;
                self.leases.get_mut(&lease).expect("the lease was drawn").ended =
                    LeaseEnd::Settled(number(2));
            }
            other => panic!("unexpected report {other}"),
        }
    }
}

async fn check_answers(place: &TempFile, answers: &mut Answers, round: u64) {
    let outside = place.outside();
    let check: String = outside.query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("a check");
    assert_eq!(check, "ok", "round {round}");
    drop(outside);
    let store = Sqlite::open(&place.path).await.expect("the file is opened");
    // Every answered step was applied: a retry is a repeat.
    for (id, lease) in std::mem::take(&mut answers.leases) {
        let mut draw = draw_of(&levels_of(lease.child), lease.units);
        draw.lease = id;
        let moved = match lease.ended {
            LeaseEnd::Settled(used) => store.settle(&settle_of(&draw, used)).await,
            LeaseEnd::Cancelled => store.cancel(&cancel_of(&draw)).await,
            LeaseEnd::No => {
                // It may have ended without a report.
                let again = store.draw(&draw).await;
                if again.is_err() {
                    continue;
                }
                Ok(granted(again))
            }
        };
        assert!(moved.expect("the step was answered before").is_repeat, "round {round}: {id}");
    }
    assert_conserved(place, &store).await;
    // The file is still usable.
    let draw = draw_of(&levels_of(0), 1);
    assert!(is_granted(&store.draw(&draw).await));
    store.settle(&settle_of(&draw, 1)).await.expect("the store responds");
    store.close().await;
}

/// Checks that each limit has consumed what the ledger has and open leases hold, and that its level agrees.
async fn assert_conserved(place: &TempFile, store: &Sqlite) {
    let used = usage(store).await;
    let mut held: BTreeMap<String, i64> = BTreeMap::new();
    let outside = place.outside();
    let mut open = outside.prepare("SELECT levels, held FROM leases WHERE how IS NULL").expect("a query");
    let rows = open.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)));
    for row in rows.expect("a query") {
        let (levels, units) = row.expect("a row");
        let units: i64 = units.parse().expect("one limit");
        for name in NAMES {
            if levels.contains(&format!("\"{name}\"")) {
                *held.entry(name.to_owned()).or_default() += units;
            }
        }
    }
    for name in NAMES {
        let key = Subject::stored(name, subject("any").resource.as_str()).expect("a stored name");
        let seen = store.balances(&Lookup::Subjects(vec![key.clone()])).await.expect("balances are returned");
        let Some(meter) = seen.buckets.first().and_then(|bucket| bucket.meters.first()) else { continue };
        let settled = used.get(&(key, meter.rule().name().clone())).copied().unwrap_or_default();
        let held = held.get(name).copied().unwrap_or_default();
        assert_eq!(meter.consumed(), i64::try_from(settled).expect("it is small") + held, "{name}");
        let whole = meter.available(seen.at) + meter.consumed();
        let burst = i64::try_from(BURST).expect("it is small");
        // One request refills in an hour.
        assert!((burst..=burst + 2).contains(&whole), "{name}: {whole} of {burst}");
    }
}

/// The leases of killed processes end at their deadlines.
async fn expire(place: &TempFile) {
    let later = HostWall.now() + std::time::Duration::from_secs(7_200);
    let clock = ManualWall::new(Stamp::from_micros(later.as_micros()));
    let store = SqliteOptions::file(&place.path).clock(clock).open().await.expect("the file is opened");
    while store.sweep(1_000).await.expect("the store responds").settled > 0 {}
    let outside = place.outside();
    let open = "SELECT COUNT(*) FROM leases WHERE how IS NULL";
    assert_eq!(outside.query_row(open, [], |row| row.get::<_, i64>(0)), Ok(0));
    let used = usage(&store).await;
    for ((subject, _), units) in &used {
        let seen =
            store.balances(&Lookup::Subjects(vec![subject.clone()])).await.expect("balances are returned");
        let consumed = seen.buckets[0].meters[0].consumed();
        assert_eq!(consumed, i64::try_from(*units).expect("it is small"), "{subject}");
    }
    assert!(!used.is_empty());
}
