//! A store in a DynamoDB table.
//!
//! # Items
//! The keys of the table and of its three indexes, all of keys only, are in [`keys`]. A subject has one item
//! with all its limits, so that a draw from any number of them is one write:
//!
//! | attribute | meaning |
//! |---|---|
//! | `f:limit` | the time at which it is full, in microseconds times its amount: an integer |
//! | `c:limit` | the units consumed |
//! | `r:limit` | its rule: version, amount, period, burst |
//! | `R` | the name of the rules, which changes with them |
//! | `o:lease` | an open lease whose home this is: step, times, units held |
//! | `e:lease` | an ended lease whose home this is: how, by which step, and the units used at every level |
//! | `O`, `E` | the number of `o:` and `e:` |
//! | `l:name` | levels that open leases refer to |
//! | `h` | the horizon: the ends of leases made up to this time may be counted |
//! | `n` | the number of writes |
//! | `GSI1PK`, `GSI1SK` | when the item is due: `DUE#part` and the time |
//! | `GSI2PK`, `GSI2SK` | `RESOURCE#resource` and `BUCKET#entity` |
//! | `ttl` | when the engine may delete the item |
//!
//! # Leases
//! The home of a lease is the item of the first of its levels. It has the mark of the lease; the items of the
//! other levels have only their limits.
//! ```text
//!            draw: o: is written                   settle, cancel, deadline: e: replaces o:
//! (nothing) ────────────────────▶ open ──────────────────────────────────────────────────────▶ ended
//!     │                           │  ▲                                                           │
//!     │                           └──┘ extend, adjust, renew: another o:                         │
//!     └───────────────────────────────────────────────────────────────────────────────▶ ended    │
//!            cancel before the draw: e: is written                                               │
//!                                                                                                ▼
//!                     counted: e: is removed, usage added, LEASE#id written for ten minutes, h raised
//! ```
//! A step with one level is an `UpdateItem` of the home. A step with several levels is a `TransactWriteItems`
//! of the home and the other levels, all or nothing. The mark is part of the condition, so a step that is
//! repeated or arrives late finds the mark of the first time, and changes nothing.
//!
//! The marks of ended leases are counted at intervals: one transaction turns them into usage and tombstones,
//! `LEASE#id`. A draw of a lease that is not younger than the horizon, or whose id has no time, checks in its
//! transaction that there is no tombstone.
//!
//! Tables of older versions have open leases in `LEASE#id`, marks in the items of all levels, and attributes
//! `x:lease` and `a`. A lease is moved into its home by the first call that reads it; the sweep removes the
//! rest.
//!
//! # Time
//! Conditions cannot read a clock of the engine. The time is the caller's, corrected by the dates of the
//! engine's responses. With clocks that differ by up to *s*, at most burst + rate·(*W* + *s*) is admitted in
//! every window *W*: a clock that is behind only denies, and one that is ahead admits early. The duration of
//! a request is part of *s*, because a call is decided at the time at which it is sent. Within one process
//! the limit is exact, because calls that take units and calls that return them exclude each other
//! ([`group_lock`]).

mod bucket_update;
mod bucket_view;
mod cache;
mod client;
mod clock;
mod count;
mod engine;
mod errors;
mod expression;
mod group_lock;
mod keys;
mod lease_item;
mod lease_marks;
mod ledger;
mod lifecycle;
mod options;
mod prune;
mod records;
mod snapshot;
mod step;
mod sweep;
mod table;
mod writes;
mod zae_limiter;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

pub use options::DynamoDbOptions;

use crate::background::{SweepTimer, UniqueNames};
use crate::clock::WallClock;
use crate::error::StoreError;
use bucket_view::BucketView;
use cache::Cache;
use client::TableClient;
use group_lock::GroupLock;
use keys::Keys;

/// The most leases that a sweep in the background ends: more than a process draws between two sweeps.
const BACKGROUND_SWEEP_MAX: usize = 10_000;

/// A store in a DynamoDB table. Clones are the same store.
///
/// Several processes may share a table. Acknowledged writes survive them.
///
/// ```no_run
/// use tidegate_store::{DynamoDbOptions, Store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate_store::StoreError> {
/// let store = DynamoDbOptions::new("limits").region("eu-central-1").namespace("prod").open().await?;
/// assert_eq!(store.capabilities().engine, "dynamodb");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DynamoDb {
    inner: Arc<Inner>,
}

struct Inner {
    client: TableClient,
    keys: Keys,
    cache: Cache,
    group_lock: GroupLock,
    clock: Arc<dyn WallClock>,
    options: DynamoDbOptions,
    /// Requests that were sent.
    requests: Arc<AtomicU64>,
    /// Refusals without a request.
    rejections: AtomicU64,
    /// Names that no rules have had.
    epochs: UniqueNames,
    sweep_timer: SweepTimer,
}

impl DynamoDb {
    /// The address.
    pub fn place(&self) -> &str {
        &self.inner.client.context.place
    }

    /// Requests that this handle has sent so far.
    pub fn requests(&self) -> u64 {
        self.inner.requests.load(Ordering::Relaxed)
    }

    /// Refusals without a request by this handle, [from its cache](DynamoDbOptions::rejections), so far.
    pub fn rejections(&self) -> u64 {
        self.inner.rejections.load(Ordering::Relaxed)
    }

    /// When the engine may delete a subject's bucket, in seconds since 1970; `None` if never, or if there is
    /// none.
    ///
    /// # Errors
    /// Errors of the engine.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn expires_at(&self, subject: &Subject) -> Result<Option<u64>, StoreError> {
        let item = self.inner.client.get(&self.inner.keys.bucket(subject)).await?;
        Ok(BucketView::read(item.as_ref())?.ttl)
    }

    fn now(&self) -> Stamp {
        self.inner.clock.now()
    }

    /// Runs `work` within the timeout of calls.
    async fn with_timeout<T>(
        &self,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let timeout = self.inner.client.timeout;
        // A little longer, so that the error of the last attempt is returned.
        match tokio::time::timeout(timeout + timeout / 4, work).await {
            Ok(answer) => answer,
            Err(_) => {
                Err(StoreError::TimedOut { millis: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX) })
            }
        }
    }

    /// Starts a sweep in the background if the interval since the last one has passed.
    fn sweep_if_due(&self) {
        let Some(guard) = self.inner.sweep_timer.begin() else { return };
        let store = self.clone();
        tokio::spawn(async move {
            // The next sweep retries after a failure.
            drop(store.sweep_up_to(BACKGROUND_SWEEP_MAX).await);
            drop(guard);
        });
    }
}

impl fmt::Debug for DynamoDb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoDb")
            .field("place", &self.place())
            .field("keys", &self.inner.keys)
            .finish_non_exhaustive()
    }
}
