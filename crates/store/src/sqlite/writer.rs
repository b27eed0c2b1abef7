//! The thread that writes: it takes all waiting calls into one transaction (group commit).
//!
//! Calls that arrive during a commit go into the next transaction together: the slower the disk, the larger
//! it is. If another process holds the file, its lock is polled every one to two milliseconds.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

use super::errors::{CallError, file_error, is_busy};
use super::file::File;
use super::queue::{NextJobs, Queue};
use super::retention;
use super::schedule::Schedule;
use super::schema;
use super::syncer::Syncer;
use super::transaction::{Cache, QueuedJob, Transaction};
use crate::clock::WallClock;
use crate::error::StoreError;
use crate::retention::Retention;
use crate::tables::column;

/// The most calls of a transaction. It does not adapt to the deadline: the sync to disk is most of the time,
/// whatever the size, and smaller transactions need more of them.
pub(super) const BATCH_MAX: usize = 512;
/// The default time that a call waits for its transaction to begin.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
/// The longest wait for callers that were just answered and usually send another call.
const GATHER_MAX: Duration = Duration::from_micros(200);
/// The longest wait without a new arrival.
const GATHER_IDLE_MAX: Duration = Duration::from_micros(40);
/// Pages that draws leave free in a file with a size limit, because an ending needs some before it frees
/// space. More than the draws of one transaction take.
const RESERVED_PAGES: i64 = 32;
/// How long undo jobs are retried, and the most that are kept.
const UNDO_RETRIED_FOR: Duration = Duration::from_secs(60);
const UNDO_JOBS_MAX: usize = 1 << 16;

/// Counters of the store.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) transactions: AtomicU64,
    pub(super) draws: AtomicU64,
    pub(super) syncs: AtomicU64,
}

/// The state of the writing thread.
pub(super) struct Writer {
    pub(super) connection: Connection,
    pub(super) file: Option<File>,
    pub(super) place: Arc<str>,
    pub(super) clock: Arc<dyn WallClock>,
    pub(super) retention: Retention,
    /// Whether the file has a size limit.
    pub(super) is_bounded: bool,
    pub(super) batch_max: usize,
    /// How long a call waits for its transaction to begin.
    pub(super) timeout: Duration,
    pub(super) queue: Arc<Queue<QueuedJob>>,
    pub(super) counters: Arc<Counters>,
    pub(super) cache: Cache,
    /// The clock as the file has it and as last read; `None` after another connection has written.
    pub(super) anchors: Option<[Anchor; 2]>,
    pub(super) data_version: i64,
    pub(super) random: Random,
    /// The concurrency seen by the last transaction: calls that it answered and calls that were waiting.
    pub(super) callers: usize,
    pub(super) schedule: Schedule,
    /// Undo jobs, which have no caller.
    pub(super) undo_jobs: VecDeque<QueuedJob>,
    /// Syncs the log, if commits do not.
    pub(super) syncer: Option<Arc<Syncer>>,
}

/// Why a transaction failed.
enum TransactionError {
    /// An error of SQLite, caused by an unknown call.
    Engine(rusqlite::Error),
    /// An error that concerns all calls.
    All(StoreError),
}

impl From<rusqlite::Error> for TransactionError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Engine(error)
    }
}

impl Writer {
    /// Runs until the queue is closed and the undo jobs are done.
    pub(super) fn run(&mut self) {
        loop {
            let found =
                self.queue.take(self.batch_max, Some(self.schedule.wakes_at(!self.undo_jobs.is_empty())));
            match found {
                NextJobs::Jobs(jobs) => {
                    let jobs = self.gather(jobs);
                    self.run_batch(jobs)
                }
                NextJobs::TimedOut => self.run_batch(Vec::new()),
                NextJobs::Closed => break,
            };
        }
        while !self.undo_jobs.is_empty() && self.run_batch(Vec::new()) {}
        if let Some(syncer) = &self.syncer {
            syncer.end();
        }
    }

