//! Telling what happened: a listener, and streams for whoever subscribes. Always after the lock is gone.
//!
//! Events are taken in under the throttle's lock, so their order is the order in which they happened, and told
//! after it, one at a time, on the thread that caused them or on one that was telling already. A listener may
//! call the throttle again; what that causes is told when it returns. A panic in it is caught and counted.
//! Nobody but the thread that tells waits for it, streams included.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tidegate_core::event::{Event, Notice};
use tidegate_core::snapshot::Snapshot;
use tidegate_core::time::Instant;
use tokio::sync::broadcast::{self, error::RecvError, error::TryRecvError};

use crate::outbox::Outbox;
use crate::throttle::Inner;

/// Events a stream holds for a slow reader; older ones are lost to it, and counted.
const STREAM_MAX: usize = 1_024;

pub(crate) type Listener = Box<dyn Fn(&Notice) + Send + Sync>;
pub(crate) type Watcher = Box<dyn Fn(&Snapshot) + Send + Sync>;

/// Where events go.
#[derive(Default)]
pub(crate) struct Sinks {
    listener: Option<Listener>,
    for_listener: Outbox<Notice>,
    watcher: Option<Watcher>,
    for_watcher: Outbox<()>,
    streams: Streams<Told>,
    /// Where the events of all throttles of a registry go.
    registry: Option<Arc<dyn Registrar>>,
    panics: AtomicU64,
}

/// An event and whose it is: throttles of a kind share their sinks.
#[derive(Debug, Clone)]
struct Told {
    notice: Notice,
    /// As long as it is on its way no other throttle comes to be in the same place of memory.
    throttle: Weak<Inner>,
}

/// A registry of throttles hears of what happens to each.
pub(crate) trait Registrar: Send + Sync {
    /// Whether anybody listens.
    fn is_heard(&self) -> bool;
    /// The key of a throttle in words, where there are words for it.
    fn label(&self, throttle: &Arc<Inner>) -> Option<String>;
    /// Takes in what happened; called under the throttle's lock, so it is to put it down and no more.
    fn post(&self, throttle: Arc<Inner>, notice: Notice);
    /// Tells what was taken in; called without any lock.
    fn tell(&self);
    /// Events lost to those who were told too slowly.
    fn lost(&self) -> u64;
}

impl Sinks {
    pub(crate) fn new(listener: Option<Listener>, watcher: Option<Watcher>) -> Self {
        Self { listener, watcher, ..Self::default() }
    }

    /// Sinks of throttles that a registry holds.
    pub(crate) fn of(registry: Arc<dyn Registrar>) -> Self {
        Self { registry: Some(registry), ..Self::default() }
    }

    /// Where the throttles of these sinks are registered.
    pub(crate) fn registry(&self) -> Option<&Arc<dyn Registrar>> {
        self.registry.as_ref()
    }

    /// Takes events in; called under the throttle's lock. Answers whether there is anybody to [`tell`](Self::tell).
    pub(crate) fn post(
        &self,
        throttle: &Inner,
        at: Instant,
        events: impl ExactSizeIterator<Item = Event>,
    ) -> bool {
        let has_streams = self.streams.are_heard();
        let registry = self.registry.as_ref().filter(|registry| registry.is_heard());
        let is_heard = has_streams || registry.is_some() || self.listener.is_some() || self.watcher.is_some();
        if events.len() == 0 || !is_heard {
            return false;
        }
        for event in events {
            let notice = Notice::new(at, event);
            if self.watcher.is_some() && matches!(notice.event, Event::Progressed { .. }) {
                self.for_watcher.put(());
            }
            if let (Some(registry), Some(throttle)) = (registry, throttle.itself()) {
                registry.post(throttle, notice.clone());
            }
            if self.listener.is_some() {
                self.for_listener.put(notice.clone());
            }
            if has_streams {
                self.streams.put(Told { notice, throttle: throttle.weak() });
            }
        }
        true
    }

    /// Tells everybody what was taken in, unless somebody is doing so already.
    ///
    /// `snapshot` is what a watcher of progress is shown.
    pub(crate) fn tell(&self, snapshot: impl Fn() -> Snapshot) {
        self.streams.tell(|call| self.guard(call));
        if let Some(listener) = &self.listener {
            self.for_listener.deliver(|notice| self.guard(|| listener(&notice)));
        }
        if let Some(watcher) = &self.watcher {
            self.for_watcher.deliver(|()| self.guard(|| watcher(&snapshot())));
        }
        if let Some(registry) = &self.registry {
            registry.tell();
        }
    }

    /// What happens from now on to `throttle`.
    pub(crate) fn subscribe(&self, throttle: &Arc<Inner>) -> Events {
        Events { feed: self.streams.subscribe(), throttle: Arc::downgrade(throttle) }
    }

