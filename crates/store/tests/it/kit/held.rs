//! Something of everything in a store, for tests of what a store still holds when it was brought up to date.

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_store::{PolicyChange, Store};

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
