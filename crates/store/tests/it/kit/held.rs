//! Something of everything in a store, for tests of what a store still holds when it was brought up to date.

use std::ops::Range;
use std::sync::Arc;

use tidegate_core::limit::audit::{Entry, Filed};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, Namespace, ResourceName, Subject};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId, TokenScope, TokenScopes};
use tidegate_core::time::Stamp;
use tidegate_store::{AuditQuery, Listing, Paging, PolicyChange, Store};

use crate::kit::words::{draw_of, granted, own, settle_of, shows, slow, used};

fn acme() -> EntityId {
    EntityId::new("acme").expect("a valid name")
}

/// An entity, a policy, a limit that was drawn from, and usage.
pub(crate) async fn fill(store: &dyn Store) {
    store.put(&Entity::new(acme()), Expect::Absent, "ops").await.expect("an entity is written");
    let policy = Some(Policy::new([slow(10)]).expect("a valid policy"));
    let change = PolicyChange { scope: Scope::System, policy, expect: Expect::Absent };
    store.apply(&[change], "ops").await.expect("a policy is written");
    let draw = draw_of(&own("acme", 10), 3);
    granted(store.draw(&draw).await);
    store.settle(&settle_of(&draw, 2)).await.expect("it is settled");
}

/// All of that is still there, and the store can be used.
pub(crate) async fn is_held(store: &dyn Store) {
    assert_eq!(shows(store, "acme").await, Some((8, 2)));
    assert_eq!(used(store, "acme").await, 2);
    assert!(store.get(&acme()).await.expect("entities are answered").is_some());
    assert!(store.read(&[Scope::System]).await.expect("policies are answered").policies[0].is_some());
    let draw = draw_of(&own("acme", 10), 1);
    granted(store.draw(&draw).await);
    store.settle(&settle_of(&draw, 0)).await.expect("it is settled");
}

/// All records of a store, by every listing that finds them.
#[derive(Debug, PartialEq)]
pub(crate) struct AllRecords {
    version: Version,
    policies: [Vec<(Scope, Versioned<Arc<Policy>>)>; 3],
    entities: [Vec<Versioned<Entity>>; 2],
    tokens: Vec<Versioned<Token>>,
    by_secret: Option<Versioned<Token>>,
    audit: [Vec<Entry>; 2],
}

/// Policies of all scopes, an entity below another, a token that is good and one that was revoked.
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
            expires_at: None,
        };
        store.create_token(&token, &TokenHash::new([number; 32]), "ops").await.expect("a token is made");
    }
    let bad = TokenId::new("bad").expect("a valid id");
    store.revoke_token(&bad, Expect::Any, "ops").await.expect("a token is revoked");
}

/// Everything that [`fill_records`] wrote.
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
    for (filed, found) in [None, Some(Filed::entity(&child))].into_iter().zip(&mut audit) {
        let range: Range<Stamp> = Stamp::ZERO..Stamp::MAX;
        *found = store.audit(&AuditQuery { filed, range }, &paging).await.expect("the audit is listed").items;
    }
    AllRecords {
        version: store.version().await.expect("the version is answered"),
        policies,
        entities,
        tokens: store.tokens(&paging).await.expect("tokens are listed").items,
        by_secret: store.find_token(&TokenHash::new([1; 32])).await.expect("a token is found"),
        audit,
    }
}

impl AllRecords {
    /// The same for a version that had no tokens.
    pub(crate) fn without_tokens(self) -> Self {
        Self { tokens: Vec::new(), by_secret: None, ..self }
    }
}
