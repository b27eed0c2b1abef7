//! Batches the steps of concurrent callers (group commit): steps that arrive while a batch is in flight are
//! sent together in the next one.
//!
//! A step that finds no batch in flight is sent at once. There is one batcher per home, so that one script
//! reaches all keys of a batch. A task of its own sends the batches: a caller that is dropped or not polled
//! delays no other, and one that is dropped before its step is sent is not charged.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use foldhash::HashMap;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::Inner;
use super::batch_call::{EncodedStep, StepReply, send_batch};
use super::keyspace::Home;
use crate::batch_size::BatchSize;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The most steps of a batch. Larger batches are hardly cheaper per step, and block the server for longer.
const BATCH_MAX: usize = 32;
/// The most levels of a batch.
const LEVELS_MAX: usize = 128;
/// The most batches in flight: one that the server executes and one on the network.
const IN_FLIGHT_MAX: usize = 2;
/// The most steps that may wait.
const QUEUE_MAX: usize = 1 << 16;
/// After this time, or half the timeout if that is less, a caller sends the queue itself if no batch was sent
/// since.
const STALLED: Duration = Duration::from_millis(500);
/// The most batches in flight when some of them are stalled.
const STALLED_MAX: usize = 64;
/// How many times the worker yields before it takes the next batch: callers that were just answered usually
/// send another step.
const YIELDS: u32 = 2;

/// The batchers of a namespace, one per home.
#[derive(Debug)]
pub(super) struct Batchers {
    deadline: Duration,
    by_home: Mutex<HashMap<Home, Arc<Batcher>>>,
}

impl Batchers {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, by_home: Mutex::default() }
    }

    pub(super) fn at(&self, home: Home) -> Arc<Batcher> {
        let batcher = || Arc::new(Batcher { state: Mutex::new(State::new(self.deadline)) });
        Arc::clone(lock(&self.by_home).entry(home).or_insert_with(batcher))
    }
}

/// Batches the steps of one home.
pub(super) struct Batcher {
    state: Mutex<State>,
}

struct State {
    queue: VecDeque<Job>,
    in_flight: usize,
    /// When a batch was last sent.
    sent_at: Option<Instant>,
    size: BatchSize,
}

struct Job {
    step: EncodedStep,
    reply: oneshot::Sender<Result<StepReply, StoreError>>,
    time: EngineTime,
}

impl Batcher {
    /// Runs a step, alone or in a batch, and waits for its reply.
    pub(super) async fn run(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        step: EncodedStep,
    ) -> Result<StepReply, StoreError> {
        let context = inner.connection.context();
        let time = EngineTime::current();
        let mut answer = self.enqueue(inner, step, time.clone())?;
        let stalled = STALLED.min(context.timeout / 2);
        let mut wait = stalled;
        loop {
            if let Ok(answer) = timeout(wait, &mut answer).await {
                return answer.unwrap_or_else(|_| Err(runtime_ended()));
            }
            wait = match time.elapsed().map(|elapsed| context.timeout.saturating_sub(elapsed)) {
                Some(Duration::ZERO) => return Err(context.timed_out()),
                Some(left) => left,
                None => {
                    self.send_stalled(inner, stalled);
                    stalled
                }
            };
        }
    }

    /// Queues a step unless the queue is full, and starts a worker if fewer than the limit are in flight.
    fn enqueue(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        step: EncodedStep,
        time: EngineTime,
    ) -> Result<oneshot::Receiver<Result<StepReply, StoreError>>, StoreError> {
        let (reply, answer) = oneshot::channel();
        let mut state = lock(&self.state);
        if state.queue.len() >= QUEUE_MAX {
            let first = state.queue.front().and_then(|job| job.time.queued_for());
            return Err(StoreError::Busy {
                place: inner.connection.context().place.clone(),
                waiting_max: QUEUE_MAX,
                retry_after: first.unwrap_or_default(),
            });
        }
        time.wait();
        let is_first = state.in_flight < IN_FLIGHT_MAX && state.queue.is_empty();
        state.queue.push_back(Job { step, reply, time });
        if is_first {
            state.in_flight += 1;
            drop(state);
            BatchWorker::spawn_next(self, inner);
        }
        Ok(answer)
    }

