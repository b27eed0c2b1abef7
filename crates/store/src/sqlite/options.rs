//! Options of a store in a file, and its start.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, MAIN_DB, OpenFlags};
use tidegate_core::random::Random;
use tokio::sync::{oneshot, watch};

use super::errors::{CallError, file_error, is_busy};
use super::file::{File, create_private};
use super::queue::Queue;
use super::reader::Readers;
use super::records;
use super::schedule::Schedule;
use super::schema;
use super::syncer::{Syncer, wal_path};
use super::transaction::Cache;
use super::writer::{BATCH_MAX, Counters, DEADLINE, Writer};
use super::{Inner, Sqlite};
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::namespace;
use crate::retention::Retention;
use crate::setters::setters;
use crate::sync::lock;
use crate::tables::column;

/// The most calls that may wait for the writer.
const QUEUE_MAX: usize = 1 << 16;
/// How long to wait for another process that holds the file during opening: it may be migrating it.
pub(super) const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Prepared statements that a connection caches.
pub(super) const STATEMENTS_MAX: usize = 64;
/// The size to which the log is truncated, in bytes.
const LOG_MAX: i64 = 64 << 20;
/// The page cache of a connection, in KiB.
const CACHE_KIB: i64 = 16 << 10;
/// The smallest size limit of a file.
const SIZE_MIN: u64 = 1 << 20;

/// What a reply guarantees when the machine stops. When only the process stops, killed or not, no
/// acknowledged write is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// Writes are on the disk before they are acknowledged.
    Commit,
    /// Writes are handed to the operating system before they are acknowledged, and are on the disk within a
    /// second: if the machine stops, at most the last second is lost, as a whole.
    #[default]
    EverySecond,
}

/// Opens a store in a file.
///
/// ```no_run
/// use tidegate_store::{Durability, SqliteOptions};
///
/// # async fn example() -> Result<(), tidegate_store::StoreError> {
/// let store = SqliteOptions::file("limits.db").durable(Durability::Commit).namespace("prod").open().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "options do nothing until they are opened"]
pub struct SqliteOptions {
    /// `None` for a store in memory.
    pub(super) path: Option<PathBuf>,
    pub(super) durable: Durability,
    retention: Retention,
    pub(super) namespace: String,
    pub(super) size_max: Option<u64>,
    batch_max: usize,
    deadline: Duration,
    clock: Arc<dyn WallClock>,
}

