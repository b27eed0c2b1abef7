//! The steps of a lease: draw, extend, adjust, settle, cancel, and spend, which is the first and the last at once.
//!
//! Each is a function of the leases that are known, the buckets in reach, and one time.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, RENEWAL_MAX, Record, Turn};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::reach::Reach;
use super::shelf::{Place, Places};
use crate::buckets::{Adjust, Cancel, Draw, Drawn, Extend, Moved, Readings, Renew, Renewed, Settle};
use crate::error::StoreError;
use crate::store::Swept;

/// An open lease, and where its buckets are.
pub(crate) struct Open {
    pub(crate) lease: LeaseId,
    pub(crate) record: Record,
    pub(crate) levels: Arc<Levels>,
    pub(crate) places: Places,
}

/// What is known of a lease.
pub(crate) enum Known<'a> {
    Open(&'a Open),
    Ended(Ended),
    Unknown,
}

/// The leases that a store knows.
pub(crate) trait Book {
    /// What is known of a lease.
    fn find(&self, lease: LeaseId) -> Known<'_>;

    /// The open lease, to be changed in its place, or why there is none.
    fn open_mut(&mut self, lease: LeaseId) -> Result<&mut Open, StoreError>;

    /// Whether an unknown lease may draw: one that may have ended and been forgotten may not.
    fn may_draw(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// Remembers a lease that has drawn.
    fn insert(&mut self, open: Open);

    /// Remembers that a lease has ended, and answers how many others were forgotten.
    fn end(&mut self, lease: LeaseId, ended: Ended) -> u64;

    /// The open lease, or why there is none.
    fn open(&self, lease: LeaseId) -> Result<&Open, StoreError> {
        match self.find(lease) {
            Known::Open(open) => Ok(open),
            Known::Ended(_) | Known::Unknown => Err(self.not_open(lease)),
        }
    }

    /// Why a lease that is not open is not.
    #[cold]
    fn not_open(&self, lease: LeaseId) -> StoreError {
        match self.find(lease) {
            Known::Ended(ended) => StoreError::Ended { lease, how: ended.how },
            Known::Open(_) | Known::Unknown => StoreError::NoLease { lease },
        }
    }
}

/// What one call works on: the leases, the buckets in reach, the places of its levels, the time, and how far that is ahead of
/// the wall clock.
pub(crate) struct Desk<'a, B> {
    pub(crate) leases: &'a mut B,
    pub(crate) reach: Reach<'a>,
    pub(crate) places: &'a mut [Place],
    pub(crate) now: Stamp,
    pub(crate) offset: Duration,
}

