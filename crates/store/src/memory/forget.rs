//! Forgetting buckets that are the same as none.
//!
//! A bucket that is full is a bucket that was never used, except for three things that it keeps: what was used, until
//! that is too old to be kept; the places of open leases, which hold it; and how new the rules are that it follows. A
//! caller who brings older ones is decided by those of the bucket, and would be decided by its own if there were none.
//! So it stays until nobody can still bring older ones.
//!
//! Draws from buckets that are there do nothing for this. Whoever makes a bucket looks at a few others of its shard, and
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

/// Places of its shard that whoever makes a bucket looks at: more than one, so that they become fewer.
const LOOKS: usize = 2;
/// The same where there is no room.
const LOOKS_WITHOUT_ROOM: usize = 64;
/// Places of each shard that a sweep looks at: a million in sixteen sweeps.
const LOOKS_SWEPT: usize = 2_048;
/// Entries of the audit that a sweep forgets.
const AUDIT_SWEPT: usize = 512;
/// Changes whose times are known apart.
const RECENT_MAX: usize = 64;

/// When administrators made their last changes.
#[derive(Default)]
pub(super) struct Changes {
    settled: Version,
    /// The oldest first.
    recent: VecDeque<(Stamp, Version)>,
}

impl Changes {
    pub(super) fn note(&mut self, version: Version, at: Stamp) {
        let at = self.recent.back().map_or(at, |(last, _)| at.max(*last));
        if self.recent.len() >= RECENT_MAX {
            // The one before is taken for as new as this one, and settles later than it could.
            self.recent.pop_back();
        }
        self.recent.push_back((at, version));
    }

    /// A version that has stood for so long that nobody brings rules from before it: whoever does has not asked the
    /// store for longer than it remembers a lease.
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
    /// Capacity for one more subject, if there is any once some are forgotten.
    pub(super) fn make_room(
        &self,
        buckets: &mut BucketTable,
        places: &[Place],
        now: Stamp,
    ) -> Result<(), StoreError> {
        let max = self.options.subjects_max;
        let looks = if self.subjects.load(Ordering::Relaxed) < max { LOOKS } else { LOOKS_WITHOUT_ROOM };
        self.forget(buckets, looks, places, now);
        let one_more = |subjects: usize| (subjects < max).then_some(subjects + 1);
        if self.subjects.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok() {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(StoreError::Full { what: "subjects", max: max as u64 })
    }

    /// Looks for what can be forgotten: a part of the buckets, and what of the audit is too old.
    pub(super) fn tend(&self, read: Stamp) {
        let offset = u64::try_from(self.clock.offset().as_micros()).unwrap_or(u64::MAX);
        self.clock_offset.store(offset, Ordering::Relaxed);
        for shard in &self.shards {
            let mut guard = lock(shard);
            let now = guard.go_on(read);
            let Shard { table, .. } = &mut *guard;
            self.forget(table, LOOKS_SWEPT, &[], now);
            table.compact();
        }
        if let Some(before) = self.options.retention.audit_before(read) {
            lock(&self.kept).prune_audit_before(before, AUDIT_SWEPT);
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

    fn forget(&self, buckets: &mut BucketTable, looks: usize, places: &[Place], now: Stamp) {
        let offset = Duration::from_micros(self.clock_offset.load(Ordering::Relaxed));
        let settled = lock(&self.changes).settled(now);
        let may_go = |index: u32, bucket: &mut Bucket| {
            // The call that asks for room has found these and is not done.
            if places.iter().any(|place| place.index == Some(index)) {
                return false;
            }
            self.prune_old(bucket, now - offset);
            bucket.is_as_new(settled, now)
        };
        buckets.take_off(looks, may_go, |subject| {
            self.subjects.fetch_sub(1, Ordering::Relaxed);
            self.forgotten.fetch_add(1, Ordering::Relaxed);
            lock(&self.index).remove(subject);
        });
    }

    /// Forgets the usage that is too old to be kept.
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
