//! Entities and their parents.

use tidegate_core::limit::entity::{Entity, InvalidEntity, TEXT_MAX};
use tidegate_core::limit::policy::{Expect, Scope, Version};

use super::Fixture;
use super::kit::{ACTOR, RESOURCE, entity_id, is_stale, own, policy, resource, slow, subject};
use crate::{Paging, StoreError};

fn entity(id: &str) -> Entity {
    Entity::new(entity_id(id))
}

fn under(id: &str, parent: &str) -> Entity {
    entity(id).parent(entity_id(parent))
}

async fn found(fixture: &Fixture, id: &str) -> Option<(Version, Entity)> {
    let found = fixture.store.get(&entity_id(id)).await.expect("an entity is read");
    found.map(|found| (found.version, found.value))
}

async fn lineage(fixture: &Fixture, id: &str) -> Vec<String> {
    let lineage = fixture.store.lineage(&entity_id(id)).await.expect("a lineage is read");
    lineage.iter().map(|entity| entity.value.id().to_string()).collect()
}

/// Every field is read back, and a second write replaces all of them.
pub async fn entity_is_read_as_written(fixture: Fixture) {
    assert_eq!(found(&fixture, "acme").await, None);
    let full = entity("user 7")
        .name("Größe & Söhne")
        .metadata("tier", "gold")
        .metadata("", "")
        .cascade()
        .disabled(true);
    let version = fixture.puts(&full).await;
    assert_eq!(found(&fixture, "user 7").await, Some((version, full)));
    let version = fixture.puts(&entity("user 7")).await;
    assert_eq!(found(&fixture, "user 7").await, Some((version, entity("user 7"))));
}

/// A wrong expectation is refused with the current version.
pub async fn stale_entity_write_or_removal_is_refused(fixture: Fixture) {
    let first = fixture.puts(&entity("acme")).await;
    let named = entity("acme").name("Acme");
    let id = entity_id("acme");
    let store = &fixture.store;
    is_stale(store.put(&named, Expect::Absent, ACTOR).await, Some(first));
    is_stale(store.put(&entity("globex"), Expect::Version(first), ACTOR).await, None);
    let second = store.put(&named, Expect::Version(first), ACTOR).await.expect("the version is as expected");
    assert_eq!(second, first.next());
    is_stale(store.put(&named, Expect::Version(first), ACTOR).await, Some(second));
    is_stale(store.remove(&id, Expect::Version(first), ACTOR).await, Some(second));
    is_stale(store.remove(&id, Expect::Absent, ACTOR).await, Some(second));
    assert_eq!(found(&fixture, "acme").await, Some((second, named)));
    assert_eq!(found(&fixture, "globex").await, None);
    let third = store.remove(&id, Expect::Version(second), ACTOR).await.expect("the version is as expected");
    assert_eq!(third, second.next());
    assert_eq!(found(&fixture, "acme").await, None);
    match store.remove(&id, Expect::Any, ACTOR).await {
        Err(StoreError::NoEntity { entity }) => assert_eq!(entity, id),
        other => panic!("removing an absent entity returns {other:?}"),
    }
    assert_eq!(store.version().await.expect("the version is read"), third);
}

/// Whether an error is the expected one.
type IsExpected = fn(&InvalidEntity) -> bool;

/// Texts have bounds, and a parent exists, is no descendant and is not too deep.
pub async fn invalid_entity_is_refused(fixture: Fixture) {
    fixture.puts(&entity("e0")).await;
    for number in 1..8 {
        fixture.puts(&under(&format!("e{number}"), &format!("e{}", number - 1))).await;
    }
    let version = fixture.store.version().await.expect("the version is read");
    let long = entity("long").name("x".repeat(TEXT_MAX + 1));
    let table: [(Entity, IsExpected); 5] = [
        (long, |error| matches!(error, InvalidEntity::Long { .. })),
        (under("new", "absent"), |error| matches!(error, InvalidEntity::NoParent { .. })),
        (under("e3", "e5"), |error| matches!(error, InvalidEntity::Cycle { .. })),
        (under("e3", "e3"), |error| matches!(error, InvalidEntity::Cycle { .. })),
        (under("new", "e7"), |error| matches!(error, InvalidEntity::Deep { .. })),
    ];
    for (entity, is_expected) in table {
        match fixture.store.put(&entity, Expect::Any, ACTOR).await {
            Err(StoreError::Entity(error)) => assert!(is_expected(&error), "{error}"),
            other => panic!("{entity:?} returns {other:?}"),
        }
    }
    assert_eq!(fixture.store.version().await.expect("the version is read"), version);
    assert_eq!(found(&fixture, "new").await, None);
}

