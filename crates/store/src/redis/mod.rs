//! A store on Redis or Valkey: one server, one that sentinels watch, or a cluster.
//!
//! A draw is one call of one script, and so is every other step of a lease: all limits of all levels, the lease and the
//! ledger are decided and written together, at one reading of the server's clock ([`steps`](self)). Steps of many callers go
//! together ([`lanes`](self)). Policies are not where
//! buckets are, so that whoever draws brings the rules he resolved and their version. Scripts take no modules, and a
//! server that has lost them is sent them again.

mod engine;
mod index;
mod lanes;
mod leases;
mod ledger;
mod levels;
mod lifecycle;
mod link;
mod listen;
mod options;
mod pack;
mod places;
mod records;
mod repair;
mod schema;
mod script;
mod steps;
mod tallies;
mod tend;
mod together;
mod trouble;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

pub use options::RedisOptions;
pub use repair::Repaired;

use crate::retention::Retention;
use crate::sync::lock;
use lanes::Lanes;
use levels::Encodings;
use link::Link;
use listen::{Ear, Speaker};
use places::Places;
use records::META;

/// How often a process that draws looks for leases that are past their deadline, unless said otherwise.
const SWEPT_EVERY: Duration = Duration::from_secs(5);
/// As many as it then ends.
const SWEPT_IN_PASSING: usize = 1_000;

/// A store on Redis or Valkey. Clones are the same store.
///
/// Several processes may use one server at once. What was answered survives these processes; whether it survives the
/// server is for the server's own settings to say, and a primary that is lost takes along what its replica had not heard of.
///
/// ```no_run
/// use tidegate_store::{RedisOptions, Store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate_store::StoreError> {
/// let store = RedisOptions::new("redis://localhost:6379").namespace("prod").open().await?;
/// assert_eq!(store.capabilities().engine, "redis");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Redis {
    inner: Arc<Inner>,
}

struct Inner {
    link: Link,
    places: Places,
    encodings: Encodings,
    lanes: Lanes,
    /// Where it was opened.
    runtime: Option<Handle>,
    deadline: Duration,
    retention: Retention,
    /// What the engine's settings may break.
    caution: Option<String>,
    /// Tells this handle from others, and its changes from each other.
    handle: u128,
    changes: AtomicU64,
    swept_every: Duration,
    swept: std::sync::Mutex<Instant>,
    ear: OnceLock<Ear>,
}

/// What a store is opened with beside the way to its engine.
struct Opened {
    deadline: Duration,
    retention: Retention,
    swept_every: Duration,
    caution: Option<String>,
}

impl Redis {
    fn new((link, speaker): (Link, Speaker), places: Places, options: Opened) -> Self {
        let inner = Inner {
            link,
            places,
            encodings: Encodings::default(),
            deadline: options.deadline,
            retention: options.retention,
            swept_every: options.swept_every,
            caution: options.caution,
            lanes: Lanes::new(options.deadline),
            runtime: Handle::try_current().ok(),
            handle: random(),
            changes: AtomicU64::new(0),
            swept: std::sync::Mutex::new(Instant::now()),
            ear: OnceLock::new(),
        };
        let store = Self { inner: Arc::new(inner) };
        let (inner, timeout) = (Arc::downgrade(&store.inner), store.inner.link.whose().timeout);
        store.inner.ear.get_or_init(|| Ear::open(speaker, inner, store.channel(), timeout));
        store
    }

    /// Where it is, without its password.
    pub fn place(&self) -> &str {
        &self.inner.link.whose().place
    }

    /// What the next change is known by.
    fn next_change(&self) -> String {
        let inner = &self.inner;
        format!("{:032x}-{}", inner.handle, inner.changes.fetch_add(1, Ordering::Relaxed))
    }

    /// Where changes are announced.
    fn channel(&self) -> String {
        self.inner.places.admin("changed")
    }

    /// Ends leases that are past their deadline in the background, and looks after the rest, if nobody has for a while.
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
        tokio::spawn(async move { drop(store.sweep_in_passing(SWEPT_IN_PASSING).await) });
    }
}

/// A number that no other process has: two hashers of this one have keys of their own.
fn random() -> u128 {
    use std::hash::{BuildHasher, RandomState};
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    (half() << 64) | half()
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("place", &self.place())
            .field("namespace", &self.inner.places.admin(META))
            .finish_non_exhaustive()
    }
}
