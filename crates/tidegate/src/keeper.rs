//! The one timer of a throttle: who keeps it, and the task that does.
//!
//! The queue says when its head is to be asked again; somebody has to be awake then. Where callers wait in a tokio
//! runtime this is a task of its own there, so that waiters need not be polled to let others pass, and each is
//! woken once, with its answer. A blocked thread, or a future outside any runtime, keeps the timer itself while
//! it is the head. The timer follows the head; until the head takes it, whoever had it keeps it.

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

/// Where a waiter lives, and so where its timer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// A tokio runtime.
    Runtime(Id),
    /// Nowhere but with itself: a thread that blocks, or a future that is polled without a runtime.
    Alone(u64),
}

impl Home {
    /// Where the running code lives, if that is a runtime.
    pub(crate) fn runtime() -> Option<Self> {
        Handle::try_current().ok().map(|handle| Self::Runtime(handle.id()))
    }

    /// A home of one's own.
    pub(crate) fn alone() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        Self::Alone(NUMBER.fetch_add(1, Ordering::Relaxed))
    }
}

/// Whoever keeps the timer.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(crate) id: u32,
    pub(crate) home: Home,
    /// What the timer is set to; `None` while it sleeps without one, or is awake.
    pub(crate) armed: Option<Instant>,
    /// Woken when the timer is to be set anew.
    pub(crate) waker: Option<Waker>,
}

/// Sleeps until the head is to be asked, asks, and begins anew; ends when nobody waits or another keeps the timer.
pub(crate) struct Keep {
    inner: Weak<Inner>,
    id: u32,
    sleep: Option<(Instant, Sleep)>,
    ended: bool,
}

impl Keep {
    pub(crate) fn new(inner: Weak<Inner>, id: u32) -> Self {
        Self { inner, id, sleep: None, ended: false }
    }

    /// Begins to sleep where the caller can hear it: a runtime without a timer panics here, in the call that
    /// needs it, and not in a task that nobody asks.
    pub(crate) fn prime(&mut self, inner: &Inner, at: Option<Instant>) {
        self.sleep = at.map(|at| (at, inner.clock().sleep_until(at)));
    }

    /// Lets the runtime run it; without a runtime the caller has to.
    pub(crate) fn spawn(self) -> Option<Self> {
        match Handle::try_current() {
            Ok(handle) => {
                handle.spawn(self);
                None
            }
            Err(_) => Some(self),
        }
    }

    /// One round: asks whoever is due. Answers when to come back, or that this keeper has ended.
    fn round(&self, inner: &Arc<Inner>, context: &Context<'_>) -> Round {
        let waker = context.waker().clone();
        let mut effects = Effects::default();
        let (mut state, now) = inner.lock_timed(Some(inner.clock().now()));
        let round = state.keep(self.id, waker, now, &mut effects);
        inner.release(state, effects);
        round
    }
}

/// What a keeper is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    /// Nothing more, ever.
    Ended,
    /// Sleep until then; `None` is until woken.
    Sleep(Option<Instant>),
}

impl Inner {
    /// A keeper is gone: the head is woken to take the timer over.
    pub(crate) fn give_up_timer(&self, id: u32) {
        let mut effects = Effects::default();
        let mut state = self.lock();
        state.give_up_timer(id, &mut effects);
        self.release(state, effects);
    }
}

impl Future for Keep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut has_slept = false;
        loop {
            let Some(inner) = self.inner.upgrade() else {
                self.ended = true;
                return Poll::Ready(());
            };
            match self.round(&inner, context) {
                Round::Ended => {
                    self.ended = true;
                    return Poll::Ready(());
                }
                Round::Sleep(None) => {
                    self.sleep = None;
                    return Poll::Pending;
                }
                Round::Sleep(Some(at)) => {
                    if has_slept {
                        // The sleep was over before its time had come: a coarse clock. Others run first.
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

impl Drop for Keep {
    /// A runtime that shuts down drops its tasks: the timer must not be lost with it.
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if let Some(inner) = self.inner.upgrade() {
            inner.give_up_timer(self.id);
        }
    }
}
