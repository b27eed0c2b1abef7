//! Entities: who there is, and under whom.

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

/// Every part of an entity comes back, and a second writing replaces all of it.
pub async fn an_entity_is_read_as_it_was_written(fixture: Fixture) {
    assert_eq!(found(&fixture, "acme").await, None);
    let full = entity("user 7").name("Größe & Söhne").metadata("tier", "gold").metadata("", "").cascade();
    let version = fixture.puts(&full).await;
    assert_eq!(found(&fixture, "user 7").await, Some((version, full)));
    let version = fixture.puts(&entity("user 7")).await;
    assert_eq!(found(&fixture, "user 7").await, Some((version, entity("user 7"))));
}

/// A belief that is wrong is refused, with what is there.
pub async fn an_entity_is_written_and_removed_as_expected_only(fixture: Fixture) {
    let first = fixture.puts(&entity("acme")).await;
    let named = entity("acme").name("Acme");
    let id = entity_id("acme");
    let store = &fixture.store;
    is_stale(store.put(&named, Expect::Absent, ACTOR).await, Some(first));
    is_stale(store.put(&entity("globex"), Expect::Version(first), ACTOR).await, None);
    let second = store.put(&named, Expect::Version(first), ACTOR).await.expect("it is as expected");
    assert_eq!(second, first.next());
    is_stale(store.put(&named, Expect::Version(first), ACTOR).await, Some(second));
    is_stale(store.remove(&id, Expect::Version(first), ACTOR).await, Some(second));
    is_stale(store.remove(&id, Expect::Absent, ACTOR).await, Some(second));
    assert_eq!(found(&fixture, "acme").await, Some((second, named)));
    assert_eq!(found(&fixture, "globex").await, None);
    let third = store.remove(&id, Expect::Version(second), ACTOR).await.expect("it is as expected");
    assert_eq!(third, second.next());
    assert_eq!(found(&fixture, "acme").await, None);
    match store.remove(&id, Expect::Any, ACTOR).await {
        Err(StoreError::NoEntity { entity }) => assert_eq!(entity, id),
        other => panic!("removing what is not there answers {other:?}"),
    }
    assert_eq!(store.version().await.expect("the version is answered"), third);
}

/// Whether an error is the one that is looked for.
type Judge = fn(&InvalidEntity) -> bool;

/// Texts have bounds, and a parent is there, not below, and not too deep.
pub async fn an_entity_that_cannot_be_is_refused(fixture: Fixture) {
    fixture.puts(&entity("e0")).await;
    for number in 1..8 {
        fixture.puts(&under(&format!("e{number}"), &format!("e{}", number - 1))).await;
    }
    let version = fixture.store.version().await.expect("the version is answered");
    let long = entity("long").name("x".repeat(TEXT_MAX + 1));
    let table: [(Entity, Judge); 5] = [
        (long, |error| matches!(error, InvalidEntity::Long { .. })),
        (under("new", "nobody"), |error| matches!(error, InvalidEntity::NoParent { .. })),
        (under("e3", "e5"), |error| matches!(error, InvalidEntity::Cycle { .. })),
        (under("e3", "e3"), |error| matches!(error, InvalidEntity::Cycle { .. })),
        (under("new", "e7"), |error| matches!(error, InvalidEntity::Deep { .. })),
    ];
    for (entity, is_it) in table {
        match fixture.store.put(&entity, Expect::Any, ACTOR).await {
            Err(StoreError::Entity(error)) => assert!(is_it(&error), "{error}"),
            other => panic!("{entity:?} answers {other:?}"),
        }
    }
    assert_eq!(fixture.store.version().await.expect("the version is answered"), version);
    assert_eq!(found(&fixture, "new").await, None);
}

/// The lineage is drawn from: it ends where cascading does.
pub async fn a_lineage_goes_up_as_far_as_each_cascades(fixture: Fixture) {
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
    assert!(lineage(&fixture, "nobody").await.is_empty(), "no record, no lineage");
}

/// As many levels as there may be.
pub async fn a_lineage_has_up_to_eight_levels(fixture: Fixture) {
    fixture.puts(&entity("e0")).await;
    for number in 1..8 {
        fixture.puts(&under(&format!("e{number}"), &format!("e{}", number - 1)).cascade()).await;
    }
    let expected: Vec<String> = (0..8).rev().map(|number| format!("e{number}")).collect();
    assert_eq!(lineage(&fixture, "e7").await, expected);
}

/// An entity with others below it stays until they are moved or removed.
pub async fn an_entity_with_others_below_it_is_not_removed(fixture: Fixture) {
    for id in ["org", "other"] {
        fixture.puts(&entity(id)).await;
    }
    for id in ["a", "b"] {
        fixture.puts(&under(id, "org")).await;
    }
    let org = entity_id("org");
    match fixture.store.remove(&org, Expect::Any, ACTOR).await {
        Err(StoreError::HasChildren { entity, children }) => assert_eq!((entity, children), (org.clone(), 2)),
        other => panic!("removing a parent answers {other:?}"),
    }
    fixture.puts(&under("a", "other")).await;
    fixture.store.remove(&entity_id("b"), Expect::Any, ACTOR).await.expect("nobody is below it");
    fixture.store.remove(&org, Expect::Any, ACTOR).await.expect("nobody is below it any more");
    assert_eq!(found(&fixture, "org").await, None);
}

/// Its policies go with it, and nobody else's.
pub async fn the_policies_of_an_entity_are_removed_with_it(fixture: Fixture) {
    fixture.puts(&entity("acme")).await;
    let gone = [Scope::Entity(entity_id("acme")), Scope::Subject(subject("acme"))];
    let kept = [
        Scope::System,
        Scope::Resource(resource(RESOURCE)),
        Scope::Entity(entity_id("acme2")),
        Scope::Subject(subject("acme2")),
    ];
    for scope in gone.iter().chain(&kept) {
        fixture.writes(scope, Some(policy(&[slow("rpm", 1)]))).await;
    }
    let before = fixture.store.version().await.expect("the version is answered");
    let version = fixture.store.remove(&entity_id("acme"), Expect::Any, ACTOR).await.expect("it is there");
    assert_eq!(version, before.next(), "it is one change");
    let read = fixture.store.read(&gone).await.expect("policies are read");
    assert!(read.policies.iter().all(Option::is_none), "its policies are gone");
    let read = fixture.store.read(&kept).await.expect("policies are read");
    assert!(read.policies.iter().all(Option::is_some), "the others stay");
}

/// To remove an entity and write it anew is no amnesty.
pub async fn the_buckets_of_an_entity_stay_when_it_is_removed(fixture: Fixture) {
    fixture.puts(&entity("acme")).await;
    let levels = own("acme", &[slow("rpm", 10)]);
    fixture.spends(&levels, &[("rpm", 10)]).await;
    fixture.store.remove(&entity_id("acme"), Expect::Any, ACTOR).await.expect("it is there");
    fixture.puts(&entity("acme")).await;
    fixture.is_refused(&levels, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 10));
}

/// Those directly below, as they are now.
pub async fn children_are_those_directly_below(fixture: Fixture) {
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
    fixture.store.remove(&entity_id("b"), Expect::Any, ACTOR).await.expect("nobody is below it");
    assert!(children("other").await.is_empty());
    assert!(children("nobody").await.is_empty());
}