impl SqliteOptions {
    /// Options for a file, which is created if it does not exist.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self::new(Some(path.into()))
    }

    /// Options for a store in this process's memory, with one connection.
    pub fn memory() -> Self {
        Self::new(None)
    }

    fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            durable: Durability::default(),
            retention: Retention::default(),
            namespace: "default".to_owned(),
            size_max: None,
            batch_max: BATCH_MAX,
            deadline: DEADLINE,
            clock: Arc::new(HostWall),
        }
    }

    setters! {
        /// Sets what a reply guarantees when the machine stops.
        durable: Durability,
        /// Sets how long usage and audit are kept.
        retention: Retention,
        /// Sets the most calls of a transaction; benchmarks measure the effect of batches with it.
        #[doc(hidden)]
        batch_max: usize,
        /// Sets how long a transaction may take before the file [counts as
        /// unavailable](crate::Capabilities::deadline), and how long a call waits while another process holds it;
        /// a second by default.
        deadline: Duration,
    }

    /// Sets the namespace, `default` by default.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    /// Limits the size of the file, not counting its log. Writes that need more are refused as if the disk
    /// were full. Draws are refused a little earlier, so that open leases can still be ended, which frees
    /// space.
    pub const fn size_max(mut self, bytes: u64) -> Self {
        self.size_max = Some(bytes);
        self
    }

    /// Sets the clock. If it is set back, time continues from where it was. All processes that use the file
    /// must use the same clock.
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Opens the store.
    ///
    /// # Errors
    /// As [`Sqlite::open`].
    ///
    /// # Cancel safety
    /// Dropping the future may leave a new, complete file behind.
    pub async fn open(self) -> Result<Sqlite, StoreError> {
        self.check()?;
        let (opened, answer) = oneshot::channel();
        let start = move || self.run(opened);
        let no_thread = |error: std::io::Error| StoreError::unavailable(format!("no thread: {error}"));
        thread::Builder::new().name("tidegate-write".to_owned()).spawn(start).map_err(no_thread)?;
        answer
            .await
            .unwrap_or_else(|_| Err(StoreError::unavailable("the thread that opens the file panicked")))
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        namespace(&self.namespace)?;
        self.retention.check()?;
        if let Some(bytes) = self.size_max.filter(|bytes| *bytes < SIZE_MIN) {
            let what = format!("`size_max` is {bytes} bytes, and must be at least {SIZE_MIN}");
            return Err(StoreError::Invalid { what });
        }
        Ok(())
    }

    /// Opens the file on the thread that will write.
    fn run(self, opened: oneshot::Sender<Result<Sqlite, StoreError>>) {
        // Every thread holds a sender until its connection is closed.
        let (running, ended) = watch::channel(());
        // Connections are closed one at a time: with two at once, each would leave the checkpoint to the
        // other.
        let closing: Arc<Mutex<()>> = Arc::default();
        match self.prepare(&running, ended, &closing) {
            Ok((mut writer, store)) => {
                // If the caller was dropped, the store is dropped here, and the writer ends.
                drop(opened.send(Ok(store)));
                writer.run();
                let _turn = lock(&closing);
                drop(writer);
            }
            Err(error) => drop(opened.send(Err(error))),
        }
        drop(running);
    }

    fn prepare(
        self,
        running: &watch::Sender<()>,
        ended: watch::Receiver<()>,
        closing: &Arc<Mutex<()>>,
    ) -> Result<(Writer, Sqlite), StoreError> {
        let place: Arc<str> = match &self.path {
            Some(path) => path.display().to_string().into(),
            None => ":memory:".into(),
        };
        let path =
            self.path.as_deref().map(canonical).transpose().map_err(|error| unreadable(&place, &error))?;
        let mut connection = self.connect(path.as_deref(), &place)?;
        schema::prepare(&mut connection, &place)?;
        let of_place = |error: rusqlite::Error| file_error(&place, &error);
        let namespace = records::namespace(&connection, &self.namespace).map_err(of_place)?;
        // From here on the writer polls the lock itself.
        connection.busy_timeout(Duration::ZERO).map_err(of_place)?;
        let of_io = |error: std::io::Error| StoreError::unavailable(format!("`{place}`: {error}"));
        // Resolved again, now that the file exists.
        let path = path.as_deref().map(canonical).transpose().map_err(of_io)?;
        let readers =
            path.as_deref().map(|path| Readers::start((path, &place), running, closing)).transpose();
        let readers = readers.map_err(of_io)?;
        let (queue, counters) = (Arc::new(Queue::new(QUEUE_MAX, &place)), Arc::new(Counters::default()));
        let unsynced = path.as_deref().filter(|_| self.durable == Durability::EverySecond);
        let syncer = unsynced.map(|path| Syncer::start(path, &counters)).transpose().map_err(of_io)?;
        let file = path.map(File::at).transpose().map_err(of_io)?;
        let writer = Writer {
            connection,
            file,
            place: Arc::clone(&place),
            clock: Arc::clone(&self.clock),
            retention: self.retention,
            is_bounded: self.size_max.is_some(),
            batch_max: self.batch_max.max(1),
            timeout: self.deadline,
            queue: Arc::clone(&queue),
            counters: Arc::clone(&counters),
            cache: Cache::default(),
            anchors: None,
            data_version: 0,
            random: Random::seeded(u64::from(std::process::id())),
            callers: 0,
            schedule: Schedule::new(Instant::now()),
            undo_jobs: VecDeque::new(),
            syncer,
        };
        let deadline = self.deadline;
        let inner = Inner {
            place,
            deadline,
            clock: self.clock,
            writer: queue,
            readers,
            counters,
            threads_ended: ended,
        };
        Ok((writer, Sqlite { inner: Arc::new(inner), namespace }))
    }

    pub(super) fn connect(&self, path: Option<&Path>, place: &str) -> Result<Connection, StoreError> {
        let of_place = |error: rusqlite::Error| file_error(place, &error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = match path {
            None => Connection::open_in_memory_with_flags(flags),
            Some(path) => {
                check_folder(self.path.as_deref().unwrap_or(path))?;
                check_log(path)?;
                create_private(path);
                Connection::open_with_flags(path, flags)
            }
        };
        let connection = connection.map_err(of_place)?;
        self.set_up(&connection, place).map_err(|error| error.into_error(place))?;
        Ok(connection)
    }

    fn set_up(&self, connection: &Connection, place: &str) -> Result<(), CallError> {
        connection.busy_timeout(OPEN_TIMEOUT)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
        if connection.is_readonly(MAIN_DB)? {
            let what = format!("`{place}` is read-only");
            return Err(StoreError::Denied { what }.into());
        }
        // Checked before any write.
        schema::check(connection, place)?;
        if self.path.is_some() {
            let mode = write_ahead(connection)?;
            if mode != "wal" {
                let what =
                    format!("`{place}` has a journal of mode `{mode}`, and its folder does not allow `wal`");
                return Err(StoreError::Denied { what }.into());
            }
        }
        let synchronous = match self.durable {
            Durability::Commit => "FULL",
            Durability::EverySecond => "NORMAL",
        };
        connection.pragma_update(None, "synchronous", synchronous)?;
        connection.pragma_update(None, "journal_size_limit", LOG_MAX)?;
        connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
        if let Some(bytes) = self.size_max {
            let page: i64 = connection.pragma_query_value(None, "page_size", |row| row.get(0))?;
            connection.pragma_update(None, "max_page_count", column(bytes) / page.max(1))?;
        }
        Ok(())
    }
}

