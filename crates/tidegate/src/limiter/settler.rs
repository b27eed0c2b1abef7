//! Ending leases in the background: those that were dropped, and those whose ending did not reach the store.
//!
//! A drop never waits. What it has to say is put on a bounded list, and tasks in the caller's runtime say it to the
//! store, again and again while the store is away or in a state that can be repaired. When the list is full, when the
//! time is over or when it cannot help to say the same again, the lease stays spent, which is an event and is counted. A
//! runtime that shuts down hands what it had back.

use std::collections::VecDeque;
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
use tokio::time::{Instant, sleep, sleep_until};

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
    max: usize,
    lost: AtomicU64,
}

#[derive(Default)]
struct List {
    jobs: VecDeque<Job>,
    /// Jobs that a worker has in hand.
    in_hand: usize,
    workers: usize,
}

struct Job {
    end: End,
    /// After this it is given up: the lease expires by itself.
    until: Instant,
    /// How often the store was there and refused it, and when it is told again.
    refusals: u32,
    not_before: Option<Instant>,
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
    /// The store is there and refuses; later it may not.
    Refused,
    Lost,
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
        Self { list: Mutex::default(), idle: Notify::new(), max, lost: AtomicU64::new(0) }
    }

    pub(super) fn pending(&self) -> usize {
        let list = self.lock();
        list.jobs.len() + list.in_hand
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
        let waiting = list.jobs.len() + list.in_hand;
        if waiting >= self.settler.max {
            drop(list);
            self.lost(end.lease());
            return false;
        }
        let until = Instant::now() + REMEMBERED;
        list.jobs.push_back(Job { end, until, refusals: 0, not_before: None });
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
        let wanted = list.jobs.len().min(WORKERS_MAX);
        if list.workers >= wanted {
            return;
        }
        list.workers += 1;
        drop(list);
        let worker = Worker { shared: Arc::clone(self), job: None, has_left: false };
        handle.spawn(worker.run());
    }
}

/// One that works on the list until it is empty. Dropped earlier, it hands back what it had.
struct Worker {
    shared: Arc<Shared>,
    job: Option<Job>,
    has_left: bool,
}

impl Worker {
    async fn run(mut self) {
        while self.next() {
            let Some(job) = &self.job else { return };
            // A store that panics at this one would at the next attempt: it is given up, and the others go on.
            match unless_it_panics(self.shared.tell_store(job)).await {
                Told::Heard => {}
                Told::Refused => {
                    self.put_back();
                    continue;
                }
                Told::Lost => self.shared.lost(job.end.lease()),
            }
            self.job = None;
            self.shared.settler.lock().in_hand -= 1;
        }
    }

    /// Leaves a job for later, behind the others: one bucket that is damaged holds up nobody else's endings.
    fn put_back(&mut self) {
        let Some(mut job) = self.job.take() else { return };
        job.refusals += 1;
        let delay = backoff().delay(job.refusals, &mut Random::seeded(rand::random()));
        job.not_before = Some(Instant::now() + delay);
        let mut list = self.shared.settler.lock();
        list.in_hand -= 1;
        list.jobs.push_back(job);
    }

    fn next(&mut self) -> bool {
        let mut list = self.shared.settler.lock();
        self.job = list.jobs.pop_front();
        if self.job.is_some() {
            list.in_hand += 1;
            return true;
        }
        // Under the lock that found nothing: whoever adds a job from now on needs another worker.
        list.workers -= 1;
        self.has_left = true;
        let is_idle = list.in_hand == 0;
        drop(list);
        if is_idle {
            self.shared.settler.idle.notify_waiters();
        }
        false
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
        if let Some(job) = self.job.take() {
            list.in_hand -= 1;
            list.jobs.push_front(job);
        }
        drop(list);
        self.shared.employ(&own_thread());
    }
}

impl Shared {
    /// Tells the store how a lease ended, again and again while it is away.
    async fn tell_store(&self, job: &Job) -> Told {
        if let Some(not_before) = job.not_before {
            sleep_until(not_before).await;
        }
        let backoff = backoff();
        let mut random = Random::seeded(rand::random());
        for attempt in 1.. {
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
                Unheard::Over(_) => return Told::Heard,
                Unheard::Later if Instant::now() >= job.until => return Told::Lost,
                Unheard::Later if failed.error.is_transient() => {
                    sleep(backoff.delay(attempt, &mut random)).await;
                }
                Unheard::Later => return Told::Refused,
                Unheard::Never => return Told::Lost,
            }
        }
        Told::Lost
    }
}

fn backoff() -> Backoff {
    Backoff::exponential(BACKOFF.0, BACKOFF.1).jitter(Jitter::Full)
}

async fn unless_it_panics(told: impl Future<Output = Told>) -> Told {
    let mut told = pin!(told);
    let poll = |context: &mut Context<'_>| {
        let answer = catch_unwind(AssertUnwindSafe(|| told.as_mut().poll(context)));
        answer.unwrap_or(Poll::Ready(Told::Lost))
    };
    poll_fn(poll).await
}
