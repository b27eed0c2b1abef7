//! The sweep: ends leases that are past their deadline and counts marks.
//!
//! An item with marks is in the first index under the time at which it is due. The sweep ends its expired
//! leases, counts its marks, removes attributes of older versions, and sets when it is due next, if at all.

use std::sync::Arc;

use futures_util::future::join_all;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_view::{BucketView, DUE, ENDS, OPENS, REVISION, number_of};
use super::client::Range;
use super::errors::RequestError;
use super::expression::UpdateExpression;
use super::group_lock::Group;
use super::keys::{DUE_PARTS, GSI1, Item, Key, padded};
use super::lease_item::LegacyLease;
use super::lease_marks::open_name;
use super::step::Step;
use crate::engine::{self, Change};
use crate::error::StoreError;
use crate::store::SweepReport;

/// The most audit entries past their retention that a sweep deletes.
const AUDIT_ENTRIES_MAX: usize = 495;
/// The leases that are ended at the same time, and the items that are rescheduled.
const AT_ONCE: usize = 16;
/// Due items per read.
const PAGE_SIZE: usize = 100;
/// The most items that are skipped after transient errors: with more, the engine is unavailable.
const SKIPPED_MAX: usize = 3;
/// The most obsolete attributes that one update removes: an expression has at most 4 KB.
const REMOVED_MAX: usize = 300;

/// A lease, the levels that it drew from, and what happens when it expires.
type DueLease = (LeaseId, Arc<Levels>, OnExpiry);

impl DynamoDb {
    /// Ends up to `max` leases that are past their deadline.
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<SweepReport, StoreError> {
        let (mut swept, mut errors) = (SweepReport::default(), Vec::new());
        for part in 0..DUE_PARTS {
            let mut after = None;
            while ended(swept) < max {
                let up_to = padded(self.now().as_micros());
                let range = Range::new(Some(GSI1), self.inner.keys.due(part), String::new());
                let found = self.inner.client.range(&range.after(after).up_to(up_to), PAGE_SIZE).await?;
                let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
                let mut items = self.inner.client.get_all(&keys).await?;
                // An item that cannot be decoded must not block others.
                let due = keys.iter().filter_map(|key| self.due_leases(key, &items.remove(key)?).ok());
                let mut due: Vec<DueLease> = due.flatten().collect();
                due.truncate(max - ended(swept));
                for leases in due.chunks(AT_ONCE) {
                    let ends = leases.iter().map(|(lease, levels, _)| self.expire(*lease, levels));
                    for (end, (.., how)) in join_all(ends).await.into_iter().zip(leases) {
                        if skip_some(end, &mut errors)?.unwrap_or(false) {
                            swept.ended(*how);
                        }
                    }
                }
                let subjects: Vec<_> = keys.iter().filter_map(|key| self.inner.keys.subject(key)).collect();
                for subjects in subjects.chunks(AT_ONCE) {
                    for done in join_all(subjects.iter().map(|subject| self.reschedule(subject))).await {
                        skip_some(done, &mut errors)?;
                    }
                }
                after = found.last().and_then(|item| item.get(DUE)?.as_s().ok().cloned());
                if found.len() < PAGE_SIZE {
                    break;
                }
            }
        }
        if let Some(before) = self.inner.options.retention.audit_before(self.now()) {
            let is_old = |item: &Item| Ok(number_of::<u64>(item, "at")? < before.as_micros());
            self.prune_audit(AUDIT_ENTRIES_MAX, is_old).await?;
        }
        // Skipped items stay due.
        errors.pop().map_or(Ok(swept), Err)
    }

    /// Ends up to `max` leases of a bucket that are past their deadline, and returns whether it has ended any.
    pub(super) async fn end_due_of(&self, subject: &Subject, max: usize) -> Result<bool, StoreError> {
        let key = self.inner.keys.bucket(subject);
        let Some(item) = self.inner.client.get(&key).await? else { return Ok(false) };
        let mut due = self.due_leases(&key, &item)?;
        due.truncate(max);
        let ends = due.iter().map(|(lease, levels, _)| self.expire(*lease, levels));
        let ends: Result<Vec<bool>, _> = join_all(ends).await.into_iter().collect();
        Ok(ends?.contains(&true))
    }

