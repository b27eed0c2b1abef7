//! Counting: the marks of ended leases become usage and tombstones.
//!
//! The end of a lease is one write, which leaves a mark with the units used at every level. At intervals, and
//! before the ledger is read, a transaction counts the marks of an item: it removes them, adds them to the
//! usage of all levels' subjects, and writes the tombstones. Because it removes them, no mark is counted
//! twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::usage::{Tally, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_view::{BucketView, ENDS, HORIZON, REVISION, is_remembered};
use super::client::Action;
use super::errors::RequestError;
use super::expression::UpdateExpression;
use super::keys::{GSI2, PART, TTL, padded, window_word};
use super::lease_marks::{EndMark, end_name};
use crate::error::StoreError;
use crate::retention::Retention;

/// The number of marks of ended leases from which an item is counted.
const COUNT_THRESHOLD: usize = 48;
/// The youngest marks that stay, so that draws in flight are younger than the counted ones.
const KEPT_MARKS: usize = 16;
/// The most actions of a transaction; the engine allows 100.
const ACTIONS_MAX: usize = 90;
/// The most marks that a transaction counts: each is a condition, and an expression has at most 4 KB.
const COUNTED_MAX: usize = 64;
/// How often a count is retried after concurrent writes.
const ATTEMPTS_MAX: usize = 32;

/// Usage to add, by item and limit.
type Sums = BTreeMap<(Subject, Window, Stamp), BTreeMap<LimitName, Tally>>;

/// While it exists, this process counts the marks of a bucket.
struct CountGuard {
    store: DynamoDb,
    subject: Subject,
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.store.inner.cache.finish_count(&self.subject);
    }
}

impl DynamoDb {
    /// Counts the marks of a bucket in the background, if there are many.
    pub(super) fn count_if_many(&self, subject: &Subject) {
        let view = self.inner.cache.view(subject);
        let is_many = view.is_some_and(|view| view.end_count() >= COUNT_THRESHOLD);
        if is_many && self.inner.cache.begin_count(subject) {
            let guard = CountGuard { store: self.clone(), subject: subject.clone() };
            tokio::spawn(async move {
                // The next end of a lease retries after a failure.
                drop(guard.store.count(&guard.subject, KEPT_MARKS).await);
            });
        }
    }

    /// Counts all marks of a bucket.
    pub(super) async fn count_item(&self, subject: &Subject) -> Result<(), StoreError> {
        self.count(subject, 0).await
    }

    async fn count(&self, subject: &Subject, kept: usize) -> Result<(), StoreError> {
        let key = self.inner.keys.bucket(subject);
        // The marks that existed at the start: a busy item always has some.
        let mut wanted: Option<BTreeSet<LeaseId>> = None;
        for _ in 0..ATTEMPTS_MAX {
            let mut retries = self.inner.client.retries();
            let seen = BucketView::read(self.inner.client.get(&key).await?.as_ref())?;
            let wanted = wanted
                .get_or_insert_with(|| oldest_marks(&seen, kept).into_iter().map(|(id, _)| id).collect());
            if seen.ended.keys().all(|lease| !wanted.contains(lease)) {
                self.inner.cache.update_view(subject, &Arc::new(seen));
                return Ok(());
            }
            let (actions, counted) = self.count_actions(subject, &seen, kept, self.now());
            match self.inner.client.transact(None, &actions).await {
                Ok(()) => self.update_view_after_count(subject, &seen, &counted),
                Err(RequestError::Condition(_)) => {}
                Err(error) => retries.wait_or_fail(error).await?,
            }
        }
        Err(StoreError::unavailable(format!(
            "gave up counting `{subject}` after {ATTEMPTS_MAX} concurrent writes"
        )))
    }

    /// Removes the counted marks from the cached view.
    fn update_view_after_count(&self, subject: &Subject, seen: &BucketView, counted: &BTreeSet<LeaseId>) {
        let newest = self.inner.cache.view(subject).filter(|view| view.rules == seen.rules);
        let mut left = newest.map_or_else(|| seen.clone(), |view| BucketView::clone(&view));
        left.ended.retain(|lease, _| !counted.contains(lease));
        left.horizon = left.horizon.max(counted.iter().map(|lease| lease.millis()).max());
        left.ends -= i64::try_from(counted.len()).unwrap_or(0);
        left.revision += 1;
        self.inner.cache.update_view(subject, &Arc::new(left));
    }

