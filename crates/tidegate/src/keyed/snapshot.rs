//! All keys as seen at one moment: counts over all of them, and the busiest ones whole.
//!
//! Each key is read once, under its own lock, so the counts and the list agree. A shard is walked in steps, so that
//! nobody who calls meanwhile waits for all of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::hash::Hash;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::snapshot::{CircuitState, Snapshot};
use tidegate_core::time::Instant;

use super::Keyed;
use super::registry::{Registry, Table};
use crate::tally::Tally;

/// Places of a table that are read under one lock.
const STEP: usize = 256;

/// All keys at one moment: counts since the beginning, counts of now, and the busiest keys whole.
///
/// Keys are read one after the other, each once, so the counts of now and the list agree.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyedSnapshot<K> {
    /// When it was taken, by the clock of the keys.
    pub at: Instant,
    /// Whether the limits count.
    pub is_enabled: bool,
    /// Keys with a throttle of their own.
    pub keys: usize,
    /// Requests since the beginning: those admitted and those refused.
    pub total: u64,
    /// Requests admitted since the beginning, also under keys that were forgotten, and by the overflow entry.
    pub admitted: u64,
    /// Requests that waited longer than [`throttled_after`](crate::KeyedBuilder::throttled_after), admitted in the end or not.
    pub throttled: u64,
    /// Requests refused, at once or after a wait.
    pub refused: u64,
    /// Attempts of [`run`](crate::Keyed::run) after the first.
    pub retries: u64,
    /// The time that all together have waited.
    pub waited: Duration,
    /// Keys whose circuit is open now.
    pub open: u64,
    /// Keys whose circuit is half-open now.
    pub half_open: u64,
    /// Keys that are paused now.
    pub paused: u64,
    /// Callers waiting now.
    pub waiting: u64,
    /// Requests in flight now. Not counted under limits of nothing but pace and rate.
    pub in_flight: u64,
    /// Keys forgotten because nobody asked for them.
    pub evicted_idle: u64,
    /// Keys forgotten to make room.
    pub evicted_size: u64,
    /// Calls that were served by the shared entry for want of room.
    pub overflowed: u64,
    /// Panics of listeners.
    pub listener_panics: u64,
    /// Events lost to a listener that was too slow.
    pub events_lost: u64,
    /// The keys with the most requests admitted, the busiest first; as many as were asked for.
    pub top: Vec<KeyView<K>>,
}

/// One key at one moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyView<K> {
    /// The key.
    pub key: K,
    /// Everything there is to see of its throttle: rate and level, latency, error rate, outcomes, circuit, and more.
    pub throttle: Snapshot,
}

impl<K> KeyView<K> {
    /// The time until one more request could enter, behind those who wait; `None` where no time can be told: it waits for a
    /// return, or the key is closed.
    pub fn next_entry(&self) -> Option<Duration> {
        self.throttle.next_entry.map(|at| at.since(self.throttle.at))
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// All keys at this moment, with the `top` busiest of them whole. It walks over all keys, in steps between which
    /// others get their turn.
    pub fn snapshot(&self, top: usize) -> KeyedSnapshot<K> {
        self.registry.snapshot(top)
    }

    /// A snapshot at every `span`, from one span on; a span of zero counts as a millisecond.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::Keyed;
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let hosts = Keyed::hosts().build()?;
    /// let mut snapshots = hosts.snapshots(Duration::from_secs(10), 20);
    /// let seen = snapshots.next().await;
    /// println!("{} hosts, {} open, {} requests", seen.keys, seen.open, seen.total);
    /// # Ok(())
    /// # }
    /// ```
    pub fn snapshots(&self, span: Duration, top: usize) -> Snapshots<K> {
        let span = span.max(Duration::from_millis(1));
        let next = self.registry.clock().now() + span;
        Snapshots { keyed: self.clone(), span, top, next }
    }
}

/// Snapshots at a steady pace; made by [`Keyed::snapshots`].
pub struct Snapshots<K> {
    keyed: Keyed<K>,
    span: Duration,
    top: usize,
    next: Instant,
}

impl<K> fmt::Debug for Snapshots<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshots").field("span", &self.span).field("top", &self.top).finish_non_exhaustive()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Snapshots<K> {
    /// Waits for the next one. A reader that comes late gets one at once and misses those in between.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call waits for the same moment.
    pub async fn next(&mut self) -> KeyedSnapshot<K> {
        let clock = self.keyed.registry.clock();
        if clock.now() < self.next {
            clock.sleep_until(self.next).await;
        }
        let now = self.keyed.registry.clock().now();
        let late = now.nanos_since(self.next);
        let span = u64::try_from(self.span.as_nanos()).unwrap_or(u64::MAX);
        self.next = self.next.plus_nanos(span.saturating_mul(late / span + 1));
        self.keyed.snapshot(self.top)
    }
}

/// What is counted while walking.
#[derive(Debug)]
struct Walk<K> {
    top: usize,
    keys: usize,
    admitted: u64,
    open: u64,
    half_open: u64,
    paused: u64,
    waiting: u64,
    in_flight: u64,
    /// The least busy of the busiest on top, to be replaced.
    busiest: BinaryHeap<Reverse<Busy<K>>>,
    /// Those who were replaced. Keys are somebody's: they are dropped without a lock.
    replaced: Vec<Busy<K>>,
}

/// A key by what was admitted under it.
#[derive(Debug)]
struct Busy<K>(KeyView<K>);

