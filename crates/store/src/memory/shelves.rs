//! Shelves of buckets: found by subject, stable in place, locked together for one decision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
use super::{SHARDS, Space};
use crate::buckets::{Reading, Readings};
use crate::error::StoreError;
use crate::sync::lock;

/// What a limit has left once something is taken.
type Left = tidegate_core::bucket::Bucket<Stamp>;

/// A store holds at most so many buckets.
const BUCKETS_MAX: usize = 1 << 22;
/// A shelf holds its part of them.
const SHELF_MAX: usize = BUCKETS_MAX / SHARDS;
/// A subject has at most so many limits, those given with calls included.
const ROWS_MAX: usize = 64;

/// A shard: buckets, and the leases of their subjects. Buckets are only ever added, so that a place is good for ever.
#[derive(Default)]
pub(super) struct Shelf {
    pub(super) buckets: Buckets,
    pub(super) leases: Leases,
    /// The latest time that anything here was decided at.
    latest: Stamp,
}

/// Buckets by subject.
#[derive(Default)]
pub(super) struct Buckets {
    table: HashTable<u32>,
    all: Vec<Bucket>,
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

/// The shelf of a hash: by bits that the table does not go by.
pub(super) const fn shelf_of(hash: u64) -> usize {
    (hash >> 32) as usize % SHARDS
}

impl Buckets {
    fn find(&self, hash: u64, subject: &Subject) -> Option<u32> {
        let is_it = |index: &u32| self.all[*index as usize].subject == *subject;
        self.table.find(hash, is_it).copied()
    }

