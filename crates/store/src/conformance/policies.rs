//! Policies: written with an expectation, all or none, each at a version of its own.

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
    fixture.store.version().await.expect("the version is answered")
}

/// What is written at a scope, and at which version.
async fn written(fixture: &Fixture, scope: &Scope) -> Option<(Version, Policy)> {
    let read = fixture.store.read(std::slice::from_ref(scope)).await.expect("policies are read");
    assert_eq!(read.policies.len(), 1, "one scope, one answer");
    let found = read.policies.into_iter().next().flatten();
    found.map(|found| (found.version, Arc::unwrap_or_clone(found.value)))
}

/// The changes after a version are answered, or that they are not known.
pub async fn changes_since_a_version_are_all_told(fixture: Fixture) {
    let scopes =
        [Scope::System, of_resource("a"), Scope::Entity(entity_id("acme")), Scope::Subject(subject("beta"))];
    fixture.writes(&scopes[0], Some(one(1))).await;
    let since = version(&fixture).await;
    let mut wanted = Vec::new();
    for scope in &scopes {
        fixture.writes(scope, Some(one(2))).await;
        wanted.push(About::Policy(scope.clone()));
    }
    let both = [&scopes[1], &scopes[2]].map(|scope| change(scope, Expect::Any, Some(one(3))));
    fixture.store.apply(&both, ACTOR).await.expect("policies are written");
    wanted.extend([&scopes[1], &scopes[2]].map(|scope| About::Policy(scope.clone())));
    fixture
        .store
        .put(&Entity::new(entity_id("acme")), Expect::Any, ACTOR)
        .await
        .expect("an entity is written");
    wanted.push(About::Entity(entity_id("acme")));
    let changed = async |since| fixture.store.changed(since).await.expect("changes are answered");
    let Some(told) = changed(since).await else {
        // Then every subject is read again.
        assert_eq!(changed(version(&fixture).await).await, None, "a store knows them always or never");
        return;
    };
    assert_eq!((told.version, told.about), (version(&fixture).await, wanted));
    let nothing = changed(version(&fixture).await).await.expect("they were known before");
    assert_eq!(nothing.about, []);
    for burst in 0..100 {
        fixture.writes(&scopes[0], Some(one(10 + burst))).await;
    }
    let told = changed(since).await;
    assert!(told.is_none_or(|told| told.about.len() == 107), "all of them or none");
}

/// Every part of a policy comes back.
pub async fn a_policy_is_read_as_it_was_written(fixture: Fixture) {
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
    assert_eq!(found.collect::<Vec<_>>(), policies, "in the order they were asked for");
}

/// What is not there is answered as nothing, in its place.
pub async fn each_scope_is_answered_in_its_place(fixture: Fixture) {
    fixture.writes(&of_resource("b"), Some(one(2))).await;
    let scopes = [of_resource("c"), of_resource("b"), Scope::System, of_resource("b")];
    let read = fixture.store.read(&scopes).await.expect("policies are read");
    let found: Vec<bool> = read.policies.iter().map(Option::is_some).collect();
    assert_eq!(found, [false, true, false, true]);
    let none = fixture.store.read(&[]).await.expect("policies are read");
    assert!(none.policies.is_empty());
}

/// The namespace's version counts changes, and what is written carries the count.
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
    // An entity's is another.
    let made = fixture.puts(&Entity::new(entity_id("acme"))).await;
    assert_eq!(made, expected.next().next());
    // What is written keeps the version it was written at.
    assert_eq!(written(&fixture, &of_resource("b")).await.map(|(version, _)| version), Some(expected.next()));
}

/// A belief that is wrong is refused, with what is there.
pub async fn a_stale_expectation_is_refused_with_the_version_that_is_there(fixture: Fixture) {
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
    assert_eq!(version(&fixture).await, second, "what is refused is no change");
    assert_eq!(written(&fixture, &scope).await, Some((second, one(2))));
    assert_eq!(written(&fixture, &absent).await, None);
    let right = [
        change(&scope, Expect::Version(second), Some(one(3))),
        change(&absent, Expect::Absent, Some(one(4))),
    ];
    fixture.store.apply(&right, ACTOR).await.expect("what is expected is there");
}

/// One change that is refused keeps all others from being made, wherever it stands.
pub async fn changes_are_made_all_or_none(fixture: Fixture) {
    let there = fixture.writes(&of_resource("there"), Some(one(1))).await;
    let good = |name: &str| change(&of_resource(name), Expect::Any, Some(one(9)));
    let bad = change(&of_resource("there"), Expect::Absent, Some(one(9)));
    let orders = [
        vec![bad.clone(), good("a"), good("b")],
        vec![good("a"), bad.clone(), good("b")],
        vec![good("a"), good("b"), bad],
    ];
    for changes in orders {
        is_stale(fixture.store.apply(&changes, ACTOR).await, Some(there));
        for name in ["a", "b"] {
            assert_eq!(written(&fixture, &of_resource(name)).await, None, "{name}");
        }
        assert_eq!(written(&fixture, &of_resource("there")).await, Some((there, one(1))));
        assert_eq!(version(&fixture).await, there);
    }
}

/// A removed policy is not there; removing it again is no error unless something was expected.
pub async fn a_policy_that_is_removed_is_not_there(fixture: Fixture) {
    let scope = Scope::Subject(subject("acme"));
    let written_at = fixture.writes(&scope, Some(one(1))).await;
    let removal = [change(&scope, Expect::Version(written_at), None)];
    fixture.store.apply(&removal, ACTOR).await.expect("it is as expected");
    assert_eq!(written(&fixture, &scope).await, None);
    is_stale(fixture.store.apply(&removal, ACTOR).await, None);
    fixture.writes(&scope, None).await;
    let again = [change(&scope, Expect::Absent, Some(one(2)))];
    let version = fixture.store.apply(&again, ACTOR).await.expect("it is not there");
    assert!(version > written_at, "no version comes twice");
    assert_eq!(written(&fixture, &scope).await, Some((version, one(2))));
}

/// One scope twice in one call has no answer that is right.
pub async fn a_scope_is_changed_once_at_a_time(fixture: Fixture) {
    let twice = [1, 2].map(|burst| change(&Scope::System, Expect::Any, Some(one(burst))));
    let answer = fixture.store.apply(&twice, ACTOR).await;
    assert!(matches!(answer, Err(StoreError::Invalid { .. })), "the same scope twice answers {answer:?}");
    assert_eq!(written(&fixture, &Scope::System).await, None);
}

/// All of them, those of an entity, or those of a resource's entities, in the order of scopes.
pub async fn policies_are_listed_in_the_order_of_their_scopes(fixture: Fixture) {
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
        (Listing::Entity(entity_id("nobody")), Vec::new()),
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
    // What is removed is listed nowhere.
    fixture.writes(&own("acme", "gpt"), None).await;
    for listing in [Listing::Entity(entity_id("acme")), Listing::Custom(resource("gpt"))] {
        let page = fixture.store.list(&listing, &Paging::default()).await.expect("policies are listed");
        assert!(page.items.iter().all(|(scope, _)| *scope != own("acme", "gpt")), "{listing:?}");
    }
}
