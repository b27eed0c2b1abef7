//! Policies: each scope has one item with all its limits.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Policy, Scope, Version};

use super::DynamoDb;
use super::keys::{GSI2, GSI3, Item, Key, scope_order};
use super::link::Range;
use super::log::{Log, Plan, Planned, read_policy};
use super::view::{number_of, text_of};
use crate::cursor::{bad_cursor, parse_scope, scope_cursor};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::policies::{Listing, Policies, PolicyChange, Written, check_changes};
use crate::reply::Reply;
use crate::tables::{WrittenPolicy, subject};

impl Policies for DynamoDb {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        Reply::later(self.within(async move {
            let keys: Vec<Key> = scopes.iter().map(|scope| self.inner.keys.policy(scope)).collect();
            let version = self.inner.keys.version();
            // One call is not one moment. What was written meanwhile is newer than the version beside it, and is read again; and
            // where the version is not the one that was known before, a policy may have been read that is older than it.
            loop {
                let known = self.inner.policies_at.load(Ordering::Relaxed);
                let asked: Vec<Key> = keys.iter().cloned().chain([version.clone()]).collect();
                let found = self.inner.link.get_all(&asked).await?;
                let number = found.get(&version).map_or(Ok(0), |item| number_of(item, "version"))?;
                let policies: Result<Vec<_>, _> =
                    keys.iter().map(|key| found.get(key).map(read_policy).transpose()).collect();
                let policies = policies?;
                let newest = policies.iter().flatten().map(|policy| policy.version.number()).max();
                self.inner.policies_at.store(number, Ordering::Relaxed);
                if number == known && newest.is_none_or(|newest| newest <= number) {
                    return Ok(Written { version: Version::new(number), policies });
                }
            }
        }))
    }

    fn version(&self) -> Reply<'_, Version> {
        Reply::later(self.within(self.newest_version()))
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, WrittenPolicy)>> {
        Reply::later(self.list_policies(listing, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        Reply::later(async move { self.change(actor, &Apply(changes)).await })
    }
}

impl DynamoDb {
    async fn list_policies(
        &self,
        listing: &Listing,
        paging: &Paging,
    ) -> Result<Page<(Scope, WrittenPolicy)>, StoreError> {
        let mut after = paging.cursor().map(parse_scope).transpose()?;
        let mut there = Vec::new();
        loop {
            let found = self.listed_scopes(listing, after.as_ref(), paging).await?;
            // Of what an index shows some may be gone: that is not the end of it.
            let is_last = found.len() <= paging.max() || matches!(listing, Listing::Entity(_));
            after = found.last().cloned();
            let policies = self.policies_at(&found).await?;
            there
                .extend(found.into_iter().zip(policies).filter_map(|(scope, policy)| Some((scope, policy?))));
            if is_last || there.len() > paging.max() {
                return Ok(Page::cut(there, paging, |(scope, _)| scope_cursor(scope)));
            }
        }
    }

    /// More scopes than a page has, after one of them, that are listed as having a policy.
    async fn listed_scopes(
        &self,
        listing: &Listing,
        after: Option<&Scope>,
        paging: &Paging,
    ) -> Result<Vec<Scope>, StoreError> {
        let keys = &self.inner.keys;
        match listing {
            Listing::All => {
                let range = Range::new(Some(GSI2), keys.all("CONFIGS"), String::new());
                let range = range.after(after.map(scope_order));
                let found = self.inner.link.range(&range, paging.max() + 1).await?;
                found.iter().map(|item| scope_in(text_of(item, "GSI2SK")?)).collect()
            }
            Listing::Entity(entity) => {
                let mut scopes = self.scopes_of(entity).await?;
                if let Some(after) = after {
                    scopes.retain(|scope| scope > after);
                }
                Ok(scopes)
            }
            Listing::Custom(resource) => {
                let after = match after {
                    None => None,
                    Some(Scope::Subject(subject)) => Some(subject.entity.to_string()),
                    Some(_) => {
                        return Err(bad_cursor(paging.cursor().map_or("", crate::page::Cursor::as_str)));
                    }
                };
                let range = Range::new(Some(GSI3), keys.custom(resource), String::new()).after(after);
                let found = self.inner.link.range(&range, paging.max() + 1).await?;
                let scope =
                    |item: &Item| Ok(Scope::Subject(subject(text_of(item, "GSI3SK")?, resource.as_str())?));
                found.iter().map(scope).collect()
            }
        }
    }

    pub(super) async fn policies_at(
        &self,
        scopes: &[Scope],
    ) -> Result<Vec<Option<WrittenPolicy>>, StoreError> {
        let keys: Vec<Key> = scopes.iter().map(|scope| self.inner.keys.policy(scope)).collect();
        let found = self.inner.link.get_all(&keys).await?;
        keys.iter().map(|key| found.get(key).map(read_policy).transpose()).collect()
    }

    /// The scopes at which an entity has a policy, its own first.
    pub(super) async fn scopes_of(&self, entity: &EntityId) -> Result<Vec<Scope>, StoreError> {
        let range = Range::new(None, self.inner.keys.entity_pk(entity), "#CONFIG#".to_owned());
        let mut scopes = Vec::new();
        for item in self.inner.link.range(&range, usize::MAX).await? {
            scopes.push(scope_in(text_of(&item, "GSI2SK")?)?);
        }
        scopes.sort_unstable();
        Ok(scopes)
    }
}

/// The scope of a policy's place among all of them.
fn scope_in(order: &str) -> Result<Scope, StoreError> {
    let corrupt = || StoreError::Corrupt { what: format!("the place of a policy {order:?}") };
    let mut parts = order.split(super::keys::PART);
    let (kind, entity, resource) = (parts.next(), parts.next(), parts.next());
    let kind = kind.and_then(|kind| kind.parse().ok()).ok_or_else(corrupt)?;
    crate::tables::scope(kind, entity.ok_or_else(corrupt)?, resource.ok_or_else(corrupt)?)
}

/// Policies that are to be written or removed.
struct Apply<'a>(&'a [PolicyChange]);

impl Plan for Apply<'_> {
    type Answer = Version;

    async fn plan(&self, store: &DynamoDb, mut log: Log) -> Result<Planned<Version>, StoreError> {
        let scopes: Vec<Scope> = self.0.iter().map(|change| change.scope.clone()).collect();
        let there = store.policies_at(&scopes).await?;
        let mut there: HashMap<Scope, WrittenPolicy> =
            scopes.into_iter().zip(there).filter_map(|(scope, policy)| Some((scope, policy?))).collect();
        let made = check_changes(self.0, |scope| Ok(there.get(scope).map(|policy| policy.version)))?;
        if made.is_empty() {
            return Ok(Planned::Nothing(log.seen));
        }
        for change in made {
            let before = there.remove(&change.scope).map(|before| Policy::clone(&before.value));
            log.write_policy(store, &change.scope, before, change.policy.clone());
        }
        let version = log.version;
        Ok(Planned::Change(log, version))
    }
}
