//! A store in a DynamoDB table.
//!
//! # Items
//! The keys of the table and of its three indexes, all of keys only, are in [`keys`]. A subject has one item with all its
//! limits, so that a draw from any number of them is one write:
//!
//! | attribute | meaning |
//! |---|---|
//! | `f:limit` | the time at which it is full, in microseconds times its amount: a whole number |
//! | `c:limit` | what was consumed |
//! | `r:limit` | its rule: version, amount, period, burst |
//! | `R` | a name of the rules, another one with each change |
//! | `o:lease` | an open lease whose home this is: step, times, units held |
//! | `e:lease` | an ended lease whose home this is: how, by which step, and the units used at every level |
//! | `O`, `E` | the number of `o:` and `e:` |
//! | `l:name` | levels that open leases name |
//! | `h` | the horizon: the ends of leases made up to this time may be counted |
//! | `n` | the number of writes |
//! | `GSI1PK`, `GSI1SK` | when the item is due: `DUE#part` and the time |
//! | `GSI2PK`, `GSI2SK` | `RESOURCE#resource` and `BUCKET#entity` |
//! | `ttl` | when the engine may delete the item |
//!
//! # Leases
//! The home of a lease is the item of the first of its levels. It has the mark of the lease; the items of the other levels
//! have only their limits.
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
//! A step with one level is an `UpdateItem` of the home. A step with several levels is a `TransactWriteItems` of the home
//! and the other levels, all or nothing. The mark is part of the condition, so a step that is repeated or arrives late
//! finds the mark of the first time, and changes nothing.
//!
//! The marks of ended leases are counted now and then: one transaction turns them into usage and tombstones, `LEASE#id`. A
//! draw of a lease that is not younger than the horizon, or whose id has no time, checks in its transaction that there is
//! no tombstone.
//!
//! Tables of older versions have open leases in `LEASE#id`, marks in the items of all levels, and attributes `x:lease` and
//! `a`. A lease is moved into its home by the first call that reads it; the sweep removes the rest.
//!
//! # Time
//! The engine has no clock that a condition could read. The time is the caller's, corrected by the dates of the engine's
//! responses. With clocks that differ by up to *s*, at most burst + rate·(*W* + *s*) is admitted in every span *W*: a clock
//! that is behind only denies, and one that is ahead admits early. The time that a request takes is part of *s*, because a
//! call is decided at the time at which it is sent. Within one process the limit is exact: calls that take units and calls
//! that return them take turns ([`phases`]).

mod cache;
mod clock;
mod count;
mod decide;
mod engine;
mod expression;
mod forms;
mod keys;
mod lease_item;
mod ledger;
mod lifecycle;
mod link;
mod marks;
mod options;
mod parts;
mod phases;
mod prune;
mod records;
mod step;
mod sweep;
mod table;
mod trouble;
mod view;
mod writes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

pub use options::DynamoDbOptions;

use crate::clock::WallClock;
use crate::error::StoreError;
use crate::retention::Retention;
use crate::sync::lock;
use cache::Cache;
use keys::Keys;
use link::Link;
use phases::Phases;
use view::View;

/// How often a process that draws sweeps, by default.
const SWEPT_EVERY: Duration = Duration::from_secs(5);
/// How many leases such a sweep ends.
const SWEPT_IN_PASSING: usize = 100;

/// A store in a DynamoDB table. Clones are the same store.
///
/// Several processes may use one table at once. What was answered survives them.
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
    link: Link,
    keys: Keys,
    cache: Cache,
    phases: Phases,
    clock: Arc<dyn WallClock>,
    deadline: Duration,
    /// The address has the option `speculative`, which is ignored.
    is_speculative_given: bool,
    retention: Retention,
    /// How long a bucket that was read may refuse without a request.
    rejected_for: Duration,
    /// Requests that were sent.
    requests: Arc<AtomicU64>,
    /// Refusals without a request.
    rejections: AtomicU64,
    /// A number of this handle.
    handle: u64,
    changes: AtomicU64,
    swept_every: Duration,
    swept: std::sync::Mutex<Instant>,
}

impl DynamoDb {
    /// Where it is.
    pub fn place(&self) -> &str {
        &self.inner.link.whose.place
    }

    /// Requests that this handle has sent so far.
    pub fn requests(&self) -> u64 {
        self.inner.requests.load(Ordering::Relaxed)
    }

    /// Refusals that this handle has [answered from memory](DynamoDbOptions::rejections) so far.
    pub fn rejections(&self) -> u64 {
        self.inner.rejections.load(Ordering::Relaxed)
    }

    /// When the engine may delete a subject's bucket, in seconds since 1970; `None` if never, or if there is none.
    ///
    /// # Errors
    /// What the engine says.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn expires_at(&self, subject: &Subject) -> Result<Option<u64>, StoreError> {
        let item = self.inner.link.get(&self.inner.keys.bucket(subject)).await?;
        Ok(View::read(item.as_ref())?.ttl)
    }

    fn now(&self) -> Stamp {
        self.inner.clock.now()
    }

    /// A name that no rules have had.
    fn epoch(&self) -> String {
        let inner = &self.inner;
        format!("{:x}.{:x}", inner.handle, inner.changes.fetch_add(1, Ordering::Relaxed))
    }

    /// What is done within the time that an answer is waited for.
    async fn within<T>(&self, work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let timeout = self.inner.link.timeout;
        // A little longer, so that the error of the last attempt is returned.
        match tokio::time::timeout(timeout + timeout / 4, work).await {
            Ok(answer) => answer,
            Err(_) => {
                Err(StoreError::TimedOut { millis: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX) })
            }
        }
    }

    /// Sweeps in the background, if this process has not for a while.
    fn sweep_now_and_then(&self) {
        {
            let mut swept = lock(&self.inner.swept);
            if swept.elapsed() < self.inner.swept_every {
                return;
            }
            *swept = Instant::now();
        }
        let store = self.clone();
        // If it fails, the next one tries again.
        tokio::spawn(async move { drop(store.sweep_up_to(SWEPT_IN_PASSING).await) });
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