    /// Waits a moment for callers that were just answered: most send another call, and one large transaction
    /// is faster than two alternating ones.
    fn gather(&mut self, mut jobs: Vec<QueuedJob>) -> Vec<QueuedJob> {
        let started = Instant::now();
        let mut came = started;
        while jobs.len() < self.callers && came.elapsed() < GATHER_IDLE_MAX && started.elapsed() < GATHER_MAX
        {
            thread::yield_now();
            if self.queue.take_more(&mut jobs, self.batch_max) {
                came = Instant::now();
            }
        }
        jobs
    }

    /// Runs one transaction for the undo jobs and all calls whose callers still wait. Returns whether it
    /// succeeded.
    fn run_batch(&mut self, jobs: Vec<QueuedJob>) -> bool {
        let undos = self.undo_jobs.len().min(BATCH_MAX);
        let mut batch: Vec<QueuedJob> = self.undo_jobs.drain(..undos).collect();
        batch.extend(jobs.into_iter().filter(|queued| queued.job.is_wanted()));
        for queued in &batch {
            queued.time.send();
        }
        if let Err(error) = self.check_disk() {
            return self.fail(batch, &error);
        }
        // Other processes cannot signal that they wait.
        if self.file.is_some()
            && let Some(rest) = self.schedule.pause_for_others(Instant::now())
        {
            thread::sleep(rest);
        }
        match self.attempt(batch) {
            Ok(is_done) => is_done,
            Err((batch, error)) if batch.len() <= 1 => self.fail(batch, &error),
            Err((batch, _)) => self.run_individually(batch),
        }
    }

    /// One call made the batch fail: each is retried alone.
    fn run_individually(&mut self, batch: Vec<QueuedJob>) -> bool {
        let mut is_any_done = false;
        for queued in batch {
            is_any_done |= match self.attempt(vec![queued]) {
                Ok(is_done) => is_done,
                Err((one, error)) => self.fail(one, &error),
            };
        }
        is_any_done
    }

    /// Runs one transaction for these jobs and replies to them. If one of them may have made it fail, all are
    /// returned.
    fn attempt(&mut self, batch: Vec<QueuedJob>) -> Result<bool, (Vec<QueuedJob>, StoreError)> {
        let Some(mut batch) = self.begin(batch) else { return Ok(false) };
        // A caller's clock or a bug may panic: the transaction is rolled back, and the thread continues.
        let done = catch_unwind(AssertUnwindSafe(|| self.transact(&mut batch)));
        let stop = match done {
            Ok(Ok(())) => return Ok(self.reply_if_file_exists(batch)),
            Ok(Err(TransactionError::All(error))) => Ok(error),
            Ok(Err(TransactionError::Engine(error))) => Err(file_error(&self.place, &error)),
            Err(_panic) => Err(StoreError::unavailable("the store's thread panicked: nothing was done")),
        };
        self.invalidate();
        // Some errors have rolled it back already.
        drop(self.connection.execute_batch("ROLLBACK"));
        match stop {
            Ok(error) => Ok(self.fail(batch, &error)),
            Err(error) => Err((batch, error)),
        }
    }

    /// Replies to the calls if the file still exists; otherwise their writes are lost.
    fn reply_if_file_exists(&mut self, mut batch: Vec<QueuedJob>) -> bool {
        let Err(error) = self.check_file() else { return self.reply(batch) };
        let gone: Vec<_> = batch.extract_if(.., |queued| !queued.job.is_wanted()).collect();
        self.reply(gone);
        self.fail(batch, &error)
    }

    fn check_file(&self) -> Result<(), StoreError> {
        self.file.as_ref().map_or(Ok(()), File::check)
    }

    /// Checks that the file exists, and that earlier writes are synced or can be.
    fn check_disk(&self) -> Result<(), StoreError> {
        self.check_file()?;
        self.syncer.as_ref().map_or(Ok(()), |syncer| syncer.check())
    }

