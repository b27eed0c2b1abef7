//! Counting what has ended: marks out of the items of buckets, into usage and into items of the leases' own.
//!
//! Whoever ends a lease leaves its mark in the bucket, with what is to be counted; that is one write. Now and then, and before
//! anybody reads the ledger, the marks of an item are counted together: one transaction takes them out of the item, adds
//! them to usage, and writes down each lease for as long as it is to be remembered. A mark that is counted twice cannot be:
//! it is not there any more. Whoever reads the table's stream may do the same, in any number and however often.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::usage::{Tally, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::apart::{There, raise};
use super::expression::Write;
use super::keys::{PART, TTL, padded, window_word};
use super::link::Action;
use super::marks::{EndMark, end_name, undone_name};
use super::trouble::Failed;
use super::view::{ENDS, REVISION, View, is_remembered};
use crate::error::StoreError;
use crate::retention::Retention;

/// With so many marks of ended leases an item has them counted.
const COUNTED_AT: usize = 48;
/// As many of the youngest stay: whoever draws while they end is younger than those that go.
const KEPT: usize = 16;
/// Parts that a transaction of ours has at most; the engine takes a hundred.
const ACTIONS_MAX: usize = 90;
/// How often it is tried while others write the item.
const TRIES: usize = 32;

/// Whether it is to be done only if nobody has written the item meanwhile. It is tried so first, since that allows more; an
/// item that is written all the time would never have its marks counted so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alone {
    Yes,
    No,
}

/// What is not in an item any more once it is counted.
#[derive(Debug, Default)]
struct Gone {
    leases: BTreeSet<LeaseId>,
    undone: BTreeSet<LeaseId>,
    levels: BTreeSet<String>,
}

