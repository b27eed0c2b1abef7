//! What an answer means when the machine stops: by the store's own count of what it has put on the disk.

use std::time::{Duration, Instant};

use tidegate_store::{Buckets, Durable, ManualWall, Sqlite, SqliteOptions};

use super::gone::{Gate, begin};
use crate::kit::sqlite::Place;
use crate::kit::words::{START, draw_of, eventually, granted, join_all, own, settle_of, shows};

/// What is written is put on the disk so much later.
const SYNCED_EVERY: Duration = Duration::from_millis(900);

#[tokio::test]
async fn durable_by_commit_every_answer_is_on_the_disk() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.options(&clock).durable(Durable::Commit).open().await.unwrap();
    for number in 1..=20 {
        let draw = draw_of(&own("acme", 100), 1);
        granted(store.draw(&draw).await);
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        let stats = store.stats();
        assert_eq!((stats.syncs, stats.transactions), (2 * number, 2 * number));
    }
    // What changes nothing is not written, and so not put on the disk.
    let refused = store.draw(&draw_of(&own("acme", 100), 90)).await.unwrap();
    assert!(matches!(refused, tidegate_store::Drawn::Refused(_)));
    assert_eq!((store.stats().syncs, store.stats().transactions), (40, 41));
}

#[tokio::test]
async fn durable_by_the_second_it_is_put_on_the_disk_though_nobody_asks() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    // What was there when it was opened.
    is_synced(&store, 1).await;
    let asked = Instant::now();
    granted(store.draw(&draw_of(&own("acme", 100), 1)).await);
    let syncs = store.stats().syncs;
    assert!(syncs == 1 || asked.elapsed() >= SYNCED_EVERY, "no call waits for the disk");
    is_synced(&store, 2).await;
    // Once is enough: what is on the disk is not put there again.
    let stats = store.stats();
    assert_eq!(shows(&store, "acme").await, Some((99, 1)));
    store.close().await;
    assert_eq!(store.stats(), stats);
}

#[tokio::test]
async fn closing_puts_on_the_disk_what_is_not_there_yet() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    for _ in 0..50 {
        granted(store.draw(&draw_of(&own("acme", 100), 1)).await);
    }
    let before = store.stats();
    store.close().await;
    let after = store.stats();
    assert!(after.syncs >= 1, "{before:?}, then {after:?}");
    // Reading and refusing write nothing, so that there is nothing to put anywhere.
    let store = place.open(&clock).await;
    assert_eq!(shows(&store, "acme").await, Some((50, 50)));
    store.close().await;
    assert_eq!(store.stats().syncs, 0);
}

#[tokio::test]
async fn what_waits_together_is_written_together() {
    let (place, gate) = (Place::new(), Gate::default());
    let options = SqliteOptions::file(&place.path).clock(gate.clone()).durable(Durable::Commit);
    let store = options.open().await.unwrap();
    let draws: Vec<_> = (0..400).map(|_| draw_of(&own("acme", 1_000), 1)).collect();
    let mut replies: Vec<_> = draws.iter().map(|draw| store.draw(draw)).collect();
    // The first is held up in its transaction until all others wait.
    gate.close();
    assert!(!begin(&mut replies[0]));
    gate.holds_somebody();
    assert!(!replies[1..].iter_mut().any(begin));
    gate.open();
    for answer in join_all(replies).await {
        granted(answer);
    }
    let stats = store.stats();
    assert_eq!(stats.draws, 400);
    assert!(stats.transactions <= 2 && stats.syncs == stats.transactions, "{stats:?}");
}

/// To put it there needed the file, and another process that held it kept everybody's answers off the disk.
#[tokio::test]
async fn whoever_holds_the_file_keeps_nothing_off_the_disk() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 100), 1)).await);
    let other = place.outside();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    is_synced(&store, 1).await;
    other.execute_batch("ROLLBACK").unwrap();
}

/// What a process has left that was killed is with the operating system, and nobody else would put it on the disk.
#[tokio::test]
async fn what_others_left_in_the_log_is_put_on_the_disk_when_the_file_is_opened() {
    let (place, clock) = (Place::new(), ManualWall::new(START));
    let other = place.open(&clock).await;
    granted(other.draw(&draw_of(&own("acme", 100), 1)).await);
    // It has the file open, so that its log stays, and nothing is written from here on.
    let store = place.open(&clock).await;
    is_synced(&store, 1).await;
    assert_eq!(store.stats().transactions, 0);
}

async fn is_synced(store: &Sqlite, count: u64) {
    eventually("it is on the disk", async || store.stats().syncs >= count).await;
}
