//! Batches the steps of concurrent callers (group commit): calls that arrive while batches are in flight are
//! sent together in the next one.
//!
//! Several batches may be in flight. A call whose subjects are in one of them waits here rather than for the
//! server's row locks, so that a busy subject has one batch at a time, with all of its waiting callers, and
//! other subjects are sent beside it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use foldhash::{HashSet, HashSetExt};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::Inner;
use super::batch::Batch;
use super::call::{Call, Job, LevelsTextCache, StepReply};
use super::errors::{is_conflict, is_data_error, is_disconnected, server_error};
use super::evict::EvictionCursor;
use crate::batch_size::BatchSize;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The most calls of a batch.
const BATCH_MAX: usize = 256;
/// The most calls that may wait.
const QUEUE_MAX: usize = 1 << 16;
/// The most waiting calls that are examined for a batch.
const SCANNED_MAX: usize = 4 * BATCH_MAX;
/// The default timeout of a statement. Callers usually stop waiting much earlier.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// How often a statement is retried on another pooled connection after a disconnect: several may be stale.
pub(super) const DISCONNECTS_MAX: u32 = 3;
/// How often a batch is retried after serialization conflicts.
const CONFLICTS_MAX: u32 = 5;
/// How many times the collector yields first: callers that were just answered usually send another step.
const YIELDS: u32 = 3;

/// Batches the calls of one namespace.
pub(super) struct Batcher {
    inner: Arc<Inner>,
    namespace: i64,
    state: Mutex<State>,
    texts: Mutex<LevelsTextCache>,
    known: Mutex<HashSet<u64>>,
    eviction_cursor: EvictionCursor,
}

struct State {
    queue: VecDeque<Job>,
    /// Subjects of the calls in flight.
    busy: HashSet<u64>,
    running: usize,
    /// A collector is scheduled.
    is_collecting: bool,
    size: BatchSize,
}

impl Batcher {
    pub(super) fn new(inner: Arc<Inner>, namespace: i64) -> Self {
        let state = State {
            queue: VecDeque::new(),
            busy: HashSet::new(),
            running: 0,
            is_collecting: false,
            size: BatchSize::new(BATCH_MAX, inner.deadline),
        };
        Self {
            inner,
            namespace,
            state: Mutex::new(state),
            texts: Mutex::default(),
            known: Mutex::new(HashSet::new()),
            eviction_cursor: EvictionCursor::default(),
        }
    }

    /// The position of the search for idle subjects in this namespace.
    pub(super) const fn eviction_cursor(&self) -> &EvictionCursor {
        &self.eviction_cursor
    }

    /// Submits a call and waits for its reply.
    pub(super) async fn call(self: &Arc<Self>, call: Call) -> Result<StepReply, StoreError> {
        let answer = self.submit(call)?;
        answer.await.unwrap_or_else(|_| {
            Err(StoreError::unavailable("the runtime that the store was opened in has shut down"))
        })
    }

    /// Queues a call, and returns the receiver of its reply.
    pub(super) fn submit(
        self: &Arc<Self>,
        call: Call,
    ) -> Result<oneshot::Receiver<Result<StepReply, StoreError>>, StoreError> {
        self.inner.check_open()?;
        let text = lock(&self.texts).of(&call.levels);
        let (reply, answer) = oneshot::channel();
        let mut state = lock(&self.state);
        if state.queue.len() >= QUEUE_MAX {
            let first = state.queue.front().and_then(|job| job.time.queued_for());
            return Err(StoreError::Busy {
                place: self.inner.place.clone(),
                waiting_max: QUEUE_MAX,
                retry_after: first.unwrap_or_default(),
            });
        }
        let time = EngineTime::current();
        time.wait();
        state.queue.push_back(Job { call, text, reply, time });
        self.collect(state);
        Ok(answer)
    }

