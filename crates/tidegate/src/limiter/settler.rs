//! Ending leases in the background: those that were dropped, and those whose ending did not reach the store.
//!
//! A drop never waits. What it has to say is put on a bounded list, and tasks in the caller's runtime say it to the
//! store, again and again while the store is away or in a state that can be repaired. When the list is full, when the
//! time is over or when it cannot help to say the same again, the lease stays spent, which is an event and is counted. A
//! runtime that shuts down hands what it had back.
//!
//! A job that has to wait for its next attempt is set aside, so that no worker sleeps on it: others go on.

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
use super::home::own_thread;
use crate::sync::{Mutex, MutexGuard};

/// Tasks that work on the list at the same time.
const WORKERS_MAX: usize = 4;
/// The shortest and the longest wait between two attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Endings to be told to the store.
pub(super) struct Settler {
    list: Mutex<List>,
    idle: Notify,
    /// A job was set aside.
    set_aside: Notify,
    max: usize,
    lost: AtomicU64,
}

#[derive(Default)]
struct List {
    ready: VecDeque<Job>,
    /// By when they are tried again, and a number that tells them apart.
    delayed: BTreeMap<(Instant, u64), Job>,
    last_number: u64,
    /// Jobs that a worker has in hand.
    in_hand: usize,
    workers: usize,
    /// Whether a worker waits for the first of the delayed.
    has_watch: bool,
}

impl List {
    fn len(&self) -> usize {
        self.ready.len() + self.delayed.len() + self.in_hand
    }
}

struct Job {
    end: End,
    /// After this it is given up: the lease expires by itself.
    until: Instant,
    /// Attempts that failed.
    attempts: u32,
}

/// What an error says about the ending that it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unheard {
    /// The lease has ended otherwise, which is an end too.
    Over(Ending),
    /// The same may be heard later.
    Later,
    /// The same would be refused again.
    Never,
}

impl Unheard {
    pub(super) const fn of(error: &StoreError) -> Self {
        match error {
            StoreError::Ended { how, .. } => Self::Over(*how),
            // It is not known any more: its deadline was long ago.
            StoreError::NoLease { .. } => Self::Over(Ending::Expired),
            // Away, or there and in need of repair: rights that are missing, a disk that is full, a backup to be put back.
            StoreError::Unavailable { .. }
            | StoreError::TimedOut { .. }
            | StoreError::Busy { .. }
            | StoreError::Denied { .. }
            | StoreError::Corrupt { .. }
            | StoreError::Full { .. } => Self::Later,
            // A closed store never opens again. What is invalid, or late, stays so; the rest answers no ending.
            _ => Self::Never,
        }
    }
}

/// What became of an attempt to tell the store.
enum Told {
    Heard,
    /// The store is unavailable or refuses; later it may not.
    Later,
    Lost,
}

/// What a worker does next.
enum Next {
    Job,
    /// All jobs are delayed; the first until then.
    Wait(Instant),
    Leave,
}

/// How a lease ends.
#[derive(Debug)]
pub(super) enum End {
    /// With everything returned.
    Cancel(Cancel),
    /// At what was used.
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
            set_aside: Notify::new(),
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

    /// Completes when the list is next found empty.
    pub(super) fn idle(&self) -> Notified<'_> {
        self.idle.notified()
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock()
    }
}

impl Shared {
    /// Has a lease ended in the background. Answers whether there was room.
    pub(super) fn settle_later(self: &Arc<Self>, end: End) -> bool {
        let mut list = self.settler.lock();
        if list.len() >= self.settler.max {
            drop(list);
            self.lost(end.lease());
            return false;
        }
        let until = Instant::now() + REMEMBERED;
        list.ready.push_back(Job { end, until, attempts: 0 });
        drop(list);
        self.wake_settler();
        true
    }

    /// A lease stays spent.
    pub(super) fn lost(&self, lease: LeaseId) {
        self.settler.lost.fetch_add(1, Ordering::Relaxed);
        let waiting = self.settler.pending();
        self.listeners.tell(&LimitEvent::Unsettled { lease, waiting });
    }

    /// Sees to it that somebody works on the list.
    pub(super) fn wake_settler(self: &Arc<Self>) {
        self.employ(&self.home.handle());
    }

