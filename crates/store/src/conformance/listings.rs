//! Paged listings: complete, in order, without duplicates, for any page size.

use tidegate_core::limit::audit::AuditKey;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{Expect, Scope};
use tidegate_core::limit::usage::Window;

use super::Fixture;
use super::kit::{
    ACTOR, ALWAYS, RESOURCE, all_of, entity_id, invalid_cursor, levels_of, on, own, policy, rejects_cursor,
    resource, slow,
};
use crate::{AuditQuery, Listing, Paging, UsageOf, UsageQuery};

/// In byte order, with a prefix of another name, and non-ASCII letters.
const NAMES: [&str; 7] = ["Zed", "a", "a b", "ab", "b", "größe", "é"];

/// The buckets of a resource, by entity.
pub async fn buckets_of_a_resource_are_paged(fixture: Fixture) {
    for entity in NAMES.iter().rev() {
        fixture.spends(&own(entity, &[slow("rpm", 10)]), &[("rpm", 3)]).await;
        fixture.spends(&levels_of(0, &[(on(entity, "other"), &[slow("rpm", 10)])]), &[("rpm", 1)]).await;
    }
    let (store, gpt) = (&fixture.store, resource(RESOURCE));
    for max in [1, 2, 3, 7, 100] {
        let gpt = &gpt;
        let found = all_of(max, |paging| {
            Box::pin(async move { store.buckets(gpt, &paging).await.expect("buckets are listed") })
        });
        let found = found.await;
        let names: Vec<_> = found.iter().map(|bucket| bucket.subject.entity.as_str()).collect();
        assert_eq!(names, NAMES, "in pages of {max}");
        for bucket in found {
            assert_eq!(bucket.subject.resource, *gpt);
            let used: Vec<_> = bucket.meters.iter().map(|meter| meter.available(bucket.at)).collect();
            assert_eq!(used, [7], "{}", bucket.subject);
        }
    }
    let none = store.buckets(&resource("nothing"), &Paging::default()).await.expect("buckets are listed");
    assert!(none.items.is_empty() && none.next.is_none());
}

/// Policies by scope.
pub async fn policies_are_paged(fixture: Fixture) {
    let mut scopes = vec![Scope::System];
    scopes.extend(NAMES.map(|name| Scope::Resource(resource(name))));
    scopes.extend(NAMES.map(|name| Scope::Entity(entity_id(name))));
    scopes.extend(NAMES[..3].iter().flat_map(|entity| NAMES.map(|name| Scope::Subject(on(entity, name)))));
    for scope in scopes.iter().rev() {
        fixture.writes(scope, Some(policy(&[slow("rpm", 1)]))).await;
    }
    let of = |is_it: &dyn Fn(&Scope) -> bool| scopes.iter().filter(|scope| is_it(scope)).cloned().collect();
    let (a, ab) = (entity_id("a"), resource("ab"));
    let table: [(Listing, Vec<Scope>); 3] = [
        (Listing::All, scopes.clone()),
        (Listing::Entity(a.clone()), of(&|scope| scope.entity() == Some(&a))),
        (Listing::Custom(ab.clone()), of(&|scope| scope.entity().is_some() && scope.resource() == Some(&ab))),
    ];
    let store = &fixture.store;
    for (listing, expected) in &table {
        for max in [1, 2, 5, 1_000] {
            let found = all_of(max, |paging| {
                Box::pin(async move { store.list(listing, &paging).await.expect("policies are listed") })
            });
            let found: Vec<_> = found.await.into_iter().map(|(scope, _)| scope).collect();
            assert_eq!(found, *expected, "{listing:?} in pages of {max}");
        }
    }
}

/// Entities, and the children of one, by id.
pub async fn entities_and_children_are_paged(fixture: Fixture) {
    let parent = entity_id("00 parent");
    fixture.puts(&Entity::new(parent.clone())).await;
    for name in NAMES.iter().rev() {
        fixture.puts(&Entity::new(entity_id(name)).parent(parent.clone())).await;
    }
    let (store, parent) = (&fixture.store, &parent);
    for max in [1, 2, 7, 8] {
        let children = all_of(max, |paging| {
            Box::pin(async move { store.children(parent, &paging).await.expect("children are listed") })
        });
        let children = children.await;
        let names: Vec<_> = children.iter().map(|child| child.value.id().as_str()).collect();
        assert_eq!(names, NAMES, "in pages of {max}");
        let all = all_of(max, |paging| {
            Box::pin(async move { store.entities(&paging).await.expect("entities are listed") })
        });
        let all = all.await;
        assert_eq!(all.len(), 8, "in pages of {max}");
        assert!(all.iter().map(|entity| entity.value.id()).is_sorted());
    }
}