/// Switches to a write-ahead log, and returns the journal mode. If several processes open a new file at once,
/// one gets a busy error without waiting, and retries.
fn write_ahead(connection: &Connection) -> rusqlite::Result<String> {
    let until = Instant::now() + OPEN_TIMEOUT;
    loop {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0)) {
            Err(error) if is_busy(&error) && Instant::now() < until => {
                thread::sleep(Duration::from_millis(1));
            }
            mode => return mode,
        }
    }
}

/// A log without its file belongs to a file that was moved, perhaps while it is open: SQLite would delete the
/// log and its writes.
fn check_log(path: &Path) -> Result<(), StoreError> {
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
    let log = wal_path(path);
    // The log is checked first: a new file has its first page before its log is created.
    if length(&log) > 0 && length(path) == 0 {
        let (place, log) = (path.display(), log.display());
        let what =
            format!("`{place}` is missing, but its log `{log}` exists: restore the file or remove the log");
        return Err(StoreError::Denied { what });
    }
    Ok(())
}

/// The absolute path of a file, which does not depend on the working directory later.
pub(super) fn canonical(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path).or_else(|_| std::path::absolute(path))
}

fn unreadable(place: &str, error: &std::io::Error) -> StoreError {
    StoreError::Denied { what: format!("`{place}` cannot be opened: {error}") }
}

/// SQLite's error does not name the missing folder.
fn check_folder(path: &Path) -> Result<(), StoreError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder.map(std::fs::metadata) {
        Some(Err(error)) => {
            let folder = folder.unwrap_or(path).display();
            Err(StoreError::Denied {
                what: format!("`{}` cannot be opened: `{folder}`: {error}", path.display()),
            })
        }
        _ => Ok(()),
    }
}
