//! A shard of the keys: a table under a lock.
//!
//! Most keys of a large registry have only a rate, and most calls are admitted. The state of such a key is a few
//! words in its entry, so a decision touches the cache lines of one table slot. A key gets a throttle of its own
//! with the first call that needs more: a wait, a refusal, a handle, a pause, other limits.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashTable;
use tidegate_core::cost::Admission;
use tidegate_core::gate::RateState;
use tidegate_core::plan::{Draft, Plan};
use tidegate_core::random::Random;
use tidegate_core::time::Instant;

use super::key_ref::KeyRef;
use crate::sync::{Mutex, MutexGuard};
use crate::throttle::{Inner, Setup};

/// Throttles kept for evicted keys, in each shard; beyond them the oldest is dropped.
const ORPHANS_MAX: usize = 64;

/// A shard of the keys. Its lock and the fields of a lookup are on one cache line, which it shares with no other.
#[repr(align(64))]
pub(super) struct Shard<K> {
    table: Mutex<Table<K>>,
}

/// The entries of a shard. The fields of a lookup first.
#[repr(C)]
pub(super) struct Table<K> {
    pub(super) entries: HashTable<Entry<K>>,
    pub(super) calls: u32,
    /// The last tick in which a lookup in this shard triggered a sweep.
    pub(super) swept: u32,
    /// How often entries were moved within the table, which a walk in steps must detect.
    pub(super) moves: u32,
    /// Where the sweep continues.
    pub(super) cursor: usize,
    /// Admissions of evicted keys.
    pub(super) evicted: EvictedAdmissions,
    /// The terms of its latest key with only a rate.
    terms: Option<Arc<RateTerms>>,
    /// Throttles of keys that were evicted before an upstream's hint arrived, by hash: a returning key adopts its.
    orphans: VecDeque<Arc<Inner>>,
}

/// Requests admitted under keys that were evicted from a table.
#[derive(Debug, Default)]
pub(super) struct EvictedAdmissions {
    pub(super) admitted: u64,
    /// How far the current walk has read.
    pub(super) walked: usize,
    /// The admissions of keys that the walk had read before their eviction: they are already counted.
    pub(super) read: u64,
}

/// A key and its state.
pub(super) struct Entry<K> {
    pub(super) key: K,
    slot: Slot,
}

/// The state of a key. Last use and version are stored in it: an entry is small, which keeps large tables dense
/// in cache.
pub(super) enum Slot {
    /// Only its rate has limited it.
    Rate {
        terms: Arc<RateTerms>,
        state: RateState,
    },
    Throttle(Arc<Inner>),
}

/// What keys with the same rate share.
pub(super) struct RateTerms {
    pub(super) plan: Arc<Plan>,
    pub(super) setup: Arc<Setup>,
    /// The registry's.
    pub(super) random: Random,
    /// The versions of the registry's rules that the keys follow.
    pub(super) epoch: u32,
    pub(super) version: u32,
    pub(super) plans: u32,
}

/// The result of looking up a key for a call.
pub(super) enum Entered {
    /// Its rate admitted the call.
    Admitted(KeyRef, Admission),
    /// Its throttle decides.
    Throttle(Arc<Inner>),
}

impl<K> Shard<K> {
    pub(super) fn new() -> Self {
        let table = Table {
            entries: HashTable::new(),
            cursor: 0,
            calls: 0,
            swept: 0,
            moves: 0,
            evicted: EvictedAdmissions::default(),
            terms: None,
            orphans: VecDeque::new(),
        };
        Self { table: Mutex::new(table) }
    }

    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Table<K>> {
        self.table.lock()
    }

    /// The throttle of the key that a permit refers to, which is created if there is none. If the key was evicted, it
    /// waits for the key's return.
    pub(super) fn throttle(&self, hash: u64, hash_of: impl Fn(&K) -> u64) -> Arc<Inner>
    where
        K: Hash,
    {
        let mut table = self.lock();
        // The key itself is not known here; two keys of one table nearly never have the same 64 bits.
        if let Some(entry) = table.entries.find_mut(hash, |entry| hash_of(&entry.key) == hash) {
            return Arc::clone(entry.throttle(hash));
        }
        if let Some(orphan) = table.orphans.iter().find(|orphan| orphan.number() == hash) {
            return Arc::clone(orphan);
        }
        let Some(terms) = &table.terms else { unreachable!("a permit came from a key with terms") };
        let orphan = terms.orphan(hash);
        let dropped = if table.orphans.len() < ORPHANS_MAX { None } else { table.orphans.pop_front() };
        table.orphans.push_back(Arc::clone(&orphan));
        drop(table);
        drop(dropped);
        orphan
    }
}

