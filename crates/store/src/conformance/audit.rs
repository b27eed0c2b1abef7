//! The audit log has an entry for every change, and for nothing else.

use tidegate_core::limit::audit::{AuditKey, Change, Entry};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version};
use tidegate_core::time::Stamp;

use super::Fixture;
use super::kit::{ACTOR, ALWAYS, RESOURCE, entity_id, millis, own, policy, resource, slow, subject};
use crate::{AuditQuery, Lookup, Paging, PolicyChange};

async fn audit(fixture: &Fixture, filed: Option<AuditKey>) -> Vec<Entry> {
    let query = AuditQuery { filed, range: ALWAYS };
    let page = fixture.store.audit(&query, &Paging::default()).await.expect("the audit is listed");
    assert!(page.next.is_none(), "a case has no more than a page of audit");
    page.items
}

fn one(burst: u64) -> Policy {
    policy(&[slow("rpm", burst)])
}

fn of_policy(scope: &Scope, before: Option<Policy>, after: Option<Policy>) -> Change {
    Change::Policy { scope: scope.clone(), before, after }
}

async fn now(fixture: &Fixture) -> Stamp {
    fixture.store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are read").at
}

/// With the values before and after, the actor and the time.
pub async fn every_change_is_audited_with_both_values(fixture: Fixture) {
    let scope = Scope::Resource(resource(RESOURCE));
    let change = |policy| [PolicyChange { scope: scope.clone(), expect: Expect::Any, policy }];
    let (store, begun) = (&fixture.store, now(&fixture).await);
    store.apply(&change(Some(one(1))), "ann").await.expect("a policy is written");
    store.apply(&change(Some(one(2))), "bob").await.expect("a policy is written");
    store.apply(&change(None), "ann").await.expect("a policy is removed");
    let (acme, named) = (Entity::new(entity_id("acme")), Entity::new(entity_id("acme")).name("Acme"));
    store.put(&acme, Expect::Any, "cy").await.expect("an entity is written");
    store.put(&named, Expect::Any, "ann").await.expect("an entity is written");
    store.remove(acme.id(), Expect::Any, "bob").await.expect("an entity is removed");
    let entity = |before: Option<&Entity>, after: Option<&Entity>| Change::Entity {
        before: before.cloned(),
        after: after.cloned(),
    };
    let expected = [
        ("ann", "$RESOURCE:gpt", of_policy(&scope, None, Some(one(1)))),
        ("bob", "$RESOURCE:gpt", of_policy(&scope, Some(one(1)), Some(one(2)))),
        ("ann", "$RESOURCE:gpt", of_policy(&scope, Some(one(2)), None)),
        ("cy", "acme", entity(None, Some(&acme))),
        ("ann", "acme", entity(Some(&acme), Some(&named))),
        ("bob", "acme", entity(Some(&named), None)),
    ];
    let entries = audit(&fixture, None).await;
    assert_eq!(entries.len(), expected.len());
    let ended = now(&fixture).await;
    for (number, (entry, (actor, filed, change))) in (1..).zip(entries.into_iter().zip(expected)) {
        assert_eq!(entry.version, Version::new(number));
        assert_eq!((entry.actor.as_str(), entry.filed.as_str()), (actor, filed), "change {number}");
        assert_eq!(entry.change, change, "change {number}");
        assert!(begun <= entry.at && entry.at <= ended, "change {number} was made at {}", entry.at);
    }
}

/// Neither refused calls nor calls that change nothing leave an entry.
pub async fn refused_change_is_not_audited(fixture: Fixture) {
    let scope = Scope::System;
    fixture.writes(&scope, Some(one(1))).await;
    fixture.puts(&Entity::new(entity_id("acme"))).await;
    fixture.puts(&Entity::new(entity_id("child")).parent(entity_id("acme"))).await;
    let (store, acme) = (&fixture.store, entity_id("acme"));
    let stale = PolicyChange { scope: scope.clone(), expect: Expect::Absent, policy: Some(one(2)) };
    let fresh =
        PolicyChange { scope: Scope::Entity(acme.clone()), expect: Expect::Any, policy: Some(one(2)) };
    assert!(store.apply(&[fresh, stale], ACTOR).await.is_err());
    assert!(store.put(&Entity::new(acme.clone()), Expect::Absent, ACTOR).await.is_err());
    assert!(store.put(&Entity::new(acme.clone()).parent(acme.clone()), Expect::Any, ACTOR).await.is_err());
    assert!(store.remove(&acme, Expect::Any, ACTOR).await.is_err());
    assert!(store.remove(&entity_id("absent"), Expect::Any, ACTOR).await.is_err());
    fixture.writes(&Scope::Resource(resource("nothing")), None).await;
    fixture.spends(&own("acme", &[slow("rpm", 1)]), &[("rpm", 1)]).await;
    assert_eq!(audit(&fixture, None).await.len(), 3, "three changes were made");
}

/// They are consecutive, too.
pub async fn entries_of_one_change_have_one_version(fixture: Fixture) {
    let scopes = [Scope::System, Scope::Resource(resource("gpt")), Scope::Subject(subject("acme"))];
    let changes =
        scopes.clone().map(|scope| PolicyChange { scope, expect: Expect::Any, policy: Some(one(1)) });
    let version = fixture.store.apply(&changes, ACTOR).await.expect("policies are written");
    fixture.puts(&Entity::new(entity_id("acme"))).await;
    let removed = fixture.store.remove(&entity_id("acme"), Expect::Any, ACTOR).await.expect("it exists");
    let versions: Vec<_> = audit(&fixture, None).await.iter().map(|entry| entry.version).collect();
    // The entity is removed with its policy.
    assert_eq!(versions, [version, version, version, version.next(), removed, removed]);
    let of_acme = audit(&fixture, Some(AuditKey::entity(&entity_id("acme")))).await;
    let removal = of_policy(&scopes[2], Some(one(1)), None);
    assert!(of_acme.iter().any(|entry| entry.change == removal), "the policy's removal is in the audit");
    assert_eq!(of_acme.len(), 4, "its policy written, it written, its policy removed, it removed");
}

/// By the key that changes are filed under, and by their time.
pub async fn audit_is_filtered_by_key_and_time(fixture: Fixture) {
    let table = [
        (Scope::System, 2),
        (Scope::Resource(resource("gpt")), 1),
        (Scope::Entity(entity_id("acme")), 3),
        (Scope::Subject(subject("globex")), 1),
    ];
    for (scope, count) in &table {
        for burst in 1..=*count {
            fixture.writes(scope, Some(one(burst))).await;
        }
        fixture.time.pass(millis(5)).await;
    }
    for (scope, count) in &table {
        let found = audit(&fixture, Some(AuditKey::scope(scope))).await;
        assert_eq!(found.len() as u64, *count, "{scope}");
        assert!(found.iter().all(|entry| entry.filed == AuditKey::scope(scope)));
    }
    assert!(audit(&fixture, Some(AuditKey::entity(&entity_id("absent")))).await.is_empty());
    let all = audit(&fixture, None).await;
    let middle = all[3].at;
    for (range, expected) in [
        (Stamp::ZERO..middle, all.iter().filter(|entry| entry.at < middle).count()),
        (middle..Stamp::MAX, all.iter().filter(|entry| entry.at >= middle).count()),
        (middle..middle, 0),
    ] {
        let query = AuditQuery { filed: None, range };
        let page = fixture.store.audit(&query, &Paging::default()).await.expect("the audit is listed");
        assert_eq!(page.items.len(), expected, "{query:?}");
    }
}
