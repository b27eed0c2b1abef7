//! Keeps what has ended: pages get to the disk, then into the journal, then their names; then it is told.
//!
//! One thread does it, for all that have ended since it last did, at most once a second. What is costly, to wait for the disk,
//! is done once for all of them: see `docs/decisions/041`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Stdout, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::codec;
use super::ended::{Ended, Fate};
use super::folder::{Folder, give_name};
use super::part::Body;
use crate::failure::Failure;

/// Between two times that the disk is waited for.
const EVERY: Duration = Duration::from_secs(1);
/// So many pages at most are kept at once.
pub(crate) const BATCH_MAX: usize = 4_096;
/// Up to so many files are brought to the disk each for itself; more of them, with all else that is on its way there.
const ALONE_MAX: usize = 16;

/// What has become of what was handed over.
pub(crate) enum Kept {
    /// These are kept, and told.
    Ended(Vec<Ended>),
    /// Nothing is kept any more.
    Trouble(io::Error),
}

/// What is handed over.
enum Handed {
    Ended(Ended),
    /// Nothing else is going on: what is there is kept now.
    Now,
}

/// The thread, from outside.
pub(crate) struct Keeper {
    ended: Option<Sender<Handed>>,
    kept: UnboundedReceiver<Kept>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts it. With `tells`, each page is told on stdout as one line of JSON.
    pub(crate) fn start(folder: &Arc<Folder>, journal: File, tells: bool) -> Result<Self, Failure> {
        let (tell, ended) = channel();
        let (answer, kept) = unbounded_channel();
        let stdout = tells.then(|| BufWriter::new(io::stdout()));
        let keeping = Keeping { folder: Arc::clone(folder), journal, stdout, lines: Vec::new() };
        let thread = thread::Builder::new().name("keeper".into()).spawn(move || keeping.run(&ended, &answer));
        let thread = thread.map_err(|error| Failure::failed(format!("no thread can be started: {error}")))?;
        Ok(Self { ended: Some(tell), kept, thread: Some(thread) })
    }

    /// Hands over what has ended. How many it has at once is for the caller to bound.
    pub(crate) fn keep(&self, ended: Ended) {
        // Where it has gone it has said why.
        if let Some(tell) = &self.ended {
            drop(tell.send(Handed::Ended(ended)));
        }
    }

    /// Nothing else is going on: what was handed over is kept without delay.
    pub(crate) fn hurry(&self) {
        if let Some(tell) = &self.ended {
            drop(tell.send(Handed::Now));
        }
    }

    /// Nothing more will end: what is left is kept at once.
    pub(crate) fn finish(&mut self) {
        self.ended = None;
    }

    /// What was kept next; `None` when all of it is.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Kept> {
        self.kept.recv().await
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.finish();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The thread, from inside.
struct Keeping {
    folder: Arc<Folder>,
    journal: File,
    /// Where lines are told, while somebody reads them.
    stdout: Option<BufWriter<Stdout>>,
    /// Kept for its room.
    lines: Vec<u8>,
}

impl Keeping {
    fn run(mut self, ended: &Receiver<Handed>, answer: &UnboundedSender<Kept>) {
        let mut due = Instant::now();
        let mut batch = Vec::new();
        let mut is_over = false;
        while !is_over {
            let wait = due.saturating_duration_since(Instant::now());
            let next = if batch.is_empty() {
                ended.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else if batch.len() < BATCH_MAX {
                ended.recv_timeout(wait)
            } else {
                Err(RecvTimeoutError::Timeout)
            };
            match next {
                Ok(Handed::Ended(mut ended)) => match self.write(&mut ended) {
                    Ok(()) => {
                        batch.push(ended);
                        continue;
                    }
                    Err(error) => {
                        // What was written before it is whole, and need not be fetched again.
                        drop(self.commit(&batch).map(|()| self.tell(&batch)));
                        drop(answer.send(Kept::Trouble(error)));
                        return;
                    }
                },
                Ok(Handed::Now) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => is_over = true,
            }
            if batch.is_empty() {
                continue;
            }
            if let Err(error) = self.commit(&batch) {
                drop(answer.send(Kept::Trouble(error)));
                return;
            }
            self.tell(&batch);
            drop(answer.send(Kept::Ended(std::mem::take(&mut batch))));
            due = Instant::now() + EVERY;
        }
    }

    /// Writes a small page to its part. Large ones are there already.
    fn write(&self, ended: &mut Ended) -> io::Result<()> {
        if let Fate::Done(page) = &mut ended.fate
            && let Body::Memory(body) = &page.body
        {
            let part = self.folder.part(&page.part);
            // Where the disk is full, what there is of it is in the way of the rest.
            fs::write(&part, body).inspect_err(|_| drop(fs::remove_file(&part)))?;
            page.body = Body::Part(page.body.bytes());
        }
        Ok(())
    }

    /// To the disk, into the journal, names: in this order.
    fn commit(&mut self, batch: &[Ended]) -> io::Result<()> {
        let whole = || {
            batch.iter().filter_map(|ended| match &ended.fate {
                Fate::Done(page) => Some(page),
                _ => None,
            })
        };
        let pages = whole().count();
        if pages > ALONE_MAX {
            sync_all(&self.folder.parts())?;
        } else {
            whole().try_for_each(|page| File::open(self.folder.part(&page.part))?.sync_all())?;
            if pages > 0 {
                File::open(self.folder.parts())?.sync_all()?;
            }
        }
        self.lines.clear();
        // What was there before is in the journal already, and there may be millions of it.
        for ended in batch.iter().filter(|ended| !matches!(ended.fate, Fate::Skipped(_))) {
            codec::write_journal(&mut self.lines, ended)?;
        }
        if !self.lines.is_empty() {
            self.journal.write_all(&self.lines)?;
            self.journal.sync_data()?;
        }
        whole().try_for_each(|page| give_name(self.folder.root(), &self.folder.part(&page.part), &page.file))
    }

    /// Tells programs. Where nobody reads any more, that is said once, and the fetch goes on.
    fn tell(&mut self, batch: &[Ended]) {
        let Some(stdout) = &mut self.stdout else { return };
        let told =
            batch.iter().try_for_each(|ended| codec::write_told(stdout, ended)).and_then(|()| stdout.flush());
        if let Err(error) = told {
            // What is still in it would be written when it is dropped, and fail again.
            if let Some(stdout) = self.stdout.take() {
                drop(stdout.into_parts());
            }
            let what = format!("note: stdout cannot be written to any more: {error}; the fetch goes on\n");
            drop(io::stderr().write_all(what.as_bytes()));
        }
    }
}

/// Brings all that is on its way to the disk of a folder there: one wait, however many files there are.
#[cfg(target_os = "linux")]
fn sync_all(folder: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(folder)?)?)
}

/// The same where the system cannot do it at once.
#[cfg(not(target_os = "linux"))]
fn sync_all(folder: &Path) -> io::Result<()> {
    for part in fs::read_dir(folder)? {
        File::open(part?.path())?.sync_all()?;
    }
    File::open(folder)?.sync_all()
}
