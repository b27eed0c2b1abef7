//! A store in a PostgreSQL server, shared by all processes that connect to it.
//!
//! A function in the server (`sql/steps.sql`) decides each step of a lease, by the server's clock and under
//! row locks of its limits, taken in the order of their keys. A process sends the steps of concurrent callers
//! in [batches](steps). Administrative changes are [`records`], each written in one statement that also
//! announces it.

mod batch;
mod call;
mod engine;
mod errors;
mod evict;
mod lifecycle;
mod listen;
mod listing;
mod options;
mod records;
mod schema;
mod sql;
mod steps;
mod sweep;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::{Client, Pool};
use foldhash::HashMap;
use tidegate_core::limit::name::Namespace;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

pub use options::PostgresOptions;

use crate::changes::{AnnouncedVersion, Changes};
use crate::clock::WallClock;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::retention::Retention;
use crate::sync::lock;
use crate::tables::column;
use errors::{is_disconnected, pool_error, server_error};
use sql::Sql;
use steps::{DISCONNECTS_MAX, Steps};

/// How long a call may take before the engine counts as unavailable.
const DEADLINE: Duration = Duration::from_millis(50);
/// The most calls that may wait for a connection.
const READS_MAX: usize = 1 << 14;

/// A store in a PostgreSQL server. Clones are the same store.
///
/// Any number of processes may share it. Acknowledged writes are as durable as the server's
/// `synchronous_commit` makes them; by default they are on its disk.
///
/// ```no_run
/// use tidegate_store::{Postgres, Store};
///
/// # async fn example() -> Result<(), tidegate_store::StoreError> {
/// let store = Postgres::open("postgres://limits:secret@db.internal/limits").await?;
/// assert_eq!(store.capabilities().engine, "postgres");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Postgres {
    inner: Arc<Inner>,
    /// The namespace's id.
    namespace: i64,
    steps: Arc<Steps>,
    changes: Changes,
    /// Stops the background tasks when the last clone is dropped.
    guard: Arc<StoreGuard>,
}

/// The state shared by all clones and namespaces.
struct Inner {
    /// The address, without the password.
    place: String,
    sql: Sql,
    /// The clock of tests, in place of the server's.
    clock: Option<Arc<dyn WallClock>>,
    retention: Retention,
    /// How long a call may take before the engine counts as unavailable, and how long a statement may take.
    deadline: Duration,
    timeout: Duration,
    /// Connections for steps, and for everything else, so that listings do not delay draws.
    writers: Pool,
    readers: Pool,
    /// The most batches in flight.
    batches_max: usize,
    handle: Handle,
    is_closed: AtomicBool,
    counters: Counters,
    /// The namespaces that are open in this process, with the channels of their changes.
    open_namespaces: Mutex<HashMap<i64, (Arc<AnnouncedVersion>, Changes)>>,
    /// Wakes the background tasks, so that they notice the end of the store.
    stop_signal: Notify,
}

/// Held by every clone: while one exists, the store is in use.
struct StoreGuard(Arc<Inner>);

impl Drop for StoreGuard {
    fn drop(&mut self) {
        self.0.stop_signal.notify_waiters();
    }
}

#[derive(Default)]
struct Counters {
    batches: AtomicU64,
    calls: AtomicU64,
}

impl Counters {
    fn count(&self, calls: usize) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.calls.fetch_add(calls as u64, Ordering::Relaxed);
    }
}

/// Counters of a store in this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PostgresStats {
    /// Batches of steps, each a statement, a transaction and a round trip.
    pub batches: u64,
    /// Steps of leases in these batches.
    pub calls: u64,
}

