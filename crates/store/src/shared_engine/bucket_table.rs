//! A hash table of buckets with stable indexes for open leases.
//!
//! An open lease keeps the indexes of its buckets and pins them. Buckets that no lease pins may be evicted,
//! and their indexes are reused (CLOCK eviction without reference bits).

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use hashbrown::HashTable;
use smallvec::SmallVec;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::Rule;
use tidegate_core::limit::usage::{Tally, Window, Windows};
use tidegate_core::time::Stamp;

/// The number of tables: each is a shard with its own lock.
pub(crate) const SHARDS: usize = 32;
/// The maximum number of limits of a subject, including those given with calls.
pub(super) const ROWS_MAX: usize = 64;

/// The pin count of a vacant slot.
const VACANT: u32 = u32::MAX;
/// Tables with fewer slots are not compacted.
const COMPACTED_MIN: usize = 1 << 10;

/// Buckets by subject. An index is valid while it is pinned, otherwise until the next eviction.
#[derive(Default)]
pub(crate) struct BucketTable {
    table: HashTable<u32>,
    all: Vec<Bucket>,
    /// The pin count of each slot, or [`VACANT`]. Not in the bucket, which would no longer fit a cache line.
    holds: Vec<u32>,
    vacant: Vec<u32>,
    /// The CLOCK hand: the next slot to consider for eviction.
    hand: u32,
    /// The number of compactions, which change all indexes.
    epoch: u32,
}

/// A subject's limits.
pub(crate) struct Bucket {
    hash: u64,
    pub(crate) subject: Subject,
    /// In the order of first use.
    pub(crate) rows: Vec<Row>,
}

/// One limit of a subject.
pub(crate) struct Row {
    pub(crate) meter: Meter,
    /// Created by the first settled lease.
    pub(crate) usage: Option<Box<Windows>>,
}

/// The location of a level's bucket: its hash, and its index once it exists.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) hash: u64,
    pub(crate) index: Option<u32>,
}

/// The places of a subject's levels, its own first.
pub(crate) type Places = SmallVec<[Place; 3]>;

/// The shard of a hash, from bits that the table does not use.
pub(crate) const fn table_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

/// The hash of a subject: its names separated by `#`, which no name contains.
#[inline]
pub(crate) fn hash_subject(hasher: &foldhash::fast::RandomState, subject: &Subject) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(subject.entity.as_str().as_bytes());
    hasher.write(b"#");
    hasher.write(subject.resource.as_str().as_bytes());
    hasher.finish()
}

impl BucketTable {
    /// The number of buckets.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// The number of slots, including vacant ones.
    pub(crate) const fn places(&self) -> usize {
        self.all.len()
    }

    /// The number of compactions, which change all indexes.
    pub(crate) const fn epoch(&self) -> u32 {
        self.epoch
    }

    pub(crate) fn find(&self, hash: u64, subject: &Subject) -> Option<u32> {
        let is_it = |index: &u32| self.all[*index as usize].subject == *subject;
        self.table.find(hash, is_it).copied()
    }

    /// A subject's bucket, if it exists.
    pub(crate) fn get(&self, hash: u64, subject: &Subject) -> Option<&Bucket> {
        self.find(hash, subject).map(|index| self.at(index))
    }

    #[inline]
    pub(crate) fn at(&self, index: u32) -> &Bucket {
        &self.all[index as usize]
    }

    #[inline]
    pub(crate) fn at_mut(&mut self, index: u32) -> &mut Bucket {
        &mut self.all[index as usize]
    }

    /// Pins the bucket at an index until it is [released](Self::release) as often.
    #[inline]
    pub(super) fn hold(&mut self, index: u32) {
        self.holds[index as usize] += 1;
    }

    #[inline]
    pub(super) fn release(&mut self, index: u32) {
        self.holds[index as usize] -= 1;
    }

    /// Adds a bucket for a subject without one.
    #[cold]
    pub(crate) fn push(&mut self, hash: u64, subject: Subject, rows: Vec<Row>) -> u32 {
        let bucket = Bucket { hash, subject, rows };
        let index = if let Some(index) = self.vacant.pop() {
            (self.all[index as usize], self.holds[index as usize]) = (bucket, 0);
            index
        } else {
            self.all.push(bucket);
            self.holds.push(0);
            u32::try_from(self.all.len() - 1).expect("a table is bounded far below this")
        };
        let buckets = &self.all;
        self.table.insert_unique(hash, index, |index| buckets[*index as usize].hash);
        index
    }

