//! Keys and their throttles: shards with a lock each, which is held for a lookup and no longer.
//!
//! A key is hashed once; some bits choose the shard and the others the place in its table. Whoever finds a key leaves
//! with a handle on its throttle, cloned under the shard's lock. So under that lock a throttle with one handle is held
//! by nobody but the table, and nobody can come to hold it: that is how the sweep in `evict.rs` knows what it may take
//! away, and why a key never has two states. Rules are asked for outside all locks.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::{FixedState, RandomState};
use hashbrown::HashTable;
use tidegate_core::random::Random;
use tidegate_core::time::Instant;

use super::events::KeyedSinks;
use super::evict::Look;
use super::limits::Limits;
use super::options::KeyedOptions;
use super::rules::{Rule, Rules};
use crate::clock::Clock;
use crate::meter::KeyedMeter;
use crate::planted::{Bug, is_planted};
use crate::state::State;
use crate::sync::{AtomicU32, AtomicUsize, Mutex, MutexGuard, RwLock};
use crate::throttle::{Inner, Setup};

/// Idle keys are looked for once in so many calls that find theirs in a shard, and once in every tick.
const SWEEP_EVERY: u32 = 256;

/// All keys of one kind.
pub(super) struct Registry<K> {
    pub(super) shards: Box<[Shard<K>]>,
    hasher: RandomState,
    pub(super) setup: Arc<Setup>,
    pub(super) sinks: Arc<KeyedSinks<K>>,
    pub(super) meter: KeyedMeter,
    pub(super) options: KeyedOptions,
    pub(super) rules: RwLock<Rules<K>>,
    /// Counts changes for all keys: an entry of an earlier one is stale.
    pub(super) epoch: AtomicU32,
    /// Counts all changes: a throttle never goes back to an earlier one.
    pub(super) version: AtomicU32,
    /// Counts changes of limits: what a hand has changed at one throttle stays until then.
    pub(super) plans: AtomicU32,
    /// Keys there are.
    pub(super) keys: AtomicUsize,
    /// Serves the keys for which there is no room.
    pub(super) overflow: Arc<Inner>,
    pub(super) gone: Gone,
    /// Held by whoever walks over all keys: one at a time.
    pub(super) walking: Mutex<()>,
    random: Random,
}

/// A part of the keys. Alone on its cache lines: neighbours are other threads' business.
#[repr(align(128))]
pub(super) struct Shard<K> {
    table: Mutex<Table<K>>,
}

pub(super) struct Table<K> {
    pub(super) entries: HashTable<Entry<K>>,
    /// Where the sweep goes on.
    pub(super) cursor: usize,
    pub(super) calls: u32,
    /// When a call to one of its keys last looked for idle keys, in ticks.
    swept: u32,
    /// How often entries have moved within the table, so that a walk in steps can tell.
    pub(super) moves: u32,
    /// What was admitted under keys that were forgotten.
    pub(super) left: Left,
}

/// Requests admitted under keys that a table has forgotten.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) admitted: u64,
    /// How far the walk that is under way has read.
    pub(super) walked: usize,
    /// Those of keys that it had read by then: they are counted already.
    pub(super) read: u64,
}

pub(super) struct Entry<K> {
    pub(super) key: K,
    // When it was last asked for, and which rules it follows, is with the throttle: an entry is two words for a key of
    // one, and a table of many stays near the processor.
    pub(super) throttle: Arc<Inner>,
}

/// What became of those who are no longer there.
#[derive(Debug, Default)]
pub(super) struct Gone {
    /// The shard where room is looked for next.
    pub(super) next_shard: AtomicUsize,
    /// The shard where idle keys are looked for next.
    next_idle: AtomicUsize,
    pub(super) idle: AtomicU64,
    pub(super) size: AtomicU64,
    /// Calls served by the shared entry.
    pub(super) overflowed: AtomicU64,
    /// When that was last told, in nanoseconds; never, if zero.
    pub(super) told: AtomicU64,
    /// Entries looked at by all sweeps.
    pub(super) examined: AtomicU64,
}

