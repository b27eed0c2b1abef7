//! Leases on several levels: one transaction, all or nothing.

use std::sync::Arc;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets as _, Draw, DrawResult, DynamoDb, Ledger as _, Paging, UsageOf, UsageQuery};

use super::ENGINE;
use crate::kit::common::{
    OPEN, adjust_of, balance, cancel_of, draw_of, granted, is_granted, join_all, levels, next_lease, own,
    settle_of, slow, until_answered, used,
};
use crate::kit::dynamodb::{open_new, options, unswept};
use crate::kit::dynamodb_items::{RawTable, table_of};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::skip_without;

async fn store() -> (Proxy, DynamoDb) {
    let proxy = Proxy::new(ENGINE).await;
    let store = open_new(unswept(ENGINE).endpoint(proxy.url())).await;
    (proxy, store)
}

async fn mark_count(raw: &RawTable, entity: &str) -> usize {
    let is_mark = |name: &String| ["o:", "e:", "l:", "x:"].iter().any(|kind| name.starts_with(kind));
    raw.item(entity).await.into_keys().filter(is_mark).count()
}

/// The cached items have enough units, the table does not.
#[tokio::test]
async fn short_level_takes_nothing_at_the_others() {
    skip_without!(ENGINE);
    for (short, other) in [("child", "parent"), ("parent", "child")] {
        let (_proxy, store) = store().await;
        let burst = |entity| [slow(if entity == short { 3 } else { 100 })];
        let (child, parent) = (burst("child"), burst("parent"));
        let levels = levels(&[("child", &child), ("parent", &parent)]);
        let others = reopened(&store).await;
        granted(store.draw(&draw_of(&levels, 1)).await);
        granted(others.draw(&draw_of(&own(short, 3), 2)).await);
        let refused = draw_of(&levels, 1);
        assert!(matches!(store.draw(&refused).await, Ok(DrawResult::Refused(_))));
        assert_eq!(balance(&store, short).await, Some((0, 3)));
        assert_eq!(balance(&store, other).await, Some((99, 1)), "where {short} is short");
        assert!(matches!(store.spend(&refused).await, Ok(DrawResult::Refused(_))));
        assert_eq!(balance(&store, other).await, Some((99, 1)), "where {short} is short");
    }
}

#[tokio::test]
async fn refused_cascade_writes_nothing() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let limits = [slow(3)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let others = reopened(&store).await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    for entity in ["child", "parent"] {
        granted(others.draw(&draw_of(&own(entity, 3), 2)).await);
    }
    let raw = RawTable::on(ENGINE, &store);
    let before = [raw.item("child").await, raw.item("parent").await];
    proxy.take_requests();
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(DrawResult::Refused(_))));
    let requests = proxy.take_requests();
    assert!(requests.len() <= 3, "{requests:?}");
    assert_eq!([raw.item("child").await, raw.item("parent").await], before);
}

#[tokio::test]
async fn only_the_home_has_marks() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits), ("top", &limits)]);
    let raw = RawTable::on(ENGINE, &store);
    let draw = draw_of(&levels, 5);
    granted(store.draw(&draw).await);
    store.adjust(&adjust_of(&draw, 1, 2)).await.expect("the lease is open");
    assert_eq!(mark_count(&raw, "child").await, 2, "the lease and its levels");
    store.settle(&settle_of(&draw, 3)).await.expect("the lease is open");
    granted(store.spend(&draw_of(&levels, 1)).await);
    let cancelled = draw_of(&levels, 7);
    granted(store.draw(&cancelled).await);
    store.cancel(&cancel_of(&cancelled)).await.expect("the lease is open");
    for entity in ["parent", "top"] {
        assert_eq!(mark_count(&raw, entity).await, 0, "{entity}");
        assert_eq!(balance(&store, entity).await, Some((96, 4)), "{entity}");
    }
}

