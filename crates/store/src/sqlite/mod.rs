//! A store in a file: the embedded default, durable, and shared by all processes of a machine.
//!
//! One thread of a process writes, and takes all who wait into one transaction ([`writer`](self)); others read beside
//! it. What a call needs is loaded into a table, decided on as in memory, and written with the transaction; it is kept
//! for the next one unless another process has written meanwhile. Time is the machine's, read within the transaction
//! and kept in the file, so that it never runs back for anybody.

mod engine;
mod evict;
mod file;
mod leases;
mod lifecycle;
mod listing;
mod options;
mod queue;
mod reader;
mod records;
mod retention;
mod rows;
mod schema;
mod space;
mod syncer;
mod times;
mod trouble;
mod work;
mod writer;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::anchor::Anchor;
use tidegate_core::limit::name::Namespace;

pub use options::{Durable, SqliteOptions};

use crate::clock::WallClock;
use crate::error::StoreError;
use queue::{Queue, Rejected};
use reader::Readers;
use trouble::Trouble;
use work::{Asked, Call, Job, Told, Work};
use writer::Counters;

/// A store in a file, with SQLite built in. Clones are the same store.
///
/// Several processes may use one file at once. What was answered survives the process ([`Durable`] says what survives
/// the machine).
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
/// # std::fs::remove_dir_all(&folder).expect("it is there");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Sqlite {
    inner: Arc<Inner>,
    /// The namespace's number.
    namespace: i64,
}

/// What all clones and namespaces share.
struct Inner {
    place: Arc<str>,
    deadline: Duration,
    clock: Arc<dyn WallClock>,
    writer: Arc<Queue<Asked>>,
    /// None for a store in memory, which has one connection.
    readers: Option<Readers>,
    counters: Arc<Counters>,
    /// Nobody has the other end any more when all threads have ended.
    ended: tokio::sync::watch::Receiver<()>,
}

/// What a store has done in this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteStats {
    /// Transactions, those included that had nothing to write.
    pub transactions: u64,
    /// Draws, extensions and spends that were decided in them.
    pub draws: u64,
    /// How often something was put on the disk: with [`Durable::Commit`] each transaction that was written, with
    /// [`Durable::Second`] the log.
    pub syncs: u64,
}

impl Sqlite {
    /// Opens a file, or makes it, in the namespace `default`.
    ///
    /// # Errors
    /// [`StoreError::Denied`] for a file that cannot be opened or written, [`StoreError::Corrupt`] for one that is damaged
    /// or no database, [`StoreError::Invalid`] for one of another program or of a newer version, and
    /// [`StoreError::Unavailable`] where another process holds it for too long.
    pub async fn open(path: impl Into<std::path::PathBuf>) -> Result<Self, StoreError> {
        SqliteOptions::file(path).open().await
    }

    /// A store in this process's memory, with one connection: for tests.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] where the system gives no thread.
    pub async fn in_memory() -> Result<Self, StoreError> {
        SqliteOptions::memory().open().await
    }

    /// Another namespace of the same file: whoever asks for the same name gets the same.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a name that cannot be, and what the file says.
    ///
    /// # Cancel safety
    /// Dropping the future leaves a namespace that is there or not; asking again finds it.
    pub async fn namespace(&self, name: &str) -> Result<Self, StoreError> {
        let name = Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })?;
        let make = |work: &mut Work<'_>, name: &Namespace| {
            Ok::<_, Trouble>(records::namespace(work.connection, name.as_str())?)
        };
        let namespace = self.inner.write(Call::new(name, make)).await?;
        Ok(Self { inner: Arc::clone(&self.inner), namespace })
    }

    /// What it has done in this process.
    pub fn stats(&self) -> SqliteStats {
        let counters = &self.inner.counters;
        SqliteStats {
            transactions: counters.transactions.load(Ordering::Relaxed),
            draws: counters.draws.load(Ordering::Relaxed),
            syncs: counters.syncs.load(Ordering::Relaxed),
        }
    }

    /// Ends it, for all clones: what was asked is done and put on the disk, and whoever asks from now on is refused.
    ///
    /// Dropping the last clone does the same in the background.
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting; it ends all the same.
    pub async fn close(&self) {
        self.inner.close();
        // Nothing is ever sent: an error means that all threads have gone.
        drop(self.inner.ended.clone().changed().await);
    }

    /// Where it is.
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

    /// Has a call done in a transaction, and waits for it to be written.
    async fn write<R: Send + 'static, T: Send + 'static>(
        &self,
        (call, answer): (Call<R, T>, tokio::sync::oneshot::Receiver<Told<T>>),
    ) -> Result<T, StoreError> {
        self.ask(Box::new(call))?;
        match answer.await {
            Ok(told) => told.hear(),
            Err(_) => Err(StoreError::unavailable("the store's thread has ended")),
        }
    }

    fn ask(&self, job: Box<dyn Job>) -> Result<(), StoreError> {
        self.writer.push(Asked::new(job)).map_err(|rejected| rejection(&rejected, &self.place))
    }

    /// Reads beside the writer, in one snapshot and at one time.
    async fn read<T: Send + 'static>(
        &self,
        read: impl Fn(&rusqlite::Connection, Anchor) -> Result<T, Trouble> + Send + 'static,
    ) -> Result<T, StoreError> {
        if let Some(readers) = &self.readers {
            let (place, clock) = (Arc::clone(&self.place), Arc::clone(&self.clock));
            return readers.read(place, clock, read).await;
        }
        self.write(Call::new(read, read_in_turn)).await
    }
}

/// Reads what those before it in the same transaction have done too.
fn read_in_turn<T>(
    work: &mut Work<'_>,
    read: &impl Fn(&rusqlite::Connection, Anchor) -> Result<T, Trouble>,
) -> Result<T, Trouble> {
    work.write()?;
    read(work.connection, work.anchor)
}

fn rejection(rejected: &Rejected, place: &str) -> StoreError {
    match rejected {
        Rejected::Full { max, waited } => {
            StoreError::Busy { place: format!("`{place}`"), waiting_max: *max, retry_after: *waited }
        }
        Rejected::Closed => StoreError::Closed { what: format!("`{place}` was closed") },
    }
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
