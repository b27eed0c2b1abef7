//! Grants or refuses a draw (an acquire) on the memory store and SQLite, and the other steps of a lease:
//! extend, adjust, renew, settle, cancel, and spend, which draws and settles at once.
//!
//! Each is a function of the lease table, the buckets of the step, and one time.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{BUCKETS_MAX, Deltas, Levels, Units};
use tidegate_core::limit::lease::{EndRecord, Ending, LeaseId, Record, Turn};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::bucket_set::BucketSet;
use super::bucket_table::{Place, Places};
use crate::buckets::{Movement, Readings, Renewal, Terms};
use crate::engine::{Change, Step, StepResult, TakeMode};
use crate::error::StoreError;
use crate::store::SweepReport;

/// An open lease and the places of its buckets.
pub(crate) struct Open {
    pub(crate) lease: LeaseId,
    pub(crate) record: Record,
    pub(crate) levels: Arc<Levels>,
    pub(crate) places: Places,
}

/// The state of a lease in a table.
pub(crate) enum KnownLease<'a> {
    Open(&'a Open),
    Ended(EndRecord),
    Unknown,
}

/// The leases of a store.
pub(crate) trait LeaseTable {
    /// The state of a lease in a table.
    fn find(&self, lease: LeaseId) -> KnownLease<'_>;

    /// The open lease, mutably, or an error if it is not open.
    fn open_mut(&mut self, lease: LeaseId) -> Result<&mut Open, StoreError>;

    /// Checks that an unknown lease may draw. One whose record may have been dropped may not.
    fn may_draw(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// Inserts a lease that has drawn.
    fn insert(&mut self, open: Open);

    /// Records the end of a lease, and returns the number of old records dropped.
    fn end(&mut self, lease: LeaseId, ended: EndRecord) -> u64;

    /// The open lease, or an error if it is not open.
    fn open(&self, lease: LeaseId) -> Result<&Open, StoreError> {
        match self.find(lease) {
            KnownLease::Open(open) => Ok(open),
            KnownLease::Ended(_) | KnownLease::Unknown => Err(self.not_open(lease)),
        }
    }

    /// The error for a lease that is not open.
    #[cold]
    fn not_open(&self, lease: LeaseId) -> StoreError {
        match self.find(lease) {
            KnownLease::Ended(ended) => StoreError::Ended { lease, how: ended.how },
            KnownLease::Open(_) | KnownLease::Unknown => StoreError::NoLease { lease },
        }
    }
}

/// The state that a step works on: leases, buckets, the places of its levels, the time, and the offset of the
/// time to the wall clock.
pub(crate) struct StepContext<'a, B> {
    pub(crate) leases: &'a mut B,
    pub(crate) buckets: BucketSet<'a>,
    pub(crate) places: &'a mut [Place],
    pub(crate) now: Stamp,
    pub(crate) offset: Duration,
}

