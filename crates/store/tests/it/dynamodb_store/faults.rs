//! An engine that throttles, fails, loses responses and is slow: no lease is charged twice, and no unit is
//! invented.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_store::{Buckets as _, DrawResult, DynamoDb, LeaseStatus, ManualWall, Store, StoreError};

use super::ENGINE;
use crate::kit::common::{
    balance, cancel_of, draw_of, granted, levels, own, settle_of, slow, until_answered, used,
};
use crate::kit::dynamodb::{START, open_new, options};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::skip_without;

const FAULTS: [Fault; 6] = [
    Fault::Refused("ProvisionedThroughputExceededException"),
    Fault::Refused("ThrottlingException"),
    Fault::Refused("InternalServerError"),
    Fault::Broken,
    Fault::Lost,
    Fault::Late(20),
];

async fn store() -> (Proxy, DynamoDb) {
    let proxy = Proxy::new(ENGINE).await;
    let store = open_new(options(ENGINE).endpoint(proxy.url())).await;
    (proxy, store)
}

/// The engine reads the items of one request one after the other. An item moved during the read is missed at
/// its new place, never found at both.
#[tokio::test]
async fn lease_counted_during_a_step_is_found() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let draw = draw_of(&own("acme", 100), 10);
    granted(store.draw(&draw).await);
    let settled = store.settle(&settle_of(&draw, 3)).await.unwrap();
    // Reading the ledger counts the lease: it becomes a tombstone.
    assert_eq!(used(&store, "acme").await, 3);
    let mut reads = 0;
    proxy.plan(move |operation| {
        reads += u32::from(operation == "BatchGetItem");
        if operation == "BatchGetItem" && reads == 1 { Fault::Without("LEASE#") } else { Fault::None }
    });
    proxy.take_requests();
    let again = store.settle(&settle_of(&draw, 3)).await.unwrap();
    assert_eq!((settled.is_repeat, again.is_repeat), (false, true));
    assert_eq!(proxy.take_requests(), ["BatchGetItem", "BatchGetItem"]);
    let error = store.cancel(&cancel_of(&draw)).await.unwrap_err();
    assert!(matches!(error, StoreError::Ended { .. }), "{error}");
    assert_eq!(balance(&store, "acme").await, Some((97, 3)));
}

/// The same for a repeated draw after which nothing is left: it must find its lease.
#[tokio::test]
async fn repeated_draw_of_all_units_is_not_refused() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let (spent, drawn) = (draw_of(&own("spends", 10), 10), draw_of(&own("draws", 10), 10));
    granted(store.spend(&spent).await);
    granted(store.draw(&drawn).await);
    assert_eq!((used(&store, "spends").await, used(&store, "draws").await), (10, 0));
    let hide_lease_once = || {
        let mut reads = 0;
        proxy.plan(move |operation| {
            reads += u32::from(operation == "BatchGetItem");
            if operation == "BatchGetItem" && reads == 1 { Fault::Without("LEASE#") } else { Fault::None }
        });
    };
    hide_lease_once();
    assert!(granted(store.spend(&spent).await).is_repeat);
    hide_lease_once();
    assert!(granted(store.draw(&drawn).await).is_repeat);
}

/// A search by id looks at the old place first, then at the new one.
#[tokio::test]
async fn lease_counted_during_a_search_is_found() {
    skip_without!(ENGINE);
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let options = options(ENGINE).clock(clock);
    let first = open_new(options.clone()).await;
    let draw = draw_of(&own("acme", 100), 10);
    granted(first.draw(&draw).await);
    first.settle(&settle_of(&draw, 3)).await.unwrap();
    assert_eq!(used(&first, "acme").await, 3);
    let second = options.endpoint(proxy.url()).open().await.unwrap();
    let mut reads = 0;
    proxy.plan(move |operation| {
        reads += u32::from(operation == "GetItem");
        if operation == "GetItem" && reads == 1 { Fault::Without("LEASE#") } else { Fault::None }
    });
    assert!(matches!(second.lease(draw.lease).await.unwrap(), LeaseStatus::Ended(_)));
}

#[tokio::test]
async fn no_fault_charges_a_lease_twice() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let limits = [slow(100)];
    for (number, fault) in FAULTS.into_iter().enumerate() {
        let (one, child, parent) =
            (format!("one-{number}"), format!("child-{number}"), format!("parent-{number}"));
        let both = levels(&[(&child, &limits), (&parent, &limits)]);
        for levels in [own(&one, 100), both] {
            // Used before, so that the cached item is right; each request of the call fails once.
            granted(store.draw(&draw_of(&levels, 10)).await);
            for place in 0..3 {
                let draw = draw_of(&levels, 5);
                proxy.plan(nth(place, fault));
                granted(store.draw(&draw).await);
                proxy.plan(nth(place, fault));
                store.settle(&settle_of(&draw, 3)).await.unwrap();
                let cancelled = draw_of(&levels, 7);
                proxy.plan(nth(place, fault));
                granted(store.draw(&cancelled).await);
                proxy.plan(nth(place, fault));
                store.cancel(&cancel_of(&cancelled)).await.unwrap();
                let spent = draw_of(&levels, 1);
                proxy.plan(nth(place, fault));
                granted(store.spend(&spent).await);
                proxy.plan(|_| Fault::None);
            }
        }
        for entity in [&one, &child, &parent] {
            assert_eq!(balance(&store, entity).await, Some((78, 22)), "{fault:?} of {entity}");
            assert_eq!(used(&store, entity).await, 12, "{fault:?} of {entity}");
        }
    }
}

