//! A store whose calls are timed, for whoever watches it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;

use super::verb::Verb;
use crate::{
    Adjust, AggregateOptions, Aggregator, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changed,
    Changes, Draw, Drawn, Entities, Extend, Ledger, Listing, Lookup, Moved, Page, Paging, Policies,
    PolicyChange, Prune, Renew, Renewed, Reply, Seen, Settle, Standing, Store, StoreError, Swept, Tokens,
    UsageQuery, Written,
};

/// What came of a call.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallEnd<'a> {
    /// An answer, be it a refusal.
    Answered,
    /// An error.
    Failed(&'a StoreError),
    /// Nobody waited for it any longer.
    GivenUp,
}

/// Hears of each call of a store that is [`Measured`]. It is asked on the thread that called, and must not wait.
pub trait Watcher: fmt::Debug + Send + Sync + 'static {
    /// A call has ended.
    fn ended(&self, verb: Verb, took: Duration, end: CallEnd<'_>);
}

/// A store whose calls are timed. It answers as the store that it wraps does, at once where that does, and allocates nothing.
#[derive(Debug)]
pub struct Measured<S> {
    store: S,
    watcher: Arc<dyn Watcher>,
}

impl<S: Store> Measured<S> {
    /// Tells `watcher` of each call of `store`, but for its end.
    pub fn new(store: S, watcher: Arc<dyn Watcher>) -> Self {
        Self { store, watcher }
    }

    #[inline]
    fn measured<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl FnOnce() -> Reply<'a, T>,
    ) -> Reply<'a, T> {
        let watch = Watch { watcher: &*self.watcher, verb, began: Instant::now(), is_open: true };
        call().watched(watch)
    }
}

/// A call that is timed.
pub(crate) struct Watch<'a> {
    watcher: &'a dyn Watcher,
    verb: Verb,
    began: Instant,
    is_open: bool,
}

impl Watch<'_> {
    pub(crate) fn end<T>(&mut self, answer: &Result<T, StoreError>) {
        self.is_open = false;
        let end = answer.as_ref().err().map_or(CallEnd::Answered, CallEnd::Failed);
        self.watcher.ended(self.verb, self.began.elapsed(), end);
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.watcher.ended(self.verb, self.began.elapsed(), CallEnd::GivenUp);
        }
    }
}

impl<S: Store> Buckets for Measured<S> {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.measured(Verb::Draw, || self.store.draw(draw))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.measured(Verb::Extend, || self.store.extend(extend))
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        self.measured(Verb::Adjust, || self.store.adjust(adjust))
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        self.measured(Verb::Renew, || self.store.renew(renew))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        self.measured(Verb::Settle, || self.store.settle(settle))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        self.measured(Verb::Cancel, || self.store.cancel(cancel))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.measured(Verb::Spend, || self.store.spend(draw))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.measured(Verb::Lease, || self.store.lease(lease))
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        self.measured(Verb::Balances, || self.store.balances(lookup))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        self.measured(Verb::Buckets, || self.store.buckets(resource, paging))
    }
}

impl<S: Store> Policies for Measured<S> {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        self.measured(Verb::Read, || self.store.read(scopes))
    }

    fn version(&self) -> Reply<'_, Version> {
        self.measured(Verb::Version, || self.store.version())
    }

    fn changed(&self, since: Version) -> Reply<'_, Option<Changed>> {
        self.measured(Verb::Changed, || self.store.changed(since))
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        self.measured(Verb::List, || self.store.list(listing, paging))
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        self.measured(Verb::Apply, || self.store.apply(changes, actor))
    }
}

impl<S: Store> Entities for Measured<S> {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.measured(Verb::Put, || self.store.put(entity, expect, actor))
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        self.measured(Verb::Get, || self.store.get(id))
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        self.measured(Verb::Lineage, || self.store.lineage(id))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.measured(Verb::Remove, || self.store.remove(id, expect, actor))
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        self.measured(Verb::Children, || self.store.children(parent, paging))
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        self.measured(Verb::Entities, || self.store.entities(paging))
    }
}

impl<S: Store> Ledger for Measured<S> {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        self.measured(Verb::Usage, || self.store.usage(query, paging))
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        self.measured(Verb::Audit, || self.store.audit(query, paging))
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.measured(Verb::Prune, || self.store.prune(prune, max))
    }
}

impl<S: Store> Tokens for Measured<S> {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        self.measured(Verb::CreateToken, || self.store.create_token(token, hash, actor))
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        self.measured(Verb::Token, || self.store.token(id))
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        self.measured(Verb::FindToken, || self.store.find_token(hash))
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        self.measured(Verb::Tokens, || self.store.tokens(paging))
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.measured(Verb::RevokeToken, || self.store.revoke_token(id, expect, actor))
    }
}

impl<S: Store> Store for Measured<S> {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.measured(Verb::Sweep, || self.store.sweep(max))
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::{Faulty, Plan};
    use super::*;
    use crate::Memory;

    /// Remembers what it hears.
    #[derive(Debug, Default)]
    struct Book(Mutex<Vec<(Verb, String)>>);

    impl Watcher for Book {
        fn ended(&self, verb: Verb, _: Duration, end: CallEnd<'_>) {
            let end = match end {
                CallEnd::Answered => "answered".to_owned(),
                CallEnd::Failed(error) => error.to_string(),
                CallEnd::GivenUp => "given up".to_owned(),
            };
            self.0.lock().unwrap().push((verb, end));
        }
    }

    #[tokio::test]
    async fn each_call_is_told_once_with_what_came_of_it_and_what_is_immediate_stays_so() {
        let book = Arc::new(Book::default());
        let store = Measured::new(Memory::new(), book.clone());
        assert!(store.capabilities().is_immediate && store.version().now().is_some());
        let far = Faulty::new(Memory::new(), Plan::seeded(1)).unwrap();
        far.hang();
        let far = Measured::new(far, book.clone());
        assert!(far.version().now().is_none(), "dropped before it is asked");
        far.store.go_away();
        let error = far.version().await.unwrap_err().to_string();
        far.store.come_back();
        far.version().await.unwrap();
        let heard: Vec<String> = book.0.lock().unwrap().iter().map(|(_, end)| end.clone()).collect();
        assert_eq!(heard, ["answered", "given up", &error, "answered"]);
    }

    #[test]
    fn every_verb_has_the_name_of_its_method() {
        for (number, verb) in Verb::ALL.into_iter().enumerate() {
            assert_eq!(verb as usize, number);
            assert_eq!(verb.name().replace('_', ""), format!("{verb:?}").to_lowercase());
        }
    }
}
