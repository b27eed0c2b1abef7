//! The client for synchronous code.
//!
//! A [`Client`] owns a single-threaded runtime, in which the async client runs: leases are renewed there
//! while the caller's thread does other work. Each function blocks on the async function of the same name.
//!
//! ```no_run
//! use tidegate_client::{Acquire, Cost, blocking};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = blocking::Client::new(tidegate_client::Client::builder("http://127.0.0.1:8707").token("tg_ci_0123"))?;
//! let request = Acquire::new("acme".parse()?, "gpt-4".parse()?, Cost::of([("tpm", 800)])?);
//! let lease = client.acquire(&request)?;
//! lease.settle(Cost::of([("tpm", 640)])?)?;
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::timeout;

#[allow(clippy::wildcard_imports, reason = "the tables name nearly every type of the wire")]
use crate::*;

/// How long dropping the last handle waits for background cancellations.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// A blocking client of one server. Clones share connections, retry budget and counters.
///
/// Its functions, and those of its leases and listings, panic within a task of a tokio runtime: use the
/// [async client](crate::Client) there.
///
/// Dropping the last handle waits for up to five seconds until dropped leases are cancelled. Within a task of
/// a runtime it does not wait.
#[derive(Clone)]
pub struct Client {
    client: crate::Client,
    runtime: Arc<ClientRuntime>,
}

/// The runtime of the async client. Dropping it waits briefly for background cancellations.
struct ClientRuntime {
    handle: Handle,
    runtime: Option<Runtime>,
    client: crate::Client,
}

impl ClientRuntime {
    fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.handle.block_on(work)
    }
}

impl Drop for ClientRuntime {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        // Blocking within a task of another runtime would panic.
        if Handle::try_current().is_err() {
            let _ = runtime.block_on(async { timeout(DRAIN_TIMEOUT, self.client.drain()).await });
        }
        runtime.shutdown_background();
    }
}

impl Client {
    /// Builds a client and starts its runtime thread.
    ///
    /// # Errors
    /// [`InvalidClient`] for an invalid option; [`InvalidClient::System`] if the runtime cannot be started.
    pub fn new(builder: ClientBuilder) -> Result<Self, InvalidClient> {
        let system = |error: std::io::Error| InvalidClient::System(error.into());
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).thread_name("tidegate-client").enable_all().build();
        let runtime = runtime.map_err(system)?;
        let client = builder.build()?;
        let runtime = ClientRuntime {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
            client: client.clone(),
        };
        Ok(Self { runtime: Arc::new(runtime), client })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> &str {
        self.client.url()
    }

    /// Returns the counters.
    pub fn stats(&self) -> ClientStats {
        self.client.stats()
    }

    /// Waits until all background endings are complete.
    pub fn drain(&self) {
        self.runtime.wait(self.client.drain());
    }

    /// Draws units of every limit of a subject and of the levels above it, all or nothing, and holds them
    /// until the lease ends.
    ///
    /// # Errors
    /// As [`Client::acquire`](crate::Client::acquire).
    pub fn acquire(&self, request: &Acquire) -> Result<Lease, ClientError> {
        self.runtime.wait(self.client.acquire(request)).map(|lease| self.wrap(lease))
    }

    /// Draws for independent requests: each is granted or refused by itself, in this order. None waits.
    ///
    /// # Errors
    /// As [`Client::acquire_batch`](crate::Client::acquire_batch).
    pub fn acquire_batch(&self, batch: &Batch) -> Result<Vec<Result<Lease, ClientError>>, ClientError> {
        let results = self.runtime.wait(self.client.acquire_batch(batch))?;
        Ok(results.into_iter().map(|result| result.map(|lease| self.wrap(lease))).collect())
    }

    /// Resumes a detached lease, and renews it for `span` at a time.
    ///
    /// # Errors
    /// As [`Client::resume`](crate::Client::resume).
    pub fn resume(&self, lease: &LeaseRef, span: Duration) -> Result<Lease, ClientError> {
        self.runtime.wait(self.client.resume(lease, span)).map(|lease| self.wrap(lease))
    }

    fn wrap(&self, lease: crate::Lease) -> Lease {
        Lease { lease, runtime: Arc::clone(&self.runtime) }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.fmt(f)
    }
}

