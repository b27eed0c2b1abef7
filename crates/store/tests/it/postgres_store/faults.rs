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
use tidegate_store::{Buckets, Drawn, Postgres, Reply};

use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, skip_without, unique};
use crate::kit::postgres::{by_way_of, listens_at, open, outside, patient, url};
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::proxy::Proxy;
use crate::kit::words::{
    cancel_of, draw_of, eventually, granted, is_granted, join_all, levels, own, settle_of, shows, subject,
    until_answered, used,
};

const CALLERS: u64 = 8;

/// Fast enough that something is granted at any time.
fn busy() -> Arc<Levels> {
    levels(&[("acme", &[Limit::per_second("rpm", 2_000).burst(40)])])
}

/// What callers share with the test.
#[derive(Default)]
struct Work {
    is_over: AtomicBool,
    /// Leases that were drawn.
    done: AtomicU64,
    /// How often something was asked again.
    asked_again: AtomicU64,
}

impl Work {
    /// Asks until there is an answer.
    async fn answered<'a, T: Unpin>(&self, ask: impl Fn() -> Reply<'a, T>) -> T {
        let mut is_again = false;
        let answer = until_answered(|| {
            self.asked_again.fetch_add(u64::from(is_again), Ordering::SeqCst);
            is_again = true;
            ask()
        });
        answer.await.unwrap_or_else(|error| panic!("a fault is not transient: {error:?}"))
    }

    /// Waits until the callers have done so many more leases.
    async fn goes_on(&self, more: u64) {
        let until = self.done.load(Ordering::Relaxed) + more;
        eventually("the callers get on", async || self.done.load(Ordering::Relaxed) >= until).await;
    }
}

/// Leases from their draw to their end, until it is over. Returns each step once.
async fn call(store: Postgres, work: Arc<Work>) -> Vec<Entry> {
    let (levels, mut log) = (busy(), Vec::new());
    let rule = Arc::clone(&levels.levels()[0].limits[0].rule);
    let bucket = BucketId::new(&subject("acme"), &rule);
    log.push(Entry::shape(Stamp::ZERO, bucket.clone(), *rule.shape()));
    while !work.is_over.load(Ordering::SeqCst) {
        let draw = draw_of(&levels, 1 + work.done.load(Ordering::Relaxed) % 3);
        let units = draw.units[0].expect("it takes part").cast_signed();
        let note = |log: &mut Vec<_>, at, kind, step, units| {
            log.push(Entry::moved(at, bucket.clone(), Move::new(kind, draw.lease, step, units)));
        };
        let Drawn::Granted(moved) = work.answered(|| store.draw(&draw)).await else { continue };
        note(&mut log, moved.at, Kind::Draw, 0, units);
        if work.done.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
            let cancel = cancel_of(&draw);
            let moved = work.answered(|| store.cancel(&cancel)).await;
            note(&mut log, moved.at, Kind::Return, 9, -units);
        } else {
            let settle = settle_of(&draw, units.unsigned_abs());
            let moved = work.answered(|| store.settle(&settle)).await;
            note(&mut log, moved.at, Kind::Settle, 9, units);
        }
    }
    log
}

/// Lets callers work while `trouble` goes on, and has the checker judge.
async fn under(store: &Postgres, trouble: impl AsyncFnOnce(&Work)) {
    let work = Arc::new(Work::default());
    let callers: Vec<_> =
        (0..CALLERS).map(|_| tokio::spawn(call(store.clone(), Arc::clone(&work)))).collect();
    trouble(&work).await;
    work.is_over.store(true, Ordering::SeqCst);
    let mut log = Vec::new();
    for caller in callers {
        log.extend(caller.await.expect("a caller is answered as the contract says"));
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
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wire_that_is_cut_in_the_middle_of_replies_charges_nobody_twice() {
    skip_without!(POSTGRES);
    let wire = Proxy::to(listens_at(&url())).await;
    let options = patient(by_way_of(&url(), wire.address)).schema(unique("cut")).connections(6);
    let store = open(options).await;
    under(&store, async |work| {
        for round in 1..=20 {
            work.goes_on(10).await;
            wire.cut(round % 4 + 1);
            eventually("replies are cut", async || wire.to_be_cut() == 0).await;
        }
        work.goes_on(10).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_killed_and_started_again_loses_nothing_that_was_answered() {
    skip_without!(POSTGRES_SERVER);
    let mut server = PrivatePostgres::start();
    let store = open(patient(server.url()).connections(6)).await;
    under(&store, async |work| {
        for _ in 0..3 {
            work.goes_on(30).await;
            let before = work.asked_again.load(Ordering::SeqCst);
            server.kill();
            eventually("a caller finds it unavailable", async || {
                work.asked_again.load(Ordering::SeqCst) > before
            })
            .await;
            server.start_again();
        }
        work.goes_on(30).await;
    })
    .await;
}

#[tokio::test]
async fn late_answers_are_awaited() {
    skip_without!(POSTGRES);
    let wire = Proxy::to(listens_at(&url())).await;
    let options = patient(by_way_of(&url(), wire.address)).schema(unique("late")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.hold_replies(true);
    let draws: Vec<_> = (0..60).map(|_| draw_of(&levels, 1)).collect();
    let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect());
    let late = async {
        // The server has done what it was asked, and nothing has heard of it.
        eventually("an answer is kept back", async || wire.kept_back() > 0).await;
        wire.hold_replies(false);
    };
    let (answers, ()) = tokio::join!(answers, late);
    let admitted = answers.iter().filter(|answer| is_granted(answer)).count();
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(admitted, 49);
    assert_eq!(shows(&store, "acme").await, Some((0, 50)));
}

#[tokio::test]
async fn a_wire_that_is_down_is_away_and_comes_back_by_itself() {
    skip_without!(POSTGRES);
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
    skip_without!(POSTGRES);
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
    skip_without!(POSTGRES);
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
