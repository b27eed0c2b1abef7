//! What is due: leases past their deadline, marks to be counted, and items that nobody uses any more.
//!
//! An item with marks is in the first index under the time at which it is to be looked at. Whoever looks ends what is past
//! its deadline, has the marks counted, and writes when it is to be looked at next; one that has nothing left to look at is
//! given the time at which the engine may forget it, and leaves the index.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::expression::Write;
use super::forms;
use super::keys::{DUE_PARTS, GSI1, Key, TTL, padded};
use super::link::Range;
use super::marks::{OpenMark, open_name};
use super::parts::{Apart, ApartState};
use super::phases::Turn;
use super::step::{Step, Used};
use super::trouble::Failed;
use super::undo::Whose;
use super::view::{DUE, ENDS, OPENS, REVISION, View};
use crate::error::StoreError;
use crate::store::Swept;

/// Items that are looked for at a time.
const LOOKED_AT: usize = 100;
/// Items that cannot be looked after now are passed over, so many of them: with more the engine is away.
const PASSED_OVER: usize = 3;

impl DynamoDb {
    /// Ends up to `max` leases that are past their deadline.
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<Swept, StoreError> {
        let (mut swept, mut trouble) = (Swept::default(), Vec::new());
        for part in 0..DUE_PARTS {
            let mut after = None;
            while ended(swept) < max {
                let up_to = padded(self.now().as_micros());
                let range = Range::new(Some(GSI1), self.inner.keys.due(part), String::new());
                let found = self.inner.link.range(&range.after(after).up_to(up_to), LOOKED_AT).await?;
                for key in found.iter().filter_map(Key::of) {
                    if ended(swept) >= max {
                        break;
                    }
                    // One that is not as we write it is for somebody else to look at; others must not wait behind it, nor
                    // behind one that is written all the time.
                    match self.look_after(&key, max, &mut swept).await {
                        Ok(()) | Err(StoreError::Corrupt { .. }) => {}
                        Err(error) if error.is_transient() && trouble.len() < PASSED_OVER => {
                            trouble.push(error);
                        }
                        Err(error) => return Err(error),
                    }
                }
                after = found.last().and_then(|item| item.get(DUE)?.as_s().ok().cloned());
                if found.len() < LOOKED_AT {
                    break;
                }
            }
        }
        // What was passed over is due still.
        trouble.pop().map_or(Ok(swept), Err)
    }

    async fn look_after(&self, key: &Key, max: usize, swept: &mut Swept) -> Result<(), StoreError> {
        if let Some(subject) = self.inner.keys.subject(key) {
            return self.look_after_bucket(&subject, max, swept).await;
        }
        let Some(lease) = self.inner.keys.lease_of(key) else { return Ok(()) };
        let Some(item) = self.inner.link.get(key).await? else { return Ok(()) };
        let now = self.now();
        if let Some(Apart { state: ApartState::Open(mark, levels), .. }) = Apart::read(&item, now)?
            && mark.record.is_due(now)
        {
            self.expire(lease, &levels, swept).await?;
        }
        Ok(())
    }

    async fn look_after_bucket(
        &self,
        subject: &Subject,
        max: usize,
        swept: &mut Swept,
    ) -> Result<(), StoreError> {
        let key = self.inner.keys.bucket(subject);
        let seen = View::read(self.inner.link.get(&key).await?.as_ref())?;
        let now = self.now();
        for (lease, mark) in seen.open.iter().filter(|(_, mark)| mark.record.is_due(now)) {
            if ended(*swept) >= max {
                return Ok(());
            }
            let levels = seen.levels_of(mark)?;
            if mark.level == 0 {
                self.expire(*lease, &levels, swept).await?;
            } else {
                self.look_above(*lease, (mark, &seen), &levels, swept).await?;
            }
        }
        self.rest(subject).await
    }

