//! What is an error and what is away.

use std::time::Duration;

use tidegate_store::{Buckets as _, RedisOptions, StoreError};

use crate::kit::connect_redis::try_connect;
use crate::kit::engine::{REDIS_SERVER, address, free_port, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::redis::{REDIS, ask, connect, draw, granted, levels, patient, slow};
use crate::kit::words::until_answered;

#[tokio::test]
async fn a_wrong_password_is_denied_and_never_away() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&["--requirepass", "right"]).await;
    for login in ["", ":wrong@", "nobody:right@"] {
        let url = format!("redis://{login}127.0.0.1:{}", server.port);
        let error = patient(&url).open().await.expect_err("nobody is let in");
        assert!(matches!(error, StoreError::Denied { .. }), "{login}: {error}");
        assert!(!error.to_string().contains("wrong"), "the password is not told: {error}");
    }
    let store = patient(&format!("redis://:right@127.0.0.1:{}", server.port)).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    // Changed while in use: those who are in stay in, and so does the answer to those who come.
    let mut connection = connect(&format!("redis://:right@127.0.0.1:{}", server.port)).await;
    ask::<String>(&mut connection, &["ACL", "SETUSER", "default", "-evalsha", "-eval"]).await;
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
}

#[tokio::test]
async fn nobody_at_the_address_is_away() {
    let free = free_port();
    for url in [
        format!("redis://127.0.0.1:{free}"),
        format!("redis+cluster://127.0.0.1:{free}"),
        format!("redis+sentinel://127.0.0.1:{free}/main"),
    ] {
        let error = RedisOptions::new(&url).open().await.expect_err("nobody is there");
        assert!(error.is_transient(), "{url}: {error:?}");
    }
}

#[tokio::test]
async fn what_is_not_ours_is_told_and_left_as_it_is() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("foreign"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let key = format!("tidegate:{{{namespace}}}:b:acme#gpt");
    ask::<i64>(&mut connection, &["HSET", &key, "a", "b"]).await;
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    ask::<i64>(&mut connection, &["DEL", &key]).await;
    ask::<String>(&mut connection, &["SET", &key, "what somebody else wrote"]).await;
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert_eq!(ask::<String>(&mut connection, &["GET", &key]).await, "what somebody else wrote");
    for kind in ["l:", "e:"] {
        let found = crate::kit::redis::keys(&mut connection, &namespace, kind).await;
        assert!(found.is_empty(), "nothing was drawn: {found:?}");
    }
}

#[tokio::test]
async fn a_schema_of_a_newer_version_is_refused() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("newer"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    drop(store);
    let mut connection = connect(&url).await;
    ask::<i64>(&mut connection, &["HSET", &format!("tidegate:{{{namespace}}}:meta"), "schema", "99"]).await;
    let error = patient(&url).namespace(&namespace).open().await.expect_err("it is newer");
    let sentence = error.to_string();
    assert!(sentence.ends_with("has schema version 99, newer than 3: use a newer tidegate"), "{sentence}");
}

#[tokio::test]
async fn a_replica_is_away_and_no_place_to_draw() {
    skip_without!(REDIS_SERVER);
    let primary = Server::start(&[]).await;
    let replica = Server::start(&["--replicaof", "127.0.0.1", &primary.port.to_string()]).await;
    let error = RedisOptions::new(replica.url()).timeout(Duration::from_secs(5)).open().await;
    assert!(error.expect_err("it only reads").is_transient());
}

/// A store has one connection, which all calls share, and one to listen: what runs out is the server's.
#[tokio::test]
async fn a_server_with_as_many_clients_as_it_may_have_is_away_until_some_leave() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&["--maxclients", "4"]).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let store = patient(&server.url()).open().await.unwrap();
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let mut others = Vec::new();
    while let Ok(other) = try_connect(&server.url()).await {
        others.push(other);
    }
    assert!(!others.is_empty());
    // Those who are in stay in, and nobody else comes in.
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let error = patient(&server.url()).open().await.expect_err("there is no room");
    assert!(error.is_transient(), "{error:?}");
    drop(others);
    let opened = until_answered(|| patient(&server.url()).open()).await;
    granted(opened.expect("there is room again").draw(&draw(&levels, &[("rpm", 1)])).await);
}