/// The usage marks are in the items of the children.
#[tokio::test]
async fn usage_of_a_parent_counts_its_children() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let others = reopened(&store).await;
    let limits = [slow(1_000)];
    for (number, child) in ["a", "b, c=1", "c"].into_iter().enumerate() {
        let levels = levels(&[(child, &limits), ("parent", &limits), ("top", &limits)]);
        for _ in 0..40 {
            let draw = draw_of(&levels, 5);
            granted(store.draw(&draw).await);
            store.settle(&settle_of(&draw, 1 + number as u64)).await.expect("the lease is open");
        }
    }
    for (entity, units, own) in [("parent", 240, 0), ("top", 240, 0), ("c", 120, 120), ("b, c=1", 80, 80)] {
        let of = UsageOf::Entity(EntityId::new(entity).unwrap());
        let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
        let lines = others.usage(&query, &Paging::default()).await.expect("usage is returned").items;
        let sum = |of: fn(&tidegate_core::limit::usage::Tally) -> u64| -> u64 {
            lines.iter().map(|line| of(&line.tally)).sum()
        };
        assert_eq!((sum(|tally| tally.units), sum(|tally| tally.own)), (units, own), "{entity}");
    }
}

#[tokio::test]
async fn deleted_parent_is_made_anew() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let raw = RawTable::on(ENGINE, &store);
    granted(store.draw(&draw_of(&levels, 1)).await);
    let made = raw.item("parent").await;
    raw.delete("parent").await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    let anew = raw.item("parent").await;
    assert!(made.keys().all(|name| anew.contains_key(name)), "{anew:?}");
    assert_eq!(balance(&store, "parent").await, Some((99, 1)));
    assert_eq!(balance(&store, "child").await, Some((98, 2)));
}

#[tokio::test]
async fn step_at_the_child_hides_no_write_at_the_parent() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let (child, parent) = ([slow(100)], [Limit::per_day("tpm", 1).burst(10)]);
    let both = levels(&[("child", &child), ("parent", &parent)]);
    let tokens = |levels: &Arc<Levels>, tokens| {
        let units = levels.amounts(&[("tpm", tokens)]).unwrap();
        Draw { lease: next_lease(), levels: Arc::clone(levels), units, terms: OPEN, is_watched: true }
    };
    granted(store.draw(&tokens(&both, 1)).await);
    let draw = draw_of(&both, 1);
    granted(store.draw(&draw).await);
    for step in 1..=3 {
        store.adjust(&adjust_of(&draw, step, 1)).await.unwrap();
    }
    let above = levels(&[("parent", &parent)]);
    granted(reopened(&store).await.draw(&tokens(&above, 9)).await);
    assert!(matches!(store.draw(&tokens(&both, 5)).await, Ok(DrawResult::Refused(_))));
    proxy.take_requests();
    assert!(matches!(store.draw(&tokens(&both, 5)).await, Ok(DrawResult::Refused(_))));
    assert!(!proxy.take_requests().contains(&"UpdateItem".to_owned()), "the cached item is empty");
}

#[tokio::test]
async fn error_at_one_level_takes_nothing() {
    skip_without!(ENGINE);
    let text = |text: &str| AttributeValue::S(text.to_owned());
    // An item that the engine fails to update, and one that changed and cannot be decoded.
    let corrupt = [vec![("c:rpm", text("many"))], vec![("R", text("other")), ("o:unknown", text("?"))]];
    for (number, corrupt) in corrupt.iter().enumerate() {
        for lost in [0, 2] {
            let (proxy, store) = store().await;
            let limits = [slow(100)];
            let levels = levels(&[("child", &limits), ("parent", &limits)]);
            granted(store.draw(&draw_of(&levels, 1)).await);
            let raw = RawTable::on(ENGINE, &store);
            for (name, value) in corrupt {
                raw.set("parent", name, value.clone()).await;
            }
            let mut left = lost;
            proxy.plan(move |_| {
                left -= 1;
                if left >= 0 { Fault::Lost } else { Fault::None }
            });
            let answer = store.draw(&draw_of(&levels, 5)).await;
            assert!(answer.as_ref().is_err_and(|error| !error.is_transient()), "{number}: {answer:?}");
            assert_eq!(balance(&store, "child").await, Some((99, 1)), "{number}, {lost} responses lost");
            assert_eq!(mark_count(&raw, "child").await, 2, "{number}, {lost} responses lost");
        }
    }
}

