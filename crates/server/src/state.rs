//! What all requests share.

use std::sync::Arc;
use std::time::Duration;

use tidegate::store::{HostWall, Reply, Store, WallClock};
use tidegate::{Limiter, StoreError};
use tidegate_core::limit::name::Namespace;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::keyring::{Keyring, StoreKeyring};
use crate::meters::Meters;
use crate::options::Bounds;
use crate::owner::LeaseKey;
use crate::refusal::Refusal;

/// A limiter, who may use it, and how much at once. Clones are the same.
#[derive(Debug, Clone)]
pub struct State(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limiter: Limiter,
    options: StateOptions,
    running: Semaphore,
    meters: Meters,
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
        Self(Arc::new(Shared { limiter, options, running, meters: Meters::new() }))
    }

    /// The limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.0.limiter
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

    pub(crate) fn meters(&self) -> &Meters {
        &self.0.meters
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
        timeout(span, work).await.map_err(|_| StoreError::TimedOut { millis: millis(span) }.into())
    }
}
