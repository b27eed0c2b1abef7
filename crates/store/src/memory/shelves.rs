//! Shelves of buckets: found by subject, stable in place, locked together for one decision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard};

use hashbrown::HashTable;
use smallvec::SmallVec;
use tidegate_core::limit::cascade::{Level, Levels, Line};
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::lease::Record;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::Rule;
use tidegate_core::limit::usage::{Tally, Windows};
use tidegate_core::time::Stamp;

use super::leases::Leases;
use super::{SHARDS, Space, lock};
use crate::buckets::Reading;
use crate::error::StoreError;

/// What a limit has left once something is taken.
type Left = tidegate_core::bucket::Bucket<Stamp>;

/// A store holds at most so many buckets.
const BUCKETS_MAX: usize = 1 << 22;
/// A shelf holds its part of them.
const SHELF_MAX: usize = BUCKETS_MAX / SHARDS;

/// A shard: buckets, and the leases of their subjects. Buckets are only ever added, so that a place is good for ever.
#[derive(Default)]
pub(super) struct Shelf {
    table: HashTable<u32>,
    pub(super) buckets: Vec<Bucket>,
    pub(super) leases: Leases,
    /// The latest time that anything here was decided at.
    latest: Stamp,
}

/// A subject's limits.
pub(super) struct Bucket {
    hash: u64,
    pub(super) subject: Subject,
    /// In the order of first use.
    pub(super) rows: Vec<Row>,
}

/// One limit of a subject.
pub(super) struct Row {
    pub(super) meter: Meter,
    /// Made with the first lease that is settled.
    pub(super) usage: Option<Box<Windows>>,
}

/// Which buckets there are, in order.
#[derive(Default)]
pub(super) struct Index {
    pub(super) by_entity: BTreeMap<EntityId, Vec<ResourceName>>,
    pub(super) by_resource: BTreeMap<ResourceName, BTreeSet<EntityId>>,
}

/// Where a level's bucket is: which shelf, and where on it once it is there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    hash: u64,
    index: Option<u32>,
}

/// The places of a subject's levels, its own first.
pub(super) type Places = SmallVec<[Place; 3]>;

impl Place {
    fn shelf(self) -> usize {
        shelf_of(self.hash)
    }
}

/// The shelf of a hash: by bits that the table does not go by.
pub(super) const fn shelf_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

impl Shelf {
    fn find(&self, hash: u64, subject: &Subject) -> Option<u32> {
        let is_it = |index: &u32| self.buckets[*index as usize].subject == *subject;
        self.table.find(hash, is_it).copied()
    }
}

impl Shelf {
    /// A subject's bucket, if it was ever used.
    pub(super) fn get(&self, hash: u64, subject: &Subject) -> Option<&Bucket> {
        self.find(hash, subject).map(|index| &self.buckets[index as usize])
    }
}

impl Bucket {
    /// The place of a rule's row, if it was ever used; `likely` is the limit's place in its policy.
    #[inline]
    fn row(&self, likely: usize, rule: &Arc<Rule>) -> Option<usize> {
        if self.rows.get(likely).is_some_and(|row| Arc::ptr_eq(row.meter.rule(), rule)) {
            return Some(likely);
        }
        self.rows.iter().position(|row| row.meter.rule().row() == rule.row())
    }

    fn row_or_new(&mut self, likely: usize, rule: &Arc<Rule>, version: Version) -> &mut Row {
        let place = self.row(likely, rule).unwrap_or_else(|| {
            // Most subjects have few limits, and there are many subjects.
            self.rows.reserve_exact(1);
            self.rows.push(Row { meter: Meter::new(Arc::clone(rule), version), usage: None });
            self.rows.len() - 1
        });
        &mut self.rows[place]
    }
}

/// The shelves of one call, locked in their order.
pub(super) struct Locked<'a> {
    space: &'a Space,
    guards: SmallVec<[(usize, MutexGuard<'a, Shelf>); 3]>,
    home: usize,
}

impl Space {
    /// Where the buckets of these levels are, as far as is known without a lock.
    pub(super) fn places(&self, levels: &Levels) -> Result<Places, StoreError> {
        if levels.levels().len() > LEVELS_MAX + 1 {
            let what = format!("{} levels, more than {LEVELS_MAX}", levels.levels().len());
            return Err(StoreError::Invalid { what });
        }
        let hash = |level: &Level| self.hash(level.subject.entity.as_str(), level.subject.resource.as_str());
        Ok(levels.levels().iter().map(|level| Place { hash: hash(level), index: None }).collect())
    }

    /// Locks the shelves of these places, in their order.
    pub(super) fn lock_shelves(&self, places: &Places) -> Locked<'_> {
        let home = places[0].shelf();
        let mut guards = SmallVec::new();
        if let [place] = places[..] {
            guards.push((home, lock(&self.shelves[place.shelf()])));
        } else {
            let mut wanted: SmallVec<[usize; LEVELS_MAX + 1]> =
                places.iter().map(|place| place.shelf()).collect();
            wanted.sort_unstable();
            wanted.dedup();
            guards.extend(wanted.into_iter().map(|shelf| (shelf, lock(&self.shelves[shelf]))));
        }
        Locked { space: self, guards, home }
    }
}

