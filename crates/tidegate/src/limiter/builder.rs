//! The builder of a limiter.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::Duration;

use thiserror::Error;
use tidegate_core::duration::Exact;
use tidegate_core::limit::lease::DEADLINE;
use tidegate_core::limit::policy::{InvalidPolicy, OnExpiry, OnUnavailable, Policy};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Memory, Store};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::breaker::Breaker;
use super::call_levels::CallLevels;
use super::events::{LimitEvent, Listener, Listeners};
use super::policies::PolicyCache;
use super::runtime::BackgroundRuntime;
use super::settler::Settler;
use super::waiters::Waiters;
use super::{Counters, Limiter, Shared};
use crate::joined::Queues;

/// Bounds of a lease's deadline.
pub(super) const DEADLINES: (Duration, Duration) =
    (Duration::from_millis(1), Duration::from_secs(30 * 86_400));
/// The most cached levels with limits of a call.
const CALL_LEVELS_MAX: usize = 8_192;
/// Maximum of the policy cache's TTL.
const CACHE_TTL_MAX: Duration = Duration::from_secs(86_400);
/// Bounds of the store's timeout.
const STORE_DEADLINES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(60));
/// Bounds of counts, such as queue lengths.
const COUNTS: (usize, usize) = (1, 1 << 24);

/// Builds a [`Limiter`].
#[must_use = "a builder does nothing until it is built"]
pub struct LimiterBuilder {
    store: Arc<dyn Store>,
    defaults: Vec<Limit>,
    on_unavailable: Option<OnUnavailable>,
    on_expiry: Option<OnExpiry>,
    cache_ttl: Duration,
    cache_max: usize,
    lease_deadline: Duration,
    store_deadline: Option<Duration>,
    waiters_max: usize,
    settler_max: usize,
    runtime: Option<Handle>,
    listeners: Vec<Listener>,
}

/// An invalid configuration of a limiter.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidLimiter {
    /// The default limits are invalid.
    #[error("the defaults: {0}")]
    Defaults(#[from] InvalidPolicy),
    /// A duration is out of bounds.
    #[error("{field} is {}, outside {}..={}", Exact(*.value), Exact(*.min), Exact(*.max))]
    Span {
        /// The field.
        field: &'static str,
        /// Its value.
        value: Duration,
        /// The minimum.
        min: Duration,
        /// The maximum.
        max: Duration,
    },
    /// A count is out of bounds.
    #[error("{field} is {value}, outside {}..={}", COUNTS.0, COUNTS.1)]
    Count {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
    },
}

