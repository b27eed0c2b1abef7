//! A snapshot of all keys: totals, and the busiest keys in detail.
//!
//! Each key is read once, under its own lock, so totals and list agree. A shard is walked in steps, so that
//! concurrent calls do not wait for the whole walk.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::hash::Hash;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::snapshot::{CircuitState, Snapshot};
use tidegate_core::time::Instant;

use super::Keyed;
use super::registry::Registry;
use super::shard::{Slot, Table, random_of};
use crate::state::State;
use crate::wait_counters::WaitCounters;

/// Table slots read per lock acquisition.
const STEP: usize = 256;

/// A snapshot of all keys: counts since creation, current counts, and the busiest keys in detail.
///
/// Keys are read one after the other, each once, so the current counts and the list agree.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyedSnapshot<K> {
    /// When it was taken, by the registry's clock.
    pub at: Instant,
    /// Whether the limits apply.
    pub is_enabled: bool,
    /// Keys with a throttle of their own.
    pub keys: usize,
    /// Requests since creation, admitted and refused.
    pub total: u64,
    /// Requests admitted since creation, including evicted keys and the overflow throttle.
    pub admitted: u64,
    /// Requests that waited longer than [`throttled_after`](crate::KeyedBuilder::throttled_after), admitted
    /// or not.
    pub throttled: u64,
    /// Requests refused, at once or after a wait.
    pub refused: u64,
    /// Attempts of [`run`](crate::Keyed::run) after the first.
    pub retries: u64,
    /// The total waiting time.
    pub waited: Duration,
    /// Keys whose circuit is open now.
    pub open: u64,
    /// Keys whose circuit is half-open now.
    pub half_open: u64,
    /// Keys that are paused now.
    pub paused: u64,
    /// Callers waiting now.
    pub waiting: u64,
    /// Requests in flight now. Not counted under limits with only pace and rate.
    pub in_flight: u64,
    /// Keys evicted because they were idle.
    pub evicted_idle: u64,
    /// Keys evicted to make space.
    pub evicted_size: u64,
    /// Calls served by the overflow throttle because the registry was full.
    pub overflowed: u64,
    /// Panics of listeners.
    pub listener_panics: u64,
    /// Events lost to a slow listener.
    pub events_lost: u64,
    /// The keys with the most requests admitted, the busiest first; as many as requested.
    pub top: Vec<KeyView<K>>,
}

/// One key at one moment.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KeyView<K> {
    /// The key.
    pub key: K,
    /// The snapshot of its throttle: rate and level, latency, error rate, outcomes, circuit, and more.
    pub throttle: Snapshot,
}

impl<K> KeyView<K> {
    /// The time until one more request could be admitted, behind the waiters; `None` if time does not decide:
    /// it waits for a return, or the key is closed.
    pub fn next_entry(&self) -> Option<Duration> {
        self.throttle.next_entry.map(|at| at.since(self.throttle.at))
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// A snapshot of all keys, with the `top` busiest in detail. It walks over all keys, in steps that let
    /// concurrent calls proceed.
    pub fn snapshot(&self, top: usize) -> KeyedSnapshot<K> {
        self.registry.snapshot(top)
    }

    /// A snapshot every `span`, starting after one `span`; zero counts as a millisecond.
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

/// Periodic snapshots. Created by [`Keyed::snapshots`].
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
    /// Waits for the next snapshot. A late reader gets one at once and misses those in between.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call waits for the same time.
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

/// The totals of a walk.
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
    /// A min-heap: the least busy of the busiest is replaced first.
    busiest: BinaryHeap<Reverse<ByAdmissions<K>>>,
    /// Replaced entries. Keys are user types: they are dropped without a lock.
    replaced: Vec<ByAdmissions<K>>,
}

/// A key ordered by its admissions.
#[derive(Debug)]
struct ByAdmissions<K>(KeyView<K>);

impl<K> ByAdmissions<K> {
    const fn admitted(&self) -> u64 {
        self.0.throttle.admitted
    }
}

impl<K> PartialEq for ByAdmissions<K> {
    fn eq(&self, other: &Self) -> bool {
        self.admitted() == other.admitted()
    }
}

impl<K> Eq for ByAdmissions<K> {}

impl<K> PartialOrd for ByAdmissions<K> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> Ord for ByAdmissions<K> {
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
        let counts = self.setup.counters.as_ref().map(WaitCounters::counts).unwrap_or_default();
        let mut busiest: Vec<KeyView<K>> =
            all.busiest.into_iter().map(|Reverse(ByAdmissions(view))| view).collect();
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
            evicted_idle: self.evictions.idle.load(Ordering::Relaxed),
            evicted_size: self.evictions.size.load(Ordering::Relaxed),
            overflowed: self.evictions.overflowed.load(Ordering::Relaxed),
            listener_panics: self.sinks.panics() + self.setup.sinks.panics(),
            events_lost: self.sinks.lost() + self.setup.events_lost(),
            top: busiest,
        }
    }

    /// Reads a shard in steps; if its entries moved in between, reads it again at once.
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
                table.evicted.read = 0;
                walk.read(&table, 0, usize::MAX, at);
            } else {
                walk.read(&table, place, STEP, at);
                place += STEP;
            }
            if has_moved || place >= table.entries.num_buckets() {
                // Keys evicted in between are counted once: where they were read, or here.
                walk.admitted += table.evicted.admitted - std::mem::take(&mut table.evicted.read);
                table.evicted.walked = 0;
                drop(table);
                drop(before);
                walk.replaced.clear();
                return walk;
            }
            table.evicted.walked = place;
            drop(table);
            walk.replaced.clear();
        }
    }
}

