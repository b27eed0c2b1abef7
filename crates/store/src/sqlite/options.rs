//! How a file is opened.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use rusqlite::{Connection, MAIN_DB, OpenFlags};
use tidegate_core::random::Random;
use tokio::sync::{oneshot, watch};

use super::file::File;
use super::queue::Queue;
use super::reader::Readers;
use super::records;
use super::schema;
use super::syncer::{Syncer, log_of};
use super::times::Times;
use super::trouble::{Trouble, is_busy, of_file};
use super::writer::{BATCH_MAX, Counters, DEADLINE, Writer};
use super::{Inner, Sqlite};
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::namespace;
use crate::retention::Retention;
use crate::sync::lock;
use crate::tables::column;

/// Calls that wait for the writer at most.
const WAITING_MAX: usize = 1 << 16;
/// How long another process may hold the file while it is opened: it may be bringing it up to date.
pub(super) const OPENED_WITHIN: Duration = Duration::from_secs(10);
/// Statements that a connection keeps prepared.
pub(super) const STATEMENTS_MAX: usize = 64;
/// What the log may leave lying on the disk, in bytes.
const LOG_MAX: i64 = 64 << 20;
/// What a connection keeps in memory of the file, in KiB.
const CACHE_KIB: i64 = 16 << 10;
/// The least that a file may grow to.
const SIZE_MIN: u64 = 1 << 20;

/// What an answer means when the machine stops. When the process stops, killed or not, nothing that was answered is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durable {
    /// It is on the disk before it is answered.
    Commit,
    /// It is with the operating system before it is answered, and on the disk within a second: should the machine stop,
    /// at most the last second is lost, as a whole and not in parts.
    #[default]
    Second,
}

/// How a file is opened.
///
/// ```no_run
/// use tidegate_store::{Durable, SqliteOptions};
///
/// # async fn example() -> Result<(), tidegate_store::StoreError> {
/// let store = SqliteOptions::file("limits.db").durable(Durable::Commit).namespace("prod").open().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "options do nothing until they are opened"]
pub struct SqliteOptions {
    /// None is memory.
    pub(super) path: Option<PathBuf>,
    pub(super) durable: Durable,
    retention: Retention,
    pub(super) namespace: String,
    pub(super) size_max: Option<u64>,
    batch_max: usize,
    deadline: Duration,
    clock: Arc<dyn WallClock>,
}

