//! Callers that are dropped while queued, while their call is written, or before they read the answer; and
//! handles that are dropped or closed with queued calls.

use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, Reply, Sqlite, SqliteOptions, WallClock};

use crate::kit::common::{START, balance, draw_of, error_text, eventually, granted, own, settle_of, used};
use crate::kit::sqlite::TempFile;

/// A clock that blocks its reader, which is the writer in the middle of a transaction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<Door>, Condvar)>);

#[derive(Debug, Default)]
struct Door {
    is_closed: bool,
    waiting: usize,
    /// Panics at this reading, counted from now; 0 is never.
    panics_at: usize,
    has_panicked: bool,
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

    /// Returns when a reader is blocked.
    pub(crate) fn wait_until_blocked(&self) {
        let door = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(door, |door| door.waiting == 0).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Gate {
    /// The reading after the next one panics.
    fn panic_on_second_read(&self) {
        self.change(|door| door.panics_at = 2);
    }

    /// Returns when a reading has panicked.
    fn wait_for_panic(&self) {
        let door = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(door, |door| !door.has_panicked).unwrap_or_else(PoisonError::into_inner));
    }
}

impl WallClock for Gate {
    fn now(&self) -> Stamp {
        self.change(|door| door.waiting += 1);
        let door = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut door =
            self.0.1.wait_while(door, |door| door.is_closed).unwrap_or_else(PoisonError::into_inner);
        door.waiting -= 1;
        if door.panics_at > 0 {
            door.panics_at -= 1;
            if door.panics_at == 0 {
                door.has_panicked = true;
                drop(door);
                self.0.1.notify_all();
                panic!("an intentional panic of the clock");
            }
        }
        START
    }
}

async fn open(place: &TempFile) -> (Gate, Sqlite) {
    let gate = Gate::default();
    let store =
        SqliteOptions::file(&place.path).clock(gate.clone()).open().await.expect("the file is opened");
    (gate, store)
}

/// Polls a call once and returns whether it is ready.
pub(crate) fn poll_once<T: Unpin>(reply: &mut Reply<'_, T>) -> bool {
    let mut context = Context::from_waker(Waker::noop());
    matches!(Pin::new(reply).poll(&mut context), Poll::Ready(_))
}

#[tokio::test]
async fn dropped_queued_call_is_skipped() {
    let place = TempFile::new();
    let (gate, store) = open(&place).await;
    let levels = own("acme", 10);
    let (first, gone) = (draw_of(&levels, 1), draw_of(&levels, 5));
    gate.close();
    let mut reply = store.draw(&first);
    assert!(!poll_once(&mut reply));
    gate.wait_until_blocked();
    // The writer is busy with the first: these wait for the next transaction.
    for _ in 0..100 {
        assert!(!poll_once(&mut store.draw(&gone)));
        assert!(!poll_once(&mut store.spend(&gone)));
    }
    gate.open();
    granted(reply.await);
    granted(store.draw(&gone).await);
    assert_eq!(balance(&store, "acme").await, Some((4, 6)), "the awaited draw is applied once");
    assert_eq!(store.stats().draws, 2);
}

#[tokio::test]
async fn draw_dropped_while_written_is_returned() {
    let place = TempFile::new();
    let (gate, store) = open(&place).await;
    let levels = own("acme", 10);
    let (gone, spent) = (draw_of(&levels, 5), draw_of(&levels, 2));
    gate.close();
    let mut replies = (store.draw(&gone), store.spend(&spent));
    assert!(!poll_once(&mut replies.0));
    gate.wait_until_blocked();
    drop(replies.0);
    // A spend is not undone, whether or not its answer was read.
    assert!(!poll_once(&mut replies.1));
    gate.open();
    granted(replies.1.await);
    assert_eq!(balance(&store, "acme").await, Some((8, 2)));
    let error = error_text(store.draw(&gone).await);
    assert!(error.contains("it was cancelled"), "{error}");
}

/// A dropped call whose answer was already sent used to leave the lease open until its deadline.
#[tokio::test]
async fn draw_dropped_with_unread_answer_is_returned() {
    let place = TempFile::new();
    let (gate, store) = open(&place).await;
    let levels = own("acme", 10);
    let gone = draw_of(&levels, 5);
    gate.close();
    let mut reply = store.draw(&gone);
    assert!(!poll_once(&mut reply));
    gate.open();
    // Calls are processed in order: when this one is answered, so is the first.
    granted(store.draw(&draw_of(&levels, 1)).await);
    granted(store.draw(&draw_of(&levels, 1)).await);
    drop(reply);
    // The next transaction undoes the dropped draw first.
    granted(store.draw(&draw_of(&levels, 1)).await);
    assert_eq!(balance(&store, "acme").await, Some((7, 3)));
    // A repeated draw belongs to an earlier caller, and is not undone.
    let kept = draw_of(&levels, 4);
    granted(store.draw(&kept).await);
    gate.close();
    let mut again = store.draw(&kept);
    assert!(!poll_once(&mut again));
    gate.open();
    granted(store.draw(&draw_of(&levels, 1)).await);
    drop(again);
    granted(store.draw(&draw_of(&levels, 1)).await);
    store.settle(&settle_of(&kept, 4)).await.unwrap();
    assert_eq!(balance(&store, "acme").await, Some((1, 9)));
}

/// Pending returns used to be lost when the next transaction failed.
#[tokio::test]
async fn pending_returns_survive_a_failed_transaction() {
    let place = TempFile::new();
    let (gate, store) = open(&place).await;
    let gone = draw_of(&own("acme", 10), 5);
    gate.close();
    let mut reply = store.draw(&gone);
    assert!(!poll_once(&mut reply));
    gate.wait_until_blocked();
    drop(reply);
    gate.panic_on_second_read();
    gate.open();
    // The draw is applied, and the transaction that returns it fails. It is retried without further calls.
    gate.wait_for_panic();
    eventually("all units are returned", async || balance(&store, "acme").await == Some((10, 0))).await;
    let error = error_text(store.draw(&gone).await);
    assert!(error.contains("it was cancelled"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn close_answers_queued_calls_and_refuses_new_ones() {
    let place = TempFile::new();
    let (gate, store) = open(&place).await;
    gate.close();
    let waiting: Vec<_> = (0..50)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.spend(&draw_of(&own("acme", 100), 1)).await })
        })
        .collect();
    gate.wait_until_blocked();
    let closing = tokio::spawn({
        let store = store.clone();
        async move { store.close().await }
    });
    let mut refused = 0;
    while refused == 0 {
        // The first poll submits the call, which is refused after the close.
        refused += u32::from(poll_once(&mut store.spend(&draw_of(&own("acme", 100), 1))));
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
    assert!(done > 0, "the call being written was answered");
    let error = error_text(store.spend(&draw_of(&own("acme", 100), 1)).await);
    assert!(error.ends_with("limits.db` was closed"), "{error}");
    let error = error_text(tidegate_store::Policies::version(&store).await);
    assert!(error.ends_with("limits.db` was closed"), "{error}");
    store.close().await;
    let (_, store) = open(&place).await;
    assert_eq!(
        (balance(&store, "acme").await, used(&store, "acme").await),
        (Some((100 - done, done)), done.unsigned_abs())
    );
}

#[tokio::test]
async fn dropping_the_last_handle_returns_pending_draws() {
    let place = TempFile::new();
    let (gate, store) = open(&place).await;
    let kept = draw_of(&own("acme", 10), 2);
    granted(store.draw(&kept).await);
    gate.close();
    let draws: Vec<_> = (0..5).map(|_| draw_of(&own("acme", 10), 1)).collect();
    for (place, draw) in draws.iter().enumerate() {
        assert!(!poll_once(&mut store.draw(draw)));
        if place == 0 {
            gate.wait_until_blocked();
        }
    }
    drop(store);
    gate.open();
    // All replies were dropped: the draws are returned before the thread ends.
    let (_, store) = open(&place).await;
    while balance(&store, "acme").await != Some((8, 2)) {
        tokio::task::yield_now().await;
    }
    store.settle(&settle_of(&kept, 2)).await.unwrap();
    assert_eq!(used(&store, "acme").await, 2);
}
