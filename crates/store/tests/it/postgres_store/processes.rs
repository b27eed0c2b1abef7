//! Two processes on one server: together they take exactly the limit, and they do not deadlock.

use std::path::Path;
use std::sync::Arc;

use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets, PostgresOptions, StoreError};

use crate::kit::child::{Child, ChildArgs, test_name};
use crate::kit::common::{balance, draw_of, is_granted, join_all, levels, own};
use crate::kit::engine::{POSTGRES, skip_without};
use crate::kit::postgres::{database, open, options_at, outside};

const PROCESSES: u64 = 2;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Runs the test `name` in two child processes at the same time, on the database at `url`. Returns the
/// numbers that they report.
fn run_children(name: &str, url: &str) -> Vec<u64> {
    let start = |number| Child::start(name, Path::new(url), number, 0);
    let mut children: Vec<_> = (0..PROCESSES).map(start).collect();
    children.iter().for_each(Child::wait_ready);
    children.iter_mut().for_each(Child::go);
    let number =
        |child: &Child| child.next_line().expect("a child reports its result").parse().expect("a number");
    let numbers = children.iter().map(number).collect();
    children.into_iter().for_each(Child::wait);
    numbers
}

fn database_of(args: &ChildArgs) -> PostgresOptions {
    options_at(args.path.display().to_string()).connections(8)
}

#[test]
fn two_processes_take_exactly_the_limit() {
    skip_without!(POSTGRES);
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let store = open(database_of(&args)).await;
            let levels = own("acme", 50);
            let draws: Vec<_> = (0..60).map(|_| draw_of(&levels, 1)).collect();
            ChildArgs::wait_for_go();
            let answers = join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await;
            assert!(answers.iter().all(Result::is_ok));
            ChildArgs::report(&answers.iter().filter(|answer| is_granted(answer)).count().to_string());
        });
    }
    let url = runtime().block_on(database());
    let name = test_name!(two_processes_take_exactly_the_limit);
    let taken = run_children(name, &url);
    assert_eq!(taken.iter().sum::<u64>(), 50, "{taken:?}");
    let left = runtime().block_on(async { balance(&open(options_at(&url)).await, "acme").await });
    assert_eq!(left, Some((0, 50)));
}

/// Both draw from hot rows in opposite args; the server would detect a deadlock, abort one of them, and
/// count it.
#[test]
fn opposite_draw_orders_do_not_deadlock() {
    const ROUNDS: u64 = 40;
    skip_without!(POSTGRES);
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let store = Arc::new(open(database_of(&args)).await);
            ChildArgs::wait_for_go();
            let limit = [Limit::per_second("rpm", 1_000_000)];
            let (ab, ba) = (levels(&[("a", &limit), ("b", &limit)]), levels(&[("b", &limit), ("a", &limit)]));
            let mut done = 0;
            for round in 0..ROUNDS {
                let levels = if (round + args.number).is_multiple_of(2) { &ab } else { &ba };
                let draws: Vec<_> = (0..10).map(|_| draw_of(levels, 1)).collect();
                for answer in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
                    let answer: Result<_, StoreError> = answer;
                    assert!(is_granted(&answer), "{answer:?}");
                    done += 1;
                }
            }
            ChildArgs::report(&done.to_string());
        });
    }
    let url = runtime().block_on(database());
    let deadlocks = || {
        let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        runtime().block_on(async { outside(&url).await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) })
    };
    let before = deadlocks();
    let name = test_name!(opposite_draw_orders_do_not_deadlock);
    assert_eq!(run_children(name, &url), [ROUNDS * 10, ROUNDS * 10]);
    assert_eq!(deadlocks(), before);
    let total = runtime().block_on(async { balance(&open(options_at(&url)).await, "a").await });
    assert_eq!(total.map(|(_, consumed)| consumed), Some(800));
}