    /// A subject's bucket, if it was ever used.
    pub(super) fn get(&self, hash: u64, subject: &Subject) -> Option<&Bucket> {
        self.find(hash, subject).map(|index| &self.all[index as usize])
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

    /// Forgets limits that were given with calls and are full: they are the same as new ones. What was used of them is
    /// counted with another limit of the same name, and without one they stay.
    #[cold]
    fn make_room(&mut self, now: Stamp) {
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

impl Space {
    /// Locks the shelves of these levels, in their order, and decides under the locks at one time: `read`, which was
    /// read before them, unless somebody who read later was faster. So what is told to have happened earlier did.
    #[inline]
    pub(super) fn decide<T>(
        &self,
        levels: &Levels,
        read: Stamp,
        decide: impl FnOnce(&mut Leases, &mut Reach<'_>, &mut [Place], Stamp) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let [level] = levels.levels() else { return self.decide_above(levels, read, decide) };
        // Nearly always there is one, and nothing to be put in order.
        let mut place = Place { hash: self.hash(&level.subject), index: None };
        let number = shelf_of(place.hash);
        let mut guard = lock(&self.shelves[number]);
        let Shelf { buckets, leases, latest } = &mut *guard;
        *latest = read.max(*latest);
        let mut reach = Reach { space: self, home: (number, buckets), others: Vec::new() };
        decide(leases, &mut reach, std::slice::from_mut(&mut place), *latest)
    }

    fn decide_above<T>(
        &self,
        levels: &Levels,
        read: Stamp,
        decide: impl FnOnce(&mut Leases, &mut Reach<'_>, &mut [Place], Stamp) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if levels.levels().len() > LEVELS_MAX + 1 {
            let what = format!("{} levels, more than {LEVELS_MAX}", levels.levels().len());
            return Err(StoreError::Invalid { what });
        }
        let place = |level: &Level| Place { hash: self.hash(&level.subject), index: None };
        let mut places: Places = levels.levels().iter().map(place).collect();
        let mut wanted: Vec<usize> = places.iter().map(|place| shelf_of(place.hash)).collect();
        let home = wanted[0];
        wanted.sort_unstable();
        wanted.dedup();
        let mut shelves: Vec<_> =
            wanted.into_iter().map(|shelf| (shelf, lock(&self.shelves[shelf]))).collect();
        let now = shelves.iter().map(|(_, shelf)| shelf.latest).fold(read, Stamp::max);
        for (_, shelf) in &mut shelves {
            shelf.latest = now;
        }
        let (mut own, mut others) = (None, Vec::with_capacity(shelves.len() - 1));
        for (number, shelf) in &mut shelves {
            let Shelf { buckets, leases, .. } = &mut **shelf;
            if *number == home { own = Some((buckets, leases)) } else { others.push((*number, buckets)) }
        }
        let (buckets, leases) = own.expect("the subject's own shelf is one of them");
        let mut reach = Reach { space: self, home: (home, buckets), others };
        decide(leases, &mut reach, &mut places, now)
    }
}

/// The buckets that a call can reach.
pub(super) struct Reach<'a> {
    space: &'a Space,
    home: (usize, &'a mut Buckets),
    others: Vec<(usize, &'a mut Buckets)>,
}

impl Reach<'_> {
    #[inline]
    fn shelf(&mut self, number: usize) -> &mut Buckets {
        if self.home.0 == number {
            return self.home.1;
        }
        let found = self.others.iter_mut().find(|(shelf, _)| *shelf == number);
        found.expect("every shelf of the call is locked").1
    }

    fn bucket(&mut self, place: &mut Place, subject: &Subject) -> Option<&mut Bucket> {
        let at = *place;
        let buckets = self.shelf(shelf_of(at.hash));
        place.index = at.index.or_else(|| buckets.find(at.hash, subject));
        place.index.map(|index| &mut buckets.all[index as usize])
    }

    /// Takes `units` of every limit that takes part; `None` if one of them is short, and nothing is taken. Rules are
    /// followed either way.
    pub(super) fn take(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &mut [Place],
        (now, is_watched): (Stamp, bool),
    ) -> Result<Option<Readings>, StoreError> {
        let mut left: SmallVec<[Option<(usize, Left)>; 4]> = SmallVec::new();
        let mut all_there = true;
        for (level, place) in levels.levels().iter().zip(&mut *places) {
            let mut bucket = self.bucket(place, &level.subject);
            if let Some(bucket) = &mut bucket
                && bucket.rows.len() >= ROWS_MAX
            {
                bucket.make_room(now);
            }
            for (likely, line, wanted) in taking_part(level, units) {
                let row = bucket.as_ref().and_then(|bucket| bucket.row(likely, &line.rule));
                let Some((row, bucket)) = row.zip(bucket.as_mut()) else {
                    if bucket.as_ref().is_some_and(|bucket| bucket.rows.len() >= ROWS_MAX) {
                        return Err(StoreError::Full { what: "limits of one subject", max: ROWS_MAX as u64 });
                    }
                    all_there &= wanted <= line.rule.shape().burst();
                    left.push(None);
                    continue;
                };
                let meter = &mut bucket.rows[row].meter;
                // Of those too that come after one that is short: a refusal tells of each by the rule that holds.
                meter.follow(&line.rule, levels.version(), now);
                let after = meter.ask(wanted, now);
                all_there &= after.is_some();
                left.push(after.map(|after| (row, after)));
            }
        }
        if !all_there {
            return Ok(None);
        }
        self.prepare(levels, |name| units[name].is_some(), places)?;
        Ok(Some(self.put(levels, units, places, &left, (now, is_watched))))
    }

    /// Takes what was asked for and found to be there.
    fn put(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &mut [Place],
        left: &[Option<(usize, Left)>],
        (now, is_watched): (Stamp, bool),
    ) -> Readings {
        let mut readings = Readings::with_capacity(if is_watched { left.len() } else { 0 });
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
                if is_watched {
                    let moved = 0_i64.saturating_add_unsigned(asked);
                    readings.push(Reading::new(number, line, moved, meter));
                }
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
                let buckets = self.shelf(shelf_of(at.hash));
                let found = buckets.find(at.hash, &level.subject);
                let make = || new_bucket(space, buckets, at.hash, &level.subject);
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
    ) -> Readings {
        let mut readings = Readings::new();
        self.shift_each(levels, deltas, places, now, |level, line, moved, row| {
            readings.push(Reading::new(level, line, moved, &row.meter));
        });
        readings
    }

    /// Settles a lease at `actual`: moves each limit that takes part, writes what was used of it to the ledger, at the
    /// time of the draw, and reads it if somebody watches. The buckets are [prepared](Self::prepare).
    pub(super) fn settle(
        &mut self,
        levels: &Levels,
        record: &Record,
        actual: &[Option<u64>],
        places: &mut [Place],
        (now, is_watched): (Stamp, bool),
    ) -> Readings {
        let mut readings = Readings::new();
        let change = |name: usize| record.change(name, actual[name]);
        self.shift_each(levels, change, places, now, |level, line, moved, row| {
            if let Some(units) = actual[line.name].or(record.held()[line.name]) {
                row.count(level, units, record.drawn_at());
            }
            if is_watched {
                readings.push(Reading::new(level, line, moved, &row.meter));
            }
        });
        readings
    }

    fn shift_each(
        &mut self,
        levels: &Levels,
        deltas: impl Fn(usize) -> Option<i64>,
        places: &mut [Place],
        now: Stamp,
        mut after: impl FnMut(usize, &Line, i64, &mut Row),
    ) {
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket(place, &level.subject) else { continue };
            for (likely, line) in level.limits.iter().enumerate() {
                let Some(moved) = deltas(line.name) else { continue };
                let row = bucket.row_or_new(likely, &line.rule, levels.version());
                row.meter.adjust(moved, now);
                after(number, line, moved, row);
            }
        }
    }

    /// Reads each limit that takes part.
    pub(super) fn read(&mut self, levels: &Levels, units: &[Option<u64>], places: &mut [Place]) -> Readings {
        let mut readings = Readings::new();
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let bucket = self.bucket(place, &level.subject);
            for (likely, line, _) in taking_part(level, units) {
                let found =
                    bucket.as_ref().and_then(|bucket| bucket.row(likely, &line.rule).zip(Some(bucket)));
                let reading = if let Some((row, bucket)) = found {
                    Reading::new(number, line, 0, &bucket.rows[row].meter)
                } else {
                    let full = Meter::new(Arc::clone(&line.rule), levels.version());
                    Reading::new(number, line, 0, &full)
                };
                readings.push(reading);
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
fn new_bucket(space: &Space, shelf: &mut Buckets, hash: u64, subject: &Subject) -> Result<u32, StoreError> {
    let index = match u32::try_from(shelf.all.len()) {
        Ok(index) if shelf.all.len() < SHELF_MAX => index,
        _ => return Err(StoreError::Full { what: "buckets", max: BUCKETS_MAX as u64 }),
    };
    shelf.all.push(Bucket { hash, subject: subject.clone(), rows: Vec::new() });
    let buckets = &shelf.all;
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
