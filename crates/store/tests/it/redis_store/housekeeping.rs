//! Housekeeping by any caller: deletes old usage and audit entries, and repairs the index.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope};
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{
    AuditQuery, Buckets as _, Draw, DrawResult, Ledger as _, Lookup, Paging, Policies as _, PolicyChange,
    Redis, Retention, Store as _, StoreError, Terms, UsageOf, UsageQuery,
};

use crate::kit::common::eventually;
use crate::kit::engine::{REDIS_SERVER, address, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::redis::{REDIS, ask, connect, draw, granted, keys, levels, options_at, slow, subject};

const HOUR: Duration = Duration::from_secs(3_600);
const ALWAYS: std::ops::Range<Stamp> = Stamp::ZERO..Stamp::MAX;

async fn spend(store: &Redis, entity: &str, requests: u64) {
    let levels = levels(1, &[(entity, &[slow("rpm", 100)])]);
    granted(store.spend(&draw(&levels, &[("rpm", requests)])).await);
}

/// The units of each line of a window.
async fn lines(store: &Redis, window: Window) -> Vec<u64> {
    let query = UsageQuery { of: UsageOf::Resource(subject("any").resource), window, range: ALWAYS };
    let (mut paging, mut units) = (Paging::default(), Vec::new());
    loop {
        let page = store.usage(&query, &paging).await.expect("usage is returned");
        units.extend(page.items.iter().map(|line| line.tally.units));
        let Some(next) = page.next else { return units };
        paging = Paging::default().after(next);
    }
}

async fn audited(store: &Redis) -> usize {
    let query = AuditQuery { filed: None, range: ALWAYS };
    store.audit(&query, &Paging::default()).await.expect("the audit is returned").items.len()
}

/// A test cannot set the server's clock, but it can change the stored reading, from which time continues.
async fn advance(store: &Redis, connection: &mut MultiplexedConnection, namespace: &str, span: Duration) {
    let now = store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are returned").at;
    let seconds = u32::try_from((now + span).as_micros() / 1_000_000).expect("a second of this century");
    let kept: Vec<u8> =
        [f64::from(seconds), 0.0, 0.0, 0.0].iter().flat_map(|part| part.to_le_bytes()).collect();
    let key = format!("tidegate:{{{namespace}}}:clock");
    redis::cmd("SET").arg(&key).arg(kept).exec_async(connection).await.expect("the clock is set");
}

/// Usage is booked at the server's clock: moves all usage into the past.
async fn age(connection: &mut MultiplexedConnection, namespace: &str, span: Duration) {
    for key in keys(connection, namespace, "u:").await {
        let fields: Vec<(String, Vec<u8>)> =
            redis::cmd("HGETALL").arg(&key).query_async(connection).await.expect("usage of this namespace");
        for (field, value) in fields.iter().filter(|(field, _)| !field.starts_with('m')) {
            let (letter, start) = field.split_at(usize::from(field.starts_with(['d', 'n'])));
            let start = start.parse::<u64>().expect("usage of this namespace") - span.as_secs();
            redis::cmd("HDEL")
                .arg(&key)
                .arg(field)
                .exec_async(connection)
                .await
                .expect("usage of this namespace");
            let aged = format!("{letter}{start}");
            redis::cmd("HSET")
                .arg(&key)
                .arg(aged)
                .arg(value)
                .exec_async(connection)
                .await
                .expect("usage of this namespace");
        }
    }
}

#[tokio::test]
async fn each_window_has_its_own_retention() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("ages"), address(REDIS));
    let kept = Retention {
        minutes: Some(HOUR),
        hours: Some(2 * HOUR),
        days: Some(36 * HOUR),
        months: None,
        audit: Some(3 * HOUR),
    };
    let store = options_at(&url).namespace(&namespace).retention(kept).open().await.unwrap();
    let mut connection = connect(&url).await;
    spend(&store, "acme", 4).await;
    let policy = Some(Policy::new([slow("rpm", 1)]).unwrap());
    let change = PolicyChange { scope: Scope::System, expect: Expect::Any, policy };
    store.apply(&[change], "ops").await.unwrap();
    store.sweep(100).await.unwrap();
    assert_eq!(
        (lines(&store, Window::Hour).await, audited(&store).await),
        (vec![4], 1),
        "no line is old yet"
    );
    advance(&store, &mut connection, &namespace, 4 * HOUR).await;
    age(&mut connection, &namespace, 4 * HOUR).await;
    store.sweep(100).await.unwrap();
    assert_eq!((lines(&store, Window::Hour).await, audited(&store).await), (vec![], 0));
    assert_eq!((lines(&store, Window::Day).await, lines(&store, Window::Month).await), (vec![4], vec![4]));
    age(&mut connection, &namespace, 72 * HOUR).await;
    store.sweep(100).await.unwrap();
    assert!(lines(&store, Window::Day).await.is_empty());
    assert_eq!(lines(&store, Window::Month).await, [4]);
    // New usage is counted as before.
    spend(&store, "acme", 5).await;
    store.sweep(100).await.unwrap();
    assert_eq!(lines(&store, Window::Hour).await, [5]);
}

