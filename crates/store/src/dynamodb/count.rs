//! Counting: the marks of ended leases become usage and tombstones.
//!
//! The end of a lease is one write, which leaves a mark with what was used at every level. Now and then, and before the
//! ledger is read, one transaction counts the marks of an item: it removes them, adds them to the usage of the item's
//! subject and of the subjects of the other levels, and writes the tombstones. No mark is counted twice, because it is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::usage::{Tally, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::expression::Write;
use super::keys::{PART, TTL, padded, window_word};
use super::link::Action;
use super::marks::{EndMark, end_name};
use super::trouble::Failed;
use super::view::{ENDS, HORIZON, REVISION, View, is_remembered};
use crate::error::StoreError;
use crate::retention::Retention;

/// An item with so many marks of ended leases is counted.
const COUNTED_AT: usize = 48;
/// So many of the youngest stay: draws that are under way are younger than those that are counted.
const KEPT: usize = 16;
/// A transaction of ours has at most so many actions; the engine allows 100.
const ACTIONS_MAX: usize = 90;
/// How often it is tried while other processes write the item.
const TRIES: usize = 32;

/// Whether the item must be as it was read. That is tried first, because it also removes levels that no lease names; on
/// an item that is written all the time it would never succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exclusive {
    Yes,
    No,
}

/// What is removed from an item when it is counted.
#[derive(Debug, Default)]
struct Counted {
    leases: BTreeSet<LeaseId>,
    levels: BTreeSet<String>,
}

/// Usage to be added, by item and limit.
type Sums = BTreeMap<(Subject, Window, Stamp), BTreeMap<LimitName, Tally>>;

/// The marks of a bucket are being counted by this process, until it is dropped.
struct Counting {
    store: DynamoDb,
    subject: Subject,
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.store.inner.cache.counted(&self.subject);
    }
}

impl DynamoDb {
    /// Counts the marks of a bucket in the background, if there are many.
    pub(super) fn count_now_and_then(&self, subject: &Subject) {
        let view = self.inner.cache.view(subject);
        let is_many = view.is_some_and(|view| view.end_count() >= COUNTED_AT);
        if is_many && self.inner.cache.counts(subject) {
            let counting = Counting { store: self.clone(), subject: subject.clone() };
            tokio::spawn(async move {
                // If it fails, the next end of a lease tries again.
                drop(counting.store.count(&counting.subject, KEPT).await);
            });
        }
    }

    /// Counts all marks of a bucket.
    pub(super) async fn count_item(&self, subject: &Subject) -> Result<(), StoreError> {
        self.count(subject, 0).await
    }

    async fn count(&self, subject: &Subject, kept: usize) -> Result<(), StoreError> {
        let key = self.inner.keys.bucket(subject);
        // Those that were there when it began: an item that is in use always has some.
        let mut wanted: Option<BTreeSet<LeaseId>> = None;
        for attempt in 0..TRIES {
            let mut retries = self.inner.link.retries();
            let seen = View::read(self.inner.link.get(&key).await?.as_ref())?;
            let wanted =
                wanted.get_or_insert_with(|| eldest(&seen, kept).into_iter().map(|(id, _)| id).collect());
            if seen.ended.keys().all(|lease| !wanted.contains(lease)) {
                self.inner.cache.saw(subject, &Arc::new(seen));
                return Ok(());
            }
            let exclusive = if attempt == 0 { Exclusive::Yes } else { Exclusive::No };
            let (actions, counted) = self.count_actions(subject, &seen, (kept, exclusive), self.now());
            match self.inner.link.transact(&actions).await {
                Ok(()) => self.saw_counted(subject, &seen, &counted),
                Err(Failed::Condition(_)) => {}
                Err(failed) => retries.bear(failed).await?,
            }
        }
        Err(StoreError::unavailable(format!("`{subject}` is written by others {TRIES} times meanwhile")))
    }