impl<B: LeaseTable> StepContext<'_, B> {
    /// Applies a step of a lease.
    #[inline]
    pub(crate) fn apply(&mut self, step: &Step<'_>) -> Result<StepResult, StoreError> {
        match step.change {
            Change::Take(units, TakeMode::Open(terms)) => self.open(step, units, terms),
            Change::Take(units, TakeMode::Spend) => self.spend(step, units),
            Change::Take(units, TakeMode::Extend) => self.extend(step, units),
            Change::Shift(deltas) => self.adjust(step, deltas),
            Change::Renew(span) => self.renew(step, span),
            Change::End(Some(actual)) => self.settle(step, actual),
            Change::End(None) => self.cancel(step),
            Change::Set(units) => self.set(step, units),
        }
    }

    /// Takes units from every level, or nothing, and opens a lease.
    fn open(&mut self, step: &Step<'_>, units: &Units, terms: Terms) -> Result<StepResult, StoreError> {
        let Self { leases, buckets, places, now, offset } = self;
        let (now, wall) = (*now, *now - *offset);
        let lease = step.lease;
        match leases.find(lease) {
            KnownLease::Unknown => leases.may_draw(lease)?,
            KnownLease::Ended(ended) => return Err(StoreError::Ended { lease, how: ended.how }),
            KnownLease::Open(open) => {
                same_levels(open, step.levels)?;
                return Ok(StepResult::Granted(repeated(buckets, open, step.levels)));
            }
        }
        let answer = take(buckets, step.levels, units, places, (now, step.is_watched))?;
        if matches!(answer, StepResult::Granted(_)) {
            let deadline = now + terms.deadline;
            let units = Units::from_slice(units);
            // Usage is counted by the wall clock.
            let record = Record::restored(0, units, wall, now, deadline, terms.on_expiry);
            buckets.hold(places);
            let (levels, places) = (Arc::clone(step.levels), Places::from_slice(places));
            leases.insert(Open { lease, record, levels, places });
        }
        Ok(answer)
    }

    /// Sets the units available.
    fn set(&mut self, step: &Step<'_>, units: &Units) -> Result<StepResult, StoreError> {
        if let Some(repeated) = self.repeat_of_whole(step, units)? {
            return Ok(repeated);
        }
        let Self { leases, buckets, places, now, .. } = self;
        let (now, levels) = (*now, step.levels);
        fits(levels, units.len())?;
        buckets.prepare(levels, |name| units[name].is_some(), places, now)?;
        let readings = buckets.set(levels, units, places, now)?;
        let digest = levels.digest(units);
        leases.end(step.lease, EndRecord { how: Ending::Settled, step: 0, at: now, digest });
        Ok(StepResult::Granted(Movement { at: now, is_repeat: false, readings }))
    }

    /// The result of a step that begins and ends a lease, if it is a repeat, or an error if the lease is known.
    fn repeat_of_whole(&self, step: &Step<'_>, units: &Units) -> Result<Option<StepResult>, StoreError> {
        let lease = step.lease;
        match self.leases.find(lease) {
            KnownLease::Unknown => self.leases.may_draw(lease).map(|()| None),
            KnownLease::Ended(ended) if ended.turn_settle(0, step.levels.digest(units)) == Turn::Repeat => {
                Ok(Some(StepResult::Granted(repeat(ended.at))))
            }
            KnownLease::Ended(ended) => Err(StoreError::Ended { lease, how: ended.how }),
            KnownLease::Open(open) => Err(StoreError::Late { lease, step: 0, done: open.record.step() }),
        }
    }

    /// Draws and settles at once.
    fn spend(&mut self, step: &Step<'_>, units: &Units) -> Result<StepResult, StoreError> {
        if let Some(repeated) = self.repeat_of_whole(step, units)? {
            return Ok(repeated);
        }
        let Self { leases, buckets, places, now, offset } = self;
        let (now, wall) = (*now, *now - *offset);
        let (lease, levels) = (step.lease, step.levels);
        let answer = take(buckets, levels, units, places, (now, step.is_watched))?;
        if matches!(answer, StepResult::Granted(_)) {
            buckets.count(levels, units, places, wall);
            let digest = levels.digest(units);
            leases.end(lease, EndRecord { how: Ending::Settled, step: 0, at: now, digest });
        }
        Ok(answer)
    }

    /// Takes more units for a lease, or nothing.
    fn extend(&mut self, step: &Step<'_>, units: &Units) -> Result<StepResult, StoreError> {
        let Self { leases, buckets, now, .. } = self;
        let (now, lease) = (*now, step.lease);
        let open = leases.open(lease)?;
        if open.record.is_due(now) {
            return self.end_due(lease, step.levels);
        }
        if turn(open, step.number, step.levels)? == Turn::Repeat {
            return Ok(StepResult::Granted(repeated(buckets, leases.open(lease)?, step.levels)));
        }
        let open = leases.open_mut(lease)?;
        let mut places = open.places.clone();
        let mut answer = take(buckets, &open.levels, units, &mut places, (now, true))?;
        buckets.hold_found(&mut open.places, &places);
        if matches!(answer, StepResult::Granted(_)) {
            open.record.extend(step.number, units, now);
        }
        if let StepResult::Granted(moved) | StepResult::Refused(moved) = &mut answer {
            attach_rules(&mut moved.readings, &open.levels, step.levels);
        }
        Ok(answer)
    }

    /// Takes or returns units. Never refused.
    fn adjust(&mut self, step: &Step<'_>, deltas: &Deltas) -> Result<StepResult, StoreError> {
        let Self { leases, buckets, now, .. } = self;
        let (now, lease) = (*now, step.lease);
        let open = leases.open(lease)?;
        if open.record.is_due(now) {
            return self.end_due(lease, step.levels);
        }
        if turn(open, step.number, step.levels)? == Turn::Repeat {
            return Ok(StepResult::Granted(repeated(buckets, leases.open(lease)?, step.levels)));
        }
        let Open { record, levels, places, .. } = leases.open_mut(lease)?;
        fits(levels, deltas.len())?;
        buckets.prepare_held(levels, |name| deltas[name].is_some(), places, now)?;
        let changes = record.adjust(step.number, deltas, now);
        let mut readings = buckets.shift(levels, record, &changes, places, now);
        attach_rules(&mut readings, levels, step.levels);
        Ok(StepResult::Granted(Movement { at: now, is_repeat: false, readings }))
    }

    /// Extends the deadline of a lease.
    fn renew(&mut self, step: &Step<'_>, span: Duration) -> Result<StepResult, StoreError> {
        let (lease, now) = (step.lease, self.now);
        let open = self.leases.open(lease)?;
        if open.record.is_due(now) {
            return self.end_due(lease, step.levels);
        }
        let is_repeat = turn(open, step.number, step.levels)? == Turn::Repeat;
        if !is_repeat {
            self.leases.open_mut(lease)?.record.renew(step.number, now + span, now);
        }
        let record = &self.leases.open(lease)?.record;
        Ok(StepResult::Renewed(Renewal { at: record.stepped_at(), is_repeat, deadline: record.deadline() }))
    }

    /// Ends a lease at its actual usage.
    fn settle(&mut self, step: &Step<'_>, actual: &Units) -> Result<StepResult, StoreError> {
        let Self { leases, buckets, now, .. } = self;
        let (now, lease, number) = (*now, step.lease, step.number);
        let open = match leases.open_mut(lease) {
            Ok(open) => open,
            Err(error) => {
                return match leases.find(lease) {
                    KnownLease::Ended(ended)
                        if ended.turn_settle(number, step.levels.digest(actual)) == Turn::Repeat =>
                    {
                        Ok(StepResult::Granted(repeat(ended.at)))
                    }
                    _ => Err(error),
                };
            }
        };
        if open.record.is_due(now) {
            return self.end_due(lease, step.levels);
        }
        last_turn(open, number, step.levels)?;
        let Open { record, levels, places, .. } = open;
        fits(levels, actual.len())?;
        buckets.prepare_held(levels, |name| actual[name].is_some(), places, now)?;
        let mut readings = buckets.settle(levels, record, actual, places, (now, step.is_watched));
        attach_rules(&mut readings, levels, step.levels);
        let digest = levels.digest(actual);
        buckets.release(places);
        leases.end(lease, EndRecord { how: Ending::Settled, step: number, at: now, digest });
        Ok(StepResult::Granted(Movement { at: now, is_repeat: false, readings }))
    }

    /// Ends a lease and returns all of its units.
    fn cancel(&mut self, step: &Step<'_>) -> Result<StepResult, StoreError> {
        let Self { leases, buckets, now, .. } = self;
        let (now, lease) = (*now, step.lease);
        let readings = match leases.find(lease) {
            KnownLease::Ended(ended) if ended.turn_cancel() == Turn::Repeat => {
                return Ok(StepResult::Granted(repeat(ended.at)));
            }
            KnownLease::Ended(ended) => return Err(StoreError::Ended { lease, how: ended.how }),
            // The draw may still arrive: a tombstone refuses it.
            KnownLease::Unknown => Readings::new(),
            KnownLease::Open(open) if open.record.is_due(now) => return self.end_due(lease, step.levels),
            KnownLease::Open(open) => {
                last_turn(open, step.number, step.levels)?;
                let Open { record, levels, places, .. } = leases.open_mut(lease)?;
                let deltas = returned(record);
                let mut readings = buckets.shift(levels, record, &deltas, places, now);
                attach_rules(&mut readings, levels, step.levels);
                buckets.release(places);
                readings
            }
        };
        leases.end(lease, EndRecord { how: Ending::Cancelled, step: step.number, at: now, digest: 0 });
        Ok(StepResult::Granted(Movement { at: now, is_repeat: false, readings }))
    }

    /// Ends a lease whose step arrived after its deadline. The error is the same as after a sweep.
    #[cold]
    fn end_due<T>(&mut self, lease: LeaseId, levels: &Arc<Levels>) -> Result<T, StoreError> {
        same_levels(self.leases.open(lease)?, levels)?;
        self.expire(lease)?;
        Err(StoreError::Ended { lease, how: Ending::Expired })
    }

    /// Ends a lease that is past its deadline, unless another call was first.
    pub(crate) fn expire(&mut self, lease: LeaseId) -> Result<SweepReport, StoreError> {
        let Self { leases, buckets, now, .. } = self;
        let now = *now;
        let mut swept = SweepReport::default();
        let Open { record, levels, places, .. } = leases.open_mut(lease)?;
        match record.on_expiry() {
            OnExpiry::Settle => {
                swept.settled = 1;
                buckets.count(levels, record.held(), places, record.drawn_at());
            }
            OnExpiry::Return => {
                swept.returned = 1;
                let deltas = returned(record);
                buckets.shift(levels, record, &deltas, places, now);
            }
        }
        buckets.release(places);
        let ended = EndRecord { how: Ending::Expired, step: record.step(), at: now, digest: 0 };
        swept.forgotten = leases.end(lease, ended);
        Ok(swept)
    }
}

