//! The store gate: a FIFO queue of callers that a shared limit refused, one queue per throttle and subject.
//!
//! A queue exists only while it has waiters. The head is released when its `ready_at` passes, or earlier when a lease
//! of this process returns units. A released waiter keeps its number, so a second refusal puts it back where it was.
//! The number of waiters released concurrently is a window: each grant widens it by one, so that an available limit
//! is soon drawn by many callers at once; a refusal resets it to one, so that an exhausted limit does not get a draw
//! from every waiter for each returned unit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tidegate_core::limit::name::Subject;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::sync::Mutex;

/// Upper bound of the window of concurrently released waiters.
const WINDOW_MAX: usize = 1_024;

/// The queues of all throttles and subjects under one limiter.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    by_key: Mutex<HashMap<QueueKey, SubjectQueue>>,
    /// Waiters in all queues. While this is zero, the fast path skips the lock.
    waiting: AtomicUsize,
    numbers: AtomicU64,
}

/// Queue key: the throttle, by its address (stable while one of its callers is queued), and the subject.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct QueueKey {
    pub(crate) throttle: usize,
    pub(crate) subject: Subject,
}

#[derive(Debug, Default)]
struct SubjectQueue {
    /// Waiters by arrival number, lowest first.
    waiting: BTreeMap<u64, Waiter>,
    /// The deadlines of waiters with their arrival numbers, earliest first.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Waiters that have left at the front: the others have moved up by as many places.
    left: usize,
    /// Released waiters whose draw has not completed.
    released: usize,
    /// How many waiters may be released concurrently.
    window: usize,
    /// The waiter that was last notified of being the head.
    head: Option<u64>,
}

#[derive(Debug)]
struct Waiter {
    wake: Arc<Notify>,
    /// When to draw again; `None` if no refusal is known.
    ready_at: Option<Instant>,
    deadline: Option<Instant>,
}

/// A place in a queue. Dropping it leaves the queue and releases the next waiter.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    queues: &'a Queues,
    key: QueueKey,
    number: u64,
    wake: Arc<Notify>,
    deadline: Option<Instant>,
    /// Waiters that were ahead of it when it joined, and those that had left before them.
    position: usize,
    state: PlaceState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlaceState {
    Queued,
    Released,
    Left,
}

/// The state of a place in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaceStatus {
    /// Released: it may draw.
    Released,
    /// Still queued.
    Queued {
        is_head: bool,
        /// The earliest time at which the head can be served, if known.
        head_ready_at: Option<Instant>,
    },
}

/// The queue a new caller finds and must not overtake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitersAhead {
    pub(crate) ahead: usize,
    pub(crate) ready_at: Option<Instant>,
}

impl Queues {
    /// Assigns the arrival number of a new caller.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether all queues are empty.
    #[inline]
    pub(crate) fn are_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// The waiters in a queue; `None` if it is empty.
    pub(crate) fn ahead(&self, key: &QueueKey) -> Option<WaitersAhead> {
        if self.are_empty() {
            return None;
        }
        let queues = self.by_key.lock();
        let queue = queues.get(key)?;
        let (_, head) = queue.waiting.first_key_value()?;
        Some(WaitersAhead { ahead: queue.waiting.len(), ready_at: head.ready_at })
    }

    /// Enters a queue in the order of `number`. `ready_at` is set if the caller was refused until then.
    pub(crate) fn enter(
        &self,
        key: QueueKey,
        number: u64,
        ready_at: Option<Instant>,
        deadline: Option<Instant>,
    ) -> Place<'_> {
        let wake = Arc::new(Notify::new());
        let mut place =
            Place { queues: self, key, number, wake, deadline, position: 0, state: PlaceState::Queued };
        place.put(ready_at, false);
        place
    }

    /// Wakes every waiter to re-check a condition that concerns all of them.
    pub(crate) fn wake(&self) {
        let queues = self.by_key.lock();
        let waiters = queues.values().flat_map(|queue| queue.waiting.values());
        let woken: Vec<_> = waiters.map(|waiter| Arc::clone(&waiter.wake)).collect();
        drop(queues);
        for wake in woken {
            wake.notify_one();
        }
    }
}

impl SubjectQueue {
    /// Releases as many waiters as the window allows, and notifies a new head.
    fn advance(&mut self, woken: &mut Vec<Arc<Notify>>) -> usize {
        let mut released = 0;
        while let Some(first) = self.waiting.first_entry() {
            if self.released < self.window && first.get().ready_at.is_none() {
                let number = *first.key();
                woken.extend(self.remove(number).map(|waiter| waiter.wake));
                self.released += 1;
                released += 1;
                continue;
            }
            if self.head != Some(*first.key()) {
                self.head = Some(*first.key());
                woken.push(Arc::clone(&first.get().wake));
            }
            break;
        }
        released
    }

