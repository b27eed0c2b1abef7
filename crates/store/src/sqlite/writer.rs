//! The one thread of a process that writes: it takes all who wait into one transaction.
//!
//! While a transaction is written others come and wait, and go into the next one together: the slower the disk, the
//! more they are. Another process may hold the file; it is then asked for again every one to two milliseconds.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use foldhash::HashMap;
use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

use super::evict::Round;
use super::file::File;
use super::queue::{Found, Queue};
use super::retention;
use super::schema;
use super::space::Space;
use super::syncer::Syncer;
use super::times::Times;
use super::trouble::{Fault, Trouble, is_busy};
use super::work::{Asked, Work};
use crate::clock::WallClock;
use crate::retention::Retention;
use crate::tables::column;

/// Calls in one transaction.
pub(super) const BATCH_MAX: usize = 512;
/// A call waits no longer for its transaction to begin, unless said otherwise.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
/// Those who were answered a moment ago mostly ask again: they are waited for no longer than this.
const GATHERED_WITHIN: Duration = Duration::from_micros(200);
/// And no longer than this when none comes.
const GATHERED_IN_VAIN: Duration = Duration::from_micros(40);
/// Pages that draws leave free in a file with a bound: endings need some before they make room. More than the draws of
/// one transaction take.
const PAGES_KEPT: i64 = 32;
/// What is owed is tried for this long, and for so many.
const OWED_FOR: Duration = Duration::from_secs(60);
const OWED_MAX: usize = 1 << 16;
/// Namespaces, and buckets and leases of all of them, that are kept for the next transaction.
const SPACES_MAX: usize = 64;
const KEPT_MAX: usize = 1 << 17;

/// What was done so far.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) transactions: AtomicU64,
    pub(super) draws: AtomicU64,
    pub(super) syncs: AtomicU64,
}

/// The thread's own.
pub(super) struct Writer {
    pub(super) connection: Connection,
    pub(super) file: Option<File>,
    pub(super) place: Arc<str>,
    pub(super) clock: Arc<dyn WallClock>,
    pub(super) retention: Retention,
    /// The file has a bound of its own.
    pub(super) is_bounded: bool,
    pub(super) batch_max: usize,
    /// A call waits no longer for its transaction to begin.
    pub(super) patience: Duration,
    pub(super) queue: Arc<Queue<Asked>>,
    pub(super) counters: Arc<Counters>,
    pub(super) spaces: HashMap<i64, Space>,
    /// Where eviction is in the namespaces that are not loaded.
    pub(super) rounds: HashMap<i64, Round>,
    /// The clock, as long as no other connection has written: as the file has it, and as it was last read.
    pub(super) anchors: Option<[Anchor; 2]>,
    pub(super) data_version: i64,
    pub(super) random: Random,
    /// Callers at a time, as of the transaction before: those it answered, and those who waited meanwhile.
    pub(super) callers: usize,
    pub(super) times: Times,
    /// What is to be done though nobody waits for it, as soon as it can be.
    pub(super) owed: VecDeque<Asked>,
    /// Puts on the disk what was answered, where commits do not wait for that.
    pub(super) syncer: Option<Arc<Syncer>>,
}

/// Why a transaction cannot go on.
enum Stop {
    /// SQLite says so; which of the calls it is about is not known.
    Engine(rusqlite::Error),
    /// It is about all of them.
    All(Fault),
}

impl From<rusqlite::Error> for Stop {
    fn from(error: rusqlite::Error) -> Self {
        Self::Engine(error)
    }
}

impl Writer {
    /// Works until nobody can ask for anything any more.
    pub(super) fn run(&mut self) {
        loop {
            let found = self.queue.take(self.batch_max, Some(self.times.wakes_at(!self.owed.is_empty())));
            match found {
                Found::Jobs(jobs) => {
                    let jobs = self.gather(jobs);
                    self.round(jobs)
                }
                Found::Nothing => self.round(Vec::new()),
                Found::Closed => break,
            };
        }
        while !self.owed.is_empty() && self.round(Vec::new()) {}
        if let Some(syncer) = &self.syncer {
            syncer.end();
        }
    }

    /// Waits a moment for those who were answered just now: most ask again, and one large transaction is quicker than two
    /// that take turns.
    fn gather(&mut self, mut jobs: Vec<Asked>) -> Vec<Asked> {
        let started = Instant::now();
        let mut came = started;
        while jobs.len() < self.callers
            && came.elapsed() < GATHERED_IN_VAIN
            && started.elapsed() < GATHERED_WITHIN
        {
            thread::yield_now();
            if self.queue.take_more(&mut jobs, self.batch_max) {
                came = Instant::now();
            }
        }
        jobs
    }

