//! The buckets of one step, checked and changed together, all or nothing.

use std::sync::Arc;

use smallvec::SmallVec;
use tidegate_core::limit::cascade::{Level, Levels, Line};
use tidegate_core::limit::lease::Record;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::bucket_table::{Bucket, BucketTable, Place, Places, ROWS_MAX, Row, table_of};
use crate::buckets::{Reading, Readings};
use crate::error::StoreError;

/// The state of a bucket after a take.
type Left = tidegate_core::bucket::Bucket<Stamp>;

/// The buckets of a step.
pub(crate) struct BucketSet<'a> {
    /// The index and table of the subject itself.
    pub(crate) home: (usize, &'a mut BucketTable),
    /// The other tables, of the levels above it.
    pub(crate) others: Vec<(usize, &'a mut BucketTable)>,
    /// Bounds and registers new buckets.
    pub(crate) capacity: &'a dyn Capacity,
}

/// Bounds and registers new buckets.
pub(crate) trait Capacity {
    /// Reserves capacity for one more bucket in a table. May evict others, except those at `places`.
    fn reserve(&self, buckets: &mut BucketTable, places: &[Place], now: Stamp) -> Result<(), StoreError>;

    /// Registers the first bucket of a subject.
    fn created(&self, subject: &Subject);
}

/// The error of a step whose bucket would have too many limits.
const TOO_MANY_ROWS: StoreError = StoreError::Full { what: "limits of one subject", max: ROWS_MAX as u64 };

impl BucketSet<'_> {
    #[inline]
    fn table(&mut self, hash: u64) -> &mut BucketTable {
        if self.others.is_empty() || self.home.0 == table_of(hash) {
            return self.home.1;
        }
        let found = self.others.iter_mut().find(|(table, _)| *table == table_of(hash));
        found.expect("every table of the call is locked").1
    }

    fn bucket(&mut self, place: &mut Place, subject: &Subject) -> Option<&mut Bucket> {
        let at = *place;
        let buckets = self.table(at.hash);
        place.index = at.index.or_else(|| buckets.find(at.hash, subject));
        place.index.map(|index| buckets.at_mut(index))
    }

    /// Finds the bucket without storing its index in the place, whose holder would release it.
    #[inline]
    fn bucket_at(&mut self, at: Place, subject: &Subject) -> Option<&mut Bucket> {
        let buckets = self.table(at.hash);
        let index = at.index.or_else(|| buckets.find(at.hash, subject));
        index.map(|index| buckets.at_mut(index))
    }

    /// Pins the buckets at these places, for a lease that has drawn from them.
    #[inline]
    pub(crate) fn hold(&mut self, places: &[Place]) {
        // Fast path: a single level.
        if let [Place { index: Some(index), .. }] = places {
            return self.home.1.hold(*index);
        }
        self.hold_all(places);
    }

    #[cold]
    fn hold_all(&mut self, places: &[Place]) {
        for place in places {
            if let Some(index) = place.index {
                self.table(place.hash).hold(index);
            }
        }
    }

    /// Pins the found buckets at places that a lease has not pinned yet.
    pub(crate) fn hold_found(&mut self, held: &mut [Place], found: &[Place]) {
        for (held, found) in held.iter_mut().zip(found).filter(|(held, _)| held.index.is_none()) {
            self.hold_all(std::slice::from_ref(found));
            *held = *found;
        }
    }

    /// Unpins the buckets of a lease.
    #[inline]
    pub(crate) fn release(&mut self, places: &[Place]) {
        if let [Place { index: Some(index), .. }] = places {
            return self.home.1.release(*index);
        }
        self.release_all(places);
    }

    #[cold]
    fn release_all(&mut self, places: &[Place]) {
        for place in places {
            if let Some(index) = place.index {
                self.table(place.hash).release(index);
            }
        }
    }

    /// Takes `units` from all limits that take part, or returns `None` if one of them is short. Newer rules
    /// are adopted either way.
    pub(crate) fn take(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &mut [Place],
        (now, is_watched): (Stamp, bool),
    ) -> Result<Option<Readings>, StoreError> {
        let mut left: SmallVec<[Option<(usize, Left)>; 4]> = SmallVec::new();
        let mut all_available = true;
        for (level, place) in levels.levels().iter().zip(&mut *places) {
            let mut bucket = self.bucket(place, &level.subject);
            if let Some(bucket) = &mut bucket
                && bucket.rows.len() >= ROWS_MAX
            {
                bucket.drop_full_call_limits(now);
            }
            for (likely, line, wanted) in taking_part(level, units) {
                let row = bucket.as_ref().and_then(|bucket| bucket.row(likely, &line.rule));
                let Some((row, bucket)) = row.zip(bucket.as_mut()) else {
                    if bucket.as_ref().is_some_and(|bucket| bucket.rows.len() >= ROWS_MAX) {
                        return Err(TOO_MANY_ROWS);
                    }
                    all_available &= wanted <= line.rule.shape().burst();
                    left.push(None);
                    continue;
                };
                let meter = &mut bucket.rows[row].meter;
                // Also after a short limit: a refusal reports each limit by its current rule.
                meter.follow(&line.rule, levels.version(), now);
                let after = meter.ask(wanted, now);
                all_available &= after.is_some();
                left.push(after.map(|after| (row, after)));
            }
        }
        if !all_available {
            return Ok(None);
        }
        self.prepare(levels, |name| units[name].is_some(), places, now)?;
        Ok(Some(self.put(levels, units, places, &left, (now, is_watched))))
    }

    /// Takes the requested units, which are available.
    fn put(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &[Place],
        left: &[Option<(usize, Left)>],
        (now, is_watched): (Stamp, bool),
    ) -> Readings {
        let mut readings = Readings::with_capacity(if is_watched { left.len() } else { 0 });
        let mut left = left.iter();
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket_at(*place, &level.subject) else { continue };
            for (likely, line, units_taken) in taking_part(level, units) {
                let meter = if let Some((row, after)) = left.next().copied().flatten() {
                    let meter = &mut bucket.rows[row].meter;
                    meter.put(after, units_taken);
                    meter
                } else {
                    let meter = &mut bucket.row_or_new(likely, &line.rule, levels.version()).meter;
                    meter.take(units_taken, now);
                    meter
                };
                if is_watched {
                    let moved = 0_i64.saturating_add_unsigned(units_taken);
                    readings.push(Reading::new(number, line, moved, meter));
                }
            }
        }
        readings
    }

    /// Creates the missing buckets of a step. After this, the step cannot fail.
    pub(crate) fn prepare(
        &mut self,
        levels: &Levels,
        takes_part: impl Fn(usize) -> bool,
        places: &mut [Place],
        now: Stamp,
    ) -> Result<(), StoreError> {
        for (number, level) in levels.levels().iter().enumerate() {
            if places[number].index.is_none() && level.limits.iter().any(|line| takes_part(line.name)) {
                places[number].index = Some(self.find_or_make(&level.subject, (number, places), now)?);
            }
        }
        Ok(())
    }

    /// Creates the missing buckets of a lease's step, and pins them.
    pub(crate) fn prepare_held(
        &mut self,
        levels: &Levels,
        takes_part: impl Fn(usize) -> bool,
        places: &mut [Place],
        now: Stamp,
    ) -> Result<(), StoreError> {
        // Fast path: all are pinned.
        if places.iter().all(|place| place.index.is_some()) {
            return Ok(());
        }
        let mut found = Places::from_slice(places);
        self.prepare(levels, takes_part, &mut found, now)?;
        self.hold_found(places, &found);
        Ok(())
    }

    #[cold]
    fn find_or_make(
        &mut self,
        subject: &Subject,
        (number, places): (usize, &[Place]),
        now: Stamp,
    ) -> Result<u32, StoreError> {
        let (capacity, hash) = (self.capacity, places[number].hash);
        let buckets = self.table(hash);
        if let Some(index) = buckets.find(hash, subject) {
            return Ok(index);
        }
        capacity.reserve(buckets, places, now)?;
        capacity.created(subject);
        Ok(buckets.push(hash, subject.clone(), Vec::new()))
    }

    /// Moves each limit that takes part by its delta, up to its debt bound, and reads it. Requires
    /// [`prepare`](Self::prepare).
    pub(crate) fn shift(
        &mut self,
        levels: &Levels,
        record: &mut Record,
        deltas: &[Option<i64>],
        places: &[Place],
        now: Stamp,
    ) -> Readings {
        let mut readings = Readings::new();
        self.shift_each(
            levels,
            record,
            |_, name| deltas[name],
            places,
            now,
            |_, level, line, moved, row| {
                readings.push(Reading::new(level, line, moved, &row.meter));
            },
        );
        readings
    }

    /// Settles a lease at `actual`: moves each limit that takes part, adds its usage to the ledger at the
    /// time of the draw, and reads it if the caller wants it. Requires [`prepare`](Self::prepare).
    pub(crate) fn settle(
        &mut self,
        levels: &Levels,
        record: &mut Record,
        actual: &[Option<u64>],
        places: &[Place],
        (now, is_watched): (Stamp, bool),
    ) -> Readings {
        let mut readings = Readings::new();
        let change = |record: &Record, name: usize| record.change(name, actual[name]);
        self.shift_each(levels, record, change, places, now, |record, level, line, moved, row| {
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
        record: &mut Record,
        deltas: impl Fn(&Record, usize) -> Option<i64>,
        places: &[Place],
        now: Stamp,
        mut after: impl FnMut(&Record, usize, &Line, i64, &mut Row),
    ) {
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket_at(*place, &level.subject) else { continue };
            for (likely, line) in level.limits.iter().enumerate() {
                let Some(delta) = deltas(record, line.name) else { continue };
                let row = bucket.row_or_new(likely, &line.rule, levels.version());
                // Returning units needs no bound, and is the most frequent change.
                let bound = line.debt_max.filter(|_| delta > 0);
                let capacity = bound.map(|debt_max| row.meter.room(debt_max, now));
                let moved = record.bucket_delta(number, line.name, delta, capacity);
                row.meter.adjust(moved, now);
                after(record, number, line, moved, row);
            }
        }
    }

    /// Sets each limit that takes part to its units, and reads it, unless a bucket would have too many.
    /// Requires [`prepare`](Self::prepare).
    pub(crate) fn set(
        &mut self,
        levels: &Levels,
        units: &[Option<u64>],
        places: &[Place],
        now: Stamp,
    ) -> Result<Readings, StoreError> {
        for (level, place) in levels.levels().iter().zip(places) {
            let Some(bucket) = self.bucket_at(*place, &level.subject) else { continue };
            if bucket.rows.len() >= ROWS_MAX {
                bucket.drop_full_call_limits(now);
            }
            let is_new = |(likely, line, _): &(usize, &Line, u64)| bucket.row(*likely, &line.rule).is_none();
            if bucket.rows.len() + taking_part(level, units).filter(is_new).count() > ROWS_MAX {
                return Err(TOO_MANY_ROWS);
            }
        }
        let mut readings = Readings::new();
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket_at(*place, &level.subject) else { continue };
            for (likely, line, units) in taking_part(level, units) {
                let meter = &mut bucket.row_or_new(likely, &line.rule, levels.version()).meter;
                meter.follow(&line.rule, levels.version(), now);
                meter.set(units, now);
                readings.push(Reading::new(number, line, 0, meter));
            }
        }
        Ok(readings)
    }

    /// Reads each limit that takes part.
    pub(crate) fn read(&mut self, levels: &Levels, units: &[Option<u64>], places: &[Place]) -> Readings {
        let mut readings = Readings::new();
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let bucket = self.bucket_at(*place, &level.subject);
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

    /// Adds usage to the ledger at the time of the draw. Requires [`prepare`](Self::prepare).
    pub(crate) fn count(&mut self, levels: &Levels, used: &[Option<u64>], places: &[Place], drawn_at: Stamp) {
        for (number, (level, place)) in levels.levels().iter().zip(places).enumerate() {
            let Some(bucket) = self.bucket_at(*place, &level.subject) else { continue };
            for (likely, line, units) in taking_part(level, used) {
                bucket.row_or_new(likely, &line.rule, levels.version()).count(number, units, drawn_at);
            }
        }
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