impl<K> Busy<K> {
    const fn admitted(&self) -> u64 {
        self.0.throttle.admitted
    }
}

impl<K> PartialEq for Busy<K> {
    fn eq(&self, other: &Self) -> bool {
        self.admitted() == other.admitted()
    }
}

impl<K> Eq for Busy<K> {}

impl<K> PartialOrd for Busy<K> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> Ord for Busy<K> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.admitted().cmp(&other.admitted())
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registry<K> {
    fn snapshot(&self, top: usize) -> KeyedSnapshot<K> {
        let at = self.clock().now();
        let mut all = Walk::new(top);
        let walking = self.walking.lock();
        for shard in 0..self.shards.len() {
            all.add(self.walk(shard, top, at));
        }
        drop(walking);
        let overflow = self.overflow.lock();
        let admitted = all.admitted + overflow.gates.admitted();
        let waiting = all.waiting + u64::from(overflow.waiting());
        let in_flight = all.in_flight + u64::from(overflow.gates.in_flight());
        drop(overflow);
        let counts = self.setup.tally.as_ref().map(Tally::counts).unwrap_or_default();
        let mut busiest: Vec<KeyView<K>> = all.busiest.into_iter().map(|Reverse(Busy(view))| view).collect();
        busiest.sort_by_key(|view| Reverse(view.throttle.admitted));
        KeyedSnapshot {
            at,
            is_enabled: self.is_enabled(),
            keys: all.keys,
            total: admitted + counts.refused,
            admitted,
            throttled: counts.throttled,
            refused: counts.refused,
            retries: counts.retries,
            waited: counts.waited,
            open: all.open,
            half_open: all.half_open,
            paused: all.paused,
            waiting,
            in_flight,
            evicted_idle: self.gone.idle.load(Ordering::Relaxed),
            evicted_size: self.gone.size.load(Ordering::Relaxed),
            overflowed: self.gone.overflowed.load(Ordering::Relaxed),
            listener_panics: self.sinks.panics() + self.setup.sinks.panics(),
            events_lost: self.sinks.lost() + self.setup.events_lost(),
            top: busiest,
        }
    }

    /// Reads a shard in steps; where its entries moved in between, anew and at once.
    fn walk(&self, shard: usize, top: usize, at: Instant) -> Walk<K> {
        let mut walk = Walk::new(top);
        let mut place = 0;
        let mut moves = None;
        loop {
            let mut table = self.shards[shard].lock();
            let has_moved = *moves.get_or_insert(table.moves) != table.moves;
            let mut before = None;
            if has_moved {
                before = Some(std::mem::replace(&mut walk, Walk::new(top)));
                table.left.read = 0;
                walk.read(&table, 0, usize::MAX, at);
            } else {
                walk.read(&table, place, STEP, at);
                place += STEP;
            }
            if has_moved || place >= table.entries.num_buckets() {
                // Those who left in between are counted once: where they were read, or here.
                walk.admitted += table.left.admitted - std::mem::take(&mut table.left.read);
                table.left.walked = 0;
                drop(table);
                drop(before);
                walk.replaced.clear();
                return walk;
            }
            table.left.walked = place;
            drop(table);
            walk.replaced.clear();
        }
    }
}

impl<K: Clone> Walk<K> {
    fn new(top: usize) -> Self {
        Self {
            top,
            keys: 0,
            admitted: 0,
            open: 0,
            half_open: 0,
            paused: 0,
            waiting: 0,
            in_flight: 0,
            busiest: BinaryHeap::new(),
            replaced: Vec::new(),
        }
    }

    /// Reads the entries at so many places from `place` on.
    fn read(&mut self, table: &Table<K>, place: usize, places: usize, at: Instant) {
        let end = place.saturating_add(places).min(table.entries.num_buckets());
        for place in place..end {
            let Some(entry) = table.entries.get_bucket(place) else { continue };
            let state = entry.throttle.lock();
            let (gates, plan) = (&state.gates, &state.plan);
            self.keys += 1;
            self.admitted += gates.admitted();
            self.waiting += u64::from(state.waiting());
            self.in_flight += u64::from(gates.in_flight());
            match gates.circuit_state(at) {
                Some(CircuitState::Open) => self.open += 1,
                Some(CircuitState::HalfOpen) => self.half_open += 1,
                Some(CircuitState::Closed) | None => {}
            }
            self.paused += u64::from(gates.is_paused(plan, at));
            if self.wants(gates.admitted()) {
                let throttle = gates.snapshot(plan, state.waiting(), at);
                drop(state);
                self.put(Busy(KeyView { key: entry.key.clone(), throttle }));
            }
        }
    }

    fn wants(&self, admitted: u64) -> bool {
        let least = self.busiest.peek().map_or(0, |Reverse(least)| least.admitted());
        self.busiest.len() < self.top || (self.top > 0 && admitted > least)
    }

    fn put(&mut self, busy: Busy<K>) {
        if self.busiest.len() >= self.top {
            self.replaced.extend(self.busiest.pop().map(|Reverse(busy)| busy));
        }
        self.busiest.push(Reverse(busy));
    }

    fn add(&mut self, other: Self) {
        self.keys += other.keys;
        self.admitted += other.admitted;
        self.open += other.open;
        self.half_open += other.half_open;
        self.paused += other.paused;
        self.waiting += other.waiting;
        self.in_flight += other.in_flight;
        for Reverse(busy) in other.busiest {
            if self.wants(busy.admitted()) {
                self.put(busy);
            }
        }
    }
}
