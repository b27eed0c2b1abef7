//! A wire that is cut in the middle of replies, a server that is killed and started again, and one that is slow. Callers ask again with
//! the same lease and step, and the checker watches what came of it: nothing is taken twice, and nothing is lost that was
//! answered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::check::{BucketId, Entry, Kind, Move, check, check_ledger};
use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, Drawn, Postgres};

use crate::engine_kit::unique;
use crate::kit::{by_way_of, listens_at, open, outside, patient, url};
use crate::private_postgres::PrivatePostgres;
use crate::proxy::Proxy;
use crate::soak_kit::answered;
use crate::words::{
    cancel_of, draw_of, eventually, granted, join_all, levels, own, settle_of, shows, subject, used,
};

const CALLERS: u64 = 8;

/// Fast enough that something is granted at any time.
fn busy() -> Arc<Levels> {
    levels(&[("acme", &[Limit::per_second("rpm", 2_000).burst(40)])])
}

/// What callers have seen, each step once, whoever told of it first.
#[derive(Default)]
struct Seen {
    log: Vec<Entry>,
    asked_again: u64,
}

/// Leases from their draw to their end, until it is over.
async fn call(store: Postgres, is_over: Arc<AtomicBool>, done: Arc<AtomicU64>) -> Seen {
    let (levels, mut seen) = (busy(), Seen::default());
    let rule = Arc::clone(&levels.levels()[0].limits[0].rule);
    let bucket = BucketId::new(&subject("acme"), &rule);
    seen.log.push(Entry::shape(Stamp::ZERO, bucket.clone(), *rule.shape()));
    while !is_over.load(Ordering::SeqCst) {
        let draw = draw_of(&levels, 1 + done.load(Ordering::Relaxed) % 3);
        let units = draw.units[0].expect("it takes part").cast_signed();
        let note = |seen: &mut Seen, at, kind, step, units| {
            seen.log.push(Entry::moved(at, bucket.clone(), Move::new(kind, draw.lease, step, units)));
        };
        let Drawn::Granted(moved) = answered(&mut seen.asked_again, || store.draw(&draw)).await else {
            continue;
        };
        note(&mut seen, moved.at, Kind::Draw, 0, units);
        if done.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
            let cancel = cancel_of(&draw);
            let moved = answered(&mut seen.asked_again, || store.cancel(&cancel)).await;
            note(&mut seen, moved.at, Kind::Return, 9, -units);
        } else {
            let settle = settle_of(&draw, units.unsigned_abs());
            let moved = answered(&mut seen.asked_again, || store.settle(&settle)).await;
            note(&mut seen, moved.at, Kind::Settle, 9, units);
        }
    }
    seen
}