impl<K: Hash> Table<K> {
    /// Admits a call of a plain cost by the rate in the entry at `place`, or returns its throttle, which is created if it has
    /// none.
    #[inline]
    pub(super) fn enter(&mut self, place: usize, key: KeyRef, is_plain: bool, now: Instant) -> Entered {
        let Some(entry) = self.entries.get_bucket_mut(place) else { unreachable!("it was found") };
        if let (Slot::Rate { terms, state }, true) = (&mut entry.slot, is_plain)
            && let Some(admission) = state.admit(&terms.plan, now)
        {
            return Entered::Admitted(key, admission);
        }
        Entered::Throttle(Arc::clone(entry.throttle(key.hash)))
    }
}

impl<K> Table<K> {
    /// Before `entry` is inserted; returns whether it adopts a throttle, which may follow other limits.
    pub(super) fn adopt(&mut self, entry: &mut Entry<K>, hash: u64) -> bool {
        if let Slot::Rate { terms, .. } = &entry.slot {
            self.terms = Some(Arc::clone(terms));
        }
        let Some(index) = self.orphans.iter().position(|orphan| orphan.number() == hash) else {
            return false;
        };
        let orphan = self.orphans.remove(index);
        let is_adopted = orphan.is_some();
        entry.slot = orphan.map_or_else(|| unreachable!("it was found"), Slot::Throttle);
        is_adopted
    }

    /// Before an insert: without spare capacity all entries may move.
    pub(super) fn will_grow(&mut self) {
        if self.entries.len() == self.entries.capacity() {
            self.moves = self.moves.wrapping_add(1);
        }
    }
}

impl EvictedAdmissions {
    /// Counts an evicted key.
    pub(super) const fn add(&mut self, place: usize, admitted: u64) {
        self.admitted += admitted;
        if place < self.walked {
            self.read += admitted;
        }
    }
}

impl<K> Entry<K> {
    pub(super) const fn with_throttle(key: K, throttle: Arc<Inner>) -> Self {
        Self { key, slot: Slot::Throttle(throttle) }
    }

    pub(super) const fn with_rate(key: K, terms: Arc<RateTerms>) -> Self {
        Self { key, slot: Slot::Rate { terms, state: RateState::full() } }
    }

    pub(super) const fn slot(&self) -> &Slot {
        &self.slot
    }

    /// The version of the registry's rules it follows.
    #[inline]
    pub(super) fn epoch(&self) -> u32 {
        match &self.slot {
            Slot::Rate { terms, .. } => terms.epoch,
            Slot::Throttle(throttle) => throttle.epoch(),
        }
    }

    /// Whether it has this throttle.
    pub(super) fn has(&self, wanted: &Arc<Inner>) -> bool {
        matches!(&self.slot, Slot::Throttle(throttle) if Arc::ptr_eq(throttle, wanted))
    }

    /// Whether a handle to its throttle exists.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(&self.slot, Slot::Throttle(throttle) if Arc::strong_count(throttle) > 1)
    }

    /// Requests admitted since its creation.
    pub(super) fn admitted(&self) -> u64 {
        match &self.slot {
            Slot::Rate { state, .. } => state.admitted(),
            Slot::Throttle(throttle) => throttle.lock().gates.admitted(),
        }
    }
}

impl<K: Hash> Entry<K> {
    /// Its throttle, which continues from the state of its rate if it had none.
    pub(super) fn throttle(&mut self, hash: u64) -> &Arc<Inner> {
        if let Slot::Rate { terms, state } = &self.slot {
            self.slot = Slot::Throttle(terms.throttle(&self.key, state, hash));
        }
        let Slot::Throttle(throttle) = &self.slot else { unreachable!("it was just created") };
        throttle
    }
}

impl RateTerms {
    #[cold]
    #[inline(never)]
    fn throttle<K: Hash>(&self, key: &K, state: &RateState, hash: u64) -> Arc<Inner> {
        let gates = state.gates(&self.plan, random_of(self.random, key));
        let throttle = Inner::with_gates(Arc::clone(&self.plan), gates, Arc::clone(&self.setup), hash);
        let mut all = throttle.lock();
        (all.version, all.plans) = (self.version, self.plans);
        throttle.follows(self.epoch);
        drop(all);
        throttle
    }

    /// The throttle of an evicted key, whose limits are not known until it returns. Only its pauses are as here.
    fn orphan(&self, hash: u64) -> Arc<Inner> {
        let draft = Draft { pause: self.plan.draft().pause, ..Draft::default() };
        let plan = draft.check().map_or_else(|_| Arc::clone(&self.plan), Arc::new);
        let throttle = Inner::new(plan, Arc::clone(&self.setup), self.random.fork(hash), hash);
        // No counts of changes that a registry has: the key's own limits come before it admits.
        throttle.lock().plans = self.plans.wrapping_sub(1);
        throttle.follows(self.epoch.wrapping_sub(1));
        throttle
    }
}

/// The randomness of a key. From the key alone, not from the table's hash: with the same seed a key gets the same
/// stream every time.
pub(super) fn random_of<K: Hash>(random: Random, key: &K) -> Random {
    random.fork(FixedState::default().hash_one(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Large tables are dense: a rate and its key are less than a cache line.
    #[test]
    fn entry_of_a_word_has_six_words() {
        assert_eq!(size_of::<Entry<u64>>(), 48);
    }
}
