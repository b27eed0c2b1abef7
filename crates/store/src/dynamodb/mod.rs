//! A store in a DynamoDB table.
//!
//! # The items
//! The table's keys and its three indexes, all of them of keys only, are in [`keys`]. A subject has one item with all its
//! limits, so that a draw of any number of them is one write:
//!
//! | attribute | what |
//! |---|---|
//! | `f:limit` | when it is full, in microseconds times its amount: a whole number |
//! | `c:limit` | what it has consumed |
//! | `r:limit` | its rule: version, amount, period, burst |
//! | `R` | names the rules; another name with each of their changes |
//! | `o:lease` | an open lease that drew from it: level, step, times, what it holds |
//! | `e:lease` | one that has ended: how, by which step, and what of it is to be counted |
//! | `x:lease` | a draw that was taken back: up to this attempt it comes too late |
//! | `O`, `E` | how many `o:` and `e:` there are |
//! | `l:name` | the levels that open leases name |
//! | `h` | the horizon: leases made up to this time may be in items of their own |
//! | `a` | the second by which all of those are due that are open: the item is kept until then |
//! | `n` | counts the writes |
//! | `GSI1PK`, `GSI1SK` | when the item is to be looked at: `DUE#part` and the time |
//! | `GSI2PK`, `GSI2SK` | `RESOURCE#resource` and `BUCKET#entity` |
//! | `ttl` | when the engine may forget it |
//!
//! # A lease
//! ```text
//!                   draw: o: in every item                settle, cancel, deadline: e: for o: in every item
//!      (nothing) ──────────────────────────────▶ open ──────────────────────────────────────────────────▶ ended
//!          │                                     │  ▲                                                       │
//!          │ cancel: e: in every item            └──┘ extend, adjust, renew: another o:, if it is the same  │
//!          └──────────────────────────────────────────────────────────────────────────────────▶ ended      │
//!                                                                                                           │
//!                        counted: usage added, e: removed, `LEASE#id` written for ten minutes, h raised ◀───┘
//! ```
//! A write has the marks of its lease in its condition. One that is made again, or arrives late, finds the mark of the first
//! time and changes nothing, for the mark of the end stays where the draw would write. When that mark is taken out of the
//! item, because it is counted or there are too many, the horizon is raised in the same write: a draw whose lease is no
//! younger than that is not decided by the item alone, but together with the item of the lease (`apart`).
//!
//! A draw of several levels is one write for each, at once, and where one of them is refused the others are taken back, each
//! by its mark. Every other step of a lease of several levels is one transaction. Whoever sees the engine fail in between
//! leaves marks; they have the deadline of the lease, and are taken back then where the lease never came to be.
//!
//! Where a lease is kept in an item of its own, because its bucket has too many open ones or the horizon has passed it, all
//! of its steps are transactions of its item, its buckets and its usage.
//!
//! # Time
//! The engine tells no time, so that it is the caller's, corrected by the dates of the engine's answers. With clocks that are
//! apart by up to *s*, what is admitted in every span *W* is at most burst + rate·(*W* + *s*): a clock that is behind only
//! denies, and one that is ahead brings forward what comes anyway. So is a call that takes long: the time that it is decided
//! at is that of its sending. Within one process it is exact nevertheless, because there those who ask and those who give back
//! take turns ([`phases`]).

mod apart;
mod cache;
mod clock;
mod count;
mod decide;
mod draw;
mod entities;
mod expression;
mod forms;
mod keys;
mod ledger;
mod lifecycle;
mod link;
mod log;
mod marks;
mod options;
mod parts;
mod phases;
mod policies;
mod prune;
mod shards;
mod step;
mod steps;
mod stream;
mod sweep;
mod table;
mod tokens;
mod trouble;
mod undo;
mod view;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

pub use options::DynamoDbOptions;

use crate::aggregate::{AggregateOptions, Aggregator};
use crate::clock::WallClock;
use crate::error::StoreError;
use crate::reply::Reply;
use crate::store::{Capabilities, Clocked, Store, Swept};
use crate::sync::lock;
use cache::Cache;
use keys::Keys;
use link::Link;
use phases::Phases;
use view::View;

/// How often a process that draws looks for leases that are past their deadline, unless said otherwise.
const SWEPT_EVERY: Duration = Duration::from_secs(5);
/// As many as it then ends.
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
    is_speculative: bool,
    deadline: Duration,
    /// How long what was read refuses without asking.
    rejected_for: Duration,
    /// Requests that were sent.
    requests: Arc<AtomicU64>,
    /// Refusals for which none was.
    rejections: AtomicU64,
    /// The version that policies were read beside last.
    policies_at: AtomicU64,
    /// Tells this handle from others.
    handle: u64,
    changes: AtomicU64,
    attempts: AtomicU64,
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

    /// When the engine may forget a subject's bucket, in seconds since 1970; `None` where it never does, or there is none.
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

    /// A number above those of all attempts before it.
    fn attempt(&self) -> u64 {
        let now = self.now().as_micros();
        let next = |last: u64| Some(now.max(last + 1));
        let attempts = &self.inner.attempts;
        let last = attempts.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).unwrap_or(now);
        now.max(last + 1)
    }

    /// What is done within the time that an answer is waited for.
    async fn within<T>(&self, work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let timeout = self.inner.link.timeout;
        // A little more: whoever runs out of patience tells why.
        match tokio::time::timeout(timeout + timeout / 4, work).await {
            Ok(answer) => answer,
            Err(_) => {
                Err(StoreError::TimedOut { millis: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX) })
            }
        }
    }

    /// Ends leases that are past their deadline in the background, if nobody has for a while.
    fn sweep_now_and_then(&self) {
        {
            let mut swept = lock(&self.inner.swept);
            if swept.elapsed() < self.inner.swept_every {
                return;
            }
            *swept = Instant::now();
        }
        let store = self.clone();
        // Where it fails, the next one tries again.
        tokio::spawn(async move { drop(store.sweep_up_to(SWEPT_IN_PASSING).await) });
    }
}

impl Store for DynamoDb {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            engine: "dynamodb",
            is_immediate: false,
            is_durable: true,
            clock: Clocked::Caller,
            deadline: self.inner.deadline,
        }
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        Reply::later(self.sweep_up_to(max))
    }

    fn aggregator(&self, options: &AggregateOptions) -> Option<Arc<dyn Aggregator>> {
        Some(Arc::new(worker::Worker::new(self.clone(), *options)))
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
