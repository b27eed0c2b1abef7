//! Shared limits: no tenant exceeds its budget, whichever process it calls from.
//!
//! `acquire → policies (cached) → store.draw → Lease → settle`. A limiter is a handle over a
//! [`Store`](tidegate_store::Store): it resolves the limits of a subject, draws, and returns leases.

mod acquire;
mod admin;
pub mod blocking;
mod breaker;
mod builder;
mod call_levels;
mod change_log;
mod error;
mod events;
mod explain;
mod idempotency;
mod joining;
mod lease;
mod policies;
mod remote;
mod request;
mod runtime;
mod settler;
mod usage;
pub(crate) mod waiters;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::Policy;
use tidegate_store::{Changes, Memory, Store};
use tokio::sync::Notify;

pub use acquire::SubjectRef;
pub use admin::{Admin, BucketLimit, InvalidBucketLimit};
pub use builder::{InvalidLimiter, LimiterBuilder};
pub use error::{LimitError, LimitLine, Limited};
pub use events::LimitEvent;
pub use explain::{Explanation, Would};
pub(crate) use joining::{Finish, ResolvedRequest};
pub use lease::{AdjustStatus, Degraded, Lease, SettleStatus};
pub use policies::CacheStats;
pub use remote::{LeaseStep, OpenLease};
pub use request::Request;
pub use usage::{Capacity, UsageSum};

use breaker::Breaker;
use call_levels::CallLevels;
use events::Listeners;
use policies::PolicyCache;
use runtime::BackgroundRuntime;
use settler::Settler;
use waiters::Waiters;

use crate::joined::Queues;

/// Limits shared by all users of a store. Clones are the same limiter.
///
/// ```
/// use tidegate::{Limit, Limiter, Memory, Policy, Scope};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(Memory::new());
/// let policy = Policy::new([Limit::per_minute("rpm", 60), Limit::per_minute("tpm", 10_000)])?;
/// limiter.admin("ops").set_policy(Scope::System, policy).await?;
///
/// let mut lease = limiter.try_acquire(("acme", "gpt-4"), [("rpm", 1), ("tpm", 800)]).await?;
/// lease.settle([("tpm", 640)]).await?;
///
/// let refused = limiter.try_acquire(("acme", "gpt-4"), [("tpm", 9_500)]).await.unwrap_err();
/// assert!(refused.retry_after().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Limiter {
    shared: Arc<Shared>,
}

/// The state shared by all clones and leases.
struct Shared {
    store: Arc<dyn Store>,
    /// The store's change notifications.
    changes: Option<Changes>,
    /// The store replies immediately: no timeout, no breaker, no background work.
    is_immediate: bool,
    breaker: Breaker,
    policies: PolicyCache,
    call_levels: CallLevels,
    waiters: Waiters,
    /// Callers of joined throttles that a limit refused.
    queues: Queues,
    settler: Settler,
    listeners: Arc<Listeners>,
    runtime: BackgroundRuntime,
    defaults: Policy,
    lease_deadline: Duration,
    /// Accounts for this process's share while the store is unavailable.
    local: Memory,
    is_closed: AtomicBool,
    lease_ended: Notify,
    counters: Counters,
    /// Calls to the store for a lease that are in flight.
    calls_in_flight: AtomicUsize,
    /// The store's time as of its last response, in milliseconds.
    store_time_ms: AtomicU64,
}

#[derive(Default)]
struct Counters {
    /// Leases and spends granted, with or without the store.
    granted: AtomicU64,
    /// Those of them that have ended.
    ended: AtomicU64,
    refused: AtomicU64,
    degraded: AtomicU64,
    debt_bound: AtomicU64,
}

/// Counters and state of a limiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimiterStats {
    /// Leases and spends granted, including those without the store.
    pub granted: u64,
    /// Acquires refused by a limit.
    pub refused: u64,
    /// Leases granted while the store was unavailable.
    pub degraded: u64,
    /// Settlements and adjustments above the held units that left a bucket at the bound of its debt.
    pub debt_bound: u64,
    /// Leases that have neither ended nor been [detached](Lease::detach).
    pub open_leases: u64,
    /// Callers waiting for their turn.
    pub waiting: usize,
    /// Endings that the settler has yet to send.
    pub settling: usize,
    /// Leases that stayed spent until their deadline, because the settler was full, or their ending did not
    /// reach the store within ten minutes or never will.
    pub unsettled: u64,
    /// How long the circuit to the store stays open; `None` if it is closed.
    pub store_away: Option<Duration>,
    /// Panics of listeners.
    pub panics: u64,
    /// The policy cache.
    pub cache: CacheStats,
}

