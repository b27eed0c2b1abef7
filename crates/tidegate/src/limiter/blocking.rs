//! Shared limits for code that does not await.
//!
//! Each function waits for the async one of the same name, on the calling thread; timers and connections belong to one thread
//! that all limiters of the process share. The caller needs no runtime. Within a task of a tokio runtime these functions panic:
//! await there.
//!
//! ```
//! use tidegate::{Limit, Limiter, Settled, blocking};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = blocking::open("memory:")?;
//! let limiter = Limiter::over(store).defaults([Limit::per_minute("tpm", 1_000)]).build()?.blocking();
//! let mut lease = limiter.acquire(("acme", "gpt-4"), [("tpm", 800)])?;
//! assert_eq!(lease.settle([("tpm", 640)])?, Settled::Now);
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_store::{Store, StoreError};

use super::acquire::SubjectRef;
use super::error::{LimitError, LimitLine};
use super::home::own_thread;
use super::lease::{Adjusted, Degraded, Settled};

/// Opens the store at an address, as [`store::open`](crate::store::open) does.
///
/// # Errors
/// As [`store::open`](crate::store::open).
///
/// # Panics
/// Within a task of a tokio runtime.
pub fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    own_thread().block_on(tidegate_store::open(url))
}

/// A [limiter](crate::Limiter) for code that does not await. Clones are the same limiter.
///
/// # Panics
/// Its functions and those of its leases panic within a task of a tokio runtime.
#[derive(Debug, Clone)]
pub struct Limiter(super::Limiter);

impl super::Limiter {
    /// The same limiter, for code that does not await.
    pub fn blocking(&self) -> Limiter {
        Limiter(self.clone())
    }
}

impl Limiter {
    /// The limiter for async code: the two share everything.
    pub const fn limiter(&self) -> &super::Limiter {
        &self.0
    }

    /// Draws `cost` from every limit of the subject, all or nothing, and at once.
    ///
    /// # Errors
    /// As [`acquire`](crate::Limiter::acquire).
    pub fn acquire<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Lease, LimitError> {
        self.wait(self.0.acquire(subject, cost)).map(Lease)
    }

    /// The same, waiting up to `within` for what is short.
    ///
    /// # Errors
    /// As [`acquire_within`](crate::Limiter::acquire_within).
    pub fn acquire_within<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
        within: Duration,
    ) -> Result<Lease, LimitError> {
        self.wait(self.0.acquire_within(subject, cost, within)).map(Lease)
    }

    /// Draws and settles in one call: no lease is kept.
    ///
    /// # Errors
    /// As [`spend`](crate::Limiter::spend).
    pub fn spend<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<(), LimitError> {
        self.wait(self.0.spend(subject, cost))
    }

    /// The limits of a subject and of those above it that it draws from.
    ///
    /// # Errors
    /// As [`balances`](crate::Limiter::balances).
    pub fn balances<'a>(&self, subject: impl Into<SubjectRef<'a>>) -> Result<Vec<LimitLine>, LimitError> {
        self.wait(self.0.balances(subject))
    }

    /// Closes it, and waits until every lease has ended and the store has heard of that.
    pub fn drain(&self) {
        self.wait(self.0.drain());
    }

    fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.0.shared.home.block_on(work)
    }
}

/// A [lease](crate::Lease) for code that does not await. Dropped, it is cancelled in the background: all of it returns.
#[derive(Debug)]
#[must_use = "dropping a lease returns it"]
pub struct Lease(super::Lease);

impl Lease {
    /// The lease's id.
    pub const fn id(&self) -> LeaseId {
        self.0.id()
    }

    /// Whose it is.
    pub fn subject(&self) -> &Subject {
        self.0.subject()
    }

    /// What it holds of a limit.
    pub fn held(&self, limit: &str) -> Option<u64> {
        self.0.held(limit)
    }

    /// Whether it was granted while the store was unavailable, and how.
    pub fn degraded(&self) -> Option<Degraded> {
        self.0.degraded()
    }

    /// The limits that it drew from, as the store last told.
    pub fn balances(&self) -> Vec<Balance> {
        self.0.balances()
    }

    /// Draws more, all or nothing.
    ///
    /// # Errors
    /// As [`extend`](crate::Lease::extend).
    pub fn extend<'a>(&mut self, more: impl AsRef<[(&'a str, u64)]>) -> Result<(), LimitError> {
        self.wait(async |lease| lease.extend(more).await)
    }

    /// Takes what turned out to be needed, or gives back what was not.
    ///
    /// # Errors
    /// As [`adjust`](crate::Lease::adjust).
    pub fn adjust<'a>(&mut self, changes: impl AsRef<[(&'a str, i64)]>) -> Result<Adjusted, LimitError> {
        self.wait(async |lease| lease.adjust(changes).await)
    }

    /// Gives the lease `span` from now on.
    ///
    /// # Errors
    /// As [`renew`](crate::Lease::renew).
    pub fn renew(&mut self, span: Duration) -> Result<(), LimitError> {
        self.wait(async |lease| lease.renew(span).await)
    }

    /// Ends the lease at what was used of the limits named, and at what is held of the others.
    ///
    /// # Errors
    /// As [`settle`](crate::Lease::settle).
    pub fn settle<'a>(&mut self, actual: impl AsRef<[(&'a str, u64)]>) -> Result<Settled, LimitError> {
        self.wait(async |lease| lease.settle(actual).await)
    }

    /// Ends the lease at what it holds.
    ///
    /// # Errors
    /// As [`settle_as_held`](crate::Lease::settle_as_held).
    pub fn settle_as_held(&mut self) -> Result<Settled, LimitError> {
        self.wait(async |lease| lease.settle_as_held().await)
    }

    /// Ends the lease as if it had never been: all of it returns.
    ///
    /// # Errors
    /// As [`cancel`](crate::Lease::cancel).
    pub fn cancel(&mut self) -> Result<Settled, LimitError> {
        self.wait(async |lease| lease.cancel().await)
    }

    /// Leaves the lease open, to be ended by its id or by its deadline.
    pub fn detach(self) {
        self.0.detach();
    }

    fn wait<T>(&mut self, step: impl AsyncFnOnce(&mut super::Lease) -> T) -> T {
        let shared = Arc::clone(&self.0.shared);
        shared.home.block_on(step(&mut self.0))
    }
}
