//! A store on Redis or Valkey: one server, one that sentinels watch, or a cluster.
//!
//! Each step of a lease is one script call, which reads the server's clock once and decides all limits of all
//! levels, the lease and the ledger ([`steps`](self)). Concurrent steps are sent in batches
//! ([`batcher`](self)). Policies may be on another server of a cluster than buckets, so that callers send the
//! rules that they resolved and their version. Scripts use no modules, and are sent again to a server that
//! has lost them.

mod batch_call;
mod batcher;
mod connection;
mod engine;
mod errors;
mod housekeeping;
mod index;
mod keyspace;
mod leases;
mod ledger;
mod levels;
mod lifecycle;
mod listen;
mod lua_codec;
mod options;
mod records;
mod repair;
mod schema;
mod script;
mod steps;
mod usage;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

pub use options::RedisOptions;
pub use repair::RepairReport;

use crate::retention::Retention;
use crate::sync::lock;
use batcher::Batchers;
use connection::Connection;
use keyspace::Keyspace;
use levels::LevelsCache;
use listen::{ChangeListener, ChangeSource};
use records::META;

/// The default interval at which a process that draws ends leases past their deadline.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// The most leases that a sweep in the background ends.
const BACKGROUND_SWEEP_MAX: usize = 1_000;

/// A store on Redis or Valkey. Clones are the same store.
///
/// Several processes may share a server. Acknowledged writes survive these processes; whether they survive
/// the server depends on its settings. A primary that is lost takes the writes with it that its replica had
/// not received.
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
    connection: Connection,
    keyspace: Keyspace,
    levels_cache: LevelsCache,
    batchers: Batchers,
    /// The runtime on which the store was opened.
    runtime: Option<Handle>,
    deadline: Duration,
    retention: Retention,
    /// A warning about server settings that may break guarantees.
    caution: Option<String>,
    /// Identifies this handle, and with the counter each of its changes.
    handle: u128,
    changes: AtomicU64,
    swept_every: Duration,
    last_sweep: std::sync::Mutex<Instant>,
    listener: OnceLock<ChangeListener>,
}

/// The settings of a store besides its connection.
struct Settings {
    deadline: Duration,
    retention: Retention,
    swept_every: Duration,
    caution: Option<String>,
}

impl Redis {
    fn new(
        (connection, change_source): (Connection, ChangeSource),
        keyspace: Keyspace,
        options: Settings,
    ) -> Self {
        let inner = Inner {
            connection,
            keyspace,
            levels_cache: LevelsCache::default(),
            deadline: options.deadline,
            retention: options.retention,
            swept_every: options.swept_every,
            caution: options.caution,
            batchers: Batchers::new(options.deadline),
            runtime: Handle::try_current().ok(),
            handle: random(),
            changes: AtomicU64::new(0),
            last_sweep: std::sync::Mutex::new(Instant::now()),
            listener: OnceLock::new(),
        };
        let store = Self { inner: Arc::new(inner) };
        let (inner, timeout) = (Arc::downgrade(&store.inner), store.inner.connection.context().timeout);
        store
            .inner
            .listener
            .get_or_init(|| ChangeListener::open(change_source, inner, store.channel(), timeout));
        store
    }

    /// The address, without the password.
    pub fn place(&self) -> &str {
        &self.inner.connection.context().place
    }

    /// The id of the next change: a commit that is retried is recognized by it.
    fn next_change(&self) -> String {
        let inner = &self.inner;
        format!("{:032x}-{}", inner.handle, inner.changes.fetch_add(1, Ordering::Relaxed))
    }

    /// The pub/sub channel of changes.
    fn channel(&self) -> String {
        self.inner.keyspace.admin("changed")
    }

    /// Starts a sweep in the background if the interval since the last one has passed.
    fn sweep_if_due(&self) {
        {
            let mut last_sweep = lock(&self.inner.last_sweep);
            if last_sweep.elapsed() < self.inner.swept_every {
                return;
            }
            *last_sweep = Instant::now();
        }
        let store = self.clone();
        // The next sweep retries after a failure.
        tokio::spawn(async move { drop(store.sweep_in_background(BACKGROUND_SWEEP_MAX).await) });
    }
}

/// A random number: two hashers of this process have keys of their own.
fn random() -> u128 {
    use std::hash::{BuildHasher, RandomState};
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    (half() << 64) | half()
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("place", &self.place())
            .field("namespace", &self.inner.keyspace.admin(META))
            .finish_non_exhaustive()
    }
}
