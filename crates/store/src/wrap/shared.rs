//! A store that several own is a store.

use std::sync::Arc;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;

use crate::{
    Adjust, AggregateOptions, Aggregator, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changed,
    Changes, Draw, Drawn, Entities, Extend, Ledger, Listing, Lookup, Moved, Page, Paging, Policies,
    PolicyChange, Prune, Renew, Renewed, Reply, Seen, Settle, Standing, Store, Swept, Tokens, UsageQuery,
    Written,
};

impl<S: Store + ?Sized> Buckets for Arc<S> {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        (**self).draw(draw)
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        (**self).extend(extend)
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        (**self).adjust(adjust)
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        (**self).renew(renew)
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        (**self).settle(settle)
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        (**self).cancel(cancel)
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        (**self).spend(draw)
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        (**self).lease(lease)
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        (**self).balances(lookup)
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        (**self).buckets(resource, paging)
    }
}

impl<S: Store + ?Sized> Policies for Arc<S> {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        (**self).read(scopes)
    }

    fn version(&self) -> Reply<'_, Version> {
        (**self).version()
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        (**self).changed(since)
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        (**self).list(listing, paging)
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        (**self).apply(changes, actor)
    }
}

impl<S: Store + ?Sized> Entities for Arc<S> {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        (**self).put(entity, expect, actor)
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        (**self).get(id)
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        (**self).lineage(id)
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        (**self).remove(id, expect, actor)
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        (**self).children(parent, paging)
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        (**self).entities(paging)
    }
}

impl<S: Store + ?Sized> Ledger for Arc<S> {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        (**self).usage(query, paging)
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        (**self).audit(query, paging)
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        (**self).prune(prune, max)
    }
}

impl<S: Store + ?Sized> Tokens for Arc<S> {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        (**self).create_token(token, hash, actor)
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        (**self).token(id)
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        (**self).find_token(hash)
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        (**self).tokens(paging)
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        (**self).revoke_token(id, expect, actor)
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        (**self).sweep(max)
    }

    fn close(&self) -> Reply<'_, ()> {
        (**self).close()
    }

    fn changes(&self) -> Option<Changes> {
        (**self).changes()
    }

    fn caution(&self) -> Option<String> {
        (**self).caution()
    }

    fn aggregator(&self, options: &AggregateOptions) -> Option<Arc<dyn Aggregator>> {
        (**self).aggregator(options)
    }
}
