//! What happened to the keys, told with the key: events of each throttle, and of the registry itself.
//!
//! A throttle does not know its key. Its event carries the throttle as long as it is on its way, so the registry
//! cannot forget the key before it is told.

use std::fmt;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use tidegate_core::event::{Event, Notice};
use tidegate_core::time::Instant;

use super::registry::Registry;
use crate::events::{Feed, Registrar, Streams, guarded};
use crate::outbox::Outbox;
use crate::throttle::{Inner, Setup};

/// What happened to a key, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyedNotice<K> {
    /// The latest reading of the clock.
    pub at: Instant,
    /// Whose it is; `None` for the entry that the keys share for which there is no room, and for what happens to a
    /// permit or a handle that outlives the keys.
    pub key: Option<K>,
    /// What happened.
    pub event: KeyedEvent,
}

/// What happened to a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyedEvent {
    /// Something happened to its throttle.
    Throttle(Event),
    /// It was forgotten.
    Evicted {
        /// Why.
        cause: Evict,
    },
    /// There is no room for a new key, and none that could be forgotten: new keys share one entry. Told at most once
    /// a second.
    Overflowed {
        /// The bound of keys.
        keys_max: usize,
    },
}

/// Why a key was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Evict {
    /// Nobody asked for it for long enough.
    Idle,
    /// Room was needed for another, and nothing was lost with it.
    Size,
}

impl Evict {
    /// The cause in a word, for logs.
    const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Size => "size",
        }
    }
}

/// What the entry that keys share is called in traces.
const OVERFLOW: &str = "(overflow)";

pub(super) type Labelled<K> = Box<dyn Fn(&K) -> String + Send + Sync>;
pub(super) type KeyedListener<K> = Box<dyn Fn(&KeyedNotice<K>) + Send + Sync>;

/// Where the events of all keys go.
pub(super) struct KeyedSinks<K> {
    registry: OnceLock<Weak<Registry<K>>>,
    listener: Option<KeyedListener<K>>,
    label: Option<Labelled<K>>,
    for_listener: Outbox<Pending<K>>,
    streams: Streams<KeyedNotice<K>>,
    for_streams: Outbox<Pending<K>>,
    panics: AtomicU64,
}

/// An event on its way out.
#[derive(Clone)]
enum Pending<K> {
    /// Of a throttle, whose key is looked up when it is told.
    Throttle(Arc<Inner>, Notice),
    Registry(KeyedNotice<K>),
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> KeyedSinks<K> {
    pub(super) fn new(listener: Option<KeyedListener<K>>, label: Option<Labelled<K>>) -> Self {
        Self {
            registry: OnceLock::new(),
            listener,
            label,
            for_listener: Outbox::default(),
            streams: Streams::default(),
            for_streams: Outbox::default(),
            panics: AtomicU64::new(0),
        }
    }

    /// Says where keys are looked up.
    pub(super) fn belongs_to(&self, registry: &Arc<Registry<K>>) {
        // It is told once, by the registry that made it.
        let _ = self.registry.set(Arc::downgrade(registry));
    }

    /// Takes in what happened to the registry itself, under whatever lock says when that was; to be
    /// [told](Registrar::tell) without it.
    pub(super) fn note(&self, notice: impl FnOnce() -> KeyedNotice<K>) {
        if self.is_heard() {
            self.put(Pending::Registry(notice()));
        }
    }

    pub(super) fn subscribe(&self) -> KeyedEvents<K> {
        KeyedEvents { feed: self.streams.subscribe() }
    }

    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    pub(super) fn lost(&self) -> u64 {
        self.for_listener.lost() + self.for_streams.lost()
    }

    /// Lets the logs hear that a key was forgotten; called without any lock.
    pub(super) fn trace_evicted(self: &Arc<Self>, setup: &Setup, key: K, cause: Evict) {
        let sinks = Arc::clone(self);
        setup
            .observer
            .evicted(&setup.sinks, cause.name(), move || sinks.label.as_ref().map(|label| label(&key)));
    }

    fn put(&self, pending: Pending<K>) {
        if self.streams.are_heard() {
            self.for_streams.put(pending.clone());
        }
        if self.listener.is_some() {
            self.for_listener.put(pending);
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
    fn is_heard(&self) -> bool {
        self.listener.is_some() || self.streams.are_heard()
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

    fn tell(&self) {
        // Looking a key up clones it: that is somebody's code too.
        self.for_streams.deliver(|pending| {
            guarded(&self.panics, || self.streams.send(self.resolve(pending)));
        });
        if let Some(listener) = &self.listener {
            self.for_listener.deliver(|pending| {
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

/// A stream of what happens to the keys, from the moment of subscription on.
///
/// It holds the last 1,024 events. A reader that is slower loses the oldest, and [`missed`](Self::missed) says
/// how many.
pub struct KeyedEvents<K> {
    feed: Feed<KeyedNotice<K>>,
}

impl<K> fmt::Debug for KeyedEvents<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedEvents").field("missed", &self.feed.missed()).finish_non_exhaustive()
    }
}

impl<K: Clone> KeyedEvents<K> {
    /// The next event; `None` when the keys are gone.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<KeyedNotice<K>> {
        self.feed.next().await
    }

    /// An event that has happened already, if one is left to read.
    pub fn try_next(&mut self) -> Option<KeyedNotice<K>> {
        self.feed.try_next()
    }

    /// Events that were lost to this reader because it was slow.
    pub const fn missed(&self) -> u64 {
        self.feed.missed()
    }
}
