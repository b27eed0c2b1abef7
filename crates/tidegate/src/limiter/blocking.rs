//! Shared limits for blocking code.
//!
//! Each function blocks the calling thread until its async counterpart completes; timers and connections run
//! on one background thread per process. The caller needs no runtime. Within a task of a tokio runtime these
//! functions panic: use the async API there.
//!
//! ```
//! use tidegate::{Limit, Limiter, SettleStatus, blocking};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = blocking::open("memory:")?;
//! let limiter = Limiter::over(store).defaults([Limit::per_minute("tpm", 1_000)]).build()?.blocking();
//! let mut lease = limiter.try_acquire(("acme", "gpt-4"), [("tpm", 800)])?;
//! assert_eq!(lease.settle([("tpm", 640)])?, SettleStatus::Now);
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_store::{Store, StoreError};

use super::acquire::SubjectRef;
use super::error::{LimitError, LimitLine};
use super::lease::{AdjustStatus, Degraded, SettleStatus};
use super::runtime::background_runtime;

/// Opens the store at an address, as [`store::open`](crate::store::open) does.
///
/// # Errors
/// As [`store::open`](crate::store::open).
///
/// # Panics
/// Within a task of a tokio runtime.
pub fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    background_runtime().block_on(tidegate_store::open(url))
}

/// A [limiter](crate::Limiter) for blocking code. Clones are the same limiter.
///
/// # Panics
/// Its functions and those of its leases panic within a task of a tokio runtime.
#[derive(Debug, Clone)]
pub struct Limiter(super::Limiter);

impl super::Limiter {
    /// The same limiter for blocking code.
    pub fn blocking(&self) -> Limiter {
        Limiter(self.clone())
    }
}

impl Limiter {
    /// The async limiter. Both share everything.
    pub const fn limiter(&self) -> &super::Limiter {
        &self.0
    }

    /// Draws `cost` from every limit of the subject, all or nothing, without waiting for limits.
    ///
    /// # Errors
    /// As [`try_acquire`](crate::Limiter::try_acquire).
    pub fn try_acquire<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Lease, LimitError> {
        self.wait(self.0.try_acquire(subject, cost)).map(Lease)
    }

    /// [`try_acquire`](Self::try_acquire), waiting up to `within` for short limits.
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

    /// Builds an acquire with further options, such as an id or a deadline.
    pub fn request<'a>(
        &'a self,
        subject: impl Into<SubjectRef<'a>>,
        cost: &'a [(&'a str, u64)],
    ) -> Request<'a> {
        Request { limiter: self, request: self.0.request(subject, cost) }
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

    /// The balances of a subject and of the ancestors it draws from.
    ///
    /// # Errors
    /// As [`balances`](crate::Limiter::balances).
    pub fn balances<'a>(&self, subject: impl Into<SubjectRef<'a>>) -> Result<Vec<LimitLine>, LimitError> {
        self.wait(self.0.balances(subject))
    }

    /// Closes the limiter, and waits until every lease has ended and every ending has reached the store.
    pub fn drain(&self) {
        self.wait(self.0.drain());
    }

    fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.0.shared.runtime.block_on(work)
    }
}

/// A [request](crate::Request) for blocking code.
#[derive(Debug)]
#[must_use = "a request does nothing until it is acquired or spent"]
pub struct Request<'a> {
    limiter: &'a Limiter,
    request: super::Request<'a>,
}

impl Request<'_> {
    /// As [`deadline`](crate::Request::deadline).
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.request = self.request.deadline(deadline);
        self
    }

    /// As [`on_expiry`](crate::Request::on_expiry).
    pub fn on_expiry(mut self, behaviour: OnExpiry) -> Self {
        self.request = self.request.on_expiry(behaviour);
        self
    }

    /// As [`id`](crate::Request::id).
    pub fn id(mut self, number: u128) -> Self {
        self.request = self.request.id(number);
        self
    }

    /// Draws without waiting for limits.
    ///
    /// # Errors
    /// As [`try_acquire`](crate::Limiter::try_acquire).
    pub fn try_acquire(self) -> Result<Lease, LimitError> {
        self.limiter.wait(self.request.try_acquire()).map(Lease)
    }

    /// Draws, waiting up to `within`.
    ///
    /// # Errors
    /// As [`acquire_within`](crate::Limiter::acquire_within).
    pub fn acquire_within(self, within: Duration) -> Result<Lease, LimitError> {
        self.limiter.wait(self.request.acquire_within(within)).map(Lease)
    }

    /// Draws and settles at once.
    ///
    /// # Errors
    /// As [`spend`](crate::Limiter::spend).
    pub fn spend(self) -> Result<(), LimitError> {
        self.limiter.wait(self.request.spend())
    }
}

/// A [lease](crate::Lease) for blocking code. Dropping it cancels it in the background: all units return.
#[derive(Debug)]
#[must_use = "dropping a lease returns it"]
pub struct Lease(super::Lease);

impl Lease {
    /// The lease's id.
    pub const fn id(&self) -> LeaseId {
        self.0.id()
    }

    /// The subject that drew it.
    pub fn subject(&self) -> &Subject {
        self.0.subject()
    }

    /// The units held of a limit.
    pub fn held(&self, limit: &str) -> Option<u64> {
        self.0.held(limit)
    }

    /// Whether, and why, it was granted without the store.
    pub fn degraded(&self) -> Option<Degraded> {
        self.0.degraded()
    }

    /// The limits it drew from, as of the store's last response.
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

    /// Draws units that turned out to be needed, or returns unused ones.
    ///
    /// # Errors
    /// As [`adjust`](crate::Lease::adjust).
    pub fn adjust<'a>(&mut self, changes: impl AsRef<[(&'a str, i64)]>) -> Result<AdjustStatus, LimitError> {
        self.wait(async |lease| lease.adjust(changes).await)
    }

    /// Extends the lease's deadline to `span` from now.
    ///
    /// # Errors
    /// As [`renew`](crate::Lease::renew).
    pub fn renew(&mut self, span: Duration) -> Result<(), LimitError> {
        self.wait(async |lease| lease.renew(span).await)
    }

    /// Ends the lease at the given units of the named limits, and at the held units of the others.
    ///
    /// # Errors
    /// As [`settle`](crate::Lease::settle).
    pub fn settle<'a>(&mut self, actual: impl AsRef<[(&'a str, u64)]>) -> Result<SettleStatus, LimitError> {
        self.wait(async |lease| lease.settle(actual).await)
    }

    /// Ends the lease at what it holds.
    ///
    /// # Errors
    /// As [`settle_full`](crate::Lease::settle_full).
    pub fn settle_full(&mut self) -> Result<SettleStatus, LimitError> {
        self.wait(async |lease| lease.settle_full().await)
    }

    /// Ends the lease as if it had never been drawn: all units return.
    ///
    /// # Errors
    /// As [`cancel`](crate::Lease::cancel).
    pub fn cancel(&mut self) -> Result<SettleStatus, LimitError> {
        self.wait(async |lease| lease.cancel().await)
    }

    /// Leaves the lease open, to be ended by its id or by its deadline.
    pub fn detach(self) {
        self.0.detach();
    }

    fn wait<T>(&mut self, step: impl AsyncFnOnce(&mut super::Lease) -> T) -> T {
        let shared = Arc::clone(&self.0.shared);
        shared.runtime.block_on(step(&mut self.0))
    }
}