    /// The leases of an item that are past their deadline.
    fn due_leases(&self, key: &Key, item: &Item) -> Result<Vec<DueLease>, StoreError> {
        let now = self.now();
        if self.inner.keys.subject(key).is_some() {
            let seen = BucketView::read(Some(item))?;
            let due = seen.open.iter().filter(|(_, mark)| mark.level == 0 && mark.record.is_due(now));
            return due
                .map(|(lease, mark)| Ok((*lease, seen.levels_of(mark)?, mark.record.on_expiry())))
                .collect();
        }
        let old = self.inner.keys.lease_of(key).zip(LegacyLease::read(item)?);
        let old = old.filter(|(_, old)| old.is_due(now));
        Ok(old.map(|(lease, old)| (lease, Arc::clone(&old.levels), old.on_expiry())).into_iter().collect())
    }

    /// Ends a lease that is past its deadline. Returns whether it has: not if another process has, or has
    /// renewed it.
    pub(super) async fn expire(&self, lease: LeaseId, levels: &Arc<Levels>) -> Result<bool, StoreError> {
        let _guard = self.inner.group_lock.enter(levels, Group::Returners).await?;
        let of = engine::Step { lease, number: 0, levels, change: Change::End(None), is_watched: false };
        match self.step(&Step { of, is_expiry: true }).await {
            Ok(done) => Ok(!done.moved().is_repeat),
            Err(StoreError::Ended { .. } | StoreError::NoLease { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Counts the marks of an item, and sets when it is due next, if at all.
    async fn reschedule(&self, subject: &Subject) -> Result<(), StoreError> {
        let key = self.inner.keys.bucket(subject);
        let mut seen = BucketView::read(self.inner.client.get(&key).await?.as_ref())?;
        if !seen.ended.is_empty() {
            self.count_item(subject).await?;
            seen = BucketView::read(self.inner.client.get(&key).await?.as_ref())?;
        }
        let now = self.now();
        if !seen.exists() || seen.due.is_none_or(|due| due > now) {
            return Ok(());
        }
        let mut write = UpdateExpression::new(key);
        write.only_if(REVISION, "=", seen.revision);
        write.add(REVISION, 1_u64);
        // Older versions also marked the items of other levels.
        let (old, open): (Vec<_>, Vec<_>) =
            seen.open.iter().partition(|(_, mark)| mark.level > 0 && mark.record.is_due(now));
        let obsolete = seen.obsolete.iter().take(REMOVED_MAX).cloned();
        // Levels that no lease refers to.
        let unused = seen.levels.keys().filter(|name| open.iter().all(|(_, mark)| mark.levels != **name));
        let unused = unused.map(|name| format!("l:{name}"));
        for name in old.iter().map(|(lease, _)| open_name(**lease)).chain(unused).chain(obsolete) {
            write.remove(&name);
        }
        // Corrects the counters.
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
        match self.inner.client.update(&write).await {
            Ok(_) => {
                self.inner.cache.evict(subject);
                Ok(())
            }
            // It is in use and stays due.
            Err(RequestError::Condition(_) | RequestError::Conflict) => Ok(()),
            Err(error) => Err(error.into_error()),
        }
    }
}

/// The result, or none if it is one of a few errors that must not block other items: one that cannot be
/// decoded, or is written all the time.
fn skip_some<T>(
    result: Result<T, StoreError>,
    errors: &mut Vec<StoreError>,
) -> Result<Option<T>, StoreError> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(StoreError::Corrupt { .. }) => Ok(None),
        Err(error) if error.is_transient() && errors.len() < SKIPPED_MAX => {
            errors.push(error);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn ended(swept: SweepReport) -> usize {
    usize::try_from(swept.settled + swept.returned).unwrap_or(usize::MAX)
}
