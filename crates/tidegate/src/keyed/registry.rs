//! Keys and their throttles, in shards with a lock each, which is held only for a lookup.
//!
//! A key is hashed once; some bits choose the shard and the others the slot in its table. A lookup admits a call
//! by the key's rate, or clones a handle of its throttle, under the shard's lock. So under that lock, an entry
//! whose throttle has one handle is owned by the table alone and no new handle can be created: that is how the sweep in `evict.rs` knows what it may evict, and why a key never has two states. Limits are
//! computed outside all locks.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;
use tidegate_core::plan::Plan;
use tidegate_core::random::Random;
use tidegate_core::time::Instant;

use super::events::KeyedSinks;
use super::evict::SweepBudget;
use super::key_ref::{self, KeyRef, Throttles};
use super::limits::Limits;
use super::options::KeyedOptions;
use super::rules::{KeySettings, Rule, Rules};
use super::shard::{Entered, Entry, RateTerms, Shard, random_of};
use crate::clock::Clock;
use crate::fault_injection::{Bug, is_injected};
use crate::meter::KeyedMeter;
use crate::state::State;
use crate::sync::{AtomicU32, AtomicUsize, Mutex, RwLock};
use crate::throttle::{Inner, Setup};

/// Idle keys are swept once per this many lookups in a shard, and once per tick.
const SWEEP_EVERY: u32 = 256;

/// The registry of all keys.
pub(super) struct Registry<K> {
    /// Identifies it in permits.
    number: u64,
    pub(super) shards: Box<[Shard<K>]>,
    hasher: RandomState,
    pub(super) setup: Arc<Setup>,
    pub(super) sinks: Arc<KeyedSinks<K>>,
    pub(super) meter: KeyedMeter,
    pub(super) options: KeyedOptions,
    pub(super) rules: RwLock<Rules<K>>,
    /// Counts changes for all keys: an entry with an older count is stale.
    pub(super) epoch: AtomicU32,
    /// Counts all changes: a throttle never goes back to an older one.
    pub(super) version: AtomicU32,
    /// Counts changes of limits: a manual change to one throttle stays until the next one.
    pub(super) plans: AtomicU32,
    /// The number of keys.
    pub(super) keys: AtomicUsize,
    /// Serves new keys while the registry is full.
    pub(super) overflow: Arc<Inner>,
    pub(super) evictions: EvictionStats,
    /// The terms of the latest key with only a rate: usually the next key has the same.
    latest_terms: Mutex<Option<Arc<RateTerms>>>,
    /// Held while walking over all keys: one walk at a time.
    pub(super) walking: Mutex<()>,
    random: Random,
}

/// Eviction counters and cursors.
#[derive(Debug, Default)]
pub(super) struct EvictionStats {
    /// The shard to search next for space.
    pub(super) next_shard: AtomicUsize,
    /// The shard to sweep next for idle keys.
    next_idle: AtomicUsize,
    pub(super) idle: AtomicU64,
    pub(super) size: AtomicU64,
    /// Calls served by the overflow throttle.
    pub(super) overflowed: AtomicU64,
    /// When overflow was last reported, in nanoseconds; zero if never.
    pub(super) reported_at: AtomicU64,
    /// Entries examined by all sweeps.
    pub(super) examined: AtomicU64,
}

