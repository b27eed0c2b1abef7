//! Reader threads, each with a connection of its own, which read in parallel to the writer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tidegate_core::limit::anchor::Anchor;
use tokio::sync::{oneshot, watch};

use super::errors::{CallError, file_error};
use super::file::File;
use super::options::STATEMENTS_MAX;
use super::queue::{NextJobs, Queue};
use super::writer::read_anchor;
use crate::clock::WallClock;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The number of reader threads.
const READERS: usize = 2;
/// The most reads that may wait.
const READS_MAX: usize = 1 << 14;
/// How long a reader waits for the lock of a checkpoint, which is rare.
const BUSY: Duration = Duration::from_millis(500);

type Read = Box<dyn FnOnce(Result<&Connection, StoreError>) + Send>;

/// The pool of readers.
pub(super) struct Readers {
    queue: Arc<Queue<Read>>,
    place: Arc<str>,
}

impl Readers {
    /// Starts the threads. Each connects at its first read, disconnects under the lock `closing`, and holds
    /// `running` until it has ended.
    pub(super) fn start(
        (path, place): (&Path, &Arc<str>),
        running: &watch::Sender<()>,
        closing: &Arc<Mutex<()>>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::new(READS_MAX, place));
        for _ in 0..READERS {
            let mut reader =
                Reader { queue: Arc::clone(&queue), file: File::at(path.to_owned())?, connection: None };
            let (running, closing) = (running.clone(), Arc::clone(closing));
            let run = move || {
                reader.run();
                let turn = lock(&closing);
                drop(reader);
                drop((turn, running));
            };
            thread::Builder::new().name("tidegate-read".to_owned()).spawn(run)?;
        }
        Ok(Self { queue, place: Arc::clone(place) })
    }

    pub(super) fn close(&self) {
        self.queue.close();
    }

    pub(super) async fn read<T: Send + 'static>(
        &self,
        clock: Arc<dyn WallClock>,
        read: impl FnOnce(&Connection, Anchor) -> Result<T, CallError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let (place, time) = (Arc::clone(&self.place), EngineTime::current());
        time.wait("readers");
        let job = move |connection: Result<&Connection, StoreError>| {
            if reply.is_closed() {
                return;
            }
            time.send();
            let answer = match connection {
                Ok(connection) => {
                    in_snapshot(connection, &*clock, read).map_err(|error| error.into_error(&place))
                }
                Err(error) => Err(error),
            };
            // A failed send means that the caller was dropped.
            drop(reply.send(answer));
        };
        self.queue.push(Box::new(job))?;
        answer.await.unwrap_or_else(|_| Err(StoreError::unavailable("a reader thread panicked")))
    }
}

/// Reads in one snapshot, at one time.
fn in_snapshot<T>(
    connection: &Connection,
    clock: &dyn WallClock,
    read: impl FnOnce(&Connection, Anchor) -> Result<T, CallError>,
) -> Result<T, CallError> {
    let snapshot = connection.unchecked_transaction()?;
    // Not written back: the next decision reads the clock itself.
    let mut anchor = read_anchor(&snapshot)?;
    anchor.read(clock.now());
    read(&snapshot, anchor)
}

struct Reader {
    queue: Arc<Queue<Read>>,
    file: File,
    connection: Option<Connection>,
}

impl Reader {
    fn run(&mut self) {
        while let NextJobs::Jobs(jobs) = self.queue.take(1, None) {
            for job in jobs {
                let connection = self.connect();
                // A caller's clock may panic: the reply is dropped, and the thread continues with a new
                // connection.
                if catch_unwind(AssertUnwindSafe(|| job(connection))).is_err() {
                    self.connection = None;
                }
            }
        }
    }

    fn connect(&mut self) -> Result<&Connection, StoreError> {
        self.file.check()?;
        if self.connection.is_none() {
            let place = self.file.path.display().to_string();
            self.connection = Some(self.open().map_err(|error| file_error(&place, &error))?);
        }
        self.connection.as_ref().ok_or_else(|| StoreError::unavailable("there is no connection"))
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.file.path, flags)?;
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "query_only", true)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
        Ok(connection)
    }
}
