//! An engine that throttles, breaks, loses answers and is slow: nothing is charged twice, and nothing is invented.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_store::{Buckets as _, Drawn, DynamoDb, ManualWall, Standing, Store, StoreError};

use super::ENGINE;
use crate::kit::dynamodb::{START, made, options};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::skip_without;
use crate::kit::words::{
    cancel_of, draw_of, granted, levels, own, settle_of, shows, slow, until_answered, used,
};

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
    let store = made(options(ENGINE).endpoint(proxy.url())).await;
    (proxy, store)
}

/// The engine reads the items of one request one after the other. What is moved meanwhile is where it was read too late, and not
/// where it was read too early.
#[tokio::test]
async fn lease_counted_during_a_step_is_found() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let draw = draw_of(&own("acme", 100), 10);
    granted(store.draw(&draw).await);
    let settled = store.settle(&settle_of(&draw, 3)).await.unwrap();
    // Reading the ledger counts it: it becomes a tombstone.
    assert_eq!(used(&store, "acme").await, 3);
    let mut times = 0;
    proxy.plan(move |asked| {
        times += u32::from(asked == "BatchGetItem");
        if asked == "BatchGetItem" && times == 1 { Fault::Without("LEASE#") } else { Fault::None }
    });
    proxy.asked();
    let again = store.settle(&settle_of(&draw, 3)).await.unwrap();
    assert_eq!((settled.is_repeat, again.is_repeat), (false, true));
    assert_eq!(proxy.asked(), ["BatchGetItem", "BatchGetItem"]);
    let error = store.cancel(&cancel_of(&draw)).await.unwrap_err();
    assert!(matches!(error, StoreError::Ended { .. }), "{error}");
    assert_eq!(shows(&store, "acme").await, Some((97, 3)));
}

/// The same for one that is asked for again and for which there is nothing left: it has it.
#[tokio::test]
async fn repeated_draw_of_all_units_is_not_refused() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let (spent, drawn) = (draw_of(&own("spends", 10), 10), draw_of(&own("draws", 10), 10));
    granted(store.spend(&spent).await);
    granted(store.draw(&drawn).await);
    assert_eq!((used(&store, "spends").await, used(&store, "draws").await), (10, 0));
    let unaware = || {
        let mut times = 0;
        proxy.plan(move |asked| {
            times += u32::from(asked == "BatchGetItem");
            if asked == "BatchGetItem" && times == 1 { Fault::Without("LEASE#") } else { Fault::None }
        });
    };
    unaware();
    assert!(granted(store.spend(&spent).await).is_repeat);
    unaware();
    assert!(granted(store.draw(&drawn).await).is_repeat);
}

/// Who has only the id looks for it where it was, and then where it has gone.
#[tokio::test]
async fn lease_counted_during_a_search_is_found() {
    skip_without!(ENGINE);
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let options = options(ENGINE).clock(clock);
    let first = made(options.clone()).await;
    let draw = draw_of(&own("acme", 100), 10);
    granted(first.draw(&draw).await);
    first.settle(&settle_of(&draw, 3)).await.unwrap();
    assert_eq!(used(&first, "acme").await, 3);
    let second = options.endpoint(proxy.url()).open().await.unwrap();
    let mut times = 0;
    proxy.plan(move |asked| {
        times += u32::from(asked == "GetItem");
        if asked == "GetItem" && times == 1 { Fault::Without("LEASE#") } else { Fault::None }
    });
    assert!(matches!(second.lease(draw.lease).await.unwrap(), Standing::Ended(_)));
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
            // Seen before, so that a guess is right; and each request of the call fails once.
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
            assert_eq!(shows(&store, entity).await, Some((78, 22)), "{fault:?} of {entity}");
            assert_eq!(used(&store, entity).await, 12, "{fault:?} of {entity}");
        }
    }
}

/// The request of this number fails, counted from 0, and all others go well.
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
    assert_eq!(shows(&store, "parent").await, Some((95, 5)));
}

#[tokio::test]
async fn slow_engine_is_unavailable_within_the_timeout() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = options(ENGINE).endpoint(proxy.url());
    options.create().await.unwrap();
    let hasty = options.timeout(Duration::from_millis(500));
    let store = until_answered(|| hasty.clone().open()).await.unwrap();
    for fault in
        [Fault::Refused("ThrottlingException"), Fault::Refused("InternalServerError"), Fault::Late(600_000)]
    {
        proxy.plan(move |_| fault);
        let before = tokio::time::Instant::now();
        let answer = store.draw(&draw_of(&own("acme", 10), 1)).await;
        assert!(answer.as_ref().is_err_and(StoreError::is_transient), "{fault:?}: {answer:?}");
        assert!(before.elapsed() < Duration::from_secs(60), "{fault:?} takes {:?}", before.elapsed());
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
        let mut kept = 0;
        for caller in callers.collect::<Vec<_>>() {
            kept += caller.await.expect("no caller panics");
        }
        proxy.plan(|_| Fault::None);
        assert!(kept <= 40, "{kept} of forty");
        for entity in entities {
            let taken = i64::try_from(kept).expect("at most forty");
            assert_eq!(shows(&*store, entity).await, Some((40 - taken, taken)), "{entity} of {entities:?}");
            assert_eq!(used(&*store, entity).await, kept, "{entity} of {entities:?}");
        }
    }
}

/// Twelve leases that are settled at one request, spent or cancelled. Returns how many requests were used.
async fn act_at_random(store: &dyn Store, levels: &Arc<Levels>, seed: u64) -> u64 {
    let (mut random, mut kept) = (Random::seeded(seed), 0);
    for _ in 0..12 {
        if random.below(4) == 0 {
            let spent = draw_of(levels, 1);
            let answer = until_answered(|| store.spend(&spent)).await.expect("it is answered");
            kept += u64::from(matches!(answer, Drawn::Granted(_)));
            continue;
        }
        let draw = draw_of(levels, 1 + random.below(4));
        let drawn = store.draw(&draw).await;
        if matches!(drawn, Ok(Drawn::Refused(_))) {
            continue;
        }
        let is_unavailable = drawn.as_ref().is_err_and(StoreError::is_transient);
        assert!(is_unavailable || drawn.is_ok(), "{drawn:?}");
        // A draw without an answer may have been made.
        if is_unavailable || random.below(2) == 0 {
            let cancel = cancel_of(&draw);
            until_answered(|| store.cancel(&cancel)).await.expect("a lease is cancelled");
        } else {
            let settle = settle_of(&draw, 1);
            until_answered(|| store.settle(&settle)).await.expect("an open lease is settled");
            kept += 1;
        }
    }
    kept
}
