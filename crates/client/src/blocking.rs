//! The client for code that does not await.
//!
//! A [`Client`] has a runtime of its own, with one thread, in which the async client does its work: leases are renewed there
//! while the caller's thread does something else. There is no second client: each function here waits for the one of the
//! same name.
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

/// How long the last handle of a client waits for leases that were dropped to be ended.
const LINGER: Duration = Duration::from_secs(5);

/// A client of one server, for code that does not await. Clones are the same client.
///
/// Its functions, and those of its leases and listings, panic within a task of a tokio runtime: there, use
/// [the other one](crate::Client).
///
/// Where leases were dropped, the last of its handles to be dropped waits for up to five seconds until they are ended. Within a task
/// of a runtime it does not wait.
#[derive(Clone)]
pub struct Client {
    client: crate::Client,
    home: Arc<Home>,
}

/// Where the async client does its work. The last who leaves waits a little for what is under way.
struct Home {
    handle: Handle,
    runtime: Option<Runtime>,
    client: crate::Client,
}

impl Home {
    fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.handle.block_on(work)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        // Among the tasks of another runtime nobody may wait.
        if Handle::try_current().is_err() {
            let _ = runtime.block_on(async { timeout(LINGER, self.client.drain()).await });
        }
        runtime.shutdown_background();
    }
}

impl Client {
    /// The client that a builder describes, and a thread for it.
    ///
    /// # Errors
    /// [`InvalidClient`] says what is wrong; [`InvalidClient::System`] where the system gives no thread.
    pub fn new(builder: ClientBuilder) -> Result<Self, InvalidClient> {
        let system = |error: std::io::Error| InvalidClient::System(error.into());
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).thread_name("tidegate-client").enable_all().build();
        let runtime = runtime.map_err(system)?;
        let client = builder.build()?;
        let home = Home { handle: runtime.handle().clone(), runtime: Some(runtime), client: client.clone() };
        Ok(Self { home: Arc::new(home), client })
    }

    /// The address of the server.
    pub fn url(&self) -> &str {
        self.client.url()
    }

    /// What was counted so far.
    pub fn stats(&self) -> ClientStats {
        self.client.stats()
    }

    /// Waits until no lease is being ended in the background.
    pub fn drain(&self) {
        self.home.wait(self.client.drain());
    }

    /// Draws units of every limit of a subject and of those above it, all or nothing, and keeps them until the lease is ended.
    ///
    /// # Errors
    /// As [`Client::acquire`](crate::Client::acquire).
    pub fn acquire(&self, request: &Acquire) -> Result<Lease, ClientError> {
        self.home.wait(self.client.acquire(request)).map(|lease| self.held(lease))
    }

    /// Draws for many who have nothing to do with each other: each is granted or refused by itself, in this order. None waits.
    ///
    /// # Errors
    /// As [`Client::acquire_batch`](crate::Client::acquire_batch).
    pub fn acquire_batch(&self, batch: &Batch) -> Result<Vec<Result<Lease, ClientError>>, ClientError> {
        let results = self.home.wait(self.client.acquire_batch(batch))?;
        Ok(results.into_iter().map(|result| result.map(|lease| self.held(lease))).collect())
    }

    /// Takes up a lease that was let go of, and renews it for `span` at a time from now on.
    ///
    /// # Errors
    /// As [`Client::resume`](crate::Client::resume).
    pub fn resume(&self, lease: &LeaseRef, span: Duration) -> Result<Lease, ClientError> {
        self.home.wait(self.client.resume(lease, span)).map(|lease| self.held(lease))
    }

    fn held(&self, lease: crate::Lease) -> Lease {
        Lease { lease, home: Arc::clone(&self.home) }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.fmt(f)
    }
}

macro_rules! waited {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty),*) -> $Answer:ty, $how:ident $call:expr;)+) => {
        /// One function for each route.
        impl Client {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// Every [`ClientError`] says what to do next.
                pub fn $name(&self, $($arg: $Arg),*) -> Result<$Answer, ClientError> {
                    self.home.wait(self.client.$name($($arg),*))
                }
            )+
        }
    };
}

macro_rules! waited_pages {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty)?; $query:ident: $Query:ty) -> $Page:ty, $call:expr;)+) => {
        /// Listings as a whole.
        impl Client {
            $(
                $(#[$doc])*
                pub fn $name(&self, $($arg: $Arg,)? $query: $Query) -> Pages<$Query, $Page> {
                    Pages::new(self.client.$name($($arg,)? $query), &self.home)
                }
            )+
        }
    };
}

routes!(waited);
listings!(waited_pages);

/// Units drawn at a server: [`Lease`](crate::Lease) for code that does not await. It is renewed while it is held, and cancelled
/// in the background when it is dropped.
#[must_use = "dropping a lease returns what it drew"]
pub struct Lease {
    // Dropped before its home, which then waits for its end.
    lease: crate::Lease,
    home: Arc<Home>,
}

impl Lease {
    /// What it is called at the server. Whoever knows it and has the same token can go on with it.
    pub fn name(&self) -> &LeaseRef {
        self.lease.name()
    }

    /// Why it does not stand for units of the store, if it does not.
    pub fn degraded(&self) -> Option<Degraded> {
        self.lease.degraded()
    }

    /// How long it has at least, unless it is renewed.
    pub fn expires_in(&self) -> Duration {
        self.lease.expires_in()
    }

    /// Whether the server has said that it has ended, and not by this handle.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Draws more, all or nothing. Refused, the lease stays as it is.
    ///
    /// # Errors
    /// As [`Lease::extend`](crate::Lease::extend).
    pub fn extend(&self, more: Cost) -> Result<Vec<LimitState>, ClientError> {
        self.home.wait(self.lease.extend(more))
    }

    /// Takes what turned out to be needed, or gives back what was not: never refused, and what is missing is debt.
    ///
    /// # Errors
    /// As [`Lease::adjust`](crate::Lease::adjust).
    pub fn adjust(&self, changes: Changes) -> Result<Vec<LimitState>, ClientError> {
        self.home.wait(self.lease.adjust(changes))
    }

    /// Ends it at what was used of the limits named, and at what it holds of the others.
    ///
    /// # Errors
    /// As [`Lease::settle`](crate::Lease::settle).
    pub fn settle(&self, actual: Cost) -> Result<(), ClientError> {
        self.home.wait(self.lease.settle(actual))
    }

    /// Ends it as if it had never been: all of it returns.
    ///
    /// # Errors
    /// As [`Lease::cancel`](crate::Lease::cancel).
    pub fn cancel(&self) -> Result<(), ClientError> {
        self.home.wait(self.lease.cancel())
    }

    /// Lets go of it without ending it: [`Lease::detach`](crate::Lease::detach).
    pub fn detach(self) -> LeaseRef {
        self.lease.detach()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}

/// The items of a listing, which are asked for page by page. The first error is the last item.
#[must_use = "nothing is listed until an item is asked for"]
pub struct Pages<Q, P: Page> {
    inner: crate::Pages<Q, P>,
    items: std::vec::IntoIter<P::Item>,
    has_failed: bool,
    home: Arc<Home>,
}

impl<Q, P: Page> Pages<Q, P> {
    fn new(inner: crate::Pages<Q, P>, home: &Arc<Home>) -> Self {
        Self { inner, items: Vec::new().into_iter(), has_failed: false, home: Arc::clone(home) }
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
            match self.home.wait(self.inner.next_page()) {
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
