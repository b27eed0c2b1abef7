//! Paused time that only tests advance, while sockets work as usual.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::pin::pin;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tokio::task::yield_now;
use tokio::time::advance;

/// A test that waits longer than this, in real time, hangs.
const HANG: Duration = Duration::new(120, 0);

/// Timers of the runtime fire up to this much late.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// While it exists, the clock of the runtime moves only by [`advance`]. A paused clock alone would run ahead
/// whenever every task waits for a socket.
pub(crate) struct Frozen(
    #[expect(dead_code, reason = "dropping it ends the blocking task")] mpsc::Sender<()>,
);

impl Frozen {
    pub(crate) fn new() -> Self {
        tokio::time::pause();
        let (sender, receiver) = mpsc::channel::<()>();
        // The clock does not advance by itself while a blocking task runs. When this one gives up, the clock
        // runs ahead to the next timeout, and the test that hangs fails.
        tokio::task::spawn_blocking(move || receiver.recv_timeout(HANG));
        Self(sender)
    }
}

/// Waits for a condition that other tasks bring about, without the runtime's clock.
pub(crate) async fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < HANG, "{what} does not come");
        yield_now().await;
    }
}

/// Lets every task make progress without advancing the clock.
pub(crate) async fn settle_down() {
    for _ in 0..500 {
        yield_now().await;
    }
}

/// Advances the clock by `step` at a time until `work` ends. Returns its result and the time that passed.
///
/// The clock may be far ahead of a slow socket: of the time that passed, only the least is certain.
pub(crate) async fn advance_until<T>(step: Duration, work: impl Future<Output = T>) -> (T, Duration) {
    let (began, began_really) = (tokio::time::Instant::now(), Instant::now());
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return (done, began.elapsed()),
            () = settle_down() => {}
        }
        assert!(began_really.elapsed() < HANG, "it does not end");
        advance(step).await;
    }
}

/// Checks that `work` does not end before `span` has passed, and returns what it ends with after that.
pub(crate) async fn ends_after<T>(span: Duration, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    for passes in [Duration::ZERO, span.saturating_sub(TICK)] {
        advance(passes).await;
        tokio::select! {
            biased;
            _ = &mut work => panic!("it ended before {span:?}"),
            () = settle_down() => {}
        }
    }
    advance(2 * TICK).await;
    work.await
}
