//! Policies: written with an expected version, all or none, each change with its own version.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::audit::About;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::policy::{Expect, OnExpiry, OnUnavailable, Policy, Scope, Share, Version};
use tidegate_core::limit::rule::Limit;

use super::Fixture;
use super::kit::{ACTOR, entity_id, is_stale, on, policy, resource, slow, subject};
use crate::{Listing, Paging, PolicyChange, StoreError};

fn change(scope: &Scope, expect: Expect, policy: Option<Policy>) -> PolicyChange {
    PolicyChange { scope: scope.clone(), expect, policy }
}

fn of_resource(name: &str) -> Scope {
    Scope::Resource(resource(name))
}

/// A policy of one limit.
fn one(burst: u64) -> Policy {
    policy(&[slow("rpm", burst)])
}

async fn version(fixture: &Fixture) -> Version {
    fixture.store.version().await.expect("the version is read")
}

/// The policy of a scope and its version.
async fn written(fixture: &Fixture, scope: &Scope) -> Option<(Version, Policy)> {
    let read = fixture.store.read(std::slice::from_ref(scope)).await.expect("policies are read");
    assert_eq!(read.policies.len(), 1, "one policy per scope");
    let found = read.policies.into_iter().next().flatten();
    found.map(|found| (found.version, Arc::unwrap_or_clone(found.value)))
}

/// All changes after a version are returned, or `None`.
pub async fn changes_since_a_version_are_complete(fixture: Fixture) {
    let scopes =
        [Scope::System, of_resource("a"), Scope::Entity(entity_id("acme")), Scope::Subject(subject("beta"))];
    fixture.writes(&scopes[0], Some(one(1))).await;
    let since = version(&fixture).await;
    let mut expected = Vec::new();
    for scope in &scopes {
        fixture.writes(scope, Some(one(2))).await;
        expected.push(About::Policy(scope.clone()));
    }
    let both = [&scopes[1], &scopes[2]].map(|scope| change(scope, Expect::Any, Some(one(3))));
    fixture.store.apply(&both, ACTOR).await.expect("policies are written");
    expected.extend([&scopes[1], &scopes[2]].map(|scope| About::Policy(scope.clone())));
    fixture
        .store
        .put(&Entity::new(entity_id("acme")), Expect::Any, ACTOR)
        .await
        .expect("an entity is written");
    expected.push(About::Entity(entity_id("acme")));
    let read = async |since| fixture.store.changed(since).await.expect("changes are read");
    let Some(changes) = read(since).await else {
        // A caller then reads every subject again.
        assert_eq!(read(version(&fixture).await).await, None, "a store returns them always or never");
        return;
    };
    assert_eq!((changes.version, changes.about), (version(&fixture).await, expected));
    let nothing = read(version(&fixture).await).await.expect("they were returned before");
    assert_eq!(nothing.about, []);
    for burst in 0..100 {
        fixture.writes(&scopes[0], Some(one(10 + burst))).await;
    }
    let changes = read(since).await;
    assert!(changes.is_none_or(|changes| changes.about.len() == 107), "all of them or none");
}

/// Every field is read back.
pub async fn policy_is_read_as_written(fixture: Fixture) {
    let share = Share::new(0.25).expect("a quarter is a share");
    let limits = [
        Limit::per_minute("tpm", 100_000).burst(150_000),
        Limit::per("odd", 7, Duration::from_micros(1_234_567)),
        Limit::per_day("usd", 1 << 40),
    ];
    let policies = [
        policy(&limits).only().on_unavailable(OnUnavailable::LocalShare(share)).on_expiry(OnExpiry::Return),
        policy(&limits[..1]).on_unavailable(OnUnavailable::Allow),
        policy(&limits[1..]).on_unavailable(OnUnavailable::Block).on_expiry(OnExpiry::Settle),
        Policy::default(),
    ];
    let scopes = [
        Scope::System,
        of_resource("größe / 1"),
        Scope::Entity(entity_id("user 7")),
        Scope::Subject(subject("org/team:7")),
    ];
    for (scope, policy) in scopes.iter().zip(&policies) {
        let version = fixture.writes(scope, Some(policy.clone())).await;
        assert_eq!(written(&fixture, scope).await, Some((version, policy.clone())), "{scope}");
    }
    let read = fixture.store.read(&scopes).await.expect("policies are read");
    let found = read.policies.iter().flatten().map(|written| Policy::clone(&written.value));
    assert_eq!(found.collect::<Vec<_>>(), policies, "in the requested order");
}

