//! State shared by all requests.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate::store::{HostWall, Reply, Store, WallClock};
use tidegate::{Limiter, Limits, ResourceName, Stamp, StoreError, Version};
use tidegate_client::{Event, Written};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::TokenId;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::auth::Caller;
use crate::event_broadcast::EventBroadcast;
use crate::io_timeout;
use crate::lease_key::LeaseKey;
use crate::meters::{Meters, StoreMeters};
use crate::options::Bounds;
use crate::refusal::Refusal;
use crate::routes::RouteInfo;
use crate::slots::{AtCapacity, Slot, Slots};
use crate::tls::Tls;
use crate::token_cache::{StoreTokenCache, TokenCache};
use crate::upstreams::Upstreams;

/// Slots for requests that operators need while callers use all others.
const RESERVED_SLOTS: usize = 64;
/// Slots for listings and reports. They read many records, and share the store's readers with the lookups of tokens
/// and limits, which every request needs.
const REPORT_SLOTS: usize = 32;
/// Revocations that a waiting request may have missed before it checks its token again.
const REVOCATIONS_MAX: usize = 64;

/// A limiter with its tokens, bounds and metrics. Clones share the same state.
#[derive(Debug, Clone)]
pub struct State(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limiter: Limiter,
    options: StateOptions,
    running: Arc<Slots>,
    reserve: Arc<Slots>,
    reports: Arc<Slots>,
    meters: Meters,
    events: EventBroadcast,
    revocations: broadcast::Sender<TokenId>,
    up_since: Stamp,
    upstreams: Upstreams,
    tls: OnceLock<Tls>,
}

/// Tokens, namespace and bounds of a server.
#[derive(Debug, Clone)]
pub struct StateOptions {
    /// The source of tokens.
    pub token_cache: Arc<dyn TokenCache>,
    /// The namespace of the store: tokens for other namespaces are rejected.
    pub namespace: Namespace,
    /// The key of lease names.
    pub lease_key: LeaseKey,
    /// The bounds.
    pub bounds: Bounds,
    /// The clock that tokens expire by.
    pub clock: Arc<dyn WallClock>,
    /// The upstreams that callers get permits for, at most 10,000; others are refused. Without it, each is
    /// created on first use, with the limits of [`Throttle::host`](tidegate::Throttle::host).
    pub upstreams: Option<BTreeMap<ResourceName, Limits>>,
}

impl State {
    /// Creates a state with the tokens of the limiter's own store, in the namespace `default`, with default
    /// bounds.
    ///
    /// # Errors
    /// Errors of the store when it loads the lease key.
    pub async fn new(limiter: Limiter) -> Result<Self, StoreError> {
        let namespace =
            Namespace::new("default").map_err(|name| StoreError::Invalid { what: name.to_string() })?;
        let lease_key = LeaseKey::of_store(limiter.store(), &namespace).await?;
        let token_cache = Arc::new(StoreTokenCache::new(limiter.clone()));
        Ok(Self::with(
            limiter,
            StateOptions {
                token_cache,
                namespace,
                lease_key,
                bounds: Bounds::default(),
                clock: Arc::new(HostWall),
                upstreams: None,
            },
        ))
    }

    /// Creates a state with explicit options.
    pub fn with(limiter: Limiter, options: StateOptions) -> Self {
        let (running, reserve) = (Slots::new(options.bounds.requests_max), Slots::new(RESERVED_SLOTS));
        let events = EventBroadcast::new(&limiter, options.bounds.listeners_max);
        let up_since = options.clock.now();
        let upstreams = Upstreams::new(options.upstreams.clone());
        Self(Arc::new(Shared {
            limiter,
            options,
            running,
            reserve,
            reports: Slots::new(REPORT_SLOTS),
            meters: Meters::new(),
            events,
            revocations: broadcast::Sender::new(REVOCATIONS_MAX),
            up_since,
            upstreams,
            tls: OnceLock::new(),
        }))
    }

    /// Returns the limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// Includes the store calls that these meters record in the server's metrics.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a builder method")]
    pub fn measured_by(self, meters: StoreMeters) -> Self {
        self.meters().measure(&meters);
        self
    }

