//! Event delivery to listeners, progress callbacks and subscribed streams, always after the throttle's lock
//! is released.
//!
//! Events are enqueued under the throttle's lock, which fixes their order, and delivered after it, one at a
//! time, on the thread that caused them or on one that is already delivering. A listener may call the
//! throttle; events caused by that are delivered when it returns. A panic in it is caught and counted. Only
//! the delivering thread waits for a slow listener.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker, ready};

use futures_core::Stream;
use tidegate_core::event::{Event, Notice};
use tidegate_core::snapshot::Snapshot;
use tidegate_core::time::Instant;
use tokio::sync::broadcast::{self, error::RecvError, error::TryRecvError};
use tokio::task::coop;

use crate::delivery_queue::DeliveryQueue;
use crate::throttle::Inner;

/// Events that a stream buffers for a slow reader; older ones are lost to it and counted.
const STREAM_MAX: usize = 1_024;

pub(crate) type Listener = Box<dyn Fn(&Notice) + Send + Sync>;
pub(crate) type ProgressListener = Box<dyn Fn(&Snapshot) + Send + Sync>;

/// The destinations of events.
#[derive(Default)]
pub(crate) struct Sinks {
    listener: Option<Listener>,
    listener_queue: DeliveryQueue<Notice>,
    progress_listener: Option<ProgressListener>,
    progress_queue: DeliveryQueue<()>,
    streams: Broadcast<ThrottleNotice>,
    /// The registry that receives the events of all its throttles.
    registry: Option<Arc<dyn Registrar>>,
    panics: AtomicU64,
}

/// An event and the throttle it belongs to: throttles of one kind share their sinks.
#[derive(Debug, Clone)]
struct ThrottleNotice {
    notice: Notice,
    /// While this pointer exists, no other throttle can be allocated at the same address.
    throttle: Weak<Inner>,
}

/// A registry of throttles that receives the events of each.
pub(crate) trait Registrar: Send + Sync {
    /// Whether there are listeners.
    fn has_listeners(&self) -> bool;
    /// The key of a throttle as text, if the key has a text form.
    fn label(&self, throttle: &Arc<Inner>) -> Option<String>;
    /// Enqueues an event. Called under the throttle's lock, so it must not run user code.
    fn post(&self, throttle: Arc<Inner>, notice: Notice);
    /// Delivers the enqueued events. Called without any lock.
    fn deliver(&self);
    /// Events lost to slow listeners.
    fn lost(&self) -> u64;
}

impl Sinks {
    pub(crate) fn new(listener: Option<Listener>, progress_listener: Option<ProgressListener>) -> Self {
        Self { listener, progress_listener, ..Self::default() }
    }

    /// Sinks of throttles that a registry owns.
    pub(crate) fn of(registry: Arc<dyn Registrar>) -> Self {
        Self { registry: Some(registry), ..Self::default() }
    }

    /// The registry of these sinks' throttles.
    pub(crate) fn registry(&self) -> Option<&Arc<dyn Registrar>> {
        self.registry.as_ref()
    }

    /// Enqueues events; called under the throttle's lock. Returns whether there is anything to
    /// [`deliver`](Self::deliver).
    pub(crate) fn post(
        &self,
        throttle: &Inner,
        at: Instant,
        events: impl ExactSizeIterator<Item = Event>,
    ) -> bool {
        let has_streams = self.streams.has_subscribers();
        let registry = self.registry.as_ref().filter(|registry| registry.has_listeners());
        let has_listeners =
            has_streams || registry.is_some() || self.listener.is_some() || self.progress_listener.is_some();
        if events.len() == 0 || !has_listeners {
            return false;
        }
        for event in events {
            let notice = Notice::new(at, event);
            if self.progress_listener.is_some() && matches!(notice.event, Event::Progressed { .. }) {
                self.progress_queue.put(());
            }
            if let (Some(registry), Some(throttle)) = (registry, throttle.itself()) {
                registry.post(throttle, notice.clone());
            }
            if self.listener.is_some() {
                self.listener_queue.put(notice.clone());
            }
            if has_streams {
                self.streams.put(ThrottleNotice { notice, throttle: throttle.weak() });
            }
        }
        true
    }

