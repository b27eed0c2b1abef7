//! The steps of a lease: draw, extend, adjust, settle, cancel, and spend, which is the first and the last at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, Record, Turn, digest};
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::leases::{Known, Open};
use super::shelves::{Locked, Place};
use super::{Memory, Space, lock};
use crate::buckets::{Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Lookup, Moved, Seen, Settle};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::store::Swept;

impl Buckets for Memory {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::ready(self.space.draw(draw))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        Reply::ready(self.space.extend(extend))
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        Reply::ready(self.space.adjust(adjust))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        Reply::ready(self.space.settle(settle))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        Reply::ready(self.space.cancel(cancel))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::ready(self.space.spend(draw))
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::ready(Ok(self.space.balances(lookup)))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::ready(self.space.buckets_of(resource, paging))
    }
}

impl Space {
    fn draw(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        let read = self.now();
        let mut places = self.places(&draw.levels)?;
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        let leases = locked.leases();
        match leases.find(draw.lease) {
            Known::Unknown => leases.may_draw(draw.lease)?,
            Known::Ended(ended) => return Err(StoreError::Ended { lease: draw.lease, how: ended.how }),
            Known::Open(_) => return repeated(&mut locked, draw.lease, &draw.levels, &mut places),
        }
        let answer = take(&mut locked, &draw.levels, &draw.units, &mut places, now)?;
        if matches!(answer, Drawn::Granted(_)) {
            let deadline = now + draw.terms.deadline;
            let record = Record::new(draw.units.clone(), now, deadline, draw.terms.on_expiry);
            let open = Open { lease: draw.lease, record, levels: Arc::clone(&draw.levels), places };
            locked.leases().insert(open);
            self.is_due_at(deadline);
        }
        Ok(answer)
    }

    fn spend(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        let read = self.now();
        let mut places = self.places(&draw.levels)?;
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        let leases = locked.leases();
        match leases.find(draw.lease) {
            Known::Unknown => leases.may_draw(draw.lease)?,
            Known::Ended(ended) if ended.turn_settle(0, &draw.units) == Turn::Repeat => {
                return Ok(Drawn::Granted(repeat(ended.at)));
            }
            Known::Ended(ended) => return Err(StoreError::Ended { lease: draw.lease, how: ended.how }),
            Known::Open(open) => {
                return Err(StoreError::Late { lease: draw.lease, step: 0, done: open.record.step() });
            }
        }
        let answer = take(&mut locked, &draw.levels, &draw.units, &mut places, now)?;
        if matches!(answer, Drawn::Granted(_)) {
            locked.count(&draw.levels, &draw.units, &mut places, now);
            let digest = digest(&draw.units);
            locked.leases().end(draw.lease, Ended { how: Ending::Settled, step: 0, at: now, digest });
        }
        Ok(answer)
    }

    fn extend(&self, extend: &Extend) -> Result<Drawn, StoreError> {
        let read = self.now();
        let mut places = self.places(&extend.levels)?;
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        if turn(&mut locked, extend.lease, extend.step, &extend.levels)? == Turn::Repeat {
            return repeated(&mut locked, extend.lease, &extend.levels, &mut places);
        }
        let answer = take(&mut locked, &extend.levels, &extend.units, &mut places, now)?;
        if matches!(answer, Drawn::Granted(_)) {
            locked.leases().change(extend.lease, |record| record.extend(extend.step, &extend.units));
        }
        Ok(answer)
    }

    fn adjust(&self, adjust: &Adjust) -> Result<Moved, StoreError> {
        let read = self.now();
        let mut places = self.places(&adjust.levels)?;
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        if turn(&mut locked, adjust.lease, adjust.step, &adjust.levels)? == Turn::Repeat {
            let (Drawn::Granted(moved) | Drawn::Refused(moved)) =
                repeated(&mut locked, adjust.lease, &adjust.levels, &mut places)?;
            return Ok(moved);
        }
        fits(&adjust.levels, adjust.deltas.len())?;
        locked.prepare(&adjust.levels, |name| adjust.deltas[name].is_some(), &mut places)?;
        let changes =
            locked.leases().change(adjust.lease, |record| record.adjust(adjust.step, &adjust.deltas));
        let changes = changes.unwrap_or_default();
        let change = |name: usize| changes.get(name).copied().flatten();
        let readings = locked.shift(&adjust.levels, change, &mut places, now);
        Ok(Moved { at: now, is_repeat: false, readings })
    }

    fn settle(&self, settle: &Settle) -> Result<Moved, StoreError> {
        let (read, lease, step) = (self.now(), settle.lease, settle.step);
        let places = self.places(&settle.levels)?;
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        match locked.leases().find(lease) {
            Known::Ended(ended) if ended.turn_settle(step, &settle.actual) == Turn::Repeat => {
                return Ok(repeat(ended.at));
            }
            Known::Ended(ended) => return Err(StoreError::Ended { lease, how: ended.how }),
            Known::Unknown => return Err(StoreError::NoLease { lease }),
            Known::Open(open) => last_turn(open, step, &settle.levels)?,
        }
        fits(&settle.levels, settle.actual.len())?;
        let mut places = places;
        locked.prepare(&settle.levels, |name| settle.actual[name].is_some(), &mut places)?;
        let Some(Open { mut record, levels, mut places, .. }) = locked.leases().take(lease) else {
            return Err(StoreError::NoLease { lease });
        };
        let changes = record.settle(&settle.actual);
        // What it holds and does not change is read all the same.
        let held = record.held();
        let change = |name: usize| changes[name].or_else(|| held[name].map(|_| 0));
        let readings = locked.shift_and_count(&levels, change, &record, &mut places, now);
        let digest = digest(&settle.actual);
        locked.leases().end(lease, Ended { how: Ending::Settled, step, at: now, digest });
        Ok(Moved { at: now, is_repeat: false, readings })
    }

