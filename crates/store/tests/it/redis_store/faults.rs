//! Cut connections, killed servers and late replies, verified by the checker.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::conformance::random_calls::{RandomCalls, run_random_calls};
use tidegate_store::conformance::{Fixture, RealTime};
use tidegate_store::{
    Buckets as _, Ledger as _, Lookup, Paging, RedisOptions, Store, StoreError, UsageOf, UsageQuery,
};

use crate::kit::common::{eventually, until_answered};
use crate::kit::engine::{REDIS_SERVER, address, skip_without, unique};
use crate::kit::private_redis::Server;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{REDIS, draw, granted, levels, options_at, settle, slow, subject};

fn port_of(url: &str) -> u16 {
    url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port")
}

/// The consumed units of an entity.
async fn consumed(store: &impl Store, entity: &str) -> i64 {
    let seen = store.balances(&Lookup::Subjects(vec![subject(entity)])).await.expect("balances are returned");
    seen.buckets.iter().flat_map(|bucket| &bucket.meters).map(Meter::consumed).sum()
}

#[tokio::test]
async fn retried_draw_with_a_cut_reply_is_charged_once() {
    skip_without!(REDIS);
    let proxy = Proxy::to(local(port_of(&address(REDIS)))).await;
    let store = options_at(&proxy.redis()).namespace(unique("cut")).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let (mut errors, before) = (0, proxy.cuts());
    for number in 0..40_u64 {
        let step = draw(&levels, &[("rpm", 1)]);
        // At different places of the reply: before its first byte, within it, and after it.
        proxy.cut_after(number % 20 * 6);
        let mut answer = store.draw(&step).await;
        while let Err(error) = &answer {
            assert!(error.is_transient(), "{error}");
            errors += 1;
            answer = store.draw(&step).await;
        }
        granted(answer);
        proxy.cut_after(u64::MAX);
    }
    assert!(errors > 0 && proxy.cuts() > before, "replies were cut");
    assert_eq!(consumed(&store, "acme").await, 41);
}

/// A step whose reply was lost is in no caller's log. So the test checks that each bucket has consumed
/// exactly what its ledger says when all leases have ended.
#[tokio::test]
async fn callers_over_cut_connections_conserve_units() {
    skip_without!(REDIS);
    let proxy = Arc::new(Proxy::to(local(port_of(&address(REDIS)))).await);
    let namespace = unique("cuts");
    let proxied = Arc::new(options_at(&proxy.redis()).namespace(&namespace).open().await.unwrap());
    let direct = Arc::new(options_at(&address(REDIS)).namespace(&namespace).open().await.unwrap());
    let fixture = Fixture::new(proxied, Arc::new(RealTime(direct.clone())));
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
    run_random_calls(&fixture, RandomCalls { callers: 6, leases: 25, seed: 0xC07 }).await;
    cutting.abort();
    assert!(proxy.cuts() > 0);
    let query = UsageQuery {
        of: UsageOf::Resource(subject("any").resource),
        window: Window::Month,
        range: Stamp::ZERO..Stamp::MAX,
    };
    let mut used: BTreeMap<_, i64> = BTreeMap::new();
    for line in direct.usage(&query, &Paging::default()).await.unwrap().items {
        *used.entry((line.subject, line.limit)).or_default() += i64::try_from(line.tally.units).unwrap();
    }
    assert!(!used.is_empty());
    let subjects = used.keys().map(|(subject, _)| subject.clone()).collect();
    for bucket in direct.balances(&Lookup::Subjects(subjects)).await.unwrap().buckets {
        for meter in bucket.meters {
            let key = (bucket.subject.clone(), meter.rule().name().clone());
            assert_eq!(meter.consumed(), used.get(&key).copied().unwrap_or_default(), "{key:?}");
        }
    }
}

#[tokio::test]
async fn restarted_server_continues_from_its_log() {
    skip_without!(REDIS_SERVER);
    let mut server = Server::start(&[]).await;
    let store = options_at(&server.url()).open().await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let lease = draw(&levels, &[("rpm", 4)]);
    granted(store.draw(&lease).await);
    server.kill();
    let error = store.draw(&draw(&levels, &[("rpm", 1)])).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    server.restart().await;
    // The server lost its scripts and kept all data.
    let settle = settle(&lease, &[("rpm", 3)]);
    until_answered(|| store.settle(&settle)).await.unwrap();
    assert_eq!(consumed(&store, "acme").await, 3);
}

#[tokio::test]
async fn late_answer_is_awaited_until_the_timeout() {
    skip_without!(REDIS);
    let proxy = Proxy::to(local(port_of(&address(REDIS)))).await;
    let namespace = unique("late");
    let store = options_at(&proxy.redis()).namespace(&namespace).open().await.unwrap();
    let impatient =
        RedisOptions::new(proxy.redis()).namespace(&namespace).timeout(Duration::from_millis(300));
    let impatient = until_answered(|| impatient.clone().open()).await.unwrap();
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    let first = draw(&levels, &[("rpm", 1)]);
    granted(until_answered(|| impatient.draw(&first)).await);
    // The server applies the draws, and the replies arrive after one store has timed out and before the other
    // does.
    proxy.hold_replies(true);
    let waiting = tokio::spawn({
        let (store, step) = (store.clone(), draw(&levels, &[("rpm", 1)]));
        async move { store.draw(&step).await }
    });
    let step = draw(&levels, &[("rpm", 1)]);
    match impatient.draw(&step).await {
        Err(StoreError::TimedOut { millis }) => assert_eq!(millis, 300),
        other => panic!("a call without a reply returned {other:?}"),
    }
    let direct = options_at(&address(REDIS)).namespace(&namespace).open().await.unwrap();
    eventually("the server has applied both", async || consumed(&direct, "acme").await == 4).await;
    proxy.hold_replies(false);
    granted(waiting.await.unwrap());
    // The draw was applied once.
    granted(until_answered(|| impatient.draw(&step)).await);
    assert_eq!(consumed(&store, "acme").await, 4);
}

#[tokio::test]
async fn returning_server_gets_few_connections() {
    skip_without!(REDIS_SERVER);
    let mut server = Server::start(&[]).await;
    let store = Arc::new(options_at(&server.url()).open().await.unwrap());
    let levels = levels(1, &[("acme", &[slow("rpm", 1_000)])]);
    granted(store.draw(&draw(&levels, &[("rpm", 1)])).await);
    server.kill();
    let callers: Vec<_> = (0..64)
        .map(|_| {
            let (store, levels) = (Arc::clone(&store), levels.clone());
            tokio::spawn(async move {
                let step = draw(&levels, &[("rpm", 1)]);
                while store.draw(&step).await.is_err() {
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
    // The test's own two connections, a listener, and a few attempts.
    assert!(connections <= 16, "{connections} connections for 64 callers");
}