    /// Delivers the enqueued events, unless another thread is already delivering.
    ///
    /// `snapshot` provides what a progress callback receives.
    pub(crate) fn deliver(&self, snapshot: impl Fn() -> Snapshot) {
        self.streams.deliver(|call| self.guard(call));
        if let Some(listener) = &self.listener {
            self.listener_queue.deliver(|notice| self.guard(|| listener(&notice)));
        }
        if let Some(progress_listener) = &self.progress_listener {
            self.progress_queue.deliver(|()| self.guard(|| progress_listener(&snapshot())));
        }
        if let Some(registry) = &self.registry {
            registry.deliver();
        }
    }

    /// Subscribes to the events of `throttle` from now on.
    pub(crate) fn subscribe(&self, throttle: &Arc<Inner>) -> Events {
        Events { subscription: self.streams.subscribe(), throttle: Arc::downgrade(throttle) }
    }

    pub(crate) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    pub(crate) fn lost(&self) -> u64 {
        self.listener_queue.lost() + self.progress_queue.lost() + self.streams.lost()
    }

    /// Runs user code; a panic in it is caught and counted.
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

/// Runs user code; a panic in it is caught and counted.
pub(crate) fn guarded(panics: &AtomicU64, call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        panics.fetch_add(1, Ordering::Relaxed);
    }
}

/// A broadcast channel with a delivery queue in front of it.
pub(crate) struct Broadcast<N> {
    /// Created by the first subscriber: the ring buffer costs nothing until it is needed.
    sender: OnceLock<broadcast::Sender<N>>,
    queue: DeliveryQueue<N>,
}

impl<N> Default for Broadcast<N> {
    fn default() -> Self {
        Self { sender: OnceLock::new(), queue: DeliveryQueue::default() }
    }
}

impl<N: Clone> Broadcast<N> {
    pub(crate) fn has_subscribers(&self) -> bool {
        self.sender.get().is_some_and(|sender| sender.receiver_count() > 0)
    }

    pub(crate) fn put(&self, notice: N) {
        self.queue.put(notice);
    }

    /// Sends the enqueued notices; `guard` wraps each send, since it wakes subscribers.
    pub(crate) fn deliver(&self, guard: impl Fn(&mut dyn FnMut())) {
        if let Some(sender) = self.sender.get() {
            self.queue.deliver(|notice| {
                let mut notice = Some(notice);
                // An error only means that there are no subscribers.
                guard(&mut || drop(notice.take().map(|notice| sender.send(notice))));
            });
        }
    }

    /// Sends one notice at once.
    pub(crate) fn send(&self, notice: N) {
        if let Some(sender) = self.sender.get() {
            // An error only means that there are no subscribers.
            let _ = sender.send(notice);
        }
    }

    pub(crate) fn subscribe(&self) -> Subscription<N> {
        let sender = self.sender.get_or_init(|| broadcast::Sender::new(STREAM_MAX));
        Subscription { receiver: Some(sender.subscribe()), waiting: None, waker: None, missed: 0 }
    }

    pub(crate) fn lost(&self) -> u64 {
        self.queue.lost()
    }
}

/// The receiving end of a broadcast.
pub(crate) struct Subscription<N> {
    /// `None` while `waiting` has it.
    receiver: Option<broadcast::Receiver<N>>,
    /// The future of the next notice: a receiver has no poll function.
    waiting: Option<Waiting<N>>,
    /// Of the task that waits: `try_next` must not take its place.
    waker: Option<Waker>,
    missed: u64,
}

type Received<N> = (Result<N, RecvError>, broadcast::Receiver<N>);
type Waiting<N> = Pin<Box<dyn Future<Output = Received<N>> + Send>>;

