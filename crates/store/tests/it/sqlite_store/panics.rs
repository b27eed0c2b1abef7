//! Panicking clocks and wakers: every call is answered, nothing is half done, and the store continues.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use tidegate_core::time::Stamp;
use tidegate_store::{Buckets, Policies, SqliteOptions, WallClock};

use super::dropped_calls::{Gate, poll_once};
use crate::kit::common::{START, balance, draw_of, error_text, granted, own};
use crate::kit::sqlite::TempFile;

#[derive(Debug, Clone, Default)]
struct PanickingClock(Arc<AtomicBool>);

impl WallClock for PanickingClock {
    fn now(&self) -> Stamp {
        assert!(!self.0.load(Ordering::SeqCst), "an intentional panic of the clock");
        START
    }
}

#[tokio::test]
async fn panicking_clock_fails_only_its_call() {
    let (place, clock) = (TempFile::new(), PanickingClock::default());
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
            let error = error_text(store.version().await);
            assert!(error.contains("panicked"), "{error}");
            clock.0.store(false, Ordering::SeqCst);
            assert_eq!(balance(&store, "acme").await, Some((9, 1)));
        }
        granted(store.draw(&draw_of(&levels, 9)).await);
        assert_eq!(balance(&store, "acme").await, Some((0, 10)));
        store.close().await;
    }
}

/// A waker that panics.
struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("an intentional panic of the waker");
    }
}

/// A panicking waker used to end the writer thread, and all later calls waited for ever.
#[tokio::test]
async fn panicking_waker_does_not_block_others() {
    let place = TempFile::new();
    let gate = Gate::default();
    let store = SqliteOptions::file(&place.path).clock(gate.clone()).open().await.unwrap();
    let draws: Vec<_> = (0..4).map(|_| draw_of(&own("acme", 10), 1)).collect();
    let waker = Waker::from(Arc::new(PanickingWaker));
    for draw in &draws {
        gate.close();
        let mut reply = store.spend(draw);
        assert!(Pin::new(&mut reply).poll(&mut Context::from_waker(&waker)).is_pending());
        let mut read = store.version();
        assert!(Pin::new(&mut read).poll(&mut Context::from_waker(&waker)).is_pending());
        gate.open();
        granted(store.spend(&draw_of(&own("acme", 10), 1)).await);
        assert!(poll_once(&mut reply), "the call was answered");
        store.version().await.unwrap();
    }
    assert_eq!(balance(&store, "acme").await, Some((2, 8)));
}
