//! Per-subject FIFO queues: callers that wait for the same subject draw one at a time, in arrival order.
//!
//! Only the head of a queue calls the store. It sleeps until the retry time of its refusal, until a lease of this
//! process returns units to the bucket it waits for, or until the store announces a policy change. Several queues may
//! wait for the same bucket, such as an organisation's, and a return may be too small for one and enough for another,
//! so the heads of all of them draw. A refusal returns nothing, so refused callers do not wake each other.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::Subject;
use tidegate_store::Changes;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, watch};
use tokio::time::{Instant, timeout_at};

use crate::sync::Mutex;

/// The queues of all subjects.
#[derive(Debug)]
pub(crate) struct Waiters {
    queues: Mutex<HashMap<Subject, Arc<SubjectQueue>>>,
    blocked: Mutex<HashMap<Subject, BlockedHeads>>,
    waiting: AtomicUsize,
    /// Callers that are drawing, do not wait yet, and still need returns to be counted.
    counting: AtomicUsize,
    capacity: usize,
    is_closed: AtomicBool,
    /// Returns that happened while a caller waited or listened, and calls to `wake`.
    returns: AtomicU64,
    /// The store's change notifications.
    changes: Option<Changes>,
}

/// The queue of one subject.
#[derive(Debug)]
struct SubjectQueue {
    turn: Semaphore,
    waiting: AtomicUsize,
    head: Mutex<Option<Head>>,
    /// Notified when the head publishes a new retry time.
    head_changed: Notify,
}

/// The retry time published by the head of a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) ready_at: Instant,
}

/// The queue heads that wait for this subject's buckets.
#[derive(Debug)]
struct BlockedHeads {
    /// Wakes all of them. A watch channel keeps the event for heads that are drawing when it is sent.
    returned: Arc<watch::Sender<()>>,
    watching: usize,
}

/// A place in a queue. Dropping it leaves the queue.
#[derive(Debug)]
pub(crate) struct Ticket<'a> {
    waiters: &'a Waiters,
    subject: Subject,
    queue: Arc<SubjectQueue>,
    /// The retry time it published as head, if any.
    ready_at: Mutex<Option<Instant>>,
}

/// Waits for returns to a subject's buckets, until dropped.
#[derive(Debug)]
pub(crate) struct ReturnWatch<'a> {
    waiters: &'a Waiters,
    subject: Subject,
    returned: watch::Receiver<()>,
    /// A policy change may admit a blocked waiter.
    changes: Option<Changes>,
}

/// Keeps the counting of returns enabled, until dropped.
#[derive(Debug)]
pub(crate) struct ReturnCounting<'a> {
    waiters: &'a Waiters,
}

impl Drop for ReturnCounting<'_> {
    fn drop(&mut self) {
        self.waiters.counting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Why a turn was not granted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TurnError {
    TimedOut,
    Closed,
}

impl Waiters {
    pub(crate) fn new(waiters_max: usize, changes: Option<Changes>) -> Self {
        Self {
            changes,
            queues: Mutex::default(),
            blocked: Mutex::default(),
            waiting: AtomicUsize::new(0),
            counting: AtomicUsize::new(0),
            capacity: waiters_max,
            is_closed: AtomicBool::new(false),
            returns: AtomicU64::new(0),
        }
    }

    /// Returns and announced policy changes so far. A caller that was refused and finds that the count has changed
    /// since before its draw may draw again.
    pub(crate) fn returns(&self) -> u64 {
        let announced = self.changes.as_ref().map_or(0, |changes| changes.newest().number());
        self.returns.load(Ordering::SeqCst).wrapping_add(announced)
    }

    /// Makes the head of every queue draw again.
    pub(crate) fn wake(&self) {
        self.returns.fetch_add(1, Ordering::SeqCst);
        let blocked: Vec<_> = self.blocked.lock().values().map(|heads| Arc::clone(&heads.returned)).collect();
        for returned in blocked {
            returned.send_replace(());
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) const fn waiters_max(&self) -> usize {
        self.capacity
    }

    /// The number of waiters for a subject, and the retry time published by their head.
    #[inline]
    pub(crate) fn ahead(&self, subject: &Subject) -> Option<(usize, Option<Head>)> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let queue = self.queues.lock().get(subject).cloned()?;
        let head = *queue.head.lock();
        let ahead = queue.waiting.load(Ordering::Relaxed);
        // A single caller that has not been refused is drawing rather than waiting, and a new caller may do the same.
        (ahead > 1 || head.is_some()).then_some((ahead, head))
    }

    /// Enters a subject's queue at the end; `None` if the maximum number of waiters is reached.
    pub(crate) fn enter(&self, subject: &Subject) -> Option<Ticket<'_>> {
        let mut queues = self.queues.lock();
        if self.waiting.load(Ordering::Relaxed) >= self.capacity {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let queue = queues.entry(subject.clone()).or_insert_with(|| {
            Arc::new(SubjectQueue {
                turn: Semaphore::new(1),
                waiting: AtomicUsize::new(0),
                head: Mutex::new(None),
                head_changed: Notify::new(),
            })
        });
        queue.waiting.fetch_add(1, Ordering::Relaxed);
        if self.is_closed.load(Ordering::SeqCst) {
            queue.turn.close();
        }
        let (queue, ready_at) = (Arc::clone(queue), Mutex::new(None));
        Some(Ticket { waiters: self, subject: subject.clone(), queue, ready_at })
    }

    /// Subscribes to returns to a subject's buckets.
    pub(crate) fn watch(&self, subject: &Subject) -> ReturnWatch<'_> {
        let mut blocked = self.blocked.lock();
        let heads = blocked
            .entry(subject.clone())
            .or_insert_with(|| BlockedHeads { returned: Arc::new(watch::Sender::new(())), watching: 0 });
        heads.watching += 1;
        let (returned, changes) = (heads.returned.subscribe(), self.changes.as_ref().map(Changes::from_now));
        ReturnWatch { waiters: self, subject: subject.clone(), returned, changes }
    }

    /// A lease returned units to these levels: the head of every queue that waits for one of them draws again. Only
    /// the store can decide whether the units suffice.
    #[inline]
    pub(crate) fn returned(&self, levels: &Levels) {
        if self.waiting.load(Ordering::Relaxed) > 0 || self.counting.load(Ordering::Relaxed) > 0 {
            self.returns.fetch_add(1, Ordering::SeqCst);
            let blocked = self.blocked.lock();
            let all_heads = levels.levels().iter().filter_map(|level| blocked.get(&level.subject));
            let woken: Vec<_> = all_heads.map(|heads| Arc::clone(&heads.returned)).collect();
            drop(blocked);
            for returned in woken {
                returned.send_replace(());
            }
        }
    }

    /// Counts returns until the guard is dropped.
    pub(crate) fn count_returns(&self) -> ReturnCounting<'_> {
        self.counting.fetch_add(1, Ordering::SeqCst);
        ReturnCounting { waiters: self }
    }

    /// Closes all queues: no further turn is granted.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let queues: Vec<_> = self.queues.lock().values().cloned().collect();
        for queue in queues {
            queue.turn.close();
        }
        self.wake();
    }
}

