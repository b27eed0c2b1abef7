//! Connections that are cut in the middle of replies, a server that is killed and restarted, and a slow one.
//! Callers retry with the same lease and step, and the checker verifies that no step is applied twice and no
//! answered step is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, check, check_ledger};
use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, DrawResult, Postgres, Reply};

use crate::kit::common::{
    balance, cancel_of, draw_of, eventually, granted, is_granted, join_all, levels, own, settle_of, subject,
    until_answered, used,
};
use crate::kit::engine::{POSTGRES, POSTGRES_SERVER, skip_without, unique};
use crate::kit::postgres::{open, options_at, outside, socket_addr, url, url_via};
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::proxy::Proxy;

const CALLERS: u64 = 8;

/// Refills fast enough that some draws are always granted.
fn busy() -> Arc<Levels> {
    levels(&[("acme", &[Limit::per_second("rpm", 2_000).burst(40)])])
}

/// State that the callers share with the test.
#[derive(Default)]
struct Work {
    is_over: AtomicBool,
    /// Leases drawn.
    done: AtomicU64,
    /// The number of retries.
    retries: AtomicU64,
}

impl Work {
    /// Retries until there is an answer.
    async fn answered<'a, T: Unpin>(&self, ask: impl Fn() -> Reply<'a, T>) -> T {
        let mut is_again = false;
        let answer = until_answered(|| {
            self.retries.fetch_add(u64::from(is_again), Ordering::SeqCst);
            is_again = true;
            ask()
        });
        answer.await.unwrap_or_else(|error| panic!("a fault is not transient: {error:?}"))
    }

    /// Waits until the callers have drawn so many more leases.
    async fn wait_for_progress(&self, more: u64) {
        let until = self.done.load(Ordering::Relaxed) + more;
        eventually("the callers get on", async || self.done.load(Ordering::Relaxed) >= until).await;
    }
}

