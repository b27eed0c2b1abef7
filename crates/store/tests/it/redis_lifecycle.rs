//! The lifecycle of a namespace on Redis: created, checked without side effects, refused while its schema is
//! older, upgraded with its data.

use std::time::Duration;

use redis::{Cmd, FromRedisValue};
use tidegate_store::lifecycle::{self, Lifecycle, Readiness};
use tidegate_store::{Redis, StoreError};

use crate::kit::common::error_text;
use crate::kit::contents::{assert_intact, fill};
use crate::kit::engine::{REDIS, REDIS_SERVER, address, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::redis::{connect, options_at};

fn life(url: &str, options: &str) -> Box<dyn Lifecycle> {
    lifecycle::at(&format!("{url}?timeout_ms=60000{options}")).expect("an address")
}

async fn ask<T: FromRedisValue>(url: &str, call: &[&str]) -> T {
    let mut command = Cmd::new();
    for part in call {
        command.arg(*part);
    }
    command.query_async(&mut connect(url).await).await.unwrap_or_else(|error| panic!("{call:?}: {error}"))
}

async fn open(url: &str, namespace: &str) -> Result<Redis, StoreError> {
    options_at(url).namespace(namespace).open().await
}

/// A namespace with data of every kind.
async fn filled(url: &str, namespace: &str) {
    fill(&open(url, namespace).await.expect("the server responds")).await;
}

/// The namespace as an earlier version left it.
async fn as_version_1(url: &str, namespace: &str) {
    ask::<i64>(url, &["HSET", &format!("tidegate:{{{namespace}}}:meta"), "schema", "1"]).await;
}

async fn assert_contents_intact(url: &str, namespace: &str) {
    assert_intact(&open(url, namespace).await.expect("the namespace opens")).await;
}

/// Every key with its value.
async fn keys(url: &str) -> Vec<(String, Vec<u8>)> {
    let mut keys: Vec<String> = ask(url, &["KEYS", "*"]).await;
    keys.sort();
    let mut all = Vec::new();
    for key in keys {
        let held: Vec<u8> = ask(url, &["DUMP", &key]).await;
        all.push((key, held));
    }
    all
}

#[tokio::test]
async fn namespace_is_created_once() {
    skip_without!(REDIS_SERVER);
    // A server of its own: the shared one may have more namespaces than are listed.
    let server = Server::start(&[]).await;
    let (url, name) = (server.url(), "a b");
    for is_new in [true, false] {
        let made = life(&url, &format!("&namespace={name}")).init().await.unwrap();
        let parts: Vec<_> = made.parts.iter().map(|made| (made.part.to_string(), made.is_new)).collect();
        assert_eq!((parts, made.schema), (vec![(format!("the namespace `{name}`"), is_new)], 4));
    }
    let listed = life(&url, "").list().await.unwrap();
    assert_eq!(
        listed.spaces.iter().map(|space| space.namespace.as_deref()).collect::<Vec<_>>(),
        [Some(name)]
    );
}

/// A namespace that another process created between two calls was taken for a foreign one.
#[tokio::test(flavor = "multi_thread")]
async fn namespace_opened_by_many_at_once_is_ours() {
    skip_without!(REDIS);
    for _ in 0..25 {
        let name = unique("new");
        let opening: Vec<_> = (0..8)
            .map(|_| {
                let name = name.clone();
                tokio::spawn(async move { open(&address(REDIS), &name).await.map(drop) })
            })
            .collect();
        for opened in opening {
            opened.await.unwrap().unwrap();
        }
    }
}

#[tokio::test]
async fn check_and_list_change_no_key() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let url = server.url();
    let checked = life(&url, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.missing.len()), (Readiness::Missing, 1));
    assert!(life(&url, "").list().await.unwrap().spaces.is_empty());
    let refused = error_text(life(&url, "").upgrade().await);
    assert!(refused.ends_with("does not exist: run `tidegate store init`"), "{refused}");
    assert_eq!(ask::<i64>(&url, &["DBSIZE"]).await, 0);

    filled(&url, "default").await;
    let before = keys(&url).await;
    let checked = life(&url, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema), (Readiness::Ready, Some(4)));
    assert_eq!(checked.durability, "acknowledged writes are on the server's disk");
    assert_eq!(checked.dangers().count(), 0);
    let clock = checked.clock.expect("the server has a clock");
    let apart = Duration::from_micros(clock.ahead_micros.unsigned_abs());
    assert!(apart <= clock.within + Duration::from_secs(1), "the same machine: {clock:?}");
    let listed = life(&url, "").list().await.unwrap();
    let space = &listed.spaces[0];
    assert_eq!(
        (space.namespace.as_deref(), space.schema, space.changes, space.entities, space.policies),
        (Some("default"), Some(4), Some(2), Some(1), Some(1))
    );
    assert!(keys(&url).await == before, "no key has changed");
}