/// The last item of a page is removed before the next page is read.
pub async fn listing_continues_after_its_cursor_item_is_gone(fixture: Fixture) {
    for name in NAMES {
        fixture.puts(&Entity::new(entity_id(name))).await;
    }
    let two = Paging::first(2).expect("two are within bounds");
    let first = fixture.store.entities(&two).await.expect("entities are listed");
    for name in ["a", "a b"] {
        fixture.store.remove(&entity_id(name), Expect::Any, ACTOR).await.expect("it exists");
    }
    let next = two.after(first.next.expect("there are more"));
    let second = fixture.store.entities(&next).await.expect("entities are listed");
    let names: Vec<_> = second.items.iter().map(|entity| entity.value.id().as_str()).collect();
    assert_eq!(names, ["ab", "b"]);
}

/// Usage by subject, then limit, then window.
pub async fn usage_is_paged(fixture: Fixture) {
    let limits = [slow("tpm", 100), slow("rpm", 100), slow("a.b", 100)];
    for name in NAMES.iter().rev() {
        for subject in [on(name, "gpt"), on("acme", name)] {
            let levels = levels_of(0, &[(subject, &limits)]);
            fixture.spends(&levels, &[("tpm", 3), ("rpm", 1), ("a.b", 2)]).await;
        }
    }
    let mut expected: Vec<(&str, &str, u64)> = Vec::new();
    for name in NAMES {
        expected.extend([(name, "a.b", 2), (name, "rpm", 1), (name, "tpm", 3)]);
    }
    let store = &fixture.store;
    for of in [UsageOf::Entity(entity_id("acme")), UsageOf::Resource(resource("gpt"))] {
        let is_entity = matches!(of, UsageOf::Entity(_));
        let query = &UsageQuery { of, window: Window::Month, range: ALWAYS };
        for max in [1, 2, 3, 100] {
            let found = all_of(max, |paging| {
                Box::pin(async move { store.usage(query, &paging).await.expect("usage is listed") })
            });
            let found = found.await;
            let lines = found.iter().map(|line| {
                let Subject { entity, resource } = &line.subject;
                let name = if is_entity { resource.as_str() } else { entity.as_str() };
                (name, line.limit.as_str(), line.tally.units)
            });
            assert_eq!(lines.collect::<Vec<_>>(), expected, "{query:?} in pages of {max}");
        }
    }
}

/// In the order of changes, for all keys or one.
pub async fn audit_is_paged(fixture: Fixture) {
    let scopes = [Scope::System, Scope::Entity(entity_id("a"))];
    // More than ten: numbers must not be sorted as text.
    for number in 0..12 {
        fixture.writes(&scopes[usize::from(number % 3 == 0)], Some(policy(&[slow("rpm", number + 1)]))).await;
    }
    let store = &fixture.store;
    for (filed, count) in
        [(None, 12), (Some(AuditKey::scope(&scopes[0])), 8), (Some(AuditKey::scope(&scopes[1])), 4)]
    {
        let query = &AuditQuery { filed, range: ALWAYS };
        for max in [1, 2, 3, 100] {
            let found = all_of(max, |paging| {
                Box::pin(async move { store.audit(query, &paging).await.expect("the audit is listed") })
            });
            let found = found.await;
            assert_eq!(found.len(), count, "{query:?} in pages of {max}");
            assert!(found.iter().map(|entry| entry.version).is_sorted_by(|one, next| one < next));
        }
    }
}

/// No entry is lost between the pages.
pub async fn page_may_be_cut_within_one_change(fixture: Fixture) {
    let changes = NAMES.map(|name| crate::PolicyChange {
        scope: Scope::Resource(resource(name)),
        expect: Expect::Any,
        policy: Some(policy(&[slow("rpm", 1)])),
    });
    fixture.store.apply(&changes, ACTOR).await.expect("policies are written");
    let (store, query) = (&fixture.store, &AuditQuery { filed: None, range: ALWAYS });
    let found = all_of(2, |paging| {
        Box::pin(async move { store.audit(query, &paging).await.expect("the audit is listed") })
    });
    let filed: Vec<_> = found.await.iter().map(|entry| entry.filed.to_string()).collect();
    assert_eq!(filed, NAMES.map(|name| format!("$RESOURCE:{name}")));
}

/// With an error message.
pub async fn invalid_cursor_is_refused_by_every_listing(fixture: Fixture) {
    let (store, at) = (&fixture.store, invalid_cursor());
    rejects_cursor("buckets", store.buckets(&resource("gpt"), &at)).await;
    for listing in [Listing::All, Listing::Entity(entity_id("a")), Listing::Custom(resource("gpt"))] {
        rejects_cursor("policies", store.list(&listing, &at)).await;
    }
    rejects_cursor("children", store.children(&entity_id("a"), &at)).await;
    rejects_cursor("entities", store.entities(&at)).await;
    for of in [UsageOf::Entity(entity_id("a")), UsageOf::Resource(resource("gpt"))] {
        let query = UsageQuery { of, window: Window::Hour, range: ALWAYS };
        rejects_cursor("usage", store.usage(&query, &at)).await;
    }
    let query = AuditQuery { filed: None, range: ALWAYS };
    rejects_cursor("the audit", store.audit(&query, &at)).await;
}
