//! The steps of a lease: draw, extend, adjust, settle, cancel, and spend, which is the first and the last at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, Record, Turn, digest};
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::leases::{Known, Open};
use super::shelves::{Place, Places, Reach};
use super::{Memory, Space};
use crate::buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Lookup, Moved, Readings, Seen, Settle,
};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::store::Swept;
use crate::sync::lock;

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
        self.decide(&draw.levels, self.now(), |leases, reach, places, now| {
            match leases.find(draw.lease) {
                Known::Unknown => leases.may_draw(draw.lease)?,
                Known::Ended(ended) => return Err(StoreError::Ended { lease: draw.lease, how: ended.how }),
                Known::Open(open) => {
                    same_levels(open, &draw.levels)?;
                    return Ok(Drawn::Granted(repeated(reach, open)));
                }
            }
            let answer = take(reach, &draw.levels, &draw.units, places, (now, draw.is_watched))?;
            if matches!(answer, Drawn::Granted(_)) {
                let deadline = now + draw.terms.deadline;
                let record = Record::new(Units::from_slice(&draw.units), now, deadline, draw.terms.on_expiry);
                let (levels, places) = (Arc::clone(&draw.levels), Places::from_slice(places));
                leases.insert(Open { lease: draw.lease, record, levels, places });
                self.is_due_at(deadline);
            }
            Ok(answer)
        })
    }

    fn spend(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        self.decide(&draw.levels, self.now(), |leases, reach, places, now| {
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
            let answer = take(reach, &draw.levels, &draw.units, places, (now, draw.is_watched))?;
            if matches!(answer, Drawn::Granted(_)) {
                reach.count(&draw.levels, &draw.units, places, now);
                let digest = digest(&draw.units);
                leases.end(draw.lease, Ended { how: Ending::Settled, step: 0, at: now, digest });
            }
            Ok(answer)
        })
    }

    fn extend(&self, extend: &Extend) -> Result<Drawn, StoreError> {
        self.decide(&extend.levels, self.now(), |leases, reach, _, now| {
            if turn(leases.open(extend.lease)?, extend.step, &extend.levels)? == Turn::Repeat {
                return Ok(Drawn::Granted(repeated(reach, leases.open(extend.lease)?)));
            }
            let open = leases.open_mut(extend.lease)?;
            let answer = take(reach, &open.levels, &extend.units, &mut open.places, (now, true))?;
            if matches!(answer, Drawn::Granted(_)) {
                open.record.extend(extend.step, &extend.units, now);
            }
            Ok(answer)
        })
    }

    fn adjust(&self, adjust: &Adjust) -> Result<Moved, StoreError> {
        self.decide(&adjust.levels, self.now(), |leases, reach, _, now| {
            if turn(leases.open(adjust.lease)?, adjust.step, &adjust.levels)? == Turn::Repeat {
                return Ok(repeated(reach, leases.open(adjust.lease)?));
            }
            let Open { record, levels, places, .. } = leases.open_mut(adjust.lease)?;
            fits(levels, adjust.deltas.len())?;
            reach.prepare(levels, |name| adjust.deltas[name].is_some(), places)?;
            let changes = record.adjust(adjust.step, &adjust.deltas, now);
            let readings = reach.shift(levels, |name| changes[name], places, now);
            Ok(Moved { at: now, is_repeat: false, readings })
        })
    }

    fn settle(&self, settle: &Settle) -> Result<Moved, StoreError> {
        let (lease, step) = (settle.lease, settle.step);
        self.decide(&settle.levels, self.now(), |leases, reach, _, now| {
            let open = match leases.open_mut(lease) {
                Ok(open) => open,
                Err(error) => {
                    return match leases.find(lease) {
                        Known::Ended(ended) if ended.turn_settle(step, &settle.actual) == Turn::Repeat => {
                            Ok(repeat(ended.at))
                        }
                        _ => Err(error),
                    };
                }
            };
            last_turn(open, step, &settle.levels)?;
            let Open { record, levels, places, .. } = open;
            fits(levels, settle.actual.len())?;
            reach.prepare(levels, |name| settle.actual[name].is_some(), places)?;
            let readings = reach.settle(levels, record, &settle.actual, places, (now, settle.is_watched));
            let digest = digest(&settle.actual);
            leases.end(lease, Ended { how: Ending::Settled, step, at: now, digest });
            Ok(Moved { at: now, is_repeat: false, readings })
        })
    }

    fn cancel(&self, cancel: &Cancel) -> Result<Moved, StoreError> {
        let lease = cancel.lease;
        self.decide(&cancel.levels, self.now(), |leases, reach, _, now| {
            let readings = match leases.find(lease) {
                Known::Ended(ended) if ended.turn_cancel() == Turn::Repeat => return Ok(repeat(ended.at)),
                Known::Ended(ended) => return Err(StoreError::Ended { lease, how: ended.how }),
                // Its draw is still on its way: a mark is left, and it will be refused.
                Known::Unknown => Readings::new(),
                Known::Open(open) => {
                    last_turn(open, cancel.step, &cancel.levels)?;
                    let Open { record, levels, places, .. } = leases.open_mut(lease)?;
                    reach.shift(levels, |name| returned(record.held(), name), places, now)
                }
            };
            leases.end(lease, Ended { how: Ending::Cancelled, step: cancel.step, at: now, digest: 0 });
            Ok(Moved { at: now, is_repeat: false, readings })
        })
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
                if let Ok(one) = self.expire(lease, &levels, now) {
                    swept.settled += one.settled;
                    swept.returned += one.returned;
                    swept.forgotten += one.forgotten;
                }
            }
            self.is_due_at(lock(shelf).leases.next_due());
        }
        swept
    }

    /// Ends a lease that is past its deadline, unless somebody was faster.
    fn expire(&self, lease: LeaseId, levels: &Levels, read: Stamp) -> Result<Swept, StoreError> {
        self.decide(levels, read, |leases, reach, _, now| {
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
            let ended = Ended { how: Ending::Expired, step: record.step(), at: now, digest: 0 };
            swept.forgotten = leases.end(lease, ended);
            Ok(swept)
        })
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

/// There is a number, or none, for each limit name.
fn fits(levels: &Levels, count: usize) -> Result<(), StoreError> {
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
fn repeated(reach: &mut Reach<'_>, open: &Open) -> Moved {
    let readings = reach.read(&open.levels, open.record.held(), &mut open.places.clone());
    Moved { at: open.record.stepped_at(), is_repeat: true, readings }
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