    /// Clears the retry times of as many waiters as the window can release: they draw again.
    fn clear_retry_times(&mut self) {
        let space = self.window.saturating_sub(self.released);
        for waiter in self.waiting.values_mut().take(space) {
            waiter.ready_at = None;
        }
    }

    /// Queues a caller that was refused (`ready_at` is set), or that found waiters ahead of it.
    fn put(&mut self, number: u64, waiter: Waiter, woken: &mut Vec<Arc<Notify>>) {
        let ready_at = waiter.ready_at;
        if ready_at.is_some() {
            self.window = 1;
        }
        self.deadlines.extend(waiter.deadline.map(|end| (end, number)));
        self.waiting.insert(number, waiter);
        if let (true, Some(ready_at)) = (self.is_first(number), ready_at) {
            // Waiters whose deadline is before the head's time fail now.
            woken.extend(self.late(ready_at).map(|waiter| Arc::clone(&waiter.wake)));
        }
    }

    /// The waiters whose deadline is before `ready_at`, without visiting the others.
    fn late(&self, ready_at: Instant) -> impl Iterator<Item = &Waiter> {
        let late = self.deadlines.iter().take_while(move |(end, _)| *end < ready_at);
        late.filter_map(|(_, number)| self.waiting.get(number))
    }

    /// Removes a waiter. If it was the first, the others move up.
    fn remove(&mut self, number: u64) -> Option<Waiter> {
        self.left += usize::from(self.is_first(number));
        let waiter = self.waiting.remove(&number)?;
        if let Some(end) = waiter.deadline {
            self.deadlines.remove(&(end, number));
        }
        Some(waiter)
    }

    fn is_first(&self, number: u64) -> bool {
        self.waiting.first_key_value().is_some_and(|(first, _)| *first == number)
    }

    /// The waiters ahead of one that joined at `position`. Some that left before their turn are included.
    fn ahead_of(&self, position: usize) -> usize {
        position.saturating_sub(self.left).min(self.waiting.len().saturating_sub(1))
    }
}

