//! The shared limiter: nobody gets more than agreed, whichever process asks.
//!
//! `acquire → policies (cached) → store.draw → Lease → settle`. A limiter is a handle over a
//! [`Store`](tidegate_store::Store): it resolves who is limited by what, draws, and hands out leases.

mod acquire;
mod admin;
pub mod blocking;
mod builder;
mod chosen;
mod error;
mod events;
mod explain;
mod guard;
mod home;
mod joining;
mod lease;
mod policies;
mod recent;
mod remote;
mod request;
mod settler;
pub(crate) mod turns;
mod usage;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::Policy;
use tidegate_store::{Changes, Memory, Store};
use tokio::sync::Notify;

pub use acquire::SubjectRef;
pub use admin::Admin;
pub use builder::{InvalidLimiter, LimiterBuilder};
pub use error::{LimitError, LimitLine, Limited};
pub use events::LimitEvent;
pub use explain::{Explanation, Would};
pub(crate) use joining::{Finish, Resolved};
pub use lease::{Adjusted, Degraded, Lease, Settled};
pub use policies::CacheStats;
pub use remote::{LeaseStep, OpenLease};
pub use request::Request;
pub use usage::{Capacity, UsageSum};

use events::Listeners;
use guard::Guard;
use home::Home;
use policies::PolicyCache;
use settler::Settler;
use turns::Turns;

use crate::joined::Lines;

/// Limits shared by all who use the same store. Clones are the same limiter.
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
/// let mut lease = limiter.acquire(("acme", "gpt-4"), [("rpm", 1), ("tpm", 800)]).await?;
/// lease.settle([("tpm", 640)]).await?;
///
/// let refused = limiter.acquire(("acme", "gpt-4"), [("tpm", 9_500)]).await.unwrap_err();
/// assert!(refused.retry_after().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Limiter {
    shared: Arc<Shared>,
}

/// What all clones, and all leases, share.
struct Shared {
    store: Arc<dyn Store>,
    /// What the store announces of changes.
    changes: Option<Changes>,
    /// The store answers at once: no deadline, no breaker, nothing in the background.
    is_immediate: bool,
    guard: Guard,
    policies: PolicyCache,
    turns: Turns,
    /// Callers of joined throttles that a limit has turned away.
    lines: Lines,
    settler: Settler,
    listeners: Arc<Listeners>,
    home: Home,
    defaults: Policy,
    lease_deadline: Duration,
    /// Where this process's share is kept while the store is away.
    local: Memory,
    is_closed: AtomicBool,
    lease_ended: Notify,
    counters: Counters,
    /// Those who are asking the store for a lease.
    asking: AtomicUsize,
    /// The time that the store last told, in milliseconds.
    told: AtomicU64,
}

#[derive(Default)]
struct Counters {
    /// Leases and spends that were granted, by the store or without it.
    granted: AtomicU64,
    /// Of these, those that are over.
    ended: AtomicU64,
    refused: AtomicU64,
    degraded: AtomicU64,
}

/// What a limiter has done, and how it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimiterStats {
    /// Leases and spends that were granted, those without the store included.
    pub granted: u64,
    /// Acquires that were refused by a limit.
    pub refused: u64,
    /// Leases that were given while the store was away.
    pub degraded: u64,
    /// Leases that have not ended, and were not [let go of](Lease::detach).
    pub open_leases: u64,
    /// Callers waiting for their turn.
    pub waiting: usize,
    /// Endings that the settler has yet to do.
    pub settling: usize,
    /// Leases that stayed spent, until their deadline, because the settler was full, or the store did not hear of their end
    /// within ten minutes, or never will.
    pub unsettled: u64,
    /// How long the store is left alone from now on, since it failed too often in a row; `None` where it is asked.
    pub store_away: Option<Duration>,
    /// Panics of listeners.
    pub panics: u64,
    /// The cache of policies.
    pub cache: CacheStats,
}

impl Limiter {
    /// A limiter over `store` with nothing but what is written there.
    ///
    /// # Panics
    /// Never: the defaults are within their bounds.
    pub fn new(store: impl Store) -> Self {
        Self::builder(store).build().expect("the defaults are within their bounds")
    }

    /// A limiter over `store`, to be made as asked.
    pub fn builder(store: impl Store) -> LimiterBuilder {
        LimiterBuilder::new(Arc::new(store))
    }

    /// A limiter over a store that others hold too.
    pub fn over(store: Arc<dyn Store>) -> LimiterBuilder {
        LimiterBuilder::new(store)
    }

    /// Hears what happens from now on, as long as there is a limiter. It runs on the thread that caused it, with no lock
    /// held; a panic in it is counted.
    pub fn on_event(&self, listener: impl Fn(&LimitEvent) + Send + Sync + 'static) {
        self.shared.listeners.add(Box::new(listener));
    }

    /// The store, for listings.
    pub fn store(&self) -> &dyn Store {
        &*self.shared.store
    }

    /// How long the store may take to decide, before it counts as away.
    pub fn store_deadline(&self) -> Duration {
        self.shared.guard.deadline()
    }

    /// What the limiter has done, and how it is.
    pub fn stats(&self) -> LimiterStats {
        let shared = &self.shared;
        LimiterStats {
            granted: shared.counters.granted.load(Ordering::Relaxed),
            refused: shared.counters.refused.load(Ordering::Relaxed),
            degraded: shared.counters.degraded.load(Ordering::Relaxed),
            open_leases: shared.open_leases(),
            waiting: shared.turns.waiting(),
            settling: shared.settler.pending(),
            unsettled: shared.settler.lost(),
            store_away: shared.guard.away(),
            panics: shared.listeners.panics(),
            cache: shared.policies.stats(),
        }
    }

    /// Refuses whoever comes and whoever waits. Leases that are out can still be settled.
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.shared.turns.close();
        self.shared.lines.wake();
    }

    /// Closes, and waits until every lease has ended and every ending has reached the store, or was given up: after ten
    /// minutes, or at once where the store was [closed](crate::StoreError::Closed).
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting; the limiter stays closed.
    pub async fn drain(&self) {
        self.close();
        loop {
            let ended = self.shared.lease_ended.notified();
            let idle = self.shared.settler.idle();
            if self.shared.asking.load(Ordering::SeqCst) > 0 || self.shared.open_leases() > 0 {
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
    /// An id that nobody can guess, with the time in front.
    fn new_id() -> LeaseId {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let millis = since.as_secs() * 1_000 + u64::from(since.subsec_millis());
        LeaseId::new(millis, rand::random())
    }

    /// The same with the time that the store last told: to read a clock is a good part of a draw's time.
    #[inline]
    fn new_id_at(&self) -> LeaseId {
        LeaseId::new(self.told.load(Ordering::Relaxed), rand::random())
    }

    fn open_leases(&self) -> u64 {
        // In this order: a lease that ends meanwhile is not counted as ended before it was granted.
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