#[tokio::test]
async fn upgraded_namespace_keeps_its_data() {
    skip_without!(REDIS);
    let (url, name) = (address(REDIS), unique("older"));
    let named = format!("&namespace={name}");
    filled(&url, &name).await;
    as_version_1(&url, &name).await;
    let wanted = "has schema version 1, older than 4: run `tidegate store upgrade`";
    for refused in [error_text(open(&url, &name).await), error_text(life(&url, &named).init().await)] {
        assert!(refused.ends_with(wanted), "{refused}");
    }
    let checked = life(&url, &named).check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema, checked.schema_wanted), (Readiness::Older, Some(1), 4));

    let upgraded = life(&url, &named).upgrade().await.unwrap();
    assert_eq!((upgraded.parts[0].from, upgraded.schema), (1, 4));
    assert_eq!(life(&url, &named).upgrade().await.unwrap().parts[0].from, 4);
    assert_contents_intact(&url, &name).await;
    assert_eq!(ask::<i64>(&url, &["SISMEMBER", "tidegate:namespaces", &name]).await, 1);
}

#[tokio::test]
async fn concurrent_upgrades_all_succeed() {
    skip_without!(REDIS);
    let (url, name) = (address(REDIS), unique("together"));
    filled(&url, &name).await;
    as_version_1(&url, &name).await;
    let upgrades: Vec<_> = (0..8)
        .map(|_| {
            let life = life(&url, &format!("&namespace={name}"));
            tokio::spawn(async move { life.upgrade().await })
        })
        .collect();
    for upgrade in upgrades {
        let done = upgrade.await.unwrap().unwrap();
        assert!(matches!(done.parts[0].from, 1 | 4) && done.schema == 4, "{done:?}");
    }
    assert_contents_intact(&url, &name).await;
}

#[tokio::test]
async fn upgrade_without_a_name_finds_older_namespaces() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let url = server.url();
    for name in ["default", "a{b}", "prod"] {
        filled(&url, name).await;
    }
    as_version_1(&url, "default").await;
    as_version_1(&url, "a%7Bb%7D").await;
    let upgraded = life(&url, "").upgrade().await.unwrap();
    let parts: Vec<_> = upgraded.parts.iter().map(|part| (part.part.name.as_str(), part.from)).collect();
    assert_eq!(parts, [("a{b}", 1), ("default", 1), ("prod", 4)]);
    for name in ["default", "a{b}", "prod"] {
        assert_contents_intact(&url, name).await;
    }
    assert_eq!(life(&url, "").list().await.unwrap().spaces.len(), 3);
}

#[tokio::test]
async fn newer_namespace_is_refused_and_listed() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    let url = server.url();
    filled(&url, "default").await;
    ask::<i64>(&url, &["HSET", "tidegate:{default}:meta", "schema", "99"]).await;
    filled(&url, "older").await;
    as_version_1(&url, "older").await;
    let before = keys(&url).await;
    let life = life(&url, "");
    for refused in
        [error_text(life.init().await), error_text(life.check().await), error_text(life.upgrade().await)]
    {
        assert!(refused.ends_with("has schema version 99, newer than 4: use a newer tidegate"), "{refused}");
    }
    let space = &life.list().await.unwrap().spaces[0];
    assert_eq!((space.schema, space.entities), (Some(99), None));
    assert!(keys(&url).await == before, "no key has changed, not even of the older namespace");
}

#[tokio::test]
async fn check_reports_dangerous_settings() {
    skip_without!(REDIS_SERVER);
    let evicts = ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no"];
    let server = Server::start(&evicts).await;
    let checked = life(&server.url(), "").check().await.unwrap();
    let dangers: Vec<_> = checked
        .settings
        .iter()
        .filter(|setting| setting.danger.is_some())
        .map(|setting| setting.name)
        .collect();
    assert_eq!(dangers, ["maxmemory-policy", "appendonly"]);
    assert_eq!(
        checked.durability,
        "nothing survives a restart of the server: it has neither an append-only file nor snapshots"
    );

    let replica = Server::start(&["--replicaof", "127.0.0.1", &server.port.to_string()]).await;
    let checked = life(&replica.url(), "").check().await.unwrap();
    let role =
        checked.settings.iter().find(|setting| setting.name == "role").expect("a setting of the replica");
    assert!(role.danger.is_some());
}

#[tokio::test]
async fn foreign_hash_at_our_key_is_not_changed() {
    skip_without!(REDIS);
    let (url, name) = (address(REDIS), unique("theirs"));
    let key = format!("tidegate:{{{name}}}:meta");
    ask::<i64>(&url, &["HSET", &key, "title", "not ours"]).await;
    let life = life(&url, &format!("&namespace={name}"));
    for (verb, answer) in [
        ("open", open(&url, &name).await.map(drop)),
        ("init", life.init().await.map(drop)),
        ("check", life.check().await.map(drop)),
        ("upgrade", life.upgrade().await.map(drop)),
    ] {
        let error = answer.map(|()| verb).unwrap_err();
        assert!(error.to_string().contains("belongs to another program"), "{verb}: {error}");
        assert_eq!(ask::<Vec<String>>(&url, &["HGETALL", &key]).await, ["title", "not ours"], "{verb}");
        assert_eq!(ask::<i64>(&url, &["SISMEMBER", "tidegate:namespaces", &name]).await, 0, "{verb}");
    }
}