impl SqliteOptions {
    /// A file, which is made if it is not there.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self::new(Some(path.into()))
    }

    /// A store in this process's memory, with one connection.
    pub fn memory() -> Self {
        Self::new(None)
    }

    fn new(path: Option<PathBuf>) -> Self {
        Self {
            path,
            durable: Durable::default(),
            retention: Retention::default(),
            namespace: "default".to_owned(),
            size_max: None,
            batch_max: BATCH_MAX,
            deadline: DEADLINE,
            clock: Arc::new(HostWall),
        }
    }

    /// What an answer means when the machine stops.
    pub const fn durable(mut self, durable: Durable) -> Self {
        self.durable = durable;
        self
    }

    /// How long usage and audit are kept.
    pub const fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// The namespace, `default` unless said otherwise.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    /// The file grows to at most so many bytes, not counting its log. What would need more is refused as if the disk were
    /// full. Draws are refused a little earlier: leases that are open can still be ended, which makes room.
    pub const fn size_max(mut self, bytes: u64) -> Self {
        self.size_max = Some(bytes);
        self
    }

    /// At most so many calls go into one transaction: what grouping them is worth is measured with it.
    #[doc(hidden)]
    pub const fn batch_max(mut self, calls: usize) -> Self {
        self.batch_max = calls;
        self
    }

    /// How long a transaction may take before the file [counts as unavailable](crate::Capabilities::deadline), and how long a
    /// call waits while another process holds it; a second unless set.
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The clock to go by, which may be set back: time goes on from where it was. All processes that use the file must
    /// go by the same.
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Opens it.
    ///
    /// # Errors
    /// As [`Sqlite::open`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves a file that is whole, and perhaps new.
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
            let what = format!("a size_max of {bytes} bytes, less than {SIZE_MIN}");
            return Err(StoreError::Invalid { what });
        }
        Ok(())
    }

    /// Opens it on the thread that is going to write.
    fn run(self, opened: oneshot::Sender<Result<Sqlite, StoreError>>) {
        // Every thread has the one end until its connection is closed.
        let (running, ended) = watch::channel(());
        // Connections are closed one after the other: of two at once, each would leave the log to the other.
        let closing: Arc<Mutex<()>> = Arc::default();
        match self.prepare(&running, ended, &closing) {
            Ok((mut writer, store)) => {
                // Nobody waits for it: it is closed by being dropped here, and the writer ends.
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
        let path = self.path.as_deref().map(real).transpose().map_err(|error| unreadable(&place, &error))?;
        let mut connection = self.connect(path.as_deref(), &place)?;
        schema::prepare(&mut connection, &place)?;
        let of_place = |error: rusqlite::Error| of_file(&place, &error);
        let namespace = records::namespace(&connection, &self.namespace).map_err(of_place)?;
        // From now on whoever waits for another process does so by himself.
        connection.busy_timeout(Duration::ZERO).map_err(of_place)?;
        let of_io = |error: std::io::Error| StoreError::unavailable(format!("`{place}`: {error}"));
        // Now that it is there: what its name leads to.
        let path = path.as_deref().map(real).transpose().map_err(of_io)?;
        let readers = path.as_deref().map(|path| Readers::start(path, running, closing)).transpose();
        let readers = readers.map_err(of_io)?;
        let (queue, counters) = (Arc::new(Queue::new(WAITING_MAX)), Arc::new(Counters::default()));
        let unsynced = path.as_deref().filter(|_| self.durable == Durable::Second);
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
            patience: self.deadline,
            queue: Arc::clone(&queue),
            counters: Arc::clone(&counters),
            spaces: HashMap::default(),
            rounds: HashMap::default(),
            anchors: None,
            data_version: 0,
            random: Random::seeded(u64::from(std::process::id())),
            callers: 0,
            times: Times::new(Instant::now()),
            owed: VecDeque::new(),
            syncer,
        };
        let deadline = self.deadline;
        let inner = Inner { place, deadline, clock: self.clock, writer: queue, readers, counters, ended };
        Ok((writer, Sqlite { inner: Arc::new(inner), namespace }))
    }

    pub(super) fn connect(&self, path: Option<&Path>, place: &str) -> Result<Connection, StoreError> {
        let of_place = |error: rusqlite::Error| of_file(place, &error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = match path {
            None => Connection::open_in_memory_with_flags(flags),
            Some(path) => {
                check_folder(self.path.as_deref().unwrap_or(path))?;
                check_log(path)?;
                Connection::open_with_flags(path, flags)
            }
        };
        let connection = connection.map_err(of_place)?;
        self.set_up(&connection, place).map_err(|trouble| trouble.into_error(place))?;
        Ok(connection)
    }

    fn set_up(&self, connection: &Connection, place: &str) -> Result<(), Trouble> {
        connection.busy_timeout(OPENED_WITHIN)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
        if connection.is_readonly(MAIN_DB)? {
            let what = format!("`{place}` may be read and not be written");
            return Err(StoreError::Denied { what }.into());
        }
        // Before anything is written to it.
        schema::check(connection, place)?;
        if self.path.is_some() {
            let mode = write_ahead(connection)?;
            if mode != "wal" {
                let what =
                    format!("`{place}` has a journal of mode `{mode}`, and its folder allows no `wal`");
                return Err(StoreError::Denied { what }.into());
            }
        }
        let synchronous = match self.durable {
            Durable::Commit => "FULL",
            Durable::Second => "NORMAL",
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

/// Has a log written ahead of the file, and says which kind of journal there is. Where several open a new file at once
/// one of them is refused without having waited, and asks again.
fn write_ahead(connection: &Connection) -> rusqlite::Result<String> {
    let until = Instant::now() + OPENED_WITHIN;
    loop {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0)) {
            Err(error) if is_busy(&error) && Instant::now() < until => {
                thread::sleep(Duration::from_millis(1));
            }
            mode => return mode,
        }
    }
}

/// A log without its file is that of a file which was moved away, perhaps while somebody has it open: SQLite would take
/// it for rubbish and remove it, and what is in it would be lost.
fn check_log(path: &Path) -> Result<(), StoreError> {
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
    let log = log_of(path);
    // The log is looked at first: a new file is never without its first page when its log is made.
    if length(&log) > 0 && length(path) == 0 {
        let (place, log) = (path.display(), log.display());
        let what =
            format!("`{place}` is not there, and its log `{log}` is: bring it back, or remove the log");
        return Err(StoreError::Denied { what });
    }
    Ok(())
}

/// The file that a name leads to, wherever the program goes afterwards.
pub(super) fn real(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path).or_else(|_| std::path::absolute(path))
}

fn unreadable(place: &str, error: &std::io::Error) -> StoreError {
    StoreError::Denied { what: format!("`{place}` cannot be opened: {error}") }
}

/// SQLite does not say what is missing.
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