impl Locked<'_> {
    /// The time to decide at: `now`, which was read before the locks, unless somebody who read later was faster. So what
    /// is told to have happened earlier did.
    pub(super) fn not_before(&mut self, now: Stamp) -> Stamp {
        let now = self.guards.iter().map(|(_, shelf)| shelf.latest).fold(now, Stamp::max);
        for (_, shelf) in &mut self.guards {
            shelf.latest = now;
        }
        now
    }

    /// The leases of the subject.
    pub(super) fn leases(&mut self) -> &mut Leases {
        &mut self.shelf(self.home).leases
    }

    fn shelf(&mut self, number: usize) -> &mut Shelf {
        let found = self.guards.iter_mut().find(|(shelf, _)| *shelf == number);
        &mut found.expect("every shelf of the call is locked").1
    }

    fn bucket(&mut self, place: &mut Place, subject: &Subject) -> Option<&mut Bucket> {
        let at = *place;
        let shelf = self.shelf(at.shelf());
        place.index = at.index.or_else(|| shelf.find(at.hash, subject));
        place.index.map(|index| &mut shelf.buckets[index as usize])
    }

    /// Takes `units` of every limit that takes part; `None` if one of them is short, and nothing is taken. Rules are
    /// followed either way.
    pub(super) fn take(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &mut [Place],
        now: Stamp,
    ) -> Result<Option<Vec<Reading>>, StoreError> {
        let mut left: SmallVec<[Option<(usize, Left)>; 4]> = SmallVec::new();
        for (level, place) in levels.levels().iter().zip(&mut *places) {
            let mut bucket = self.bucket(place, &level.subject);
            for (likely, line, wanted) in taking_part(level, units) {
                let row = bucket.as_ref().and_then(|bucket| bucket.row(likely, &line.rule));
                let Some((row, bucket)) = row.zip(bucket.as_mut()) else {
                    if wanted > line.rule.shape().burst() {
                        return Ok(None);
                    }
                    left.push(None);
                    continue;
                };
                let meter = &mut bucket.rows[row].meter;
                meter.follow(&line.rule, levels.version(), now);
                let Some(after) = meter.ask(wanted, now) else { return Ok(None) };
                left.push(Some((row, after)));
            }
        }
        self.prepare(levels, |name| units[name].is_some(), places)?;
        Ok(Some(self.put(levels, units, places, &left, now)))
    }

    /// Takes what was asked for and found to be there.
    fn put(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &mut [Place],
        left: &[Option<(usize, Left)>],
        now: Stamp,
    ) -> Vec<Reading> {
        let mut readings = Vec::with_capacity(left.len());
        let mut left = left.iter();
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket(place, &level.subject) else { continue };
            for (likely, line, asked) in taking_part(level, units) {
                let meter = if let Some((row, after)) = left.next().copied().flatten() {
                    let meter = &mut bucket.rows[row].meter;
                    meter.put(after, asked);
                    meter
                } else {
                    let meter = &mut bucket.row_or_new(likely, &line.rule, levels.version()).meter;
                    meter.take(asked, now);
                    meter
                };
                let moved = 0_i64.saturating_add_unsigned(asked);
                readings.push(Reading { level: number, name: line.name, moved, meter: meter.clone() });
            }
        }
        readings
    }

    /// Makes every bucket that will be moved and is not there: after this, nothing fails.
    pub(super) fn prepare(
        &mut self,
        levels: &Levels,
        takes_part: impl Fn(usize) -> bool,
        places: &mut [Place],
    ) -> Result<(), StoreError> {
        let space = self.space;
        for (level, place) in levels.levels().iter().zip(places) {
            if place.index.is_none() && level.limits.iter().any(|line| takes_part(line.name)) {
                let at = *place;
                let shelf = self.shelf(at.shelf());
                let found = shelf.find(at.hash, &level.subject);
                let make = || new_bucket(space, shelf, at.hash, &level.subject);
                place.index = Some(found.map_or_else(make, Ok)?);
            }
        }
        Ok(())
    }

    /// Moves each limit that takes part by its delta, and reads it. The buckets are [prepared](Self::prepare).
    pub(super) fn shift(
        &mut self,
        levels: &Levels,
        deltas: impl Fn(usize) -> Option<i64>,
        places: &mut [Place],
        now: Stamp,
    ) -> Vec<Reading> {
        self.shift_each(levels, deltas, places, now, |_, _, _| {})
    }

    /// Moves each limit that takes part by its delta, reads it, and writes what the lease holds of it to the ledger, at
    /// the time of its draw. The buckets are [prepared](Self::prepare).
    pub(super) fn shift_and_count(
        &mut self,
        levels: &Levels,
        deltas: impl Fn(usize) -> Option<i64>,
        record: &Record,
        places: &mut [Place],
        now: Stamp,
    ) -> Vec<Reading> {
        self.shift_each(levels, deltas, places, now, |level, name, row| {
            if let Some(units) = record.held()[name] {
                row.count(level, units, record.drawn_at());
            }
        })
    }

    fn shift_each(
        &mut self,
        levels: &Levels,
        deltas: impl Fn(usize) -> Option<i64>,
        places: &mut [Place],
        now: Stamp,
        end: impl Fn(usize, usize, &mut Row),
    ) -> Vec<Reading> {
        let mut readings = Vec::with_capacity(levels.levels().len() * levels.names().len());
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket(place, &level.subject) else { continue };
            for (likely, line) in level.limits.iter().enumerate() {
                let Some(moved) = deltas(line.name) else { continue };
                let row = bucket.row_or_new(likely, &line.rule, levels.version());
                row.meter.adjust(moved, now);
                end(number, line.name, row);
                readings.push(Reading { level: number, name: line.name, moved, meter: row.meter.clone() });
            }
        }
        readings
    }

    /// Reads each limit that takes part.
    pub(super) fn read(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &mut [Place],
    ) -> Vec<Reading> {
        let mut readings = Vec::new();
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let bucket = self.bucket(place, &level.subject);
            for (likely, line, _) in taking_part(level, units) {
                let row =
                    bucket.as_ref().and_then(|bucket| Some(&bucket.rows[bucket.row(likely, &line.rule)?]));
                let meter = row.map(|row| row.meter.clone());
                let meter = meter.unwrap_or_else(|| Meter::new(Arc::clone(&line.rule), levels.version()));
                readings.push(Reading { level: number, name: line.name, moved: 0, meter });
            }
        }
        readings
    }

    /// Writes what was used to the ledger, at the time of the draw. The buckets are [prepared](Self::prepare).
    pub(super) fn count(
        &mut self,
        levels: &Levels,
        used: &[Option<u64>],
        places: &mut [Place],
        drawn_at: Stamp,
    ) {
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket(place, &level.subject) else { continue };
            for (likely, line, units) in taking_part(level, used) {
                bucket.row_or_new(likely, &line.rule, levels.version()).count(number, units, drawn_at);
            }
        }
    }
}