/// Coarse time for the sweep: 32 bits last a century, in ticks of about a second.
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
        let overflow = Inner::new(Arc::clone(&overflow.plan), Arc::clone(&setup), random.fork(0), 0);
        overflow.lock().gates.bypass(!options.enabled);
        // More shards than keys would stay empty, and a call searches only a few of them for space.
        let shards = options.shards.min(options.keys_max.next_power_of_two());
        let hasher = RandomState::default();
        let registry = key_ref::register(|number| Self {
            number,
            shards: (0..shards).map(|_| Shard::new()).collect(),
            hasher,
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
            evictions: EvictionStats::default(),
            latest_terms: Mutex::new(None),
            walking: Mutex::new(()),
            random,
        });
        registry.sinks.set_registry(&registry);
        registry
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.setup.clock
    }

    /// Enters a call under `key`, which is created if there is none. A rate alone admits only plain costs.
    #[inline]
    pub(super) fn enter<Q>(&self, key: &Q, is_plain: bool, now: Instant) -> Entered
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.find_or_create(key, is_plain, now)
    }

    /// The throttle of `key`, created if there is none.
    pub(super) fn find<Q>(&self, key: &Q, now: Instant) -> Arc<Inner>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        match self.find_or_create(key, false, now) {
            Entered::Throttle(throttle) => throttle,
            Entered::Admitted(..) => unreachable!("there is no call to admit"),
        }
    }

    #[inline]
    fn find_or_create<Q>(&self, key: &Q, is_plain: bool, now: Instant) -> Entered
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let hash = self.hasher.hash_one(key);
        let mut guard = self.shards[self.shard_of(hash)].lock();
        let table = &mut *guard;
        // Read under the lock, so that a change made before walking over the shards is not missed.
        let epoch = self.epoch.load(Ordering::Acquire);
        let mut is_stale = false;
        let is_key = |entry: &Entry<K>| {
            // With the comparison: the two may be on different cache lines, which are then fetched together.
            is_stale = entry.epoch() != epoch;
            entry.key.borrow() == key
        };
        let Some(place) = table.entries.find_bucket_index(hash, is_key) else {
            drop(guard);
            return self.create(key, hash, is_plain, now);
        };
        let entered = table.enter(place, self.key_ref(hash), is_plain && !is_stale, now);
        table.calls = table.calls.wrapping_add(1);
        let tick = ticks(now);
        let is_due = table.swept != tick || table.calls.is_multiple_of(SWEEP_EVERY);
        table.swept = tick;
        drop(guard);
        if is_stale || is_due {
            self.maintain(key, &entered, now, is_stale, is_due);
        }
        entered
    }

    /// The throttle of `key`, if there is one, with current limits. Does not count as use.
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

    /// The throttle of `key`, if there is one, even with stale limits.
    pub(super) fn get<Q>(&self, key: &Q) -> Option<Arc<Inner>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.hasher.hash_one(key);
        let mut table = self.shards[self.shard_of(hash)].lock();
        let entry = table.entries.find_mut(hash, |entry| entry.key.borrow() == key)?;
        Some(Arc::clone(entry.throttle(hash)))
    }

    /// The key of a throttle; `None` for the overflow throttle.
    pub(super) fn key_of(&self, throttle: &Arc<Inner>) -> Option<K> {
        let hash = throttle.number();
        let table = self.shards[self.shard_of(hash)].lock();
        let entry = table.entries.find(hash, |entry| entry.has(throttle))?;
        Some(entry.key.clone())
    }

    /// Throttles with handles outside the table, shard by shard, with their keys.
    pub(super) fn in_use(&self) -> impl Iterator<Item = (K, Arc<Inner>)> + '_ {
        self.shards.iter().flat_map(|shard| {
            let mut table = shard.lock();
            let in_use = table.entries.iter_mut().filter(|entry| entry.is_in_use());
            let with_key = |entry: &mut Entry<K>| {
                let hash = self.hasher.hash_one(&entry.key);
                (entry.key.clone(), Arc::clone(entry.throttle(hash)))
            };
            in_use.map(with_key).collect::<Vec<_>>()
        })
    }

    const fn shard_of(&self, hash: u64) -> usize {
        // Mixes all bits, as a fast hash may spread keys over only some of them, and selects none that the
        // table uses itself: it takes the lowest for the slot and the highest for the tag.
        (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize & (self.shards.len() - 1)
    }

    const fn key_ref(&self, hash: u64) -> KeyRef {
        KeyRef { registry: self.number, hash }
    }

    pub(super) fn hash_of(&self, key: &K) -> u64 {
        self.hasher.hash_one(key)
    }

    #[cold]
    fn maintain<Q>(&self, key: &Q, entered: &Entered, now: Instant, is_stale: bool, is_due: bool)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        if let (true, Entered::Throttle(throttle)) = (is_stale, entered) {
            self.refresh(&key.to_owned(), throttle);
        }
        if is_due {
            // Round-robin over the shards: a shard that is no longer used has idle keys too.
            let next = self.evictions.next_idle.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            self.sweep_idle(next, now, &mut SweepBudget::new());
        }
    }

    #[cold]
    #[inline(never)]
    fn create<Q>(&self, key: &Q, hash: u64, is_plain: bool, now: Instant) -> Entered
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let key = key.to_owned();
        let (epoch, version) = (self.epoch.load(Ordering::Acquire), self.version.load(Ordering::Acquire));
        let plans = self.plans.load(Ordering::Acquire);
        let mut budget = SweepBudget::new();
        if !self.make_space(now, &mut budget) {
            return Entered::Throttle(self.share(&key, now));
        }
        let (rule, settings) = self.rule_of(&key);
        // User code: no lock is held, and no place is reserved.
        let plan = rule.limits(&key).plan;
        let mut entry = self.new_entry(key.clone(), hash, plan, (epoch, version, plans), &settings, is_plain);
        let shard = &self.shards[self.shard_of(hash)];
        let mut guard = loop {
            let mut table = shard.lock();
            if let Some(found) = table.entries.find_mut(hash, |entry| entry.key == key)
                && !is_injected(Bug::InsertUnchecked)
            {
                let throttle = Arc::clone(found.throttle(hash));
                drop(table);
                return Entered::Throttle(self.refresh_found(&key, throttle));
            }
            // Under the lock that the entry is inserted under: a caller that finds neither the entry nor a
            // place came earlier.
            if self.reserve_place() {
                break table;
            }
            drop(table);
            if !self.make_space(now, &mut budget) {
                return Entered::Throttle(self.share(&key, now));
            }
        };
        let table = &mut *guard;
        let is_adopted = table.adopt(&mut entry, hash);
        table.will_grow();
        let inserted = table.entries.insert_unique(hash, entry, |entry| self.hasher.hash_one(&entry.key));
        let place = inserted.bucket_index();
        let entered = table.enter(place, self.key_ref(hash), is_plain, now);
        let is_stale = self.epoch.load(Ordering::Acquire) != epoch && !is_injected(Bug::MissLimitChange);
        drop(guard);
        if is_stale
            || is_adopted
            || settings.is_closed
            || self.version.load(Ordering::Acquire) != version && !is_injected(Bug::MissLimitChange)
        {
            let throttle = match &entered {
                Entered::Throttle(throttle) => Some(Arc::clone(throttle)),
                // Admitted before the change; it follows from now on.
                Entered::Admitted(..) => self.get::<K>(&key),
            };
            if let Some(throttle) = throttle {
                self.refresh(&key, &throttle);
            }
        }
        self.setup.sinks.guard(|| self.meter.added());
        self.sweep_idle(self.shard_of(hash), now, &mut budget);
        entered
    }

    /// The entry of a new key. For a plain call under only a rate it has no throttle; a measured registry counts every
    /// call by the throttles.
    fn new_entry(
        &self,
        key: K,
        hash: u64,
        plan: Arc<Plan>,
        (epoch, version, plans): (u32, u32, u32),
        settings: &KeySettings,
        is_plain: bool,
    ) -> Entry<K> {
        let is_measured = self.overflow.gauge_handle.is_measured();
        if is_plain && plan.is_rate_alone() && settings.is_enabled && !settings.is_closed && !is_measured {
            return Entry::with_rate(key, self.terms(plan, epoch, version, plans));
        }
        let random = random_of(self.random, &key);
        let throttle = Inner::new(plan, Arc::clone(&self.setup), random, hash);
        {
            let mut state = throttle.lock();
            (state.version, state.plans) = (version, plans);
            state.gates.bypass(!settings.is_enabled);
            throttle.follows(epoch);
        }
        Entry::with_throttle(key, throttle)
    }

    /// The terms of a new key, shared with the key before if they are the same.
    fn terms(&self, plan: Arc<Plan>, epoch: u32, version: u32, plans: u32) -> Arc<RateTerms> {
        let mut latest = self.latest_terms.lock();
        let is_same = |terms: &&Arc<RateTerms>| {
            Arc::ptr_eq(&terms.plan, &plan)
                && (terms.epoch, terms.version, terms.plans) == (epoch, version, plans)
        };
        if let Some(terms) = latest.as_ref().filter(is_same) {
            return Arc::clone(terms);
        }
        let (setup, random) = (Arc::clone(&self.setup), self.random);
        let terms = Arc::new(RateTerms { plan, setup, random, epoch, version, plans });
        let old = latest.replace(Arc::clone(&terms));
        drop(latest);
        drop(old);
        terms
    }

    /// The registry is full: returns the overflow throttle, unless another thread has created the key since.
    fn share(&self, key: &K, now: Instant) -> Arc<Inner> {
        match self.get(key).filter(|_| !is_injected(Bug::ShareUnchecked)) {
            Some(found) => self.refresh_found(key, found),
            None => self.overflowed(now),
        }
    }

    /// A throttle that another thread created concurrently: its limits may have changed since.
    fn refresh_found(&self, key: &K, throttle: Arc<Inner>) -> Arc<Inner> {
        if throttle.epoch() != self.epoch.load(Ordering::Acquire) && !is_injected(Bug::ReturnStale) {
            self.refresh(key, &throttle);
        }
        throttle
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Throttles for Registry<K> {
    fn throttle(&self, hash: u64) -> Arc<Inner> {
        self.shards[self.shard_of(hash)].throttle(hash, |key| self.hash_of(key))
    }
}

impl<K> Drop for Registry<K> {
    fn drop(&mut self) {
        key_ref::unregister(self.number);
        let keys = u32::try_from(*self.keys.get_mut()).unwrap_or(u32::MAX);
        self.setup.sinks.guard(|| self.meter.registry_dropped(keys));
    }
}

impl Inner {
    /// Records a use.
    pub(super) fn touch(&self, now: Instant) {
        let mut state = self.lock();
        let State { plan, gates, .. } = &mut *state;
        gates.touch(plan, now);
    }
}
