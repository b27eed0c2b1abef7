//! A store in a file: the embedded default, durable, and shared by all processes of a machine.
//!
//! One thread per process writes: it takes all waiting calls into one transaction ([`writer`](self), group
//! commit); other threads read. What a call needs is loaded into a table in memory, decided on as in the
//! memory engine, and written with the transaction. Loaded rows are cached until another process writes. The
//! time is the host's clock, read within the transaction and stored in the file, so that it never runs
//! backwards for any process.

mod engine;
mod errors;
mod evict;
mod file;
mod leases;
mod lifecycle;
mod listing;
mod meter_rows;
mod namespace;
mod options;
mod queue;
mod reader;
mod records;
mod retention;
mod schedule;
mod schema;
mod syncer;
mod transaction;
mod writer;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::anchor::Anchor;
use tidegate_core::limit::name::Namespace;

pub use options::{Durability, SqliteOptions};

use crate::clock::WallClock;
use crate::error::StoreError;
use errors::CallError;
use queue::Queue;
use reader::Readers;
use transaction::{Call, CallReply, QueuedJob, Transaction};
use writer::Counters;

/// A store in a file, with SQLite built in. Clones are the same store.
///
/// Several processes may share a file. Acknowledged writes survive the process ([`Durability`] says what
/// survives the machine).
///
/// ```
/// use tidegate_store::{Sqlite, Store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate_store::StoreError> {
/// # let folder = std::env::temp_dir().join(format!("tidegate-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).expect("a folder");
/// # let path = folder.join("limits.db");
/// let store = Sqlite::open(&path).await?;
/// assert_eq!(store.capabilities().engine, "sqlite");
/// store.close().await;
/// # std::fs::remove_dir_all(&folder).expect("the folder exists");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Sqlite {
    inner: Arc<Inner>,
    /// The namespace's id.
    namespace: i64,
}

/// The state shared by all clones and namespaces.
struct Inner {
    place: Arc<str>,
    deadline: Duration,
    clock: Arc<dyn WallClock>,
    writer: Arc<Queue<QueuedJob>>,
    /// `None` for a store in memory, which has one connection.
    readers: Option<Readers>,
    counters: Arc<Counters>,
    /// Its sender is dropped when all threads have ended.
    threads_ended: tokio::sync::watch::Receiver<()>,
}

/// Counters of a store in this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteStats {
    /// Transactions, including those without writes.
    pub transactions: u64,
    /// Draws, extensions and spends in these transactions.
    pub draws: u64,
    /// Syncs to disk: with [`Durability::Commit`] each transaction that was written, with
    /// [`Durability::EverySecond`] the log.
    pub syncs: u64,
}

impl Sqlite {
    /// Opens a file in the namespace `default`, and creates it if it does not exist.
    ///
    /// # Errors
    /// [`StoreError::Denied`] for a file that cannot be opened or written, [`StoreError::Corrupt`] for one
    /// that is damaged or not a database, [`StoreError::Invalid`] for one of another program or of a newer
    /// version, and [`StoreError::Unavailable`] if another process holds it for too long.
    pub async fn open(path: impl Into<std::path::PathBuf>) -> Result<Self, StoreError> {
        SqliteOptions::file(path).open().await
    }

    /// A store in this process's memory, with one connection: for tests.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if no thread can be spawned.
    pub async fn in_memory() -> Result<Self, StoreError> {
        SqliteOptions::memory().open().await
    }

    /// Opens another namespace of the same file. The same name is the same namespace.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid name, and errors of the file.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a new namespace behind, which the next call finds.
    pub async fn namespace(&self, name: &str) -> Result<Self, StoreError> {
        let name = Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })?;
        let make = |transaction: &mut Transaction<'_>, name: &Namespace| {
            Ok::<_, CallError>(records::namespace(transaction.connection, name.as_str())?)
        };
        let namespace = self.inner.write(Call::new(name, make)).await?;
        Ok(Self { inner: Arc::clone(&self.inner), namespace })
    }

    /// The counters of this process.
    pub fn stats(&self) -> SqliteStats {
        let counters = &self.inner.counters;
        SqliteStats {
            transactions: counters.transactions.load(Ordering::Relaxed),
            draws: counters.draws.load(Ordering::Relaxed),
            syncs: counters.syncs.load(Ordering::Relaxed),
        }
    }

    /// Closes the store for all clones: queued calls are completed and synced to disk, and later ones are
    /// refused.
    ///
    /// Dropping the last clone does the same in the background.
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting, not the closing.
    pub async fn close(&self) {
        self.inner.close();
        // Nothing is ever sent: an error means that all threads have ended.
        drop(self.inner.threads_ended.clone().changed().await);
    }

    /// The path of the file.
    pub fn place(&self) -> &str {
        &self.inner.place
    }
}

impl Inner {
    fn close(&self) {
        self.writer.close();
        if let Some(readers) = &self.readers {
            readers.close();
        }
    }

    /// Runs a call in a transaction, and waits until it is committed.
    async fn write<R: Send + 'static, T: Send + 'static>(
        &self,
        (call, answer): (Call<R, T>, tokio::sync::oneshot::Receiver<CallReply<T>>),
    ) -> Result<T, StoreError> {
        self.writer.push(QueuedJob::new(Box::new(call)))?;
        match answer.await {
            Ok(reply) => reply.into_result(),
            Err(_) => Err(StoreError::unavailable("the store's thread has ended")),
        }
    }

    /// Reads in a snapshot, at one time, in parallel to the writer.
    async fn read<T: Send + 'static>(
        &self,
        read: impl Fn(&rusqlite::Connection, Anchor) -> Result<T, CallError> + Send + 'static,
    ) -> Result<T, StoreError> {
        if let Some(readers) = &self.readers {
            return readers.read(Arc::clone(&self.clock), read).await;
        }
        self.write(Call::new(read, read_in_transaction)).await
    }
}

/// Reads within the writer's transaction, including its earlier calls.
fn read_in_transaction<T>(
    transaction: &mut Transaction<'_>,
    read: &impl Fn(&rusqlite::Connection, Anchor) -> Result<T, CallError>,
) -> Result<T, CallError> {
    transaction.write()?;
    read(transaction.connection, transaction.anchor)
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite")
            .field("place", &self.inner.place)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