impl<B: Book> Desk<'_, B> {
    /// Takes what is asked of every level, or nothing.
    pub(crate) fn draw(&mut self, draw: &Draw) -> Result<Drawn, StoreError> {
        let Self { leases, reach, places, now, offset } = self;
        let (now, wall) = (*now, *now - *offset);
        match leases.find(draw.lease) {
            Known::Unknown => leases.may_draw(draw.lease)?,
            Known::Ended(ended) => return Err(StoreError::Ended { lease: draw.lease, how: ended.how }),
            Known::Open(open) => {
                same_levels(open, &draw.levels)?;
                return Ok(Drawn::Granted(repeated(reach, open, &draw.levels)));
            }
        }
        let answer = take(reach, &draw.levels, &draw.units, places, (now, draw.is_watched))?;
        if matches!(answer, Drawn::Granted(_)) {
            let deadline = now + draw.terms.deadline;
            let units = Units::from_slice(&draw.units);
            // Usage is booked at the wall clock.
            let record = Record::restored(0, units, wall, now, deadline, draw.terms.on_expiry);
            reach.hold(places);
            let (levels, places) = (Arc::clone(&draw.levels), Places::from_slice(places));
            leases.insert(Open { lease: draw.lease, record, levels, places });
        }
        Ok(answer)
    }

    /// Draws and settles at once.
    pub(crate) fn spend(&mut self, draw: &Draw) -> Result<Drawn, StoreError> {
        let Self { leases, reach, places, now, offset } = self;
        let (now, wall) = (*now, *now - *offset);
        match leases.find(draw.lease) {
            Known::Unknown => leases.may_draw(draw.lease)?,
            Known::Ended(ended) if ended.turn_settle(0, draw.levels.digest(&draw.units)) == Turn::Repeat => {
                return Ok(Drawn::Granted(repeat(ended.at)));
            }
            Known::Ended(ended) => return Err(StoreError::Ended { lease: draw.lease, how: ended.how }),
            Known::Open(open) => {
                return Err(StoreError::Late { lease: draw.lease, step: 0, done: open.record.step() });
            }
        }
        let answer = take(reach, &draw.levels, &draw.units, places, (now, draw.is_watched))?;
        if matches!(answer, Drawn::Granted(_)) {
            reach.count(&draw.levels, &draw.units, places, wall);
            let digest = draw.levels.digest(&draw.units);
            leases.end(draw.lease, Ended { how: Ending::Settled, step: 0, at: now, digest });
        }
        Ok(answer)
    }

    /// Takes more for a lease, or nothing.
    pub(crate) fn extend(&mut self, extend: &Extend) -> Result<Drawn, StoreError> {
        let Self { leases, reach, now, .. } = self;
        let now = *now;
        let open = leases.open(extend.lease)?;
        if open.record.is_due(now) {
            return self.end_due(extend.lease, &extend.levels);
        }
        if turn(open, extend.step, &extend.levels)? == Turn::Repeat {
            return Ok(Drawn::Granted(repeated(reach, leases.open(extend.lease)?, &extend.levels)));
        }
        let open = leases.open_mut(extend.lease)?;
        let mut places = open.places.clone();
        let mut answer = take(reach, &open.levels, &extend.units, &mut places, (now, true))?;
        reach.hold_found(&mut open.places, &places);
        if matches!(answer, Drawn::Granted(_)) {
            open.record.extend(extend.step, &extend.units, now);
        }
        let (Drawn::Granted(moved) | Drawn::Refused(moved)) = &mut answer;
        tell(&mut moved.readings, &open.levels, &extend.levels);
        Ok(answer)
    }

    /// Takes or gives back, and is never refused.
    pub(crate) fn adjust(&mut self, adjust: &Adjust) -> Result<Moved, StoreError> {
        let Self { leases, reach, now, .. } = self;
        let now = *now;
        let open = leases.open(adjust.lease)?;
        if open.record.is_due(now) {
            return self.end_due(adjust.lease, &adjust.levels);
        }
        if turn(open, adjust.step, &adjust.levels)? == Turn::Repeat {
            return Ok(repeated(reach, leases.open(adjust.lease)?, &adjust.levels));
        }
        let Open { record, levels, places, .. } = leases.open_mut(adjust.lease)?;
        fits(levels, adjust.deltas.len())?;
        reach.prepare_held(levels, |name| adjust.deltas[name].is_some(), places, now)?;
        let changes = record.adjust(adjust.step, &adjust.deltas, now);
        let mut readings = reach.shift(levels, |name| changes[name], places, now);
        tell(&mut readings, levels, &adjust.levels);
        Ok(Moved { at: now, is_repeat: false, readings })
    }

    /// Gives a lease more time.
    pub(crate) fn renew(&mut self, renew: &Renew) -> Result<Renewed, StoreError> {
        let (lease, step, now) = (renew.lease, renew.step, self.now);
        check_renewal(renew)?;
        let open = self.leases.open(lease)?;
        if open.record.is_due(now) {
            return self.end_due(lease, &renew.levels);
        }
        let is_repeat = turn(open, step, &renew.levels)? == Turn::Repeat;
        if !is_repeat {
            self.leases.open_mut(lease)?.record.renew(step, now + renew.span, now);
        }
        let record = &self.leases.open(lease)?.record;
        Ok(Renewed { at: record.stepped_at(), is_repeat, deadline: record.deadline() })
    }

    /// Ends a lease at what it used.
    pub(crate) fn settle(&mut self, settle: &Settle) -> Result<Moved, StoreError> {
        let Self { leases, reach, now, .. } = self;
        let now = *now;
        let (lease, step) = (settle.lease, settle.step);
        let open = match leases.open_mut(lease) {
            Ok(open) => open,
            Err(error) => {
                return match leases.find(lease) {
                    Known::Ended(ended)
                        if ended.turn_settle(step, settle.levels.digest(&settle.actual)) == Turn::Repeat =>
                    {
                        Ok(repeat(ended.at))
                    }
                    _ => Err(error),
                };
            }
        };
        if open.record.is_due(now) {
            return self.end_due(lease, &settle.levels);
        }
        last_turn(open, step, &settle.levels)?;
        let Open { record, levels, places, .. } = open;
        fits(levels, settle.actual.len())?;
        reach.prepare_held(levels, |name| settle.actual[name].is_some(), places, now)?;
        let mut readings = reach.settle(levels, record, &settle.actual, places, (now, settle.is_watched));
        tell(&mut readings, levels, &settle.levels);
        let digest = levels.digest(&settle.actual);
        reach.let_go(places);
        leases.end(lease, Ended { how: Ending::Settled, step, at: now, digest });
        Ok(Moved { at: now, is_repeat: false, readings })
    }

    /// Ends a lease and gives back all it holds.
    pub(crate) fn cancel(&mut self, cancel: &Cancel) -> Result<Moved, StoreError> {
        let Self { leases, reach, now, .. } = self;
        let now = *now;
        let lease = cancel.lease;
        let readings = match leases.find(lease) {
            Known::Ended(ended) if ended.turn_cancel() == Turn::Repeat => return Ok(repeat(ended.at)),
            Known::Ended(ended) => return Err(StoreError::Ended { lease, how: ended.how }),
            // Its draw is still on its way: a mark is left, and it will be refused.
            Known::Unknown => Readings::new(),
            Known::Open(open) if open.record.is_due(now) => return self.end_due(lease, &cancel.levels),
            Known::Open(open) => {
                last_turn(open, cancel.step, &cancel.levels)?;
                let Open { record, levels, places, .. } = leases.open_mut(lease)?;
                let mut readings = reach.shift(levels, |name| returned(record.held(), name), places, now);
                tell(&mut readings, levels, &cancel.levels);
                reach.let_go(places);
                readings
            }
        };
        leases.end(lease, Ended { how: Ending::Cancelled, step: cancel.step, at: now, digest: 0 });
        Ok(Moved { at: now, is_repeat: false, readings })
    }

    /// Ends a lease whose step came after its deadline. The answer is the same as after a sweep.
    #[cold]
    fn end_due<T>(&mut self, lease: LeaseId, levels: &Arc<Levels>) -> Result<T, StoreError> {
        same_levels(self.leases.open(lease)?, levels)?;
        self.expire(lease)?;
        Err(StoreError::Ended { lease, how: Ending::Expired })
    }

    /// Ends a lease that is past its deadline, unless somebody was faster.
    pub(crate) fn expire(&mut self, lease: LeaseId) -> Result<Swept, StoreError> {
        let Self { leases, reach, now, .. } = self;
        let now = *now;
        let mut swept = Swept::default();
        let Open { record, levels, places, .. } = leases.open_mut(lease)?;
        match record.on_expiry() {
            OnExpiry::Settle => {
                swept.settled = 1;
                reach.count(levels, record.held(), places, record.drawn_at());
            }
            OnExpiry::Return => {
                swept.returned = 1;
                reach.shift(levels, |name| returned(record.held(), name), places, now);
            }
        }
        reach.let_go(places);
        let ended = Ended { how: Ending::Expired, step: record.step(), at: now, digest: 0 };
        swept.forgotten = leases.end(lease, ended);
        Ok(swept)
    }
}

