//! Events of the keys: of each throttle, with its key, and of the registry itself.
//!
//! A throttle does not know its key. A pending event holds the throttle, so the registry cannot evict the key
//! before the event is delivered.

use std::fmt;
use std::future::poll_fn;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll};

use futures_core::Stream;
use tidegate_core::event::{Event, Notice};
use tidegate_core::time::Instant;

use super::registry::Registry;
use crate::delivery_queue::DeliveryQueue;
use crate::events::{Broadcast, Registrar, Subscription, guarded};
use crate::throttle::{Inner, Setup};

/// An event of a key, and when it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyedNotice<K> {
    /// The latest reading of the clock.
    pub at: Instant,
    /// The key; `None` for the overflow throttle, for a hint that comes after its key was evicted, and for events
    /// of a permit or a handle that outlives the registry. A permit of a key with only a rate has none by then.
    pub key: Option<K>,
    /// The event.
    pub event: KeyedEvent,
}

/// An event of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyedEvent {
    /// An event of its throttle.
    Throttle(Event),
    /// It was evicted.
    Evicted {
        /// The cause.
        cause: EvictCause,
    },
    /// The registry is full and no key can be evicted: new keys share the overflow throttle. Reported at most
    /// once per second.
    Overflowed {
        /// The maximum number of keys.
        keys_max: usize,
    },
}

/// Why a key was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EvictCause {
    /// It was unused for long enough.
    Idle,
    /// A new key needed its place, and its state carried no information.
    Size,
}

impl EvictCause {
    /// The cause as a word, for logs.
    const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Size => "size",
        }
    }
}

/// The name of the overflow throttle in traces.
const OVERFLOW: &str = "(overflow)";

pub(super) type KeyLabel<K> = Box<dyn Fn(&K) -> String + Send + Sync>;
pub(super) type KeyedListener<K> = Box<dyn Fn(&KeyedNotice<K>) + Send + Sync>;

/// The destinations of the events of all keys.
pub(super) struct KeyedSinks<K> {
    registry: OnceLock<Weak<Registry<K>>>,
    listener: Option<KeyedListener<K>>,
    label: Option<KeyLabel<K>>,
    listener_queue: DeliveryQueue<Pending<K>>,
    streams: Broadcast<KeyedNotice<K>>,
    stream_queue: DeliveryQueue<Pending<K>>,
    panics: AtomicU64,
}

/// An event that is queued for delivery.
#[derive(Clone)]
enum Pending<K> {
    /// Of a throttle, whose key is looked up on delivery.
    Throttle(Arc<Inner>, Notice),
    Registry(KeyedNotice<K>),
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> KeyedSinks<K> {
    pub(super) fn new(listener: Option<KeyedListener<K>>, label: Option<KeyLabel<K>>) -> Self {
        Self {
            registry: OnceLock::new(),
            listener,
            label,
            listener_queue: DeliveryQueue::default(),
            streams: Broadcast::default(),
            stream_queue: DeliveryQueue::default(),
            panics: AtomicU64::new(0),
        }
    }

    /// Sets the registry in which keys are looked up.
    pub(super) fn set_registry(&self, registry: &Arc<Registry<K>>) {
        // Set once, by the registry that owns it.
        let _ = self.registry.set(Arc::downgrade(registry));
    }

    /// Enqueues an event of the registry itself, under the lock that orders it. [Deliver](Registrar::deliver)
    /// it after unlocking.
    pub(super) fn enqueue(&self, notice: impl FnOnce() -> KeyedNotice<K>) {
        if self.has_listeners() {
            self.put(Pending::Registry(notice()));
        }
    }

    pub(super) fn subscribe(&self) -> KeyedEvents<K> {
        KeyedEvents { subscription: self.streams.subscribe() }
    }

    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    pub(super) fn lost(&self) -> u64 {
        self.listener_queue.lost() + self.stream_queue.lost()
    }

    /// Logs that a key was evicted; called without any lock.
    pub(super) fn trace_evicted(self: &Arc<Self>, setup: &Setup, key: K, cause: EvictCause) {
        let sinks = Arc::clone(self);
        setup
            .observer
            .evicted(&setup.sinks, cause.name(), move || sinks.label.as_ref().map(|label| label(&key)));
    }

    fn put(&self, pending: Pending<K>) {
        if self.streams.has_subscribers() {
            self.stream_queue.put(pending.clone());
        }
        if self.listener.is_some() {
            self.listener_queue.put(pending);
        }
    }

    fn resolve(&self, pending: Pending<K>) -> KeyedNotice<K> {
        match pending {
            Pending::Registry(notice) => notice,
            Pending::Throttle(throttle, Notice { at, event, .. }) => {
                let registry = self.registry.get().and_then(Weak::upgrade);
                let key = registry.and_then(|registry| registry.key_of(&throttle));
                KeyedNotice { at, key, event: KeyedEvent::Throttle(event) }
            }
        }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registrar for KeyedSinks<K> {
    fn has_listeners(&self) -> bool {
        self.listener.is_some() || self.streams.has_subscribers()
    }

    fn label(&self, throttle: &Arc<Inner>) -> Option<String> {
        let registry = self.registry.get().and_then(Weak::upgrade)?;
        if Arc::ptr_eq(throttle, &registry.overflow) {
            return Some(OVERFLOW.to_owned());
        }
        let label = self.label.as_ref()?;
        registry.key_of(throttle).map(|key| label(&key))
    }

    fn post(&self, throttle: Arc<Inner>, notice: Notice) {
        self.put(Pending::Throttle(throttle, notice));
    }

    fn deliver(&self) {
        // Looking a key up clones it, which is user code.
        self.stream_queue.deliver(|pending| {
            guarded(&self.panics, || self.streams.send(self.resolve(pending)));
        });
        if let Some(listener) = &self.listener {
            self.listener_queue.deliver(|pending| {
                guarded(&self.panics, || listener(&self.resolve(pending)));
            });
        }
    }

    fn lost(&self) -> u64 {
        self.lost()
    }
}

impl<K> fmt::Debug for KeyedSinks<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedSinks").finish_non_exhaustive()
    }
}

/// A stream of the events of all keys, from the moment of subscription on.
///
/// It buffers the last 1,024 events. A slower reader loses the oldest, and [`missed`](Self::missed) counts
/// them.
pub struct KeyedEvents<K> {
    subscription: Subscription<KeyedNotice<K>>,
}

impl<K> fmt::Debug for KeyedEvents<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedEvents").field("missed", &self.subscription.missed()).finish_non_exhaustive()
    }
}

impl<K: Clone + Send + Sync + 'static> KeyedEvents<K> {
    /// The next event; `None` when the registry is dropped.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<KeyedNotice<K>> {
        poll_fn(|context| self.subscription.poll_next(context)).await
    }

    /// An event that has already happened; `None` if there is none left to read, and at the end of the stream.
    ///
    /// A task whose poll of the stream returned `Pending` is still woken by the next event.
    pub fn try_next(&mut self) -> Option<KeyedNotice<K>> {
        self.subscription.try_next()
    }

    /// Events lost to this reader because it was too slow.
    pub const fn missed(&self) -> u64 {
        self.subscription.missed()
    }
}

impl<K: Clone + Send + Sync + 'static> Stream for KeyedEvents<K> {
    type Item = KeyedNotice<K>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<KeyedNotice<K>>> {
        self.get_mut().subscription.poll_next(context)
    }
}
