//! Listings of the memory store: buckets and usage.

use std::collections::BTreeMap;
use std::ops::Bound::{self, Excluded, Included, Unbounded};

use tidegate_core::limit::name::{EntityId, LimitName, ResourceName, Subject};
use tidegate_core::limit::usage::{Tally, Usage};
use tidegate_core::time::Stamp;

use super::Space;
use crate::buckets::{Bucket, BucketSnapshot, Lookup};
use crate::cursor::{UsagePlace, name_of};
use crate::ledger::{UsageOf, UsageQuery};
use crate::shared_engine::{Bucket as StoredBucket, table_of};
use crate::sync::lock;

/// Subjects read from the index under one lock, which delays draws from new subjects.
const CHUNK: usize = 256;

impl Space {
    pub(super) fn look(&self, lookup: &Lookup) -> BucketSnapshot {
        let at = self.now();
        let buckets = match lookup {
            Lookup::Subjects(subjects) => {
                subjects.iter().filter_map(|subject| self.bucket(subject, at)).collect()
            }
            Lookup::Entities(entities) => self.buckets_of_entities(entities, at),
            Lookup::Lineage(entity) => self.buckets_of_entities(std::slice::from_ref(entity), at),
        };
        BucketSnapshot { at, clock_offset: self.clock.offset(), buckets }
    }

    fn buckets_of_entities(&self, entities: &[EntityId], at: Stamp) -> Vec<Bucket> {
        let subjects = entities.iter().flat_map(|entity| self.subjects_of(entity));
        subjects.filter_map(|subject| self.bucket(&subject, at)).collect()
    }

    pub(super) fn scan_buckets(
        &self,
        resource: &ResourceName,
        after: Option<&EntityId>,
        max: usize,
    ) -> Vec<Bucket> {
        let at = self.now();
        let from = after.map_or(Unbounded, Excluded);
        let entities: Vec<EntityId> = lock(&self.index)
            .by_resource
            .get(resource)
            .map(|entities| entities.range::<EntityId, _>((from, Unbounded)).take(max).cloned().collect())
            .unwrap_or_default();
        let subject = |entity| Subject { entity, resource: resource.clone() };
        entities.into_iter().filter_map(|entity| self.bucket(&subject(entity), at)).collect()
    }

    pub(super) fn scan_usage(
        &self,
        query: &UsageQuery,
        after: Option<UsagePlace<'_>>,
        max: usize,
    ) -> Vec<Usage> {
        // Usage includes leases past their deadline.
        self.sweep_before_call(self.clock.now(), usize::MAX);
        let mut lines = Vec::new();
        let mut from = after.as_ref().map(|place| place.name.to_owned());
        let mut is_first = true;
        loop {
            let bound = match &from {
                None => Unbounded,
                Some(name) if is_first => Included(name.as_str()),
                Some(name) => Excluded(name.as_str()),
            };
            let subjects = self.subjects_from(&query.of, bound, CHUNK);
            for subject in &subjects {
                self.with_bucket(subject, |bucket| lines_of(bucket, query, after.as_ref(), &mut lines));
            }
            let last = subjects.last().filter(|_| subjects.len() == CHUNK && lines.len() < max);
            let Some(last) = last else { break };
            (from, is_first) = (Some(name_of(&query.of, last).to_owned()), false);
        }
        lines.truncate(max);
        lines
    }

    /// Up to `count` subjects of the query, in order, starting at `from`.
    fn subjects_from(&self, of: &UsageOf, from: Bound<&str>, count: usize) -> Vec<Subject> {
        let index = lock(&self.index);
        match of {
            UsageOf::Entity(entity) => {
                let resources = index.by_entity.get(entity).into_iter().flatten();
                let resources = resources.filter(|resource| match from {
                    Unbounded => true,
                    Included(from) => resource.as_str() >= from,
                    Excluded(from) => resource.as_str() > from,
                });
                let subject =
                    |resource: &ResourceName| Subject { entity: entity.clone(), resource: resource.clone() };
                resources.take(count).map(subject).collect()
            }
            UsageOf::Resource(resource) => {
                let entities = index.by_resource.get(resource).into_iter();
                let entities = entities.flat_map(|entities| entities.range::<str, _>((from, Unbounded)));
                let subject =
                    |entity: &EntityId| Subject { entity: entity.clone(), resource: resource.clone() };
                entities.take(count).map(subject).collect()
            }
        }
    }

    fn subjects_of(&self, entity: &EntityId) -> Vec<Subject> {
        self.subjects_from(&UsageOf::Entity(entity.clone()), Unbounded, usize::MAX)
    }

    fn bucket(&self, subject: &Subject, at: Stamp) -> Option<Bucket> {
        self.with_bucket(subject, |kept| Bucket {
            subject: subject.clone(),
            at,
            meters: kept.rows.iter().map(|row| row.meter.clone()).collect(),
        })
    }

    fn with_bucket<T>(&self, subject: &Subject, read: impl FnOnce(&StoredBucket) -> T) -> Option<T> {
        let hash = self.hash(subject);
        let guard = lock(&self.shards[table_of(hash)]);
        guard.table.get(hash, subject).map(read)
    }
}

fn lines_of(
    bucket: &StoredBucket,
    query: &UsageQuery,
    after: Option<&UsagePlace<'_>>,
    found: &mut Vec<Usage>,
) {
    let name = name_of(&query.of, &bucket.subject);
    let after = after.filter(|place| place.name == name);
    // Limits given with calls have separate rows, and count under the same name.
    let mut sums: BTreeMap<(&LimitName, Stamp), Tally> = BTreeMap::new();
    for row in &bucket.rows {
        for (start, tally) in row.usage.iter().flat_map(|usage| usage.within(query.window, &query.range)) {
            sums.entry((row.meter.rule().name(), start)).or_default().add(tally);
        }
    }
    for ((limit, start), tally) in sums {
        if after.is_none_or(|place| (limit.as_str(), start) > (place.limit, place.start)) {
            let (subject, limit) = (bucket.subject.clone(), limit.clone());
            found.push(Usage { subject, limit, window: query.window, start, tally });
        }
    }
}
