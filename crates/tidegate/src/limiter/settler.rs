//! Ending leases in the background: those that were dropped, and those whose ending did not reach the store.
//!
//! A drop never waits. What it has to say is put on a bounded list, and tasks in the caller's runtime say it to the
//! store, again and again while the store is away. When the list is full the lease stays spent, which is an event
//! and is counted. A runtime that shuts down hands what it had back.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::random::Random;
use tidegate_store::{Cancel, Settle, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, sleep};

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
            self.settler.lost.fetch_add(1, Ordering::Relaxed);
            self.listeners.tell(&LimitEvent::Unsettled { lease: end.lease(), waiting });
            return false;
        }
        list.jobs.push_back(Job { end, until: Instant::now() + REMEMBERED });
        drop(list);
        self.wake_settler();
        true
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
            if !unless_it_panics(self.shared.tell_store(job)).await {
                let lease = job.end.lease();
                self.shared.settler.lost.fetch_add(1, Ordering::Relaxed);
                let waiting = self.shared.settler.pending();
                self.shared.listeners.tell(&LimitEvent::Unsettled { lease, waiting });
            }
            self.job = None;
            self.shared.settler.lock().in_hand -= 1;
        }
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
    /// Tells the store how a lease ended, until it has heard. Answers whether it has.
    async fn tell_store(&self, job: &Job) -> bool {
        let backoff = Backoff::exponential(BACKOFF.0, BACKOFF.1).jitter(Jitter::Full);
        let mut random = Random::seeded(rand::random());
        for attempt in 1.. {
            let answer = match &job.end {
                End::Cancel(cancel) => self.guard.call(self.store.cancel(cancel)).await,
                End::Settle(settle) => self.guard.call(self.store.settle(settle)).await,
            };
            match answer.map_err(StoreError::from) {
                Ok(_) => {
                    self.turns.returned(match &job.end {
                        End::Cancel(cancel) => &cancel.levels,
                        End::Settle(settle) => &settle.levels,
                    });
                    return true;
                }
                Err(error) if error.is_transient() && Instant::now() < job.until => {
                    sleep(backoff.delay(attempt, &mut random)).await;
                }
                // It ended otherwise meanwhile, which is an end too.
                Err(StoreError::Ended { .. } | StoreError::NoLease { .. }) => return true,
                Err(_) => return false,
            }
        }
        false
    }
}

async fn unless_it_panics(told: impl Future<Output = bool>) -> bool {
    let mut told = pin!(told);
    let poll = |context: &mut Context<'_>| {
        let answer = catch_unwind(AssertUnwindSafe(|| told.as_mut().poll(context)));
        answer.unwrap_or(Poll::Ready(false))
    };
    poll_fn(poll).await
}
