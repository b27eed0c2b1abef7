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
#[derive(Debug, Default)]
pub(super) struct Lanes(Mutex<HashMap<Home, Arc<Lane>>>);

impl Lanes {
    pub(super) fn at(&self, home: Home) -> Arc<Lane> {
        Arc::clone(lock(&self.0).entry(home).or_default())
    }
}

/// The way of steps to one home.
#[derive(Default)]
pub(super) struct Lane {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    under_way: usize,
}

struct Job {
    asked: Asked,
    waiting: oneshot::Sender<Result<Answer, StoreError>>,
    since: Instant,
}

impl Lane {
    /// Has a step made, by itself or with others, and waits for its answer.
    pub(super) async fn make(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        asked: Asked,
    ) -> Result<Answer, StoreError> {
        let whose = inner.link.whose();
        let Some(mut answer) = self.join(inner, asked) else {
            let what = format!("{WAITING_MAX} calls wait for `{}`", whose.place);
            return Err(StoreError::unavailable(what));
        };
        let stalled = STALLED.min(whose.timeout / 2);
        let mut answered = timeout(stalled, &mut answer).await;
        if answered.is_err() {
            self.help(inner, stalled);
            answered = timeout(whose.timeout.saturating_sub(stalled), answer).await;
        }
        match answered {
            Ok(answer) => answer.unwrap_or_else(|_| Err(ended())),
            Err(_) => Err(whose.timed_out()),
        }
    }

    /// Sets a step on its way; nothing where too many wait.
    fn join(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        asked: Asked,
    ) -> Option<oneshot::Receiver<Result<Answer, StoreError>>> {
        let (waiting, answer) = oneshot::channel();
        let mut state = lock(&self.state);
        if state.waiting.len() >= WAITING_MAX {
            return None;
        }
        let is_first = state.under_way < UNDER_WAY_MAX && state.waiting.is_empty();
        state.waiting.push_back(Job { asked, waiting, since: Instant::now() });
        if is_first {
            state.under_way += 1;
            drop(state);
            Turn::next(self, inner);
        }
        Some(answer)
    }

    /// Has those sent who have waited for so long: whoever is to send them may be in a runtime that nobody is in.
    fn help(self: &Arc<Self>, inner: &Arc<Inner>, stalled: Duration) {
        let mut state = lock(&self.state);
        let is_stalled = state.waiting.front().is_some_and(|oldest| oldest.since.elapsed() >= stalled);
        if is_stalled && state.under_way < STALLED_MAX {
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
    fn take(&mut self) -> Vec<Job> {
        let (mut jobs, mut levels) = (Vec::with_capacity(self.waiting.len().min(TOGETHER_MAX)), 0);
        while jobs.len() < TOGETHER_MAX && levels < LEVELS_MAX {
            let Some(job) = self.waiting.pop_front() else { break };
            // Whoever has gone is not charged.
            if !job.waiting.is_closed() {
                levels += job.asked.encoded.limits.len();
                jobs.push(job);
            }
        }
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
        let answers = make(&self.inner.link, &steps).await;
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
