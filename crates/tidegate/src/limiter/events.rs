//! What happens to a limiter that is worth telling.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;

/// Something that happened to a limiter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitEvent {
    /// The store failed so often in a row that it is left alone for a while.
    StoreAway {
        /// How long it is left alone.
        span: Duration,
    },
    /// The store answers again.
    StoreBack,
    /// A lease was given without the store.
    Degraded {
        /// To whom.
        subject: Subject,
        /// Which lease.
        lease: LeaseId,
    },
    /// A lease stays spent until its deadline: the settler was full, or the store did not hear of its end in time, or
    /// never will.
    Unsettled {
        /// Which lease.
        lease: LeaseId,
        /// Endings that are waiting.
        waiting: usize,
    },
    /// A draw was decided by newer rules than this process knew; they are read again.
    RulesStale {
        /// Whose.
        subject: Subject,
    },
    /// Nobody may wait any more.
    QueueFull {
        /// The bound.
        waiters_max: usize,
    },
}

pub(super) type Listener = Box<dyn Fn(&LimitEvent) + Send + Sync>;

/// Who is told. Listeners run on the thread that caused the event, with no lock held.
#[derive(Default)]
pub(super) struct Listeners {
    listeners: RwLock<Vec<Arc<Listener>>>,
    panics: AtomicU64,
}

impl Listeners {
    pub(super) fn new(listeners: Vec<Listener>) -> Self {
        let listeners = RwLock::new(listeners.into_iter().map(Arc::new).collect());
        Self { listeners, panics: AtomicU64::new(0) }
    }

    pub(super) fn add(&self, listener: Listener) {
        self.listeners.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(listener));
    }

    pub(super) fn tell(&self, event: &LimitEvent) {
        let listeners = self.listeners.read().unwrap_or_else(PoisonError::into_inner).clone();
        for listener in listeners {
            if catch_unwind(AssertUnwindSafe(|| listener(event))).is_err() {
                self.panics.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }
}
