//! Calls on their way: while some are with the server, those that come meanwhile collect, and go together.
//!
//! A few batches may be under way at a time. Those whose subjects are in one of them wait for it rather than for the server's lock:
//! so a subject that everybody draws from has one batch at a time, as large as there are callers, and others go beside it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use foldhash::{HashSet, HashSetExt};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::Inner;
use super::batch::Batch;
use super::call::{Answer, Call, Job, Texts};
use super::evict::Round;
use super::trouble::{is_crossed, is_cut, is_of_data, of_server};
use crate::batch_size::BatchSize;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// Calls in one statement.
const BATCH_MAX: usize = 256;
/// Calls that wait at most.
const WAITING_MAX: usize = 1 << 16;
/// Calls that are looked at for those that can go.
const LOOKED_AT_MAX: usize = 4 * BATCH_MAX;
/// A statement that takes longer is given up, unless said otherwise: whoever waited has long been told that the store is away.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How often a connection that was kept may turn out to be of no use: others may be as old.
pub(super) const CUTS_MAX: u32 = 3;
/// How often those who are in each other's way try again.
const CROSSED_MAX: u32 = 5;
/// How often whoever collects lets others run first: those who were answered just now mostly ask again.
const YIELDS: u32 = 3;

/// The calls of one namespace.
pub(super) struct Lanes {
    inner: Arc<Inner>,
    namespace: i64,
    state: Mutex<State>,
    texts: Mutex<Texts>,
    known: Mutex<HashSet<u64>>,
    round: Round,
}

struct State {
    waiting: VecDeque<Job>,
    /// Subjects of calls that are with the server.
    busy: HashSet<u64>,
    running: usize,
    /// Somebody is about to look for those that can go.
    is_collecting: bool,
    size: BatchSize,
}

impl Lanes {
    pub(super) fn new(inner: Arc<Inner>, namespace: i64) -> Self {
        let state = State {
            waiting: VecDeque::new(),
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
            round: Round::default(),
        }
    }

    /// The position of the search for idle subjects in this namespace.
    pub(super) const fn round(&self) -> &Round {
        &self.round
    }

    /// Has a call made, and waits for its answer.
    pub(super) async fn call(self: &Arc<Self>, call: Call) -> Result<Answer, StoreError> {
        let answer = self.submit(call)?;
        answer.await.unwrap_or_else(|_| {
            Err(StoreError::unavailable("the runtime that the store was opened in has ended"))
        })
    }

    /// Has a call made.
    pub(super) fn submit(
        self: &Arc<Self>,
        call: Call,
    ) -> Result<oneshot::Receiver<Result<Answer, StoreError>>, StoreError> {
        self.inner.check_open()?;
        let text = lock(&self.texts).of(&call.levels);
        let (waiting, answer) = oneshot::channel();
        let mut state = lock(&self.state);
        if state.waiting.len() >= WAITING_MAX {
            let first = state.waiting.front().and_then(|job| job.time.queued_for());
            return Err(StoreError::Busy {
                place: self.inner.place.clone(),
                waiting_max: WAITING_MAX,
                retry_after: first.unwrap_or_default(),
            });
        }
        let time = EngineTime::current();
        time.wait();
        state.waiting.push_back(Job { call, text, waiting, time });
        self.collect(state);
        Ok(answer)
    }

    /// Sees to it that somebody looks for calls that can go, if any may.
    fn collect(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.is_collecting || state.waiting.is_empty() || state.running >= self.inner.lanes {
            return;
        }
        state.is_collecting = true;
        // A runtime that has ended drops what it is given at once, and that looks at the state.
        drop(state);
        let collector = Collector { lanes: Arc::clone(self), has_looked: false };
        self.inner.handle.spawn(async move {
            for _ in 0..YIELDS {
                yield_now().await;
            }
            if let Some((lane, jobs)) = collector.take() {
                lane.lanes.run(jobs).await;
            }
        });
    }

    /// Calls that can go, and the lane that they go on.
    fn take(self: &Arc<Self>) -> Option<(Lane, Vec<Job>)> {
        let mut state = lock(&self.state);
        state.is_collecting = false;
        let jobs = state.take();
        if jobs.is_empty() {
            return None;
        }
        let lane = Lane { lanes: Arc::clone(self), subjects: subjects(&jobs) };
        // Others may go beside them.
        self.collect(state);
        Some((lane, jobs))
    }

    async fn run(&self, jobs: Vec<Job>) {
        match self.attempt(jobs).await {
            Ok(()) => {}
            // One of them is the reason that none was done: each by itself, so that the others need not know.
            Err(jobs) => {
                for job in jobs {
                    if let Err(jobs) = self.attempt(vec![job]).await {
                        let place = &self.inner.place;
                        let what = format!("others were in the way {CROSSED_MAX} times at {place}");
                        answer_all(jobs, || StoreError::unavailable(what.clone()));
                    }
                }
            }
        }
    }

