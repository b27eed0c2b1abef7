//! Events of a limiter, and its listeners.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{LimitName, Subject};

/// An event of a limiter.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitEvent {
    /// The store failed repeatedly in a row, so the circuit is open.
    StoreAway {
        /// How long the circuit stays open.
        span: Duration,
    },
    /// The store responds again.
    StoreBack,
    /// A lease was granted without the store.
    Degraded {
        /// The subject.
        subject: Subject,
        /// The lease.
        lease: LeaseId,
    },
    /// A lease stays spent until its deadline: the settler was full, or its ending did not reach the store in
    /// time or never will.
    Unsettled {
        /// The lease.
        lease: LeaseId,
        /// Endings that are queued.
        waiting: usize,
    },
    /// A lease was settled or adjusted above the held units, and a bucket's debt is at its bound: the ledger has all
    /// of the usage, and the bucket takes no more of it.
    DebtBound {
        /// The bucket: a subject, or a pool.
        bucket: Subject,
        /// The limit.
        limit: LimitName,
        /// The bound.
        debt_max: u64,
    },
    /// A draw was decided by newer rules than this process had cached; they are read again.
    RulesStale {
        /// The subject.
        subject: Subject,
    },
    /// The maximum number of waiters is reached.
    QueueFull {
        /// The maximum.
        waiters_max: usize,
    },
}

pub(super) type Listener = Box<dyn Fn(&LimitEvent) + Send + Sync>;

/// Listeners run on the thread that caused the event, with no lock held.
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

    pub(super) fn notify(&self, event: &LimitEvent) {
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