    /// Takes what was counted out of what was seen last of the item.
    fn saw_counted(&self, subject: &Subject, seen: &View, counted: &Counted) {
        let newest = self.inner.cache.view(subject).filter(|view| view.rules == seen.rules);
        let mut left = newest.map_or_else(|| seen.clone(), |view| View::clone(&view));
        left.ended.retain(|lease, _| !counted.leases.contains(lease));
        // A younger lease may have named them again.
        let View { levels, open, .. } = &mut left;
        levels.retain(|name, _| {
            !counted.levels.contains(name) || open.values().any(|mark| mark.levels == *name)
        });
        left.horizon = left.horizon.max(counted.leases.iter().map(|lease| lease.millis()).max());
        left.ends -= i64::try_from(counted.leases.len()).unwrap_or(0);
        left.revision += 1;
        self.inner.cache.saw(subject, &Arc::new(left));
    }

    fn count_actions(
        &self,
        subject: &Subject,
        seen: &View,
        (kept, exclusive): (usize, Exclusive),
        now: Stamp,
    ) -> (Vec<Action>, Counted) {
        let mut counted = Counted::default();
        let mut write = Write::new(self.inner.keys.bucket(subject));
        if exclusive == Exclusive::Yes {
            write.only_if(REVISION, "=", seen.revision);
        }
        write.add(REVISION, 1_u64);
        let (mut actions, mut sums) = (Vec::new(), Sums::new());
        for (lease, mark) in eldest(seen, kept) {
            let uses = uses_of(subject, mark);
            let new = uses.iter().filter(|(key, ..)| !sums.contains_key(key)).map(|(key, ..)| key);
            // The tombstones so far and this one, the item, and usage.
            if actions.len() + 2 + sums.len() + new.collect::<BTreeSet<_>>().len() > ACTIONS_MAX {
                break;
            }
            for (key, name, tally) in uses {
                sums.entry(key).or_default().entry(name).or_default().add(tally);
            }
            if mark.is_own && is_remembered(mark.ended.at, now) {
                actions.push(self.bury(lease, mark));
            }
            if exclusive == Exclusive::No {
                write.only_if(&end_name(lease), "=", mark.to_string());
            }
            write.remove(&end_name(lease));
            counted.leases.insert(lease);
        }
        if let Some(newest) = counted.leases.iter().map(|lease| lease.millis()).max() {
            raise(&mut write, seen, newest);
            write.add(ENDS, -i64::try_from(counted.leases.len()).unwrap_or(0));
        }
        let is_unused = |name: &&String| seen.open.values().all(|mark| mark.levels != **name);
        // A draw may name them again meanwhile.
        for name in seen.levels.keys().filter(is_unused).filter(|_| exclusive == Exclusive::Yes) {
            write.remove(&format!("l:{name}"));
            counted.levels.insert(name.clone());
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
    ) -> Write {
        let mut write = Write::new(self.inner.keys.usage(&subject, window, start));
        write.set("GSI2PK", self.inner.keys.resource(&subject.resource));
        write.set("GSI2SK", usage_order(window, &subject, start));
        write.set("start", start.as_micros());
        if let Some(ttl) = kept_until(&self.inner.retention, window, start) {
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

/// Ends of leases made up to `millis` may be counted from now on.
fn raise(write: &mut Write, seen: &View, millis: u64) {
    if seen.horizon.is_none_or(|horizon| horizon < millis) {
        write.only_unless_or(HORIZON, "<=", millis);
        write.set(HORIZON, millis);
    }
}

/// The marks of an item, the oldest first, without so many of the youngest.
fn eldest(seen: &View, kept: usize) -> Vec<(LeaseId, &EndMark)> {
    let mut marks: Vec<(LeaseId, &EndMark)> = seen.ended.iter().map(|(id, mark)| (*id, mark)).collect();
    marks.sort_unstable_by_key(|(lease, mark)| (lease.millis(), mark.ended.at));
    marks.truncate(marks.len().saturating_sub(kept));
    marks
}

/// The place of a bucket's usage among that of a resource: by span, entity, and time.
pub(super) fn usage_order(window: Window, subject: &Subject, start: Stamp) -> String {
    format!("USAGE#{}#{}{PART}{}", window_word(window), subject.entity, padded(start.as_micros()))
}

/// When the engine may delete usage.
fn kept_until(retention: &Retention, window: Window, start: Stamp) -> Option<u64> {
    let Retention { hours, days, months, .. } = *retention;
    let kept = [hours, days, months][window as usize]?;
    Some((window.around(start).end + kept).as_micros() / 1_000_000)
}
