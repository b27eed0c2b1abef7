//! Calls that are done together: what is wrong with one of them is told to that one.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_store::{Buckets, Draw, Drawn, Moved, Sqlite, SqliteOptions, StoreError};

use super::gone::{Gate, begin};
use crate::kit::sqlite::Place;
use crate::kit::words::{draw_of, granted, own, said, settle_of, used};

/// Has a draw and a settle done in one transaction, and tells what they were answered: the writer is held up in the middle
/// of another one until both wait.
async fn together(
    store: &Sqlite,
    gate: &Gate,
    draw: &Draw,
    end: &Draw,
) -> (Result<Drawn, StoreError>, Result<Moved, StoreError>) {
    gate.close();
    let before = draw_of(&own("before", 10), 1);
    let mut first = store.draw(&before);
    assert!(!begin(&mut first), "it is held up");
    gate.holds_somebody();
    let settle = settle_of(end, 1);
    let (mut drawn, mut settled) = (store.draw(draw), store.settle(&settle));
    assert!(!begin(&mut drawn) && !begin(&mut settled), "they wait");
    gate.open();
    // Its own answer is of no account: there may be no room for it.
    drop(first.await);
    (drawn.await, settled.await)
}

/// A draw that met a damaged row failed every call beside it, as something that no repetition would help: a settle that is
/// answered so is given up by whoever made it, and what was used is lost.
#[tokio::test]
async fn an_error_about_one_call_is_not_told_to_those_beside_it() {
    let (place, gate) = (Place::new(), Gate::default());
    let store = SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let held = draw_of(&own("acme", 10), 1);
    granted(store.draw(&held).await);
    // In the place of a damaged page.
    let spoil = "CREATE TRIGGER spoiled BEFORE INSERT ON subjects WHEN NEW.entity = 'bad'
                 BEGIN SELECT RAISE(ABORT, 'spoiled'); END";
    place.outside().execute_batch(spoil).unwrap();
    let (bad, end) = together(&store, &gate, &draw_of(&own("bad", 10), 1), &held).await;
    let bad = bad.unwrap_err();
    assert!(matches!(bad, StoreError::Corrupt { .. }), "{bad:?}");
    assert!(!end.unwrap().is_repeat);
    assert_eq!(used(&store, "acme").await, 1);
}

/// In a full file the ends of leases have room, and one draw that has none kept them from it.
#[tokio::test]
async fn a_full_file_takes_the_ends_of_leases_beside_a_draw_that_has_no_room() {
    let (place, gate) = (Place::new(), Gate::default());
    let options = SqliteOptions::file(&place.path).clock(gate.clone()).size_max(1 << 20);
    let store = options.open().await.unwrap();
    let long = |number: u32| -> Arc<Levels> { own(&format!("{number:0>200}"), 10) };
    let held = draw_of(&own("acme", 30_000), 1);
    granted(store.draw(&held).await);
    // Its lines of usage are there, and the bucket of the one that is held up.
    granted(store.spend(&draw_of(&own("acme", 30_000), 1)).await);
    granted(store.spend(&draw_of(&own("before", 10), 1)).await);
    let mut number = 0;
    while store.draw(&draw_of(&long(number), 1)).await.is_ok() {
        number += 1;
    }
    let (full, end) = together(&store, &gate, &draw_of(&long(number), 1), &held).await;
    let full = said(full);
    assert!(full.contains("no room"), "{full}");
    assert!(!end.unwrap().is_repeat);
    assert_eq!(used(&store, "acme").await, 2);
}
