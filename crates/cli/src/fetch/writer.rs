//! Group commit of finished pages: syncs them to the disk, journals them, renames them, and then reports
//! them.
//!
//! One thread commits all pages that ended since the last commit, at most once a second, so that they share
//! the cost of a sync: see `docs/decisions/041`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Stdout, Write as _};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use reqwest::Url;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::codec;
use super::folder::{Folder, rename_part};
use super::part_file::Body;
use super::partial::Partial;
use super::result::{PageOutcome, PageResult};
use crate::failure::Failure;

/// Interval between commits.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum pages per commit.
pub(crate) const BATCH_MAX: usize = 4_096;
/// Up to this many files are synced one by one; beyond it, one `syncfs` covers the whole file system.
const SINGLE_SYNCS_MAX: usize = 16;

/// A report of the writer thread.
pub(crate) enum WriterEvent {
    /// These pages are committed and reported.
    Written(Vec<PageResult>),
    /// The writer failed and has stopped.
    Failed(io::Error),
}

/// A message to the writer thread.
enum Command {
    Write(PageResult),
    /// Journal what has arrived of a page in progress.
    Partial(Url, Partial),
    /// Commit now, without waiting for the interval.
    Flush,
}

/// Handle of the writer thread.
pub(crate) struct Writer {
    commands: Option<Arc<Sender<Command>>>,
    events: UnboundedReceiver<WriterEvent>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread. With `is_json`, it prints each page to stdout as one line of JSON.
    pub(crate) fn start(folder: &Arc<Folder>, journal: File, is_json: bool) -> Result<Self, Failure> {
        let (commands, received) = channel();
        let (reports, events) = unbounded_channel();
        let stdout = is_json.then(|| BufWriter::new(io::stdout()));
        let state = WriterThread { folder: Arc::clone(folder), journal, stdout, lines: Vec::new() };
        let thread =
            thread::Builder::new().name("writer".into()).spawn(move || state.run(&received, &reports));
        let thread = thread
            .map_err(|error| Failure::failed(format!("the writer thread cannot be started: {error}")))?;
        Ok(Self { commands: Some(Arc::new(commands)), events, thread: Some(thread) })
    }

    /// Hands over a finished page. The caller bounds the number of pages in the channel.
    pub(crate) fn write(&self, result: PageResult) {
        // If the thread has stopped, it has reported why.
        if let Some(commands) = &self.commands {
            drop(commands.send(Command::Write(result)));
        }
    }

    /// The journal of pages in progress.
    pub(crate) fn partials(&self) -> PartialJournal {
        PartialJournal { commands: self.commands.as_ref().map(Arc::downgrade).unwrap_or_default() }
    }

    /// Commits the pending pages without waiting for the interval.
    pub(crate) fn flush(&self) {
        if let Some(commands) = &self.commands {
            drop(commands.send(Command::Flush));
        }
    }

    /// Closes the channel: the thread commits what is left and ends.
    pub(crate) fn finish(&mut self) {
        self.commands = None;
    }