impl Postgres {
    /// Opens the database at `url`, in the schema `tidegate` and the namespace `default`. Creates the schema
    /// if it does not exist, and upgrades an older one.
    ///
    /// # Errors
    /// [`StoreError::Denied`] for a wrong password, a missing right or a connection that cannot be secured,
    /// [`StoreError::Invalid`] for an invalid address, a missing database, or a schema of a newer version or
    /// of another program, and [`StoreError::Unavailable`] if the server cannot be reached.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        PostgresOptions::new(url).open().await
    }

    /// Opens another namespace of the same schema. The same name is the same namespace.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid name, and errors of the server.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a new namespace behind, which the next call finds.
    pub async fn namespace(&self, name: &str) -> Result<Self, StoreError> {
        let guard = Arc::clone(&self.guard);
        Self::in_namespace(Arc::clone(&self.inner), guard, name).await
    }

    async fn in_namespace(inner: Arc<Inner>, guard: Arc<StoreGuard>, name: &str) -> Result<Self, StoreError> {
        let name = Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })?;
        let (namespace, _) = records::namespace(&inner, name.as_str()).await?;
        let (heard, changes) = {
            let mut open = lock(&inner.open_namespaces);
            let make = || {
                let (announcer, changes) = Changes::channel();
                (Arc::new(AnnouncedVersion::new(Arc::new(announcer))), changes)
            };
            open.entry(namespace).or_insert_with(make).clone()
        };
        // Read after it is registered: a change between the two would be missed.
        let (_, version) = records::namespace(&inner, name.as_str()).await?;
        heard.announced(version);
        let steps = Arc::new(Steps::new(Arc::clone(&inner), namespace));
        let store = Self { inner, namespace, steps, changes, guard };
        store.clean_up_in_background();
        Ok(store)
    }

    /// The counters of this process.
    pub fn stats(&self) -> PostgresStats {
        let counters = &self.inner.counters;
        PostgresStats {
            batches: counters.batches.load(Ordering::Relaxed),
            calls: counters.calls.load(Ordering::Relaxed),
        }
    }

    /// Closes the store for all clones: closes its connections and refuses later calls. Statements in flight
    /// complete.
    pub fn close(&self) {
        self.inner.is_closed.store(true, Ordering::SeqCst);
        self.inner.writers.close();
        self.inner.readers.close();
        self.inner.stop_signal.notify_waiters();
    }

    /// The address, without the password.
    pub fn place(&self) -> &str {
        &self.inner.place
    }
}

impl Inner {
    fn check_open(&self) -> Result<(), StoreError> {
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(StoreError::Closed { what: format!("{} was closed", self.place) });
        }
        Ok(())
    }

    /// The reading of a test's clock.
    fn wall(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| column(clock.now().as_micros()))
    }

    async fn connection(&self, pool: &Pool) -> Result<PooledConnection, StoreError> {
        self.check_open()?;
        let (status, time) = (pool.status(), EngineTime::current());
        // Otherwise a connection is free, or the engine is asked for one more.
        let is_queued = status.available == 0 && status.size >= status.max_size;
        if is_queued {
            if status.waiting >= READS_MAX {
                let (place, retry_after) = (self.place.clone(), self.deadline);
                return Err(StoreError::Busy { place, waiting_max: READS_MAX, retry_after });
            }
            time.wait("connections");
        }
        let client = pool.get().await.map_err(|error| pool_error(&self.place, error))?;
        if is_queued {
            time.send();
        }
        Ok(PooledConnection(Some(client)))
    }

    /// Runs a statement in which `@` stands for the schema. It may run twice, because the server may have
    /// closed a pooled connection.
    async fn query(
        &self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, StoreError> {
        let mut cuts = 0;
        loop {
            match self.query_once(statement, parameters).await? {
                Err(error) if is_disconnected(&error) && cuts < DISCONNECTS_MAX => cuts += 1,
                answer => return answer.map_err(|error| server_error(&self.place, error)),
            }
        }
    }

    /// Like [`query`](Self::query), for a statement that must not run twice.
    async fn query_once(
        &self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Result<Vec<Row>, tokio_postgres::Error>, StoreError> {
        let statement = self.sql.text(statement);
        let client = self.connection(&self.readers).await?;
        let answer = self.with_timeout(async {
            let prepared = client.get().prepare_cached(&statement).await?;
            client.get().query(&prepared, parameters).await
        });
        let answer = answer.await?;
        if !answer.as_ref().is_err_and(is_disconnected) {
            client.release();
        }
        Ok(answer)
    }

    async fn with_timeout<T>(&self, call: impl Future<Output = T>) -> Result<T, StoreError> {
        let millis = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        tokio::time::timeout(self.timeout, call).await.map_err(|_| StoreError::TimedOut { millis })
    }
}

/// A pooled connection in use. Unless it is released, as after a statement that was dropped, it is closed instead of
/// returned to the pool.
struct PooledConnection(Option<Client>);

impl PooledConnection {
    fn get(&self) -> &Client {
        self.0.as_ref().expect("present until it is released")
    }

    /// Returns the connection to the pool: all of its statements are complete.
    fn release(mut self) {
        drop(self.0.take());
    }
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            // Removed from the pool, and closed.
            drop(Client::take(client));
        }
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("place", &self.inner.place)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