    /// Asks for all of these, and answers them. Where others were in the way and nothing was done, they come back.
    async fn attempt(&self, jobs: Vec<Job>) -> Result<(), Vec<Job>> {
        let (mut cuts, mut crossed) = (0, 0);
        loop {
            let (start, count) = (Instant::now(), jobs.len());
            let asked = timeout(self.inner.patience, self.ask(&jobs)).await;
            lock(&self.state).size.learn(count, start.elapsed());
            let error = match asked {
                Ok(Ok(Some(answers))) => {
                    for (job, answer) in jobs.into_iter().zip(answers) {
                        // Whoever has gone does not want to know.
                        drop(job.waiting.send(answer));
                    }
                    return Ok(());
                }
                // A limit that was there has gone: now it is known, and made if need be.
                Ok(Ok(None)) => continue,
                Ok(Err(error)) => error,
                Err(_) => {
                    let millis = u64::try_from(self.inner.patience.as_millis()).unwrap_or(u64::MAX);
                    answer_all(jobs, || StoreError::TimedOut { millis });
                    return Ok(());
                }
            };
            match error {
                // It was kept since it was last used, and the server has gone meanwhile. To ask again does no harm: what was
                // done is answered as the first time.
                Failed::Server(error) if is_cut(&error) && cuts < CUTS_MAX => cuts += 1,
                Failed::Server(error) if is_crossed(&error) => {
                    crossed += 1;
                    if jobs.len() > 1 || crossed >= CROSSED_MAX {
                        return Err(jobs);
                    }
                }
                // One of them is the reason, and it is not the others' fault.
                Failed::Server(error) if jobs.len() > 1 && is_of_data(&error) => return Err(jobs),
                Failed::Server(error) => {
                    let error = of_server(&self.inner.place, error);
                    answer_all(jobs, || copy_of(&error));
                    return Ok(());
                }
                Failed::Store(error) => {
                    answer_all(jobs, || copy_of(&error));
                    return Ok(());
                }
            }
        }
    }

    async fn ask(&self, jobs: &[Job]) -> Result<Option<Vec<Result<Answer, StoreError>>>, Failed> {
        let batch = Batch::of(jobs, &lock(&self.known));
        self.round.add(batch.unknown());
        let client = self.inner.writer().await.map_err(Failed::Store)?;
        let client = super::Held::new(client);
        let at = (self.namespace, self.inner.wall());
        let row = batch.ask(client.get(), &self.inner.sql, at).await;
        client.is_done();
        let Some(row) = row.map_err(Failed::Server)? else {
            batch.forget(&mut lock(&self.known));
            return Ok(None);
        };
        let answers = batch.answers(jobs, &row);
        batch.remember(&answers, &mut lock(&self.known));
        self.inner.counters.count(jobs.len());
        Ok(Some(answers))
    }
}

enum Failed {
    Server(tokio_postgres::Error),
    Store(StoreError),
}

impl State {
    /// Calls that can go together: no two of one lease, and none whose subjects are with the server, or are those of a call
    /// that came before it and has to wait.
    fn take(&mut self) -> Vec<Job> {
        let (mut jobs, mut left) = (Vec::new(), VecDeque::new());
        let (mut behind, mut leases) = (HashSet::new(), HashSet::new());
        let mut looked_at = 0;
        while let Some(job) = self.waiting.pop_front() {
            looked_at += 1;
            if job.waiting.is_closed() {
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
            if jobs.len() >= self.size.get() || looked_at >= LOOKED_AT_MAX {
                break;
            }
        }
        left.append(&mut self.waiting);
        self.waiting = left;
        if !jobs.is_empty() {
            self.running += 1;
            self.busy.extend(subjects(&jobs));
        }
        jobs
    }
}

/// Whoever is about to look for calls that can go.
struct Collector {
    lanes: Arc<Lanes>,
    has_looked: bool,
}

impl Collector {
    fn take(mut self) -> Option<(Lane, Vec<Job>)> {
        self.has_looked = true;
        self.lanes.take()
    }
}

impl Drop for Collector {
    /// It has not looked, and nobody will: the runtime has ended. Those who wait are told so.
    fn drop(&mut self) {
        if self.has_looked {
            return;
        }
        let left = {
            let mut state = lock(&self.lanes.state);
            state.is_collecting = false;
            std::mem::take(&mut state.waiting)
        };
        // Each hears of it, and none under the lock.
        drop(left);
    }
}

/// A batch that is under way; when it is over, others may go.
struct Lane {
    lanes: Arc<Lanes>,
    subjects: Vec<u64>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = lock(&self.lanes.state);
        state.running -= 1;
        for subject in &self.subjects {
            state.busy.remove(subject);
        }
        self.lanes.collect(state);
    }
}

fn subjects(jobs: &[Job]) -> Vec<u64> {
    jobs.iter().flat_map(|job| job.text.subjects.iter().copied()).collect()
}

fn answer_all(jobs: Vec<Job>, error: impl Fn() -> StoreError) {
    for job in jobs {
        drop(job.waiting.send(Err(error())));
    }
}

/// The same for the next who waited: an error is of all of them, and can be told once only.
fn copy_of(error: &StoreError) -> StoreError {
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
