//! The buckets that one call can reach: asked and taken from together, all or nothing.

use std::sync::Arc;

use smallvec::SmallVec;
use tidegate_core::limit::cascade::{Level, Levels, Line};
use tidegate_core::limit::lease::Record;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::shelf::{Bucket, Place, ROWS_MAX, Row, Shelf, shelf_of};
use crate::buckets::{Reading, Readings};
use crate::error::StoreError;

/// What a limit has left once something is taken.
type Left = tidegate_core::bucket::Bucket<Stamp>;

/// The buckets that a call can reach.
pub(crate) struct Reach<'a> {
    /// The shelf of the subject itself, and its number.
    pub(crate) home: (usize, &'a mut Shelf),
    /// Those of the levels above it, where they are others.
    pub(crate) others: Vec<(usize, &'a mut Shelf)>,
    /// Who has to know of new buckets.
    pub(crate) room: &'a dyn Room,
}

/// Where new buckets go.
pub(crate) trait Room {
    /// Whether a shelf of so many buckets may have one more.
    fn has_room(&self, buckets: usize) -> Result<(), StoreError>;

    /// A subject has a bucket that had none.
    fn made(&self, subject: &Subject);
}

impl Reach<'_> {
    #[inline]
    fn shelf(&mut self, hash: u64) -> &mut Shelf {
        if self.others.is_empty() || self.home.0 == shelf_of(hash) {
            return self.home.1;
        }
        let found = self.others.iter_mut().find(|(shelf, _)| *shelf == shelf_of(hash));
        found.expect("every shelf of the call is locked").1
    }

    fn bucket(&mut self, place: &mut Place, subject: &Subject) -> Option<&mut Bucket> {
        let at = *place;
        let buckets = self.shelf(at.hash);
        place.index = at.index.or_else(|| buckets.find(at.hash, subject));
        place.index.map(|index| buckets.at_mut(index))
    }

    /// Takes `units` of every limit that takes part; `None` if one of them is short, and nothing is taken. Rules are
    /// followed either way.
    pub(crate) fn take(
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
    pub(crate) fn prepare(
        &mut self,
        levels: &Levels,
        takes_part: impl Fn(usize) -> bool,
        places: &mut [Place],
    ) -> Result<(), StoreError> {
        for (level, place) in levels.levels().iter().zip(places) {
            if place.index.is_none() && level.limits.iter().any(|line| takes_part(line.name)) {
                place.index = Some(self.find_or_make(place.hash, &level.subject)?);
            }
        }
        Ok(())
    }

    fn find_or_make(&mut self, hash: u64, subject: &Subject) -> Result<u32, StoreError> {
        let room = self.room;
        let buckets = self.shelf(hash);
        if let Some(index) = buckets.find(hash, subject) {
            return Ok(index);
        }
        room.has_room(buckets.len())?;
        room.made(subject);
        Ok(buckets.push(hash, subject.clone(), Vec::new()))
    }

    /// Moves each limit that takes part by its delta, and reads it. The buckets are [prepared](Self::prepare).
    pub(crate) fn shift(
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
    pub(crate) fn settle(
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
    pub(crate) fn read(&mut self, levels: &Levels, units: &[Option<u64>], places: &mut [Place]) -> Readings {
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
    pub(crate) fn count(
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

/// The limits of a level that `units` name.
fn taking_part<'a>(
    level: &'a Level,
    units: &'a [Option<u64>],
) -> impl Iterator<Item = (usize, &'a Line, u64)> {
    let lines = level.limits.iter().enumerate();
    lines.filter_map(|(place, line)| units[line.name].map(|units| (place, line, units)))
}