/// Fails the request with this number, counted from 0; all others succeed.
fn nth(place: usize, fault: Fault) -> impl FnMut(&str) -> Fault + Send + 'static {
    let mut number = 0;
    move |_| {
        number += 1;
        if number == place + 1 { fault } else { Fault::None }
    }
}

#[tokio::test]
async fn conflicts_are_retried_not_refused() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let draw = draw_of(&levels, 5);
    let mut conflicts = 4;
    proxy.plan(move |_| {
        conflicts -= 1;
        if conflicts >= 0 { Fault::Refused("TransactionConflictException") } else { Fault::None }
    });
    granted(store.draw(&draw).await);
    let mut conflicts = 4;
    proxy.plan(move |_| {
        conflicts -= 1;
        if conflicts >= 0 { Fault::Refused("TransactionInProgressException") } else { Fault::None }
    });
    store.settle(&settle_of(&draw, 5)).await.unwrap();
    assert_eq!(balance(&store, "parent").await, Some((95, 5)));
}

#[tokio::test]
async fn slow_engine_is_unavailable_within_the_timeout() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = options(ENGINE).endpoint(proxy.url());
    options.create().await.unwrap();
    let impatient = options.timeout(Duration::from_millis(500));
    let store = until_answered(|| impatient.clone().open()).await.unwrap();
    for fault in
        [Fault::Refused("ThrottlingException"), Fault::Refused("InternalServerError"), Fault::Late(600_000)]
    {
        proxy.plan(move |_| fault);
        let before = tokio::time::Instant::now();
        let answer = store.draw(&draw_of(&own("acme", 10), 1)).await;
        assert!(answer.as_ref().is_err_and(StoreError::is_transient), "{fault:?}: {answer:?}");
        assert!(before.elapsed() < Duration::from_secs(60), "{fault:?} took {:?}", before.elapsed());
    }
    proxy.plan(|_| Fault::None);
}

#[tokio::test(flavor = "multi_thread")]
async fn random_callers_stay_exact_under_faults() {
    skip_without!(ENGINE);
    let limits = [slow(40)];
    for entities in [&["acme"][..], &["acme", "parent"], &["acme", "parent", "top"]] {
        let (proxy, store) = store().await;
        let mut random = Random::seeded(7);
        proxy.plan(move |_| match random.below(12) {
            0 => Fault::Refused("ProvisionedThroughputExceededException"),
            1 => Fault::Refused("InternalServerError"),
            2 => Fault::Broken,
            3 => Fault::Lost,
            4 => Fault::Late(3),
            _ => Fault::None,
        });
        let store: Arc<dyn Store> = Arc::new(store);
        let rows: Vec<(&str, &[Limit])> = entities.iter().map(|entity| (*entity, &limits[..])).collect();
        let levels = levels(&rows);
        let callers = (0..8).map(|number: u64| {
            let (store, levels) = (Arc::clone(&store), Arc::clone(&levels));
            tokio::spawn(async move { act_at_random(&*store, &levels, number).await })
        });
        let mut used_requests = 0;
        for caller in callers.collect::<Vec<_>>() {
            used_requests += caller.await.expect("no caller panics");
        }
        proxy.plan(|_| Fault::None);
        assert!(used_requests <= 40, "{used_requests} of forty");
        for entity in entities {
            let taken = i64::try_from(used_requests).expect("at most forty");
            assert_eq!(balance(&*store, entity).await, Some((40 - taken, taken)), "{entity} of {entities:?}");
            assert_eq!(used(&*store, entity).await, used_requests, "{entity} of {entities:?}");
        }
    }
}

/// Twelve leases, each settled at one request, spent or cancelled. Returns the number of requests used.
async fn act_at_random(store: &dyn Store, levels: &Arc<Levels>, seed: u64) -> u64 {
    let (mut random, mut used_requests) = (Random::seeded(seed), 0);
    for _ in 0..12 {
        if random.below(4) == 0 {
            let spent = draw_of(levels, 1);
            let answer = until_answered(|| store.spend(&spent)).await.expect("the store responds");
            used_requests += u64::from(matches!(answer, DrawResult::Granted(_)));
            continue;
        }
        let draw = draw_of(levels, 1 + random.below(4));
        let drawn = store.draw(&draw).await;
        if matches!(drawn, Ok(DrawResult::Refused(_))) {
            continue;
        }
        let is_unavailable = drawn.as_ref().is_err_and(StoreError::is_transient);
        assert!(is_unavailable || drawn.is_ok(), "{drawn:?}");
        // A draw without a response may have been applied.
        if is_unavailable || random.below(2) == 0 {
            let cancel = cancel_of(&draw);
            until_answered(|| store.cancel(&cancel)).await.expect("a lease is cancelled");
        } else {
            let settle = settle_of(&draw, 1);
            until_answered(|| store.settle(&settle)).await.expect("an open lease is settled");
            used_requests += 1;
        }
    }
    used_requests
}
