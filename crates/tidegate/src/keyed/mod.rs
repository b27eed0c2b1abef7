//! Many throttles by key: one for each host, account or tenant, made when it is first asked for.
//!
//! `registry.rs` finds a key's throttle, `rules.rs` says under which limits, `evict.rs` forgets the keys that hold nobody
//! back, `snapshot.rs` reads them all. What a throttle does is in the throttle.

mod builder;
mod events;
mod evict;
mod limits;
pub(crate) mod options;
mod registry;
mod rules;
mod snapshot;

use std::borrow::Borrow;
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
pub use events::{Evict, KeyedEvent, KeyedEvents, KeyedNotice};
pub use limits::Limits;
pub use options::{InvalidKeyedOptions, KeyedOptions};
pub use rules::NoRoom;
pub use snapshot::{KeyView, KeyedSnapshot, Snapshots};

use crate::permit::Permit;
use crate::run::{Attempt, RunError};
use crate::throttle::Throttle;
use registry::Registry;

/// A throttle for each key: one far side's trouble is no other's.
///
/// A key's throttle is made when it is first asked for. It is forgotten when nobody could tell the difference and room is
/// needed, or when nobody has asked for it in a long time; never while it holds somebody back. See
/// [the guide](crate::guide::keyed).
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
    /// Waits until every gate of `key` admits `cost`, then takes it. As [`Throttle::acquire`].
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
        let (cost, now) = (cost.into(), self.registry.clock().now());
        let inner = self.registry.find(key, now);
        let charge = match inner.enter_plain(cost, Some(now)) {
            Some(charge) => charge,
            None => inner.charge(cost, Some(now), None).await?,
        };
        Ok(Permit::owned(inner, charge))
    }

    /// [`acquire`](Self::acquire), but no longer than `span`. As [`Throttle::acquire_within`].
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
        let now = self.registry.clock().now();
        let inner = self.registry.find(key, now);
        let charge = inner.charge(cost.into(), Some(now), Some(span)).await?;
        Ok(Permit::owned(inner, charge))
    }

    /// Enters now or not at all. It does not overtake those who wait at the same key.
    ///
    /// # Errors
    /// [`Refused`], which says when to come back where time decides. Nothing was taken.
    #[inline]
    pub fn try_acquire<Q>(&self, key: &Q, cost: impl Into<Cost>) -> Result<Permit<'static>, Refused>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let (cost, now) = (cost.into(), self.registry.clock().now());
        let inner = self.registry.find(key, now);
        let charge = match inner.enter_plain(cost, Some(now)) {
            Some(charge) => charge,
            None => inner.try_charge(cost, Some(now))?,
        };
        Ok(Permit::owned(inner, charge))
    }

    /// [`acquire`](Self::acquire) for threads. Not for use inside an async runtime: it blocks the thread.
    ///
    /// # Errors
    /// As `acquire`.
    pub fn acquire_blocking<Q>(&self, key: &Q, cost: impl Into<Cost>) -> Result<Permit<'static>, Refused>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let now = self.registry.clock().now();
        let inner = self.registry.find(key, now);
        let charge = inner.charge_blocking(cost.into(), Some(now), None)?;
        Ok(Permit::owned(inner, charge))
    }

    /// Runs `work` under a permit of `key`, and again as the [`Retry`](crate::Retry) of its limits says. As [`Throttle::run`]:
    /// every error is a failure and worth another attempt, and every `Ok` is a success, whatever it holds.
    ///
    /// So most clients' responses are not read here: to them a 429 or a 503 is an `Ok`, from which nothing would be learned,
    /// neither that it was too much nor when to come back. For those take the throttle of the key and a
    /// [`Runner`](crate::Runner) that reads the whole result: [`classify`](crate::Runner::classify) by a function, and
    /// [`classified_by`](crate::Runner::classified_by) with `HttpClasses` by status and headers.
    ///
    /// ```
    /// use tidegate::{Authority, Class, Classes, Cost, Ended, Keyed};
    /// # async fn get(attempt: u32) -> Result<u16, std::io::Error> { Ok(if attempt == 0 { 503 } else { 200 }) }
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (hosts, host) = (Keyed::hosts().build()?, Authority::new("example.com")?);
    /// let classes = Classes::new();
    /// let throttle = hosts.throttle(&host);
    /// let status = throttle
    ///     .runner()
    ///     .classify(|reply: &Result<u16, _>| match reply {
    ///         Ok(status) => Class::of(&classes, Ended::Status(*status)),
    ///         Err(_) => Class::of(&classes, Ended::Connection),
    ///     })
    ///     .run(Cost::request(), |attempt| get(attempt.number))
    ///     .await?;
    /// assert_eq!(status, 200, "it was asked again");
    /// # Ok(())
    /// # }
    /// ```
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

    /// Learns from a request to `key` that had no permit, such as one that another program made. As [`Throttle::record`].
    pub fn record<Q>(&self, key: &Q, outcome: Outcome)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.throttle(key).record(outcome);
    }

    /// The throttle of `key`, for everything else a throttle can do. While a handle is kept the key is not forgotten.
    ///
    /// Limits that are changed through it last until those of all keys change or the key is forgotten; those of
    /// [`set_limits`](Self::set_limits) last. Where there is no room for the key, it is the throttle that such keys share.
    pub fn throttle<Q>(&self, key: &Q) -> Throttle
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let now = self.registry.clock().now();
        let inner = self.registry.find(key, now);
        // Asking for it counts, whatever comes of it.
        inner.touch(now);
        Throttle { inner }
    }

    /// The throttle of `key` if there is one: looking makes none, and does not count as asking for it.
    pub fn get<Q>(&self, key: &Q) -> Option<Throttle>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.registry.look_up(key).map(|inner| Throttle { inner })
    }

    /// Other limits for all keys but those with limits of their own. The function is asked outside all locks, as
    /// [`limits_by`](KeyedBuilder::limits_by) has it. The overflow entry keeps its limits: see
    /// [`set_overflow`](Self::set_overflow). What was changed for one key by [`Throttle::retune`] ends with this;
    /// [`set_limits`](Self::set_limits) lasts.
    ///
    /// Keys that somebody waits at or holds follow at once, the others when they are next asked for. Levels, requests
    /// in flight and circuits stay, and whoever waits keeps its place, as with [`Throttle::retune`].
    pub fn reconfigure(&self, by: impl Fn(&K) -> Limits + Send + Sync + 'static) {
        self.registry.rule_by(Arc::new(by));
    }

    /// Other limits for the overflow entry, which keys share for which there is no room.
    pub fn set_overflow(&self, limits: &Limits) {
        self.registry.rule_overflow(limits);
    }

    /// Limits of its own for one key, at once. It keeps them however often it is forgotten and comes back, until
    /// [`clear_limits`](Self::clear_limits).
    ///
    /// # Errors
    /// [`NoRoom`] when `keys_max` keys have limits of their own already; nothing was changed.
    pub fn set_limits(&self, key: &K, limits: Limits) -> Result<(), NoRoom> {
        self.registry.rule_one(key, Some(limits))
    }

    /// Takes its own limits from one key, at once: it follows those of all again.
    #[expect(clippy::missing_panics_doc, reason = "taking something away needs no room")]
    pub fn clear_limits(&self, key: &K) {
        self.registry.rule_one(key, None).expect("taking something away needs no room");
    }

    /// Turns the limits of all keys off or on, and answers what they were before.
    ///
    /// While they are off, everybody who waits or comes is let in and counted, nothing is taken, and outcomes are learned
    /// from as ever. Turned on again they go on from where they were. Closed keys stay closed.
    pub fn set_enabled(&self, is_enabled: bool) -> bool {
        self.registry.enable(is_enabled)
    }

    /// Whether the limits count.
    pub fn is_enabled(&self) -> bool {
        self.registry.is_enabled()
    }

    /// Takes no new requests for any key and refuses all who wait. Nothing re-opens it. Answers whether it was open.
    pub fn close(&self) -> bool {
        self.registry.close()
    }

    /// Closes, and waits until the last request in flight has ended.
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting; the keys stay closed.
    pub async fn drain(&self) {
        self.close();
        let held: Vec<_> = self.registry.held().map(|(_, inner)| inner).collect();
        for inner in held.into_iter().chain([Arc::clone(&self.registry.overflow)]) {
            Throttle { inner }.drain().await;
        }
    }

    /// How many keys have a throttle of their own, those included that are being made.
    pub fn len(&self) -> usize {
        self.registry.keys.load(Ordering::Acquire)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What happens to the keys from now on, for reading at leisure.
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
    /// let notice = events.try_next().expect("five in a row are too many");
    /// assert_eq!(notice.key, Some(host));
    /// assert!(matches!(notice.event, KeyedEvent::Throttle(Event::CircuitOpened { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn events(&self) -> KeyedEvents<K> {
        self.registry.sinks.subscribe()
    }

    /// Entries that calls have looked at on their way, to forget what is idle: at most eight each.
    #[doc(hidden)]
    pub fn examined(&self) -> u64 {
        self.registry.gone.examined.load(Ordering::Relaxed)
    }
}

impl<K> fmt::Debug for Keyed<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyed")
            .field("keys", &self.registry.keys.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}