    pub(crate) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    pub(crate) fn lost(&self) -> u64 {
        self.for_listener.lost() + self.for_watcher.lost() + self.streams.lost()
    }

    /// Runs somebody's code; a panic in it is counted, and goes no further.
    pub(crate) fn guard(&self, call: impl FnOnce()) {
        guarded(&self.panics, call);
    }
}

impl fmt::Debug for Sinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sinks")
            .field("panics", &self.panics())
            .field("lost", &self.lost())
            .finish_non_exhaustive()
    }
}

/// Runs somebody's code; a panic in it is counted, and goes no further.
pub(crate) fn guarded(panics: &AtomicU64, call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        panics.fetch_add(1, Ordering::Relaxed);
    }
}

/// Streams for whoever subscribes, and what is on its way to them.
pub(crate) struct Streams<N> {
    /// Made by the first subscriber: a ring of events is not for those who never look.
    sender: OnceLock<broadcast::Sender<N>>,
    outbox: Outbox<N>,
}

impl<N> Default for Streams<N> {
    fn default() -> Self {
        Self { sender: OnceLock::new(), outbox: Outbox::default() }
    }
}

impl<N: Clone> Streams<N> {
    pub(crate) fn are_heard(&self) -> bool {
        self.sender.get().is_some_and(|sender| sender.receiver_count() > 0)
    }

    pub(crate) fn put(&self, notice: N) {
        self.outbox.put(notice);
    }

    /// Hands out what was put in; `guard` is run around each, since it wakes somebody.
    pub(crate) fn tell(&self, guard: impl Fn(&mut dyn FnMut())) {
        if let Some(sender) = self.sender.get() {
            self.outbox.deliver(|notice| {
                let mut notice = Some(notice);
                // An error only means that nobody reads any more.
                guard(&mut || drop(notice.take().map(|notice| sender.send(notice))));
            });
        }
    }

    /// Hands one out at once.
    pub(crate) fn send(&self, notice: N) {
        if let Some(sender) = self.sender.get() {
            // An error only means that nobody reads any more.
            let _ = sender.send(notice);
        }
    }

    pub(crate) fn subscribe(&self) -> Feed<N> {
        let sender = self.sender.get_or_init(|| broadcast::Sender::new(STREAM_MAX));
        Feed { receiver: sender.subscribe(), missed: 0 }
    }

    pub(crate) fn lost(&self) -> u64 {
        self.outbox.lost()
    }
}

/// One reader's end of a stream.
#[derive(Debug)]
pub(crate) struct Feed<N> {
    receiver: broadcast::Receiver<N>,
    missed: u64,
}

impl<N: Clone> Feed<N> {
    pub(crate) async fn next(&mut self) -> Option<N> {
        loop {
            match self.receiver.recv().await {
                Ok(notice) => return Some(notice),
                Err(RecvError::Lagged(missed)) => self.missed += missed,
                Err(RecvError::Closed) => return None,
            }
        }
    }

    pub(crate) fn try_next(&mut self) -> Option<N> {
        loop {
            match self.receiver.try_recv() {
                Ok(notice) => return Some(notice),
                Err(TryRecvError::Lagged(missed)) => self.missed += missed,
                Err(_) => return None,
            }
        }
    }
}

impl<N> Feed<N> {
    pub(crate) const fn missed(&self) -> u64 {
        self.missed
    }
}

/// A stream of what happens to a throttle, from the moment of subscription on.
///
/// It holds the last 1,024 events. A reader that is slower loses the oldest, and [`missed`](Self::missed) says
/// how many. Throttles of one [`Keyed`](crate::Keyed) share that room.
///
/// It does not keep the throttle, and tells of no other: when a key is forgotten and comes back, its new throttle is
/// another one.
#[derive(Debug)]
pub struct Events {
    feed: Feed<Told>,
    /// Its place in memory stays taken as long as this points there, so no other throttle can be mistaken for it.
    throttle: Weak<Inner>,
}

impl Events {
    /// The next event; `None` when the throttle is gone and all that happened was read. Throttles of one
    /// [`Keyed`](crate::Keyed) tell through one stream: it ends when the last of them and all handles on the keys are
    /// gone, and not when this key is forgotten.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Notice> {
        loop {
            let told = self.feed.next().await?;
            if self.is_mine(&told) {
                return Some(told.notice);
            }
        }
    }

    /// An event that has happened already, if one is left to read.
    pub fn try_next(&mut self) -> Option<Notice> {
        loop {
            let told = self.feed.try_next()?;
            if self.is_mine(&told) {
                return Some(told.notice);
            }
        }
    }

    fn is_mine(&self, told: &Told) -> bool {
        Weak::ptr_eq(&told.throttle, &self.throttle)
    }

    /// Events that were lost to this reader because it was slow.
    pub const fn missed(&self) -> u64 {
        self.feed.missed()
    }
}
