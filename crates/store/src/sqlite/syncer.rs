//! Syncs the write-ahead log after replies were sent: `durable=second`.
//!
//! It runs on a thread of its own and needs no lock of the file, so that neither a slow disk nor another
//! process delays it, and no caller waits for it. A failed sync is reported to all callers until one
//! succeeds.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::writer::Counters;
use crate::error::StoreError;
use crate::sync::lock;

/// How long a write may be unsynced, which leaves some time for the disk within the second.
const SYNC_INTERVAL: Duration = Duration::from_millis(900);
/// The delay before a failed sync is retried.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The state of the log, and the thread that syncs it.
pub(super) struct Syncer {
    log: PathBuf,
    counters: Arc<Counters>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// When the first unsynced write was made.
    unsynced: Option<Instant>,
    error: Option<StoreError>,
    is_ended: bool,
}

impl Syncer {
    pub(super) fn start(path: &Path, counters: &Arc<Counters>) -> io::Result<Arc<Self>> {
        // A killed process may have left unsynced writes.
        let state = State { unsynced: Some(Instant::now()), error: None, is_ended: false };
        let (log, counters) = (wal_path(path), Arc::clone(counters));
        let syncer = Arc::new(Self { log, counters, state: Mutex::new(state), changed: Condvar::new() });
        let thread = Arc::clone(&syncer);
        thread::Builder::new().name("tidegate-sync".to_owned()).spawn(move || thread.run())?;
        Ok(syncer)
    }

    /// Marks the log as unsynced.
    pub(super) fn mark_written(&self) {
        let mut state = lock(&self.state);
        if state.unsynced.is_none() {
            state.unsynced = Some(Instant::now());
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Returns the error of the last sync, if it failed.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        lock(&self.state).error.as_ref().map_or(Ok(()), |error| Err(error.duplicate()))
    }

    /// Ends the thread, after a last sync.
    pub(super) fn end(&self) {
        lock(&self.state).is_ended = true;
        self.changed.notify_one();
        self.sync();
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.is_ended {
            let due = state.unsynced.map(|since| since + SYNC_INTERVAL);
            let span = due.map(|due| due.saturating_duration_since(Instant::now()));
            state = match span {
                Some(Duration::ZERO) => {
                    drop(state);
                    let pause = if self.sync() { Duration::ZERO } else { RETRY_DELAY };
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

    /// Syncs the log if it may be unsynced. Returns whether it is synced now.
    fn sync(&self) -> bool {
        // Later writes may not be part of this sync.
        let Some(since) = lock(&self.state).unsynced.take() else { return true };
        let synced = sync(&self.log);
        let mut state = lock(&self.state);
        match synced {
            Ok(was_needed) => {
                state.error = None;
                self.counters.syncs.fetch_add(u64::from(was_needed), Ordering::Relaxed);
                true
            }
            Err(error) => {
                let what = format!("`{}` could not be synced to disk: {error}", self.log.display());
                state.error = Some(StoreError::unavailable(what));
                state.unsynced = Some(since);
                false
            }
        }
    }
}

/// Syncs a log, and returns whether that was needed: an empty or missing log has nothing that the file does
/// not have.
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

/// The path of a file's write-ahead log.
pub(super) fn wal_path(path: &Path) -> PathBuf {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    PathBuf::from(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Instead of a failing disk: a folder, which cannot be read as a log.
    #[test]
    fn failed_sync_is_reported_until_one_succeeds() {
        let folder = tempfile::tempdir().unwrap();
        let (path, counters) = (folder.path().join("limits.db"), Arc::new(Counters::default()));
        let state = State { unsynced: Some(Instant::now()), error: None, is_ended: false };
        let log = wal_path(&path).join("not a folder");
        std::fs::write(wal_path(&path), "frames").unwrap();
        let mut syncer = Syncer { log, counters, state: Mutex::new(state), changed: Condvar::new() };
        assert!(!syncer.sync());
        let message = syncer.check().unwrap_err().to_string();
        assert!(message.contains("could not be synced to disk"), "{message}");
        assert_eq!(syncer.counters.syncs.load(Ordering::Relaxed), 0);
        syncer.log = wal_path(&path);
        assert!(syncer.sync() && syncer.check().is_ok());
        assert_eq!(syncer.counters.syncs.load(Ordering::Relaxed), 1);
        assert!(syncer.sync(), "nothing is left to sync");
        assert_eq!(syncer.counters.syncs.load(Ordering::Relaxed), 1);
    }
}