impl Row {
    fn count(&mut self, level: usize, units: u64, drawn_at: Stamp) {
        let own = if level == 0 { units } else { 0 };
        self.usage.get_or_insert_default().add(drawn_at, Tally { units, own, leases: 1 });
    }
}

/// The limits of a level that `units` name.
fn taking_part<'a>(
    level: &'a Level,
    units: &'a [Option<u64>],
) -> impl Iterator<Item = (usize, &'a Line, u64)> {
    let lines = level.limits.iter().enumerate();
    lines.filter_map(|(place, line)| units[line.name].map(|units| (place, line, units)))
}

#[cold]
fn new_bucket(space: &Space, shelf: &mut Shelf, hash: u64, subject: &Subject) -> Result<u32, StoreError> {
    let index = match u32::try_from(shelf.buckets.len()) {
        Ok(index) if shelf.buckets.len() < SHELF_MAX => index,
        _ => return Err(StoreError::Full { what: "buckets", max: BUCKETS_MAX as u64 }),
    };
    shelf.buckets.push(Bucket { hash, subject: subject.clone(), rows: Vec::new() });
    let buckets = &shelf.buckets;
    shelf.table.insert_unique(hash, index, |index| buckets[*index as usize].hash);
    let mut index_of_all = lock(&space.index);
    let Index { by_entity, by_resource } = &mut *index_of_all;
    let resources = by_entity.entry(subject.entity.clone()).or_default();
    let place = resources.partition_point(|resource| *resource < subject.resource);
    resources.reserve_exact(1);
    resources.insert(place, subject.resource.clone());
    match by_resource.get_mut(&subject.resource) {
        Some(entities) => drop(entities.insert(subject.entity.clone())),
        None => drop(by_resource.insert(subject.resource.clone(), [subject.entity.clone()].into())),
    }
    Ok(index)
}