    /// Includes this certificate in the metrics.
    pub(crate) fn secured_by(&self, tls: Tls) {
        let _ = self.0.tls.set(tls);
    }

    /// Returns the TLS configuration, if any.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.0.tls.get()
    }

    /// The bounds.
    pub fn bounds(&self) -> &Bounds {
        &self.0.options.bounds
    }

    /// The source of tokens. What shares it learns of revocations through this server at once.
    pub fn token_cache(&self) -> &Arc<dyn TokenCache> {
        &self.0.options.token_cache
    }

    pub(crate) fn clock(&self) -> &dyn WallClock {
        &*self.0.options.clock
    }

    pub(crate) fn lease_key(&self) -> &LeaseKey {
        &self.0.options.lease_key
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.0.options.namespace
    }

    /// Takes a slot for a request of this token; one with access to the reserve finds one there too.
    pub(crate) fn enter(&self, token: &TokenId, route: &RouteInfo) -> Result<Slot, Refusal> {
        let Shared { running, reserve, reports, .. } = &*self.0;
        let (slots, of) = if route.is_report() { (reports, "reports") } else { (running, "requests") };
        let slot = match slots.take(token) {
            Err(_) if route.has_reserve() => reserve.take(token),
            slot => slot,
        };
        slot.map_err(|at| self.busy(at, (slots.max(), of), token))
    }

    /// Takes a slot for a listing or a report of this token.
    pub(crate) fn enter_report(&self, token: &TokenId) -> Result<Slot, Refusal> {
        let reports = &self.0.reports;
        reports.take(token).map_err(|at| self.busy(at, (reports.max(), "reports"), token))
    }

    /// Records that a request found no slot.
    pub(crate) fn busy(&self, at: AtCapacity, (max, of): (usize, &str), token: &TokenId) -> Refusal {
        self.meters().busy();
        self.events().busy(max);
        Refusal::busy(at, (max, of), token)
    }

    /// Returns the number of requests in flight.
    pub(crate) fn requests(&self) -> usize {
        self.0.running.used() + self.0.reserve.used() + self.0.reports.used()
    }

    pub(crate) fn meters(&self) -> &Meters {
        &self.0.meters
    }

    pub(crate) fn events(&self) -> &EventBroadcast {
        &self.0.events
    }

    /// Makes a revocation take effect on this server at once.
    pub(crate) fn revoked(&self, id: &TokenId) {
        self.token_cache().invalidate(id);
        // There may be no request that waits.
        let _ = self.0.revocations.send(id.clone());
    }

    /// Waits until the token of a caller is revoked through this server.
    pub(crate) async fn until_revoked(&self, caller: &Caller) {
        let mut revocations = self.0.revocations.subscribe();
        // It may have been revoked since the request was authenticated.
        let mut is_valid = self.is_still_valid(caller).await;
        while is_valid {
            is_valid = match revocations.recv().await {
                Ok(id) => id != *caller.token(),
                Err(RecvError::Lagged(_)) => self.is_still_valid(caller).await,
                Err(RecvError::Closed) => std::future::pending().await,
            };
        }
    }

    /// Returns when the server started.
    pub(crate) fn up_since(&self) -> Stamp {
        self.0.up_since
    }

    /// Refuses all waiting and new calls of the limiter and the upstreams, and ends the event streams.
    pub(crate) fn close(&self) {
        self.limiter().close();
        self.upstreams().close();
        self.events().close();
    }

    pub(crate) fn upstreams(&self) -> &Upstreams {
        &self.0.upstreams
    }

    /// Broadcasts an administrative change.
    pub(crate) fn changed(&self, version: Version, actor: String) -> Written {
        let version = version.number();
        self.events().send(|| Event::Changed { version, actor });
        Written { version }
    }

    pub(crate) fn store(&self) -> &dyn Store {
        self.0.limiter.store()
    }

    /// Awaits a reply of the store, within the report timeout.
    pub(crate) async fn query<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Refusal> {
        Ok(self.within(reply).await??)
    }

    /// Awaits `work`, within the report timeout.
    pub(crate) async fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, Refusal> {
        let span = self.bounds().report_time;
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        io_timeout::within(span, work).await.map_err(|_| StoreError::TimedOut { millis: millis(span) }.into())
    }
}