    /// A mark of a lease in the item of a level above its own: where the lease itself never came to be, what it took is given
    /// back, and where it was renewed, so is the mark.
    async fn look_above(
        &self,
        lease: LeaseId,
        (mark, seen): (&OpenMark, &View),
        levels: &Arc<Levels>,
        swept: &mut Swept,
    ) -> Result<(), StoreError> {
        let home = self.inner.link.get(&self.inner.keys.bucket(levels.subject())).await?;
        let home = View::read(home.as_ref())?;
        let Some(level) = levels.levels().get(mark.level) else { return Ok(()) };
        match home.open.get(&lease) {
            None => self.undo(lease, (level, None), Whose::Anybody, self.attempt()).await,
            Some(own) if own.record.is_due(self.now()) => self.expire(lease, levels, swept).await,
            Some(own) => {
                let mut write = Write::new(self.inner.keys.bucket(&level.subject));
                write.only_if(&open_name(lease), "=", mark.to_string());
                let renewed = OpenMark { record: own.record.clone(), ..mark.clone() };
                write.set(&open_name(lease), renewed.to_string());
                write.add(REVISION, 1_u64);
                if seen.ttl.is_some() {
                    forms::live(&mut write, seen, level, (self.now(), own.record.deadline()));
                }
                match self.inner.link.update(&write).await {
                    Ok(_) | Err(Failed::Condition(_) | Failed::Conflict) => Ok(()),
                    Err(failed) => Err(failed.into_error()),
                }
            }
        }
    }

    /// Ends a lease that is past its deadline, unless somebody was faster.
    pub(super) async fn expire(
        &self,
        lease: LeaseId,
        levels: &Arc<Levels>,
        swept: &mut Swept,
    ) -> Result<(), StoreError> {
        let _turn = self.inner.phases.enter(levels, Turn::Giving).await;
        let step = Step { lease, levels, asked: None, used: Used::Nothing };
        let expired = self.step(&step, |desk| {
            let is_due = match crate::desk::Book::find(desk.leases, lease) {
                crate::desk::Known::Open(open) => open.record.is_due(desk.now),
                crate::desk::Known::Ended(_) | crate::desk::Known::Unknown => false,
            };
            if is_due { desk.expire(lease) } else { Ok(Swept::default()) }
        });
        match expired.await {
            Ok(one) => {
                swept.add(one);
                Ok(())
            }
            Err(StoreError::Ended { .. } | StoreError::NoLease { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Has the marks of an item counted, and writes when it is to be looked at next, if at all.
    async fn rest(&self, subject: &Subject) -> Result<(), StoreError> {
        let key = self.inner.keys.bucket(subject);
        let first = View::read(self.inner.link.get(&key).await?.as_ref())?;
        let had_marks = !first.ended.is_empty() || !first.undone.is_empty();
        let seen = if had_marks {
            self.count_item(subject).await?;
            View::read(self.inner.link.get(&key).await?.as_ref())?
        } else {
            first
        };
        let now = self.now();
        if !seen.is_there() || seen.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let again = (had_marks || !seen.undone.is_empty()).then(|| now + REMEMBERED);
        let next: Option<Stamp> = seen.open.values().map(|mark| mark.record.deadline()).chain(again).min();
        let mut write = Write::new(key);
        write.only_if(REVISION, "=", seen.revision);
        write.add(REVISION, 1_u64);
        // Whatever became of the counts, they are right again.
        for (name, count) in [(OPENS, seen.open.len()), (ENDS, seen.ended.len())] {
            write.set(name, count as u64);
        }
        match next {
            Some(next) if next <= now => return Ok(()),
            Some(next) => write.set(DUE, padded(next.as_micros())),
            None => {
                write.remove("GSI1PK");
                write.remove(DUE);
                if let Some(ttl) = forms::rest(&seen, now) {
                    write.set(TTL, ttl);
                }
            }
        }
        match self.inner.link.update(&write).await {
            Ok(_) => {
                self.inner.cache.forget(subject);
                Ok(())
            }
            // Somebody uses it: it is looked at again.
            Err(Failed::Condition(_) | Failed::Conflict) => Ok(()),
            Err(failed) => Err(failed.into_error()),
        }
    }
}

fn ended(swept: Swept) -> usize {
    usize::try_from(swept.settled + swept.returned).unwrap_or(usize::MAX)
}