    fn count_actions(
        &self,
        subject: &Subject,
        seen: &BucketView,
        kept: usize,
        now: Stamp,
    ) -> (Vec<Action>, BTreeSet<LeaseId>) {
        let mut counted = BTreeSet::new();
        let mut write = UpdateExpression::new(self.inner.keys.bucket(subject));
        write.add(REVISION, 1_u64);
        let (mut actions, mut sums) = (Vec::new(), Sums::new());
        for (lease, mark) in oldest_marks(seen, kept) {
            let uses = uses_of(subject, mark);
            let new = uses.iter().filter(|(key, ..)| !sums.contains_key(key)).map(|(key, ..)| key);
            // The tombstones including this one, the item, and usage.
            if counted.len() == COUNTED_MAX
                || actions.len() + 2 + sums.len() + new.collect::<BTreeSet<_>>().len() > ACTIONS_MAX
            {
                break;
            }
            for (key, name, tally) in uses {
                sums.entry(key).or_default().entry(name).or_default().add(tally);
            }
            if mark.is_own && is_remembered(mark.ended.at, now) {
                actions.push(self.tombstone_write(lease, mark));
            }
            write.only_if(&end_name(lease), "=", mark.to_string());
            write.remove(&end_name(lease));
            counted.insert(lease);
        }
        if let Some(newest) = counted.iter().map(|lease| lease.millis()).max() {
            raise_horizon(&mut write, seen, newest);
            write.add(ENDS, -i64::try_from(counted.len()).unwrap_or(0));
        }
        actions.extend(sums.into_iter().map(|(key, names)| Action::Update(self.usage_write(key, names))));
        actions.push(Action::Update(write));
        (actions, counted)
    }

    /// Adds to the usage of a subject.
    fn usage_write(
        &self,
        (subject, window, start): (Subject, Window, Stamp),
        names: BTreeMap<LimitName, Tally>,
    ) -> UpdateExpression {
        let mut write = UpdateExpression::new(self.inner.keys.usage(&subject, window, start));
        let sk = usage_order(window, &subject, start);
        write.set_in_index(GSI2, self.inner.keys.resource(&subject.resource), sk);
        write.set("start", start.as_micros());
        if let Some(ttl) = kept_until(&self.inner.options.retention, window, start) {
            write.set(TTL, ttl);
        }
        for (name, Tally { units, own, leases }) in names {
            write.add(&format!("u:{name}"), units);
            write.add(&format!("w:{name}"), own);
            write.add(&format!("k:{name}"), leases);
        }
        write
    }
}

/// What a mark in the item of a subject adds to usage.
fn uses_of(subject: &Subject, mark: &EndMark) -> Vec<((Subject, Window, Stamp), LimitName, Tally)> {
    let own = (subject, &mark.used, mark.is_own);
    let others = mark.others.iter().map(|(subject, used)| (subject, used, false));
    let mut uses = Vec::new();
    for (subject, used, is_own) in std::iter::once(own).chain(others) {
        for (window, (name, units)) in
            Window::ALL.into_iter().flat_map(|window| used.iter().map(move |used| (window, used)))
        {
            let key = (subject.clone(), window, window.around(mark.drawn_at).start);
            let own = if is_own { *units } else { 0 };
            uses.push((key, name.clone(), Tally { units: *units, own, leases: 1 }));
        }
    }
    uses
}

/// Raises the horizon: ends of leases made up to `millis` may be counted.
fn raise_horizon(write: &mut UpdateExpression, seen: &BucketView, millis: u64) {
    if seen.horizon.is_none_or(|horizon| horizon < millis) {
        write.only_unless_or(HORIZON, "<=", millis);
        write.set(HORIZON, millis);
    }
}

/// The marks of an item, the oldest first, without the `kept` youngest.
fn oldest_marks(seen: &BucketView, kept: usize) -> Vec<(LeaseId, &EndMark)> {
    let mut marks: Vec<(LeaseId, &EndMark)> = seen.ended.iter().map(|(id, mark)| (*id, mark)).collect();
    marks.sort_unstable_by_key(|(lease, mark)| (lease.millis(), mark.ended.at));
    marks.truncate(marks.len().saturating_sub(kept));
    marks
}

/// The sort key of a bucket's usage in its resource: by window, entity and time.
pub(super) fn usage_order(window: Window, subject: &Subject, start: Stamp) -> String {
    format!("USAGE#{}#{}{PART}{}", window_word(window), subject.entity, padded(start.as_micros()))
}

/// When the engine may delete usage.
fn kept_until(retention: &Retention, window: Window, start: Stamp) -> Option<u64> {
    Some((window.around(start).end + retention.of_usage(window)?).as_micros() / 1_000_000)
}
