//! Shards of buckets and leases, locked together for one decision.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tidegate_core::limit::cascade::{Level, Levels};
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::time::Stamp;

use super::Space;
use super::leases::Leases;
use crate::error::StoreError;
use crate::shared_engine::{
    BucketSet, BucketTable, Capacity, Place, Places, StepContext, check_levels, table_of,
};
use crate::sync::lock;

/// A shard: buckets, and the leases of their subjects.
#[derive(Default)]
pub(super) struct Shard {
    pub(super) table: BucketTable,
    pub(super) leases: Leases,
    /// The latest time of a decision.
    latest: Stamp,
}

impl Shard {
    /// The time of a decision: `read`, unless a call with a later reading was faster.
    pub(super) fn advance(&mut self, read: Stamp) -> Stamp {
        self.latest = read.max(self.latest);
        self.latest
    }
}

/// The existing buckets, in order.
#[derive(Default)]
pub(super) struct Index {
    pub(super) by_entity: BTreeMap<EntityId, Vec<ResourceName>>,
    pub(super) by_resource: BTreeMap<ResourceName, BTreeSet<EntityId>>,
}

impl Space {
    /// Locks the shards of these levels in order, and decides under the locks at one time: `read`, which was
    /// read before, unless a call with a later reading was faster. So times agree with the order of
    /// decisions.
    #[inline]
    pub(super) fn decide<T>(
        &self,
        levels: &Levels,
        read: Stamp,
        decide: impl FnOnce(&mut StepContext<'_, Leases>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let [level] = levels.levels() else { return self.decide_across_shards(levels, read, decide) };
        // Fast path: a single level, whose shard needs no ordering.
        let mut place = Place { hash: self.hash(&level.subject), index: None };
        let number = table_of(place.hash);
        let mut guard = lock(&self.shards[number]);
        let Shard { table, leases, latest } = &mut *guard;
        *latest = read.max(*latest);
        let buckets = BucketSet { home: (number, table), others: Vec::new(), capacity: self };
        let places = std::slice::from_mut(&mut place);
        decide(&mut StepContext { leases, buckets, places, now: *latest, offset: Duration::ZERO })
    }

    fn decide_across_shards<T>(
        &self,
        levels: &Levels,
        read: Stamp,
        decide: impl FnOnce(&mut StepContext<'_, Leases>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        check_levels(levels)?;
        let place = |level: &Level| Place { hash: self.hash(&level.subject), index: None };
        let mut places: Places = levels.levels().iter().map(place).collect();
        let mut wanted: Vec<usize> = places.iter().map(|place| table_of(place.hash)).collect();
        let home = wanted[0];
        wanted.sort_unstable();
        wanted.dedup();
        let mut shards: Vec<_> = wanted.into_iter().map(|shard| (shard, lock(&self.shards[shard]))).collect();
        let now = shards.iter().map(|(_, shard)| shard.latest).fold(read, Stamp::max);
        for (_, shard) in &mut shards {
            shard.latest = now;
        }
        let (mut own, mut others) = (None, Vec::with_capacity(shards.len() - 1));
        for (number, shard) in &mut shards {
            let Shard { table, leases, .. } = &mut **shard;
            if *number == home { own = Some((table, leases)) } else { others.push((*number, table)) }
        }
        let (own, leases) = own.expect("the subject's own shard is one of them");
        let buckets = BucketSet { home: (home, own), others, capacity: self };
        decide(&mut StepContext { leases, buckets, places: &mut places, now, offset: Duration::ZERO })
    }
}

impl Capacity for Space {
    #[cold]
    fn reserve(&self, buckets: &mut BucketTable, places: &[Place], now: Stamp) -> Result<(), StoreError> {
        self.reserve_subject(buckets, places, now)
    }

    /// Adds the subject to the index.
    #[cold]
    fn created(&self, subject: &Subject) {
        let mut index = lock(&self.index);
        let Index { by_entity, by_resource } = &mut *index;
        let resources = by_entity.entry(subject.entity.clone()).or_default();
        let place = resources.partition_point(|resource| *resource < subject.resource);
        resources.reserve_exact(1);
        resources.insert(place, subject.resource.clone());
        match by_resource.get_mut(&subject.resource) {
            Some(entities) => drop(entities.insert(subject.entity.clone())),
            None => drop(by_resource.insert(subject.resource.clone(), [subject.entity.clone()].into())),
        }
    }
}
