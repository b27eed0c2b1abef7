//! A memory store behind a network that does what a test says, call by call.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::store::{
    Adjust, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changes, Draw, Drawn, Entities, Extend,
    Ledger, Listing, Lookup, Moved, Page, Policies, PolicyChange, Prune, Renew, Renewed, Reply, Seen, Settle,
    Standing, Swept, Tokens, Written,
};
use tidegate::{
    Entity, EntityId, Expect, Memory, Paging, Policy, ResourceName, Scope, Store, StoreError, Usage,
    UsageQuery, Version, Versioned,
};
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};

/// When a hook is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The call has not been made.
    Before,
    /// It has been made, and its answer is on the way.
    After,
}

/// What a hook says.
#[derive(Debug)]
pub(crate) enum Act {
    /// Go on.
    Pass,
    /// Answer this instead.
    Fail(StoreError),
    /// Take so long.
    Sleep(Duration),
    /// Never answer.
    Hang,
    /// A bug of the store.
    Panic,
}

type Hook = dyn Fn(Verb, Moment) -> Act + Send + Sync;

/// A store whose every call is decided by a function, before and after it is made.
pub(crate) struct Hooked {
    store: Memory,
    hook: Box<Hook>,
    /// It answers at once: a hook can only pass or fail, before the call.
    is_immediate: bool,
    /// What is announced of changes, if anything is.
    changes: Option<Changes>,
}

impl Hooked {
    pub(crate) fn new(
        store: &Memory,
        hook: impl Fn(Verb, Moment) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { store: store.clone(), hook: Box::new(hook), is_immediate: false, changes: None })
    }

    /// The same in this process.
    pub(crate) fn here(
        store: &Memory,
        hook: impl Fn(Verb, Moment) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { store: store.clone(), hook: Box::new(hook), is_immediate: true, changes: None })
    }

    /// A network over which nothing goes wrong, and changes are announced.
    pub(crate) fn announcing(store: &Memory, changes: Changes) -> Arc<Self> {
        let hook = Box::new(|_, _| Act::Pass);
        Arc::new(Self { store: store.clone(), hook, is_immediate: false, changes: Some(changes) })
    }

    async fn meet(&self, verb: Verb, moment: Moment) -> Result<(), StoreError> {
        match (self.hook)(verb, moment) {
            Act::Pass => Ok(()),
            Act::Fail(error) => Err(error),
            Act::Sleep(span) => {
                tokio::time::sleep(span).await;
                Ok(())
            }
            Act::Hang => std::future::pending().await,
            Act::Panic => panic!("the store has a bug, as the test planned"),
        }
    }

    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl FnOnce() -> Reply<'a, T> + Send + 'a,
    ) -> Reply<'a, T> {
        if self.is_immediate {
            return match (self.hook)(verb, Moment::Before) {
                Act::Fail(error) => Reply::ready(Err(error)),
                _ => call(),
            };
        }
        Reply::later(async move {
            self.meet(verb, Moment::Before).await?;
            let answer = call().await;
            self.meet(verb, Moment::After).await?;
            answer
        })
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").finish_non_exhaustive()
    }
}

impl Buckets for Hooked {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.call(Verb::Draw, move || self.store.draw(draw))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.call(Verb::Extend, move || self.store.extend(extend))
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        self.call(Verb::Adjust, move || self.store.adjust(adjust))
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        self.call(Verb::Renew, move || self.store.renew(renew))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        self.call(Verb::Settle, move || self.store.settle(settle))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        self.call(Verb::Cancel, move || self.store.cancel(cancel))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.call(Verb::Spend, move || self.store.spend(draw))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.call(Verb::Lease, move || self.store.lease(lease))
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        self.call(Verb::Balances, move || self.store.balances(lookup))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        self.call(Verb::Buckets, move || self.store.buckets(resource, paging))
    }
}

impl Policies for Hooked {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        self.call(Verb::Read, move || self.store.read(scopes))
    }

    fn version(&self) -> Reply<'_, Version> {
        self.call(Verb::Version, move || self.store.version())
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        self.call(Verb::List, move || self.store.list(listing, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        self.call(Verb::Apply, move || self.store.apply(changes, actor))
    }
}

impl Entities for Hooked {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.call(Verb::Put, move || self.store.put(entity, expect, actor))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        self.call(Verb::Get, move || self.store.get(id))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        self.call(Verb::Lineage, move || self.store.lineage(id))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.call(Verb::Remove, move || self.store.remove(id, expect, actor))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        self.call(Verb::Children, move || self.store.children(parent, paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        self.call(Verb::Entities, move || self.store.entities(paging))
    }
}

impl Ledger for Hooked {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        self.call(Verb::Usage, move || self.store.usage(query, paging))
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        self.call(Verb::Audit, move || self.store.audit(query, paging))
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.call(Verb::Prune, move || self.store.prune(prune, max))
    }
}

impl Tokens for Hooked {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        self.call(Verb::CreateToken, move || self.store.create_token(token, hash, actor))
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        self.call(Verb::Token, move || self.store.token(id))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        self.call(Verb::FindToken, move || self.store.find_token(hash))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        self.call(Verb::Tokens, move || self.store.tokens(paging))
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.call(Verb::RevokeToken, move || self.store.revoke_token(id, expect, actor))
    }
}

impl Store for Hooked {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            is_immediate: self.is_immediate,
            deadline: super::DEADLINE,
            ..self.store.capabilities()
        }
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.call(Verb::Sweep, move || self.store.sweep(max))
    }

    fn changes(&self) -> Option<Changes> {
        self.changes.clone()
    }
}
