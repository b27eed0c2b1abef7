//! What a call asks of the engine.

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, Draw, DynamoDb, Lookup, ManualWall, Standing, StoreError};

use super::ENGINE;
use crate::kit::dynamodb::{START, made, unswept};
use crate::kit::dynamodb_proxy::Proxy;
use crate::kit::engine::skip_without;
use crate::kit::words;
use crate::kit::words::{
    adjust_of, draw_of, eventually, granted, is_granted, levels, own, settle_of, subject,
};

async fn watched() -> (Proxy, DynamoDb, ManualWall) {
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let store = made(unswept(ENGINE).endpoint(proxy.url()).clock(clock.clone())).await;
    proxy.asked();
    (proxy, store, clock)
}

#[tokio::test]
async fn acquire_of_a_cached_item_is_one_request() {
    skip_without!(ENGINE);
    let (proxy, store, clock) = watched().await;
    let limits: Vec<Limit> =
        ["rpm", "tpm", "rpd", "tpd", "usd"].map(|name| Limit::per_second(name, 1_000).burst(1_000)).into();
    let levels = levels(&[("acme", &limits)]);
    let units = levels.amounts(&[("rpm", 1), ("tpm", 9), ("rpd", 1), ("tpd", 9), ("usd", 2)]).unwrap();
    let draw = || Draw { units: units.clone(), ..draw_of(&levels, 1) };
    granted(store.draw(&draw()).await);
    assert_eq!(proxy.asked(), ["UpdateItem"], "the first use of a bucket that is not there is one, too");
    for round in 0..20 {
        // Every other time all of it has refilled: what was full before is set, what fills is added to.
        if round % 2 == 0 {
            clock.advance(std::time::Duration::from_secs(2));
        }
        let drawn = draw();
        granted(store.draw(&drawn).await);
        assert_eq!(proxy.asked(), ["UpdateItem"], "round {round}");
        store.settle(&settle_of(&drawn, 1)).await.unwrap();
        assert_eq!(proxy.asked(), ["UpdateItem"], "its settle in round {round}");
    }
}

#[tokio::test]
async fn acquire_of_a_changed_item_is_two_requests() {
    skip_without!(ENGINE);
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let options = unswept(ENGINE).clock(clock);
    let others = made(options.clone()).await;
    let store = options.endpoint(proxy.url()).open().await.unwrap();
    proxy.asked();
    let levels = own("acme", 10);
    let mut left = 10;
    for round in 0_u64..12 {
        if round % 2 == 0 {
            let drawn = is_granted(&others.draw(&draw_of(&levels, 1)).await);
            left -= i64::from(drawn);
        }
        let asked = draw_of(&levels, 1);
        let is_drawn = is_granted(&store.draw(&asked).await);
        assert_eq!(is_drawn, left > 0, "round {round}");
        left -= i64::from(is_drawn);
        let asked = proxy.asked();
        assert!(asked.len() <= 2, "round {round}: {asked:?}");
    }
}

#[tokio::test]
async fn cascade_is_one_transaction_per_step() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    let (child, parent) = ([words::slow(100)], [words::slow(1_000)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    for _ in 0..5 {
        let draw = draw_of(&levels, 1);
        granted(store.draw(&draw).await);
        assert_eq!(proxy.asked(), ["TransactWriteItems"]);
        store.adjust(&adjust_of(&draw, 1, 1)).await.unwrap();
        assert_eq!(proxy.asked(), ["TransactWriteItems"]);
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        assert_eq!(proxy.asked(), ["TransactWriteItems"]);
        granted(store.spend(&draw_of(&levels, 1)).await);
        assert_eq!(proxy.asked(), ["TransactWriteItems"]);
    }
}

#[tokio::test]
async fn chosen_lease_is_read_and_drawn_with_a_check() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    let levels = own("acme", 100);
    let draw = || Draw { lease: LeaseId::chosen(words::next_lease().number()), ..draw_of(&levels, 1) };
    granted(store.draw(&draw()).await);
    assert_eq!(proxy.asked(), ["UpdateItem"], "nothing was counted yet");
    granted(store.spend(&draw()).await);
    assert_eq!(words::used(&store, "acme").await, 1, "which counts it");
    for _ in 0..3 {
        let draw = draw();
        proxy.asked();
        granted(store.draw(&draw).await);
        assert_eq!(proxy.asked(), ["BatchGetItem", "TransactWriteItems"]);
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        assert_eq!(proxy.asked(), ["UpdateItem"]);
        assert!(store.draw(&draw).await.is_err(), "it has ended");
    }
}

#[tokio::test]
async fn balances_are_one_read() {
    skip_without!(ENGINE);
    let (proxy, store, _) = watched().await;
    for entity in ["a", "b", "c"] {
        granted(store.draw(&draw_of(&own(entity, 10), 1)).await);
    }
    proxy.asked();
    let lookup = Lookup::Subjects(["a", "b", "c", "nobody"].map(subject).into());
    assert_eq!(store.balances(&lookup).await.unwrap().buckets.len(), 3);
    assert_eq!(proxy.asked(), ["BatchGetItem"]);
    let entities = ["a", "b"].map(|name| tidegate_core::limit::name::EntityId::new(name).unwrap());
    store.balances(&Lookup::Entities(entities.into())).await.unwrap();
    assert_eq!(proxy.asked(), ["Query", "Query"]);
}

