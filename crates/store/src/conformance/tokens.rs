//! Tokens: created once, found by the hash of their secret, revoked permanently.

use std::time::Duration;

use tidegate_core::limit::audit::{AuditKey, Change};
use tidegate_core::limit::name::{EntityId, Namespace};
use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId, TokenScope, TokenScopes, TokenState};
use tidegate_core::time::Stamp;

use super::Fixture;
use super::kit::{ACTOR, ALWAYS, all_of, invalid_cursor, is_stale, rejects_cursor};
use crate::{AuditQuery, Lookup, Paging, StoreError};

fn id(id: &str) -> TokenId {
    TokenId::new(id).expect("the suite's names are valid")
}

fn new_token(name: &str) -> NewToken {
    NewToken {
        id: id(name),
        name: format!("the token {name}"),
        namespace: Namespace::new("prod").expect("the suite's names are valid"),
        scopes: TokenScopes::new([TokenScope::Acquire]),
        entity: None,
        expires_at: None,
    }
}

fn hash(number: u8) -> TokenHash {
    let mut bytes = [number; 32];
    bytes[0] = 0;
    TokenHash::new(bytes)
}

async fn creates(fixture: &Fixture, name: &str, number: u8) -> Versioned<Token> {
    let made = fixture.store.create_token(&new_token(name), &hash(number), ACTOR).await;
    made.expect("a token is created")
}

async fn now(fixture: &Fixture) -> Stamp {
    fixture.store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are read").at
}

/// Every field is read back, by id and by hash, with its creator and time.
pub async fn token_is_read_as_created(fixture: Fixture) {
    let begun = now(&fixture).await;
    let full = NewToken {
        name: "Größe & Söhne".to_owned(),
        scopes: TokenScopes::new([TokenScope::Acquire, TokenScope::Read]),
        entity: EntityId::new("größe/7").ok(),
        expires_at: Some(begun + Duration::from_secs(86_400)),
        ..new_token("ci-7.x_y")
    };
    let made = fixture.store.create_token(&full, &hash(1), "ann").await.expect("a token is created");
    assert!(begun <= made.value.created_at && made.value.created_at <= now(&fixture).await);
    assert_eq!(made.value, Token::made(&full, made.value.created_at, "ann"));
    let other = creates(&fixture, "other", 2).await;
    assert_eq!(other.version, made.version.next());
    let store = &fixture.store;
    let found = store.token(&full.id).await.expect("a token is read");
    assert_eq!(found, Some((hash(1), made.clone())));
    assert_eq!(store.find_token(&hash(1)).await.expect("a token is read"), Some(made));
    assert_eq!(store.find_token(&hash(2)).await.expect("a token is read"), Some(other));
    assert_eq!(store.find_token(&hash(3)).await.expect("a token is read"), None);
    assert_eq!(store.token(&id("absent")).await.expect("a token is read"), None);
}

/// Ids and secrets are never reused.
pub async fn token_with_existing_id_or_secret_is_refused(fixture: Fixture) {
    let first = creates(&fixture, "ci", 1).await;
    let store = &fixture.store;
    is_stale(store.create_token(&new_token("ci"), &hash(2), ACTOR).await, Some(first.version));
    match store.create_token(&new_token("other"), &hash(1), ACTOR).await {
        Err(StoreError::Invalid { what }) => assert!(!what.contains("`ci`"), "{what}"),
        other => panic!("a secret of another token returns {other:?}"),
    }
    let revoked = store.revoke_token(&id("ci"), Expect::Any, ACTOR).await.expect("a token is revoked");
    is_stale(store.create_token(&new_token("ci"), &hash(2), ACTOR).await, Some(revoked));
    assert!(store.create_token(&new_token("other"), &hash(1), ACTOR).await.is_err());
    assert_eq!(store.find_token(&hash(2)).await.expect("a token is read"), None);
    assert_eq!(store.version().await.expect("the version is read"), revoked);
}

/// The error has the token's id, and nothing is created.
pub async fn invalid_token_is_refused(fixture: Fixture) {
    let now = now(&fixture).await;
    let table = [
        NewToken { name: String::new(), ..new_token("a") },
        NewToken { name: "x".repeat(257), ..new_token("a") },
        NewToken { scopes: TokenScopes::new([]), ..new_token("a") },
        NewToken { expires_at: Some(now), ..new_token("a") },
    ];
    for bad in table {
        match fixture.store.create_token(&bad, &hash(1), ACTOR).await {
            Err(StoreError::Token(why)) => assert!(why.to_string().contains("`a`"), "{why}"),
            other => panic!("{bad:?} returns {other:?}"),
        }
    }
    assert!(fixture.store.create_token(&new_token("a"), &hash(1), "").await.is_err(), "an actor has a name");
    assert_eq!(fixture.store.token(&id("a")).await.expect("a token is read"), None);
    assert_eq!(fixture.store.version().await.expect("the version is read"), Version::ZERO);
}

