//! A shelf of buckets: found by subject, stable in place.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use hashbrown::HashTable;
use smallvec::SmallVec;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::Rule;
use tidegate_core::limit::usage::{Tally, Windows};
use tidegate_core::time::Stamp;

/// Shelves that a store may have: each is a shard with a lock of its own.
pub(crate) const SHARDS: usize = 32;
/// A subject has at most so many limits, those given with calls included.
pub(super) const ROWS_MAX: usize = 64;

/// Buckets by subject. They are only ever added, so that a place is good for as long as the shelf.
#[derive(Default)]
pub(crate) struct Shelf {
    table: HashTable<u32>,
    all: Vec<Bucket>,
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
    /// Made with the first lease that is settled.
    pub(crate) usage: Option<Box<Windows>>,
}

/// Where a level's bucket is: which shelf, and where on it once it is there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) hash: u64,
    pub(crate) index: Option<u32>,
}

/// The places of a subject's levels, its own first.
pub(crate) type Places = SmallVec<[Place; 3]>;

/// The shelf of a hash: by bits that the table does not go by.
pub(crate) const fn shelf_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

/// The hash of a subject: its names one behind the other. No name holds `#`, so that no two subjects are the same bytes.
#[inline]
pub(crate) fn hash_subject(hasher: &foldhash::fast::RandomState, subject: &Subject) -> u64 {
    let mut hasher = hasher.build_hasher();
    hasher.write(subject.entity.as_str().as_bytes());
    hasher.write(b"#");
    hasher.write(subject.resource.as_str().as_bytes());
    hasher.finish()
}

impl Shelf {
    pub(crate) const fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn find(&self, hash: u64, subject: &Subject) -> Option<u32> {
        let is_it = |index: &u32| self.all[*index as usize].subject == *subject;
        self.table.find(hash, is_it).copied()
    }

    /// A subject's bucket, if it was ever used.
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

    /// Adds a bucket that is not there.
    #[cold]
    pub(crate) fn push(&mut self, hash: u64, subject: Subject, rows: Vec<Row>) -> u32 {
        let index = u32::try_from(self.all.len()).expect("a shelf is bounded far below this");
        self.all.push(Bucket { hash, subject, rows });
        let buckets = &self.all;
        self.table.insert_unique(hash, index, |index| buckets[*index as usize].hash);
        index
    }
}

impl Bucket {
    /// The place of a rule's row, if it was ever used; `likely` is the limit's place in its policy.
    #[inline]
    pub(super) fn row(&self, likely: usize, rule: &Arc<Rule>) -> Option<usize> {
        if self.rows.get(likely).is_some_and(|row| Arc::ptr_eq(row.meter.rule(), rule)) {
            return Some(likely);
        }
        self.rows.iter().position(|row| row.meter.rule().row() == rule.row())
    }

    /// Forgets limits that were given with calls and are full: they are the same as new ones. What was used of them is
    /// counted with another limit of the same name, and without one they stay.
    #[cold]
    pub(super) fn make_room(&mut self, now: Stamp) {
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
            // Most subjects have few limits, and there are many subjects.
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