    /// The next report; `None` once the thread has ended.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<WriterEvent> {
        self.events.recv().await
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.finish();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Journals pages in progress, so that a kill does not lose what has arrived of them.
#[derive(Debug)]
pub(crate) struct PartialJournal {
    /// A page in progress does not keep the thread alive.
    commands: Weak<Sender<Command>>,
}

impl PartialJournal {
    /// Journals a part that is synced.
    pub(crate) fn write(&self, page: &Url, partial: Partial) {
        // If the thread has stopped, it has reported why.
        if let Some(commands) = self.commands.upgrade() {
            drop(commands.send(Command::Partial(page.clone(), partial)));
        }
    }
}

/// State of the writer thread.
struct WriterThread {
    folder: Arc<Folder>,
    journal: File,
    /// Output of the lines; `None` once a write has failed.
    stdout: Option<BufWriter<Stdout>>,
    /// A reused buffer.
    lines: Vec<u8>,
}

impl WriterThread {
    fn run(mut self, commands: &Receiver<Command>, reports: &UnboundedSender<WriterEvent>) {
        let mut due = Instant::now();
        let mut batch = Vec::new();
        let mut is_closed = false;
        while !is_closed {
            let wait = due.saturating_duration_since(Instant::now());
            let next = if batch.is_empty() {
                commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else if batch.len() < BATCH_MAX {
                commands.recv_timeout(wait)
            } else {
                Err(RecvTimeoutError::Timeout)
            };
            match next {
                Ok(Command::Partial(page, partial)) => match self.write_partial(&page, &partial) {
                    Ok(()) => continue,
                    Err(error) => {
                        drop(reports.send(WriterEvent::Failed(error)));
                        return;
                    }
                },
                Ok(Command::Write(mut result)) => match self.write_part(&mut result) {
                    Ok(()) => {
                        batch.push(result);
                        continue;
                    }
                    Err(error) => {
                        // Pages written before the failure are complete: commit them, so that they are not
                        // fetched again.
                        drop(self.commit(&batch).map(|()| self.print(&batch)));
                        drop(reports.send(WriterEvent::Failed(error)));
                        return;
                    }
                },
                Ok(Command::Flush) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => is_closed = true,
            }
            if batch.is_empty() {
                continue;
            }
            if let Err(error) = self.commit(&batch) {
                drop(reports.send(WriterEvent::Failed(error)));
                return;
            }
            self.print(&batch);
            drop(reports.send(WriterEvent::Written(std::mem::take(&mut batch))));
            due = Instant::now() + COMMIT_INTERVAL;
        }
    }

    /// Writes a small page to its part. Large pages were written as they arrived.
    fn write_part(&self, result: &mut PageResult) -> io::Result<()> {
        if let PageOutcome::Done(page) = &mut result.outcome
            && let Body::Memory(body) = &page.body
        {
            let part = self.folder.part(&page.part);
            // If the disk is full, an incomplete part would take space from the other pages.
            fs::write(&part, body).inspect_err(|_| drop(fs::remove_file(&part)))?;
            page.body = Body::PartFile(page.body.bytes());
        }
        Ok(())
    }

    fn write_partial(&mut self, page: &Url, partial: &Partial) -> io::Result<()> {
        self.lines.clear();
        codec::write_partial(&mut self.lines, page, partial)?;
        self.journal.write_all(&self.lines)?;
        self.journal.sync_data()
    }

    /// Syncs the parts, writes and syncs the journal, and renames the parts, in this order.
    fn commit(&mut self, batch: &[PageResult]) -> io::Result<()> {
        let whole = || {
            batch.iter().filter_map(|result| match &result.outcome {
                PageOutcome::Done(page) => Some(page),
                _ => None,
            })
        };
        let pages = whole().count();
        if pages > SINGLE_SYNCS_MAX {
            sync_all(&self.folder.parts())?;
        } else {
            whole().try_for_each(|page| File::open(self.folder.part(&page.part))?.sync_all())?;
            if pages > 0 {
                File::open(self.folder.parts())?.sync_all()?;
            }
        }
        self.lines.clear();
        // Skipped pages are in the journal already, and there may be millions of them.
        for result in batch.iter().filter(|result| !matches!(result.outcome, PageOutcome::Skipped(_))) {
            codec::write_journal(&mut self.lines, result)?;
        }
        if !self.lines.is_empty() {
            self.journal.write_all(&self.lines)?;
            self.journal.sync_data()?;
        }
        whole()
            .try_for_each(|page| rename_part(self.folder.root(), &self.folder.part(&page.part), &page.file))
    }

    /// Prints the lines for programs. If stdout fails, it warns once, and the fetch continues.
    fn print(&mut self, batch: &[PageResult]) {
        let Some(stdout) = &mut self.stdout else { return };
        let printed = batch
            .iter()
            .try_for_each(|result| codec::write_line(stdout, result))
            .and_then(|()| stdout.flush());
        if let Err(error) = printed {
            // Dropping the writer would flush its buffer, and fail again.
            if let Some(stdout) = self.stdout.take() {
                drop(stdout.into_parts());
            }
            let what = format!("note: stdout can no longer be written: {error}; the fetch continues\n");
            drop(io::stderr().write_all(what.as_bytes()));
        }
    }
}

/// Syncs the whole file system of a folder: one wait, regardless of the number of files.
#[cfg(target_os = "linux")]
fn sync_all(folder: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(folder)?)?)
}

/// Syncs file by file on systems without `syncfs`.
#[cfg(not(target_os = "linux"))]
fn sync_all(folder: &Path) -> io::Result<()> {
    for part in fs::read_dir(folder)? {
        File::open(part?.path())?.sync_all()?;
    }
    File::open(folder)?.sync_all()
}