/// A revoked token stays, with the time of its revocation; revoking it again changes nothing.
pub async fn token_is_revoked_once(fixture: Fixture) {
    let made = creates(&fixture, "ci", 1).await;
    let other = creates(&fixture, "other", 2).await;
    let store = &fixture.store;
    is_stale(store.revoke_token(&id("ci"), Expect::Version(other.version), ACTOR).await, Some(made.version));
    is_stale(store.revoke_token(&id("ci"), Expect::Absent, ACTOR).await, Some(made.version));
    let expect = Expect::Version(made.version);
    let revoked = store.revoke_token(&id("ci"), expect, ACTOR).await.expect("the version is as expected");
    assert_eq!(revoked, other.version.next());
    for expect in [expect, Expect::Any, Expect::Version(revoked)] {
        let again =
            store.revoke_token(&id("ci"), expect, "bob").await.expect("revoking it again is no error");
        assert_eq!(again, revoked);
    }
    let found = store.find_token(&hash(1)).await.expect("a token is read").expect("it exists");
    let at = found.value.revoked_at.expect("it was revoked");
    assert!(made.value.created_at <= at && at <= now(&fixture).await);
    assert_eq!(found, Versioned { version: revoked, value: Token { revoked_at: Some(at), ..made.value } });
    assert_eq!(found.value.state(at), TokenState::Revoked);
    assert_eq!(store.find_token(&hash(2)).await.expect("a token is read"), Some(other));
    match store.revoke_token(&id("absent"), Expect::Any, ACTOR).await {
        Err(StoreError::NoToken { token }) => assert_eq!(token, id("absent")),
        other => panic!("revoking an absent token returns {other:?}"),
    }
    assert_eq!(store.version().await.expect("the version is read"), revoked);
}

/// Each change is audited with its actor, without the hash. Calls that change nothing are not.
pub async fn token_changes_are_audited(fixture: Fixture) {
    let store = &fixture.store;
    let made = store.create_token(&new_token("ci"), &hash(1), "ann").await.expect("a token is created");
    creates(&fixture, "other", 2).await;
    assert!(store.create_token(&new_token("ci"), &hash(3), "eve").await.is_err());
    store.revoke_token(&id("ci"), Expect::Any, "bob").await.expect("a token is revoked");
    store.revoke_token(&id("ci"), Expect::Any, "eve").await.expect("revoking it again is no error");
    let after = store.find_token(&hash(1)).await.expect("a token is read").expect("it exists");
    let query = AuditQuery { filed: Some(AuditKey::token(&id("ci"))), range: ALWAYS };
    let entries = store.audit(&query, &Paging::default()).await.expect("the audit is listed").items;
    let [first, second] = &entries[..] else { panic!("two changes were made: {entries:?}") };
    assert_eq!(first.filed.as_str(), "$TOKEN:ci");
    assert_eq!((first.actor.as_str(), first.version, first.at), ("ann", made.version, made.value.created_at));
    assert_eq!(first.change, Change::Token { before: None, after: made.value.clone() });
    assert_eq!((second.actor.as_str(), second.version), ("bob", after.version));
    assert_eq!(Some(second.at), after.value.revoked_at);
    assert_eq!(second.change, Change::Token { before: Some(made.value), after: after.value });
}

/// By id, including revoked ones.
pub async fn tokens_are_paged(fixture: Fixture) {
    let names = ["a", "a-1", "b", "c", "d.x"];
    for (number, name) in (1..).zip(["c", "a", "d.x", "a-1", "b"]) {
        creates(&fixture, name, number).await;
    }
    fixture.store.revoke_token(&id("b"), Expect::Any, ACTOR).await.expect("a token is revoked");
    let store = &fixture.store;
    for max in [1, 2, 3, 5, 100] {
        let found = all_of(max, |paging| {
            Box::pin(async move { store.tokens(&paging).await.expect("tokens are listed") })
        });
        let found: Vec<_> = found.await.iter().map(|token| token.value.id.to_string()).collect();
        assert_eq!(found, names, "in pages of {max}");
    }
    rejects_cursor("tokens", store.tokens(&invalid_cursor())).await;
}

/// Only one of several concurrent creations of an id succeeds.
pub async fn concurrent_creations_of_one_token_win_once(fixture: Fixture) {
    let creators = (1..=8).map(|number| {
        let store = std::sync::Arc::clone(&fixture.store);
        tokio::spawn(async move { store.create_token(&new_token("ci"), &hash(number), ACTOR).await.is_ok() })
    });
    let mut successes = 0;
    for creator in creators.collect::<Vec<_>>() {
        successes += u32::from(creator.await.expect("no task panics"));
    }
    assert_eq!(successes, 1);
    let (hash, made) = fixture.store.token(&id("ci")).await.expect("a token is read").expect("it exists");
    assert_eq!(fixture.store.find_token(&hash).await.expect("a token is read"), Some(made));
}