/// Takes `units` of every limit that takes part, or nothing.
fn take(
    reach: &mut Reach<'_>,
    levels: &Levels,
    units: &[Option<u64>],
    places: &mut [Place],
    (now, is_watched): (Stamp, bool),
) -> Result<Drawn, StoreError> {
    fits(levels, units.len())?;
    if let Some(readings) = reach.take(levels, units, places, (now, is_watched))? {
        return Ok(Drawn::Granted(Moved { at: now, is_repeat: false, readings }));
    }
    let readings = reach.read(levels, units, places);
    Ok(Drawn::Refused(Moved { at: now, is_repeat: false, readings }))
}

/// A renewal is for no longer than it may be.
pub(crate) fn check_renewal(renew: &Renew) -> Result<(), StoreError> {
    if renew.span <= RENEWAL_MAX {
        return Ok(());
    }
    let what = format!("a renewal for {:?}, more than {RENEWAL_MAX:?}", renew.span);
    Err(StoreError::Invalid { what })
}

/// There are no more levels than there may be.
pub(crate) fn check_levels(levels: &Levels) -> Result<(), StoreError> {
    let count = levels.levels().len();
    if count <= LEVELS_MAX + 1 {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("{count} levels, more than {LEVELS_MAX}") })
}

/// There is a number, or none, for each limit name.
pub(crate) fn fits(levels: &Levels, count: usize) -> Result<(), StoreError> {
    let names = levels.names().len();
    if count == names {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("{count} numbers for {names} limits") })
}

fn repeat(at: Stamp) -> Moved {
    Moved { at, is_repeat: true, readings: Readings::new() }
}

/// The answer to a step that was done before: as of then, with the limits as they are.
fn repeated(reach: &mut Reach<'_>, open: &Open, asked: &Arc<Levels>) -> Moved {
    let mut readings = reach.read(&open.levels, open.record.held(), &open.places);
    tell(&mut readings, &open.levels, asked);
    Moved { at: open.record.stepped_at(), is_repeat: true, readings }
}

/// Readings of the levels that a lease drew from, for a caller who may have brought others with newer rules.
pub(crate) fn tell(readings: &mut Readings, drawn: &Arc<Levels>, asked: &Arc<Levels>) {
    if !Arc::ptr_eq(drawn, asked) {
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

/// An ending is a step of its own: one with the number of a step that was done comes too late.
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

/// A lease is moved where it drew, and nowhere else.
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

/// What goes back of a limit when all that is held returns.
fn returned(held: &[Option<u64>], name: usize) -> Option<i64> {
    held[name].map(|units| 0_i64.saturating_sub_unsigned(units))
}
