//! Processes that are killed at random moments under load: what they were told is there, nothing else is invented, and the
//! file goes on.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Buckets, Durable, HostWall, Lookup, ManualWall, Sqlite, SqliteOptions, Store, WallClock,
};

use super::load::usage;
use crate::kit::child::{Child, Orders, test_name};
use crate::kit::sqlite::{PATIENCE, Place};
use crate::kit::words::{cancel_of, draw_of, granted, is_granted, levels, settle_of, subject};

const PROCESSES: u64 = 3;
const CALLERS: u64 = 4;
/// More than all rounds together take.
const BURST: u64 = 800_000;

#[test]
fn whoever_is_killed_has_lost_nothing_that_was_answered_and_invented_nothing() {
    if let Some(orders) = Orders::read() {
        return runtime().block_on(be_a_child(&orders));
    }
    let rounds = if std::env::var_os("TIDEGATE_DEEP").is_some() { 50 } else { 5 };
    let seed = HostWall.now().as_micros();
    println!("the seed is {seed}");
    let (place, mut random) = (Place::new(), Random::seeded(seed));
    let mut told = Told::default();
    for round in 0..rounds {
        let name = test_name!(whoever_is_killed_has_lost_nothing_that_was_answered_and_invented_nothing);
        let mut children: Vec<_> = (0..PROCESSES)
            .map(|number| Child::start(name, &place.path, round * PROCESSES + number, seed))
            .collect();
        children.iter().for_each(Child::is_ready);
        children.iter_mut().for_each(Child::go);
        // Each is killed after so many answers of its own, while the others go on or are dead.
        for child in children {
            for _ in 0..random.below(400) {
                told.hear(&child.hears().expect("a child goes on until it is killed"));
            }
            child.kill().iter().for_each(|line| told.hear(line));
        }
        runtime().block_on(judge(&place, &mut told, round));
    }
    runtime().block_on(expire(&place));
    println!("{rounds} rounds, {} draws and {} settles were answered", told.draws, told.settles);
    assert!(told.settles > 0);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn levels_of(child: u64) -> Arc<Levels> {
    let limits = [Limit::per_hour("rpm", 1).burst(BURST)];
    levels(&[(&format!("child-{child}"), &limits), ("parent", &limits)])
}

/// Draws and settles until it is killed, and tells of each answer.
async fn be_a_child(orders: &Orders) {
    let durable = if orders.number.is_multiple_of(2) { Durable::Second } else { Durable::Commit };
    let options = SqliteOptions::file(&orders.path).durable(durable).deadline(PATIENCE);
    let store = options.open().await.expect("the file is opened");
    Orders::wait_for_go();
    let callers = (0..CALLERS).map(|caller| {
        let (store, number) = (store.clone(), orders.number * CALLERS + caller);
        tokio::spawn(async move {
            for count in 0_u64.. {
                let mut draw = draw_of(&levels_of(number % 3), 1 + count % 5);
                draw.lease = LeaseId::new(1_800_000_000_000 + number, count.into());
                granted(store.draw(&draw).await);
                Orders::tell(&format!("drawn {} {} {}", draw.lease, number % 3, 1 + count % 5));
                match count % 4 {
                    // Left open.
                    0 => {}
                    1 => {
                        store.cancel(&cancel_of(&draw)).await.expect("a cancel is answered");
                        Orders::tell(&format!("cancelled {}", draw.lease));
                    }
                    _ => {
                        store.settle(&settle_of(&draw, count % 7)).await.expect("a settle is answered");
                        Orders::tell(&format!("settled {} {}", draw.lease, count % 7));
                    }
                }
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.expect("a caller goes on until it is killed");
    }
}

/// What was answered to those who are dead.
#[derive(Default)]
struct Told {
    leases: BTreeMap<LeaseId, Lease>,
    draws: u64,
    settles: u64,
}

struct Lease {
    child: u64,
    units: u64,
    ended: Ended,
}

enum Ended {
    No,
    Cancelled,
    Settled(u64),
}

impl Told {
    fn hear(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |place: usize| words[place].parse::<u64>().expect("a number");
        let lease: LeaseId = words[1].parse().expect("a lease");
        match words[0] {
            "drawn" => {
                self.draws += 1;
                self.leases.insert(lease, Lease { child: number(2), units: number(3), ended: Ended::No });
            }
            "cancelled" => self.leases.get_mut(&lease).expect("it has drawn").ended = Ended::Cancelled,
            "settled" => {
                self.settles += 1;
                self.leases.get_mut(&lease).expect("it has drawn").ended = Ended::Settled(number(2));
            }
            other => panic!("a child tells of {other}"),
        }
    }
}

async fn judge(place: &Place, told: &mut Told, round: u64) {
    let outside = place.outside();
    let check: String = outside.query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("a check");
    assert_eq!(check, "ok", "round {round}");
    drop(outside);
    let store = Sqlite::open(&place.path).await.expect("the file is opened");
    // What was answered was done: the same again is a repeat.
    for (id, lease) in std::mem::take(&mut told.leases) {
        let mut draw = draw_of(&levels_of(lease.child), lease.units);
        draw.lease = id;
        let moved = match lease.ended {
            Ended::Settled(used) => store.settle(&settle_of(&draw, used)).await,
            Ended::Cancelled => store.cancel(&cancel_of(&draw)).await,
            Ended::No => {
                // Its ending may have been done, and not told any more.
                let again = store.draw(&draw).await;
                if again.is_err() {
                    continue;
                }
                Ok(granted(again))
            }
        };
        assert!(moved.expect("it was answered before").is_repeat, "round {round}: {id}");
    }
    is_conserved(place, &store).await;
    // It goes on.
    let draw = draw_of(&levels_of(0), 1);
    assert!(is_granted(&store.draw(&draw).await));
    store.settle(&settle_of(&draw, 1)).await.expect("a settle is answered");
    store.close().await;
}

/// What was consumed of each limit is what the ledger has and what open leases hold, and its level says the same.
async fn is_conserved(place: &Place, store: &Sqlite) {
    let used = usage(store).await;
    let mut held: BTreeMap<String, i64> = BTreeMap::new();
    let outside = place.outside();
    let mut open = outside.prepare("SELECT levels, held FROM leases WHERE how IS NULL").expect("a query");
    let rows = open.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)));
    for row in rows.expect("a query") {
        let (levels, units) = row.expect("a row");
        let units: i64 = units.parse().expect("one limit");
        for name in ["child-0", "child-1", "child-2", "parent"] {
            if levels.contains(&format!("\"{name}\"")) {
                *held.entry(name.to_owned()).or_default() += units;
            }
        }
    }
    for name in ["child-0", "child-1", "child-2", "parent"] {
        let seen =
            store.balances(&Lookup::Subjects(vec![subject(name)])).await.expect("balances are answered");
        let Some(meter) = seen.buckets.first().and_then(|bucket| bucket.meters.first()) else { continue };
        let settled = used.get(&(subject(name), meter.rule().name().clone())).copied().unwrap_or_default();
        let held = held.get(name).copied().unwrap_or_default();
        assert_eq!(meter.consumed(), i64::try_from(settled).expect("it is small") + held, "{name}");
        let whole = meter.available(seen.at) + meter.consumed();
        let burst = i64::try_from(BURST).expect("it is small");
        // One comes back in an hour.
        assert!((burst..=burst + 2).contains(&whole), "{name}: {whole} of {burst}");
    }
}

/// The leases of the dead end by their deadlines.
async fn expire(place: &Place) {
    let later = HostWall.now() + std::time::Duration::from_secs(7_200);
    let clock = ManualWall::new(Stamp::from_micros(later.as_micros()));
    let store = SqliteOptions::file(&place.path).clock(clock).open().await.expect("the file is opened");
    while store.sweep(1_000).await.expect("a sweep is answered").settled > 0 {}
    let outside = place.outside();
    let open = "SELECT COUNT(*) FROM leases WHERE how IS NULL";
    assert_eq!(outside.query_row(open, [], |row| row.get::<_, i64>(0)), Ok(0));
    let used = usage(&store).await;
    for ((subject, _), units) in &used {
        let seen =
            store.balances(&Lookup::Subjects(vec![subject.clone()])).await.expect("balances are answered");
        let consumed = seen.buckets[0].meters[0].consumed();
        assert_eq!(consumed, i64::try_from(*units).expect("it is small"), "{subject}");
    }
    assert!(!used.is_empty());
}