/// An absent policy is `None`, at its position.
pub async fn policies_are_read_in_the_order_of_scopes(fixture: Fixture) {
    fixture.writes(&of_resource("b"), Some(one(2))).await;
    let scopes = [of_resource("c"), of_resource("b"), Scope::System, of_resource("b")];
    let read = fixture.store.read(&scopes).await.expect("policies are read");
    let found: Vec<bool> = read.policies.iter().map(Option::is_some).collect();
    assert_eq!(found, [false, true, false, true]);
    let none = fixture.store.read(&[]).await.expect("policies are read");
    assert!(none.policies.is_empty());
}

/// And the written policies have that version.
pub async fn each_change_raises_the_version_by_one(fixture: Fixture) {
    assert_eq!(version(&fixture).await, Version::ZERO);
    let mut expected = Version::ZERO;
    for policy in [Some(one(1)), Some(one(2)), None] {
        expected = expected.next();
        assert_eq!(fixture.writes(&Scope::System, policy).await, expected);
        assert_eq!(version(&fixture).await, expected);
        let read = fixture.store.read(&[]).await.expect("policies are read");
        assert_eq!(read.version, expected);
    }
    // Several at once are one change.
    let changes = [of_resource("a"), of_resource("b")].map(|scope| change(&scope, Expect::Any, Some(one(1))));
    let made = fixture.store.apply(&changes, ACTOR).await.expect("policies are written");
    assert_eq!((made, version(&fixture).await), (expected.next(), expected.next()));
    assert_eq!(written(&fixture, &of_resource("b")).await.map(|(version, _)| version), Some(made));
    // A change of an entity counts too.
    let made = fixture.puts(&Entity::new(entity_id("acme"))).await;
    assert_eq!(made, expected.next().next());
    // A policy keeps the version at which it was written.
    assert_eq!(written(&fixture, &of_resource("b")).await.map(|(version, _)| version), Some(expected.next()));
}

/// A wrong expectation is refused.
pub async fn stale_write_is_refused_with_current_version(fixture: Fixture) {
    let scope = Scope::System;
    let first = fixture.writes(&scope, Some(one(1))).await;
    let second = fixture.writes(&scope, Some(one(2))).await;
    let absent = of_resource("absent");
    let table = [
        (&scope, Expect::Version(first), Some(one(3)), Some(second)),
        (&scope, Expect::Absent, Some(one(3)), Some(second)),
        (&scope, Expect::Version(first), None, Some(second)),
        (&absent, Expect::Version(first), Some(one(3)), None),
        (&absent, Expect::Version(first), None, None),
    ];
    for (scope, expect, policy, current) in table {
        is_stale(fixture.store.apply(&[change(scope, expect, policy)], ACTOR).await, current);
    }
    assert_eq!(version(&fixture).await, second, "a refused change does not count");
    assert_eq!(written(&fixture, &scope).await, Some((second, one(2))));
    assert_eq!(written(&fixture, &absent).await, None);
    let right = [
        change(&scope, Expect::Version(second), Some(one(3))),
        change(&absent, Expect::Absent, Some(one(4))),
    ];
    fixture.store.apply(&right, ACTOR).await.expect("the versions are as expected");
}

