//! Leases: the open ones, and what is remembered of those that have ended.
//!
//! A lease is kept with the table of its own subject's bucket, so that one lock covers both. Ended leases are
//! remembered in two generations: when the young one is full, or as old as they are to be remembered, it becomes the
//! old one, and the old one is forgotten as a whole.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, REMEMBERED};
use tidegate_core::time::Stamp;

use crate::error::StoreError;
use crate::shared_engine::{KnownLease, LeaseTable, Open};

/// Ended leases that one generation of a shard remembers, unless more end within [`REMEMBERED_MIN`]. A subject's are all
/// on one shard: so many are remembered of it at least, and half a million of all.
const GENERATION_MAX: usize = 1 << 12;
/// Whatever their number, ended leases are remembered for this long, so that hardly anybody takes longer from making an
/// id to drawing with it. Whoever does is refused, and makes another.
const REMEMBERED_MIN: Duration = Duration::from_millis(2);
/// Ended leases that are so many that there will be [`GENERATION_MAX`].
const MANY: usize = 1 << 8;
/// Deadlines of ended leases that are left lying, beside as many as there are open ones.
const STALE_MAX: usize = 128;

/// A shard of the leases.
pub(super) struct Leases {
    hasher: foldhash::fast::RandomState,
    open: HashTable<Open>,
    /// The open ones by deadline, the next first, and some that have ended: to take one out takes longer than to find
    /// out later. One that was renewed is there under the deadline it had before.
    due: BinaryHeap<Reverse<(Stamp, LeaseId)>>,
    young: Generation,
    old: Generation,
    /// Ids made no later than this may have been forgotten before their time: an unknown one does not draw.
    horizon: u64,
}

/// Leases that ended at about the same time.
#[derive(Default)]
struct Generation {
    /// In the order of their ends, one behind the other: to write somewhere in a large table takes long.
    ended: Vec<(LeaseId, Ended)>,
    /// Their places, by id.
    places: HashTable<u32>,
    /// When the first and the last of them ended.
    since: Stamp,
    until: Stamp,
    /// The newest id among them, by its maker's clock.
    newest: u64,
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            hasher: foldhash::fast::RandomState::default(),
            open: HashTable::new(),
            due: BinaryHeap::new(),
            young: Generation::default(),
            old: Generation::default(),
            horizon: 0,
        }
    }
}

impl LeaseTable for Leases {
    fn find(&self, lease: LeaseId) -> KnownLease<'_> {
        let hash = self.hash(lease);
        if let Some(open) = self.open.find(hash, |open| open.lease == lease) {
            return KnownLease::Open(open);
        }
        let ended = self.young.find(hash, lease).or_else(|| self.old.find(hash, lease));
        ended.map_or(KnownLease::Unknown, KnownLease::Ended)
    }

    fn may_draw(&self, lease: LeaseId) -> Result<(), StoreError> {
        // A chosen id has no time: it is new as far as is known.
        if self.horizon == 0 || lease.is_chosen() || lease.millis() > self.horizon {
            return Ok(());
        }
        Err(StoreError::Ended { lease, how: Ending::Expired })
    }

    fn insert(&mut self, open: Open) {
        let hasher = &self.hasher;
        self.due.push(Reverse((open.record.deadline(), open.lease)));
        self.open.insert_unique(hash_of(hasher, open.lease), open, |open| hash_of(hasher, open.lease));
    }

    fn open_mut(&mut self, lease: LeaseId) -> Result<&mut Open, StoreError> {
        let place = self.open.find_bucket_index(self.hash(lease), |open| open.lease == lease);
        let Some(place) = place else { return Err(self.not_open(lease)) };
        self.open.get_bucket_mut(place).ok_or(StoreError::NoLease { lease })
    }

    fn end(&mut self, lease: LeaseId, ended: Ended) -> u64 {
        let forgotten = self.forget(ended.at);
        let hash = self.hash(lease);
        if let Ok(found) = self.open.find_entry(hash, |open| open.lease == lease) {
            drop(found.remove());
            if self.due.len() > 2 * self.open.len() + STALE_MAX {
                self.due.clear();
                self.due.extend(self.open.iter().map(|open| Reverse((open.record.deadline(), open.lease))));
            }
        }
        self.young.push(hash, lease, ended, &self.hasher);
        forgotten
    }
}

