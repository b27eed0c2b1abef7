//! Sends the steps of concurrent callers in [batches](crate::batcher).
//!
//! Several batches may be in flight. A call whose subjects are in one of them waits here rather than for the
//! server's row locks, so that a busy subject has one batch at a time, with all of its waiting callers, and
//! other subjects are sent beside it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use foldhash::HashSet;
use tidegate_core::limit::lease::LeaseId;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::Inner;
use super::batch::Batch;
use super::call::{Call, Job, LevelsTextCache, QueuedCall, StepReply};
use super::errors::{is_conflict, is_data_error, is_disconnected, server_error};
use super::evict::EvictionCursor;
use crate::batcher::{BatchLimits, BatchSender, BatchedCall, Batcher, PendingReply};
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The most calls of a batch.
const BATCH_MAX: usize = 256;
/// The default timeout of a statement. Callers usually stop waiting much earlier.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// How often a statement is retried on another pooled connection after a disconnect: several may be stale.
pub(super) const DISCONNECTS_MAX: u32 = 3;
/// How often a batch is retried after serialization conflicts and concurrent evictions.
const CONFLICTS_MAX: u32 = 5;

/// The steps of one namespace.
pub(super) struct Steps {
    inner: Arc<Inner>,
    namespace: i64,
    batcher: Arc<Batcher<QueuedCall>>,
    texts: Mutex<LevelsTextCache>,
    known: Mutex<HashSet<u64>>,
    eviction_cursor: EvictionCursor,
}

impl Steps {
    pub(super) fn new(inner: Arc<Inner>, namespace: i64) -> Self {
        let limits = BatchLimits {
            calls_max: BATCH_MAX,
            weight_max: BATCH_MAX,
            in_flight_max: inner.batches_max,
            deadline: inner.deadline,
        };
        Self {
            inner,
            namespace,
            batcher: Arc::new(Batcher::new(limits)),
            texts: Mutex::default(),
            known: Mutex::default(),
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

    /// Queues a call.
    pub(super) fn submit(self: &Arc<Self>, call: Call) -> Result<PendingReply<QueuedCall>, StoreError> {
        self.inner.check_open()?;
        let text = lock(&self.texts).of(&call.levels);
        self.batcher.submit(self, QueuedCall { call, text }, EngineTime::current())
    }

    /// Sends these calls and replies to them. If a conflict undid all of them, they are returned.
    async fn attempt(&self, jobs: Vec<Job>) -> Result<(), Vec<Job>> {
        let (mut disconnects, mut conflicts) = (0, 0);
        loop {
            let error = match timeout(self.inner.timeout, self.run(&jobs)).await {
                Ok(Ok(Some(answers))) => {
                    for (job, answer) in jobs.into_iter().zip(answers) {
                        job.reply(answer);
                    }
                    return Ok(());
                }
                // A known limit was evicted. It is no longer known, and the retry creates it.
                Ok(Ok(None)) => {
                    conflicts += 1;
                    if conflicts >= CONFLICTS_MAX {
                        return Err(jobs);
                    }
                    continue;
                }
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
                    fail_all(jobs, || error.duplicate());
                    return Ok(());
                }
                BatchError::Store(error) => {
                    fail_all(jobs, || error.duplicate());
                    return Ok(());
                }
            }
        }
    }

    async fn run(&self, jobs: &[Job]) -> Result<Option<Vec<Result<StepReply, StoreError>>>, BatchError> {
        let batch = Batch::new(jobs, &lock(&self.known));
        self.eviction_cursor.add(batch.unknown());
        let client = self.inner.connection(&self.inner.writers).await.map_err(BatchError::Store)?;
        let at = (self.namespace, self.inner.wall());
        let row = batch.send(client.get(), &self.inner.sql, at).await;
        client.release();
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

impl BatchedCall for QueuedCall {
    type Reply = StepReply;

    fn weight(&self) -> usize {
        1
    }

    fn keys(&self) -> &[u64] {
        &self.text.subjects
    }

    fn lease(&self) -> Option<LeaseId> {
        Some(self.call.lease)
    }
}

impl BatchSender for Steps {
    type Call = QueuedCall;

    fn place(&self) -> &str {
        &self.inner.place
    }

    fn runtime(&self) -> Option<Handle> {
        Some(self.inner.handle.clone())
    }

    async fn send(&self, jobs: Vec<Job>) {
        // One call may make the batch fail: each is then retried alone.
        let Err(jobs) = self.attempt(jobs).await else { return };
        for job in jobs {
            if let Err(jobs) = self.attempt(vec![job]).await {
                let place = &self.inner.place;
                let what = format!("gave up after {CONFLICTS_MAX} conflicts at {place}");
                fail_all(jobs, || StoreError::unavailable(what.clone()));
            }
        }
    }
}

enum BatchError {
    Server(tokio_postgres::Error),
    Store(StoreError),
}

fn fail_all(jobs: Vec<Job>, error: impl Fn() -> StoreError) {
    for job in jobs {
        job.reply(Err(error()));
    }
}