    /// Visits the next `count` slots and evicts the unpinned buckets for which `may_evict` returns true.
    /// Calls `on_evicted` with each subject.
    #[cold]
    pub(crate) fn evict(
        &mut self,
        count: usize,
        mut may_evict: impl FnMut(u32, &mut Bucket) -> bool,
        mut on_evicted: impl FnMut(&Subject),
    ) {
        for _ in 0..count.min(self.all.len()) {
            let index = self.hand;
            let place = index as usize;
            self.hand = if place + 1 < self.all.len() { index + 1 } else { 0 };
            if self.holds[place] != 0 || !may_evict(index, &mut self.all[place]) {
                continue;
            }
            on_evicted(&self.all[place].subject);
            self.remove(index);
        }
    }

    /// Removes the bucket at an index unless a lease pins it. Returns whether it was removed.
    pub(crate) fn remove(&mut self, index: u32) -> bool {
        let is_free = self.holds[index as usize] == 0;
        if is_free {
            self.vacate(index);
        }
        is_free
    }

    fn vacate(&mut self, index: u32) {
        let place = index as usize;
        if let Ok(found) = self.table.find_entry(self.all[place].hash, |found| *found == index) {
            found.remove();
        }
        self.all[place].rows = Vec::new();
        // Vacant slots share one subject, so that the others are freed.
        if let Some(other) = self.vacant.last() {
            self.all[place].subject = self.all[*other as usize].subject.clone();
        }
        self.holds[place] = VACANT;
        self.vacant.push(index);
    }

    /// Frees memory if most slots are vacant and none is pinned. Invalidates all indexes.
    pub(crate) fn compact(&mut self) {
        let is_pinned = |holds: &u32| *holds != 0 && *holds != VACANT;
        if self.all.len() < COMPACTED_MIN
            || self.vacant.len() < self.all.len() / 4 * 3
            || self.holds.iter().any(is_pinned)
        {
            return;
        }
        let all = std::mem::take(self);
        self.epoch = all.epoch.wrapping_add(1);
        self.all.reserve_exact(all.len());
        for (bucket, _) in all.all.into_iter().zip(all.holds).filter(|(_, holds)| *holds != VACANT) {
            self.push(bucket.hash, bucket.subject, bucket.rows);
        }
    }
}

impl Bucket {
    /// Whether the bucket equals an unused one: every limit is full, it has no usage, and its rules are of
    /// version `settled` or older, so that no caller brings older ones.
    pub(crate) fn is_as_new(&self, settled: Version, now: Stamp) -> bool {
        self.rows.iter().all(|row| {
            row.meter.is_full(now)
                && row.meter.version() <= settled
                && row.usage.as_deref().is_none_or(is_unused)
        })
    }

    /// The index of a rule's row, if it was ever used; `likely` is the limit's index in its policy.
    #[inline]
    pub(super) fn row(&self, likely: usize, rule: &Arc<Rule>) -> Option<usize> {
        if self.rows.get(likely).is_some_and(|row| Arc::ptr_eq(row.meter.rule(), rule)) {
            return Some(likely);
        }
        self.rows.iter().position(|row| row.meter.rule().row() == rule.row())
    }

    /// Drops full limits that were given with calls, which equal unused ones. Their usage moves to another
    /// limit of the same name; without one they stay.
    #[cold]
    pub(super) fn drop_full_call_limits(&mut self, now: Stamp) {
        let mut place = self.rows.len();
        while place > 0 {
            place -= 1;
            let rule = Arc::clone(self.rows[place].meter.rule());
            let mut others = (0..self.rows.len()).filter(|other| *other != place);
            let other = others.find(|other| self.rows[*other].meter.rule().name() == rule.name());
            if rule.is_of_call()
                && self.rows[place].meter.is_full(now)
                && let Some(other) = other
            {
                if let Some(usage) = self.rows[place].usage.take() {
                    self.rows[other].usage.get_or_insert_default().absorb(&usage);
                }
                self.rows.remove(place);
            }
        }
    }

    pub(super) fn row_or_new(&mut self, likely: usize, rule: &Arc<Rule>, version: Version) -> &mut Row {
        let place = self.row(likely, rule).unwrap_or_else(|| {
            // No spare capacity: subjects are many and have few limits.
            self.rows.reserve_exact(1);
            self.rows.push(Row { meter: Meter::new(Arc::clone(rule), version), usage: None });
            self.rows.len() - 1
        });
        &mut self.rows[place]
    }
}

impl Row {
    pub(super) fn count(&mut self, level: usize, units: u64, drawn_at: Stamp) {
        let own = if level == 0 { units } else { 0 };
        self.usage.get_or_insert_default().add(drawn_at, Tally { units, own, leases: 1 });
    }
}

fn is_unused(usage: &Windows) -> bool {
    let all = Stamp::ZERO..Stamp::MAX;
    Window::ALL.into_iter().all(|window| usage.within(window, &all).next().is_none())
}
