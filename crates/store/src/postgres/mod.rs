//! A store in a PostgreSQL server, shared by all processes that connect to it.
//!
//! Every step of a lease is decided by a function in the server (`sql/steps.sql`), by the server's clock, with the rows of its limits
//! locked in the order of their keys. The calls of a process go together: while some are with the server, those that come
//! meanwhile [collect](lanes). Administrative changes are [`records`], each written in one statement that also announces it.

mod batch;
mod call;
mod engine;
mod evict;
mod lanes;
mod lifecycle;
mod listen;
mod listing;
mod options;
mod records;
mod schema;
mod sql;
mod sweep;
mod trouble;

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

use crate::changes::{Changes, Heard};
use crate::clock::WallClock;
use crate::error::StoreError;
use crate::retention::Retention;
use crate::sync::lock;
use crate::tables::column;
use lanes::{CUTS_MAX, Lanes};
use sql::Sql;
use trouble::{is_cut, of_pool, of_server};

/// How long a call may take before the engine counts as unavailable.
const DEADLINE: Duration = Duration::from_millis(50);

/// A store in a PostgreSQL server. Clones are the same store.
///
/// Any number of processes may use one. What was answered is on the server's disk, as its `synchronous_commit` says: it is on
/// by default.
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
    /// The namespace's number.
    namespace: i64,
    lanes: Arc<Lanes>,
    changes: Changes,
    /// The last clone ends what runs in the background.
    alive: Arc<Alive>,
}

/// What all clones and namespaces share.
struct Inner {
    /// Where it is, without the password.
    place: String,
    sql: Sql,
    /// Whose clock decides, where it is not the server's.
    clock: Option<Arc<dyn WallClock>>,
    retention: Retention,
    /// A statement that takes longer is given up.
    deadline: Duration,
    patience: Duration,
    /// Connections for what is decided, and for everything else: listings do not delay draws.
    writers: Pool,
    readers: Pool,
    /// Batches that may be under way at a time.
    lanes: usize,
    handle: Handle,
    is_closed: AtomicBool,
    counters: Counters,
    /// Namespaces that are open in this process, and where their changes are announced.
    announced: Mutex<HashMap<i64, (Arc<Heard>, Changes)>>,
    /// Wakes what runs in the background.
    stirred: Notify,
}

/// As long as one is there, the store is used.
struct Alive(Arc<Inner>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.stirred.notify_waiters();
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

/// What a store has done in this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PostgresStats {
    /// Statements that decided something, each a transaction and a round trip.
    pub batches: u64,
    /// Steps of leases that were decided in them.
    pub calls: u64,
}

impl Postgres {
    /// Opens the database at `url`, in the schema `tidegate` and the namespace `default`. The schema is made if it is not
    /// there, and brought up to date if it is an older one.
    ///
    /// # Errors
    /// [`StoreError::Denied`] for a password that is wrong, a right that is missing and a connection that cannot be secured,
    /// [`StoreError::Invalid`] for an address that is none, a database that is not there and a schema of a newer version or
    /// of another program, and [`StoreError::Unavailable`] where the server cannot be reached.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        PostgresOptions::new(url).open().await
    }

    /// Another namespace of the same schema. The same name is the same namespace.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a name that cannot be, and what the server says.
    ///
    /// # Cancel safety
    /// Dropping the future leaves a namespace that is there or not; asking again finds it.
    pub async fn namespace(&self, name: &str) -> Result<Self, StoreError> {
        let alive = Arc::clone(&self.alive);
        Self::in_namespace(Arc::clone(&self.inner), alive, name).await
    }

    async fn in_namespace(inner: Arc<Inner>, alive: Arc<Alive>, name: &str) -> Result<Self, StoreError> {
        let name = Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })?;
        let (namespace, _) = records::namespace(&inner, name.as_str()).await?;
        let (heard, changes) = {
            let mut open = lock(&inner.announced);
            let make = || {
                let (announcer, changes) = Changes::channel();
                (Arc::new(Heard::new(Arc::new(announcer))), changes)
            };
            open.entry(namespace).or_insert_with(make).clone()
        };
        // Read when it is heard of: what was announced between the two would be missed.
        let (_, version) = records::namespace(&inner, name.as_str()).await?;
        heard.announced(version);
        let lanes = Arc::new(Lanes::new(Arc::clone(&inner), namespace));
        let store = Self { inner, namespace, lanes, changes, alive };
        store.tidy_in_background();
        Ok(store)
    }

    /// What it has done in this process.
    pub fn stats(&self) -> PostgresStats {
        let counters = &self.inner.counters;
        PostgresStats {
            batches: counters.batches.load(Ordering::Relaxed),
            calls: counters.calls.load(Ordering::Relaxed),
        }
    }

    /// Ends it, for all clones: its connections are closed, and later calls are refused. Calls that are with the server are
    /// answered.
    pub fn close(&self) {
        self.inner.is_closed.store(true, Ordering::SeqCst);
        self.inner.writers.close();
        self.inner.readers.close();
        self.inner.stirred.notify_waiters();
    }

    /// Where it is, without the password.
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

    /// What the clock reads, where it is not the server's.
    fn wall(&self) -> Option<i64> {
        self.clock.as_ref().map(|clock| column(clock.now().as_micros()))
    }

    async fn writer(&self) -> Result<Client, StoreError> {
        self.check_open()?;
        self.writers.get().await.map_err(|error| of_pool(&self.place, error))
    }

    async fn reader(&self) -> Result<Held, StoreError> {
        self.check_open()?;
        let client = self.readers.get().await.map_err(|error| of_pool(&self.place, error))?;
        Ok(Held::new(client))
    }

    /// Runs a statement, with `@` for the schema. It may run twice: the server may have closed a connection of the pool.
    async fn query(
        &self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, StoreError> {
        let mut cuts = 0;
        loop {
            match self.query_once(statement, parameters).await? {
                Err(error) if is_cut(&error) && cuts < CUTS_MAX => cuts += 1,
                answer => return answer.map_err(|error| of_server(&self.place, error)),
            }
        }
    }

    /// The same for a statement that must not run twice.
    async fn query_once(
        &self,
        statement: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Result<Vec<Row>, tokio_postgres::Error>, StoreError> {
        let statement = self.sql.text(statement);
        let client = self.reader().await?;
        let answer = self.in_time(async {
            let prepared = client.get().prepare_cached(&statement).await?;
            client.get().query(&prepared, parameters).await
        });
        let answer = answer.await?;
        if !answer.as_ref().is_err_and(is_cut) {
            client.is_done();
        }
        Ok(answer)
    }

    async fn in_time<T>(&self, asked: impl Future<Output = T>) -> Result<T, StoreError> {
        let millis = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
        tokio::time::timeout(self.patience, asked).await.map_err(|_| StoreError::TimedOut { millis })
    }
}

/// A connection in use. One that is dropped in the middle of a statement is closed and does not return to the pool.
struct Held {
    client: Option<Client>,
    is_done: AtomicBool,
}

impl Held {
    fn new(client: Client) -> Self {
        Self { client: Some(client), is_done: AtomicBool::new(false) }
    }

    fn get(&self) -> &Client {
        self.client.as_ref().expect("it is there until it is dropped")
    }

    /// All that was asked of it was answered.
    fn is_done(&self) {
        self.is_done.store(true, Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.is_done.load(Ordering::Relaxed)
            && let Some(client) = self.client.take()
        {
            // Out of the pool, and closed.
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