impl LimiterBuilder {
    pub(super) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            defaults: Vec::new(),
            on_unavailable: None,
            on_expiry: None,
            cache_ttl: Duration::from_secs(60),
            cache_max: 65_536,
            lease_deadline: DEADLINE,
            store_deadline: None,
            waiters_max: 65_536,
            settler_max: 65_536,
            runtime: None,
            listeners: Vec::new(),
        }
    }

    /// Limits for subjects that no policy covers. They belong to this process and are not stored.
    pub fn defaults(mut self, limits: impl IntoIterator<Item = Limit>) -> Self {
        self.defaults = limits.into_iter().collect();
        self
    }

    /// What an acquire does while the store is unavailable, if no policy decides. By default it blocks all
    /// callers.
    pub const fn on_unavailable(mut self, behaviour: OnUnavailable) -> Self {
        self.on_unavailable = Some(behaviour);
        self
    }

    /// What happens to leases that are never ended, if no policy decides. By default they are settled.
    pub const fn on_expiry(mut self, behaviour: OnExpiry) -> Self {
        self.on_expiry = Some(behaviour);
        self
    }

    /// The TTL of cached policies, after which the store's version is read again. By default a minute.
    pub const fn cache_ttl(mut self, ttl: Duration) -> Self {
        self.cache_ttl = ttl;
        self
    }

    /// The number of subjects whose policies are cached. By default 65,536; the minimum is 32.
    pub const fn cache_max(mut self, subjects: usize) -> Self {
        self.cache_max = subjects;
        self
    }

    /// How long after its draw a lease expires. By default an hour.
    pub const fn lease_deadline(mut self, deadline: Duration) -> Self {
        self.lease_deadline = deadline;
        self
    }

    /// How long the store may take before it counts as unavailable. By default as the store recommends.
    pub const fn store_deadline(mut self, deadline: Duration) -> Self {
        self.store_deadline = Some(deadline);
        self
    }

    /// The maximum number of waiters. By default 65,536.
    pub const fn waiters_max(mut self, waiters: usize) -> Self {
        self.waiters_max = waiters;
        self
    }

    /// The maximum number of endings queued for the store. By default 65,536; beyond it, leases stay spent.
    pub const fn settler_max(mut self, endings: usize) -> Self {
        self.settler_max = endings;
        self
    }

    /// The runtime of background work and of blocking callers. By default the caller's runtime, and a
    /// background thread for callers without one.
    pub fn runtime(mut self, handle: Handle) -> Self {
        self.runtime = Some(handle);
        self
    }

    /// Registers a listener. It runs on the thread that caused the event, with no lock held; a panic in it is
    /// counted.
    pub fn on_event(mut self, listener: impl Fn(&LimitEvent) + Send + Sync + 'static) -> Self {
        self.listeners.push(Box::new(listener));
        self
    }

    /// Builds the limiter.
    ///
    /// # Errors
    /// [`InvalidLimiter`] names the field, the value and the bound.
    pub fn build(self) -> Result<Limiter, InvalidLimiter> {
        let mut defaults = Policy::new(self.defaults)?;
        if let Some(behaviour) = self.on_unavailable {
            defaults = defaults.on_unavailable(behaviour);
        }
        if let Some(behaviour) = self.on_expiry {
            defaults = defaults.on_expiry(behaviour);
        }
        let capabilities = self.store.capabilities();
        let store_deadline = self.store_deadline.unwrap_or(capabilities.deadline);
        within("lease_deadline", self.lease_deadline, DEADLINES)?;
        within("store_deadline", store_deadline, STORE_DEADLINES)?;
        within("cache_ttl", self.cache_ttl, (Duration::ZERO, CACHE_TTL_MAX))?;
        count("cache_max", self.cache_max)?;
        count("waiters_max", self.waiters_max)?;
        count("settler_max", self.settler_max)?;
        let listeners = Arc::new(Listeners::new(self.listeners));
        let shared = Shared {
            is_immediate: capabilities.is_immediate,
            breaker: Breaker::new(store_deadline, &listeners),
            policies: PolicyCache::new(self.cache_ttl, self.cache_max),
            call_levels: CallLevels::new(self.cache_max.min(CALL_LEVELS_MAX)),
            waiters: Waiters::new(self.waiters_max, self.store.changes()),
            queues: Queues::default(),
            settler: Settler::new(self.settler_max),
            listeners,
            runtime: BackgroundRuntime { configured: self.runtime },
            defaults,
            lease_deadline: self.lease_deadline,
            local: Memory::new(),
            is_closed: AtomicBool::new(false),
            lease_ended: Notify::new(),
            counters: Counters::default(),
            calls_in_flight: AtomicUsize::new(0),
            store_time_ms: AtomicU64::new(0),
            changes: self.store.changes(),
            store: self.store,
        };
        Ok(Limiter { shared: Arc::new(shared) })
    }
}

impl fmt::Debug for LimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimiterBuilder")
            .field("store", &self.store)
            .field("defaults", &self.defaults)
            .finish_non_exhaustive()
    }
}

fn within(
    field: &'static str,
    value: Duration,
    (min, max): (Duration, Duration),
) -> Result<(), InvalidLimiter> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(InvalidLimiter::Span { field, value, min, max })
}

const fn count(field: &'static str, value: usize) -> Result<(), InvalidLimiter> {
    if COUNTS.0 <= value && value <= COUNTS.1 {
        return Ok(());
    }
    Err(InvalidLimiter::Count { field, value })
}
