//! Whose turn it is: callers that wait for the same subject draw one at a time, in the order they came.
//!
//! Only the first of a line asks the store. It sleeps until the time that a refusal named, or until a lease of
//! this process gives back what it waits for.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::Subject;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use crate::sync::Mutex;

/// The lines of all subjects.
#[derive(Debug)]
pub(super) struct Turns {
    lines: Mutex<HashMap<Subject, Arc<Line>>>,
    stuck: Mutex<HashMap<Subject, Stuck>>,
    waiting: AtomicUsize,
    waiters_max: usize,
    is_closed: AtomicBool,
    /// Returns that were told of while somebody waited.
    returns: AtomicU64,
}

/// Those who wait for one subject.
#[derive(Debug)]
struct Line {
    turn: Semaphore,
    waiting: AtomicUsize,
    head: Mutex<Option<Head>>,
    /// The first was told something new.
    told: Notify,
}

/// What the first of a line was told.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) ready_at: Instant,
}

/// Those who are first of their line and wait for what this subject's buckets are short of.
#[derive(Debug)]
struct Stuck {
    returned: Arc<Notify>,
    watching: usize,
}

/// A place in a line; leaving it is dropping it.
#[derive(Debug)]
pub(super) struct Ticket<'a> {
    turns: &'a Turns,
    subject: Subject,
    line: Arc<Line>,
    /// When this one is to be served, if it was the first and has told.
    ready_at: Mutex<Option<Instant>>,
}

/// Waits for returns to a subject's buckets; dropped, it does not any more.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    turns: &'a Turns,
    subject: Subject,
    returned: Arc<Notify>,
}

/// Why somebody's turn did not come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoTurn {
    TimedOut,
    Closed,
}

impl Turns {
    pub(super) fn new(waiters_max: usize) -> Self {
        Self {
            lines: Mutex::default(),
            stuck: Mutex::default(),
            waiting: AtomicUsize::new(0),
            waiters_max,
            is_closed: AtomicBool::new(false),
            returns: AtomicU64::new(0),
        }
    }

    /// Returns so far: one that is refused and finds more of them than before it asked may ask again.
    pub(super) fn returns(&self) -> u64 {
        self.returns.load(Ordering::SeqCst)
    }

    /// Everybody who is first asks again.
    pub(super) fn wake(&self) {
        self.returns.fetch_add(1, Ordering::SeqCst);
        let stuck: Vec<_> = self.stuck.lock().values().map(|place| Arc::clone(&place.returned)).collect();
        for returned in stuck {
            returned.notify_waiters();
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(super) const fn waiters_max(&self) -> usize {
        self.waiters_max
    }

    /// How many wait for a subject, and what the first was told.
    #[inline]
    pub(super) fn ahead(&self, subject: &Subject) -> Option<(usize, Option<Head>)> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let line = self.lines.lock().get(subject).cloned()?;
        let head = *line.head.lock();
        let ahead = line.waiting.load(Ordering::Relaxed);
        // One who is alone and has not been refused does not wait: it is asking, as whoever comes now may too.
        (ahead > 1 || head.is_some()).then_some((ahead, head))
    }

    /// A place at the end of a subject's line; `None` where too many wait already.
    pub(super) fn enter(&self, subject: &Subject) -> Option<Ticket<'_>> {
        let mut lines = self.lines.lock();
        if self.waiting.load(Ordering::Relaxed) >= self.waiters_max {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let line = lines.entry(subject.clone()).or_insert_with(|| {
            Arc::new(Line {
                turn: Semaphore::new(1),
                waiting: AtomicUsize::new(0),
                head: Mutex::new(None),
                told: Notify::new(),
            })
        });
        line.waiting.fetch_add(1, Ordering::Relaxed);
        if self.is_closed.load(Ordering::SeqCst) {
            line.turn.close();
        }
        let (line, ready_at) = (Arc::clone(line), Mutex::new(None));
        Some(Ticket { turns: self, subject: subject.clone(), line, ready_at })
    }

    /// Waits for returns to a subject's buckets.
    pub(super) fn watch(&self, subject: &Subject) -> Watch<'_> {
        let mut stuck = self.stuck.lock();
        let place = stuck
            .entry(subject.clone())
            .or_insert_with(|| Stuck { returned: Arc::new(Notify::new()), watching: 0 });
        place.watching += 1;
        Watch { turns: self, subject: subject.clone(), returned: Arc::clone(&place.returned) }
    }