    fn employ(self: &Arc<Self>, handle: &Handle) {
        let mut list = self.settler.lock();
        let due = list.delayed.range(..=(Instant::now(), u64::MAX)).take(WORKERS_MAX).count();
        let has_work = list.ready.len() + due > 0 || (!list.delayed.is_empty() && !list.has_watch);
        let working = list.workers - usize::from(list.has_watch);
        if !has_work || working >= (list.ready.len() + due).clamp(1, WORKERS_MAX) {
            return;
        }
        list.workers += 1;
        drop(list);
        let worker = Worker { shared: Arc::clone(self), job: None, is_watching: false, has_left: false };
        handle.spawn(worker.run());
    }
}

/// Works on the list until it is empty. Dropped earlier, it hands back what it had.
struct Worker {
    shared: Arc<Shared>,
    job: Option<Job>,
    is_watching: bool,
    has_left: bool,
}

impl Worker {
    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            // Another job may be set aside for less long.
            let set_aside = shared.settler.set_aside.notified();
            match self.next() {
                Next::Job => self.work().await,
                Next::Wait(until) => drop(timeout_at(until, set_aside).await),
                Next::Leave => return,
            }
        }
    }

    async fn work(&mut self) {
        let Some(job) = &self.job else { return };
        // Many may have become due at once.
        self.shared.employ(&Handle::current());
        // A store that panics at this one would at the next attempt: it is given up, and the others go on.
        match unless_it_panics(self.shared.tell_store(job)).await {
            Told::Heard => {}
            Told::Later => return self.set_aside(),
            Told::Lost => self.shared.lost(job.end.lease()),
        }
        self.job = None;
        self.shared.settler.lock().in_hand -= 1;
    }

    /// Leaves a job for later.
    fn set_aside(&mut self) {
        let Some(mut job) = self.job.take() else { return };
        job.attempts += 1;
        let backoff = Backoff::exponential(BACKOFF.0, BACKOFF.1).jitter(Jitter::Full);
        let at = Instant::now() + backoff.delay(job.attempts, &mut Random::seeded(rand::random()));
        let mut list = self.shared.settler.lock();
        list.in_hand -= 1;
        list.last_number += 1;
        let number = list.last_number;
        list.delayed.insert((at, number), job);
        drop(list);
        self.shared.settler.set_aside.notify_waiters();
    }

    fn next(&mut self) -> Next {
        let now = Instant::now();
        let mut list = self.shared.settler.lock();
        if std::mem::take(&mut self.is_watching) {
            list.has_watch = false;
        }
        let first = list.delayed.first_key_value().map(|((at, _), _)| *at);
        self.job = if first.is_some_and(|at| at <= now) {
            list.delayed.pop_first().map(|(_, job)| job)
        } else {
            list.ready.pop_front()
        };
        if self.job.is_some() {
            list.in_hand += 1;
            return Next::Job;
        }
        if let Some(until) = first
            && !list.has_watch
        {
            list.has_watch = true;
            self.is_watching = true;
            return Next::Wait(until);
        }
        // Under the lock that found nothing: a job added from now on needs another worker.
        list.workers -= 1;
        self.has_left = true;
        let is_idle = list.len() == 0;
        drop(list);
        if is_idle {
            self.shared.settler.idle.notify_waiters();
        }
        Next::Leave
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.has_left {
            return;
        }
        // Its runtime is shutting down: another one goes on.
        let mut list = self.shared.settler.lock();
        list.workers -= 1;
        if self.is_watching {
            list.has_watch = false;
        }
        if let Some(job) = self.job.take() {
            list.in_hand -= 1;
            list.ready.push_front(job);
        }
        drop(list);
        self.shared.employ(&own_thread());
    }
}

impl Shared {
    /// Tells the store how a lease ended.
    async fn tell_store(&self, job: &Job) -> Told {
        let answer = match &job.end {
            End::Cancel(cancel) => self.guard.call(self.store.cancel(cancel)).await,
            End::Settle(settle) => self.guard.call(self.store.settle(settle)).await,
        };
        let Err(failed) = answer else {
            self.turns.returned(match &job.end {
                End::Cancel(cancel) => &cancel.levels,
                End::Settle(settle) => &settle.levels,
            });
            return Told::Heard;
        };
        match Unheard::of(&failed.error) {
            Unheard::Over(_) => Told::Heard,
            Unheard::Later if Instant::now() < job.until => Told::Later,
            Unheard::Later | Unheard::Never => Told::Lost,
        }
    }
}

async fn unless_it_panics(told: impl Future<Output = Told>) -> Told {
    let mut told = pin!(told);
    let poll = |context: &mut Context<'_>| {
        let answer = catch_unwind(AssertUnwindSafe(|| told.as_mut().poll(context)));
        answer.unwrap_or(Poll::Ready(Told::Lost))
    };
    poll_fn(poll).await
}