#[tokio::test]
async fn cascade_with_a_lost_response_is_drawn_once() {
    skip_without!(ENGINE);
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let (proxy, store) = store().await;
    granted(store.draw(&draw_of(&levels, 20)).await);
    for (number, fault) in
        [Fault::Lost, Fault::Broken, Fault::Refused("ThrottlingException")].into_iter().enumerate()
    {
        proxy.take_requests();
        let mut is_first = true;
        proxy.plan(move |_| if std::mem::take(&mut is_first) { fault } else { Fault::None });
        let draw = draw_of(&levels, 10);
        let moved = granted(store.draw(&draw).await);
        assert!(!moved.is_repeat && moved.readings.len() == 2, "{fault:?}: {moved:?}");
        let requests = proxy.take_requests();
        assert!(requests.len() <= 3, "{fault:?}: {requests:?}");
        assert!(granted(store.draw(&draw).await).is_repeat, "a further call is a repeat");
        let taken = 30 + 10 * i64::try_from(number).unwrap();
        for entity in ["child", "parent"] {
            assert_eq!(balance(&store, entity).await, Some((100 - taken, taken)), "{fault:?}: {entity}");
        }
    }
}

/// The draw has taken everything: a repeat finds the parent empty.
#[tokio::test]
async fn repeated_cascade_is_not_refused() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let others = reopened(&store).await;
    let limits = [slow(10)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let (drawn, spent) = (draw_of(&levels, 6), draw_of(&levels, 4));
    granted(store.draw(&drawn).await);
    granted(store.spend(&spent).await);
    for store in [&store, &others] {
        assert!(granted(store.draw(&drawn).await).is_repeat);
        assert!(granted(store.spend(&spent).await).is_repeat);
    }
    assert_eq!(used(&others, "parent").await, 4, "reading usage counts the lease");
    assert!(granted(store.spend(&spent).await).is_repeat, "its tombstone is found");
}

/// The engine reads items one after the other: the home before the draw, and the parent after it.
#[tokio::test]
async fn cascade_drawn_while_it_is_read_is_not_refused() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = unswept(ENGINE).endpoint(proxy.url()).rejections(std::time::Duration::ZERO);
    let store = open_new(options).await;
    let (child, parent) = ([slow(100)], [slow(10)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    let draw = draw_of(&levels, 10);
    granted(store.draw(&draw).await);
    assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
    let mut is_first = true;
    proxy.plan(move |operation| match operation {
        "BatchGetItem" if std::mem::take(&mut is_first) => Fault::Without("ENTITY#child"),
        _ => Fault::None,
    });
    proxy.take_requests();
    assert!(granted(store.draw(&draw).await).is_repeat);
    assert_eq!(proxy.take_requests(), ["BatchGetItem", "BatchGetItem"]);
    assert_eq!(balance(&store, "parent").await, Some((0, 10)));
}

/// Transactions of siblings conflict at their parent.
#[tokio::test(flavor = "multi_thread")]
async fn siblings_take_exactly_the_limit_of_their_parent() {
    skip_without!(ENGINE);
    let options = options(ENGINE);
    let stores = [open_new(options.clone()).await, options.open().await.expect("the table exists")];
    let (child, parent) = ([slow(100)], [slow(20)]);
    let callers = (0..30).map(|number: usize| {
        let levels = levels(&[(&format!("child-{}", number % 3), &child), ("parent", &parent)]);
        let (store, draw) = (stores[number % 2].clone(), draw_of(&levels, 1));
        tokio::spawn(async move { until_answered(|| store.draw(&draw)).await })
    });
    let mut taken = 0;
    for caller in callers.collect::<Vec<_>>() {
        taken += usize::from(is_granted(&caller.await.expect("no caller panics")));
    }
    assert_eq!(taken, 20);
    assert_eq!(balance(&stores[0], "parent").await, Some((0, 20)));
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_first_draws_are_all_counted() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let others = reopened(&store).await;
    for round in 0..5 {
        let entity = format!("acme-{round}");
        let levels = own(&entity, 100);
        let draws: Vec<_> = (0..8).map(|_| draw_of(&levels, 1)).collect();
        let stores = [&store, &others];
        let answers =
            join_all(draws.iter().zip(0..).map(|(draw, number)| stores[number % 2].draw(draw)).collect());
        assert!(answers.await.iter().all(is_granted), "all of them fit");
        assert_eq!(balance(&store, &entity).await, Some((92, 8)));
    }
}

/// A second handle of the same table, with an empty cache.
async fn reopened(store: &DynamoDb) -> DynamoDb {
    unswept(ENGINE).of_table(table_of(store)).open().await.expect("the table exists")
}
