//! Listings of the memory store: balances, buckets, policies, entities, usage and audit, in pages.

use std::collections::BTreeMap;
use std::ops::Bound::{self, Excluded, Included, Unbounded};

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName, Subject};
use tidegate_core::limit::policy::{Scope, Versioned};
use tidegate_core::limit::usage::{Tally, Usage};
use tidegate_core::time::Stamp;

use super::admin::{Admin, WrittenPolicy};
use super::{Memory, Space};
use crate::buckets::{Bucket, Lookup, Seen};
use crate::cursor::{
    UsagePlace, entity_cursor, name_of, number_cursor, parse_entity, parse_number, parse_scope, scope_cursor,
};
use crate::desk::{Bucket as Kept, shelf_of};
use crate::error::StoreError;
use crate::ledger::{AuditQuery, Ledger, Prune, UsageOf, UsageQuery};
use crate::page::{Page, Paging};
use crate::policies::Listing;
use crate::reply::Reply;
use crate::sync::lock;

/// Subjects that are looked up at a time: whoever draws from a new one waits that long.
const CHUNK: usize = 256;

impl Ledger for Memory {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        Reply::ready(self.space.usage(query, paging))
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        Reply::ready(lock(&self.space.admin).audited(query, paging))
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::ready(Ok(match *prune {
            Prune::Usage { window, before } => self.space.prune_usage(window, before, max),
            Prune::Audit { through } => lock(&self.space.admin).prune_audit(through, max),
        } as u64))
    }
}

impl Space {
    pub(super) fn balances(&self, lookup: &Lookup) -> Seen {
        let at = self.now();
        let buckets = match lookup {
            Lookup::Subjects(subjects) => {
                subjects.iter().filter_map(|subject| self.bucket(subject, at)).collect()
            }
            Lookup::Entities(entities) => self.buckets_of_entities(entities, at),
            Lookup::Lineage(entity) => {
                let above = lock(&self.admin).lineage(entity);
                let above = above.iter().filter_map(|entity| entity.value.next().cloned());
                let entities: Vec<_> = [entity.clone()].into_iter().chain(above).collect();
                self.buckets_of_entities(&entities, at)
            }
        };
        Seen { at, clock_offset: self.clock.offset(), buckets }
    }

    fn buckets_of_entities(&self, entities: &[EntityId], at: Stamp) -> Vec<Bucket> {
        let subjects = entities.iter().flat_map(|entity| self.subjects_of(entity));
        subjects.filter_map(|subject| self.bucket(&subject, at)).collect()
    }

    pub(super) fn buckets_of(
        &self,
        resource: &ResourceName,
        paging: &Paging,
    ) -> Result<Page<Bucket>, StoreError> {
        let at = self.now();
        let from = paging.cursor().map(parse_entity).transpose()?;
        let from = from.as_ref().map_or(Unbounded, Excluded);
        let entities: Vec<EntityId> = lock(&self.index)
            .by_resource
            .get(resource)
            .map(|entities| {
                entities.range::<EntityId, _>((from, Unbounded)).take(paging.max() + 1).cloned().collect()
            })
            .unwrap_or_default();
        let subject = |entity| Subject { entity, resource: resource.clone() };
        let buckets = entities.into_iter().filter_map(|entity| self.bucket(&subject(entity), at)).collect();
        Ok(Page::cut(buckets, paging, |bucket: &Bucket| entity_cursor(&bucket.subject.entity)))
    }

    fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, StoreError> {
        // Whoever asks for usage means that of leases past their deadline too.
        self.sweep_in_passing(self.clock.now(), usize::MAX);
        let after = paging.cursor().map(UsagePlace::parse).transpose()?;
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
            let last = subjects.last().filter(|_| subjects.len() == CHUNK && lines.len() <= paging.max());
            let Some(last) = last else { break };
            (from, is_first) = (Some(name_of(&query.of, last).to_owned()), false);
        }
        Ok(Page::cut(lines, paging, |line| UsagePlace::of(&query.of, line)))
    }

    /// Up to `count` of the subjects whose usage is asked for, in order, from `from` on.
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

    fn with_bucket<T>(&self, subject: &Subject, read: impl FnOnce(&Kept) -> T) -> Option<T> {
        let hash = self.hash(subject);
        let guard = lock(&self.shards[shelf_of(hash)]);
        guard.shelf.get(hash, subject).map(read)
    }
}

