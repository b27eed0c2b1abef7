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
use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

pub use options::RedisOptions;
pub use repair::RepairReport;

use crate::background::{SweepTimer, UniqueNames};
use batcher::Batchers;
use connection::Connection;
use keyspace::Keyspace;
use levels::LevelsCache;
use listen::{ChangeListener, ChangeSource};
use records::META;

/// The most leases that a sweep in the background ends: more than a process draws between two sweeps.
const BACKGROUND_SWEEP_MAX: usize = 100_000;

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
    options: RedisOptions,
    /// A warning about server settings that may break guarantees.
    caution: Option<String>,
    /// The ids of changes: a commit that is retried is recognized by its id.
    change_ids: UniqueNames,
    sweep_timer: SweepTimer,
    listener: OnceLock<ChangeListener>,
}

impl Redis {
    fn new(
        (connection, change_source): (Connection, ChangeSource),
        keyspace: Keyspace,
        options: RedisOptions,
        caution: Option<String>,
    ) -> Self {
        let inner = Inner {
            connection,
            keyspace,
            levels_cache: LevelsCache::default(),
            caution,
            batchers: Batchers::new(options.deadline),
            runtime: Handle::try_current().ok(),
            change_ids: UniqueNames::new(),
            sweep_timer: SweepTimer::new(options.swept_every),
            options,
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

    /// The pub/sub channel of changes.
    fn channel(&self) -> String {
        self.inner.keyspace.admin("changed")
    }

    /// Starts a sweep in the background if the interval since the last one has passed.
    fn sweep_if_due(&self) {
        let Some(guard) = self.inner.sweep_timer.begin() else { return };
        let store = self.clone();
        tokio::spawn(async move {
            // The next sweep retries after a failure.
            drop(store.sweep_in_background(BACKGROUND_SWEEP_MAX).await);
            drop(guard);
        });
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("place", &self.place())
            .field("namespace", &self.inner.keyspace.admin(META))
            .finish_non_exhaustive()
    }
}
