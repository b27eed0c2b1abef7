//! A store that counts its calls and writes down what they move, for the exactness checker.
//!
//! The log is made from the store's replies. It is whole as long as every reply is awaited and no lease is left to
//! its deadline: what a store ends by itself answers nobody.

mod log;

use std::sync::{Arc, Mutex, MutexGuard};

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::check;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;

use super::verb::{Calls, Counter, Verb};
use crate::sync::lock;
use crate::{
    Adjust, AggregateOptions, Aggregator, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changed,
    Changes, Draw, Drawn, Entities, Extend, Ledger, Listing, Lookup, Moved, Page, Paging, Policies,
    PolicyChange, Prune, Renew, Renewed, Reply, Seen, Settle, Standing, Store, Swept, Tokens, UsageQuery,
    Written,
};
use log::Log;

/// Entries a log holds unless said otherwise.
const LOG_MAX: usize = 1_000_000;

/// A store that counts its calls and writes down what they move.
#[derive(Debug)]
pub struct Observed<S> {
    store: S,
    calls: Counter,
    log: Mutex<Log>,
}

impl<S: Store> Observed<S> {
    /// Watches `store`.
    pub fn new(store: S) -> Self {
        Self { store, calls: Counter::default(), log: Mutex::new(Log::new(LOG_MAX)) }
    }

    /// Writes down at most so many entries; those beyond are only [counted](Self::missed).
    #[must_use]
    pub fn log_max(self, max: usize) -> Self {
        Self { log: Mutex::new(Log::new(max)), ..self }
    }

    /// How often each verb was called.
    pub fn calls(&self) -> Calls {
        self.calls.calls()
    }

    /// What has moved so far, and the shapes it moved under, in the order the replies came in.
    pub fn log(&self) -> Vec<check::Entry> {
        self.lock().entries()
    }

    /// Entries that found the log full: above 0, it is not whole.
    pub fn missed(&self) -> u64 {
        self.lock().missed()
    }

    /// The store that is watched.
    pub const fn inner(&self) -> &S {
        &self.store
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }

    fn counted<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl FnOnce() -> Reply<'a, T> + Send + 'a,
    ) -> Reply<'a, T> {
        self.noted(verb, call, |_, _| ())
    }

    fn noted<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl FnOnce() -> Reply<'a, T> + Send + 'a,
        note: impl FnOnce(&mut Log, &T) + Send + 'a,
    ) -> Reply<'a, T> {
        Reply::later(async move {
            self.calls.count(verb);
            let answer = call().await?;
            note(&mut self.lock(), &answer);
            Ok(answer)
        })
    }
}

impl<S: Store> Buckets for Observed<S> {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(async move {
            let watched = Draw { is_watched: true, ..draw.clone() };
            self.noted(Verb::Draw, || self.store.draw(&watched), |log, answer| log.draw(draw, answer)).await
        })
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.noted(
            Verb::Extend,
            move || self.store.extend(extend),
            move |log, answer| log.extend(extend, answer),
        )
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        self.noted(
            Verb::Adjust,
            move || self.store.adjust(adjust),
            move |log, answer| log.adjust(adjust, answer),
        )
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        self.counted(Verb::Renew, move || self.store.renew(renew))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        Reply::later(async move {
            let watched = Settle { is_watched: true, ..settle.clone() };
            let call = || self.store.settle(&watched);
            self.noted(Verb::Settle, call, |log, answer| log.settle(settle, answer)).await
        })
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        Reply::later(async move {
            let watched = Cancel { is_watched: true, ..cancel.clone() };
            let call = || self.store.cancel(&watched);
            self.noted(Verb::Cancel, call, |log, answer| log.cancel(cancel, answer)).await
        })
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(async move {
            let watched = Draw { is_watched: true, ..draw.clone() };
            self.noted(Verb::Spend, || self.store.spend(&watched), |log, answer| log.spend(draw, answer))
                .await
        })
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.counted(Verb::Lease, move || self.store.lease(lease))
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        self.counted(Verb::Balances, move || self.store.balances(lookup))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        self.counted(Verb::Buckets, move || self.store.buckets(resource, paging))
    }
}

impl<S: Store> Policies for Observed<S> {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        self.counted(Verb::Read, move || self.store.read(scopes))
    }

    fn version(&self) -> Reply<'_, Version> {
        self.counted(Verb::Version, move || self.store.version())
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        self.counted(Verb::Changed, move || self.store.changed(since))
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        self.counted(Verb::List, move || self.store.list(listing, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        self.counted(Verb::Apply, move || self.store.apply(changes, actor))
    }
}

impl<S: Store> Entities for Observed<S> {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.counted(Verb::Put, move || self.store.put(entity, expect, actor))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        self.counted(Verb::Get, move || self.store.get(id))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        self.counted(Verb::Lineage, move || self.store.lineage(id))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.counted(Verb::Remove, move || self.store.remove(id, expect, actor))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        self.counted(Verb::Children, move || self.store.children(parent, paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        self.counted(Verb::Entities, move || self.store.entities(paging))
    }
}

impl<S: Store> Ledger for Observed<S> {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        self.counted(Verb::Usage, move || self.store.usage(query, paging))
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        self.counted(Verb::Audit, move || self.store.audit(query, paging))
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.counted(Verb::Prune, move || self.store.prune(prune, max))
    }
}

impl<S: Store> Tokens for Observed<S> {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        self.counted(Verb::CreateToken, move || self.store.create_token(token, hash, actor))
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        self.counted(Verb::Token, move || self.store.token(id))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        self.counted(Verb::FindToken, move || self.store.find_token(hash))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        self.counted(Verb::Tokens, move || self.store.tokens(paging))
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.counted(Verb::RevokeToken, move || self.store.revoke_token(id, expect, actor))
    }
}

impl<S: Store> Store for Observed<S> {
    fn capabilities(&self) -> Capabilities {
        // What is noted is noted when a reply is awaited.
        Capabilities { is_immediate: false, ..self.store.capabilities() }
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.counted(Verb::Sweep, move || self.store.sweep(max))
    }

    fn close(&self) -> Reply<'_, ()> {
        self.store.close()
    }

    fn changes(&self) -> Option<Changes> {
        self.store.changes()
    }

    fn caution(&self) -> Option<String> {
        self.store.caution()
    }

    fn aggregator(&self, options: &AggregateOptions) -> Option<Arc<dyn Aggregator>> {
        self.store.aggregator(options)
    }
}