/// A bucket of three with nothing left, that this process knows of.
async fn empty(
    store: &DynamoDb,
    levels: &std::sync::Arc<tidegate_core::limit::cascade::Levels>,
) -> Vec<Draw> {
    let draws: Vec<Draw> = (0..3).map(|_| draw_of(levels, 1)).collect();
    for draw in &draws {
        granted(store.draw(draw).await);
    }
    // The first is refused by what was written, once it is read; the others by that.
    assert!(!is_granted(&store.draw(&draw_of(levels, 1)).await));
    draws
}

#[tokio::test]
async fn repeated_refusals_read_once_a_second() {
    skip_without!(ENGINE);
    let (proxy, store, clock) = watched().await;
    let levels = levels(&[("acme", &[Limit::per_second("rpm", 1).burst(3)])]);
    empty(&store, &levels).await;
    proxy.asked();
    let before = tokio::time::Instant::now();
    for _ in 0..2_000 {
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
    }
    let asked = proxy.asked();
    assert!(asked.iter().all(|asked| asked == "BatchGetItem"), "{asked:?}");
    let seconds = usize::try_from(before.elapsed().as_secs()).unwrap() + 1;
    assert!(asked.len() <= seconds, "{} in {seconds} s", asked.len());
    assert!(store.rejections() >= 2_000 - seconds as u64);
    // No longer than the refusal said.
    clock.advance(std::time::Duration::from_secs(1));
    granted(store.draw(&draw_of(&levels, 1)).await);
}

#[tokio::test]
async fn own_returns_end_cached_refusals() {
    skip_without!(ENGINE);
    let (_proxy, store, _) = watched().await;
    for (entity, is_settled) in [("one", true), ("two", false)] {
        let levels = own(entity, 3);
        let draws = empty(&store, &levels).await;
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
        if is_settled {
            store.settle(&settle_of(&draws[0], 0)).await.unwrap();
        } else {
            store.cancel(&words::cancel_of(&draws[0])).await.unwrap();
        }
        granted(store.draw(&draw_of(&levels, 1)).await);
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
        let lowered = adjust_of(&draws[1], 1, -1);
        store.adjust(&lowered).await.unwrap();
        granted(store.draw(&draw_of(&levels, 1)).await);
    }
    eventually("one is refused without asking", async || {
        assert!(!is_granted(&store.draw(&draw_of(&own("two", 3), 1)).await));
        store.rejections() > 0
    })
    .await;
}

#[tokio::test]
async fn newer_rule_ends_cached_refusals() {
    skip_without!(ENGINE);
    let (_proxy, store, _) = watched().await;
    let old = own("acme", 3);
    empty(&store, &old).await;
    assert!(!is_granted(&store.draw(&draw_of(&old, 1)).await));
    let new = words::levels_of_version(
        7,
        &[("acme", &[Limit::per_day("rpm", 1).burst(3), Limit::per_day("tpm", 5)])],
    );
    let before = store.rejections();
    assert!(!is_granted(&store.draw(&draw_of(&new, 1)).await), "the level is kept, and was nothing");
    assert_eq!(store.rejections(), before, "it was asked");
}

#[tokio::test]
async fn refusals_are_not_cached_without_rejections() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let store = made(unswept(ENGINE).endpoint(proxy.url()).rejections(std::time::Duration::ZERO)).await;
    let levels = own("acme", 3);
    empty(&store, &levels).await;
    proxy.asked();
    for _ in 0..3 {
        assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
        assert_eq!(proxy.asked(), ["BatchGetItem"]);
    }
    assert_eq!(store.rejections(), 0);
}

#[tokio::test]
async fn lease_of_another_process_is_found_by_the_index() {
    skip_without!(ENGINE);
    let (proxy, clock) = (Proxy::new(ENGINE).await, ManualWall::new(START));
    let options = unswept(ENGINE).clock(clock);
    let others = made(options.clone()).await;
    let store = options.endpoint(proxy.url()).open().await.unwrap();
    let draws = ["a", "b", "c"].map(|entity| draw_of(&own(entity, 10), 2));
    for draw in &draws {
        granted(others.draw(draw).await);
    }
    let ended = draw_of(&own("d", 10), 1);
    granted(others.draw(&ended).await);
    others.settle(&settle_of(&ended, 1)).await.unwrap();
    proxy.asked();
    let standing = store.lease(draws[1].lease).await.unwrap();
    assert!(
        matches!(&standing, Standing::Open(held) if held.levels.subject() == &subject("b")),
        "{standing:?}"
    );
    assert!(matches!(store.lease(ended.lease).await, Ok(Standing::Ended(_))));
    assert!(matches!(store.lease(words::next_lease()).await, Err(StoreError::NoLease { .. })));
    let asked = proxy.asked();
    assert!(
        asked.iter().all(|asked| ["GetItem", "Query", "BatchGetItem"].contains(&asked.as_str())),
        "{asked:?}"
    );
    store.settle(&settle_of(&draws[1], 2)).await.unwrap();
}
