//! Eviction of buckets that equal unused ones.
//!
//! A full bucket equals one that was never used, except for three things: its usage, until the retention
//! expires; the pins of open leases; and the version of its rules. A caller with an older version is decided
//! by the bucket's rules, but would be decided by its own if the bucket did not exist. So the bucket stays
//! until no caller can still bring older rules.
//!
//! Draws from existing buckets do no eviction work. Creating a bucket visits a few others of its shard, and
//! so does a sweep.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use super::Space;
use super::options::MemoryStats;
use super::shards::{Index, Shard};
use crate::error::StoreError;
use crate::shared_engine::{Bucket, BucketTable, Place};
use crate::sync::lock;

/// Slots of its shard that the creation of a bucket visits: more than one, so that their number can fall.
const VISITS: usize = 2;
/// Slots visited if the store is full.
const VISITS_WHEN_FULL: usize = 64;
/// Slots of each shard that a sweep visits: a million in sixteen sweeps.
const VISITS_BY_SWEEP: usize = 2_048;
/// Audit entries that a sweep deletes.
const AUDIT_BY_SWEEP: usize = 512;
/// The number of changes with separate times.
const RECENT_MAX: usize = 64;

/// The times of the last administrative changes.
#[derive(Default)]
pub(super) struct RecentChanges {
    settled: Version,
    /// The oldest first.
    recent: VecDeque<(Stamp, Version)>,
}

impl RecentChanges {
    pub(super) fn note(&mut self, version: Version, at: Stamp) {
        let at = self.recent.back().map_or(at, |(last, _)| at.max(*last));
        if self.recent.len() >= RECENT_MAX {
            // Merge the previous change into this one: it settles later than necessary.
            self.recent.pop_back();
        }
        self.recent.push_back((at, version));
    }

    /// The newest version that is older than [`REMEMBERED`]: no live caller brings rules of an earlier
    /// version.
    fn settled(&mut self, now: Stamp) -> Version {
        while let Some((at, version)) = self.recent.front().copied()
            && at + REMEMBERED <= now
        {
            self.settled = version;
            self.recent.pop_front();
        }
        self.settled
    }
}

impl Space {
    /// Reserves capacity for one more subject, after trying to evict some.
    pub(super) fn reserve_subject(
        &self,
        buckets: &mut BucketTable,
        places: &[Place],
        now: Stamp,
    ) -> Result<(), StoreError> {
        let max = self.options.subjects_max;
        let visits = if self.subjects.load(Ordering::Relaxed) < max { VISITS } else { VISITS_WHEN_FULL };
        self.evict(buckets, visits, places, now);
        let one_more = |subjects: usize| (subjects < max).then_some(subjects + 1);
        if self.subjects.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok() {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(StoreError::Full { what: "subjects", max: max as u64 })
    }

    /// Housekeeping: evicts from a part of the buckets, and deletes old audit entries.
    pub(super) fn run_housekeeping(&self, read: Stamp) {
        let offset = u64::try_from(self.clock.offset().as_micros()).unwrap_or(u64::MAX);
        self.clock_offset.store(offset, Ordering::Relaxed);
        for shard in &self.shards {
            let mut guard = lock(shard);
            let now = guard.advance(read);
            let Shard { table, .. } = &mut *guard;
            self.evict(table, VISITS_BY_SWEEP, &[], now);
            table.compact();
        }
        if let Some(before) = self.options.retention.audit_before(read) {
            lock(&self.records).prune_audit_before(before, AUDIT_BY_SWEEP);
        }
    }

    pub(super) fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats {
            subjects: self.subjects.load(Ordering::Relaxed) as u64,
            subjects_forgotten: self.forgotten.load(Ordering::Relaxed),
            subjects_refused: self.refused.load(Ordering::Relaxed),
            ..MemoryStats::default()
        };
        for shard in &self.shards {
            let (open, ended) = lock(shard).leases.len();
            stats.leases_open += open as u64;
            stats.leases_ended += ended as u64;
        }
        stats
    }

    fn evict(&self, buckets: &mut BucketTable, visits: usize, places: &[Place], now: Stamp) {
        let offset = Duration::from_micros(self.clock_offset.load(Ordering::Relaxed));
        let settled = lock(&self.changes).settled(now);
        let may_evict = |index: u32, bucket: &mut Bucket| {
            // In use by the call that reserves capacity.
            if places.iter().any(|place| place.index == Some(index)) {
                return false;
            }
            self.prune_old(bucket, now - offset);
            bucket.is_as_new(settled, now)
        };
        buckets.evict(visits, may_evict, |subject| {
            self.subjects.fetch_sub(1, Ordering::Relaxed);
            self.forgotten.fetch_add(1, Ordering::Relaxed);
            lock(&self.index).remove(subject);
        });
    }

    /// Deletes usage that is older than the retention.
    fn prune_old(&self, bucket: &mut Bucket, now: Stamp) {
        for usage in bucket.rows.iter_mut().filter_map(|row| row.usage.as_deref_mut()) {
            for (window, before) in self.options.retention.usage_before(now) {
                let begun = usage.within(window, &(Stamp::ZERO..before)).next();
                if begun.is_some_and(|(start, _)| Window::around(window, start).end <= before) {
                    usage.prune(window, before);
                }
            }
        }
    }
}

impl Index {
    fn remove(&mut self, subject: &Subject) {
        if let Some(resources) = self.by_entity.get_mut(&subject.entity) {
            resources.retain(|resource| *resource != subject.resource);
            if resources.is_empty() {
                self.by_entity.remove(&subject.entity);
            }
        }
        if let Some(entities) = self.by_resource.get_mut(&subject.resource) {
            entities.remove(&subject.entity);
            if entities.is_empty() {
                self.by_resource.remove(&subject.resource);
            }
        }
    }
}
