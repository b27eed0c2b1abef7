//! Throttles by key: one for each host, account or tenant, created on first use.
//!
//! `registry.rs` finds the entry of a key in a `shard.rs`, permits refer to it by a `key_ref.rs`, `rules.rs` holds the limits of each key, `evict.rs` evicts
//! keys, and `snapshot.rs` reads all of them.

mod builder;
mod events;
mod evict;
pub(crate) mod key_ref;
mod limits;
pub(crate) mod options;
mod registry;
mod rules;
mod shard;
mod snapshot;

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::cost::Cost;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;

pub use builder::KeyedBuilder;
pub use events::{EvictCause, KeyedEvent, KeyedEvents, KeyedNotice};
pub use limits::Limits;
pub use options::{InvalidKeyedOptions, KeyedOptions};
pub use rules::TooManyOwnLimits;
pub use snapshot::{KeyView, KeyedSnapshot, Snapshots};

use crate::acquire::cooperate;
use crate::permit::Permit;
use crate::run::{Attempt, EveryError, RunError, Runner};
use crate::throttle::Throttle;
use registry::Registry;
use shard::Entered;

/// A throttle for each key, so that one upstream's failures do not affect another's requests.
///
/// A key's throttle is created on first use. It is evicted if its state carries no information and space is
/// needed, or if it was unused for a long time; never while it holds back a caller. See [the
/// guide](crate::guide::keyed).
///
/// Clones are handles to the same keys. A key may be looked up by what it borrows as: a `Keyed<String>` takes `&str`.
///
/// ```
/// use tidegate::{Cost, Keyed, Outcome, Rate, Throttle};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Throttle::builder().rate(Rate::per_second(2)).limits()?;
/// let users: Keyed<String> = Keyed::builder(limits).build()?;
///
/// let permit = users.acquire("ann", Cost::request()).await?;
/// permit.settle(Outcome::success());
/// assert!(users.try_acquire("bob", Cost::request()).is_ok(), "bob has a rate of his own");
/// assert_eq!(users.snapshot(10).keys, 2);
/// # Ok(())
/// # }
/// ```
pub struct Keyed<K> {
    registry: Arc<Registry<K>>,
}

impl<K> Clone for Keyed<K> {
    fn clone(&self) -> Self {
        Self { registry: Arc::clone(&self.registry) }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// Waits until every gate of `key` admits `cost`, then takes it, as [`Throttle::acquire`].
    ///
    /// # Errors
    /// As [`Throttle::acquire`].
    ///
    /// # Cancel safety
    /// As [`Throttle::acquire`].
    pub async fn acquire<Q>(&self, key: &Q, cost: impl Into<Cost>) -> Result<Permit<'static>, Refused>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        cooperate().await;
        let (cost, now) = (cost.into(), self.registry.clock().now());
        let inner = match self.registry.enter(key, cost.is_plain(), now) {
            Entered::Admitted(key, admission) => return Ok(Permit::of_key(key, admission.charge(cost))),
            Entered::Throttle(inner) => inner,
        };
        let charge = match inner.enter_plain(cost, Some(now)) {
            Some(charge) => charge,
            None => inner.charge(cost, Some(now), None).await?,
        };
        Ok(Permit::owned(inner, charge))
    }

