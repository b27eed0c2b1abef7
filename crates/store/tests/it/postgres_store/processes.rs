//! Two processes on one server: together they take exactly what is there, and never wait in a circle.

use std::path::Path;
use std::sync::Arc;

use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets, PostgresOptions, StoreError};

use crate::kit::child::{Child, Orders, test_name};
use crate::kit::engine::{POSTGRES, skip_without};
use crate::kit::postgres::{database, open, outside, patient};
use crate::kit::words::{draw_of, is_granted, join_all, levels, own, shows};

const PROCESSES: u64 = 2;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Starts the test `name` twice as children, lets them go at once, and returns the numbers that they report. Both use the
/// database at `url`.
fn at_once(name: &str, url: &str) -> Vec<u64> {
    let start = |number| Child::start(name, Path::new(url), number, 0);
    let mut children: Vec<_> = (0..PROCESSES).map(start).collect();
    children.iter().for_each(Child::is_ready);
    children.iter_mut().for_each(Child::go);
    let tell = |child: &Child| child.hears().expect("a child tells").parse().expect("a number");
    let told = children.iter().map(tell).collect();
    children.into_iter().for_each(Child::ends);
    told
}

fn database_of(orders: &Orders) -> PostgresOptions {
    patient(orders.path.display().to_string()).connections(8)
}

#[test]
fn a_hundred_and_twenty_of_two_processes_take_exactly_the_fifty_there_are() {
    skip_without!(POSTGRES);
    if let Some(orders) = Orders::read() {
        return runtime().block_on(async {
            let store = open(database_of(&orders)).await;
            let levels = own("acme", 50);
            let draws: Vec<_> = (0..60).map(|_| draw_of(&levels, 1)).collect();
            Orders::wait_for_go();
            let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await;
            assert!(answers.iter().all(Result::is_ok));
            Orders::tell(&answers.iter().filter(|answer| is_granted(answer)).count().to_string());
        });
    }
    let url = runtime().block_on(database());
    let name = test_name!(a_hundred_and_twenty_of_two_processes_take_exactly_the_fifty_there_are);
    let taken = at_once(name, &url);
    assert_eq!(taken.iter().sum::<u64>(), 50, "{taken:?}");
    let left = runtime().block_on(async { shows(&open(patient(&url)).await, "acme").await });
    assert_eq!(left, Some((0, 50)));
}

/// Each draws from hot rows in an order of its own; the server would find a circle, end one of them, and count it.
#[test]
fn hot_rows_that_two_processes_draw_in_opposite_orders_are_no_deadlock() {
    const ROUNDS: u64 = 40;
    skip_without!(POSTGRES);
    if let Some(orders) = Orders::read() {
        return runtime().block_on(async {
            let store = Arc::new(open(database_of(&orders)).await);
            Orders::wait_for_go();
            let limit = [Limit::per_second("rpm", 1_000_000)];
            let (ab, ba) = (levels(&[("a", &limit), ("b", &limit)]), levels(&[("b", &limit), ("a", &limit)]));
            let mut done = 0;
            for round in 0..ROUNDS {
                let levels = if (round + orders.number).is_multiple_of(2) { &ab } else { &ba };
                let draws: Vec<_> = (0..10).map(|_| draw_of(levels, 1)).collect();
                for answer in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
                    let answer: Result<_, StoreError> = answer;
                    assert!(is_granted(&answer), "{answer:?}");
                    done += 1;
                }
            }
            Orders::tell(&done.to_string());
        });
    }
    let url = runtime().block_on(database());
    let deadlocks = || {
        let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        runtime().block_on(async { outside(&url).await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) })
    };
    let before = deadlocks();
    let name = test_name!(hot_rows_that_two_processes_draw_in_opposite_orders_are_no_deadlock);
    assert_eq!(at_once(name, &url), [ROUNDS * 10, ROUNDS * 10]);
    assert_eq!(deadlocks(), before);
    let total = runtime().block_on(async { shows(&open(patient(&url)).await, "a").await });
    assert_eq!(total.map(|(_, consumed)| consumed), Some(800));
}