impl Limiter {
    /// A limiter over `store`, limited by the policies stored there.
    ///
    /// # Panics
    /// Never: the defaults are within their bounds.
    pub fn new(store: impl Store) -> Self {
        Self::builder(store).build().expect("the defaults are within their bounds")
    }

    /// A builder for a limiter over `store`.
    pub fn builder(store: impl Store) -> LimiterBuilder {
        LimiterBuilder::new(Arc::new(store))
    }

    /// A builder for a limiter over a store that is also used elsewhere.
    pub fn over(store: Arc<dyn Store>) -> LimiterBuilder {
        LimiterBuilder::new(store)
    }

    /// Registers a listener for as long as the limiter exists. It runs on the thread that caused the event,
    /// with no lock held; a panic in it is counted.
    pub fn on_event(&self, listener: impl Fn(&LimitEvent) + Send + Sync + 'static) {
        self.shared.listeners.add(Box::new(listener));
    }

    /// The store, for listings.
    pub fn store(&self) -> &dyn Store {
        &*self.shared.store
    }

    /// How long the store may take before it counts as unavailable.
    pub fn store_deadline(&self) -> Duration {
        self.shared.breaker.deadline()
    }

    /// Counters and state of the limiter.
    pub fn stats(&self) -> LimiterStats {
        let shared = &self.shared;
        LimiterStats {
            granted: shared.counters.granted.load(Ordering::Relaxed),
            refused: shared.counters.refused.load(Ordering::Relaxed),
            degraded: shared.counters.degraded.load(Ordering::Relaxed),
            debt_bound: shared.counters.debt_bound.load(Ordering::Relaxed),
            open_leases: shared.open_leases(),
            waiting: shared.waiters.waiting(),
            settling: shared.settler.pending(),
            unsettled: shared.settler.lost(),
            store_away: shared.breaker.open_for(),
            panics: shared.listeners.panics(),
            cache: shared.policies.stats(),
        }
    }

    /// Refuses new callers and all waiters. Open leases can still be settled.
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.shared.waiters.close();
        self.shared.queues.wake();
    }

    /// Closes, and waits until every lease has ended and every ending has reached the store or was abandoned:
    /// after ten minutes, or at once if the store was [closed](crate::StoreError::Closed).
    ///
    /// # Cancel safety
    /// Dropping the future stops waiting; the limiter stays closed.
    pub async fn drain(&self) {
        self.close();
        loop {
            let ended = self.shared.lease_ended.notified();
            let idle = self.shared.settler.idle();
            if self.shared.calls_in_flight.load(Ordering::SeqCst) > 0 || self.shared.open_leases() > 0 {
                ended.await;
            } else if self.shared.settler.pending() > 0 {
                self.shared.wake_settler();
                idle.await;
            } else {
                return;
            }
        }
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::SeqCst)
    }
}

impl Shared {
    /// An unguessable id that starts with the time.
    fn new_id() -> LeaseId {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let millis = since.as_secs() * 1_000 + u64::from(since.subsec_millis());
        LeaseId::new(millis, rand::random())
    }

    /// The same with the store's last known time: reading the clock is a large part of a draw's cost.
    #[inline]
    fn new_id_at(&self) -> LeaseId {
        LeaseId::new(self.store_time_ms.load(Ordering::Relaxed), rand::random())
    }

    fn open_leases(&self) -> u64 {
        // In this order: a lease that ends concurrently is not counted as ended before it is counted as
        // granted.
        let ended = self.counters.ended.load(Ordering::SeqCst);
        self.counters.granted.load(Ordering::SeqCst).saturating_sub(ended)
    }

    fn check_open(&self) -> Result<(), LimitError> {
        if self.is_closed.load(Ordering::Relaxed) { Err(LimitError::Closed) } else { Ok(()) }
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("store", &self.shared.store)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
