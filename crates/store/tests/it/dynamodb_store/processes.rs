//! Several processes on one table.

use std::process::Stdio;
use std::sync::Arc;

use tidegate_store::Buckets as _;

use super::ENGINE;
use crate::kit::child::test_name;
use crate::kit::common::{balance, draw_of, is_granted, own};
use crate::kit::dynamodb::{open_new, options};
use crate::kit::engine::{skip_without, unique};

/// The table, for a child process.
const TABLE: &str = "TIDEGATE_TEST_TABLE";
/// The file for the number of grants of a child process.
const ANSWER: &str = "TIDEGATE_TEST_ANSWER";

/// The number of grants for sixty concurrent callers of a limit of fifty.
async fn sixty_at_once(table: &str) -> usize {
    let store = Arc::new(options(ENGINE).of_table(table).open().await.expect("the table exists"));
    let levels = own("acme", 50);
    let callers: Vec<_> = (0..60)
        .map(|_| {
            let (store, draw) = (Arc::clone(&store), draw_of(&levels, 1));
            tokio::spawn(async move { is_granted(&store.draw(&draw).await) })
        })
        .collect();
    let mut granted = 0;
    for caller in callers {
        granted += usize::from(caller.await.expect("no caller panics"));
    }
    granted
}

/// The body of the child process; does nothing in the parent.
#[tokio::test(flavor = "multi_thread")]
async fn child_process_draws() {
    if let Ok(table) = std::env::var(TABLE) {
        let granted = sixty_at_once(&table).await.to_string();
        std::fs::write(std::env::var(ANSWER).unwrap(), granted).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_take_exactly_the_limit() {
    skip_without!(ENGINE);
    let table = unique("processes");
    let store = open_new(options(ENGINE).of_table(&table)).await;
    let folder = tempfile::tempdir().unwrap();
    let children = (0..2).map(|number| {
        let answer = folder.path().join(number.to_string());
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test_name!(child_process_draws)])
            .env(TABLE, &table)
            .env(ANSWER, &answer)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        (child, answer)
    });
    let mut granted = 0;
    for (mut child, answer) in children.collect::<Vec<_>>() {
        assert!(child.wait().unwrap().success(), "a child process succeeds");
        granted += std::fs::read_to_string(answer).unwrap().parse::<usize>().unwrap();
    }
    assert_eq!(granted, 50);
    assert_eq!(balance(&store, "acme").await, Some((0, 50)));
}
