//! Callers who go: before their turn, while their call is written, before they have heard; and handles that are dropped or
//! closed while others wait.

use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, Reply, Sqlite, SqliteOptions, WallClock};

use crate::kit::sqlite::Place;
use crate::kit::words::{START, draw_of, eventually, granted, own, said, settle_of, shows, used};

/// A clock that holds up whoever reads it, which is the writer in the middle of a transaction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<Door>, Condvar)>);

#[derive(Debug, Default)]
struct Door {
    is_closed: bool,
    waiting: usize,
    /// The reading that panics, counted from now on; 0 is none.
    breaks_at: usize,
    has_broken: bool,
}

impl Gate {
    fn change(&self, change: impl FnOnce(&mut Door)) {
        change(&mut self.0.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.1.notify_all();
    }

    pub(crate) fn close(&self) {
        self.change(|door| door.is_closed = true);
    }

    pub(crate) fn open(&self) {
        self.change(|door| door.is_closed = false);
    }

    /// Comes back when somebody stands before the gate.
    pub(crate) fn holds_somebody(&self) {
        let door = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(door, |door| door.waiting == 0).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Gate {
    /// The reading after the next one panics.
    fn breaks_soon(&self) {
        self.change(|door| door.breaks_at = 2);
    }

    /// Comes back when a reading has panicked.
    fn has_broken(&self) {
        let door = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(door, |door| !door.has_broken).unwrap_or_else(PoisonError::into_inner));
    }
}

impl WallClock for Gate {
    fn now(&self) -> Stamp {
        self.change(|door| door.waiting += 1);
        let door = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut door =
            self.0.1.wait_while(door, |door| door.is_closed).unwrap_or_else(PoisonError::into_inner);
        door.waiting -= 1;
        if door.breaks_at > 0 {
            door.breaks_at -= 1;
            if door.breaks_at == 0 {
                door.has_broken = true;
                drop(door);
                self.0.1.notify_all();
                panic!("a clock that breaks, on purpose");
            }
        }
        START
    }
}

async fn open(place: &Place) -> (Gate, Sqlite) {
    let gate = Gate::default();
    let store =
        SqliteOptions::file(&place.path).clock(gate.clone()).open().await.expect("the file is opened");
    (gate, store)
}

/// Has a call made, and not waited for.
pub(crate) fn begin<T: Unpin>(reply: &mut Reply<'_, T>) -> bool {
    let mut context = Context::from_waker(Waker::noop());
    matches!(Pin::new(reply).poll(&mut context), Poll::Ready(_))
}

#[tokio::test]
async fn a_caller_who_goes_before_its_turn_is_skipped() {
    let place = Place::new();
    let (gate, store) = open(&place).await;
    let levels = own("acme", 10);
    let (first, gone) = (draw_of(&levels, 1), draw_of(&levels, 5));
    gate.close();
    let mut reply = store.draw(&first);
    assert!(!begin(&mut reply));
    gate.holds_somebody();
    // The writer is with the first: these wait for the next transaction.
    for _ in 0..100 {
        assert!(!begin(&mut store.draw(&gone)));
        assert!(!begin(&mut store.spend(&gone)));
    }
    gate.open();
    granted(reply.await);
    granted(store.draw(&gone).await);
    assert_eq!(shows(&store, "acme").await, Some((4, 6)), "it has drawn when it was waited for, and once");
    assert_eq!(store.stats().draws, 2);
}

#[tokio::test]
async fn a_draw_whose_caller_goes_while_it_is_written_returns() {
    let place = Place::new();
    let (gate, store) = open(&place).await;
    let levels = own("acme", 10);
    let (gone, spent) = (draw_of(&levels, 5), draw_of(&levels, 2));
    gate.close();
    let mut replies = (store.draw(&gone), store.spend(&spent));
    assert!(!begin(&mut replies.0));
    gate.holds_somebody();
    drop(replies.0);
    // What was spent stays spent, heard or not.
    assert!(!begin(&mut replies.1));
    gate.open();
    granted(replies.1.await);
    assert_eq!(shows(&store, "acme").await, Some((8, 2)));
    let error = said(store.draw(&gone).await);
    assert!(error.contains("it was cancelled"), "{error}");
}

/// An answer that was sent and never heard left the lease open until its deadline.
#[tokio::test]
async fn a_draw_whose_caller_goes_without_having_heard_returns() {
    let place = Place::new();
    let (gate, store) = open(&place).await;
    let levels = own("acme", 10);
    let gone = draw_of(&levels, 5);
    gate.close();
    let mut reply = store.draw(&gone);
    assert!(!begin(&mut reply));
    gate.open();
    // Calls are done in order: when this is answered, that one was.
    granted(store.draw(&draw_of(&levels, 1)).await);
    granted(store.draw(&draw_of(&levels, 1)).await);
    drop(reply);
    // The next transaction has what undoes it before this.
    granted(store.draw(&draw_of(&levels, 1)).await);
    assert_eq!(shows(&store, "acme").await, Some((7, 3)));
    // One that is repeated is somebody's, and stays.
    let kept = draw_of(&levels, 4);
    granted(store.draw(&kept).await);
    gate.close();
    let mut again = store.draw(&kept);
    assert!(!begin(&mut again));
    gate.open();
    granted(store.draw(&draw_of(&levels, 1)).await);
    drop(again);
    granted(store.draw(&draw_of(&levels, 1)).await);
    store.settle(&settle_of(&kept, 4)).await.unwrap();
    assert_eq!(shows(&store, "acme").await, Some((1, 9)));
}

/// What was to be returned was lost when the next transaction failed.
#[tokio::test]
async fn what_is_to_return_returns_after_the_trouble() {
    let place = Place::new();
    let (gate, store) = open(&place).await;
    let gone = draw_of(&own("acme", 10), 5);
    gate.close();
    let mut reply = store.draw(&gone);
    assert!(!begin(&mut reply));
    gate.holds_somebody();
    drop(reply);
    gate.breaks_soon();
    gate.open();
    // It is drawn, and what is to return it fails. It is tried again though nobody asks for anything.
    gate.has_broken();
    eventually("all of it is back", async || shows(&store, "acme").await == Some((10, 0))).await;
    let error = said(store.draw(&gone).await);
    assert!(error.contains("it was cancelled"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_answers_all_who_wait_and_refuses_who_comes_later() {
    let place = Place::new();
    let (gate, store) = open(&place).await;
    gate.close();
    let waiting: Vec<_> = (0..50)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.spend(&draw_of(&own("acme", 100), 1)).await })
        })
        .collect();
    gate.holds_somebody();
    let closing = tokio::spawn({
        let store = store.clone();
        async move { store.close().await }
    });
    let mut refused = 0;
    while refused == 0 {
        // A first poll makes the call, and is refused once it is closed.
        refused += u32::from(begin(&mut store.spend(&draw_of(&own("acme", 100), 1))));
        tokio::task::yield_now().await;
    }
    gate.open();
    closing.await.unwrap();
    let mut done = 0_i64;
    for answer in waiting {
        match answer.await.unwrap() {
            Ok(drawn) => {
                granted(Ok(drawn));
                done += 1;
            }
            Err(error) => assert!(error.to_string().ends_with("was closed"), "{error}"),
        }
    }
    assert!(done > 0, "the one that was being written was answered");
    let error = said(store.spend(&draw_of(&own("acme", 100), 1)).await);
    assert!(error.ends_with("limits.db` was closed"), "{error}");
    let error = said(tidegate_store::Policies::version(&store).await);
    assert!(error.ends_with("limits.db` was closed"), "{error}");
    store.close().await;
    let (_, store) = open(&place).await;
    assert_eq!(
        (shows(&store, "acme").await, used(&store, "acme").await),
        (Some((100 - done, done)), done.unsigned_abs())
    );
}

#[tokio::test]
async fn the_last_handle_may_be_dropped_while_calls_are_on_their_way() {
    let place = Place::new();
    let (gate, store) = open(&place).await;
    let kept = draw_of(&own("acme", 10), 2);
    granted(store.draw(&kept).await);
    gate.close();
    let draws: Vec<_> = (0..5).map(|_| draw_of(&own("acme", 10), 1)).collect();
    for (place, draw) in draws.iter().enumerate() {
        assert!(!begin(&mut store.draw(draw)));
        if place == 0 {
            gate.holds_somebody();
        }
    }
    drop(store);
    gate.open();
    // Nobody waits for any of them: what was drawn returns before the thread ends.
    let (_, store) = open(&place).await;
    while shows(&store, "acme").await != Some((8, 2)) {
        tokio::task::yield_now().await;
    }
    store.settle(&settle_of(&kept, 2)).await.unwrap();
    assert_eq!(used(&store, "acme").await, 2);
}