#[tokio::test]
async fn old_lines_are_deleted_in_small_batches() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("old"), address(REDIS));
    let kept = Retention { hours: Some(HOUR), ..Retention::default() };
    let options = options_at(&url).namespace(&namespace).retention(kept);
    let store = options.clone().open().await.unwrap();
    for number in 0..130 {
        spend(&store, &format!("user-{number}"), 1).await;
    }
    age(&mut connect(&url).await, &namespace, 3 * HOUR).await;
    let mut before = lines(&store, Window::Hour).await.len();
    assert_eq!(before, 130);
    while before > 0 {
        // Another process each time: the progress is stored.
        options.clone().open().await.unwrap().sweep(1).await.unwrap();
        let left = lines(&store, Window::Hour).await.len();
        assert!(left < before && before - left <= 50, "{before} lines became {left}");
        before = left;
    }
    assert_eq!(lines(&store, Window::Month).await.len(), 130);
}

/// A sweep used to delete 500 lines, whatever was added: more than 100 new lines per second grew without bound.
#[tokio::test]
async fn sweep_deletes_all_lines_that_are_old() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("lines"), address(REDIS));
    let kept = Retention { minutes: Some(HOUR), ..Retention::default() };
    let options = options_at(&url).namespace(&namespace).swept_every(Duration::from_secs(86_400));
    let store = options.retention(kept).open().await.unwrap();
    spend(&store, "acme", 1).await;
    let mut connection = connect(&url).await;
    let [usage] = &keys(&mut connection, &namespace, "u:").await[..] else { panic!("one subject") };
    let fields: Vec<(String, Vec<u8>)> =
        redis::cmd("HGETALL").arg(usage).query_async(&mut connection).await.unwrap();
    let [(minute, line)] = &fields[..] else { panic!("one minute") };
    let start: u64 = minute.trim_start_matches('n').parse().unwrap();
    for ago in 120..2_120 {
        let field = format!("n{}", start - 60 * ago);
        redis::cmd("HSET").arg(usage).arg(field).arg(line).exec_async(&mut connection).await.unwrap();
    }
    assert_eq!(lines(&store, Window::Minute).await.len(), 2_001);
    store.sweep(1).await.unwrap();
    assert_eq!(lines(&store, Window::Minute).await, [1]);
    assert_eq!(lines(&store, Window::Hour).await.iter().sum::<u64>(), 2_001, "other windows keep them");
}

/// A sweep used to check 50 names, whatever was added: with more new subjects the index grew without bound.
#[tokio::test]
async fn sweep_checks_more_names_than_were_added() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("names"), address(REDIS));
    let never = Duration::from_secs(86_400);
    let store = options_at(&url).namespace(&namespace).swept_every(never).open().await.unwrap();
    for number in 0..300 {
        granted(
            store
                .draw(&draw(&levels(1, &[(&format!("ip-{number}"), &[slow("rpm", 5)])]), &[("rpm", 1)]))
                .await,
        );
    }
    let mut connection = connect(&url).await;
    let index = format!("tidegate:{{{namespace}}}:index");
    assert_eq!(ask::<u64>(&mut connection, &["ZCARD", &index]).await, 600);
    // As if the buckets had expired.
    for key in keys(&mut connection, &namespace, "b:").await {
        ask::<u64>(&mut connection, &["DEL", &key]).await;
    }
    store.sweep(1).await.unwrap();
    assert_eq!(ask::<u64>(&mut connection, &["ZCARD", &index]).await, 0);
}

/// The listed subjects.
async fn listed(store: &Redis) -> Vec<String> {
    let page = store.buckets(&subject("x").resource, &Paging::default()).await.expect("buckets are listed");
    page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect()
}

