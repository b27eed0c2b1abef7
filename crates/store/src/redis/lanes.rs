//! Calls on their way: while some are with the server, those that come meanwhile collect, and go together.
//!
//! Whoever finds nobody under way goes at once and by himself. All that go together are at one home, so that one script reaches
//! all their keys. They are sent by a task of their own: a caller that leaves, or looks away for a while, holds up nobody, and
//! one that left before its call has gone is not charged.

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
use super::places::Home;
use super::together::{Answer, Asked, make};
use crate::batch_size::BatchSize;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// Steps in one call: more would not be much cheaper each, and the server does nothing else meanwhile.
const TOGETHER_MAX: usize = 32;
/// Levels of all of them.
const LEVELS_MAX: usize = 128;
/// Calls under way at a time: one that the server works on, and one that is on its way there or back.
const UNDER_WAY_MAX: usize = 2;
/// Steps that wait at most.
const WAITING_MAX: usize = 1 << 16;
/// Who has waited so long, or for half the time that there is, is sent by somebody else.
const STALLED: Duration = Duration::from_millis(500);
/// So many may not run any more.
const STALLED_MAX: usize = 64;
/// How often whoever collects lets others run first: those who were answered just now mostly ask again.
const YIELDS: u32 = 2;

/// The lanes of a namespace, one for each home.
#[derive(Debug)]
pub(super) struct Lanes {
    deadline: Duration,
    by_home: Mutex<HashMap<Home, Arc<Lane>>>,
}

impl Lanes {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, by_home: Mutex::default() }
    }

    pub(super) fn at(&self, home: Home) -> Arc<Lane> {
        let lane = || Arc::new(Lane { state: Mutex::new(State::new(self.deadline)) });
        Arc::clone(lock(&self.by_home).entry(home).or_insert_with(lane))
    }
}

/// The way of steps to one home.
pub(super) struct Lane {
    state: Mutex<State>,
}

struct State {
    waiting: VecDeque<Job>,
    under_way: usize,
    /// When some were last sent.
    sent_at: Option<Instant>,
    size: BatchSize,
}

struct Job {
    asked: Asked,
    waiting: oneshot::Sender<Result<Answer, StoreError>>,
    time: EngineTime,
}

impl Lane {
    /// Has a step made, by itself or with others, and waits for its answer.
    pub(super) async fn make(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        asked: Asked,
    ) -> Result<Answer, StoreError> {
        let whose = inner.link.whose();
        let time = EngineTime::current();
        let mut answer = self.join(inner, asked, time.clone())?;
        let stalled = STALLED.min(whose.timeout / 2);
        let mut wait = stalled;
        loop {
            if let Ok(answer) = timeout(wait, &mut answer).await {
                return answer.unwrap_or_else(|_| Err(ended()));
            }
            wait = match time.elapsed().map(|elapsed| whose.timeout.saturating_sub(elapsed)) {
                Some(Duration::ZERO) => return Err(whose.timed_out()),
                Some(left) => left,
                None => {
                    self.help(inner, stalled);
                    stalled
                }
            };
        }
    }

    /// Sets a step on its way, unless too many wait.
    fn join(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        asked: Asked,
        time: EngineTime,
    ) -> Result<oneshot::Receiver<Result<Answer, StoreError>>, StoreError> {
        let (waiting, answer) = oneshot::channel();
        let mut state = lock(&self.state);
        if state.waiting.len() >= WAITING_MAX {
            let first = state.waiting.front().and_then(|job| job.time.queued_for());
            return Err(StoreError::Busy {
                place: inner.link.whose().place.clone(),
                waiting_max: WAITING_MAX,
                retry_after: first.unwrap_or_default(),
            });
        }
        time.wait();
        let is_first = state.under_way < UNDER_WAY_MAX && state.waiting.is_empty();
        state.waiting.push_back(Job { asked, waiting, time });
        if is_first {
            state.under_way += 1;
            drop(state);
            Turn::next(self, inner);
        }
        Ok(answer)
    }

    /// Sends the waiting calls if none was sent for so long: their task may be in a runtime that is not running.
    fn help(self: &Arc<Self>, inner: &Arc<Inner>, stalled: Duration) {
        let mut state = lock(&self.state);
        let is_stalled = state.sent_at.is_some_and(|at| at.elapsed() >= stalled);
        if is_stalled && !state.waiting.is_empty() && state.under_way < STALLED_MAX {
            state.under_way += 1;
            drop(state);
            Turn::next(self, inner);
        }
    }

    /// Those who go next.
    fn take(&self) -> Vec<Job> {
        lock(&self.state).take()
    }
}

impl State {
    fn new(deadline: Duration) -> Self {
        let size = BatchSize::new(TOGETHER_MAX, deadline);
        Self { waiting: VecDeque::new(), under_way: 0, sent_at: None, size }
    }

    fn take(&mut self) -> Vec<Job> {
        let size = self.size.get();
        let (mut jobs, mut levels) = (Vec::with_capacity(self.waiting.len().min(size)), 0);
        while jobs.len() < size && levels < LEVELS_MAX {
            let Some(job) = self.waiting.pop_front() else { break };
            // Whoever has gone is not charged.
            if !job.waiting.is_closed() {
                levels += job.asked.encoded.limits.len();
                job.time.send();
                jobs.push(job);
            }
        }
        self.sent_at = Some(Instant::now());
        jobs
    }
}

/// A call that is under way; when it is over, those who wait go.
struct Turn {
    lane: Arc<Lane>,
    inner: Arc<Inner>,
}

impl Turn {
    /// Sends those who wait, or ends where nobody does.
    fn next(lane: &Arc<Lane>, inner: &Arc<Inner>) {
        let mut state = lock(&lane.state);
        let jobs = state.take();
        let handle = Handle::try_current().ok().or_else(|| inner.runtime.clone());
        match handle {
            Some(handle) if !jobs.is_empty() => {
                drop(state);
                let next = Self { lane: Arc::clone(lane), inner: Arc::clone(inner) };
                handle.spawn(next.run(jobs));
            }
            // Those who wait hear that nobody is left who could send them.
            _ => state.under_way -= 1,
        }
    }

    async fn run(self, mut jobs: Vec<Job>) {
        while !jobs.is_empty() {
            self.answer(jobs).await;
            for _ in 0..YIELDS {
                yield_now().await;
            }
            jobs = self.lane.take();
        }
    }

    async fn answer(&self, jobs: Vec<Job>) {
        let steps: Vec<&Asked> = jobs.iter().map(|job| &job.asked).collect();
        let start = Instant::now();
        let answers = make(&self.inner.link, &steps).await;
        lock(&self.lane.state).size.learn(jobs.len(), start.elapsed());
        // Whoever has gone does not want to know.
        match answers {
            Ok(answers) => {
                for (job, answer) in jobs.into_iter().zip(answers) {
                    drop(job.waiting.send(Ok(answer)));
                }
            }
            Err(failed) => {
                for job in jobs {
                    drop(job.waiting.send(Err(failed.told(self.inner.link.whose()))));
                }
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        Self::next(&self.lane, &self.inner);
    }
}

fn ended() -> StoreError {
    StoreError::unavailable("the runtime that the store was used in has ended")
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").finish_non_exhaustive()
    }
}