impl Place<'_> {
    /// The current state of this place.
    pub(crate) fn status(&mut self) -> PlaceStatus {
        let queues = self.queues.by_key.lock();
        let queue = queues.get(&self.key);
        let Some(queue) = queue.filter(|queue| queue.waiting.contains_key(&self.number)) else {
            // Releasing a waiter removes it from the queue.
            self.state = PlaceState::Released;
            return PlaceStatus::Released;
        };
        let head = queue.waiting.first_key_value();
        PlaceStatus::Queued {
            is_head: head.is_some_and(|(number, _)| *number == self.number),
            head_ready_at: head.and_then(|(_, head)| head.ready_at),
        }
    }

    /// The waiters ahead of it, at most: some that left before their turn may be included.
    pub(crate) fn ahead(&self) -> usize {
        let queues = self.queues.by_key.lock();
        queues.get(&self.key).map_or(0, |queue| queue.ahead_of(self.position))
    }

    /// Completes when this waiter is released, becomes the head, or cannot be served before its deadline.
    pub(crate) fn notified(&self) -> Notified<'_> {
        self.wake.notified()
    }

    /// Makes this waiter due: its time has passed, or units were returned.
    pub(crate) fn make_due(&self) {
        self.change(|queue, _| {
            if let Some(waiter) = queue.waiting.get_mut(&self.number) {
                waiter.ready_at = None;
            }
        });
    }

    /// The draw was refused until `ready_at`: closes the window to the head alone until the next grant.
    pub(crate) fn refused(&mut self, ready_at: Instant) {
        self.state = PlaceState::Queued;
        self.put(Some(ready_at), true);
    }

    /// The draw was granted: widens the window, as more may be available.
    pub(crate) fn granted(mut self) {
        self.state = PlaceState::Left;
        self.change(|queue, _| {
            queue.released -= 1;
            queue.window = (queue.window + 1).min(WINDOW_MAX);
            queue.clear_retry_times();
        });
    }

    fn put(&mut self, ready_at: Option<Instant>, was_released: bool) {
        let waiter = Waiter { wake: Arc::clone(&self.wake), ready_at, deadline: self.deadline };
        self.queues.waiting.fetch_add(1, Ordering::AcqRel);
        let mut position = self.position;
        self.change(|queue, woken| {
            if was_released {
                // It is back at the place that it had left at the front.
                queue.released -= 1;
                queue.left -= 1;
            } else {
                position = queue.left + queue.waiting.len();
            }
            queue.put(self.number, waiter, woken);
        });
        self.position = position;
    }

    /// Changes the queue, then releases the waiters that the change allows.
    fn change(&self, change: impl FnOnce(&mut SubjectQueue, &mut Vec<Arc<Notify>>)) {
        let mut woken = Vec::new();
        let mut queues = self.queues.by_key.lock();
        let queue = queues
            .entry(self.key.clone())
            .or_insert_with(|| SubjectQueue { window: 1, ..SubjectQueue::default() });
        change(queue, &mut woken);
        let released = queue.advance(&mut woken);
        if queue.waiting.is_empty() && queue.released == 0 {
            queues.remove(&self.key);
        }
        drop(queues);
        self.queues.waiting.fetch_sub(released, Ordering::AcqRel);
        // Notified after unlocking: a waker may run user code.
        for wake in woken {
            wake.notify_one();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.state == PlaceState::Left {
            return;
        }
        let mut was_waiting = false;
        self.change(|queue, _| {
            let was_first = queue.waiting.first_key_value().is_none_or(|(first, _)| self.number <= *first);
            was_waiting = queue.remove(self.number).is_some();
            if !was_waiting {
                // It was released, whether or not it has observed that.
                queue.released -= 1;
            }
            if was_first {
                // The retry time was computed for its own cost: the next waiter draws for itself.
                queue.clear_retry_times();
            }
        });
        if was_waiting {
            self.queues.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WAITERS: usize = 10_000;

    fn key() -> QueueKey {
        QueueKey { throttle: 1, subject: Subject::new("acme", "gpt-4").expect("valid names") }
    }

    /// 10,000 waiters behind a head that was refused until `base + 1 s`; every hundredth has a deadline before
    /// `base + 1 min`.
    fn queued(queues: &Queues, base: Instant) -> Vec<Place<'_>> {
        let ready_at = base + Duration::from_secs(1);
        let enter = |index: usize| {
            let span = if index % 100 == 99 { 30 } else { 90 };
            let refused = (index == 0).then_some(ready_at);
            queues.enter(key(), queues.number(), refused, Some(base + Duration::from_secs(span)))
        };
        (0..WAITERS).map(enter).collect()
    }

    /// Regression: a refused head visited all waiters, under the lock of all subjects.
    #[test]
    fn refused_head_visits_only_late_waiters() {
        let (queues, base) = (Queues::default(), Instant::now());
        let _places = queued(&queues, base);
        let mut guard = queues.by_key.lock();
        let queue = guard.get_mut(&key()).expect("a queue");
        for (span, wanted) in [(1, 0), (31, WAITERS / 100), (91, WAITERS)] {
            let ready_at = base + Duration::from_secs(span);
            let visited = queue.deadlines.iter().take_while(|(end, _)| *end < ready_at).count();
            assert_eq!((visited, queue.late(ready_at).count()), (wanted, wanted), "in {span} s");
        }
    }

    /// Regression: each caller that timed out counted all waiters ahead of it.
    #[test]
    fn waiters_ahead_follow_from_positions() {
        let (queues, base) = (Queues::default(), Instant::now());
        let mut places = queued(&queues, base);
        let ahead = |places: &[Place<'_>]| places.iter().map(Place::ahead).collect::<Vec<_>>();
        assert_eq!(ahead(&places), (0..WAITERS).collect::<Vec<_>>());
        // The head is released, and refused again.
        places[0].make_due();
        assert_eq!((places[0].status(), places[WAITERS - 1].ahead()), (PlaceStatus::Released, WAITERS - 2));
        places[0].refused(base + Duration::from_secs(2));
        assert_eq!(ahead(&places), (0..WAITERS).collect::<Vec<_>>());
        // Callers that leave at the front or at the end are not counted, others may be.
        drop(places.drain(..10));
        places.truncate(100);
        assert_eq!((places[0].status(), places[1].ahead()), (PlaceStatus::Released, 0));
        places[0].refused(base + Duration::from_secs(2));
        assert_eq!(ahead(&places), (0..100).collect::<Vec<_>>());
        drop(places.drain(1..99));
        assert_eq!(ahead(&places), [0, 1]);
        drop(places);
        assert!(queues.are_empty() && queues.by_key.lock().is_empty());
    }
}