/// Takes `units` from every limit that takes part, or nothing.
fn take(
    buckets: &mut BucketSet<'_>,
    levels: &Levels,
    units: &[Option<u64>],
    places: &mut [Place],
    (now, is_watched): (Stamp, bool),
) -> Result<StepResult, StoreError> {
    fits(levels, units.len())?;
    if let Some(readings) = buckets.take(levels, units, places, (now, is_watched))? {
        return Ok(StepResult::Granted(Movement { at: now, is_repeat: false, readings }));
    }
    let readings = buckets.read(levels, units, places);
    Ok(StepResult::Refused(Movement { at: now, is_repeat: false, readings }))
}

/// Checks the number of buckets of a draw, and that they are distinct.
pub(crate) fn check_levels(levels: &Levels) -> Result<(), StoreError> {
    let levels = levels.levels();
    if levels.len() > BUCKETS_MAX {
        let what = format!("{} buckets, more than {BUCKETS_MAX}", levels.len());
        return Err(StoreError::Invalid { what });
    }
    for (number, level) in levels.iter().enumerate().skip(1) {
        if levels[..number].iter().any(|before| before.subject == level.subject) {
            return Err(StoreError::Invalid {
                what: format!("the bucket `{}` is named twice", level.subject),
            });
        }
    }
    Ok(())
}

