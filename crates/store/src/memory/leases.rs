//! Open leases, and the records of ended ones in a two-generation cache.
//!
//! A lease is kept in the shard of its own subject's bucket, so that one lock covers both. Records of ended
//! leases live in two generations: when the young one is full or old enough, it becomes the old one, and the
//! previous old one is dropped as a whole.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashTable;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, Ending, LeaseId, REMEMBERED};
use tidegate_core::time::Stamp;

use crate::error::StoreError;
use crate::shared_engine::{KnownLease, LeaseTable, Open};

/// Records in one generation of a shard, unless more leases end within [`REMEMBERED_MIN`]. A subject's leases
/// are all on one shard: at least this many records are kept of it, and half a million in all.
const GENERATION_MAX: usize = 1 << 12;
/// The minimum time to keep records, regardless of their number: longer than callers normally take from
/// creating an id to drawing with it. A slower draw is refused, and its caller creates another id.
const REMEMBERED_MIN: Duration = Duration::from_millis(2);
/// The number of records from which a generation reserves space for [`GENERATION_MAX`].
const MANY: usize = 1 << 8;
/// Stale deadlines tolerated in the heap, in addition to the number of open leases.
const STALE_MAX: usize = 128;

/// A shard of the leases.
pub(super) struct Leases {
    hasher: foldhash::fast::RandomState,
    open: HashTable<Open>,
    /// A heap of deadlines with lazy deletion: ended leases stay until they are popped, and a renewed lease
    /// has its old deadline.
    due: BinaryHeap<Reverse<(Stamp, LeaseId)>>,
    young: Generation,
    old: Generation,
    /// Records of ids created up to this time may have been dropped early: an unknown id does not draw.
    horizon: u64,
}

/// Leases that ended at about the same time.
#[derive(Default)]
struct Generation {
    /// In the order of their ends, appended: random writes into a large table are slow.
    ended: Vec<(LeaseId, EndRecord)>,
    /// The indexes by id.
    places: HashTable<u32>,
    /// When the first and the last lease ended.
    since: Stamp,
    until: Stamp,
    /// The creation time of the newest id.
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
        // A chosen id has no time, and counts as new.
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

    fn end(&mut self, lease: LeaseId, ended: EndRecord) -> u64 {
        let forgotten = self.rotate(ended.at);
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
    /// The number of open leases, and of records of ended ones.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.open.len(), self.young.ended.len() + self.old.ended.len())
    }

    /// Rotates the generations if it is time, and returns the number of records dropped.
    pub(super) fn rotate(&mut self, now: Stamp) -> u64 {
        // Nothing to do before the older generation is old enough, or the young one is full.
        let oldest = if self.old.ended.is_empty() { self.young.since } else { self.old.until };
        let age = now.as_micros().saturating_sub(oldest.as_micros());
        if self.young.ended.len() < GENERATION_MAX && age <= REMEMBERED.as_secs() * 1_000_000 {
            return 0;
        }
        self.rotate_now(now)
    }

    #[cold]
    fn rotate_now(&mut self, now: Stamp) -> u64 {
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
            // Dropped early: an unknown id as old as these may be one of them.
            self.horizon = self.horizon.max(self.old.newest);
            let empty = mem::take(&mut self.old).cleared();
            self.old = mem::replace(&mut self.young, empty);
        }
        if is_old(&self.old) {
            forgotten += self.old.ended.len() as u64;
            self.old = Generation::default();
        }
        forgotten
    }

    /// Removes up to `max` leases whose deadline has passed from the heap, and returns them.
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

    /// The earliest deadline.
    pub(super) fn next_due(&self) -> Stamp {
        self.due.peek().map_or(Stamp::MAX, |Reverse((deadline, _))| *deadline)
    }

    fn hash(&self, lease: LeaseId) -> u64 {
        hash_of(&self.hasher, lease)
    }
}

impl Generation {
    fn find(&self, hash: u64, lease: LeaseId) -> Option<EndRecord> {
        let place = self.places.find(hash, |place| self.ended[*place as usize].0 == lease);
        place.map(|place| self.ended[*place as usize].1)
    }

    fn push(&mut self, hash: u64, lease: LeaseId, ended: EndRecord, hasher: &foldhash::fast::RandomState) {
        if self.ended.is_empty() {
            self.since = ended.at;
        }
        self.until = ended.at;
        self.newest = self.newest.max(lease.millis());
        if self.ended.len() == self.ended.capacity() {
            self.grow(hasher);
        }
        // A generation has far fewer entries.
        let place = u32::try_from(self.ended.len()).unwrap_or(u32::MAX);
        self.ended.push((lease, ended));
        let all = &self.ended;
        self.places.insert_unique(hash, place, |place| hash_of(hasher, all[*place as usize].0));
    }

    /// Grows the generation; a large one to its maximum at once, to avoid further moves.
    #[cold]
    fn grow(&mut self, hasher: &foldhash::fast::RandomState) {
        let count = self.ended.len();
        let many = if count < MANY { 0 } else { GENERATION_MAX.saturating_sub(count) };
        let more = many.max(count).max(4);
        self.ended.reserve_exact(more);
        let all = &self.ended;
        self.places.reserve(more, |place| hash_of(hasher, all[*place as usize].0));
    }

    /// Clears the generation and keeps its capacity.
    fn cleared(mut self) -> Self {
        self.ended.clear();
        self.places.clear();
        Self { ended: self.ended, places: self.places, ..Self::default() }
    }
}

fn hash_of(hasher: &foldhash::fast::RandomState, lease: LeaseId) -> u64 {
    use std::hash::BuildHasher;
    hasher.hash_one(lease)
}
