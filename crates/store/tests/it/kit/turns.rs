//! A store of several handles on one file: each call goes to the next one. The file is gone with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;
use tidegate_store::{
    Adjust, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changes, Draw, Drawn, Entities, Extend,
    Ledger, Listing, Lookup, Moved, Page, Paging, Policies, PolicyChange, Prune, Renew, Renewed, Reply, Seen,
    Settle, Sqlite, SqliteOptions, Standing, Store, Swept, Tokens, UsageQuery, Written,
};

#[derive(Debug)]
pub(crate) struct Turns {
    handles: Vec<Sqlite>,
    turn: AtomicUsize,
    _folder: tempfile::TempDir,
}

impl Turns {
    pub(crate) async fn open(
        count: usize,
        namespace: &str,
        with: impl Fn(SqliteOptions) -> SqliteOptions,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder for a test");
        let options = SqliteOptions::file(folder.path().join("limits.db")).namespace(namespace);
        // One handle may hold the file for long on a machine that has much else to do.
        let options = options.deadline(Duration::from_secs(60));
        let mut handles = Vec::new();
        for _ in 0..count {
            handles.push(with(options.clone()).open().await.expect("the file is opened"));
        }
        Self { handles, turn: AtomicUsize::new(0), _folder: folder }
    }

    fn next(&self) -> &Sqlite {
        &self.handles[self.turn.fetch_add(1, Ordering::Relaxed) % self.handles.len()]
    }
}

impl Buckets for Turns {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.next().draw(draw)
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.next().extend(extend)
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        self.next().adjust(adjust)
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        self.next().renew(renew)
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        self.next().settle(settle)
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        self.next().cancel(cancel)
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.next().spend(draw)
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.next().lease(lease)
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        self.next().balances(lookup)
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        self.next().buckets(resource, paging)
    }
}

impl Policies for Turns {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        self.next().read(scopes)
    }

    fn version(&self) -> Reply<'_, Version> {
        self.next().version()
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        self.next().list(listing, paging)
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        self.next().apply(changes, actor)
    }
}

impl Entities for Turns {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.next().put(entity, expect, actor)
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        self.next().get(id)
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        self.next().lineage(id)
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.next().remove(id, expect, actor)
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        self.next().children(parent, paging)
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        self.next().entities(paging)
    }
}

impl Ledger for Turns {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        self.next().usage(query, paging)
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        self.next().audit(query, paging)
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.next().prune(prune, max)
    }
}

impl Tokens for Turns {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        self.next().create_token(token, hash, actor)
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        self.next().token(id)
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        self.next().find_token(hash)
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        self.next().tokens(paging)
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.next().revoke_token(id, expect, actor)
    }
}

impl Store for Turns {
    fn capabilities(&self) -> Capabilities {
        self.next().capabilities()
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.next().sweep(max)
    }

    fn changes(&self) -> Option<Changes> {
        self.next().changes()
    }
}