/// Somebody counts the marks of a bucket, for as long as this is there.
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
    /// Counts, in the background, where there are many marks.
    pub(super) fn count_now_and_then(&self, levels: &Levels) {
        for level in levels.levels() {
            let view = self.inner.cache.view(&level.subject);
            let is_many = view.is_some_and(|view| view.end_count() >= COUNTED_AT);
            if is_many && self.inner.cache.counts(&level.subject) {
                let counting = Counting { store: self.clone(), subject: level.subject.clone() };
                tokio::spawn(async move {
                    // Where it fails, the next one tries again.
                    drop(counting.store.count(&counting.subject, KEPT).await);
                });
            }
        }
    }

    /// Counts all marks of a bucket.
    pub(super) async fn count_item(&self, subject: &Subject) -> Result<(), StoreError> {
        self.count(subject, 0).await.map(drop)
    }

    /// Counts the marks of a bucket that somebody heard of: all of them, or where many end all but the youngest. Answers how
    /// many were counted; where there are none, nothing is written.
    pub(super) async fn count_heard(&self, subject: &Subject, many: bool) -> Result<u64, StoreError> {
        let kept = if many { KEPT } else { 0 };
        let item = self.inner.link.get(&self.inner.keys.bucket(subject)).await?;
        if View::read(item.as_ref())?.ended.len() <= kept {
            return Ok(0);
        }
        self.count(subject, kept).await
    }

    async fn count(&self, subject: &Subject, kept: usize) -> Result<u64, StoreError> {
        let key = self.inner.keys.bucket(subject);
        let mut counted = 0;
        // Those that were there when it began: where others end all the time there are always some.
        let mut wanted: Option<BTreeSet<LeaseId>> = None;
        for attempt in 0..TRIES {
            let mut patience = self.inner.link.patience();
            let seen = View::read(self.inner.link.get(&key).await?.as_ref())?;
            let wanted =
                wanted.get_or_insert_with(|| eldest(&seen, kept).into_iter().map(|(id, _)| id).collect());
            let is_done = seen.ended.keys().all(|lease| !wanted.contains(lease));
            if is_done && (attempt > 0 || kept > 0 || seen.undone.is_empty()) {
                self.inner.cache.saw(subject, &Arc::new(seen));
                return Ok(counted);
            }
            let now = self.now();
            let alone = if attempt == 0 { Alone::Yes } else { Alone::No };
            let (actions, gone) = self.count_actions(subject, &seen, (kept, alone), now);
            match self.inner.link.transact(&actions).await {
                Ok(()) => {
                    counted += gone.leases.len() as u64;
                    self.saw_counted(subject, &seen, &gone);
                }
                Err(Failed::Condition(_)) => {}
                Err(failed) => patience.bear(failed).await?,
            }
            if seen.ended.is_empty() {
                return Ok(counted);
            }
        }
        Err(StoreError::unavailable(format!("`{subject}` is written by others {TRIES} times meanwhile")))
    }

    /// What was seen last of the item, without what is counted by now.
    fn saw_counted(&self, subject: &Subject, seen: &View, gone: &Gone) {
        let newest = self.inner.cache.view(subject).filter(|view| view.rules == seen.rules);
        let mut left = newest.map_or_else(|| seen.clone(), |view| View::clone(&view));
        left.ended.retain(|lease, _| !gone.leases.contains(lease));
        left.undone.retain(|lease, _| !gone.undone.contains(lease));
        // Those that a younger lease names are there again.
        let View { levels, open, .. } = &mut left;
        levels
            .retain(|name, _| !gone.levels.contains(name) || open.values().any(|mark| mark.levels == *name));
        left.horizon = left.horizon.max(gone.leases.iter().map(|lease| lease.millis()).max());
        left.ends -= i64::try_from(gone.leases.len()).unwrap_or(0);
        left.revision += 1;
        self.inner.cache.saw(subject, &Arc::new(left));
    }

    fn count_actions(
        &self,
        subject: &Subject,
        seen: &View,
        (kept, alone): (usize, Alone),
        now: Stamp,
    ) -> (Vec<Action>, Gone) {
        let mut gone = Gone::default();
        let marks = eldest(seen, kept);
        let mut write = Write::new(self.inner.keys.bucket(subject));
        if alone == Alone::Yes {
            write.only_if(REVISION, "=", seen.revision);
        }
        write.add(REVISION, 1_u64);
        let (mut actions, mut counted) = (Vec::new(), Vec::new());
        for (lease, mark) in marks {
            counted.push(mark);
            // The bucket itself, the leases so far, and usage.
            if 1 + actions.len() + 1 + self.usage_writes(subject, &counted).len() > ACTIONS_MAX {
                counted.pop();
                break;
            }
            if mark.is_own && is_remembered(mark.ended.at, now) {
                let item = self.end_item(lease, mark, There::Whatever, now);
                actions.push(Action::Update(item));
            }
            if alone == Alone::No {
                write.only_if(&end_name(lease), "=", mark.to_string());
            }
            write.remove(&end_name(lease));
            gone.leases.insert(lease);
        }
        if let Some(newest) = gone.leases.iter().map(|lease| lease.millis()).max() {
            raise(&mut write, seen, newest);
            write.add(ENDS, -i64::try_from(gone.leases.len()).unwrap_or(0));
        }
        let long_ago = now.as_micros().saturating_sub(u64::try_from(REMEMBERED.as_micros()).unwrap_or(0));
        for (lease, attempt) in seen.undone.iter().filter(|(_, attempt)| **attempt < long_ago) {
            if alone == Alone::No {
                write.only_if(&undone_name(*lease), "=", *attempt);
            }
            write.remove(&undone_name(*lease));
            gone.undone.insert(*lease);
        }
        let is_unused = |name: &&String| seen.open.values().all(|mark| mark.levels != **name);
        // Whoever draws meanwhile may name them again.
        for name in seen.levels.keys().filter(is_unused).filter(|_| alone == Alone::Yes) {
            write.remove(&format!("l:{name}"));
            gone.levels.insert(name.clone());
        }
        actions.extend(self.usage_writes(subject, &counted).into_iter().map(Action::Update));
        actions.push(Action::Update(write));
        (actions, gone)
    }

    /// Adds what leases have used to the usage of a bucket.
    pub(super) fn usage_writes(&self, subject: &Subject, marks: &[&EndMark]) -> Vec<Write> {
        let mut sums: BTreeMap<(Window, Stamp), BTreeMap<&str, Tally>> = BTreeMap::new();
        for mark in marks {
            for window in Window::ALL {
                let start = window.around(mark.drawn_at).start;
                for (name, units) in &mark.used {
                    let own = if mark.is_own { *units } else { 0 };
                    let names = sums.entry((window, start)).or_default();
                    names.entry(name.as_str()).or_default().add(Tally { units: *units, own, leases: 1 });
                }
            }
        }
        let write = |((window, start), names): (&(Window, Stamp), &BTreeMap<&str, Tally>)| {
            let mut write = Write::new(self.inner.keys.usage(subject, *window, *start));
            write.set("GSI2PK", self.inner.keys.resource(&subject.resource));
            write.set("GSI2SK", usage_order(*window, subject, *start));
            write.set("start", start.as_micros());
            if let Some(ttl) = kept_until(*window, *start) {
                write.set(TTL, ttl);
            }
            for (name, Tally { units, own, leases }) in names {
                write.add(&format!("u:{name}"), *units);
                write.add(&format!("w:{name}"), *own);
                write.add(&format!("k:{name}"), *leases);
            }
            write
        };
        sums.iter().map(write).collect()
    }
}

/// The marks of an item, the eldest first, without so many of the youngest.
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

/// When the engine may forget usage.
fn kept_until(window: Window, start: Stamp) -> Option<u64> {
    let Retention { hours, days, months, .. } = Retention::default();
    let kept = [hours, days, months][window as usize]?;
    Some((window.around(start).end + kept).as_micros() / 1_000_000)
}
