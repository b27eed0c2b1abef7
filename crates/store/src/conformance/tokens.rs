//! Tokens: made once, found by what is known of their secret, revoked for good.

use std::time::Duration;

use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::policy::{Expect, Version, Versioned};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId, TokenScope, TokenScopes, TokenState};
use tidegate_core::time::Stamp;

use super::Fixture;
use super::kit::{ACTOR, ALWAYS, all_of, is_stale, nowhere, refuses_the_cursor};
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
    made.expect("a token is made")
}

async fn now(fixture: &Fixture) -> Stamp {
    fixture.store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are answered").at
}

/// Every part of a token comes back, by its id and by its hash, with who made it and when.
pub async fn a_token_is_read_as_it_was_made(fixture: Fixture) {
    let begun = now(&fixture).await;
    let full = NewToken {
        name: "Größe & Söhne".to_owned(),
        scopes: TokenScopes::new(TokenScope::ALL),
        expires_at: Some(begun + Duration::from_secs(86_400)),
        ..new_token("ci-7.x_y")
    };
    let made = fixture.store.create_token(&full, &hash(1), "ann").await.expect("a token is made");
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
    assert_eq!(store.token(&id("nobody")).await.expect("a token is read"), None);
}

/// An id is one token's for good, and so is a secret.
pub async fn a_second_token_of_one_id_or_one_secret_is_refused(fixture: Fixture) {
    let first = creates(&fixture, "ci", 1).await;
    let store = &fixture.store;
    is_stale(store.create_token(&new_token("ci"), &hash(2), ACTOR).await, Some(first.version));
    match store.create_token(&new_token("other"), &hash(1), ACTOR).await {
        Err(StoreError::Invalid { what }) => assert!(!what.contains("`ci`"), "{what}"),
        other => panic!("a secret that is another's answers {other:?}"),
    }
    let revoked = store.revoke_token(&id("ci"), Expect::Any, ACTOR).await.expect("a token is revoked");
    is_stale(store.create_token(&new_token("ci"), &hash(2), ACTOR).await, Some(revoked));
    assert!(store.create_token(&new_token("other"), &hash(1), ACTOR).await.is_err());
    assert_eq!(store.find_token(&hash(2)).await.expect("a token is read"), None);
    assert_eq!(store.version().await.expect("the version is answered"), revoked);
}

/// What cannot be is refused with what is wrong, and nothing is made.
pub async fn a_token_that_cannot_be_is_refused(fixture: Fixture) {
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
            other => panic!("{bad:?} answers {other:?}"),
        }
    }
    assert!(fixture.store.create_token(&new_token("a"), &hash(1), "").await.is_err(), "an actor has a name");
    assert_eq!(fixture.store.token(&id("a")).await.expect("a token is read"), None);
    assert_eq!(fixture.store.version().await.expect("the version is answered"), Version::ZERO);
}

/// A revoked token stays, with since when it is good no more; to revoke it again changes nothing.
pub async fn a_token_is_revoked_once_and_for_good(fixture: Fixture) {
    let made = creates(&fixture, "ci", 1).await;
    let other = creates(&fixture, "other", 2).await;
    let store = &fixture.store;
    is_stale(store.revoke_token(&id("ci"), Expect::Version(other.version), ACTOR).await, Some(made.version));
    is_stale(store.revoke_token(&id("ci"), Expect::Absent, ACTOR).await, Some(made.version));
    let expect = Expect::Version(made.version);
    let revoked = store.revoke_token(&id("ci"), expect, ACTOR).await.expect("it is as expected");
    assert_eq!(revoked, other.version.next());
    for expect in [expect, Expect::Any, Expect::Version(revoked)] {
        let again =
            store.revoke_token(&id("ci"), expect, "bob").await.expect("to revoke it again is no error");
        assert_eq!(again, revoked);
    }
    let found = store.find_token(&hash(1)).await.expect("a token is read").expect("it is there");
    let at = found.value.revoked_at.expect("it was revoked");
    assert!(made.value.created_at <= at && at <= now(&fixture).await);
    assert_eq!(found, Versioned { version: revoked, value: Token { revoked_at: Some(at), ..made.value } });
    assert_eq!(found.value.state(at), TokenState::Revoked);
    assert_eq!(store.find_token(&hash(2)).await.expect("a token is read"), Some(other));
    match store.revoke_token(&id("nobody"), Expect::Any, ACTOR).await {
        Err(StoreError::NoToken { token }) => assert_eq!(token, id("nobody")),
        other => panic!("revoking what is not there answers {other:?}"),
    }
    assert_eq!(store.version().await.expect("the version is answered"), revoked);
}

/// Each change of a token is in the audit, with who made it; what changed nothing is not, and no hash is.
pub async fn changes_of_tokens_are_in_the_audit(fixture: Fixture) {
    let store = &fixture.store;
    let made = store.create_token(&new_token("ci"), &hash(1), "ann").await.expect("a token is made");
    creates(&fixture, "other", 2).await;
    assert!(store.create_token(&new_token("ci"), &hash(3), "eve").await.is_err());
    store.revoke_token(&id("ci"), Expect::Any, "bob").await.expect("a token is revoked");
    store.revoke_token(&id("ci"), Expect::Any, "eve").await.expect("to revoke it again is no error");
    let after = store.find_token(&hash(1)).await.expect("a token is read").expect("it is there");
    let query = AuditQuery { filed: Some(Filed::token(&id("ci"))), range: ALWAYS };
    let entries = store.audit(&query, &Paging::default()).await.expect("the audit is listed").items;
    let [first, second] = &entries[..] else { panic!("two changes were made: {entries:?}") };
    assert_eq!(first.filed.as_str(), "$TOKEN:ci");
    assert_eq!((first.actor.as_str(), first.version, first.at), ("ann", made.version, made.value.created_at));
    assert_eq!(first.change, Change::Token { before: None, after: made.value.clone() });
    assert_eq!((second.actor.as_str(), second.version), ("bob", after.version));
    assert_eq!(Some(second.at), after.value.revoked_at);
    assert_eq!(second.change, Change::Token { before: Some(made.value), after: after.value });
}

/// Tokens are listed by id, revoked ones too.
pub async fn tokens_come_in_pages(fixture: Fixture) {
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
    refuses_the_cursor("tokens", store.tokens(&nowhere())).await;
}

/// Of those who make a token of one id at once, one does.
pub async fn makers_of_one_token_that_race_win_once(fixture: Fixture) {
    let makers = (1..=8).map(|number| {
        let store = std::sync::Arc::clone(&fixture.store);
        tokio::spawn(async move { store.create_token(&new_token("ci"), &hash(number), ACTOR).await.is_ok() })
    });
    let mut won = 0;
    for maker in makers.collect::<Vec<_>>() {
        won += u32::from(maker.await.expect("nobody panics"));
    }
    assert_eq!(won, 1);
    let (kept, made) = fixture.store.token(&id("ci")).await.expect("a token is read").expect("it is there");
    assert_eq!(fixture.store.find_token(&kept).await.expect("a token is read"), Some(made));
}