/// Time for the sweep: four bytes for a hundred years, in steps of a second or so.
#[expect(clippy::cast_possible_truncation, reason = "a clock that has run for over a century")]
const fn ticks(now: Instant) -> u32 {
    (now.as_nanos() >> 30) as u32
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Registry<K> {
    pub(super) fn new(
        by: Rule<K>,
        overflow: &Limits,
        options: KeyedOptions,
        setup: Arc<Setup>,
        sinks: Arc<KeyedSinks<K>>,
        meter: KeyedMeter,
        random: Random,
    ) -> Arc<Self> {
        let shard = |_| Shard {
            table: Mutex::new(Table {
                entries: HashTable::new(),
                cursor: 0,
                calls: 0,
                swept: 0,
                moves: 0,
                left: Left::default(),
            }),
        };
        let overflow = Inner::new(Arc::clone(&overflow.plan), Arc::clone(&setup), random.fork(0), 0);
        overflow.lock().gates.bypass(!options.enabled);
        // More shards than keys would be empty ones, and a call looks for room in a few only.
        let shards = options.shards.min(options.keys_max.next_power_of_two());
        let registry = Arc::new(Self {
            shards: (0..shards).map(shard).collect(),
            hasher: RandomState::default(),
            setup,
            sinks,
            meter,
            options,
            rules: RwLock::new(Rules::new(by, options.enabled)),
            epoch: AtomicU32::new(0),
            version: AtomicU32::new(0),
            plans: AtomicU32::new(0),
            keys: AtomicUsize::new(0),
            overflow,
            gone: Gone::default(),
            walking: Mutex::new(()),
            random,
        });
        registry.sinks.belongs_to(&registry);
        registry
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.setup.clock
    }

    /// The throttle of `key`, made if there is none.
    #[inline]
    pub(super) fn find<Q>(&self, key: &Q, now: Instant) -> Arc<Inner>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let hash = self.hasher.hash_one(key);
        let mut table = self.shards[self.shard_of(hash)].lock();
        // Under the lock: whoever changed the rules before walking over the shards is not missed.
        let epoch = self.epoch.load(Ordering::Acquire);
        let Some(entry) = table.entries.find(hash, |entry| entry.key.borrow() == key) else {
            drop(table);
            return self.create(key, hash, now);
        };
        // Before the handle is cloned: the two may be on different lines of memory, which then come together.
        let is_stale = entry.throttle.epoch() != epoch;
        let throttle = Arc::clone(&entry.throttle);
        table.calls = table.calls.wrapping_add(1);
        let tick = ticks(now);
        let is_due = table.swept != tick || table.calls.is_multiple_of(SWEEP_EVERY);
        table.swept = tick;
        drop(table);
        if is_stale || is_due {
            self.attend(key, &throttle, now, is_stale, is_due);
        }
        throttle
    }

    /// The throttle of `key`, if there is one, under the rules of now. Does not count as asking for it.
    pub(super) fn look_up<Q>(&self, key: &Q) -> Option<Arc<Inner>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let throttle = self.get(key)?;
        if throttle.epoch() != self.epoch.load(Ordering::Acquire)
            && let Some(key) = self.key_of(&throttle)
        {
            self.refresh(&key, &throttle);
        }
        Some(throttle)
    }

    /// The throttle of `key`, if there is one, whichever rules it follows.
    pub(super) fn get<Q>(&self, key: &Q) -> Option<Arc<Inner>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.hasher.hash_one(key);
        let table = self.shards[self.shard_of(hash)].lock();
        let entry = table.entries.find(hash, |entry| entry.key.borrow() == key)?;
        Some(Arc::clone(&entry.throttle))
    }

    /// The key of a throttle; `None` for the shared entry.
    pub(super) fn key_of(&self, throttle: &Arc<Inner>) -> Option<K> {
        let hash = throttle.number();
        let table = self.shards[self.shard_of(hash)].lock();
        let entry = table.entries.find(hash, |entry| Arc::ptr_eq(&entry.throttle, throttle))?;
        Some(entry.key.clone())
    }

    /// Throttles that somebody holds, of one shard after the other, with their keys.
    pub(super) fn held(&self) -> impl Iterator<Item = (K, Arc<Inner>)> + '_ {
        self.shards.iter().flat_map(|shard| {
            let table = shard.lock();
            let held = table.entries.iter().filter(|entry| Arc::strong_count(&entry.throttle) > 1);
            held.map(|entry| (entry.key.clone(), Arc::clone(&entry.throttle))).collect::<Vec<_>>()
        })
    }

    const fn shard_of(&self, hash: u64) -> usize {
        // Of all bits, since a fast hash may have spread the keys over some of them only; and of none that the table uses by
        // itself: it takes the lowest for the place and the highest for the tag.
        (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize & (self.shards.len() - 1)
    }

    pub(super) fn hash_of(&self, key: &K) -> u64 {
        self.hasher.hash_one(key)
    }

    #[cold]
    fn attend<Q>(&self, key: &Q, throttle: &Arc<Inner>, now: Instant, is_stale: bool, is_due: bool)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if is_stale {
            self.refresh(&key.to_owned(), throttle);
        }
        if is_due {
            // One shard after the other, and not its own: the keys of one that nobody asks for are idle all the same.
            let next = self.gone.next_idle.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            self.sweep_idle(next, now, &mut Look::new());
        }
    }

    #[cold]
    #[inline(never)]
    fn create<Q>(&self, key: &Q, hash: u64, now: Instant) -> Arc<Inner>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let key = key.to_owned();
        let (epoch, version) = (self.epoch.load(Ordering::Acquire), self.version.load(Ordering::Acquire));
        let plans = self.plans.load(Ordering::Acquire);
        let mut look = Look::new();
        if !self.make_room(now, &mut look) {
            return self.share(&key, now);
        }
        let (rule, orders) = self.rule_of(&key);
        // Somebody's code: no lock is held, and no place taken.
        let plan = rule.limits(&key).plan;
        let kept = key.clone();
        // By the key alone, and not by this registry's hashes: with the same seed a key has the same chance every time.
        let random = self.random.fork(FixedState::default().hash_one(&key));
        let throttle = Inner::new(plan, Arc::clone(&self.setup), random, hash);
        {
            let mut state = throttle.lock();
            (state.version, state.plans) = (version, plans);
            state.gates.bypass(!orders.is_enabled);
            throttle.follows(epoch);
        }
        let entry = Entry { key: kept, throttle: Arc::clone(&throttle) };
        let mut table = loop {
            let table = self.shards[self.shard_of(hash)].lock();
            if let Some(found) = table.entries.find(hash, |entry| entry.key == key)
                && !is_planted(Bug::InsertUnlooked)
            {
                let throttle = Arc::clone(&found.throttle);
                drop(table);
                return self.follow_up(&key, throttle);
            }
            // With the lock that the entry is put in under: whoever finds neither it nor a place is before it.
            if self.take_place() {
                break table;
            }
            drop(table);
            if !self.make_room(now, &mut look) {
                return self.share(&key, now);
            }
        };
        table.will_grow();
        table.entries.insert_unique(hash, entry, |entry| self.hasher.hash_one(&entry.key));
        let is_stale = self.epoch.load(Ordering::Acquire) != epoch && !is_planted(Bug::MissChange);
        drop(table);
        if is_stale
            || orders.is_closed
            || self.version.load(Ordering::Acquire) != version && !is_planted(Bug::MissChange)
        {
            self.refresh(&key, &throttle);
        }
        self.setup.sinks.guard(|| self.meter.added());
        self.sweep_idle(self.shard_of(hash), now, &mut look);
        throttle
    }

    /// There is no room: the shared entry serves, unless somebody made the key meanwhile. One that has an entry uses it.
    fn share(&self, key: &K, now: Instant) -> Arc<Inner> {
        match self.get(key).filter(|_| !is_planted(Bug::ShareUnlooked)) {
            Some(found) => self.follow_up(key, found),
            None => self.overflowed(now),
        }
    }

    /// A throttle that somebody else made meanwhile: the rules may have changed since then too.
    fn follow_up(&self, key: &K, throttle: Arc<Inner>) -> Arc<Inner> {
        if throttle.epoch() != self.epoch.load(Ordering::Acquire) && !is_planted(Bug::HandOutStale) {
            self.refresh(key, &throttle);
        }
        throttle
    }
}

impl<K> Drop for Registry<K> {
    fn drop(&mut self) {
        let keys = u32::try_from(*self.keys.get_mut()).unwrap_or(u32::MAX);
        self.setup.sinks.guard(|| self.meter.forgotten(keys));
    }
}

impl<K> Shard<K> {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Table<K>> {
        self.table.lock()
    }
}

impl<K> Table<K> {
    /// One more entry comes: where there is no room for it, all may move.
    fn will_grow(&mut self) {
        if self.entries.len() == self.entries.capacity() {
            self.moves = self.moves.wrapping_add(1);
        }
    }
}

impl Inner {
    /// Somebody asked for it.
    pub(super) fn touch(&self, now: Instant) {
        let mut state = self.lock();
        let State { plan, gates, .. } = &mut *state;
        gates.touch(plan, now);
    }
}
