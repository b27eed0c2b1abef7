//! Puts on the disk what was answered before it was there: `durable=second`.
//!
//! A thread of its own syncs the log, which needs no lock: neither a slow disk nor another process that holds the file
//! keeps it from that, and nobody who asks waits for it. What it cannot put there is told to everybody who asks.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::trouble::Fault;
use super::writer::Counters;
use crate::sync::lock;

/// What is written is on the disk no later than this, and some time for the disk itself.
const SYNCED_EVERY: Duration = Duration::from_millis(900);
/// How long after a failure it is tried again.
const TRIED_AGAIN: Duration = Duration::from_millis(200);

/// What is perhaps not on the disk yet, and the thread that puts it there.
pub(super) struct Syncer {
    log: PathBuf,
    counters: Arc<Counters>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// When the first of it was written.
    unsynced: Option<Instant>,
    fault: Option<Fault>,
    is_ended: bool,
}

impl Syncer {
    pub(super) fn start(path: &Path, counters: &Arc<Counters>) -> io::Result<Arc<Self>> {
        // What a process has left that was killed is not on the disk either.
        let state = State { unsynced: Some(Instant::now()), fault: None, is_ended: false };
        let (log, counters) = (log_of(path), Arc::clone(counters));
        let syncer = Arc::new(Self { log, counters, state: Mutex::new(state), changed: Condvar::new() });
        let thread = Arc::clone(&syncer);
        thread::Builder::new().name("tidegate-sync".to_owned()).spawn(move || thread.run())?;
        Ok(syncer)
    }

    /// Something was written and answered.
    pub(super) fn has_written(&self) {
        let mut state = lock(&self.state);
        if state.unsynced.is_none() {
            state.unsynced = Some(Instant::now());
            drop(state);
            self.changed.notify_one();
        }
    }

    /// What keeps it from putting on the disk what was answered.
    pub(super) fn check(&self) -> Result<(), Fault> {
        lock(&self.state).fault.clone().map_or(Ok(()), Err)
    }

    /// Puts the rest on the disk, and ends.
    pub(super) fn end(&self) {
        lock(&self.state).is_ended = true;
        self.changed.notify_one();
        self.sync();
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.is_ended {
            let due = state.unsynced.map(|since| since + SYNCED_EVERY);
            let span = due.map(|due| due.saturating_duration_since(Instant::now()));
            state = match span {
                Some(Duration::ZERO) => {
                    drop(state);
                    let pause = if self.sync() { Duration::ZERO } else { TRIED_AGAIN };
                    self.changed
                        .wait_timeout(lock(&self.state), pause)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
                Some(span) => {
                    self.changed.wait_timeout(state, span).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Syncs the log, if something in it is perhaps not on the disk. Answers whether it is there now.
    fn sync(&self) -> bool {
        // What is written from now on is perhaps not part of it.
        let Some(since) = lock(&self.state).unsynced.take() else { return true };
        let synced = sync(&self.log);
        let mut state = lock(&self.state);
        match synced {
            Ok(has_something) => {
                state.fault = None;
                self.counters.syncs.fetch_add(u64::from(has_something), Ordering::Relaxed);
                true
            }
            Err(error) => {
                let what = format!("`{}` could not be put on the disk: {error}", self.log.display());
                state.fault = Some(Fault::Away(what));
                state.unsynced = Some(since);
                false
            }
        }
    }
}

/// Whether there was anything to sync: a log that is empty, or not there, has nothing that the file does not have.
fn sync(log: &Path) -> io::Result<bool> {
    let log = match File::open(log) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        log => log?,
    };
    if log.metadata()?.len() == 0 {
        return Ok(false);
    }
    log.sync_data()?;
    Ok(true)
}

/// The log that SQLite keeps beside a file.
pub(super) fn log_of(path: &Path) -> PathBuf {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    PathBuf::from(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the place of a disk that fails: a folder cannot be read as a log, and then it is gone.
    #[test]
    fn what_cannot_be_put_on_the_disk_is_told_until_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let (path, counters) = (folder.path().join("limits.db"), Arc::new(Counters::default()));
        let state = State { unsynced: Some(Instant::now()), fault: None, is_ended: false };
        let log = log_of(&path).join("not a folder");
        std::fs::write(log_of(&path), "frames").unwrap();
        let mut syncer = Syncer { log, counters, state: Mutex::new(state), changed: Condvar::new() };
        assert!(!syncer.sync());
        let told = syncer.check().unwrap_err().error().to_string();
        assert!(told.contains("could not be put on the disk"), "{told}");
        assert_eq!(syncer.counters.syncs.load(Ordering::Relaxed), 0);
        syncer.log = log_of(&path);
        assert!(syncer.sync() && syncer.check().is_ok());
        assert_eq!(syncer.counters.syncs.load(Ordering::Relaxed), 1);
        assert!(syncer.sync(), "there is nothing more to do");
        assert_eq!(syncer.counters.syncs.load(Ordering::Relaxed), 1);
    }
}