    fn cancel(&self, cancel: &Cancel) -> Result<Moved, StoreError> {
        let (read, lease) = (self.now(), cancel.lease);
        let places = self.places(&cancel.levels)?;
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        match locked.leases().find(lease) {
            Known::Ended(ended) if ended.turn_cancel() == Turn::Repeat => return Ok(repeat(ended.at)),
            Known::Ended(ended) => return Err(StoreError::Ended { lease, how: ended.how }),
            Known::Open(open) => last_turn(open, cancel.step, &cancel.levels)?,
            Known::Unknown => {}
        }
        // Without one its draw is still on its way: a mark is left, and it will be refused.
        let readings = match locked.leases().take(lease) {
            Some(Open { record, levels, mut places, .. }) => {
                locked.shift(&levels, |name| returned(record.held(), name), &mut places, now)
            }
            None => Vec::new(),
        };
        let ended = Ended { how: Ending::Cancelled, step: cancel.step, at: now, digest: 0 };
        locked.leases().end(lease, ended);
        Ok(Moved { at: now, is_repeat: false, readings })
    }

    /// A lease will be due at `deadline`.
    fn is_due_at(&self, deadline: Stamp) {
        if deadline.as_micros() < self.due_at.load(Ordering::Relaxed) {
            self.due_at.fetch_min(deadline.as_micros(), Ordering::Relaxed);
        }
    }

    /// Ends leases that are past their deadline, up to `max` of them.
    pub(super) fn sweep(&self, now: Stamp, max: usize) -> Swept {
        let mut swept = Swept::default();
        let mut left = max;
        // Lowered by whoever draws meanwhile, and by us below.
        self.due_at.store(u64::MAX, Ordering::Relaxed);
        for shelf in &self.shelves {
            let mut guard = lock(shelf);
            let due = guard.leases.due(now, left);
            swept.forgotten += guard.leases.forget(now);
            drop(guard);
            left -= due.len();
            // One after the other, since each may need other shelves too.
            for (lease, levels) in due {
                self.expire(lease, &levels, now, &mut swept);
            }
            self.is_due_at(lock(shelf).leases.next_due());
        }
        swept
    }

    fn expire(&self, lease: LeaseId, levels: &Levels, now: Stamp, swept: &mut Swept) {
        let (read, Ok(mut places)) = (now, self.places(levels)) else { return };
        let mut locked = self.lock_shelves(&places);
        let now = locked.not_before(read);
        // Whoever ended it meanwhile was in time.
        let Some(Open { record, .. }) = locked.leases().take(lease) else { return };
        match record.on_expiry() {
            OnExpiry::Settle => {
                swept.settled += 1;
                locked.count(levels, record.held(), &mut places, record.drawn_at());
            }
            OnExpiry::Return => {
                swept.returned += 1;
                locked.shift(levels, |name| returned(record.held(), name), &mut places, now);
            }
        }
        let ended = Ended { how: Ending::Expired, step: record.step(), at: now, digest: 0 };
        swept.forgotten += locked.leases().end(lease, ended);
    }
}

/// Takes `units` of every limit that takes part, or nothing.
fn take(
    locked: &mut Locked<'_>,
    levels: &Levels,
    units: &[Option<u64>],
    places: &mut [Place],
    now: Stamp,
) -> Result<Drawn, StoreError> {
    fits(levels, units.len())?;
    if let Some(readings) = locked.take(levels, units, places, now)? {
        return Ok(Drawn::Granted(Moved { at: now, is_repeat: false, readings }));
    }
    let readings = locked.read(levels, units, places);
    Ok(Drawn::Refused(Moved { at: now, is_repeat: false, readings }))
}

/// There is a number, or none, for each limit name.
fn fits(levels: &Levels, count: usize) -> Result<(), StoreError> {
    let names = levels.names().len();
    if count == names {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("{count} numbers for {names} limits") })
}

const fn repeat(at: Stamp) -> Moved {
    Moved { at, is_repeat: true, readings: Vec::new() }
}

/// The answer to a step that was done before: as of then, with the limits as they are.
fn repeated(
    locked: &mut Locked<'_>,
    lease: LeaseId,
    levels: &Levels,
    places: &mut [Place],
) -> Result<Drawn, StoreError> {
    let record = locked.leases().open(lease)?.record.clone();
    let readings = locked.read(levels, record.held(), places);
    Ok(Drawn::Granted(Moved { at: record.drawn_at(), is_repeat: true, readings }))
}

fn turn(
    locked: &mut Locked<'_>,
    lease: LeaseId,
    step: u32,
    levels: &Arc<Levels>,
) -> Result<Turn, StoreError> {
    let open = locked.leases().open(lease)?;
    same_levels(open, levels)?;
    match open.record.turn(step) {
        Turn::Late => Err(StoreError::Late { lease, step, done: open.record.step() }),
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

/// A lease is moved where it drew, and nowhere else.
fn same_levels(open: &Open, levels: &Arc<Levels>) -> Result<(), StoreError> {
    let is_same = |levels: &Levels| {
        let subjects = levels.levels().iter().map(|level| &level.subject);
        levels.names() == open.levels.names()
            && subjects.eq(open.levels.levels().iter().map(|level| &level.subject))
    };
    if Arc::ptr_eq(&open.levels, levels) || is_same(levels) {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("the lease {} drew from other levels", open.lease) })
}

/// What goes back of a limit when all that is held returns.
fn returned(held: &[Option<u64>], name: usize) -> Option<i64> {
    held[name].map(|units| 0_i64.saturating_sub_unsigned(units))
}
