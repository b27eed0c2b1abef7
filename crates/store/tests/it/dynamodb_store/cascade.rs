//! Leases with several levels: one transaction, all or nothing.

use std::sync::Arc;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{Buckets as _, Draw, Drawn, DynamoDb, Ledger as _, Paging, UsageOf, UsageQuery};

use super::ENGINE;
use crate::kit::dynamodb::{made, options, unswept};
use crate::kit::dynamodb_items::{Hand, table_of};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::skip_without;
use crate::kit::words::{
    OPEN, adjust_of, cancel_of, draw_of, granted, is_granted, join_all, levels, next_lease, own, settle_of,
    shows, slow, until_answered, used,
};

async fn store() -> (Proxy, DynamoDb) {
    let proxy = Proxy::new(ENGINE).await;
    let store = made(unswept(ENGINE).endpoint(proxy.url())).await;
    (proxy, store)
}

async fn marks(hand: &Hand, entity: &str) -> usize {
    let is_mark = |name: &String| ["o:", "e:", "l:", "x:"].iter().any(|kind| name.starts_with(kind));
    hand.item(entity).await.into_keys().filter(is_mark).count()
}

/// The cached items have enough, and the table has not.
#[tokio::test]
async fn short_level_takes_nothing_at_the_others() {
    skip_without!(ENGINE);
    for (short, other) in [("child", "parent"), ("parent", "child")] {
        let (_proxy, store) = store().await;
        let burst = |entity| [slow(if entity == short { 3 } else { 100 })];
        let (child, parent) = (burst("child"), burst("parent"));
        let levels = levels(&[("child", &child), ("parent", &parent)]);
        let others = made_again(&store).await;
        granted(store.draw(&draw_of(&levels, 1)).await);
        granted(others.draw(&draw_of(&own(short, 3), 2)).await);
        let refused = draw_of(&levels, 1);
        assert!(matches!(store.draw(&refused).await, Ok(Drawn::Refused(_))));
        assert_eq!(shows(&store, short).await, Some((0, 3)));
        assert_eq!(shows(&store, other).await, Some((99, 1)), "where {short} is short");
        assert!(matches!(store.spend(&refused).await, Ok(Drawn::Refused(_))));
        assert_eq!(shows(&store, other).await, Some((99, 1)), "where {short} is short");
    }
}

#[tokio::test]
async fn refused_cascade_writes_nothing() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let limits = [slow(3)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let others = made_again(&store).await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    for entity in ["child", "parent"] {
        granted(others.draw(&draw_of(&own(entity, 3), 2)).await);
    }
    let hand = Hand::on(ENGINE, &store);
    let before = [hand.item("child").await, hand.item("parent").await];
    proxy.asked();
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(Drawn::Refused(_))));
    let asked = proxy.asked();
    assert!(asked.len() <= 3, "{asked:?}");
    assert_eq!([hand.item("child").await, hand.item("parent").await], before);
}

#[tokio::test]
async fn only_the_home_has_marks() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits), ("top", &limits)]);
    let hand = Hand::on(ENGINE, &store);
    let draw = draw_of(&levels, 5);
    granted(store.draw(&draw).await);
    store.adjust(&adjust_of(&draw, 1, 2)).await.expect("it is open");
    assert_eq!(marks(&hand, "child").await, 2, "the lease and its levels");
    store.settle(&settle_of(&draw, 3)).await.expect("it is open");
    granted(store.spend(&draw_of(&levels, 1)).await);
    let cancelled = draw_of(&levels, 7);
    granted(store.draw(&cancelled).await);
    store.cancel(&cancel_of(&cancelled)).await.expect("it is open");
    for entity in ["parent", "top"] {
        assert_eq!(marks(&hand, entity).await, 0, "{entity}");
        assert_eq!(shows(&store, entity).await, Some((96, 4)), "{entity}");
    }
}

/// The marks are in the items of the children.
#[tokio::test]
async fn usage_of_a_parent_counts_its_children() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let others = made_again(&store).await;
    let limits = [slow(1_000)];
    for (number, child) in ["a", "b, c=1", "c"].into_iter().enumerate() {
        let levels = levels(&[(child, &limits), ("parent", &limits), ("top", &limits)]);
        for _ in 0..40 {
            let draw = draw_of(&levels, 5);
            granted(store.draw(&draw).await);
            store.settle(&settle_of(&draw, 1 + number as u64)).await.expect("it is open");
        }
    }
    for (entity, units, own) in [("parent", 240, 0), ("top", 240, 0), ("c", 120, 120), ("b, c=1", 80, 80)] {
        let of = UsageOf::Entity(EntityId::new(entity).unwrap());
        let query = UsageQuery { of, window: Window::Month, range: Stamp::ZERO..Stamp::MAX };
        let lines = others.usage(&query, &Paging::default()).await.expect("usage is answered").items;
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
    let hand = Hand::on(ENGINE, &store);
    granted(store.draw(&draw_of(&levels, 1)).await);
    let made = hand.item("parent").await;
    hand.delete("parent").await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    let anew = hand.item("parent").await;
    assert!(made.keys().all(|name| anew.contains_key(name)), "{anew:?}");
    assert_eq!(shows(&store, "parent").await, Some((99, 1)));
    assert_eq!(shows(&store, "child").await, Some((98, 2)));
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
    granted(made_again(&store).await.draw(&tokens(&above, 9)).await);
    assert!(matches!(store.draw(&tokens(&both, 5)).await, Ok(Drawn::Refused(_))));
    proxy.asked();
    assert!(matches!(store.draw(&tokens(&both, 5)).await, Ok(Drawn::Refused(_))));
    assert!(!proxy.asked().contains(&"UpdateItem".to_owned()), "it has seen that nothing is left");
}

