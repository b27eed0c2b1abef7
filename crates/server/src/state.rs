//! What all requests share.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate::store::{HostWall, Reply, Store, WallClock};
use tidegate::{Limiter, Stamp, StoreError, Version};
use tidegate_client::{Event, Written};
use tidegate_core::limit::name::Namespace;
use tokio::sync::Semaphore;

use crate::hub::Hub;
use crate::keyring::{Keyring, StoreKeyring};
use crate::meters::{Meters, StoreMeters};
use crate::options::Bounds;
use crate::owner::LeaseKey;
use crate::patience;
use crate::refusal::Refusal;
use crate::tls::Tls;

/// A limiter, who may use it, and how much at once. Clones are the same.
#[derive(Debug, Clone)]
pub struct State(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limiter: Limiter,
    options: StateOptions,
    running: Semaphore,
    meters: Meters,
    hub: Hub,
    up_since: Stamp,
    tls: OnceLock<Tls>,
}

/// Who may use a limiter, and how much at once.
#[derive(Debug, Clone)]
pub struct StateOptions {
    /// Where tokens are kept.
    pub keyring: Arc<dyn Keyring>,
    /// The namespace that the store was opened in: tokens for another one are refused.
    pub namespace: Namespace,
    /// What leases are named with.
    pub lease_key: LeaseKey,
    /// The bounds.
    pub bounds: Bounds,
    /// The clock that tokens expire by.
    pub clock: Arc<dyn WallClock>,
}

impl State {
    /// A limiter for the tokens of its own store, which is opened in the namespace `default`, with the bounds there are by
    /// default.
    ///
    /// # Errors
    /// What the store says when it is asked for the key that leases are named with.
    pub async fn new(limiter: Limiter) -> Result<Self, StoreError> {
        let namespace =
            Namespace::new("default").map_err(|name| StoreError::Invalid { what: name.to_string() })?;
        let lease_key = LeaseKey::of_store(limiter.store(), &namespace).await?;
        let keyring = Arc::new(StoreKeyring::new(limiter.clone()));
        Ok(Self::with(
            limiter,
            StateOptions {
                keyring,
                namespace,
                lease_key,
                bounds: Bounds::default(),
                clock: Arc::new(HostWall),
            },
        ))
    }

    /// The same with everything said.
    pub fn with(limiter: Limiter, options: StateOptions) -> Self {
        let running = Semaphore::new(options.bounds.requests_max.min(Semaphore::MAX_PERMITS));
        let hub = Hub::new(&limiter, options.bounds.listeners_max);
        let up_since = options.clock.now();
        Self(Arc::new(Shared {
            limiter,
            options,
            running,
            meters: Meters::new(),
            hub,
            up_since,
            tls: OnceLock::new(),
        }))
    }

    /// The limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
    }

    /// Tells of the calls of the store that these meters watch, in its metrics.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a builder method")]
    pub fn measured_by(self, meters: StoreMeters) -> Self {
        self.meters().measure(&meters);
        self
    }

    /// Tells of this certificate in its metrics.
    pub(crate) fn secured_by(&self, tls: Tls) {
        let _ = self.0.tls.set(tls);
    }

    /// How its connections are secured, if they are.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.0.tls.get()
    }

    /// The bounds.
    pub fn bounds(&self) -> &Bounds {
        &self.0.options.bounds
    }

    pub(crate) fn keyring(&self) -> &dyn Keyring {
        &*self.0.options.keyring
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

    pub(crate) fn running(&self) -> &Semaphore {
        &self.0.running
    }

    /// Requests that are under way.
    pub(crate) fn requests(&self) -> usize {
        self.bounds().requests_max.saturating_sub(self.0.running.available_permits())
    }

    pub(crate) fn meters(&self) -> &Meters {
        &self.0.meters
    }

    pub(crate) fn hub(&self) -> &Hub {
        &self.0.hub
    }

    /// Since when there is a server of it.
    pub(crate) fn up_since(&self) -> Stamp {
        self.0.up_since
    }

    /// Tells of an administrative change.
    pub(crate) fn changed(&self, version: Version, actor: String) -> Written {
        let version = version.number();
        self.hub().tell(|| Event::Changed { version, actor });
        Written { version }
    }

    pub(crate) fn store(&self) -> &dyn Store {
        self.0.limiter.store()
    }

    /// What the store answers, if it does within the time of a report.
    pub(crate) async fn ask<T: Unpin>(&self, reply: Reply<'_, T>) -> Result<T, Refusal> {
        Ok(self.within(reply).await??)
    }

    /// What comes of something that may take as long as a report.
    pub(crate) async fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, Refusal> {
        let span = self.bounds().report_time;
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        patience::within(span, work).await.map_err(|_| StoreError::TimedOut { millis: millis(span) }.into())
    }
}