impl Leases {
    /// How many are open, and how many are remembered that have ended.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.open.len(), self.young.ended.len() + self.old.ended.len())
    }

    /// Forgets a generation if it is time, and answers how many leases that were.
    pub(super) fn forget(&mut self, now: Stamp) -> u64 {
        // No generation is forgotten before the older of them has been remembered for as long as need be, or is full.
        let oldest = if self.old.ended.is_empty() { self.young.since } else { self.old.until };
        let age = now.as_micros().saturating_sub(oldest.as_micros());
        if self.young.ended.len() < GENERATION_MAX && age <= REMEMBERED.as_secs() * 1_000_000 {
            return 0;
        }
        self.forget_now(now)
    }

    #[cold]
    fn forget_now(&mut self, now: Stamp) -> u64 {
        let mut forgotten = 0;
        let is_old = |generation: &Generation| {
            !generation.ended.is_empty() && now.since(generation.until) > REMEMBERED
        };
        if is_old(&self.old) {
            forgotten += self.old.ended.len() as u64;
            self.old = Generation::default();
        }
        let is_full = self.young.ended.len() >= GENERATION_MAX && now.since(self.old.until) > REMEMBERED_MIN;
        if is_full || (!self.young.ended.is_empty() && now.since(self.young.since) > REMEMBERED) {
            forgotten += self.old.ended.len() as u64;
            // Forgotten before its time: what is as old as these and not known may be one of them.
            self.horizon = self.horizon.max(self.old.newest);
            let room = mem::take(&mut self.old).emptied();
            self.old = mem::replace(&mut self.young, room);
        }
        if is_old(&self.old) {
            forgotten += self.old.ended.len() as u64;
            self.old = Generation::default();
        }
        forgotten
    }

    /// Up to `max` leases whose deadline has passed. They are not told of again.
    pub(super) fn due(&mut self, now: Stamp, max: usize) -> Vec<(LeaseId, Arc<Levels>)> {
        let mut due = Vec::new();
        while due.len() < max && self.next_due() <= now {
            let Some(Reverse((_, lease))) = self.due.pop() else { break };
            let KnownLease::Open(open) = self.find(lease) else { continue };
            if open.record.is_due(now) {
                due.push((lease, Arc::clone(&open.levels)));
            } else {
                let renewed = open.record.deadline();
                self.due.push(Reverse((renewed, lease)));
            }
        }
        due
    }

    /// No lease is due before this.
    pub(super) fn next_due(&self) -> Stamp {
        self.due.peek().map_or(Stamp::MAX, |Reverse((deadline, _))| *deadline)
    }

    fn hash(&self, lease: LeaseId) -> u64 {
        hash_of(&self.hasher, lease)
    }
}

impl Generation {
    fn find(&self, hash: u64, lease: LeaseId) -> Option<Ended> {
        let place = self.places.find(hash, |place| self.ended[*place as usize].0 == lease);
        place.map(|place| self.ended[*place as usize].1)
    }

    fn push(&mut self, hash: u64, lease: LeaseId, ended: Ended, hasher: &foldhash::fast::RandomState) {
        if self.ended.is_empty() {
            self.since = ended.at;
        }
        self.until = ended.at;
        self.newest = self.newest.max(lease.millis());
        if self.ended.len() == self.ended.capacity() {
            self.grow(hasher);
        }
        // A generation has far fewer.
        let place = u32::try_from(self.ended.len()).unwrap_or(u32::MAX);
        self.ended.push((lease, ended));
        let all = &self.ended;
        self.places.insert_unique(hash, place, |place| hash_of(hasher, all[*place as usize].0));
    }

    /// Makes room for more: where there are many, for all that there may be, since to move them takes long.
    #[cold]
    fn grow(&mut self, hasher: &foldhash::fast::RandomState) {
        let count = self.ended.len();
        let many = if count < MANY { 0 } else { GENERATION_MAX.saturating_sub(count) };
        let more = many.max(count).max(4);
        self.ended.reserve_exact(more);
        let all = &self.ended;
        self.places.reserve(more, |place| hash_of(hasher, all[*place as usize].0));
    }

    /// Nothing, in the same room.
    fn emptied(mut self) -> Self {
        self.ended.clear();
        self.places.clear();
        Self { ended: self.ended, places: self.places, ..Self::default() }
    }
}

fn hash_of(hasher: &foldhash::fast::RandomState, lease: LeaseId) -> u64 {
    use std::hash::BuildHasher;
    hasher.hash_one(lease)
}
