//! Ends leases in the background: those that were dropped, and those whose ending did not reach the store.
//!
//! A drop never blocks. It puts the ending on a bounded list, and tasks in the caller's runtime send it to
//! the store, retrying with exponential backoff and full jitter while the store is unavailable or in a state
//! that can be repaired. If the list is full, the time is over or a retry cannot succeed, the lease stays
//! spent, which is an event and is counted. If a runtime shuts down, its jobs are handed to another.
//!
//! A job that waits for its next attempt is set aside, so that no worker sleeps on it while other jobs are
//! ready.

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::limit::lease::{Ending, LeaseId, REMEMBERED};
use tidegate_core::random::Random;
use tidegate_store::{Cancel, Settle, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, timeout_at};

use super::Shared;
use super::events::LimitEvent;
use super::runtime::background_runtime;
use crate::sync::{Mutex, MutexGuard};

/// Concurrent workers.
const WORKERS_MAX: usize = 4;
/// The minimum and the maximum delay between two attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Endings to be sent to the store.
pub(super) struct Settler {
    list: Mutex<List>,
    idle: Notify,
    /// A job was set aside.
    job_delayed: Notify,
    max: usize,
    lost: AtomicU64,
}

#[derive(Default)]
struct List {
    ready: VecDeque<Job>,
    /// By the time of the next attempt, and a number that makes keys unique.
    delayed: BTreeMap<(Instant, u64), Job>,
    last_number: u64,
    /// Jobs that a worker is processing.
    in_progress: usize,
    workers: usize,
    /// Whether a worker waits for the first delayed job.
    has_timer: bool,
}

impl List {
    fn len(&self) -> usize {
        self.ready.len() + self.delayed.len() + self.in_progress
    }
}

struct Job {
    end: End,
    /// After this the ending is abandoned: the lease expires.
    until: Instant,
    /// Failed attempts.
    attempts: u32,
}

/// How an error affects the ending that it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndingError {
    /// The lease has already ended, perhaps differently.
    AlreadyEnded(Ending),
    /// A retry may succeed.
    Transient,
    /// A retry would be refused again.
    Permanent,
}

impl EndingError {
    pub(super) const fn of(error: &StoreError) -> Self {
        match error {
            StoreError::Ended { how, .. } => Self::AlreadyEnded(*how),
            // Unknown to the store: its deadline passed long ago.
            StoreError::NoLease { .. } => Self::AlreadyEnded(Ending::Expired),
            // Unavailable, or in need of repair: missing permissions, a full disk, a backup to restore.
            StoreError::Unavailable { .. }
            | StoreError::TimedOut { .. }
            | StoreError::Busy { .. }
            | StoreError::Denied { .. }
            | StoreError::Corrupt { .. }
            | StoreError::Full { .. } => Self::Transient,
            // A closed store never re-opens, and invalid or late requests stay so; the other errors cannot
            // answer an ending.
            _ => Self::Permanent,
        }
    }
}

/// The result of an attempt to send an ending.
enum SendResult {
    Done,
    /// The store is unavailable or refuses; a retry may succeed.
    Retry,
    Lost,
}

/// A worker's next step.
enum WorkerStep {
    Run,
    /// All jobs are delayed; the first until the given time.
    Wait(Instant),
    Exit,
}

/// How a lease ends.
#[derive(Debug)]
pub(super) enum End {
    /// With all units returned.
    Cancel(Cancel),
    /// At the units used.
    Settle(Settle),
}

impl End {
    const fn lease(&self) -> LeaseId {
        match self {
            Self::Cancel(cancel) => cancel.lease,
            Self::Settle(settle) => settle.lease,
        }
    }
}

impl Settler {
    pub(super) fn new(max: usize) -> Self {
        Self {
            list: Mutex::default(),
            idle: Notify::new(),
            job_delayed: Notify::new(),
            max,
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn pending(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Completes when a worker next finds the list empty.
    pub(super) fn idle(&self) -> Notified<'_> {
        self.idle.notified()
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock()
    }
}

impl Shared {
    /// Ends a lease in the background. Returns `false` if the list is full.
    pub(super) fn settle_later(self: &Arc<Self>, end: End) -> bool {
        let mut list = self.settler.lock();
        if list.len() >= self.settler.max {
            drop(list);
            self.report_unsettled(end.lease());
            return false;
        }
        let until = Instant::now() + REMEMBERED;
        list.ready.push_back(Job { end, until, attempts: 0 });
        drop(list);
        self.wake_settler();
        true
    }

    /// Counts and reports a lease that stays spent.
    pub(super) fn report_unsettled(&self, lease: LeaseId) {
        self.settler.lost.fetch_add(1, Ordering::Relaxed);
        let waiting = self.settler.pending();
        self.listeners.notify(&LimitEvent::Unsettled { lease, waiting });
    }

    /// Ensures that a worker processes the list.
    pub(super) fn wake_settler(self: &Arc<Self>) {
        self.spawn_workers(&self.runtime.handle());
    }

    fn spawn_workers(self: &Arc<Self>, handle: &Handle) {
        let mut list = self.settler.lock();
        let due = list.delayed.range(..=(Instant::now(), u64::MAX)).take(WORKERS_MAX).count();
        let has_work = list.ready.len() + due > 0 || (!list.delayed.is_empty() && !list.has_timer);
        let working = list.workers - usize::from(list.has_timer);
        if !has_work || working >= (list.ready.len() + due).clamp(1, WORKERS_MAX) {
            return;
        }
        list.workers += 1;
        drop(list);
        let worker = Worker { shared: Arc::clone(self), job: None, is_timer: false, has_left: false };
        handle.spawn(worker.run());
    }
}

/// Processes the list until it is empty. If dropped earlier, its job goes back to the list.
struct Worker {
    shared: Arc<Shared>,
    job: Option<Job>,
    is_timer: bool,
    has_left: bool,
}

impl Worker {
    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            // Another job may be set aside with a shorter delay.
            let job_delayed = shared.settler.job_delayed.notified();
            match self.next() {
                WorkerStep::Run => self.work().await,
                WorkerStep::Wait(until) => drop(timeout_at(until, job_delayed).await),
                WorkerStep::Exit => return,
            }
        }
    }

