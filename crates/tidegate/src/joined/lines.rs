//! The store gate: callers of one subject that a shared limit has turned away, in the order they came.
//!
//! There is a line for each throttle and subject, and it exists only while somebody is in it. The first of a line is
//! let go when the time it was told has come, or earlier if a lease of this process gives something back. Whoever is
//! let go keeps its number: refused again, it is where it was. A grant lets one more go at the same time, so that a
//! limit with room is soon asked by many at once; a refusal lets only one go again, so that a limit without is not
//! asked by everybody for each unit that comes back.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tidegate_core::limit::name::Subject;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::sync::Mutex;

/// Let go at the same time, at most.
const WINDOW_MAX: usize = 1_024;

/// The lines of all throttles and subjects under one limiter.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    by_key: Mutex<HashMap<Key, Line>>,
    /// Those who wait, in all lines. While nobody does, nobody takes the lock.
    waiting: AtomicUsize,
    numbers: AtomicU64,
}

/// Which throttle, by its address while somebody of it is in line, and who.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) throttle: usize,
    pub(crate) subject: Subject,
}

#[derive(Debug)]
struct Line {
    /// Those who wait, by number: whoever came first has the lowest.
    waiting: BTreeMap<u64, Waiter>,
    /// Those who were let go, and have not been answered yet.
    going: usize,
    /// How many may be let go at the same time.
    window: usize,
    /// Who was last told that it is the first.
    head: Option<u64>,
}

#[derive(Debug)]
struct Waiter {
    wake: Arc<Notify>,
    /// When it is worth asking again; `None` where nothing is known against it.
    ready_at: Option<Instant>,
    deadline: Option<Instant>,
}

/// A place in a line. Dropped, it leaves, and the next is let go.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    lines: &'a Lines,
    key: Key,
    number: u64,
    wake: Arc<Notify>,
    deadline: Option<Instant>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    InLine,
    Going,
    Left,
}

/// What a place in line is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// It may go and ask.
    Going,
    /// It waits.
    Waiting {
        /// How many are before it.
        ahead: usize,
        /// When the first of the line may be served at the earliest, as far as is known.
        head_ready_at: Option<Instant>,
    },
}

/// Others wait, and nobody overtakes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    pub(crate) ahead: usize,
    pub(crate) ready_at: Option<Instant>,
}

impl Lines {
    /// A number for one who comes now.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether nobody waits, in any line.
    #[inline]
    pub(crate) fn are_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Who waits at a gate, if anybody does.
    pub(crate) fn ahead(&self, key: &Key) -> Option<Ahead> {
        if self.are_empty() {
            return None;
        }
        let lines = self.by_key.lock();
        let line = lines.get(key)?;
        let (_, head) = line.waiting.first_key_value()?;
        Some(Ahead { ahead: line.waiting.len(), ready_at: head.ready_at })
    }

    /// A place by the order of `number`. With a time, it was refused and told to come back then.
    pub(crate) fn enter(
        &self,
        key: Key,
        number: u64,
        ready_at: Option<Instant>,
        deadline: Option<Instant>,
    ) -> Place<'_> {
        let wake = Arc::new(Notify::new());
        let place = Place { lines: self, key, number, wake, deadline, state: State::InLine };
        place.put(ready_at, false);
        place
    }

    /// Everybody looks around: something has changed that concerns all.
    pub(crate) fn wake(&self) {
        let lines = self.by_key.lock();
        let waiters = lines.values().flat_map(|line| line.waiting.values());
        let woken: Vec<_> = waiters.map(|waiter| Arc::clone(&waiter.wake)).collect();
        drop(lines);
        for wake in woken {
            wake.notify_one();
        }
    }
}

impl Line {
    /// Lets go whom the window has room for, and tells the first who has to wait that it is the first.
    fn advance(&mut self, woken: &mut Vec<Arc<Notify>>) -> usize {
        let mut gone = 0;
        while let Some(first) = self.waiting.first_entry() {
            if self.going < self.window && first.get().ready_at.is_none() {
                woken.push(first.remove().wake);
                self.going += 1;
                gone += 1;
                continue;
            }
            if self.head != Some(*first.key()) {
                self.head = Some(*first.key());
                woken.push(Arc::clone(&first.get().wake));
            }
            break;
        }
        gone
    }