    /// Schedules a collector unless one is scheduled, none is needed, or the limit of batches is reached.
    fn collect(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.is_collecting || state.queue.is_empty() || state.running >= self.inner.batches_max {
            return;
        }
        state.is_collecting = true;
        // A runtime that has shut down drops the task at once, which locks the state.
        drop(state);
        let collector = Collector { batcher: Arc::clone(self), has_run: false };
        self.inner.handle.spawn(async move {
            for _ in 0..YIELDS {
                yield_now().await;
            }
            if let Some((in_flight, jobs)) = collector.take() {
                in_flight.batcher.run(jobs).await;
            }
        });
    }

    /// The next batch, and the guard that marks it as in flight.
    fn take(self: &Arc<Self>) -> Option<(InFlightBatch, Vec<Job>)> {
        let mut state = lock(&self.state);
        state.is_collecting = false;
        let jobs = state.take();
        if jobs.is_empty() {
            return None;
        }
        let in_flight = InFlightBatch { batcher: Arc::clone(self), subjects: subjects(&jobs) };
        // Other subjects may be sent in parallel.
        self.collect(state);
        Some((in_flight, jobs))
    }

    async fn run(&self, jobs: Vec<Job>) {
        match self.attempt(jobs).await {
            Ok(()) => {}
            // One call made the batch fail: each is retried alone.
            Err(jobs) => {
                for job in jobs {
                    if let Err(jobs) = self.attempt(vec![job]).await {
                        let place = &self.inner.place;
                        let what =
                            format!("gave up after {CONFLICTS_MAX} serialization conflicts at {place}");
                        fail_all(jobs, || StoreError::unavailable(what.clone()));
                    }
                }
            }
        }
    }

    /// Sends these calls and replies to them. If a conflict undid all of them, they are returned.
    async fn attempt(&self, jobs: Vec<Job>) -> Result<(), Vec<Job>> {
        let (mut disconnects, mut conflicts) = (0, 0);
        loop {
            let (start, count) = (Instant::now(), jobs.len());
            let result = timeout(self.inner.timeout, self.send(&jobs)).await;
            lock(&self.state).size.learn(count, start.elapsed());
            let error = match result {
                Ok(Ok(Some(answers))) => {
                    for (job, answer) in jobs.into_iter().zip(answers) {
                        // A failed send means that the caller was dropped.
                        drop(job.reply.send(answer));
                    }
                    return Ok(());
                }
                // A known limit was evicted. It is no longer known, and the retry creates it.
                Ok(Ok(None)) => continue,
                Ok(Err(error)) => error,
                Err(_) => {
                    let millis = u64::try_from(self.inner.timeout.as_millis()).unwrap_or(u64::MAX);
                    fail_all(jobs, || StoreError::TimedOut { millis });
                    return Ok(());
                }
            };
            match error {
                // A pooled connection was stale. A retry is safe: a step that was applied is answered as a
                // repeat.
                BatchError::Server(error) if is_disconnected(&error) && disconnects < DISCONNECTS_MAX => {
                    disconnects += 1;
                }
                BatchError::Server(error) if is_conflict(&error) => {
                    conflicts += 1;
                    if jobs.len() > 1 || conflicts >= CONFLICTS_MAX {
                        return Err(jobs);
                    }
                }
                // One call is the cause, and must not fail the others.
                BatchError::Server(error) if jobs.len() > 1 && is_data_error(&error) => return Err(jobs),
                BatchError::Server(error) => {
                    let error = server_error(&self.inner.place, error);
                    fail_all(jobs, || clone_error(&error));
                    return Ok(());
                }
                BatchError::Store(error) => {
                    fail_all(jobs, || clone_error(&error));
                    return Ok(());
                }
            }
        }
    }

