//! Whose turn it is: callers that wait for the same subject draw one at a time, in the order they came.
//!
//! Only the first of a line asks the store. It sleeps until the time that a refusal named, or until a lease of
//! this process gives something back to what it waits for, or the store announces another policy. Several lines may wait for the same, an organisation's
//! bucket, and what comes back may be too little for one and enough for another: the first of each of them asks. A
//! refusal gives nothing back, so that those who are refused do not wake each other.

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

/// The lines of all subjects.
#[derive(Debug)]
pub(crate) struct Turns {
    lines: Mutex<HashMap<Subject, Arc<Line>>>,
    stuck: Mutex<HashMap<Subject, Stuck>>,
    waiting: AtomicUsize,
    /// Those who ask, do not wait yet, and want to know of returns all the same.
    listening: AtomicUsize,
    waiters_max: usize,
    is_closed: AtomicBool,
    /// Returns that were told of while somebody waited, and calls to everybody.
    returns: AtomicU64,
    /// What the store announces of changes.
    changes: Option<Changes>,
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
pub(crate) struct Head {
    pub(crate) ready_at: Instant,
}

/// Those who are first of their line and wait for what this subject's buckets are short of.
#[derive(Debug)]
struct Stuck {
    /// Tells each of them, and keeps it for those who are asking meanwhile.
    returned: Arc<watch::Sender<()>>,
    watching: usize,
}

/// A place in a line; leaving it is dropping it.
#[derive(Debug)]
pub(crate) struct Ticket<'a> {
    turns: &'a Turns,
    subject: Subject,
    line: Arc<Line>,
    /// When this one is to be served, if it was the first and has told.
    ready_at: Mutex<Option<Instant>>,
}

/// Waits for returns to a subject's buckets; dropped, it does not any more.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    turns: &'a Turns,
    subject: Subject,
    returned: watch::Receiver<()>,
    /// Whoever is stuck may be let in by another policy.
    changes: Option<Changes>,
}

/// One to whom returns matter.
#[derive(Debug)]
pub(crate) struct Listening<'a> {
    turns: &'a Turns,
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.turns.listening.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Why somebody's turn did not come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoTurn {
    TimedOut,
    Closed,
}

impl Turns {
    pub(crate) fn new(waiters_max: usize, changes: Option<Changes>) -> Self {
        Self {
            changes,
            lines: Mutex::default(),
            stuck: Mutex::default(),
            waiting: AtomicUsize::new(0),
            listening: AtomicUsize::new(0),
            waiters_max,
            is_closed: AtomicBool::new(false),
            returns: AtomicU64::new(0),
        }
    }

    /// Returns so far, and changes of policies that were announced: one that is refused and finds another number than
    /// before it asked may ask again.
    pub(crate) fn returns(&self) -> u64 {
        let announced = self.changes.as_ref().map_or(0, |changes| changes.newest().number());
        self.returns.load(Ordering::SeqCst).wrapping_add(announced)
    }

    /// Everybody who is first asks again.
    pub(crate) fn wake(&self) {
        self.returns.fetch_add(1, Ordering::SeqCst);
        let stuck: Vec<_> = self.stuck.lock().values().map(|place| Arc::clone(&place.returned)).collect();
        for returned in stuck {
            returned.send_replace(());
        }
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) const fn waiters_max(&self) -> usize {
        self.waiters_max
    }

    /// How many wait for a subject, and what the first was told.
    #[inline]
    pub(crate) fn ahead(&self, subject: &Subject) -> Option<(usize, Option<Head>)> {
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
    pub(crate) fn enter(&self, subject: &Subject) -> Option<Ticket<'_>> {
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
    pub(crate) fn watch(&self, subject: &Subject) -> Watch<'_> {
        let mut stuck = self.stuck.lock();
        let place = stuck
            .entry(subject.clone())
            .or_insert_with(|| Stuck { returned: Arc::new(watch::Sender::new(())), watching: 0 });
        place.watching += 1;
        let (returned, changes) = (place.returned.subscribe(), self.changes.as_ref().map(Changes::from_now));
        Watch { turns: self, subject: subject.clone(), returned, changes }
    }

    /// A lease gave something back to these levels: the first of every line that waits for one of them asks again. How much
    /// each of them needs is for the store to say.
    #[inline]
    pub(crate) fn returned(&self, levels: &Levels) {
        if self.waiting.load(Ordering::Relaxed) > 0 || self.listening.load(Ordering::Relaxed) > 0 {
            self.returns.fetch_add(1, Ordering::SeqCst);
            let stuck = self.stuck.lock();
            let places = levels.levels().iter().filter_map(|level| stuck.get(&level.subject));
            let woken: Vec<_> = places.map(|place| Arc::clone(&place.returned)).collect();
            drop(stuck);
            for returned in woken {
                returned.send_replace(());
            }
        }
    }

    /// From now on returns are counted, until the answer is dropped.
    pub(crate) fn listen(&self) -> Listening<'_> {
        self.listening.fetch_add(1, Ordering::SeqCst);
        Listening { turns: self }
    }

    /// Nobody's turn comes any more.
    pub(crate) fn close(&self) {
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
    pub(crate) async fn turn(&self, deadline: Option<Instant>) -> Result<SemaphorePermit<'_>, NoTurn> {
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
    pub(crate) fn head(&self) -> Option<Head> {
        *self.line.head.lock()
    }

    /// Tells those behind what the first was told.
    pub(crate) fn tell(&self, head: Head) {
        *self.ready_at.lock() = Some(head.ready_at);
        *self.line.head.lock() = Some(head);
        self.line.told.notify_waiters();
    }

    pub(crate) fn ahead(&self) -> usize {
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
    /// Whether it watches this subject's buckets.
    pub(crate) fn is_of(&self, subject: &Subject) -> bool {
        self.subject == *subject
    }

    /// The next return, or change that is announced, for one who waits for other things too. What came since the last one
    /// counts.
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
                unreachable!("its place is kept while somebody watches");
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
        // Whoever closes from now on wakes us.
        if !self.turns.is_closed.load(Ordering::SeqCst) {
            // Either way it is time to ask again.
            let _ = timeout_at(until, self.returned()).await;
        }
    }
}

impl Drop for Watch<'_> {
    /// Nobody else is to be told: what this one heard of, the others did too.
    fn drop(&mut self) {
        let mut stuck = self.turns.stuck.lock();
        let Some(place) = stuck.get_mut(&self.subject) else { return };
        place.watching -= 1;
        if place.watching == 0 {
            stuck.remove(&self.subject);
        }
    }
}
