//! The timer of a throttle: which waiter or task owns it, and the task that runs it.
//!
//! The queue knows when its head is due; a task or thread has to be awake then. If callers wait in a tokio
//! runtime, this is a separate task in that runtime, so that waiters need not be polled to let others pass,
//! and each is woken once, with its result. A blocked thread, or a future outside any runtime, runs the timer
//! itself while it is the head. The timer follows the head; until the head takes it over, the previous owner
//! keeps it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use tidegate_core::time::Instant;
use tokio::runtime::{Handle, Id};

use crate::clock::Sleep;
use crate::state::Effects;
use crate::throttle::Inner;

/// The runtime or thread a waiter runs on, and therefore where its timer must run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimerHost {
    /// A tokio runtime.
    Runtime(Id),
    /// The waiter itself: a blocked thread, or a future polled without a runtime.
    Own(u64),
}

impl TimerHost {
    /// The current runtime, if there is one.
    pub(crate) fn runtime() -> Option<Self> {
        Handle::try_current().ok().map(|handle| Self::Runtime(handle.id()))
    }

    /// A fresh host without a runtime.
    pub(crate) fn own_host() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        Self::Own(NUMBER.fetch_add(1, Ordering::Relaxed))
    }
}

/// The current owner of the timer.
#[derive(Debug)]
pub(crate) struct TimerOwner {
    pub(crate) id: u32,
    pub(crate) host: TimerHost,
    /// The time the timer is set to; `None` while it sleeps without one or is awake.
    pub(crate) armed: Option<Instant>,
    /// Woken to reset the timer.
    pub(crate) waker: Option<Waker>,
}

/// Sleeps until the head is due, serves due waiters, and repeats; completes when the queue is empty or
/// another owner has the timer.
pub(crate) struct TimerTask {
    inner: Weak<Inner>,
    id: u32,
    sleep: Option<(Instant, Sleep)>,
    is_done: bool,
}

impl TimerTask {
    pub(crate) fn new(inner: Weak<Inner>, id: u32) -> Self {
        Self { inner, id, sleep: None, is_done: false }
    }

    /// Starts the sleep in the caller's context: a runtime without a timer then panics in the call that needs
    /// it, not in a background task.
    pub(crate) fn prime(&mut self, inner: &Inner, at: Option<Instant>) {
        self.sleep = at.map(|at| (at, inner.clock().sleep_until(at)));
    }

    /// Spawns the task on the current runtime; returns it if there is none, and the caller has to poll it.
    pub(crate) fn spawn(self) -> Option<Self> {
        match Handle::try_current() {
            Ok(handle) => {
                handle.spawn(self);
                None
            }
            Err(_) => Some(self),
        }
    }

    /// Runs one round: serves due waiters, and returns when to run again.
    fn round(&self, inner: &Arc<Inner>, context: &Context<'_>) -> TimerStep {
        let waker = context.waker().clone();
        let mut effects = Effects::default();
        let (mut state, now) = inner.lock_timed(Some(inner.clock().now()));
        let round = state.run_timer(self.id, waker, now, &mut effects);
        inner.release(state, effects);
        round
    }
}

/// What the timer's owner does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimerStep {
    /// It no longer owns the timer.
    Done,
    /// Sleep until then; `None` sleeps until woken.
    Sleep(Option<Instant>),
}

impl Inner {
    /// The timer's owner is dropped: wakes the head to take the timer over.
    pub(crate) fn release_timer(&self, id: u32) {
        let mut effects = Effects::default();
        let mut state = self.lock();
        state.release_timer(id, &mut effects);
        self.release(state, effects);
    }
}

impl Future for TimerTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut has_slept = false;
        loop {
            let Some(inner) = self.inner.upgrade() else {
                self.is_done = true;
                return Poll::Ready(());
            };
            match self.round(&inner, context) {
                TimerStep::Done => {
                    self.is_done = true;
                    return Poll::Ready(());
                }
                TimerStep::Sleep(None) => {
                    self.sleep = None;
                    return Poll::Pending;
                }
                TimerStep::Sleep(Some(at)) => {
                    if has_slept {
                        // The sleep ended early, as a coarse clock's may. Yield to other tasks.
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    if self.sleep.as_ref().is_none_or(|(armed, _)| *armed != at) {
                        self.sleep = Some((at, inner.clock().sleep_until(at)));
                    }
                    let Some((_, sleep)) = &mut self.sleep else { continue };
                    if sleep.as_mut().poll(context).is_pending() {
                        return Poll::Pending;
                    }
                    self.sleep = None;
                    has_slept = true;
                }
            }
        }
    }
}

impl Drop for TimerTask {
    /// A runtime that shuts down drops its tasks: the timer must be handed over.
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        if let Some(inner) = self.inner.upgrade() {
            inner.release_timer(self.id);
        }
    }
}