/// One refused change prevents all others, at any position.
pub async fn changes_are_applied_all_or_none(fixture: Fixture) {
    let current = fixture.writes(&of_resource("there"), Some(one(1))).await;
    let good = |name: &str| change(&of_resource(name), Expect::Any, Some(one(9)));
    let bad = change(&of_resource("there"), Expect::Absent, Some(one(9)));
    let orders = [
        vec![bad.clone(), good("a"), good("b")],
        vec![good("a"), bad.clone(), good("b")],
        vec![good("a"), good("b"), bad],
    ];
    for changes in orders {
        is_stale(fixture.store.apply(&changes, ACTOR).await, Some(current));
        for name in ["a", "b"] {
            assert_eq!(written(&fixture, &of_resource(name)).await, None, "{name}");
        }
        assert_eq!(written(&fixture, &of_resource("there")).await, Some((current, one(1))));
        assert_eq!(version(&fixture).await, current);
    }
}

/// Removing it again is no error unless a version was expected.
pub async fn removed_policy_does_not_exist(fixture: Fixture) {
    let scope = Scope::Subject(subject("acme"));
    let written_at = fixture.writes(&scope, Some(one(1))).await;
    let removal = [change(&scope, Expect::Version(written_at), None)];
    fixture.store.apply(&removal, ACTOR).await.expect("the version is as expected");
    assert_eq!(written(&fixture, &scope).await, None);
    is_stale(fixture.store.apply(&removal, ACTOR).await, None);
    fixture.writes(&scope, None).await;
    let again = [change(&scope, Expect::Absent, Some(one(2)))];
    let version = fixture.store.apply(&again, ACTOR).await.expect("it does not exist");
    assert!(version > written_at, "versions are never reused");
    assert_eq!(written(&fixture, &scope).await, Some((version, one(2))));
}

/// The result would be ambiguous.
pub async fn scope_changed_twice_in_one_call_is_refused(fixture: Fixture) {
    let twice = [1, 2].map(|burst| change(&Scope::System, Expect::Any, Some(one(burst))));
    let answer = fixture.store.apply(&twice, ACTOR).await;
    assert!(matches!(answer, Err(StoreError::Invalid { .. })), "the same scope twice returns {answer:?}");
    assert_eq!(written(&fixture, &Scope::System).await, None);
}

/// All policies, those of an entity, or those of a resource's entities.
pub async fn policies_are_listed_in_the_order_of_scopes(fixture: Fixture) {
    let own = |entity: &str, name: &str| Scope::Subject(on(entity, name));
    let sorted = [
        Scope::System,
        of_resource("embed"),
        of_resource("gpt"),
        Scope::Entity(entity_id("acme")),
        Scope::Entity(entity_id("globex")),
        own("acme", "embed"),
        own("acme", "gpt"),
        own("globex", "gpt"),
        own("initech", "embed"),
    ];
    for place in [4, 8, 0, 6, 2, 5, 7, 1, 3] {
        fixture.writes(&sorted[place], Some(one(place as u64 + 1))).await;
    }
    let pick = |places: &[usize]| places.iter().map(|place| sorted[*place].clone()).collect::<Vec<_>>();
    let table = [
        (Listing::All, sorted.to_vec()),
        (Listing::Entity(entity_id("acme")), pick(&[3, 5, 6])),
        (Listing::Entity(entity_id("initech")), pick(&[8])),
        (Listing::Entity(entity_id("absent")), Vec::new()),
        (Listing::Custom(resource("gpt")), pick(&[6, 7])),
        (Listing::Custom(resource("nothing")), Vec::new()),
    ];
    for (listing, expected) in table {
        let page = fixture.store.list(&listing, &Paging::default()).await.expect("policies are listed");
        let scopes: Vec<_> = page.items.iter().map(|(scope, _)| scope.clone()).collect();
        assert_eq!(scopes, expected, "{listing:?}");
        for (scope, found) in page.items {
            let read = written(&fixture, &scope).await;
            assert_eq!(read, Some((found.version, Arc::unwrap_or_clone(found.value))), "{scope}");
        }
    }
    // A removed policy is not listed.
    fixture.writes(&own("acme", "gpt"), None).await;
    for listing in [Listing::Entity(entity_id("acme")), Listing::Custom(resource("gpt"))] {
        let page = fixture.store.list(&listing, &Paging::default()).await.expect("policies are listed");
        assert!(page.items.iter().all(|(scope, _)| *scope != own("acme", "gpt")), "{listing:?}");
    }
}
