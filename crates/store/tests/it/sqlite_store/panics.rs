//! A clock that panics, and wakers that do: all are answered, nothing is half done, and the store goes on.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, Policies, SqliteOptions, WallClock};

use super::gone::{Gate, begin};
use crate::kit::sqlite::Place;
use crate::kit::words::{START, draw_of, granted, own, said, shows};

#[derive(Debug, Clone, Default)]
struct Broken(Arc<AtomicBool>);

impl WallClock for Broken {
    fn now(&self) -> Stamp {
        assert!(!self.0.load(Ordering::SeqCst), "a clock that is broken, on purpose");
        START
    }
}

#[tokio::test]
async fn a_clock_that_panics_fails_the_call_and_nothing_else() {
    let (place, clock) = (Place::new(), Broken::default());
    for store in [
        SqliteOptions::file(&place.path).clock(clock.clone()).open().await.unwrap(),
        SqliteOptions::memory().clock(clock.clone()).open().await.unwrap(),
    ] {
        let levels = own("acme", 10);
        granted(store.draw(&draw_of(&levels, 1)).await);
        for _ in 0..3 {
            clock.0.store(true, Ordering::SeqCst);
            let lost = draw_of(&levels, 4);
            let error = store.draw(&lost).await.unwrap_err();
            assert!(error.is_transient(), "{error}");
            assert!(error.to_string().ends_with("the store's thread panicked: nothing was done"), "{error}");
            let error = said(store.version().await);
            assert!(error.contains("panicked"), "{error}");
            clock.0.store(false, Ordering::SeqCst);
            assert_eq!(shows(&store, "acme").await, Some((9, 1)));
        }
        granted(store.draw(&draw_of(&levels, 9)).await);
        assert_eq!(shows(&store, "acme").await, Some((0, 10)));
        store.close().await;
    }
}

/// Wakes by panicking.
struct Startled;

impl Wake for Startled {
    fn wake(self: Arc<Self>) {
        panic!("a waker that panics, on purpose");
    }
}

/// It ended the thread that writes, and everybody after waited for ever.
#[tokio::test]
async fn a_waker_that_panics_keeps_nobody_else_waiting() {
    let place = Place::new();
    let gate = Gate::default();
    let store = SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let draws: Vec<_> = (0..4).map(|_| draw_of(&own("acme", 10), 1)).collect();
    let waker = Waker::from(Arc::new(Startled));
    for draw in &draws {
        gate.close();
        let mut reply = store.spend(draw);
        assert!(Pin::new(&mut reply).poll(&mut Context::from_waker(&waker)).is_pending());
        let mut read = store.version();
        assert!(Pin::new(&mut read).poll(&mut Context::from_waker(&waker)).is_pending());
        gate.open();
        granted(store.spend(&draw_of(&own("acme", 10), 1)).await);
        assert!(begin(&mut reply), "it was answered all the same");
        store.version().await.unwrap();
    }
    assert_eq!(shows(&store, "acme").await, Some((2, 8)));
}
