//! Policies, entities and the ledger as the traits ask for them.

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Scope, Version, Versioned};
use tidegate_core::limit::usage::Usage;

use super::{Postgres, listing};
use crate::entities::Entities;
use crate::ledger::{AuditQuery, Ledger, Prune, UsageQuery};
use crate::page::{Page, Paging};
use crate::policies::{Changed, Listing, Policies, PolicyChange, Written};
use crate::reply::Reply;
use crate::tables::WrittenPolicy;

impl Policies for Postgres {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        Reply::later(listing::read(&self.inner, self.namespace, scopes))
    }

    fn version(&self) -> Reply<'_, Version> {
        Reply::later(listing::version(&self.inner, self.namespace))
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        Reply::later(listing::changed(&self.inner, self.namespace, since))
    }

    fn list<'a>(&'a self, asked: &'a Listing, paging: &'a Paging) -> Reply<'a, Page<(Scope, WrittenPolicy)>> {
        Reply::later(listing::list(&self.inner, self.namespace, asked, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        Reply::later(self.apply_all(changes, actor))
    }
}

impl Entities for Postgres {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(self.put_entity(entity, expect, actor))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        Reply::later(listing::entity(&self.inner, self.namespace, id))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        Reply::later(listing::lineage(&self.inner, self.namespace, id))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        Reply::later(self.remove_entity(id, expect, actor))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::later(listing::entities(&self.inner, self.namespace, Some(parent), paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::later(listing::entities(&self.inner, self.namespace, None, paging))
    }
}

impl Ledger for Postgres {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        Reply::later(async move {
            self.sweep_what_is_due().await?;
            listing::usage(&self.inner, self.namespace, query, paging).await
        })
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        Reply::later(listing::audit(&self.inner, self.namespace, query, paging))
    }

    fn prune<'a>(&'a self, asked: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.prune_up_to(asked, max))
    }
}
