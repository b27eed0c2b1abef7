//! Connections that are cut, servers that die, and answers that come late: with the checker watching.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::conformance::wander::{Wander, wander};
use tidegate_store::conformance::{Fixture, RealTime};
use tidegate_store::{
    Buckets as _, Ledger as _, Lookup, Paging, RedisOptions, Store, StoreError, UsageOf, UsageQuery,
};

use crate::kit::engine::{REDIS_SERVER, address, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{REDIS, draw, granted, levels, patient, settle, slow, subject};
use crate::kit::words::{eventually, until_answered};

fn port_of(url: &str) -> u16 {
    url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port")
}

/// What an entity's limit has consumed.
async fn consumed(store: &impl Store, entity: &str) -> i64 {
    let seen = store.balances(&Lookup::Subjects(vec![subject(entity)])).await.expect("balances are answered");
    seen.buckets.iter().flat_map(|bucket| &bucket.meters).map(Meter::consumed).sum()
}

#[tokio::test]
async fn a_draw_whose_answer_is_cut_off_is_charged_once_however_often_it_is_sent() {
    skip_without!(REDIS);
    let proxy = Proxy::to(local(port_of(&address(REDIS)))).await;
    let store = patient(&proxy.redis()).namespace(unique("cut")).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let (mut away, before) = (0, proxy.cuts());
    for number in 0..40_u64 {
        let asked = draw(&levels, &[("rpm", 1)]);
        // Somewhere in the answer: at its first byte, within it, and behind it.
        proxy.cut_after(number % 20 * 6);
        let mut answer = store.draw(&asked).await;
        while let Err(error) = &answer {
            assert!(error.is_transient(), "{error}");
            away += 1;
            answer = store.draw(&asked).await;
        }
        granted(answer);
        proxy.cut_after(u64::MAX);
    }
    assert!(away > 0 && proxy.cuts() > before, "answers were cut off");
    assert_eq!(consumed(&store, "acme").await, 41);
}

/// What was done and never heard of is in no log of a caller: that nothing was lost and nothing done twice shows in that each
/// bucket has consumed what its ledger says, when all leases have ended.
#[tokio::test]
async fn callers_whose_connections_are_cut_all_the_time_lose_and_invent_nothing() {
    skip_without!(REDIS);
    let proxy = Arc::new(Proxy::to(local(port_of(&address(REDIS)))).await);
    let namespace = unique("cuts");
    let away = Arc::new(patient(&proxy.redis()).namespace(&namespace).open().await.unwrap());
    let near = Arc::new(patient(&address(REDIS)).namespace(&namespace).open().await.unwrap());
    let fixture = Fixture::new(away, Arc::new(RealTime(near.clone())));
    let cutting = tokio::spawn({
        let proxy = Arc::clone(&proxy);
        async move {
            for number in 0.. {
                let before = proxy.cuts();
                proxy.cut_after(1_000 + number % 7 * 331);
                while proxy.cuts() == before {
                    tokio::time::sleep(Duration::from_millis(25)).await;
                }
            }
        }
    });
    wander(&fixture, Wander { callers: 6, leases: 25, seed: 0xC07 }).await;
    cutting.abort();
    assert!(proxy.cuts() > 0);
    let query = UsageQuery {
        of: UsageOf::Resource(subject("any").resource),
        window: Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let mut used: BTreeMap<_, i64> = BTreeMap::new();
    for line in near.usage(&query, &Paging::default()).await.unwrap().items {
        *used.entry((line.subject, line.limit)).or_default() += i64::try_from(line.tally.units).unwrap();
    }
    assert!(!used.is_empty());
    let subjects = used.keys().map(|(subject, _)| subject.clone()).collect();
    for bucket in near.balances(&Lookup::Subjects(subjects)).await.unwrap().buckets {
        for meter in bucket.meters {
            let key = (bucket.subject.clone(), meter.rule().name().clone());
            assert_eq!(meter.consumed(), used.get(&key).copied().unwrap_or_default(), "{key:?}");
        }
    }
}

#[tokio::test]
async fn a_server_that_is_killed_and_started_again_goes_on_where_it_was() {
    skip_without!(REDIS_SERVER);
    let mut server = Server::start(&[]).await;
    let store = patient(&server.url()).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let lease = draw(&levels, &[("rpm", 4)]);
    granted(store.draw(&lease).await);
    server.kill();
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    server.restart().await;
    // It has lost its scripts and kept everything else.
    let settle = settle(&lease, &[("rpm", 3)]);
    until_answered(|| store.settle(&settle)).await.unwrap();
    assert_eq!(consumed(&store, "acme").await, 3);
}

#[tokio::test]
async fn late_answer_is_awaited_until_the_timeout() {
    skip_without!(REDIS);
    let proxy = Proxy::to(local(port_of(&address(REDIS)))).await;
    let namespace = unique("late");
    let store = patient(&proxy.redis()).namespace(&namespace).open().await.unwrap();
    let hasty = RedisOptions::new(proxy.redis()).namespace(&namespace).timeout(Duration::from_millis(300));
    let hasty = until_answered(|| hasty.clone().open()).await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let first = draw(&levels, &[("rpm", 1)]);
    granted(until_answered(|| hasty.draw(&first)).await);
    // The server does what it is asked, and its answers come after one store has given up and before the other does.
    proxy.hold_replies(true);
    let waits = tokio::spawn({
        let (store, asked) = (store.clone(), draw(&levels, &[("rpm", 1)]));
        async move { store.draw(&asked).await }
    });
    let asked = draw(&levels, &[("rpm", 1)]);
    match hasty.draw(&asked).await {
        Err(StoreError::TimedOut { millis }) => assert_eq!(millis, 300),
        other => panic!("a call without an answer returns {other:?}"),
    }
    let near = patient(&address(REDIS)).namespace(&namespace).open().await.unwrap();
    eventually("the server has done both", async || consumed(&near, "acme").await == 4).await;
    proxy.hold_replies(false);
    granted(waits.await.unwrap());
    // It was done, and once.
    granted(until_answered(|| hasty.draw(&asked)).await);
    assert_eq!(consumed(&store, "acme").await, 4);
}

#[tokio::test]
async fn a_server_that_comes_back_is_not_met_by_everybody_at_once() {
    skip_without!(REDIS_SERVER);
    let mut server = Server::start(&[]).await;
    let store = Arc::new(patient(&server.url()).open().await.unwrap());
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    server.kill();
    let callers: Vec<_> = (0..64)
        .map(|_| {
            let (store, levels) = (Arc::clone(&store), levels.clone());
            tokio::spawn(async move {
                let asked = draw(&levels, &[("rpm", 1)]);
                while store.draw(&asked).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            })
        })
        .collect();
    server.restart().await;
    for caller in callers {
        caller.await.unwrap();
    }
    assert_eq!(consumed(&*store, "acme").await, 65);
    let mut connection = crate::kit::redis::connect(&server.url()).await;
    let stats: String = crate::kit::redis::ask(&mut connection, &["INFO", "stats"]).await;
    let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    let connections: u64 = line.and_then(|line| line.trim().parse().ok()).unwrap();
    // The test's own two, one to listen, and few tries.
    assert!(connections <= 16, "{connections} connections for 64 callers");
}