    /// A lease gave something back to these levels: one who waits for each of them asks again.
    #[inline]
    pub(super) fn returned(&self, levels: &Levels) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.returns.fetch_add(1, Ordering::SeqCst);
            let stuck = self.stuck.lock();
            let places = levels.levels().iter().filter_map(|level| stuck.get(&level.subject));
            let woken: Vec<_> = places.map(|place| Arc::clone(&place.returned)).collect();
            drop(stuck);
            for returned in woken {
                returned.notify_one();
            }
        }
    }

    /// Nobody's turn comes any more.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let lines: Vec<_> = self.lines.lock().values().cloned().collect();
        for line in lines {
            line.turn.close();
        }
        self.wake();
    }
}

impl Ticket<'_> {
    /// Waits until everybody ahead has left; not if the first is told that it takes longer than until `deadline`.
    pub(super) async fn turn(&self, deadline: Option<Instant>) -> Result<SemaphorePermit<'_>, NoTurn> {
        let mut turn = pin!(self.line.turn.acquire());
        let Some(deadline) = deadline else { return turn.await.map_err(|_| NoTurn::Closed) };
        let mut was_told = false;
        loop {
            let mut told = pin!(self.line.told.notified());
            // Looked at after the line above: whatever is told from now on wakes us.
            if was_told && self.head().is_some_and(|head| head.ready_at > deadline) {
                return Err(NoTurn::TimedOut);
            }
            let turn_or_told = poll_fn(|context| match turn.as_mut().poll(context) {
                Poll::Ready(turn) => Poll::Ready(Some(turn)),
                Poll::Pending => told.as_mut().poll(context).map(|()| None),
            });
            match timeout_at(deadline, turn_or_told).await {
                Ok(Some(turn)) => return turn.map_err(|_| NoTurn::Closed),
                Ok(None) => was_told = true,
                Err(_) => return Err(NoTurn::TimedOut),
            }
        }
    }

    /// What the first was told last.
    pub(super) fn head(&self) -> Option<Head> {
        *self.line.head.lock()
    }

    /// Tells those behind what the first was told.
    pub(super) fn tell(&self, head: Head) {
        *self.ready_at.lock() = Some(head.ready_at);
        *self.line.head.lock() = Some(head);
        self.line.told.notify_waiters();
    }

    pub(super) fn ahead(&self) -> usize {
        self.line.waiting.load(Ordering::Relaxed).saturating_sub(1)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if let Some(ready_at) = *self.ready_at.lock() {
            // What it was told goes with it, unless the next has told already.
            self.line.head.lock().take_if(|head| head.ready_at == ready_at);
        }
        let mut lines = self.turns.lines.lock();
        self.turns.waiting.fetch_sub(1, Ordering::Relaxed);
        if self.line.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            lines.remove(&self.subject);
        }
    }
}

impl Watch<'_> {
    /// What returned was enough for us: there may be some left for the next.
    pub(super) fn pass_on(&self) {
        self.returned.notify_one();
    }

    /// Waits for a return, at most until `until`.
    pub(super) async fn wait(&self, until: Instant) {
        let returned = self.returned.notified();
        // Asked after the line above: whoever closes from now on wakes us.
        if !self.turns.is_closed.load(Ordering::SeqCst) {
            // Either way it is time to ask again.
            let _ = timeout_at(until, returned).await;
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut stuck = self.turns.stuck.lock();
        if let Some(place) = stuck.get_mut(&self.subject) {
            place.watching -= 1;
            if place.watching == 0 {
                stuck.remove(&self.subject);
            }
        }
    }
}