fn lines_of(bucket: &Kept, query: &UsageQuery, after: Option<&UsagePlace<'_>>, found: &mut Vec<Usage>) {
    let name = name_of(&query.of, &bucket.subject);
    let after = after.filter(|place| place.name == name);
    // Limits given with calls have rows of their own, and are used under the same name.
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

impl Admin {
    pub(super) fn list(
        &self,
        listing: &Listing,
        paging: &Paging,
    ) -> Result<Page<(Scope, WrittenPolicy)>, StoreError> {
        let after = paging.cursor().map(parse_scope).transpose()?;
        let from = after.as_ref().map_or(Unbounded, Excluded);
        let written = |scope: Scope| {
            let found = self.policies.get(&scope).cloned();
            found.map(|written| (scope, written))
        };
        let is_later = |scope: &Scope| after.as_ref().is_none_or(|after| scope > after);
        let count = paging.max() + 1;
        let policies = match listing {
            Listing::All => {
                let policies = self.policies.range((from, Unbounded)).take(count);
                policies.map(|(scope, policy)| (scope.clone(), policy.clone())).collect()
            }
            Listing::Entity(entity) => {
                let resources = self.own.get(entity).into_iter().flatten().cloned();
                let own =
                    resources.map(|resource| Scope::Subject(Subject { entity: entity.clone(), resource }));
                let scopes = [Scope::Entity(entity.clone())].into_iter().chain(own);
                scopes.filter(is_later).filter_map(written).take(count).collect()
            }
            Listing::Custom(resource) => {
                let entities = self.custom.get(resource).into_iter().flatten().cloned();
                let scopes =
                    entities.map(|entity| Scope::Subject(Subject { entity, resource: resource.clone() }));
                scopes.filter(is_later).filter_map(written).take(count).collect()
            }
        };
        Ok(Page::cut(policies, paging, |(scope, _)| scope_cursor(scope)))
    }

    pub(super) fn children_of(
        &self,
        parent: &EntityId,
        paging: &Paging,
    ) -> Result<Page<Versioned<Entity>>, StoreError> {
        let after = paging.cursor().map(parse_entity).transpose()?;
        let from = after.as_ref().map_or(Unbounded, Excluded);
        let children = self.children.get(parent).into_iter();
        let children = children.flat_map(|children| children.range::<EntityId, _>((from, Unbounded)));
        let found = children.filter_map(|id| self.entities.get(id).cloned()).take(paging.max() + 1).collect();
        Ok(Page::cut(found, paging, |entity| entity_cursor(entity.value.id())))
    }

    pub(super) fn entities_page(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, StoreError> {
        let after = paging.cursor().map(parse_entity).transpose()?;
        let from = after.as_ref().map_or(Unbounded, Excluded);
        let found = self.entities.range::<EntityId, _>((from, Unbounded)).take(paging.max() + 1);
        Ok(Page::cut(found.map(|(_, found)| found.clone()).collect(), paging, |entity| {
            entity_cursor(entity.value.id())
        }))
    }

    fn audited(&self, query: &AuditQuery, paging: &Paging) -> Result<Page<Entry>, StoreError> {
        let after = paging.cursor().map(parse_number).transpose()?;
        let is_asked = |entry: &Entry| {
            query.range.contains(&entry.at) && query.filed.as_ref().is_none_or(|filed| *filed == entry.filed)
        };
        let skip = after.map_or(0, |after| after.saturating_add(1).saturating_sub(self.forgotten));
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        let numbered = (self.forgotten..).zip(&self.audit).skip(skip);
        let found = numbered.filter(|(_, entry)| is_asked(entry)).take(paging.max() + 1);
        let page = Page::cut(found.collect(), paging, |(number, _)| number_cursor(*number));
        let items = page.items.into_iter().map(|(_, entry)| entry.clone()).collect();
        Ok(Page { items, next: page.next })
    }
}
