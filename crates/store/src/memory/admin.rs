//! Policies, entities and the audit: what administrators change, under one lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::audit::{Change, Entry, Filed};
use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::time::Stamp;

use super::tokens::Kept;
use super::{Memory, Space};
use crate::entities::Entities;
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::policies::{
    CHANGED_MAX, Changed, Listing, Policies, PolicyChange, Written, check_actor, check_changes,
};
use crate::reply::Reply;
use crate::sync::lock;

/// A store holds at most so many entities, and so many policies.
const RECORDS_MAX: usize = 1 << 22;
/// Changes that are remembered; the oldest go first.
const AUDIT_MAX: usize = 100_000;

/// A policy as it was written.
pub(super) type WrittenPolicy = Versioned<Arc<Policy>>;

/// What administrators change.
#[derive(Default)]
pub(super) struct Admin {
    version: Version,
    pub(super) policies: BTreeMap<Scope, WrittenPolicy>,
    /// Which entities have a policy for a resource, both ways.
    pub(super) custom: BTreeMap<ResourceName, BTreeSet<EntityId>>,
    pub(super) own: BTreeMap<EntityId, BTreeSet<ResourceName>>,
    pub(super) entities: BTreeMap<EntityId, Versioned<Entity>>,
    pub(super) children: BTreeMap<EntityId, BTreeSet<EntityId>>,
    pub(super) tokens: Kept,
    pub(super) audit: VecDeque<Entry>,
    /// Changes that were forgotten: the number of the first that is remembered.
    pub(super) forgotten: u64,
}