    /// What the first ones were told holds no longer: as many as may go at once will ask anew.
    fn forget_times(&mut self) {
        let room = self.window.saturating_sub(self.going);
        for waiter in self.waiting.values_mut().take(room) {
            waiter.ready_at = None;
        }
    }

    /// One who asked, and was told to come back later, or who finds others waiting.
    fn put(&mut self, number: u64, waiter: Waiter, woken: &mut Vec<Arc<Notify>>) {
        let ready_at = waiter.ready_at;
        if ready_at.is_some() {
            self.window = 1;
        }
        self.waiting.insert(number, waiter);
        let is_first = self.waiting.first_key_value().is_some_and(|(first, _)| *first == number);
        if let (true, Some(ready_at)) = (is_first, ready_at) {
            // Those who cannot wait as long as the first has to hear of it.
            let late =
                self.waiting.values().filter(|waiter| waiter.deadline.is_some_and(|end| end < ready_at));
            woken.extend(late.map(|waiter| Arc::clone(&waiter.wake)));
        }
    }
}

impl Place<'_> {
    /// Where it stands.
    pub(crate) fn look(&mut self) -> Look {
        let lines = self.lines.by_key.lock();
        let line = lines.get(&self.key);
        let Some(line) = line.filter(|line| line.waiting.contains_key(&self.number)) else {
            // Whoever lets it go takes it out.
            self.state = State::Going;
            return Look::Going;
        };
        let head_ready_at = line.waiting.first_key_value().and_then(|(_, head)| head.ready_at);
        Look::Waiting { ahead: line.waiting.range(..self.number).count(), head_ready_at }
    }

    /// Woken when it is let go, when it becomes the first, or when its time will not do.
    pub(crate) fn woken(&self) -> Notified<'_> {
        self.wake.notified()
    }

    /// The time it was told has come, or something was given back.
    pub(crate) fn is_due(&self) {
        self.change(|line, _| {
            if let Some(waiter) = line.waiting.get_mut(&self.number) {
                waiter.ready_at = None;
            }
        });
    }

    /// It asked, and was told to come back at `ready_at`. Nobody but the first asks until somebody is granted.
    pub(crate) fn refused(&mut self, ready_at: Instant) {
        self.state = State::InLine;
        self.put(Some(ready_at), true);
    }

    /// It asked, and was granted: there may be more.
    pub(crate) fn granted(mut self) {
        self.state = State::Left;
        self.change(|line, _| {
            line.going -= 1;
            line.window = (line.window + 1).min(WINDOW_MAX);
            line.forget_times();
        });
    }

    fn put(&self, ready_at: Option<Instant>, was_going: bool) {
        let waiter = Waiter { wake: Arc::clone(&self.wake), ready_at, deadline: self.deadline };
        self.lines.waiting.fetch_add(1, Ordering::AcqRel);
        self.change(|line, woken| {
            line.going -= usize::from(was_going);
            line.put(self.number, waiter, woken);
        });
    }

    /// Changes the line, and lets go whom that lets go.
    fn change(&self, change: impl FnOnce(&mut Line, &mut Vec<Arc<Notify>>)) {
        let mut woken = Vec::new();
        let mut lines = self.lines.by_key.lock();
        let line = lines.entry(self.key.clone()).or_insert_with(|| Line {
            waiting: BTreeMap::new(),
            going: 0,
            window: 1,
            head: None,
        });
        change(line, &mut woken);
        let gone = line.advance(&mut woken);
        if line.waiting.is_empty() && line.going == 0 {
            lines.remove(&self.key);
        }
        drop(lines);
        self.lines.waiting.fetch_sub(gone, Ordering::AcqRel);
        // After the lock: a waker is somebody's code.
        for wake in woken {
            wake.notify_one();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.state == State::Left {
            return;
        }
        let mut was_waiting = false;
        self.change(|line, _| {
            let was_first = line.waiting.first_key_value().is_none_or(|(first, _)| self.number <= *first);
            was_waiting = line.waiting.remove(&self.number).is_some();
            if !was_waiting {
                // It was let go, whether it knows it or not.
                line.going -= 1;
            }
            if was_first {
                // What it was told was about its own cost: the next asks for itself.
                line.forget_times();
            }
        });
        if was_waiting {
            self.lines.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