/// Checks that there is one entry for each limit name.
pub(crate) fn fits(levels: &Levels, count: usize) -> Result<(), StoreError> {
    let names = levels.names().len();
    if count == names {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("{count} numbers for {names} limits") })
}

fn repeat(at: Stamp) -> Movement {
    Movement { at, is_repeat: true, readings: Readings::new() }
}

/// The result of a repeated step: its first time, with the current limits.
fn repeated(buckets: &mut BucketSet<'_>, open: &Open, requested: &Arc<Levels>) -> Movement {
    let mut readings = buckets.read(&open.levels, open.record.held(), &open.places);
    attach_rules(&mut readings, &open.levels, requested);
    Movement { at: open.record.stepped_at(), is_repeat: true, readings }
}

/// Attaches the rules to readings if the caller's levels are not those that the lease drew from.
pub(crate) fn attach_rules(readings: &mut Readings, drawn: &Arc<Levels>, requested: &Arc<Levels>) {
    if !Arc::ptr_eq(drawn, requested) {
        *readings = readings.drain(..).map(|reading| reading.for_others(drawn)).collect();
    }
}

fn turn(open: &Open, step: u32, levels: &Arc<Levels>) -> Result<Turn, StoreError> {
    same_levels(open, levels)?;
    match open.record.turn(step) {
        Turn::Late => Err(StoreError::Late { lease: open.lease, step, done: open.record.step() }),
        turn => Ok(turn),
    }
}

/// An ending needs a new step number: the number of an earlier step is late.
fn last_turn(open: &Open, step: u32, levels: &Arc<Levels>) -> Result<(), StoreError> {
    same_levels(open, levels)?;
    match open.record.turn(step) {
        Turn::Apply => Ok(()),
        Turn::Repeat | Turn::Late => {
            Err(StoreError::Late { lease: open.lease, step, done: open.record.step() })
        }
    }
}

fn same_levels(open: &Open, levels: &Arc<Levels>) -> Result<(), StoreError> {
    drew_from(open.lease, &open.levels, levels)
}

/// Checks that a step names the buckets that its lease drew from.
pub(crate) fn drew_from(lease: LeaseId, drawn: &Arc<Levels>, levels: &Arc<Levels>) -> Result<(), StoreError> {
    let is_same = |levels: &Levels| {
        let subjects = levels.levels().iter().map(|level| &level.subject);
        levels.names() == drawn.names() && subjects.eq(drawn.levels().iter().map(|level| &level.subject))
    };
    if Arc::ptr_eq(drawn, levels) || is_same(levels) {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("the lease {lease} drew from other levels") })
}

/// The changes that return all units held.
fn returned(record: &Record) -> Deltas {
    let back = |units: &Option<u64>| units.map(|units| 0_i64.saturating_sub_unsigned(units));
    record.held().iter().map(back).collect()
}