    /// [`acquire`](Self::acquire) with a timeout of `span`, as [`Throttle::acquire_within`].
    ///
    /// # Errors
    /// As [`Throttle::acquire_within`].
    ///
    /// # Cancel safety
    /// As [`Throttle::acquire`].
    pub async fn acquire_within<Q>(
        &self,
        key: &Q,
        cost: impl Into<Cost>,
        span: Duration,
    ) -> Result<Permit<'static>, Refused>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        cooperate().await;
        let (cost, now) = (cost.into(), self.registry.clock().now());
        let inner = match self.registry.enter(key, cost.is_plain(), now) {
            Entered::Admitted(key, admission) => return Ok(Permit::of_key(key, admission.charge(cost))),
            Entered::Throttle(inner) => inner,
        };
        let charge = inner.charge(cost, Some(now), Some(span)).await?;
        Ok(Permit::owned(inner, charge))
    }

    /// Acquires now or fails. It does not overtake waiters of the same key.
    ///
    /// # Errors
    /// [`Refused`], with a retry time where time decides. Nothing was taken.
    #[inline]
    pub fn try_acquire<Q>(&self, key: &Q, cost: impl Into<Cost>) -> Result<Permit<'static>, Refused>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let (cost, now) = (cost.into(), self.registry.clock().now());
        let inner = match self.registry.enter(key, cost.is_plain(), now) {
            Entered::Admitted(key, admission) => return Ok(Permit::of_key(key, admission.charge(cost))),
            Entered::Throttle(inner) => inner,
        };
        let charge = match inner.enter_plain(cost, Some(now)) {
            Some(charge) => charge,
            None => inner.try_charge(cost, Some(now))?,
        };
        Ok(Permit::owned(inner, charge))
    }

    /// [`acquire`](Self::acquire) for threads. Do not call it inside an async runtime: it blocks the thread.
    ///
    /// # Errors
    /// As `acquire`.
    pub fn acquire_blocking<Q>(&self, key: &Q, cost: impl Into<Cost>) -> Result<Permit<'static>, Refused>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let (cost, now) = (cost.into(), self.registry.clock().now());
        let inner = match self.registry.enter(key, cost.is_plain(), now) {
            Entered::Admitted(key, admission) => return Ok(Permit::of_key(key, admission.charge(cost))),
            Entered::Throttle(inner) => inner,
        };
        let charge = inner.charge_blocking(cost, Some(now), None)?;
        Ok(Permit::owned(inner, charge))
    }

    /// Runs `work` under a permit of `key`, with retries according to the [`Retry`](crate::Retry) of its
    /// limits. As [`Throttle::run`]: every error is a retryable failure, and every `Ok` is a success,
    /// whatever it contains.
    ///
    /// Responses of most HTTP clients are therefore not classified here: a 429 or a 503 is an `Ok`, and
    /// neither the overload nor its retry time is learned. For those use a [`runner`](Self::runner) that
    /// classifies the whole result.
    ///
    /// # Errors
    /// As [`Throttle::run`].
    ///
    /// # Cancel safety
    /// As [`Throttle::run`].
    pub async fn run<Q, T, E, F, W>(&self, key: &Q, cost: impl Into<Cost>, work: F) -> Result<T, RunError<E>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
        F: FnMut(Attempt) -> W,
        W: Future<Output = Result<T, E>>,
    {
        self.throttle(key).run(cost, work).await
    }

    /// A runner for `key` with the [`Retry`](crate::Retry) of its limits. To classify whole results, use
    /// [`classify`](Runner::classify) with a function, or [`classified_by`](Runner::classified_by) with
    /// `HttpClasses` by status and headers. It keeps the key alive.
    ///
    /// ```
    /// use tidegate::{Authority, Class, Classes, Completion, Cost, Keyed};
    /// # async fn get(attempt: u32) -> Result<u16, std::io::Error> { Ok(if attempt == 0 { 503 } else { 200 }) }
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (hosts, host) = (Keyed::hosts().build()?, Authority::new("example.com")?);
    /// let classes = Classes::new();
    /// let status = hosts
    ///     .runner(&host)
    ///     .classify(|reply: &Result<u16, _>| match reply {
    ///         Ok(status) => Class::of(&classes, Completion::Status(*status)),
    ///         Err(_) => Class::of(&classes, Completion::Connection),
    ///     })
    ///     .run(Cost::request(), |attempt| get(attempt.number))
    ///     .await?;
    /// assert_eq!(status, 200, "the 503 was retried");
    /// # Ok(())
    /// # }
    /// ```
    pub fn runner<Q>(&self, key: &Q) -> Runner<'static, EveryError>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let throttle = self.throttle(key);
        Runner { retry: throttle.retry_rule(), source: Cow::Owned(throttle), classify: EveryError }
    }

    /// [`run`](Self::run) for blocking code, as [`Throttle::run_blocking`].
    ///
    /// # Errors
    /// As [`Throttle::run`].
    pub fn run_blocking<Q, T, E>(
        &self,
        key: &Q,
        cost: impl Into<Cost>,
        work: impl FnMut(Attempt) -> Result<T, E>,
    ) -> Result<T, RunError<E>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.throttle(key).run_blocking(cost, work)
    }

    /// Learns from a request to `key` that had no permit, such as one by another program. As
    /// [`Throttle::record`].
    pub fn record<Q>(&self, key: &Q, outcome: Outcome)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.throttle(key).record(outcome);
    }

    /// The throttle of `key`, for all other operations of a throttle. The key is not evicted while a handle
    /// exists.
    ///
    /// Limits changed through it last until the limits of all keys change or the key is evicted; those of
    /// [`set_limits`](Self::set_limits) last. If the registry is full, this is the overflow throttle.
    pub fn throttle<Q>(&self, key: &Q) -> Throttle
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let now = self.registry.clock().now();
        let inner = self.registry.find(key, now);
        // The lookup counts as use, whatever the caller does with the handle.
        inner.touch(now);
        Throttle { inner }
    }

    /// The throttle of `key` if there is one. This creates none, and does not count as use.
    pub fn get<Q>(&self, key: &Q) -> Option<Throttle>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.registry.look_up(key).map(|inner| Throttle { inner })
    }

    /// Replaces the limits of all keys except those with their own limits. The function is called outside all
    /// locks, as for [`limits_by`](KeyedBuilder::limits_by). The overflow throttle keeps its limits: see
    /// [`set_overflow`](Self::set_overflow). Changes to one key by [`Throttle::retune`] are overwritten;
    /// [`set_limits`](Self::set_limits) lasts.
    ///
    /// Keys with waiters or handles follow at once, the others on their next use. Levels, requests in flight
    /// and circuits stay, and waiters keep their place, as with [`Throttle::retune`].
    pub fn reconfigure(&self, by: impl Fn(&K) -> Limits + Send + Sync + 'static) {
        self.registry.set_rule(Arc::new(by));
    }

    /// Replaces the limits of the overflow throttle, which new keys share while the registry is full.
    pub fn set_overflow(&self, limits: &Limits) {
        self.registry.set_overflow(limits);
    }

    /// Sets limits for one key, at once. They survive evictions of the key, until
    /// [`clear_limits`](Self::clear_limits).
    ///
    /// # Errors
    /// [`TooManyOwnLimits`] when `keys_max` keys already have their own limits; nothing was changed.
    pub fn set_limits<Q>(&self, key: &Q, limits: Limits) -> Result<(), TooManyOwnLimits>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.registry.set_own_limits(key, Some(limits))
    }

    /// Removes the key's own limits, at once: it follows the limits of all keys again.
    #[expect(clippy::missing_panics_doc, reason = "removing limits needs no space")]
    pub fn clear_limits<Q>(&self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.registry.set_own_limits(key, None).expect("removing limits needs no space");
    }

    /// Turns the limits of all keys off or on, and returns the previous setting.
    ///
    /// While they are off, every waiter and new caller is admitted and counted, nothing is taken, and
    /// outcomes are still learned. When turned on again they continue from their previous state. Closed keys
    /// stay closed.
    pub fn set_enabled(&self, is_enabled: bool) -> bool {
        self.registry.enable(is_enabled)
    }

    /// Whether the limits apply.
    pub fn is_enabled(&self) -> bool {
        self.registry.is_enabled()
    }

    /// Refuses new requests of all keys and all waiters. It cannot be re-opened. Returns whether it was open.
    pub fn close(&self) -> bool {
        self.registry.close()
    }

    /// Closes, and waits until the last request in flight has completed.
    ///
    /// # Cancel safety
    /// Dropping the future stops waiting; the keys stay closed.
    pub async fn drain(&self) {
        self.close();
        let in_use: Vec<_> = self.registry.in_use().map(|(_, inner)| inner).collect();
        for inner in in_use.into_iter().chain([Arc::clone(&self.registry.overflow)]) {
            Throttle { inner }.drain().await;
        }
    }

    /// The number of keys with their own throttle, including those being created.
    pub fn len(&self) -> usize {
        self.registry.keys.load(Ordering::Acquire)
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Subscribes to the events of all keys from now on.
    ///
    /// ```
    /// use tidegate::{Event, Keyed, KeyedEvent, Outcome};
    ///
    /// let hosts = Keyed::hosts().build()?;
    /// let mut events = hosts.events();
    /// let host = tidegate::Authority::new("example.com")?;
    /// for _ in 0..5 {
    ///     hosts.record(&host, Outcome::failure());
    /// }
    /// let notice = events.try_next().expect("five failures in a row open the circuit");
    /// assert_eq!(notice.key, Some(host));
    /// assert!(matches!(notice.event, KeyedEvent::Throttle(Event::CircuitOpened { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn events(&self) -> KeyedEvents<K> {
        self.registry.sinks.subscribe()
    }

    /// Entries examined by calls to evict idle keys: at most eight per call.
    #[doc(hidden)]
    pub fn examined(&self) -> u64 {
        self.registry.evictions.examined.load(Ordering::Relaxed)
    }
}

impl<K> fmt::Debug for Keyed<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyed")
            .field("keys", &self.registry.keys.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}