    /// Starts another worker if nothing was sent for `stalled`: the worker's task may be on a runtime that no
    /// longer runs.
    fn send_stalled(self: &Arc<Self>, inner: &Arc<Inner>, stalled: Duration) {
        let mut state = lock(&self.state);
        let is_stalled = state.sent_at.is_some_and(|at| at.elapsed() >= stalled);
        if is_stalled && !state.queue.is_empty() && state.in_flight < STALLED_MAX {
            state.in_flight += 1;
            drop(state);
            BatchWorker::spawn_next(self, inner);
        }
    }

    /// Takes the next batch.
    fn take(&self) -> Vec<Job> {
        lock(&self.state).take()
    }
}

impl State {
    fn new(deadline: Duration) -> Self {
        let size = BatchSize::new(BATCH_MAX, deadline);
        Self { queue: VecDeque::new(), in_flight: 0, sent_at: None, size }
    }

    fn take(&mut self) -> Vec<Job> {
        let size = self.size.get();
        let (mut jobs, mut levels) = (Vec::with_capacity(self.queue.len().min(size)), 0);
        while jobs.len() < size && levels < LEVELS_MAX {
            let Some(job) = self.queue.pop_front() else { break };
            // A caller that was dropped is not charged.
            if !job.reply.is_closed() {
                levels += job.step.encoded.limits.len();
                job.time.send();
                jobs.push(job);
            }
        }
        self.sent_at = Some(Instant::now());
        jobs
    }
}

/// The task that sends batches until the queue is empty. It is replaced if it is dropped before.
struct BatchWorker {
    batcher: Arc<Batcher>,
    inner: Arc<Inner>,
}

impl BatchWorker {
    /// Spawns a worker for the next batch; without waiters or a runtime it only gives back its slot.
    fn spawn_next(batcher: &Arc<Batcher>, inner: &Arc<Inner>) {
        let mut state = lock(&batcher.state);
        let jobs = state.take();
        let handle = Handle::try_current().ok().or_else(|| inner.runtime.clone());
        match handle {
            Some(handle) if !jobs.is_empty() => {
                drop(state);
                let worker = Self { batcher: Arc::clone(batcher), inner: Arc::clone(inner) };
                handle.spawn(worker.run(jobs));
            }
            // Dropping the jobs reports to their callers that the runtime has ended.
            _ => state.in_flight -= 1,
        }
    }

    async fn run(self, mut jobs: Vec<Job>) {
        while !jobs.is_empty() {
            self.send(jobs).await;
            for _ in 0..YIELDS {
                yield_now().await;
            }
            jobs = self.batcher.take();
        }
    }

    async fn send(&self, jobs: Vec<Job>) {
        let steps: Vec<&EncodedStep> = jobs.iter().map(|job| &job.step).collect();
        let start = Instant::now();
        let answers = send_batch(&self.inner.connection, &steps).await;
        lock(&self.batcher.state).size.learn(jobs.len(), start.elapsed());
        // A failed send means that the caller was dropped.
        match answers {
            Ok(answers) => {
                for (job, answer) in jobs.into_iter().zip(answers) {
                    drop(job.reply.send(Ok(answer)));
                }
            }
            Err(error) => {
                for job in jobs {
                    let error = self.inner.connection.context().store_error(error.clone());
                    drop(job.reply.send(Err(error)));
                }
            }
        }
    }
}

impl Drop for BatchWorker {
    fn drop(&mut self) {
        Self::spawn_next(&self.batcher, &self.inner);
    }
}

fn runtime_ended() -> StoreError {
    StoreError::unavailable("the runtime that the store was used in has shut down")
}

impl fmt::Debug for Batcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").finish_non_exhaustive()
    }
}