impl Policies for Memory {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        let admin = lock(&self.space.admin);
        let policies = scopes.iter().map(|scope| admin.policies.get(scope).cloned()).collect();
        Reply::ready(Ok(Written { version: admin.version, policies }))
    }

    fn version(&self) -> Reply<'_, Version> {
        Reply::ready(Ok(Version::new(self.space.version.load(Ordering::Acquire))))
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        let admin = lock(&self.space.admin);
        let version = Version::new(self.space.version.load(Ordering::Acquire));
        let skip = admin.audit.len().saturating_sub(CHANGED_MAX);
        let last = admin.audit.iter().skip(skip).map(|entry| (entry.version, entry.change.clone()));
        Reply::ready(Ok(Changed::since(since, version, last)))
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, WrittenPolicy)>> {
        Reply::ready(lock(&self.space.admin).list(listing, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        Reply::ready(self.space.apply(changes, actor))
    }
}

impl Entities for Memory {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::ready(self.space.put(entity, expect, actor))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        Reply::ready(Ok(lock(&self.space.admin).entities.get(id).cloned()))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        Reply::ready(Ok(lock(&self.space.admin).lineage(id)))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::ready(self.space.remove(id, expect, actor))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::ready(lock(&self.space.admin).children_of(parent, paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::ready(lock(&self.space.admin).entities_page(paging))
    }
}

impl Space {
    /// Tells those who do not take the lock that something has changed.
    pub(super) fn publish(&self, admin: &Admin, now: Stamp) -> Version {
        lock(&self.changes).note(admin.version, now);
        self.version.store(admin.version.number(), Ordering::Release);
        admin.version
    }

    fn apply(&self, changes: &[PolicyChange], actor: &str) -> Result<Version, StoreError> {
        check_actor(actor)?;
        let now = self.clock.now();
        let mut admin = lock(&self.admin);
        let version_at = |scope: &Scope| Ok(admin.policies.get(scope).map(|written| written.version));
        let made = check_changes(changes, version_at)?;
        let is_new =
            |change: &&&PolicyChange| change.policy.is_some() && !admin.policies.contains_key(&change.scope);
        if admin.policies.len() + made.iter().filter(is_new).count() > RECORDS_MAX {
            return Err(StoreError::Full { what: "policies", max: RECORDS_MAX as u64 });
        }
        if made.is_empty() {
            return Ok(admin.version);
        }
        admin.next_version();
        for change in made {
            admin.write_policy(&change.scope, change.policy.clone(), actor, now);
        }
        Ok(self.publish(&admin, now))
    }

    fn put(&self, entity: &Entity, expect: Expect, actor: &str) -> Result<Version, StoreError> {
        check_actor(actor)?;
        entity.check()?;
        let now = self.clock.now();
        let mut admin = lock(&self.admin);
        let id = entity.id();
        let before = admin.entities.get(id).cloned();
        let current = before.as_ref().map(|before| before.version);
        if !expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the entity `{id}`"), current });
        }
        entity.check_parent(|id| admin.entities.get(id).map(|above| above.value.parent_id().cloned()))?;
        if before.is_none() && admin.entities.len() >= RECORDS_MAX {
            return Err(StoreError::Full { what: "entities", max: RECORDS_MAX as u64 });
        }
        let before = before.map(|before| before.value);
        admin.next_version();
        admin.move_child(id, before.as_ref().and_then(Entity::parent_id), entity.parent_id());
        let written = Versioned { version: admin.version, value: entity.clone() };
        admin.entities.insert(id.clone(), written);
        let change = Change::Entity { before, after: Some(entity.clone()) };
        admin.note(Filed::entity(id), change, actor, now);
        Ok(self.publish(&admin, now))
    }

    fn remove(&self, id: &EntityId, expect: Expect, actor: &str) -> Result<Version, StoreError> {
        check_actor(actor)?;
        let now = self.clock.now();
        let mut admin = lock(&self.admin);
        let before = admin.entities.get(id).cloned();
        let current = before.as_ref().map(|before| before.version);
        if !expect.holds(current) {
            return Err(StoreError::Stale { what: format!("the entity `{id}`"), current });
        }
        let Some(before) = before else { return Err(StoreError::NoEntity { entity: id.clone() }) };
        let children = admin.children.get(id).map_or(0, |children| children.len() as u64);
        if children > 0 {
            return Err(StoreError::HasChildren { entity: id.clone(), children });
        }
        admin.next_version();
        let own = admin.own.get(id).cloned().unwrap_or_default();
        let own = own.into_iter().map(|resource| {
            Scope::Subject(tidegate_core::limit::name::Subject { entity: id.clone(), resource })
        });
        for scope in [Scope::Entity(id.clone())].into_iter().chain(own) {
            if admin.policies.contains_key(&scope) {
                admin.write_policy(&scope, None, actor, now);
            }
        }
        admin.move_child(id, before.value.parent_id(), None);
        admin.entities.remove(id);
        let change = Change::Entity { before: Some(before.value), after: None };
        admin.note(Filed::entity(id), change, actor, now);
        Ok(self.publish(&admin, now))
    }
}

impl Admin {
    /// The version of the next change.
    pub(super) const fn next_version(&mut self) -> Version {
        self.version = self.version.next();
        self.version
    }

    pub(super) fn lineage(&self, id: &EntityId) -> Vec<Versioned<Entity>> {
        let mut lineage: Vec<Versioned<Entity>> = Vec::new();
        let mut next = Some(id);
        while let Some(found) = next.and_then(|id| self.entities.get(id))
            && lineage.len() <= LEVELS_MAX
        {
            next = found.value.next();
            lineage.push(found.clone());
        }
        lineage
    }

    fn write_policy(&mut self, scope: &Scope, policy: Option<Policy>, actor: &str, now: Stamp) {
        let after = policy.clone();
        let before = match policy {
            Some(policy) => {
                let written = Versioned { version: self.version, value: Arc::new(policy) };
                self.policies.insert(scope.clone(), written)
            }
            None => self.policies.remove(scope),
        };
        if let Scope::Subject(subject) = scope {
            let (entity, resource) = (&subject.entity, &subject.resource);
            if after.is_some() {
                self.custom.entry(resource.clone()).or_default().insert(entity.clone());
                self.own.entry(entity.clone()).or_default().insert(resource.clone());
            } else {
                take_out(&mut self.custom, resource, entity);
                take_out(&mut self.own, entity, resource);
            }
        }
        let before = before.map(|before| Policy::clone(&before.value));
        let change = Change::Policy { scope: scope.clone(), before, after };
        self.note(Filed::scope(scope), change, actor, now);
    }

    fn move_child(&mut self, id: &EntityId, from: Option<&EntityId>, to: Option<&EntityId>) {
        if let Some(from) = from {
            take_out(&mut self.children, from, id);
        }
        if let Some(to) = to {
            self.children.entry(to.clone()).or_default().insert(id.clone());
        }
    }

    pub(super) fn note(&mut self, filed: Filed, change: Change, actor: &str, at: Stamp) {
        let entry = Entry { version: self.version, at, actor: actor.to_owned(), filed, change };
        self.audit.push_back(entry);
        if self.audit.len() > AUDIT_MAX {
            self.audit.pop_front();
            self.forgotten += 1;
        }
    }
}

/// Takes a value out of a key's set, and the set if it was the last.
fn take_out<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}