/// It has the levels to draw from.
pub async fn lineage_ends_where_cascading_ends(fixture: Fixture) {
    fixture.puts(&entity("org").cascade()).await;
    fixture.puts(&under("team", "org").cascade()).await;
    fixture.puts(&under("user", "team").cascade()).await;
    assert_eq!(lineage(&fixture, "user").await, ["user", "team", "org"]);
    assert_eq!(lineage(&fixture, "team").await, ["team", "org"]);
    // Cascade without a parent is harmless.
    assert_eq!(lineage(&fixture, "org").await, ["org"]);
    fixture.puts(&under("team", "org")).await;
    assert_eq!(lineage(&fixture, "user").await, ["user", "team"]);
    fixture.puts(&entity("user")).await;
    assert_eq!(lineage(&fixture, "user").await, ["user"]);
    assert!(lineage(&fixture, "absent").await.is_empty(), "no record, no lineage");
}

/// The maximum depth.
pub async fn lineage_has_up_to_eight_levels(fixture: Fixture) {
    fixture.puts(&entity("e0")).await;
    for number in 1..8 {
        fixture.puts(&under(&format!("e{number}"), &format!("e{}", number - 1)).cascade()).await;
    }
    let expected: Vec<String> = (0..8).rev().map(|number| format!("e{number}")).collect();
    assert_eq!(lineage(&fixture, "e7").await, expected);
}

/// It stays until its children are moved or removed.
pub async fn entity_with_children_is_not_removed(fixture: Fixture) {
    for id in ["org", "other"] {
        fixture.puts(&entity(id)).await;
    }
    for id in ["a", "b"] {
        fixture.puts(&under(id, "org")).await;
    }
    let org = entity_id("org");
    match fixture.store.remove(&org, Expect::Any, ACTOR).await {
        Err(StoreError::HasChildren { entity, children }) => assert_eq!((entity, children), (org.clone(), 2)),
        other => panic!("removing a parent returns {other:?}"),
    }
    fixture.puts(&under("a", "other")).await;
    fixture.store.remove(&entity_id("b"), Expect::Any, ACTOR).await.expect("it has no children");
    fixture.store.remove(&org, Expect::Any, ACTOR).await.expect("it has no children any more");
    assert_eq!(found(&fixture, "org").await, None);
}

/// And no other policies are.
pub async fn entity_is_removed_with_its_policies(fixture: Fixture) {
    fixture.puts(&entity("acme")).await;
    let removed = [Scope::Entity(entity_id("acme")), Scope::Subject(subject("acme"))];
    let kept = [
        Scope::System,
        Scope::Resource(resource(RESOURCE)),
        Scope::Entity(entity_id("acme2")),
        Scope::Subject(subject("acme2")),
    ];
    for scope in removed.iter().chain(&kept) {
        fixture.writes(scope, Some(policy(&[slow("rpm", 1)]))).await;
    }
    let before = fixture.store.version().await.expect("the version is read");
    let version = fixture.store.remove(&entity_id("acme"), Expect::Any, ACTOR).await.expect("it exists");
    assert_eq!(version, before.next(), "it is one change");
    let read = fixture.store.read(&removed).await.expect("policies are read");
    assert!(read.policies.iter().all(Option::is_none), "its policies are removed");
    let read = fixture.store.read(&kept).await.expect("policies are read");
    assert!(read.policies.iter().all(Option::is_some), "the others are kept");
}

/// Removing and recreating an entity does not reset its limits.
pub async fn buckets_of_a_removed_entity_stay(fixture: Fixture) {
    fixture.puts(&entity("acme")).await;
    let levels = own("acme", &[slow("rpm", 10)]);
    fixture.spends(&levels, &[("rpm", 10)]).await;
    fixture.store.remove(&entity_id("acme"), Expect::Any, ACTOR).await.expect("it exists");
    fixture.puts(&entity("acme")).await;
    fixture.is_refused(&levels, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 10));
}

/// The current ones, without grandchildren.
pub async fn children_are_direct_children(fixture: Fixture) {
    for id in ["org", "other"] {
        fixture.puts(&entity(id)).await;
    }
    for (id, parent) in [("b", "org"), ("a", "org"), ("c", "other"), ("deep", "a")] {
        fixture.puts(&under(id, parent)).await;
    }
    let children = async |parent: &str| -> Vec<String> {
        let parent = entity_id(parent);
        let page = fixture.store.children(&parent, &Paging::default()).await.expect("children are listed");
        page.items.iter().map(|child| child.value.id().to_string()).collect()
    };
    assert_eq!(children("org").await, ["a", "b"]);
    fixture.puts(&under("b", "other")).await;
    assert_eq!(children("org").await, ["a"]);
    assert_eq!(children("other").await, ["b", "c"]);
    fixture.puts(&entity("c")).await;
    fixture.store.remove(&entity_id("b"), Expect::Any, ACTOR).await.expect("it has no children");
    assert!(children("other").await.is_empty());
    assert!(children("absent").await.is_empty());
}
