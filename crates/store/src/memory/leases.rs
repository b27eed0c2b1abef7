//! Leases: the open ones, and what is remembered of those that have ended.
//!
//! A lease is kept on the shelf of its own subject's bucket, so that one lock covers both. Ended leases are
//! remembered in two generations: when the young one is full, or as old as they are to be remembered, it becomes the
//! old one, and the old one is forgotten as a whole.

use std::collections::BTreeSet;
use std::mem;
use std::sync::Arc;

use hashbrown::HashTable;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, REMEMBERED, Record};
use tidegate_core::time::Stamp;

use super::SHARDS;
use super::shelves::Places;
use crate::error::StoreError;

/// Ended leases that one generation of a shard remembers: 65,536 in all, and as many in the other.
const GENERATION_MAX: usize = (1 << 16) / SHARDS;
/// Keeps the set of deadlines from being empty: its one node would be freed and made again with every lease.
const NEVER_DUE: (Stamp, LeaseId) = (Stamp::MAX, LeaseId::from_number(u128::MAX));

/// A shard of the leases.
pub(super) struct Leases {
    hasher: foldhash::fast::RandomState,
    open: HashTable<Open>,
    /// The open ones by deadline.
    due: BTreeSet<(Stamp, LeaseId)>,
    young: Generation,
    old: Generation,
    /// Ids made no later than this may have been forgotten before their time: an unknown one does not draw.
    horizon: u64,
}

/// Leases that ended at about the same time.
#[derive(Default)]
struct Generation {
    ended: HashTable<(LeaseId, Ended)>,
    /// When the first and the last of them ended.
    since: Stamp,
    until: Stamp,
    /// The newest id among them, by its maker's clock.
    newest: u64,
}

/// An open lease, and where its buckets are.
pub(super) struct Open {
    pub(super) lease: LeaseId,
    pub(super) record: Record,
    pub(super) levels: Arc<Levels>,
    pub(super) places: Places,
}

/// What is known of a lease.
pub(super) enum Known<'a> {
    Open(&'a Open),
    Ended(Ended),
    Unknown,
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            hasher: foldhash::fast::RandomState::default(),
            open: HashTable::new(),
            due: [NEVER_DUE].into(),
            young: Generation::default(),
            old: Generation::default(),
            horizon: 0,
        }
    }
}

impl Leases {
    pub(super) fn find(&self, lease: LeaseId) -> Known<'_> {
        let hash = self.hash(lease);
        if let Some(open) = self.open.find(hash, |open| open.lease == lease) {
            return Known::Open(open);
        }
        let ended = self.young.find(hash, lease).or_else(|| self.old.find(hash, lease));
        ended.map_or(Known::Unknown, Known::Ended)
    }

    /// The open lease, or why there is none.
    pub(super) fn open(&self, lease: LeaseId) -> Result<&Open, StoreError> {
        match self.find(lease) {
            Known::Open(open) => Ok(open),
            Known::Ended(ended) => Err(StoreError::Ended { lease, how: ended.how }),
            Known::Unknown => Err(StoreError::NoLease { lease }),
        }
    }

    /// Whether an unknown lease may draw: one that may have ended and been forgotten may not.
    pub(super) const fn may_draw(&self, lease: LeaseId) -> Result<(), StoreError> {
        if self.horizon == 0 || lease.millis() > self.horizon {
            return Ok(());
        }
        Err(StoreError::Ended { lease, how: Ending::Expired })
    }

    pub(super) fn insert(&mut self, open: Open) {
        let hasher = &self.hasher;
        self.due.insert((open.record.deadline(), open.lease));
        self.open.insert_unique(hash_of(hasher, open.lease), open, |open| hash_of(hasher, open.lease));
    }

    /// Changes the record of an open lease.
    pub(super) fn change<T>(&mut self, lease: LeaseId, change: impl FnOnce(&mut Record) -> T) -> Option<T> {
        let hash = self.hash(lease);
        self.open.find_mut(hash, |open| open.lease == lease).map(|open| change(&mut open.record))
    }

    /// Takes out a lease that is open.
    pub(super) fn take(&mut self, lease: LeaseId) -> Option<Open> {
        let hash = self.hash(lease);
        let (open, _) = self.open.find_entry(hash, |open| open.lease == lease).ok()?.remove();
        self.due.remove(&(open.record.deadline(), lease));
        Some(open)
    }

    /// Remembers that a lease has ended, and forgets those that ended long ago.
    pub(super) fn end(&mut self, lease: LeaseId, ended: Ended) -> u64 {
        let forgotten = self.forget(ended.at);
        let hasher = &self.hasher;
        if self.young.ended.is_empty() {
            self.young.since = ended.at;
        }
        self.young.until = ended.at;
        self.young.newest = self.young.newest.max(lease.millis());
        let hash = hash_of(hasher, lease);
        self.young.ended.insert_unique(hash, (lease, ended), |(lease, _)| hash_of(hasher, *lease));
        forgotten
    }

    /// Forgets a generation if it is time, and answers how many leases that were.
    pub(super) fn forget(&mut self, now: Stamp) -> u64 {
        let mut forgotten = 0;
        let is_old = |generation: &Generation| {
            !generation.ended.is_empty() && now.since(generation.until) > REMEMBERED
        };
        if is_old(&self.old) {
            forgotten += self.old.ended.len() as u64;
            self.old = Generation::default();
        }
        let is_full = self.young.ended.len() >= GENERATION_MAX;
        if is_full || (!self.young.ended.is_empty() && now.since(self.young.since) > REMEMBERED) {
            forgotten += self.old.ended.len() as u64;
            // Forgotten before its time: what is as old as these and not known may be one of them.
            self.horizon = self.horizon.max(self.old.newest);
            let mut room = mem::take(&mut self.old.ended);
            room.clear();
            self.old = mem::replace(&mut self.young, Generation { ended: room, ..Generation::default() });
        }
        if is_old(&self.old) {
            forgotten += self.old.ended.len() as u64;
            self.old = Generation::default();
        }
        forgotten
    }

    /// Up to `max` leases whose deadline has passed.
    pub(super) fn due(&self, now: Stamp, max: usize) -> Vec<(LeaseId, Arc<Levels>)> {
        let due = self.due.iter().take_while(|(deadline, _)| *deadline <= now).take(max);
        due.filter_map(|(_, lease)| self.open(*lease).ok().map(|open| (*lease, Arc::clone(&open.levels))))
            .collect()
    }

    /// When the next one is due.
    pub(super) fn next_due(&self) -> Stamp {
        self.due.first().map_or(Stamp::MAX, |(deadline, _)| *deadline)
    }

    fn hash(&self, lease: LeaseId) -> u64 {
        hash_of(&self.hasher, lease)
    }
}

impl Generation {
    fn find(&self, hash: u64, lease: LeaseId) -> Option<Ended> {
        self.ended.find(hash, |(id, _)| *id == lease).map(|(_, ended)| *ended)
    }
}

fn hash_of(hasher: &foldhash::fast::RandomState, lease: LeaseId) -> u64 {
    use std::hash::BuildHasher;
    hasher.hash_one(lease)
}