/// Lets callers work while `trouble` goes on, and has the checker judge.
async fn under(store: &Postgres, trouble: impl AsyncFnOnce(&AtomicU64)) -> u64 {
    let (is_over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let callers: Vec<_> = (0..CALLERS)
        .map(|_| tokio::spawn(call(store.clone(), Arc::clone(&is_over), Arc::clone(&done))))
        .collect();
    trouble(&done).await;
    is_over.store(true, Ordering::SeqCst);
    let (mut log, mut asked_again) = (Vec::new(), 0);
    for caller in callers {
        let seen = caller.await.expect("a caller is answered as the contract says");
        log.extend(seen.log);
        asked_again += seen.asked_again;
    }
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    assert!(report.open.is_empty(), "{:?}", report.open);
    let settled = used(store, "acme").await;
    let key = (subject("acme"), LimitName::new("rpm").expect("a valid name"));
    let wrong = check_ledger(&log, &BTreeMap::from([(key, settled)]));
    assert!(wrong.is_empty(), "{wrong:?}");
    let (_, consumed) = shows(store, "acme").await.expect("it was drawn from");
    assert_eq!(consumed.unsigned_abs(), settled, "what was taken and not returned was settled, once");
    asked_again
}

/// Waits until the callers have done so many more leases.
async fn work(done: &AtomicU64, more: u64) {
    let until = done.load(Ordering::Relaxed) + more;
    eventually("the callers get on", async || done.load(Ordering::Relaxed) >= until).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_is_cut_in_the_middle_of_replies_charges_nobody_twice() {
    let wire = Proxy::to(listens_at(&url())).await;
    let options = patient(by_way_of(&url(), wire.address)).schema(unique("cut")).connections(6);
    let store = open(options).await;
    under(&store, async |done| {
        for round in 1..=20 {
            work(done, 10).await;
            wire.cut(round % 4 + 1);
            eventually("replies are cut", async || wire.to_be_cut() == 0).await;
        }
        work(done, 10).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_and_started_again_loses_nothing_that_was_answered() {
    let mut server = PrivatePostgres::start();
    let store = open(patient(server.url()).connections(6)).await;
    let asked_again = under(&store, async |done| {
        for _ in 0..3 {
            work(done, 30).await;
            server.kill();
            tokio::time::sleep(Duration::from_millis(100)).await;
            server.start_again();
        }
        work(done, 30).await;
    })
    .await;
    assert!(asked_again > 0, "nobody noticed that the server was gone");
    assert_ne!(server.address().port(), 0);
}

#[tokio::test]
async fn a_server_that_answers_a_second_late_answers_all_the_same() {
    let wire = Proxy::to(listens_at(&url())).await;
    let options = patient(by_way_of(&url(), wire.address)).schema(unique("late")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.delay(Duration::from_secs(1));
    let draws: Vec<_> = (0..60).map(|_| draw_of(&levels, 1)).collect();
    let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await;
    let admitted = answers.iter().filter(|answer| crate::words::is_granted(answer)).count();
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(admitted, 49);
    wire.delay(Duration::ZERO);
    assert_eq!(shows(&store, "acme").await, Some((0, 50)));
}

#[tokio::test]
async fn a_wire_that_is_down_is_away_and_comes_back_by_itself() {
    let wire = Proxy::to(listens_at(&url())).await;
    let options = patient(by_way_of(&url(), wire.address)).schema(unique("down")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.take_down(true);
    let lost = draw_of(&levels, 1);
    let error = store.draw(&lost).await.expect_err("nobody is there");
    assert!(error.is_transient(), "{error:?}");
    wire.take_down(false);
    granted(store.draw(&lost).await);
    assert_eq!(shows(&store, "acme").await, Some((48, 2)));
}

#[tokio::test]
async fn connections_that_the_server_ends_are_made_anew_and_nobody_notices() {
    let schema = unique("ended");
    let address = format!("{}?application_name={schema}", url());
    let store = open(patient(address).schema(&schema).connections(2)).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    let ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
    let count: i64 = outside(&url()).await.query_one(ended, &[&schema]).await.unwrap().get(0);
    assert!(count >= 2, "{count}");
    granted(store.draw(&draw_of(&levels, 1)).await);
    assert_eq!(shows(&store, "acme").await, Some((48, 2)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_is_met_by_no_more_than_the_pool_has() {
    const WAITING: i64 = 64;
    let wire = Proxy::to(listens_at(&url())).await;
    let options = patient(by_way_of(&url(), wire.address)).schema(unique("back")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 1_000);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.take_down(true);
    let was_away = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = (0..WAITING)
        .map(|_| {
            let (store, draw, was_away) = (store.clone(), draw_of(&levels, 1), Arc::clone(&was_away));
            tokio::spawn(async move {
                while store.draw(&draw).await.is_err() {
                    was_away.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    eventually("all are told", async || was_away.load(Ordering::SeqCst) >= WAITING.unsigned_abs()).await;
    wire.take_down(false);
    let before = wire.connections();
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(shows(&store, "acme").await, Some((1_000 - WAITING - 1, WAITING + 1)));
    // Four, one that listens, and some that were on their way when the wire came back.
    let connections = wire.connections() - before;
    assert!(connections <= 12, "{connections} connections for {WAITING} callers");
}
