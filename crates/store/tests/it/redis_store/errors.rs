//! Errors: what is an error, and what counts as transient unavailability.

use std::time::Duration;

use tidegate_store::{Buckets as _, RedisOptions, StoreError};

use crate::kit::common::until_answered;
use crate::kit::connect_redis::try_connect;
use crate::kit::engine::{REDIS_SERVER, address, free_port, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::redis::{REDIS, ask, connect, draw, granted, levels, options_at, slow};

#[tokio::test]
async fn wrong_password_is_denied_not_unavailable() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&["--requirepass", "right"]).await;
    for login in ["", ":wrong@", "other:right@"] {
        let url = format!("redis://{login}127.0.0.1:{}", server.port);
        let error = options_at(&url).open().await.expect_err("the login is wrong");
        assert!(matches!(error, StoreError::Denied { .. }), "{login}: {error}");
        assert!(!error.to_string().contains("wrong"), "the password is not shown: {error}");
    }
    let store = options_at(&format!("redis://:right@127.0.0.1:{}", server.port)).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    // Permissions change while the store is in use: open connections stay open, and further calls are denied.
    let mut connection = connect(&format!("redis://:right@127.0.0.1:{}", server.port)).await;
    ask::<String>(&mut connection, &["ACL", "SETUSER", "default", "-evalsha", "-eval"]).await;
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
}

#[tokio::test]
async fn unreachable_address_is_unavailable() {
    let free = free_port();
    for url in [
        format!("redis://127.0.0.1:{free}"),
        format!("redis+cluster://127.0.0.1:{free}"),
        format!("redis+sentinel://127.0.0.1:{free}/main"),
    ] {
        let error = RedisOptions::new(&url).open().await.expect_err("the port is free");
        assert!(error.is_transient(), "{url}: {error:?}");
    }
}

#[tokio::test]
async fn foreign_value_is_reported_and_not_changed() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("foreign"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let key = format!("tidegate:{{{namespace}}}:b:acme#gpt");
    ask::<i64>(&mut connection, &["HSET", &key, "a", "b"]).await;
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    ask::<i64>(&mut connection, &["DEL", &key]).await;
    ask::<String>(&mut connection, &["SET", &key, "foreign"]).await;
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert_eq!(ask::<String>(&mut connection, &["GET", &key]).await, "foreign");
    for kind in ["l:", "e:"] {
        let found = crate::kit::redis::keys(&mut connection, &namespace, kind).await;
        assert!(found.is_empty(), "nothing was drawn: {found:?}");
    }
}

#[tokio::test]
async fn newer_schema_version_is_refused() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("newer"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    drop(store);
    let mut connection = connect(&url).await;
    ask::<i64>(&mut connection, &["HSET", &format!("tidegate:{{{namespace}}}:meta"), "schema", "99"]).await;
    let error = options_at(&url).namespace(&namespace).open().await.expect_err("the schema is newer");
    let sentence = error.to_string();
    assert!(sentence.ends_with("has schema version 99, newer than 4: use a newer tidegate"), "{sentence}");
}

#[tokio::test]
async fn read_only_replica_is_unavailable() {
    skip_without!(REDIS_SERVER);
    let primary = Server::start(&[]).await;
    let replica = Server::start(&["--replicaof", "127.0.0.1", &primary.port.to_string()]).await;
    let error = RedisOptions::new(replica.url()).timeout(Duration::from_secs(5)).open().await;
    assert!(error.expect_err("the replica is read-only").is_transient());
}

/// A store has one connection for all calls, and one to listen: only the server can run out of connections.
#[tokio::test]
async fn server_at_maxclients_is_unavailable() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&["--maxclients", "4"]).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let store = options_at(&server.url()).open().await.unwrap();
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let mut others = Vec::new();
    while let Ok(other) = try_connect(&server.url()).await {
        others.push(other);
    }
    assert!(!others.is_empty());
    // Open connections stay open, and new ones are refused.
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let error = options_at(&server.url()).open().await.expect_err("the server is full");
    assert!(error.is_transient(), "{error:?}");
    drop(others);
    let opened = until_answered(|| options_at(&server.url()).open()).await;
    granted(opened.expect("a connection is free").draw(&draw(&levels, &[("rpm", 1)])).await);
}
