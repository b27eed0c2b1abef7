//! Telling what happened: a listener, and streams for whoever subscribes. Always after the lock is gone.
//!
//! Events are taken in under the throttle's lock, so their order is the order in which they happened, and told
//! after it, one at a time, on the thread that caused them or on one that was telling already. A listener may
//! call the throttle again; what that causes is told when it returns. A panic in it is caught and counted.
//! Nobody but the thread that tells waits for it, streams included.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tidegate_core::event::{Event, Notice};
use tidegate_core::snapshot::Snapshot;
use tidegate_core::time::Instant;
use tokio::sync::broadcast::{self, error::RecvError};

/// Events a stream holds for a slow reader; older ones are lost to it, and counted.
const STREAM_MAX: usize = 1_024;
/// Events waiting for a slow listener; newer ones are lost to it, and counted.
const PENDING_MAX: usize = 1_024;

pub(crate) type Listener = Box<dyn Fn(&Notice) + Send + Sync>;
pub(crate) type Watcher = Box<dyn Fn(&Snapshot) + Send + Sync>;

/// Where events go.
#[derive(Default)]
pub(crate) struct Sinks {
    listener: Option<Listener>,
    for_listener: Mutex<Outbox>,
    watcher: Option<Watcher>,
    for_watcher: Mutex<Outbox>,
    /// Made by the first subscriber: a ring of events is not for those who never look.
    stream: OnceLock<broadcast::Sender<Notice>>,
    for_stream: Mutex<Outbox>,
    panics: AtomicU64,
    lost: AtomicU64,
}

/// Events in the order in which they happened, on their way out.
#[derive(Default)]
struct Outbox {
    notices: VecDeque<Notice>,
    /// Somebody is telling, and will tell what is added too.
    telling: bool,
}

impl Sinks {
    pub(crate) fn new(listener: Option<Listener>, watcher: Option<Watcher>) -> Self {
        Self { listener, watcher, ..Self::default() }
    }

    /// Takes events in; called under the throttle's lock. Answers whether there is anybody to [`tell`](Self::tell).
    pub(crate) fn post(&self, at: Instant, events: impl ExactSizeIterator<Item = Event>) -> bool {
        let stream = self.stream.get().filter(|stream| stream.receiver_count() > 0);
        if events.len() == 0 || (stream.is_none() && self.listener.is_none() && self.watcher.is_none()) {
            return false;
        }
        for event in events {
            let notice = Notice::new(at, event);
            if self.watcher.is_some() && matches!(notice.event, Event::Progressed { .. }) {
                self.put(&self.for_watcher, notice.clone());
            }
            if self.listener.is_some() {
                self.put(&self.for_listener, notice.clone());
            }
            if stream.is_some() {
                self.put(&self.for_stream, notice);
            }
        }
        true
    }

    /// Tells everybody what was taken in, unless somebody is doing so already.
    ///
    /// `snapshot` is what a watcher of progress is shown.
    pub(crate) fn tell(&self, snapshot: impl Fn() -> Snapshot) {
        if let Some(stream) = self.stream.get() {
            // An error only means that nobody reads any more.
            deliver(&self.for_stream, |notice| self.guard(|| drop(stream.send(notice))));
        }
        if let Some(listener) = &self.listener {
            deliver(&self.for_listener, |notice| self.guard(|| listener(&notice)));
        }
        if let Some(watcher) = &self.watcher {
            deliver(&self.for_watcher, |_| self.guard(|| watcher(&snapshot())));
        }
    }

    pub(crate) fn subscribe(&self) -> Events {
        let stream = self.stream.get_or_init(|| broadcast::Sender::new(STREAM_MAX));
        Events { receiver: stream.subscribe(), missed: 0 }
    }

    pub(crate) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Runs somebody's code; a panic in it is counted, and goes no further.
    pub(crate) fn guard(&self, call: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(call)).is_err() {
            self.panics.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn put(&self, outbox: &Mutex<Outbox>, notice: Notice) {
        let mut outbox = lock(outbox);
        if outbox.notices.len() < PENDING_MAX {
            outbox.notices.push_back(notice);
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Hands out what is in the box, one by one and in order; whoever comes meanwhile leaves that to the first.
fn deliver(outbox: &Mutex<Outbox>, tell: impl Fn(Notice)) {
    let mut pending = lock(outbox);
    if pending.telling {
        return;
    }
    pending.telling = true;
    while let Some(notice) = pending.notices.pop_front() {
        drop(pending);
        tell(notice);
        pending = lock(outbox);
    }
    pending.telling = false;
}

fn lock(outbox: &Mutex<Outbox>) -> MutexGuard<'_, Outbox> {
    outbox.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Sinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sinks")
            .field("panics", &self.panics())
            .field("lost", &self.lost())
            .finish_non_exhaustive()
    }
}

/// A stream of what happens to a throttle, from the moment of subscription on.
///
/// It holds the last 1,024 events. A reader that is slower loses the oldest, and [`missed`](Self::missed) says
/// how many.
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Notice>,
    missed: u64,
}

impl Events {
    /// The next event; `None` when the throttle is gone.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Notice> {
        loop {
            match self.receiver.recv().await {
                Ok(notice) => return Some(notice),
                Err(RecvError::Lagged(missed)) => self.missed += missed,
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// An event that has happened already, if one is left to read.
    pub fn try_next(&mut self) -> Option<Notice> {
        loop {
            match self.receiver.try_recv() {
                Ok(notice) => return Some(notice),
                Err(broadcast::error::TryRecvError::Lagged(missed)) => self.missed += missed,
                Err(_) => return None,
            }
        }
    }

    /// Events that were lost to this reader because it was slow.
    pub const fn missed(&self) -> u64 {
        self.missed
    }
}
