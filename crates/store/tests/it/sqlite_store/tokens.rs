//! Tokens in a file: they survive a restart and an upgrade, and secrets are never stored in the clear.

use std::fs;

use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::policy::Expect;
use tidegate_core::limit::token::{NewToken, TokenHash, TokenId, TokenScope, TokenScopes, TokenState};
use tidegate_store::{ManualWall, Policies, StoreError, Tokens};

use crate::kit::common::{START, balance, draw_of, granted, own};
use crate::kit::sqlite::TempFile;

fn token(id: &str) -> NewToken {
    NewToken {
        id: TokenId::new(id).expect("a valid id"),
        name: "the build".to_owned(),
        namespace: Namespace::new("prod").expect("a valid name"),
        scopes: TokenScopes::new([TokenScope::Acquire]),
        entity: None,
        expires_at: None,
    }
}

fn hash(number: u8) -> TokenHash {
    TokenHash::new([number; 32])
}

#[tokio::test]
async fn tokens_survive_a_restart() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let good = store.create_token(&token("good"), &hash(1), "ops").await.unwrap();
    store.create_token(&token("bad"), &hash(2), "ops").await.unwrap();
    store.revoke_token(&token("bad").id, Expect::Any, "ops").await.unwrap();
    store.close().await;
    let store = place.open(&clock).await;
    assert_eq!(store.find_token(&hash(1)).await.unwrap(), Some(good));
    let bad = store.find_token(&hash(2)).await.unwrap().unwrap();
    assert_eq!((bad.value.state(START), bad.value.revoked_at), (TokenState::Revoked, Some(START)));
    // Each namespace has its own tokens.
    let other = store.namespace("other").await.unwrap();
    assert_eq!(other.find_token(&hash(1)).await.unwrap(), None);
    other.create_token(&token("good"), &hash(1), "ops").await.unwrap();
}

#[tokio::test]
async fn upgraded_file_accepts_tokens() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(tidegate_store::Buckets::spend(&store, &draw_of(&own("acme", 10), 3)).await);
    store.close().await;
    place.downgrade(2);
    let store = place.open(&clock).await;
    assert_eq!(balance(&store, "acme").await, Some((7, 3)));
    store.create_token(&token("ci"), &hash(1), "ops").await.unwrap();
    assert!(store.find_token(&hash(1)).await.unwrap().is_some());
    store.close().await;
    let version: i64 = place.outside().pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, 5);
}

#[tokio::test]
async fn corrupt_token_is_named_and_others_continue() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    store.create_token(&token("ci"), &hash(1), "ops").await.unwrap();
    store.create_token(&token("short"), &hash(2), "ops").await.unwrap();
    store.create_token(&token("well"), &hash(3), "ops").await.unwrap();
    let outside = place.outside();
    outside.execute("UPDATE records SET body = '{\"id\":7}' WHERE kind = 5 AND first = 'ci'", []).unwrap();
    outside.execute("UPDATE records SET link = '0102' WHERE kind = 5 AND first = 'short'", []).unwrap();
    let version = store.version().await.unwrap();
    for error in [
        store.find_token(&hash(1)).await.unwrap_err(),
        store.revoke_token(&token("ci").id, Expect::Any, "ops").await.unwrap_err(),
        store.token(&token("short").id).await.unwrap_err(),
    ] {
        assert!(matches!(&error, StoreError::Corrupt { what } if what.contains("token")), "{error}");
    }
    assert_eq!(store.version().await.unwrap(), version);
    assert!(store.find_token(&hash(3)).await.unwrap().is_some());
}

#[tokio::test]
async fn secret_hash_is_only_in_its_column() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let hash = TokenHash::new(std::array::from_fn(|byte| b'A' + u8::try_from(byte % 26).unwrap()));
    store.create_token(&token("ci"), &hash, "ops").await.unwrap();
    store.revoke_token(&token("ci").id, Expect::Any, "ops").await.unwrap();
    store.close().await;
    // The column and its index.
    let hash = hash.as_bytes().map(|byte| format!("{byte:02x}")).concat();
    // VACUUM removes copies that a row leaves behind when it moves within its page.
    place.outside().execute_batch("VACUUM").unwrap();
    let bytes = fs::read(&place.path).unwrap();
    let found = bytes.windows(hash.len()).filter(|window| *window == hash.as_bytes()).count();
    assert!((1..=2).contains(&found), "{found} times");
    let texts = "SELECT group_concat(body) FROM records";
    let texts: String = place.outside().query_row(texts, [], |row| row.get(0)).unwrap();
    assert!(!texts.contains(&hash) && texts.contains("revoked_at"), "{texts}");
}
