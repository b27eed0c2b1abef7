//! Threads that read beside the writer, each with a connection of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tidegate_core::limit::anchor::Anchor;
use tokio::sync::{oneshot, watch};

use super::file::File;
use super::options::STATEMENTS_MAX;
use super::queue::{Found, Queue};
use super::rejection;
use super::trouble::{Fault, Trouble};
use super::writer::read_anchor;
use crate::clock::WallClock;
use crate::error::StoreError;
use crate::sync::lock;

/// Threads that read.
const READERS: usize = 2;
/// Reads that wait at most.
const READS_MAX: usize = 1 << 14;
/// How long a reader waits for a writer that cleans up: hardly ever.
const BUSY: Duration = Duration::from_millis(500);

type Read = Box<dyn FnOnce(Result<&Connection, Fault>) + Send>;

/// Those who read.
pub(super) struct Readers {
    queue: Arc<Queue<Read>>,
}

impl Readers {
    /// Starts the threads. A connection is made with the first read, and closed under the lock `closing`. Each thread keeps
    /// `running` until it has ended.
    pub(super) fn start(
        path: &Path,
        running: &watch::Sender<()>,
        closing: &Arc<Mutex<()>>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::new(READS_MAX));
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
        Ok(Self { queue })
    }

    pub(super) fn close(&self) {
        self.queue.close();
    }

    pub(super) async fn read<T: Send + 'static>(
        &self,
        place: Arc<str>,
        clock: Arc<dyn WallClock>,
        read: impl FnOnce(&Connection, Anchor) -> Result<T, Trouble> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (waiting, answer) = oneshot::channel();
        let file = Arc::clone(&place);
        let job = move |connection: Result<&Connection, Fault>| {
            if waiting.is_closed() {
                return;
            }
            let answer = match connection {
                Ok(connection) => {
                    in_snapshot(connection, &*clock, read).map_err(|error| error.into_error(&file))
                }
                Err(fault) => Err(fault.error()),
            };
            // Whoever has gone does not want to know.
            drop(waiting.send(answer));
        };
        self.queue.push(Box::new(job)).map_err(|rejected| rejection(&rejected, &place))?;
        answer.await.unwrap_or_else(|_| Err(StoreError::unavailable("a thread that reads has panicked")))
    }
}

/// Reads at one time, as of one moment.
fn in_snapshot<T>(
    connection: &Connection,
    clock: &dyn WallClock,
    read: impl FnOnce(&Connection, Anchor) -> Result<T, Trouble>,
) -> Result<T, Trouble> {
    let snapshot = connection.unchecked_transaction()?;
    // Nothing is written: whoever decides next reads the clock for himself.
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
        while let Found::Jobs(jobs) = self.queue.take(1, None) {
            for job in jobs {
                let connection = self.connect();
                // Somebody's clock: the reply is dropped, and the thread goes on with a new connection.
                if catch_unwind(AssertUnwindSafe(|| job(connection))).is_err() {
                    self.connection = None;
                }
            }
        }
    }

    fn connect(&mut self) -> Result<&Connection, Fault> {
        self.file.check()?;
        if self.connection.is_none() {
            let place = self.file.path.display().to_string();
            self.connection = Some(self.open().map_err(|error| Fault::of(&place, &error))?);
        }
        self.connection.as_ref().ok_or_else(|| Fault::Away("there is no connection".to_owned()))
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
