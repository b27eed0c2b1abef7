//! Fills a store with records of every kind, and checks that they survive an upgrade.

use std::ops::Range;
use std::sync::Arc;

use tidegate_core::limit::audit::{AuditKey, Entry};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, Namespace, ResourceName, Subject};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId, TokenScope, TokenScopes};
use tidegate_core::time::Stamp;
use tidegate_store::{AuditQuery, Listing, Paging, PolicyChange, Store};

use crate::kit::common::{balance, draw_of, granted, own, settle_of, slow, used};

fn acme() -> EntityId {
    EntityId::new("acme").expect("a valid name")
}

/// Writes an entity, a policy, a drawn limit and usage.
pub(crate) async fn fill(store: &dyn Store) {
    store.put(&Entity::new(acme()), Expect::Absent, "ops").await.expect("an entity is written");
    let policy = Some(Policy::new([slow(10)]).expect("a valid policy"));
    let change = PolicyChange { scope: Scope::System, policy, expect: Expect::Absent };
    store.apply(&[change], "ops").await.expect("a policy is written");
    let draw = draw_of(&own("acme", 10), 3);
    granted(store.draw(&draw).await);
    store.settle(&settle_of(&draw, 2)).await.expect("the lease is settled");
}

/// Checks that the contents are intact and the store works.
pub(crate) async fn assert_intact(store: &dyn Store) {
    assert_eq!(balance(store, "acme").await, Some((8, 2)));
    assert_eq!(used(store, "acme").await, 2);
    assert!(store.get(&acme()).await.expect("entities are returned").is_some());
    assert!(store.read(&[Scope::System]).await.expect("policies are returned").policies[0].is_some());
    let draw = draw_of(&own("acme", 10), 1);
    granted(store.draw(&draw).await);
    store.settle(&settle_of(&draw, 0)).await.expect("the lease is settled");
}

/// All records of a store, by every listing.
#[derive(Debug, PartialEq)]
pub(crate) struct AllRecords {
    version: Version,
    policies: [Vec<(Scope, Versioned<Arc<Policy>>)>; 3],
    entities: [Vec<Versioned<Entity>>; 2],
    tokens: Vec<Versioned<Token>>,
    by_secret: Option<Versioned<Token>>,
    audit: [Vec<Entry>; 2],
}

/// Writes policies of all scopes, an entity below another, an active token and a revoked one.
pub(crate) async fn fill_records(store: &dyn Store) {
    let child = EntityId::new("child").expect("a valid name");
    for entity in [Entity::new(acme()), Entity::new(child.clone()).parent(acme()).cascade()] {
        store.put(&entity, Expect::Absent, "ops").await.expect("an entity is written");
    }
    let resource = ResourceName::new("gpt").expect("a valid name");
    let subject = Subject { entity: child.clone(), resource: resource.clone() };
    for scope in [Scope::System, Scope::Resource(resource), Scope::Entity(child), Scope::Subject(subject)] {
        let policy = Some(Policy::new([slow(10)]).expect("a valid policy"));
        let change = PolicyChange { scope, policy, expect: Expect::Absent };
        store.apply(&[change], "ops").await.expect("a policy is written");
    }
    for (number, id) in [(1, "good"), (2, "bad")] {
        let token = NewToken {
            id: TokenId::new(id).expect("a valid id"),
            name: "the build".to_owned(),
            namespace: Namespace::new("prod").expect("a valid name"),
            scopes: TokenScopes::new([TokenScope::Acquire]),
            entity: None,
            expires_at: None,
        };
        store.create_token(&token, &TokenHash::new([number; 32]), "ops").await.expect("a token is created");
    }
    let bad = TokenId::new("bad").expect("a valid id");
    store.revoke_token(&bad, Expect::Any, "ops").await.expect("a token is revoked");
}

/// Reads everything that [`fill_records`] wrote.
pub(crate) async fn all_records(store: &dyn Store) -> AllRecords {
    let paging = Paging::default();
    let child = EntityId::new("child").expect("a valid name");
    let listings = [
        Listing::All,
        Listing::Entity(child.clone()),
        Listing::Custom(ResourceName::new("gpt").expect("valid")),
    ];
    let mut policies = [Vec::new(), Vec::new(), Vec::new()];
    for (listing, found) in listings.iter().zip(&mut policies) {
        *found = store.list(listing, &paging).await.expect("policies are listed").items;
    }
    let entities = [
        store.entities(&paging).await.expect("entities are listed").items,
        store.children(&acme(), &paging).await.expect("children are listed").items,
    ];
    let mut audit = [Vec::new(), Vec::new()];
    for (filed, found) in [None, Some(AuditKey::entity(&child))].into_iter().zip(&mut audit) {
        let range: Range<Stamp> = Stamp::ZERO..Stamp::MAX;
        *found = store.audit(&AuditQuery { filed, range }, &paging).await.expect("the audit is listed").items;
    }
    AllRecords {
        version: store.version().await.expect("the version is returned"),
        policies,
        entities,
        tokens: store.tokens(&paging).await.expect("tokens are listed").items,
        by_secret: store.find_token(&TokenHash::new([1; 32])).await.expect("a token is found"),
        audit,
    }
}

impl AllRecords {
    /// The expected records for a version without tokens.
    pub(crate) fn without_tokens(self) -> Self {
        Self { tokens: Vec::new(), by_secret: None, ..self }
    }
}
