//! Calls that share a transaction: an error of one call does not affect the others.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_store::{Buckets, Draw, DrawResult, Movement, Sqlite, SqliteOptions, StoreError};

use super::dropped_calls::{Gate, poll_once};
use crate::kit::common::{draw_of, error_text, granted, own, settle_of, used};
use crate::kit::sqlite::TempFile;

/// Runs a draw and a settle in one transaction and returns both answers: the writer is blocked in an earlier
/// transaction until both are queued.
async fn run_in_one_transaction(
    store: &Sqlite,
    gate: &Gate,
    draw: &Draw,
    end: &Draw,
) -> (Result<DrawResult, StoreError>, Result<Movement, StoreError>) {
    gate.close();
    let before = draw_of(&own("before", 10), 1);
    let mut first = store.draw(&before);
    assert!(!poll_once(&mut first), "the writer is blocked");
    gate.wait_until_blocked();
    let settle = settle_of(end, 1);
    let (mut drawn, mut settled) = (store.draw(draw), store.settle(&settle));
    assert!(!poll_once(&mut drawn) && !poll_once(&mut settled), "both are queued");
    gate.open();
    // This answer does not matter: the file may be full.
    drop(first.await);
    (drawn.await, settled.await)
}

/// A draw that met a damaged row used to fail every call of its batch with a permanent error: callers abandon
/// a settle with such an error, and its usage is lost.
#[tokio::test]
async fn error_of_one_call_does_not_fail_its_batch() {
    let (place, gate) = (TempFile::new(), Gate::default());
    let store = SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let held = draw_of(&own("acme", 10), 1);
    granted(store.draw(&held).await);
    // Stands in for a damaged page.
    let spoil = "CREATE TRIGGER spoiled BEFORE INSERT ON subjects WHEN NEW.entity = 'bad'
                 BEGIN SELECT RAISE(ABORT, 'spoiled'); END";
    place.outside().execute_batch(spoil).unwrap();
    let (bad, end) = run_in_one_transaction(&store, &gate, &draw_of(&own("bad", 10), 1), &held).await;
    let bad = bad.unwrap_err();
    assert!(matches!(bad, StoreError::Corrupt { .. }), "{bad:?}");
    assert!(!end.unwrap().is_repeat);
    assert_eq!(used(&store, "acme").await, 1);
}

/// In a full file there is space for the ends of leases, but a draw without space used to fail them.
#[tokio::test]
async fn full_file_ends_leases_while_refusing_draws() {
    let (place, gate) = (TempFile::new(), Gate::default());
    let options = SqliteOptions::file(&place.path).clock(gate.clone()).size_max(1 << 20);
    let store = options.open().await.unwrap();
    let long = |number: u32| -> Arc<Levels> { own(&format!("{number:0>200}"), 10) };
    let held = draw_of(&own("acme", 30_000), 1);
    granted(store.draw(&held).await);
    // Creates the usage lines of the held lease, and the bucket of the blocked call.
    granted(store.spend(&draw_of(&own("acme", 30_000), 1)).await);
    granted(store.spend(&draw_of(&own("before", 10), 1)).await);
    let mut number = 0;
    while store.draw(&draw_of(&long(number), 1)).await.is_ok() {
        number += 1;
    }
    let (full, end) = run_in_one_transaction(&store, &gate, &draw_of(&long(number), 1), &held).await;
    let full = error_text(full);
    assert!(full.contains("no space"), "{full}");
    assert!(!end.unwrap().is_repeat);
    assert_eq!(used(&store, "acme").await, 2);
}
