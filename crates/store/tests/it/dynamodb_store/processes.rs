//! Several processes on one table.

use std::process::Stdio;
use std::sync::Arc;

use tidegate_store::Buckets as _;

use super::ENGINE;
use crate::kit::child::test_name;
use crate::kit::dynamodb::{made, options};
use crate::kit::engine::{skip_without, unique};
use crate::kit::words::{draw_of, is_granted, own, shows};

/// Names the table for a process that is started to draw.
const TABLE: &str = "TIDEGATE_TEST_TABLE";
/// Names the file for what it was granted.
const ANSWER: &str = "TIDEGATE_TEST_ANSWER";

/// How many of sixty callers at once get one of the fifty there are.
async fn sixty_at_once(table: &str) -> usize {
    let store = Arc::new(options(ENGINE).of_table(table).open().await.expect("the table is there"));
    let levels = own("acme", 50);
    let callers: Vec<_> = (0..60)
        .map(|_| {
            let (store, asked) = (Arc::clone(&store), draw_of(&levels, 1));
            tokio::spawn(async move { is_granted(&store.draw(&asked).await) })
        })
        .collect();
    let mut granted = 0;
    for caller in callers {
        granted += usize::from(caller.await.expect("no caller panics"));
    }
    granted
}

/// What the other process runs; by itself it has nothing to do.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_draws() {
    if let Ok(table) = std::env::var(TABLE) {
        let granted = sixty_at_once(&table).await.to_string();
        std::fs::write(std::env::var(ANSWER).unwrap(), granted).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_take_exactly_the_limit() {
    skip_without!(ENGINE);
    let table = unique("processes");
    let store = made(options(ENGINE).of_table(&table)).await;
    let folder = tempfile::tempdir().unwrap();
    let children = (0..2).map(|number| {
        let answer = folder.path().join(number.to_string());
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test_name!(a_process_that_draws)])
            .env(TABLE, &table)
            .env(ANSWER, &answer)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        (child, answer)
    });
    let mut granted = 0;
    for (mut child, answer) in children.collect::<Vec<_>>() {
        assert!(child.wait().unwrap().success(), "a process that draws ends well");
        granted += std::fs::read_to_string(answer).unwrap().parse::<usize>().unwrap();
    }
    assert_eq!(granted, 50);
    assert_eq!(shows(&store, "acme").await, Some((0, 50)));
}
