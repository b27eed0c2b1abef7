//! Policies, entities and the ledger as the traits ask for them.

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Scope, Version, Versioned};
use tidegate_core::limit::usage::Usage;

use super::Sqlite;
use super::admin::{self, Apply, Put, Remove};
use super::listing;
use super::retention;
use super::work::Call;
use crate::entities::Entities;
use crate::ledger::{AuditQuery, Ledger, Prune, UsageQuery};
use crate::page::{Page, Paging};
use crate::policies::{Changed, Listing, Policies, PolicyChange, Written};
use crate::reply::Reply;
use crate::tables::WrittenPolicy;

impl Policies for Sqlite {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        let (namespace, scopes) = (self.namespace, scopes.to_vec());
        Reply::later(self.inner.read(move |connection, _| listing::read(connection, namespace, &scopes)))
    }

    fn version(&self) -> Reply<'_, Version> {
        let namespace = self.namespace;
        Reply::later(self.inner.read(move |connection, _| listing::version(connection, namespace)))
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        let namespace = self.namespace;
        Reply::later(self.inner.read(move |connection, _| listing::changed(connection, namespace, since)))
    }

    fn list<'a>(&'a self, asked: &'a Listing, paging: &'a Paging) -> Reply<'a, Page<(Scope, WrittenPolicy)>> {
        let (namespace, asked, paging) = (self.namespace, asked.clone(), paging.clone());
        Reply::later(
            self.inner.read(move |connection, _| listing::list(connection, namespace, &asked, &paging)),
        )
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        let (namespace, changes, actor) = (self.namespace, changes.to_vec(), actor.to_owned());
        Reply::later(self.inner.write(Call::new(Apply { namespace, changes, actor }, admin::apply)))
    }
}

impl Entities for Sqlite {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        let (namespace, entity, actor) = (self.namespace, entity.clone(), actor.to_owned());
        Reply::later(self.inner.write(Call::new(Put { namespace, entity, expect, actor }, admin::put)))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        let (namespace, id) = (self.namespace, id.clone());
        Reply::later(self.inner.read(move |connection, _| listing::entity(connection, namespace, &id)))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        let (namespace, id) = (self.namespace, id.clone());
        Reply::later(self.inner.read(move |connection, _| listing::lineage(connection, namespace, &id)))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        let (namespace, id, actor) = (self.namespace, id.clone(), actor.to_owned());
        Reply::later(self.inner.write(Call::new(Remove { namespace, id, expect, actor }, admin::remove)))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        let (namespace, parent, paging) = (self.namespace, parent.clone(), paging.clone());
        let read = move |connection: &_, _| listing::entities(connection, namespace, Some(&parent), &paging);
        Reply::later(self.inner.read(read))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        let (namespace, paging) = (self.namespace, paging.clone());
        let read = move |connection: &_, _| listing::entities(connection, namespace, None, &paging);
        Reply::later(self.inner.read(read))
    }
}

impl Ledger for Sqlite {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        Reply::later(async move {
            self.sweep_what_is_due().await?;
            let (namespace, query, paging) = (self.namespace, query.clone(), paging.clone());
            let read = move |connection: &_, _| listing::usage(connection, namespace, &query, &paging);
            self.inner.read(read).await
        })
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        let (namespace, query, paging) = (self.namespace, query.clone(), paging.clone());
        let read = move |connection: &_, _| listing::audit(connection, namespace, &query, &paging);
        Reply::later(self.inner.read(read))
    }

    fn prune<'a>(&'a self, asked: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.inner.write(Call::new((self.namespace, *asked, max), retention::prune)))
    }
}