    /// One transaction for what is owed and for all of these who still wait. Answers whether it was done.
    fn round(&mut self, jobs: Vec<Asked>) -> bool {
        let owed = self.owed.len().min(BATCH_MAX);
        let mut batch: Vec<Asked> = self.owed.drain(..owed).collect();
        batch.extend(jobs.into_iter().filter(|asked| asked.job.is_wanted()));
        for asked in &batch {
            asked.time.send();
        }
        if let Err(fault) = self.check_disk() {
            return self.fail(batch, &fault);
        }
        // Others cannot tell that they are waiting.
        if self.file.is_some()
            && let Some(rest) = self.times.take_a_break(Instant::now())
        {
            thread::sleep(rest);
        }
        match self.attempt(batch) {
            Ok(is_done) => is_done,
            Err((batch, fault)) if batch.len() <= 1 => self.fail(batch, &fault),
            Err((batch, _)) => self.one_by_one(batch),
        }
    }

    /// One of them is the reason that none was done: each by itself, so that the others need not know.
    fn one_by_one(&mut self, batch: Vec<Asked>) -> bool {
        let mut is_any_done = false;
        for asked in batch {
            is_any_done |= match self.attempt(vec![asked]) {
                Ok(is_done) => is_done,
                Err((one, fault)) => self.fail(one, &fault),
            };
        }
        is_any_done
    }

    /// One transaction for all of these, who are answered. Where one of them may be the reason that nothing was done, they
    /// come back.
    fn attempt(&mut self, batch: Vec<Asked>) -> Result<bool, (Vec<Asked>, Fault)> {
        let Some(mut batch) = self.begin(batch) else { return Ok(false) };
        // A clock of somebody's, or a defect of ours: the transaction is undone, and the thread goes on.
        let done = catch_unwind(AssertUnwindSafe(|| self.transact(&mut batch)));
        let stop = match done {
            Ok(Ok(())) => return Ok(self.is_written(batch)),
            Ok(Err(Stop::All(fault))) => Ok(fault),
            Ok(Err(Stop::Engine(error))) => Err(Fault::of(&self.place, &error)),
            Err(_panic) => Err(Fault::Away("the store's thread panicked: nothing was done".to_owned())),
        };
        self.doubt();
        // Some errors have undone the transaction already, and then there is nothing to undo.
        drop(self.connection.execute_batch("ROLLBACK"));
        match stop {
            Ok(fault) => Ok(self.fail(batch, &fault)),
            Err(fault) => Err((batch, fault)),
        }
    }

    /// Answers what was written, if the file is still there: else it has gone with it.
    fn is_written(&mut self, mut batch: Vec<Asked>) -> bool {
        let Err(fault) = self.check_file() else { return self.answer(batch) };
        let gone: Vec<_> = batch.extract_if(.., |asked| !asked.job.is_wanted()).collect();
        self.answer(gone);
        self.fail(batch, &fault)
    }

    fn check_file(&self) -> Result<(), Fault> {
        self.file.as_ref().map_or(Ok(()), File::check)
    }

    /// Whether the file is there, and what was answered before is on the disk, or can be.
    fn check_disk(&self) -> Result<(), Fault> {
        self.check_file()?;
        self.syncer.as_ref().map_or(Ok(()), |syncer| syncer.check())
    }

    /// Begins a transaction that may write, as soon as no other process has one. Whoever waits for too long is told so.
    fn begin(&mut self, mut batch: Vec<Asked>) -> Option<Vec<Asked>> {
        let is_idle = batch.is_empty();
        let started = Instant::now();
        loop {
            let Err(error) = self.try_to_begin() else { return Some(batch) };
            let fault = Fault::of(&self.place, &error);
            if !is_busy(&error) {
                self.fail(batch, &fault);
                return None;
            }
            let now = Instant::now();
            let is_late =
                |asked: &mut Asked| asked.time.elapsed().is_some_and(|elapsed| elapsed >= self.patience);
            let late: Vec<_> = batch.extract_if(.., is_late).collect();
            if !late.is_empty() || now.duration_since(started) >= self.patience {
                self.fail(late, &fault);
            }
            batch.retain(|asked| asked.job.is_wanted());
            if batch.is_empty() && (!is_idle || now.duration_since(started) >= self.patience) {
                return None;
            }
            thread::sleep(Duration::from_micros(1_000 + self.random.below(1_000)));
        }
    }