#[tokio::test]
async fn draws_restore_a_lost_index_entry() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    // Every draw does housekeeping, not one in five seconds.
    let store = options_at(&server.url()).swept_every(Duration::from_millis(1)).open().await.unwrap();
    let all = ["acme", "globex", "initech"];
    for entity in all {
        spend(&store, entity, 1).await;
    }
    let mut connection = connect(&server.url()).await;
    let lost = ["s\0globex\0gpt", "r\0gpt\0globex"];
    let count: u64 = ask(&mut connection, &["ZREM", "tidegate:{default}:index", lost[0], lost[1]]).await;
    assert_eq!(count, 2);
    assert_eq!(listed(&store).await, ["acme", "initech"]);
    // No call of `repair`, and no draw of `globex`.
    let mut number = 0;
    eventually("the listing succeeds again", async || {
        number += 1;
        spend(&store, &format!("other-{}", number % 3), 1).await;
        listed(&store).await.contains(&"globex".to_owned())
    })
    .await;
}

#[tokio::test]
async fn evicting_server_is_reported() {
    skip_without!(REDIS_SERVER);
    let bounded = |policy| ["--maxmemory", "100mb", "--maxmemory-policy", policy];
    let server = Server::start(&bounded("allkeys-lru")).await;
    let store = options_at(&server.url()).open().await.unwrap();
    let caution = store.caution().expect("the server may evict buckets");
    assert!(caution.contains("(maxmemory-policy allkeys-lru)"), "{caution}");
    let server = Server::start(&bounded("noeviction")).await;
    assert_eq!(options_at(&server.url()).open().await.unwrap().caution(), None);
}

#[tokio::test]
async fn foreign_bucket_does_not_block_other_expiries() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("corrupt"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let returned = |entity: &str| {
        let levels = levels(1, &[(entity, &[slow("rpm", 100)])]);
        let terms = Terms { deadline: Duration::from_secs(60), on_expiry: OnExpiry::Return };
        Draw { terms, ..draw(&levels, &[("rpm", 7)]) }
    };
    for entity in ["corrupt", "intact"] {
        granted(store.draw(&returned(entity)).await);
    }
    let bucket = format!("tidegate:{{{namespace}}}:b:corrupt#gpt");
    ask::<String>(&mut connection, &["SET", &bucket, "foreign"]).await;
    advance(&store, &mut connection, &namespace, HOUR).await;
    store.sweep(10).await.expect("the sweep succeeds");
    let seen =
        store.balances(&Lookup::Subjects(vec![subject("intact")])).await.expect("balances are returned");
    assert_eq!(seen.buckets[0].meters[0].consumed(), 0, "the held units are returned");
    let open: u64 = ask(&mut connection, &["ZCARD", &format!("tidegate:{{{namespace}}}:open")]).await;
    assert_eq!(open, 0);
}

#[tokio::test]
async fn unreadable_open_index_charges_no_draw() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("unlisted"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    ask::<String>(&mut connection, &["SET", &format!("tidegate:{{{namespace}}}:open"), "no list"]).await;
    for is_watched in [true, false] {
        let drawn = store.draw(&Draw { is_watched, ..draw(&levels, &[("rpm", 5)]) }).await;
        assert!(matches!(drawn, Err(StoreError::Corrupt { .. })), "{drawn:?}");
        granted(store.spend(&Draw { is_watched, ..draw(&levels, &[("rpm", 1)]) }).await);
    }
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.expect("balances are returned");
    assert_eq!(seen.buckets[0].meters[0].consumed(), 3);
}

#[tokio::test]
async fn nan_level_grants_nothing() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("nan"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 100)])]);
    granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    let key = format!("tidegate:{{{namespace}}}:b:acme#gpt");
    let mut kept: Vec<u8> = redis::cmd("GET").arg(&key).query_async(&mut connection).await.unwrap();
    // The time when it is full precedes the last four numbers, seconds first.
    let at = kept.len() - 32;
    kept[at..at + 8].copy_from_slice(&f64::NAN.to_le_bytes());
    redis::cmd("SET").arg(&key).arg(kept).exec_async(&mut connection).await.unwrap();
    for is_watched in [true, false] {
        let drawn = store.spend(&Draw { is_watched, ..draw(&levels, &[("rpm", 60)]) }).await;
        assert!(!matches!(drawn, Ok(DrawResult::Granted(_))), "{drawn:?}");
    }
}
