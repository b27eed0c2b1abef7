//! Durability of answers, by the store's count of syncs.

use std::time::{Duration, Instant};

use tidegate_store::{Buckets, Durability, ManualWall, Sqlite, SqliteOptions};

use super::dropped_calls::{Gate, poll_once};
use crate::kit::common::{START, balance, draw_of, eventually, granted, join_all, own, settle_of};
use crate::kit::sqlite::TempFile;

/// The delay of a background sync.
const SYNCED_EVERY: Duration = Duration::from_millis(900);

#[tokio::test]
async fn durable_commit_syncs_before_every_answer() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.options(&clock).durable(Durability::Commit).open().await.unwrap();
    for number in 1..=20 {
        let draw = draw_of(&own("acme", 100), 1);
        granted(store.draw(&draw).await);
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        let stats = store.stats();
        assert_eq!((stats.syncs, stats.transactions), (2 * number, 2 * number));
    }
    // A call that changes nothing is not written, and so not synced.
    let refused = store.draw(&draw_of(&own("acme", 100), 90)).await.unwrap();
    assert!(matches!(refused, tidegate_store::DrawResult::Refused(_)));
    assert_eq!((store.stats().syncs, store.stats().transactions), (40, 41));
}

#[tokio::test]
async fn durable_second_syncs_without_further_calls() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    // The initial state.
    wait_for_syncs(&store, 1).await;
    let start = Instant::now();
    granted(store.draw(&draw_of(&own("acme", 100), 1)).await);
    let syncs = store.stats().syncs;
    assert!(syncs == 1 || start.elapsed() >= SYNCED_EVERY, "no call waits for a sync");
    wait_for_syncs(&store, 2).await;
    // Synced data is not synced again.
    let stats = store.stats();
    assert_eq!(balance(&store, "acme").await, Some((99, 1)));
    store.close().await;
    assert_eq!(store.stats(), stats);
}

#[tokio::test]
async fn close_syncs_pending_writes() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    for _ in 0..50 {
        granted(store.draw(&draw_of(&own("acme", 100), 1)).await);
    }
    let before = store.stats();
    store.close().await;
    let after = store.stats();
    assert!(after.syncs >= 1, "{before:?}, then {after:?}");
    // Reads and refusals write nothing, so there is nothing to sync.
    let store = place.open(&clock).await;
    assert_eq!(balance(&store, "acme").await, Some((50, 50)));
    store.close().await;
    assert_eq!(store.stats().syncs, 0);
}

#[tokio::test]
async fn queued_calls_share_a_transaction() {
    let (place, gate) = (TempFile::new(), Gate::default());
    let options = SqliteOptions::file(&place.path).clock(gate.clone()).durable(Durability::Commit);
    let store = options.open().await.unwrap();
    let draws: Vec<_> = (0..400).map(|_| draw_of(&own("acme", 1_000), 1)).collect();
    let mut replies: Vec<_> = draws.iter().map(|draw| store.draw(draw)).collect();
    // The first is blocked in its transaction until all others are queued.
    gate.close();
    assert!(!poll_once(&mut replies[0]));
    gate.wait_until_blocked();
    assert!(!replies[1..].iter_mut().any(poll_once));
    gate.open();
    for answer in join_all(replies).await {
        granted(answer);
    }
    let stats = store.stats();
    assert_eq!(stats.draws, 400);
    assert!(stats.transactions <= 2 && stats.syncs == stats.transactions, "{stats:?}");
}

/// A sync used to need the file lock, so another process that held it delayed everybody's answers.
#[tokio::test]
async fn foreign_write_lock_does_not_delay_the_sync() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 100), 1)).await);
    let other = place.outside();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    wait_for_syncs(&store, 1).await;
    other.execute_batch("ROLLBACK").unwrap();
}

/// A killed process leaves its writes with the operating system, and no other process would sync them.
#[tokio::test]
async fn open_syncs_the_log_of_other_processes() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let other = place.open(&clock).await;
    granted(other.draw(&draw_of(&own("acme", 100), 1)).await);
    // The other handle keeps its log, because it has the file open; nothing is written from here on.
    let store = place.open(&clock).await;
    wait_for_syncs(&store, 1).await;
    assert_eq!(store.stats().transactions, 0);
}

async fn wait_for_syncs(store: &Sqlite, count: u64) {
    eventually("the sync has run", async || store.stats().syncs >= count).await;
}
