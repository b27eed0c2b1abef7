//! The sweep: ends leases that are past their deadline and counts marks.
//!
//! An item with marks is in the first index under the time at which it is due. The sweep ends its leases that are past their
//! deadline, counts its marks, removes what older versions left, and writes when it is due next, if at all.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::expression::Write;
use super::keys::{DUE_PARTS, GSI1, Item, Key, padded};
use super::lease_item::OldLease;
use super::link::Range;
use super::marks::open_name;
use super::phases::Turn;
use super::step::Step;
use super::trouble::Failed;
use super::view::{DUE, ENDS, OPENS, REVISION, View, number_of};
use crate::error::StoreError;
use crate::store::Swept;

/// Entries of the audit that a sweep deletes, if they are kept for some time only.
const ENTRIES_SWEPT: usize = 495;
/// Items that are looked for at a time.
const LOOKED_AT: usize = 100;
/// So many items that cannot be written now are passed over: with more the engine is unavailable.
const PASSED_OVER: usize = 3;
/// Attributes of older versions that one write removes: an expression has at most 4 KB.
const REMOVED_AT_ONCE: usize = 300;

impl DynamoDb {
    /// Ends up to `max` leases that are past their deadline.
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<Swept, StoreError> {
        let (mut swept, mut errors) = (Swept::default(), Vec::new());
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
                    // Items must not wait behind one that cannot be read, nor behind one that is written all the time.
                    match self.look_after(&key, max, &mut swept).await {
                        Ok(()) | Err(StoreError::Corrupt { .. }) => {}
                        Err(error) if error.is_transient() && errors.len() < PASSED_OVER => {
                            errors.push(error);
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
        if let Some(before) = self.inner.retention.audit_before(self.now()) {
            let is_old = |item: &Item| Ok(number_of::<u64>(item, "at")? < before.as_micros());
            self.prune_audit(ENTRIES_SWEPT, is_old).await?;
        }
        // What was passed over stays due.
        errors.pop().map_or(Ok(swept), Err)
    }

    async fn look_after(&self, key: &Key, max: usize, swept: &mut Swept) -> Result<(), StoreError> {
        if let Some(subject) = self.inner.keys.subject(key) {
            return self.look_after_bucket(&subject, max, swept).await;
        }
        let Some(lease) = self.inner.keys.lease_of(key) else { return Ok(()) };
        let Some(item) = self.inner.link.get(key).await? else { return Ok(()) };
        match OldLease::read(&item)?.filter(|old| old.is_due(self.now())) {
            Some(old) => self.expire(lease, &old.levels, swept).await,
            None => Ok(()),
        }
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
        let due = seen.open.iter().filter(|(_, mark)| mark.level == 0 && mark.record.is_due(now));
        for (lease, mark) in due {
            if ended(*swept) >= max {
                return Ok(());
            }
            self.expire(*lease, &seen.levels_of(mark)?, swept).await?;
        }
        self.rest(subject).await
    }

    /// Ends a lease that is past its deadline, unless another process was faster.
    pub(super) async fn expire(
        &self,
        lease: LeaseId,
        levels: &Arc<Levels>,
        swept: &mut Swept,
    ) -> Result<(), StoreError> {
        let _turn = self.inner.phases.enter(levels, Turn::Giving).await;
        let step = Step { lease, levels, change: None };
        let expired = self.step(&step, |context| {
            let is_due = match crate::shared_engine::LeaseTable::find(context.leases, lease) {
                crate::shared_engine::KnownLease::Open(open) => open.record.is_due(context.now),
                crate::shared_engine::KnownLease::Ended(_) | crate::shared_engine::KnownLease::Unknown => {
                    false
                }
            };
            if is_due { context.expire(lease) } else { Ok(Swept::default()) }
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

    /// Counts the marks of an item and writes when it is due next, if at all.
    async fn rest(&self, subject: &Subject) -> Result<(), StoreError> {
        let key = self.inner.keys.bucket(subject);
        let mut seen = View::read(self.inner.link.get(&key).await?.as_ref())?;
        if !seen.ended.is_empty() {
            self.count_item(subject).await?;
            seen = View::read(self.inner.link.get(&key).await?.as_ref())?;
        }
        let now = self.now();
        if !seen.is_there() || seen.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let mut write = Write::new(key);
        write.only_if(REVISION, "=", seen.revision);
        write.add(REVISION, 1_u64);
        // Older versions also marked the items of other levels.
        let (old, open): (Vec<_>, Vec<_>) =
            seen.open.iter().partition(|(_, mark)| mark.level > 0 && mark.record.is_due(now));
        let obsolete = seen.obsolete.iter().take(REMOVED_AT_ONCE).cloned();
        for name in old.iter().map(|(lease, _)| open_name(**lease)).chain(obsolete) {
            write.remove(&name);
        }
        // Corrects the counts, whatever happened to them.
        for (name, count) in [(OPENS, open.len()), (ENDS, seen.ended.len())] {
            write.set(name, count as u64);
        }
        let counted = (!seen.ended.is_empty()).then(|| now + REMEMBERED);
        let next: Option<Stamp> = open.iter().map(|(_, mark)| mark.record.deadline()).chain(counted).min();
        match next {
            Some(next) if next <= now => return Ok(()),
            Some(next) => write.set(DUE, padded(next.as_micros())),
            None => {
                write.remove("GSI1PK");
                write.remove(DUE);
            }
        }
        match self.inner.link.update(&write).await {
            Ok(_) => {
                self.inner.cache.evict(subject);
                Ok(())
            }
            // It is in use, and stays due.
            Err(Failed::Condition(_) | Failed::Conflict) => Ok(()),
            Err(failed) => Err(failed.into_error()),
        }
    }
}

fn ended(swept: Swept) -> usize {
    usize::try_from(swept.settled + swept.returned).unwrap_or(usize::MAX)
}