    fn try_to_begin(&self) -> rusqlite::Result<()> {
        if !self.connection.is_autocommit() {
            // It could not be undone when it failed.
            self.connection.execute_batch("ROLLBACK")?;
        }
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    fn transact(&mut self, batch: &mut [Asked]) -> Result<(), Stop> {
        let changes = self.connection.total_changes();
        self.believe_only_what_is_unchanged()?;
        let anchor = self.read_clock()?;
        let no_room = self.is_tight()?;
        let mut work =
            Work::new(&self.connection, anchor, (&mut self.spaces, &mut self.rounds), self.retention);
        (work.calls, work.no_room, work.is_behind) = (batch.len(), no_room, self.times.is_behind);
        for asked in batch.iter_mut() {
            asked.job.run(&mut work)?;
        }
        if self.times.tidies(Instant::now()) {
            retention::apply(&mut work)?;
        }
        work.write().map_err(engine)?;
        let (draws, is_behind) = (work.draws, work.is_behind);
        self.commit(changes)?;
        self.times.is_behind = is_behind;
        self.counters.transactions.fetch_add(1, Ordering::Relaxed);
        self.counters.draws.fetch_add(draws, Ordering::Relaxed);
        Ok(())
    }

    /// Why nothing new is drawn, if what is left of the file is for endings.
    fn is_tight(&self) -> rusqlite::Result<Option<String>> {
        if !self.is_bounded {
            return Ok(None);
        }
        let read =
            |pragma: &str| self.connection.prepare_cached(pragma)?.query_row([], |row| row.get::<_, i64>(0));
        let used = read("PRAGMA page_count")? - read("PRAGMA freelist_count")?;
        let place = &self.place;
        let what =
            || format!("there is no room for `{place}` to grow: {PAGES_KEPT} pages are kept for endings");
        Ok((used > read("PRAGMA max_page_count")? - PAGES_KEPT).then(what))
    }

    /// Forgets what is known of the file if another connection has written to it, and writes no more to one that a newer
    /// program has brought up to date.
    fn believe_only_what_is_unchanged(&mut self) -> Result<(), Stop> {
        let read = |row: &rusqlite::Row<'_>| row.get(0);
        let version: i64 = self.connection.prepare_cached("PRAGMA data_version")?.query_row([], read)?;
        if version != self.data_version {
            // Before it is taken to have been looked at: it stays newer.
            if let Some(newer) = schema::newer(&self.connection, &self.place)? {
                return Err(Stop::All(Fault::Invalid(newer)));
            }
            self.data_version = version;
            self.doubt();
            self.times.saw_others(Instant::now());
        }
        // All of it is written. What is needed is loaded again.
        let kept = self.spaces.values().map(Space::len).sum::<usize>();
        if self.spaces.len() > SPACES_MAX || kept > KEPT_MAX {
            self.clear_spaces();
        }
        Ok(())
    }

    /// What is known may be ahead of what is written.
    fn doubt(&mut self) {
        self.clear_spaces();
        self.anchors = None;
    }

    /// All is loaded again. Eviction goes on where it was, else other processes' writes would send it back to the start.
    fn clear_spaces(&mut self) {
        self.rounds.extend(self.spaces.drain().map(|(namespace, space)| (namespace, space.round)));
    }

    /// The time, which is never before what any process has told.
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
        // An offset of the clock is written at once: until then time would stand still for readers.
        let is_clock_due = self.anchors.is_some_and(|[kept, anchor]| anchor.is_due(&kept));
        if is_unchanged && !is_clock_due {
            // Nothing but refusals: there is nothing to write.
            self.connection.prepare_cached("ROLLBACK")?.execute([])?;
            return Ok(());
        }
        self.write_clock()?;
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        match &self.syncer {
            Some(syncer) => syncer.has_written(),
            None => drop(self.counters.syncs.fetch_add(1, Ordering::Relaxed)),
        }
        Ok(())
    }

    /// Tells those who wait. What was drawn for somebody who has gone meanwhile is returned in the next transaction.
    fn answer(&mut self, batch: Vec<Asked>) -> bool {
        self.callers = match batch.len() + self.queue.len() {
            // One by himself is not waited for.
            1 => 0,
            callers => callers.min(self.batch_max),
        };
        self.times.has_ended(Instant::now());
        for asked in batch {
            // Whoever waits is woken by code of his own.
            let undoing = catch_unwind(AssertUnwindSafe(|| asked.job.answer(&self.queue)));
            if let Ok(Some(job)) = undoing {
                self.owe(Asked::new(job));
            }
        }
        true
    }

    /// Nothing was done: all who wait are told why, and what nobody waits for is tried again.
    fn fail(&mut self, batch: Vec<Asked>, fault: &Fault) -> bool {
        self.doubt();
        self.times.has_failed(Instant::now());
        for Asked { at, time, job } in batch {
            let unheard = catch_unwind(AssertUnwindSafe(|| job.fail(fault.error())));
            if let Ok(Some(job)) = unheard {
                self.owe(Asked { at, time, job });
            }
        }
        false
    }

    fn owe(&mut self, asked: Asked) {
        // What is not returned in time returns when its deadline comes.
        if self.owed.len() < OWED_MAX && asked.at.elapsed() < OWED_FOR {
            self.owed.push_back(asked);
        }
    }
}

impl Drop for Writer {
    /// However it ends, nobody waits for it for ever.
    fn drop(&mut self) {
        self.queue.close();
        while let Found::Jobs(jobs) = self.queue.take(BATCH_MAX, None) {
            drop(catch_unwind(AssertUnwindSafe(|| drop(jobs))));
        }
    }
}

fn engine(trouble: Trouble) -> rusqlite::Error {
    match trouble {
        Trouble::Engine(error) => error,
        Trouble::Answer(error) => rusqlite::Error::ToSqlConversionFailure(Box::new(error)),
    }
}

/// The clock as the file has it.
pub(super) fn read_anchor(connection: &Connection) -> rusqlite::Result<Anchor> {
    let mut read = connection.prepare_cached("SELECT latest, ahead FROM clock")?;
    read.query_row([], |row| {
        let (latest, ahead): (i64, i64) = (row.get(0)?, row.get(1)?);
        Ok(Anchor::restored(Stamp::from_micros(latest.unsigned_abs()), ahead.unsigned_abs()))
    })
}