impl Ticket<'_> {
    /// Waits for all callers ahead to leave; fails early if the head publishes a retry time after `deadline`.
    pub(crate) async fn turn(&self, deadline: Option<Instant>) -> Result<SemaphorePermit<'_>, TurnError> {
        let mut turn = pin!(self.queue.turn.acquire());
        let Some(deadline) = deadline else { return turn.await.map_err(|_| TurnError::Closed) };
        let mut head_has_changed = false;
        loop {
            let mut head_changed = pin!(self.queue.head_changed.notified());
            // Checked after creating `head_changed`, so that no later notification is missed.
            if head_has_changed && self.head().is_some_and(|head| head.ready_at > deadline) {
                return Err(TurnError::TimedOut);
            }
            let turn_or_change = poll_fn(|context| match turn.as_mut().poll(context) {
                Poll::Ready(turn) => Poll::Ready(Some(turn)),
                Poll::Pending => head_changed.as_mut().poll(context).map(|()| None),
            });
            match timeout_at(deadline, turn_or_change).await {
                Ok(Some(turn)) => return turn.map_err(|_| TurnError::Closed),
                Ok(None) => head_has_changed = true,
                Err(_) => return Err(TurnError::TimedOut),
            }
        }
    }

    /// The retry time last published by the head.
    pub(crate) fn head(&self) -> Option<Head> {
        *self.queue.head.lock()
    }

    /// Publishes the head's retry time to the waiters behind it.
    pub(crate) fn publish(&self, head: Head) {
        *self.ready_at.lock() = Some(head.ready_at);
        *self.queue.head.lock() = Some(head);
        self.queue.head_changed.notify_waiters();
    }

    pub(crate) fn ahead(&self) -> usize {
        self.queue.waiting.load(Ordering::Relaxed).saturating_sub(1)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if let Some(ready_at) = *self.ready_at.lock() {
            // Withdraw its retry time, unless the next head has published one already.
            self.queue.head.lock().take_if(|head| head.ready_at == ready_at);
        }
        let mut queues = self.waiters.queues.lock();
        self.waiters.waiting.fetch_sub(1, Ordering::Relaxed);
        if self.queue.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            queues.remove(&self.subject);
        }
    }
}

impl ReturnWatch<'_> {
    /// Whether it watches this subject's buckets.
    pub(crate) fn watches(&self, subject: &Subject) -> bool {
        self.subject == *subject
    }

    /// Completes at the next return or announced change, including one since the last call. Can be combined with
    /// other futures.
    pub(crate) async fn returned(&mut self) {
        let Self { returned, changes, .. } = self;
        let changed = async {
            match changes {
                Some(changes) => changes.changed().await,
                None => std::future::pending().await,
            }
        };
        let returned = async {
            if returned.changed().await.is_err() {
                unreachable!("the sender is kept while a watch exists");
            }
        };
        let (mut returned, mut changed) = (pin!(returned), pin!(changed));
        poll_fn(|context| match returned.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => changed.as_mut().poll(context),
        })
        .await;
    }

    /// Waits for a return, at most until `until`.
    pub(crate) async fn wait(&mut self, until: Instant) {
        // Checked after subscribing: a later close wakes this watch.
        if !self.waiters.is_closed.load(Ordering::SeqCst) {
            // The caller draws again after a return and after a timeout.
            let _ = timeout_at(until, self.returned()).await;
        }
    }
}

impl Drop for ReturnWatch<'_> {
    /// Wakes no other watcher: all of them received the same events.
    fn drop(&mut self) {
        let mut blocked = self.waiters.blocked.lock();
        let Some(heads) = blocked.get_mut(&self.subject) else { return };
        heads.watching -= 1;
        if heads.watching == 0 {
            blocked.remove(&self.subject);
        }
    }
}