macro_rules! blocking_routes {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty),*) -> $Answer:ty, $how:ident $call:expr;)+) => {
        /// One function for each route.
        impl Client {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// See [`ClientError`].
                pub fn $name(&self, $($arg: $Arg),*) -> Result<$Answer, ClientError> {
                    self.runtime.wait(self.client.$name($($arg),*))
                }
            )+
        }
    };
}

macro_rules! blocking_listings {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty)?; $query:ident: $Query:ty) -> $Page:ty, $call:expr;)+) => {
        /// Listings as iterators over all pages.
        impl Client {
            $(
                $(#[$doc])*
                pub fn $name(&self, $($arg: $Arg,)? $query: $Query) -> Pages<$Query, $Page> {
                    Pages::new(self.client.$name($($arg,)? $query), &self.runtime)
                }
            )+
        }
    };
}

routes!(blocking_routes);
listings!(blocking_listings);

/// Units drawn at a server: the blocking [`Lease`](crate::Lease). It is renewed while it is held, and
/// cancelled in the background when it is dropped.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    // Dropped before `runtime`, whose drop waits for the cancellation.
    lease: crate::Lease,
    runtime: Arc<ClientRuntime>,
}

impl Lease {
    /// Returns the name of the lease. A client with this name and the same token can continue the lease.
    pub fn name(&self) -> &LeaseRef {
        self.lease.name()
    }

    /// Returns why the lease is not backed by the store, if it is not.
    pub fn degraded(&self) -> Option<Degraded> {
        self.lease.degraded()
    }

    /// Returns a lower bound of the time until it expires, unless it is renewed.
    pub fn expires_in(&self) -> Duration {
        self.lease.expires_in()
    }

    /// Whether the server has reported that the lease ended, other than by this handle.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Draws more units, all or nothing. On refusal the lease is unchanged.
    ///
    /// # Errors
    /// As [`Lease::extend`](crate::Lease::extend).
    pub fn extend(&self, more: Cost) -> Result<Vec<LimitState>, ClientError> {
        self.runtime.wait(self.lease.extend(more))
    }

    /// Adjusts the held units, up or down. Never refused: units beyond the limit become debt.
    ///
    /// # Errors
    /// As [`Lease::adjust`](crate::Lease::adjust).
    pub fn adjust(&self, changes: Changes) -> Result<Vec<LimitState>, ClientError> {
        self.runtime.wait(self.lease.adjust(changes))
    }

    /// Ends the lease. Limits that `actual` names are settled at that amount, all others at what the lease
    /// holds.
    ///
    /// # Errors
    /// As [`Lease::settle`](crate::Lease::settle).
    pub fn settle(&self, actual: Cost) -> Result<(), ClientError> {
        self.runtime.wait(self.lease.settle(actual))
    }

    /// Ends the lease and returns all its units.
    ///
    /// # Errors
    /// As [`Lease::cancel`](crate::Lease::cancel).
    pub fn cancel(&self) -> Result<(), ClientError> {
        self.runtime.wait(self.lease.cancel())
    }

    /// Releases the handle without ending the lease: see [`Lease::detach`](crate::Lease::detach).
    pub fn detach(self) -> LeaseRef {
        self.lease.detach()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}

/// The items of a listing, fetched page by page. The first error is the last item.
#[must_use = "iterators are lazy: nothing is fetched until an item is requested"]
pub struct Pages<Q, P: Page> {
    inner: crate::Pages<Q, P>,
    items: std::vec::IntoIter<P::Item>,
    has_failed: bool,
    runtime: Arc<ClientRuntime>,
}

impl<Q, P: Page> Pages<Q, P> {
    fn new(inner: crate::Pages<Q, P>, runtime: &Arc<ClientRuntime>) -> Self {
        Self { inner, items: Vec::new().into_iter(), has_failed: false, runtime: Arc::clone(runtime) }
    }
}

impl<Q: Query, P: Page> Iterator for Pages<Q, P> {
    type Item = Result<P::Item, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(item) = self.items.next() {
                return Some(Ok(item));
            }
            if self.has_failed {
                return None;
            }
            match self.runtime.wait(self.inner.next_page()) {
                Ok(page) => self.items = page?.into_items().into_iter(),
                Err(error) => {
                    self.has_failed = true;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl<Q, P: Page> fmt::Debug for Pages<Q, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