impl<K: Hash + Clone> Walk<K> {
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

    /// Reads `places` table slots from `place` on.
    fn read(&mut self, table: &Table<K>, place: usize, places: usize, at: Instant) {
        let end = place.saturating_add(places).min(table.entries.num_buckets());
        for place in place..end {
            let Some(entry) = table.entries.get_bucket(place) else { continue };
            self.keys += 1;
            let throttle = match entry.slot() {
                Slot::Rate { terms, state } => {
                    self.admitted += state.admitted();
                    self.wants(state.admitted()).then(|| {
                        let gates = state.gates(&terms.plan, random_of(terms.random, &entry.key));
                        gates.snapshot(&terms.plan, 0, at)
                    })
                }
                Slot::Throttle(throttle) => self.add_throttle(&throttle.lock(), at),
            };
            if let Some(throttle) = throttle {
                self.put(ByAdmissions(KeyView { key: entry.key.clone(), throttle }));
            }
        }
    }

    /// Counts a throttle, and returns its snapshot if it is one of the busiest so far.
    fn add_throttle(&mut self, state: &State, at: Instant) -> Option<Snapshot> {
        let (gates, plan) = (&state.gates, &state.plan);
        self.admitted += gates.admitted();
        self.waiting += u64::from(state.waiting());
        self.in_flight += u64::from(gates.in_flight());
        match gates.circuit_state(at) {
            Some(CircuitState::Open) => self.open += 1,
            Some(CircuitState::HalfOpen) => self.half_open += 1,
            Some(CircuitState::Closed) | None => {}
        }
        self.paused += u64::from(gates.is_paused(plan, at));
        self.wants(gates.admitted()).then(|| gates.snapshot(plan, state.waiting(), at))
    }

    fn wants(&self, admitted: u64) -> bool {
        let least = self.busiest.peek().map_or(0, |Reverse(least)| least.admitted());
        self.busiest.len() < self.top || (self.top > 0 && admitted > least)
    }

    fn put(&mut self, entry: ByAdmissions<K>) {
        if self.busiest.len() >= self.top {
            self.replaced.extend(self.busiest.pop().map(|Reverse(entry)| entry));
        }
        self.busiest.push(Reverse(entry));
    }

    fn add(&mut self, other: Self) {
        self.keys += other.keys;
        self.admitted += other.admitted;
        self.open += other.open;
        self.half_open += other.half_open;
        self.paused += other.paused;
        self.waiting += other.waiting;
        self.in_flight += other.in_flight;
        for Reverse(entry) in other.busiest {
            if self.wants(entry.admitted()) {
                self.put(entry);
            }
        }
    }
}