    /// Begins a write transaction as soon as no other process has one. Fails calls that wait for too long.
    fn begin(&mut self, mut batch: Vec<QueuedJob>) -> Option<Vec<QueuedJob>> {
        let is_idle = batch.is_empty();
        let started = Instant::now();
        loop {
            let Err(cause) = self.try_to_begin() else { return Some(batch) };
            let error = file_error(&self.place, &cause);
            if !is_busy(&cause) {
                self.fail(batch, &error);
                return None;
            }
            let now = Instant::now();
            let is_late =
                |queued: &mut QueuedJob| queued.time.elapsed().is_some_and(|elapsed| elapsed >= self.timeout);
            let late: Vec<_> = batch.extract_if(.., is_late).collect();
            if !late.is_empty() || now.duration_since(started) >= self.timeout {
                self.fail(late, &error);
            }
            batch.retain(|queued| queued.job.is_wanted());
            if batch.is_empty() && (!is_idle || now.duration_since(started) >= self.timeout) {
                return None;
            }
            thread::sleep(Duration::from_micros(1_000 + self.random.below(1_000)));
        }
    }

    fn try_to_begin(&self) -> rusqlite::Result<()> {
        if !self.connection.is_autocommit() {
            // A rollback failed before.
            self.connection.execute_batch("ROLLBACK")?;
        }
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    fn transact(&mut self, batch: &mut [QueuedJob]) -> Result<(), TransactionError> {
        let changes = self.connection.total_changes();
        self.invalidate_if_changed()?;
        let anchor = self.read_clock()?;
        let no_space = self.no_space_reason()?;
        let mut transaction = Transaction {
            connection: &self.connection,
            anchor,
            now: anchor.latest(),
            cache: &mut self.cache,
            retention: self.retention,
            visited: Vec::new(),
            draws: 0,
            no_space,
            calls: batch.len(),
            is_behind: self.schedule.is_behind,
        };
        for queued in batch.iter_mut() {
            queued.job.run(&mut transaction)?;
        }
        if self.schedule.starts_cleanup(Instant::now()) {
            retention::apply(&mut transaction)?;
        }
        transaction.write().map_err(to_engine_error)?;
        let (draws, is_behind) = (transaction.draws, transaction.is_behind);
        self.commit(changes)?;
        self.schedule.is_behind = is_behind;
        self.counters.transactions.fetch_add(1, Ordering::Relaxed);
        self.counters.draws.fetch_add(draws, Ordering::Relaxed);
        Ok(())
    }

    /// Why draws are refused, if only the reserved pages are left.
    fn no_space_reason(&self) -> rusqlite::Result<Option<String>> {
        if !self.is_bounded {
            return Ok(None);
        }
        let read =
            |pragma: &str| self.connection.prepare_cached(pragma)?.query_row([], |row| row.get::<_, i64>(0));
        let used = read("PRAGMA page_count")? - read("PRAGMA freelist_count")?;
        let place = &self.place;
        let what =
            || format!("no space for `{place}` to grow: {RESERVED_PAGES} pages are reserved for endings");
        Ok((used > read("PRAGMA max_page_count")? - RESERVED_PAGES).then(what))
    }

    /// Drops all cached state if another connection has written to the file. Stops writing to a file that a
    /// newer version has migrated.
    fn invalidate_if_changed(&mut self) -> Result<(), TransactionError> {
        let read = |row: &rusqlite::Row<'_>| row.get(0);
        let version: i64 = self.connection.prepare_cached("PRAGMA data_version")?.query_row([], read)?;
        if version != self.data_version {
            // Checked before the data version is stored, so that the check repeats.
            if let Some(newer) = schema::newer(&self.connection, &self.place)? {
                return Err(TransactionError::All(StoreError::Invalid { what: newer }));
            }
            self.data_version = version;
            self.invalidate();
            self.schedule.saw_other_writer(Instant::now());
        }
        // All of it is written, and reloaded when needed.
        self.cache.bound();
        Ok(())
    }

    /// Drops cached state, which may be ahead of the file.
    fn invalidate(&mut self) {
        self.cache.clear();
        self.anchors = None;
    }

    /// Reads the clock. The time is never before that of any process.
    fn read_clock(&mut self) -> rusqlite::Result<Anchor> {
        let [kept, mut anchor] = match self.anchors {
            Some(anchors) => anchors,
            None => [read_anchor(&self.connection)?; 2],
        };
        anchor.read(self.clock.now());
        self.anchors = Some([kept, anchor]);
        Ok(anchor)
    }

    fn write_clock(&mut self) -> rusqlite::Result<()> {
        let Some([kept, anchor]) = &mut self.anchors else { return Ok(()) };
        let mut write = self.connection.prepare_cached("UPDATE clock SET latest = ?1, ahead = ?2")?;
        let offset = u64::try_from(anchor.offset().as_micros()).unwrap_or(u64::MAX);
        write.execute((column(anchor.latest().as_micros()), column(offset)))?;
        *kept = *anchor;
        Ok(())
    }

    fn commit(&mut self, changes_before: u64) -> rusqlite::Result<()> {
        let is_unchanged = self.connection.total_changes() == changes_before;
        // An offset of the clock is written at once, because readers would see time stand still until then.
        let is_clock_due = self.anchors.is_some_and(|[kept, anchor]| anchor.is_due(&kept));
        if is_unchanged && !is_clock_due {
            // Only refusals: nothing to write.
            self.connection.prepare_cached("ROLLBACK")?.execute([])?;
            return Ok(());
        }
        self.write_clock()?;
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        match &self.syncer {
            Some(syncer) => syncer.mark_written(),
            None => drop(self.counters.syncs.fetch_add(1, Ordering::Relaxed)),
        }
        Ok(())
    }

    /// Replies to the callers. Draws whose callers were dropped are undone in the next transaction.
    fn reply(&mut self, batch: Vec<QueuedJob>) -> bool {
        self.callers = match batch.len() + self.queue.len() {
            // A single caller is not waited for.
            1 => 0,
            callers => callers.min(self.batch_max),
        };
        self.schedule.has_ended(Instant::now());
        for queued in batch {
            // Wakers are foreign code and may panic.
            let undo_job = catch_unwind(AssertUnwindSafe(|| queued.job.reply(&self.queue)));
            if let Ok(Some(job)) = undo_job {
                self.queue_undo(QueuedJob::new(job));
            }
        }
        true
    }

    /// Reports a failed transaction to the callers. Undo jobs are retried.
    fn fail(&mut self, batch: Vec<QueuedJob>, error: &StoreError) -> bool {
        self.invalidate();
        self.schedule.has_failed(Instant::now());
        for QueuedJob { at, time, job } in batch {
            let unclaimed = catch_unwind(AssertUnwindSafe(|| job.fail(error.duplicate())));
            if let Ok(Some(job)) = unclaimed {
                self.queue_undo(QueuedJob { at, time, job });
            }
        }
        false
    }

    fn queue_undo(&mut self, queued: QueuedJob) {
        // A draw that is not undone in time returns at its deadline.
        if self.undo_jobs.len() < UNDO_JOBS_MAX && queued.at.elapsed() < UNDO_RETRIED_FOR {
            self.undo_jobs.push_back(queued);
        }
    }
}

impl Drop for Writer {
    /// Fails all waiting calls, however the thread ends.
    fn drop(&mut self) {
        self.queue.close();
        while let NextJobs::Jobs(jobs) = self.queue.take(BATCH_MAX, None) {
            drop(catch_unwind(AssertUnwindSafe(|| drop(jobs))));
        }
    }
}

fn to_engine_error(error: CallError) -> rusqlite::Error {
    match error {
        CallError::Transaction(error) => error,
        CallError::Reply(error) => rusqlite::Error::ToSqlConversionFailure(Box::new(error)),
    }
}

/// Reads the clock from the file.
pub(super) fn read_anchor(connection: &Connection) -> rusqlite::Result<Anchor> {
    let mut read = connection.prepare_cached("SELECT latest, ahead FROM clock")?;
    read.query_row([], |row| {
        let (latest, ahead): (i64, i64) = (row.get(0)?, row.get(1)?);
        Ok(Anchor::restored(Stamp::from_micros(latest.unsigned_abs()), ahead.unsigned_abs()))
    })
}