impl<N: Clone + Send + 'static> Subscription<N> {
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<N>> {
        let unit = ready!(coop::poll_proceed(context));
        let polled = self.poll_received(context);
        if polled.is_pending() {
            let waker = self.waker.get_or_insert_with(|| context.waker().clone());
            waker.clone_from(context.waker());
        } else {
            self.waker = None;
            unit.made_progress();
        }
        polled
    }

    fn poll_received(&mut self, context: &mut Context<'_>) -> Poll<Option<N>> {
        loop {
            if let Some(mut receiver) = self.receiver.take() {
                let received = receiver.try_recv();
                match received {
                    Err(TryRecvError::Empty) => {
                        let waiting = async move { (receiver.recv().await, receiver) };
                        // The callers take part in cooperative scheduling.
                        self.waiting = Some(Box::pin(coop::unconstrained(waiting)));
                        continue;
                    }
                    _ => self.receiver = Some(receiver),
                }
                match received {
                    Ok(notice) => return Poll::Ready(Some(notice)),
                    Err(TryRecvError::Lagged(missed)) => self.missed += missed,
                    Err(TryRecvError::Closed | TryRecvError::Empty) => return Poll::Ready(None),
                }
            }
            if let Some(waiting) = &mut self.waiting {
                let (next, receiver) = ready!(waiting.as_mut().poll(context));
                (self.waiting, self.receiver) = (None, Some(receiver));
                match next {
                    Ok(notice) => return Poll::Ready(Some(notice)),
                    Err(RecvError::Lagged(missed)) => self.missed += missed,
                    Err(RecvError::Closed) => return Poll::Ready(None),
                }
            }
        }
    }

    /// A notice that has already happened. A task that waits is still woken by the next one.
    pub(crate) fn try_next(&mut self) -> Option<N> {
        while let Some(receiver) = &mut self.receiver {
            match receiver.try_recv() {
                Ok(notice) => return Some(notice),
                Err(TryRecvError::Lagged(missed)) => self.missed += missed,
                Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
            }
        }
        let waker = self.waker.take().unwrap_or_else(|| Waker::noop().clone());
        let polled = self.poll_received(&mut Context::from_waker(&waker));
        self.waker = Some(waker);
        match polled {
            Poll::Ready(notice) => notice,
            Poll::Pending => None,
        }
    }
}

impl<N> fmt::Debug for Subscription<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("missed", &self.missed).finish_non_exhaustive()
    }
}

impl<N> Subscription<N> {
    pub(crate) const fn missed(&self) -> u64 {
        self.missed
    }
}

/// A stream of a throttle's events, from the moment of subscription on: a [`Stream`], or [`next`](Self::next)
/// without one.
///
/// It buffers the last 1,024 events. A slower reader loses the oldest, and [`missed`](Self::missed) counts
/// them. Throttles of one [`Keyed`](crate::Keyed) share that buffer.
///
/// It does not keep the throttle alive, and reports events of no other: if a key is evicted and created
/// again, its new throttle is a different one.
#[derive(Debug)]
pub struct Events {
    subscription: Subscription<ThrottleNotice>,
    /// While this pointer exists, no other throttle can be allocated at the same address and be mistaken for
    /// it.
    throttle: Weak<Inner>,
}

impl Events {
    /// The next event; `None` when the throttle is dropped and all events were read. Throttles of one
    /// [`Keyed`](crate::Keyed) share a stream: it ends when the last of them and all handles to keys are
    /// dropped, not when this key is evicted.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Notice> {
        poll_fn(|context| self.poll_notice(context)).await
    }

    /// An event that has already happened; `None` if there is none left to read, and at the end of the stream.
    ///
    /// A task whose poll of the stream returned `Pending` is still woken by the next event.
    pub fn try_next(&mut self) -> Option<Notice> {
        loop {
            let item = self.subscription.try_next()?;
            if self.is_mine(&item) {
                return Some(item.notice);
            }
        }
    }

    fn poll_notice(&mut self, context: &mut Context<'_>) -> Poll<Option<Notice>> {
        loop {
            match ready!(self.subscription.poll_next(context)) {
                Some(item) if !self.is_mine(&item) => {}
                item => return Poll::Ready(item.map(|item| item.notice)),
            }
        }
    }

    fn is_mine(&self, item: &ThrottleNotice) -> bool {
        Weak::ptr_eq(&item.throttle, &self.throttle)
    }

    /// Events lost to this reader because it was too slow.
    pub const fn missed(&self) -> u64 {
        self.subscription.missed()
    }
}

impl Stream for Events {
    type Item = Notice;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Notice>> {
        self.get_mut().poll_notice(context)
    }
}