    async fn send(&self, jobs: &[Job]) -> Result<Option<Vec<Result<StepReply, StoreError>>>, BatchError> {
        let batch = Batch::new(jobs, &lock(&self.known));
        self.eviction_cursor.add(batch.unknown());
        let client = self.inner.writer().await.map_err(BatchError::Store)?;
        let client = super::PooledConnection::new(client);
        let at = (self.namespace, self.inner.wall());
        let row = batch.send(client.get(), &self.inner.sql, at).await;
        client.mark_done();
        let Some(row) = row.map_err(BatchError::Server)? else {
            batch.unmark_known(&mut lock(&self.known));
            return Ok(None);
        };
        let answers = batch.answers(jobs, &row);
        batch.mark_known(&answers, &mut lock(&self.known));
        self.inner.counters.count(jobs.len());
        Ok(Some(answers))
    }
}

enum BatchError {
    Server(tokio_postgres::Error),
    Store(StoreError),
}

impl State {
    /// Takes calls that can be sent together: at most one per lease, and none whose subjects are in flight or
    /// belong to an earlier call that has to wait.
    fn take(&mut self) -> Vec<Job> {
        let (mut jobs, mut left) = (Vec::new(), VecDeque::new());
        let (mut behind, mut leases) = (HashSet::new(), HashSet::new());
        let mut scanned = 0;
        while let Some(job) = self.queue.pop_front() {
            scanned += 1;
            if job.reply.is_closed() {
                continue;
            }
            let is_held = |subject: &u64| self.busy.contains(subject) || behind.contains(subject);
            if job.text.subjects.iter().any(is_held) || !leases.insert(job.call.lease) {
                behind.extend(job.text.subjects.iter().copied());
                left.push_back(job);
            } else {
                job.time.send();
                jobs.push(job);
            }
            if jobs.len() >= self.size.get() || scanned >= SCANNED_MAX {
                break;
            }
        }
        left.append(&mut self.queue);
        self.queue = left;
        if !jobs.is_empty() {
            self.running += 1;
            self.busy.extend(subjects(&jobs));
        }
        jobs
    }
}

/// A scheduled search for the next batch.
struct Collector {
    batcher: Arc<Batcher>,
    has_run: bool,
}

impl Collector {
    fn take(mut self) -> Option<(InFlightBatch, Vec<Job>)> {
        self.has_run = true;
        self.batcher.take()
    }
}

impl Drop for Collector {
    /// If it has not run, the runtime has shut down: the waiting calls fail.
    fn drop(&mut self) {
        if self.has_run {
            return;
        }
        let left = {
            let mut state = lock(&self.batcher.state);
            state.is_collecting = false;
            std::mem::take(&mut state.queue)
        };
        // Dropping the jobs wakes their callers, which must not happen under the lock.
        drop(left);
    }
}

/// A batch in flight. Dropping it releases its subjects and schedules the next batch.
struct InFlightBatch {
    batcher: Arc<Batcher>,
    subjects: Vec<u64>,
}

impl Drop for InFlightBatch {
    fn drop(&mut self) {
        let mut state = lock(&self.batcher.state);
        state.running -= 1;
        for subject in &self.subjects {
            state.busy.remove(subject);
        }
        self.batcher.collect(state);
    }
}

fn subjects(jobs: &[Job]) -> Vec<u64> {
    jobs.iter().flat_map(|job| job.text.subjects.iter().copied()).collect()
}

fn fail_all(jobs: Vec<Job>, error: impl Fn() -> StoreError) {
    for job in jobs {
        drop(job.reply.send(Err(error())));
    }
}

/// Copies an error that belongs to all calls of a batch; sources cannot be cloned.
fn clone_error(error: &StoreError) -> StoreError {
    match error {
        StoreError::TimedOut { millis } => StoreError::TimedOut { millis: *millis },
        StoreError::Closed { what } => StoreError::Closed { what: what.clone() },
        StoreError::Denied { what } => StoreError::Denied { what: what.clone() },
        StoreError::Corrupt { what } => StoreError::Corrupt { what: what.clone() },
        StoreError::Invalid { what } => StoreError::Invalid { what: what.clone() },
        StoreError::Unavailable { what, .. } => StoreError::unavailable(what.clone()),
        other => StoreError::unavailable(other.to_string()),
    }
}