/// Draws and ends leases until the test is over. Returns each step once.
async fn call(store: Postgres, work: Arc<Work>) -> Vec<Entry> {
    let (levels, mut log) = (busy(), Vec::new());
    let rule = Arc::clone(&levels.levels()[0].limits[0].rule);
    let bucket = BucketId::new(&subject("acme"), &rule);
    log.push(Entry::shape(Stamp::ZERO, bucket.clone(), *rule.shape()));
    while !work.is_over.load(Ordering::SeqCst) {
        let draw = draw_of(&levels, 1 + work.done.load(Ordering::Relaxed) % 3);
        let units = draw.units[0].expect("the limit is drawn").cast_signed();
        let note = |log: &mut Vec<_>, at, kind, step, units| {
            log.push(Entry::moved(at, bucket.clone(), Move::new(kind, draw.lease, step, units)));
        };
        let DrawResult::Granted(moved) = work.answered(|| store.draw(&draw)).await else { continue };
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

/// Runs callers while `fault` happens, and checks their log.
async fn run_under(store: &Postgres, fault: impl AsyncFnOnce(&Work)) {
    let work = Arc::new(Work::default());
    let callers: Vec<_> =
        (0..CALLERS).map(|_| tokio::spawn(call(store.clone(), Arc::clone(&work)))).collect();
    fault(&work).await;
    work.is_over.store(true, Ordering::SeqCst);
    let mut log = Vec::new();
    for caller in callers {
        log.extend(caller.await.expect("a caller gets contractual answers"));
    }
    let report = check(&log);
    assert!(report.is_exact(), "{report}");
    assert!(report.open.is_empty(), "{:?}", report.open);
    let settled = used(store, "acme").await;
    let key = (subject("acme"), LimitName::new("rpm").expect("a valid name"));
    let wrong = check_ledger(&log, &BTreeMap::from([(key, settled)]));
    assert!(wrong.is_empty(), "{wrong:?}");
    let (_, consumed) = balance(store, "acme").await.expect("the bucket exists");
    assert_eq!(consumed.unsigned_abs(), settled, "units not returned are settled, once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_replies_are_charged_once() {
    skip_without!(POSTGRES);
    let wire = Proxy::to(socket_addr(&url())).await;
    let options = options_at(url_via(&url(), wire.address)).schema(unique("cut")).connections(6);
    let store = open(options).await;
    run_under(&store, async |work| {
        for round in 1..=20 {
            work.wait_for_progress(10).await;
            wire.cut(round % 4 + 1);
            eventually("replies are cut", async || wire.pending_cuts() == 0).await;
        }
        work.wait_for_progress(10).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_server_keeps_answered_steps() {
    skip_without!(POSTGRES_SERVER);
    let mut server = PrivatePostgres::start();
    let store = open(options_at(server.url()).connections(6)).await;
    run_under(&store, async |work| {
        for _ in 0..3 {
            work.wait_for_progress(30).await;
            let before = work.retries.load(Ordering::SeqCst);
            server.kill();
            eventually("a caller finds it unavailable", async || {
                work.retries.load(Ordering::SeqCst) > before
            })
            .await;
            server.start_again();
        }
        work.wait_for_progress(30).await;
    })
    .await;
}

#[tokio::test]
async fn late_answers_are_awaited() {
    skip_without!(POSTGRES);
    let wire = Proxy::to(socket_addr(&url())).await;
    let options = options_at(url_via(&url(), wire.address)).schema(unique("late")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.hold_replies(true);
    let draws: Vec<_> = (0..60).map(|_| draw_of(&levels, 1)).collect();
    let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect());
    let late = async {
        // The server has applied the draws, and no reply has arrived.
        eventually("a reply is held back", async || wire.held_replies() > 0).await;
        wire.hold_replies(false);
    };
    let (answers, ()) = tokio::join!(answers, late);
    let admitted = answers.iter().filter(|answer| is_granted(answer)).count();
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(admitted, 49);
    assert_eq!(balance(&store, "acme").await, Some((0, 50)));
}

#[tokio::test]
async fn lost_connection_is_unavailable_and_recovers() {
    skip_without!(POSTGRES);
    let wire = Proxy::to(socket_addr(&url())).await;
    let options = options_at(url_via(&url(), wire.address)).schema(unique("down")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.take_down(true);
    let lost = draw_of(&levels, 1);
    let error = store.draw(&lost).await.expect_err("the proxy is down");
    assert!(error.is_transient(), "{error:?}");
    wire.take_down(false);
    granted(store.draw(&lost).await);
    assert_eq!(balance(&store, "acme").await, Some((48, 2)));
}

#[tokio::test]
async fn connections_closed_by_the_server_are_replaced() {
    skip_without!(POSTGRES);
    let schema = unique("ended");
    let address = format!("{}?application_name={schema}", url());
    let store = open(options_at(address).schema(&schema).connections(2)).await;
    let levels = own("acme", 50);
    granted(store.draw(&draw_of(&levels, 1)).await);
    let ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
    let count: i64 = outside(&url()).await.query_one(ended, &[&schema]).await.unwrap().get(0);
    assert!(count >= 2, "{count}");
    granted(store.draw(&draw_of(&levels, 1)).await);
    assert_eq!(balance(&store, "acme").await, Some((48, 2)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returning_server_gets_at_most_the_pool() {
    const WAITING: i64 = 64;
    skip_without!(POSTGRES);
    let wire = Proxy::to(socket_addr(&url())).await;
    let options = options_at(url_via(&url(), wire.address)).schema(unique("back")).connections(4);
    let store = open(options).await;
    let levels = own("acme", 1_000);
    granted(store.draw(&draw_of(&levels, 1)).await);
    wire.take_down(true);
    let errors = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = (0..WAITING)
        .map(|_| {
            let (store, draw, errors) = (store.clone(), draw_of(&levels, 1), Arc::clone(&errors));
            tokio::spawn(async move {
                while store.draw(&draw).await.is_err() {
                    errors.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    eventually("every caller got an error", async || errors.load(Ordering::SeqCst) >= WAITING.unsigned_abs())
        .await;
    wire.take_down(false);
    let before = wire.connections();
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(balance(&store, "acme").await, Some((1_000 - WAITING - 1, WAITING + 1)));
    // Four connections, a listener, and attempts under way when the proxy came back.
    let connections = wire.connections() - before;
    assert!(connections <= 12, "{connections} connections for {WAITING} callers");
}