#[tokio::test]
async fn error_at_one_level_takes_nothing() {
    skip_without!(ENGINE);
    let text = |text: &str| AttributeValue::S(text.to_owned());
    // An item that the engine does not update, and one that has changed and cannot be read.
    let spoilt = [vec![("c:rpm", text("many"))], vec![("R", text("other")), ("o:nobody", text("?"))]];
    for (number, spoilt) in spoilt.iter().enumerate() {
        for lost in [0, 2] {
            let (proxy, store) = store().await;
            let limits = [slow(100)];
            let levels = levels(&[("child", &limits), ("parent", &limits)]);
            granted(store.draw(&draw_of(&levels, 1)).await);
            let hand = Hand::on(ENGINE, &store);
            for (name, value) in spoilt {
                hand.set("parent", name, value.clone()).await;
            }
            let mut left = lost;
            proxy.plan(move |_| {
                left -= 1;
                if left >= 0 { Fault::Lost } else { Fault::None }
            });
            let answer = store.draw(&draw_of(&levels, 5)).await;
            assert!(answer.as_ref().is_err_and(|error| !error.is_transient()), "{number}: {answer:?}");
            assert_eq!(shows(&store, "child").await, Some((99, 1)), "{number}, {lost} responses lost");
            assert_eq!(marks(&hand, "child").await, 2, "{number}, {lost} responses lost");
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
        proxy.asked();
        let mut is_first = true;
        proxy.plan(move |_| if std::mem::take(&mut is_first) { fault } else { Fault::None });
        let draw = draw_of(&levels, 10);
        let moved = granted(store.draw(&draw).await);
        assert!(!moved.is_repeat && moved.readings.len() == 2, "{fault:?}: {moved:?}");
        let asked = proxy.asked();
        assert!(asked.len() <= 3, "{fault:?}: {asked:?}");
        assert!(granted(store.draw(&draw).await).is_repeat, "another call repeats it");
        let taken = 30 + 10 * i64::try_from(number).unwrap();
        for entity in ["child", "parent"] {
            assert_eq!(shows(&store, entity).await, Some((100 - taken, taken)), "{fault:?}: {entity}");
        }
    }
}

/// The draw has taken all there is: a repeat finds the parent empty.
#[tokio::test]
async fn repeated_cascade_is_not_refused() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let others = made_again(&store).await;
    let limits = [slow(10)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let (drawn, spent) = (draw_of(&levels, 6), draw_of(&levels, 4));
    granted(store.draw(&drawn).await);
    granted(store.spend(&spent).await);
    for store in [&store, &others] {
        assert!(granted(store.draw(&drawn).await).is_repeat);
        assert!(granted(store.spend(&spent).await).is_repeat);
    }
    assert_eq!(used(&others, "parent").await, 4, "which counts it");
    assert!(granted(store.spend(&spent).await).is_repeat, "its tombstone is found");
}

/// The engine reads one item after the other: the home before the draw, and the parent after it.
#[tokio::test]
async fn cascade_drawn_while_it_is_read_is_not_refused() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = unswept(ENGINE).endpoint(proxy.url()).rejections(std::time::Duration::ZERO);
    let store = made(options).await;
    let (child, parent) = ([slow(100)], [slow(10)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    let draw = draw_of(&levels, 10);
    granted(store.draw(&draw).await);
    assert!(!is_granted(&store.draw(&draw_of(&levels, 1)).await));
    let mut is_first = true;
    proxy.plan(move |asked| match asked {
        "BatchGetItem" if std::mem::take(&mut is_first) => Fault::Without("ENTITY#child"),
        _ => Fault::None,
    });
    proxy.asked();
    assert!(granted(store.draw(&draw).await).is_repeat);
    assert_eq!(proxy.asked(), ["BatchGetItem", "BatchGetItem"]);
    assert_eq!(shows(&store, "parent").await, Some((0, 10)));
}

/// Transactions of siblings collide at their parent.
#[tokio::test(flavor = "multi_thread")]
async fn siblings_take_exactly_the_limit_of_their_parent() {
    skip_without!(ENGINE);
    let options = options(ENGINE);
    let stores = [made(options.clone()).await, options.open().await.expect("the table is there")];
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
    assert_eq!(shows(&stores[0], "parent").await, Some((0, 20)));
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_first_draws_are_all_counted() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let others = made_again(&store).await;
    for round in 0..5 {
        let entity = format!("acme-{round}");
        let levels = own(&entity, 100);
        let draws: Vec<_> = (0..8).map(|_| draw_of(&levels, 1)).collect();
        let stores = [&store, &others];
        let answers =
            join_all(draws.iter().zip(0..).map(|(draw, number)| stores[number % 2].draw(draw)).collect());
        assert!(answers.await.iter().all(is_granted), "there is room for all of them");
        assert_eq!(shows(&store, &entity).await, Some((92, 8)));
    }
}

/// Another handle of the same table, which has seen nothing.
async fn made_again(store: &DynamoDb) -> DynamoDb {
    unswept(ENGINE).of_table(table_of(store)).open().await.expect("the table is there")
}