    async fn work(&mut self) {
        let Some(job) = &self.job else { return };
        // Many jobs may have become due at once.
        self.shared.spawn_workers(&Handle::current());
        // If the store panics on this job it would again: abandon the job and continue with the others.
        match catch_panic(self.shared.send_ending(job)).await {
            SendResult::Done => {}
            SendResult::Retry => return self.delay(),
            SendResult::Lost => self.shared.report_unsettled(job.end.lease()),
        }
        self.job = None;
        self.shared.settler.lock().in_progress -= 1;
    }

    /// Delays a job for its next attempt.
    fn delay(&mut self) {
        let Some(mut job) = self.job.take() else { return };
        job.attempts += 1;
        let backoff = Backoff::exponential(BACKOFF.0, BACKOFF.1).jitter(Jitter::Full);
        let at = Instant::now() + backoff.delay(job.attempts, &mut Random::seeded(rand::random()));
        let mut list = self.shared.settler.lock();
        list.in_progress -= 1;
        list.last_number += 1;
        let number = list.last_number;
        list.delayed.insert((at, number), job);
        drop(list);
        self.shared.settler.job_delayed.notify_waiters();
    }

    fn next(&mut self) -> WorkerStep {
        let now = Instant::now();
        let mut list = self.shared.settler.lock();
        if std::mem::take(&mut self.is_timer) {
            list.has_timer = false;
        }
        let first = list.delayed.first_key_value().map(|((at, _), _)| *at);
        self.job = if first.is_some_and(|at| at <= now) {
            list.delayed.pop_first().map(|(_, job)| job)
        } else {
            list.ready.pop_front()
        };
        if self.job.is_some() {
            list.in_progress += 1;
            return WorkerStep::Run;
        }
        if let Some(until) = first
            && !list.has_timer
        {
            list.has_timer = true;
            self.is_timer = true;
            return WorkerStep::Wait(until);
        }
        // Under the lock that found no job: a job added later needs another worker.
        list.workers -= 1;
        self.has_left = true;
        let is_idle = list.len() == 0;
        drop(list);
        if is_idle {
            self.shared.settler.idle.notify_waiters();
        }
        WorkerStep::Exit
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.has_left {
            return;
        }
        // Its runtime is shutting down: continue on the background thread.
        let mut list = self.shared.settler.lock();
        list.workers -= 1;
        if self.is_timer {
            list.has_timer = false;
        }
        if let Some(job) = self.job.take() {
            list.in_progress -= 1;
            list.ready.push_front(job);
        }
        drop(list);
        self.shared.spawn_workers(&background_runtime());
    }
}

impl Shared {
    /// Sends an ending to the store.
    async fn send_ending(&self, job: &Job) -> SendResult {
        let answer = match &job.end {
            End::Cancel(cancel) => self.breaker.call(self.store.cancel(cancel)).await,
            End::Settle(settle) => {
                let answer = self.breaker.call(self.store.settle(settle)).await;
                answer.inspect(|moved| self.settled(settle, moved))
            }
        };
        let Err(failed) = answer else {
            self.waiters.returned(match &job.end {
                End::Cancel(cancel) => &cancel.levels,
                End::Settle(settle) => &settle.levels,
            });
            return SendResult::Done;
        };
        match EndingError::of(&failed.error) {
            EndingError::AlreadyEnded(_) => SendResult::Done,
            EndingError::Transient if Instant::now() < job.until => SendResult::Retry,
            EndingError::Transient | EndingError::Permanent => SendResult::Lost,
        }
    }
}

async fn catch_panic(sending: impl Future<Output = SendResult>) -> SendResult {
    let mut sending = pin!(sending);
    let poll = |context: &mut Context<'_>| {
        let answer = catch_unwind(AssertUnwindSafe(|| sending.as_mut().poll(context)));
        answer.unwrap_or(Poll::Ready(SendResult::Lost))
    };
    poll_fn(poll).await
}
