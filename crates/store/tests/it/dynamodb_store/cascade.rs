//! Several levels, first uses that race, and what is taken back where one of them refuses.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, Draw, Drawn, ManualWall, Terms};

use super::ENGINE;
use crate::kit::dynamodb::{START, TORN_AFTER, made, unswept};
use crate::kit::dynamodb_items::{Hand, table_of};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::skip_without;
use crate::kit::words::{
    OPEN, adjust_of, draw_of, draw_on, granted, is_granted, join_all, levels, next_lease, own, settle_of,
    shows, slow, until_answered,
};

async fn store() -> (Proxy, tidegate_store::DynamoDb) {
    let proxy = Proxy::new(ENGINE).await;
    let store = made(unswept(ENGINE).endpoint(proxy.url())).await;
    (proxy, store)
}

#[tokio::test]
async fn short_child_returns_units_to_parent() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let (child, parent) = ([slow(3)], [slow(100)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    // What this process saw last has enough for it, and what is there has not.
    let others = made_again(&store).await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    granted(others.draw(&draw_of(&own("child", 3), 2)).await);
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(Drawn::Refused(_))));
    assert_eq!(shows(&store, "child").await, Some((0, 3)));
    assert_eq!(shows(&store, "parent").await, Some((99, 1)), "what was taken of it is given back");
}

#[tokio::test]
async fn short_parent_refuses_and_returns_units_to_child() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let (child, parent) = ([slow(100)], [slow(3)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    let others = made_again(&store).await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    granted(others.draw(&draw_of(&own("parent", 3), 2)).await);
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(Drawn::Refused(_))));
    assert_eq!(shows(&store, "child").await, Some((99, 1)), "what was taken of it is given back");
    assert_eq!(shows(&store, "parent").await, Some((0, 3)));
}

#[tokio::test]
async fn short_child_and_parent_write_nothing_back() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let limits = [slow(3)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let others = made_again(&store).await;
    granted(store.draw(&draw_of(&levels, 1)).await);
    for entity in ["child", "parent"] {
        granted(others.draw(&draw_of(&own(entity, 3), 2)).await);
    }
    proxy.asked();
    assert!(matches!(store.draw(&draw_of(&levels, 1)).await, Ok(Drawn::Refused(_))));
    assert_eq!(proxy.asked(), ["UpdateItem", "UpdateItem"]);
    for entity in ["child", "parent"] {
        assert_eq!(shows(&store, entity).await, Some((0, 3)), "{entity}");
    }
}

#[tokio::test]
async fn what_is_taken_back_leaves_no_word_unless_a_write_may_still_come() {
    skip_without!(ENGINE);
    let (proxy, store) = store().await;
    let (child, parent) = ([slow(1_000)], [slow(100)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    let others = made_again(&store).await;
    let hand = Hand::on(ENGINE, &store);
    let words = async || hand.item("child").await.into_keys().filter(|name| name.starts_with("x:")).count();
    granted(store.draw(&draw_of(&levels, 1)).await);
    for round in 1..=20 {
        // What this process saw last has as many as are left, and of these others take one.
        granted(others.draw(&draw_of(&own("parent", 100), 1)).await);
        let answer = store.draw(&draw_of(&levels, 100 - round)).await;
        assert!(matches!(answer, Ok(Drawn::Refused(_))), "{round}: {answer:?}");
        assert_eq!(shows(&store, "child").await, Some((999, 1)), "{round}");
        assert_eq!(words().await, 0, "{round}");
    }
    granted(others.draw(&draw_of(&own("parent", 100), 1)).await);
    let mut broken = 2;
    proxy.plan(move |_| {
        broken -= 1;
        if broken >= 0 { Fault::Refused("InternalServerError") } else { Fault::None }
    });
    assert!(matches!(store.draw(&draw_of(&levels, 79)).await, Ok(Drawn::Refused(_))));
    assert_eq!(shows(&store, "child").await, Some((999, 1)));
    assert_eq!(words().await, 1, "nobody can tell what becomes of the first two");
}

#[tokio::test]
async fn an_item_that_is_gone_since_is_made_whole_by_a_draw_that_asks_nothing_of_it() {
    skip_without!(ENGINE);
    let (_proxy, store) = store().await;
    let (child, parent) = ([slow(100)], [Limit::per_day("tpm", 1).burst(10)]);
    let levels = levels(&[("child", &child), ("parent", &parent)]);
    let hand = Hand::on(ENGINE, &store);
    granted(store.draw(&draw_of(&levels, 1)).await);
    let made = hand.item("parent").await;
    hand.delete("parent").await;
    // Due before the first one: nothing else of the item is compared with what was seen.
    let sooner = Terms { deadline: Duration::from_secs(300), ..OPEN };
    granted(store.draw(&draw_on(sooner, &levels, 1)).await);
    let anew = hand.item("parent").await;
    let is_mark = |name: &&String| name.starts_with("o:");
    for name in made.keys().filter(|name| !is_mark(name)) {
        assert!(anew.contains_key(name), "{name} of {anew:?}");
    }
    assert_eq!(anew.keys().filter(is_mark).count(), 1);
}

#[tokio::test]
async fn a_step_that_leaves_a_level_alone_does_not_hide_what_others_write_there() {
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
async fn an_error_at_one_level_leaves_nothing_taken_at_the_others() {
    skip_without!(ENGINE);
    let text = |text: &str| AttributeValue::S(text.to_owned());
    // One that the engine does not write, and one that is not as it was seen and cannot be read.
    let spoilt = [vec![("c:rpm", text("many"))], vec![("R", text("other")), ("o:nobody", text("?"))]];
    for (number, spoilt) in spoilt.iter().enumerate() {
        // Where the child's answer is lost, it is taken back as well.
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
            assert_eq!(shows(&store, "child").await, Some((99, 1)), "{number}, {lost} answers lost");
            let marks = hand.item("child").await.into_keys().filter(|name| name.starts_with("o:")).count();
            assert_eq!(marks, 1, "{number}, {lost} answers lost: that of the first lease");
        }
    }
}

#[tokio::test]
async fn a_draw_whose_process_died_between_two_levels_is_made_again_by_whoever_repeats_it() {
    skip_without!(ENGINE);
    let (clock, options) = (ManualWall::new(START), unswept(ENGINE));
    let options = options.clock(clock.clone());
    let (store, others) =
        (made(options.clone()).await, options.clone().open().await.expect("the table is there"));
    let hasty = options.timeout(Duration::from_secs(1));
    let hasty = until_answered(|| hasty.clone().open()).await.expect("the table is there");
    let hand = Hand::on(ENGINE, &store);
    let limits = [slow(100)];
    for (gone, left) in [("parent", "child"), ("child", "parent")] {
        let levels = levels(&[("child", &limits), ("parent", &limits)]);
        let draw = draw_of(&levels, 5);
        granted(store.draw(&draw).await);
        // As if it had never come to the other one, which others have used since.
        hand.delete(gone).await;
        granted(store.draw(&draw_of(&own(gone, 100), 1)).await);
        let early = hasty.draw(&draw).await;
        if gone == "parent" {
            let is_away = early.as_ref().is_err_and(tidegate_store::StoreError::is_transient);
            assert!(is_away, "whoever draws it may be at it still: {early:?}");
        }
        clock.advance(TORN_AFTER);
        granted(others.draw(&draw).await);
        for (entity, other) in [(gone, 1), (left, 0)] {
            let expected = Some((95 - other, 5 + other));
            assert_eq!(shows(&store, entity).await, expected, "{entity} where {gone} was gone");
        }
        assert!(granted(store.draw(&draw).await).is_repeat);
        others.settle(&settle_of(&draw, 3)).await.expect("it is open");
        for (entity, other) in [(gone, 1), (left, 0)] {
            let expected = Some((97 - other, 3 + other));
            assert_eq!(shows(&store, entity).await, expected, "{entity} where {gone} was gone");
            hand.delete(entity).await;
        }
        clock.advance(Duration::from_secs(1_200));
    }
}

#[tokio::test]
async fn what_an_earlier_attempt_has_taken_above_does_not_refuse_the_next() {
    skip_without!(ENGINE);
    let clock = ManualWall::new(START);
    // What is refused is refused by what is there.
    let options = unswept(ENGINE).clock(clock.clone()).rejections(Duration::ZERO);
    let (store, others) =
        (made(options.clone()).await, options.clone().open().await.expect("the table is there"));
    let hasty = options.clone().timeout(Duration::from_secs(1));
    let hasty = until_answered(|| hasty.clone().open()).await.expect("the table is there");
    let apart = options.speculative(false).open().await.expect("the table is there");
    let limits = [slow(100)];
    for others in [&others, &apart] {
        let levels = levels(&[("child", &limits), ("parent", &limits)]);
        let draw = draw_of(&levels, 60);
        granted(store.draw(&draw).await);
        // It never came to its own level, which others have used since.
        let hand = Hand::on(ENGINE, &store);
        hand.delete("child").await;
        granted(store.draw(&draw_of(&own("child", 100), 1)).await);
        clock.advance(Duration::from_secs(1));
        let early = hasty.draw(&draw).await;
        assert!(early.as_ref().is_err_and(tidegate_store::StoreError::is_transient), "{early:?}");
        clock.advance(TORN_AFTER);
        granted(others.draw(&draw).await);
        assert_eq!(shows(others, "child").await, Some((39, 61)));
        assert_eq!(shows(others, "parent").await, Some((40, 60)));
        for entity in ["child", "parent"] {
            hand.delete(entity).await;
        }
        clock.advance(Duration::from_secs(1_200));
    }
}

#[tokio::test]
async fn a_draw_that_was_torn_and_is_refused_now_leaves_nothing_taken() {
    skip_without!(ENGINE);
    let (clock, options) = (ManualWall::new(START), unswept(ENGINE));
    let options = options.clock(clock.clone());
    let (store, others) = (made(options.clone()).await, options.open().await.expect("the table is there"));
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    let draw = draw_of(&levels, 5);
    granted(store.draw(&draw).await);
    Hand::on(ENGINE, &store).delete("parent").await;
    granted(store.draw(&draw_of(&own("parent", 100), 99)).await);
    clock.advance(TORN_AFTER);
    assert!(matches!(others.draw(&draw).await, Ok(Drawn::Refused(_))));
    assert_eq!(shows(&others, "child").await, Some((100, 0)));
    assert_eq!(shows(&others, "parent").await, Some((1, 99)));
}

#[tokio::test]
async fn a_cascade_that_did_not_hear_of_its_own_level_goes_on_with_the_other_at_once() {
    skip_without!(ENGINE);
    let limits = [slow(100)];
    let levels = levels(&[("child", &limits), ("parent", &limits)]);
    // Which of both is sent first is nobody's to say.
    for lost in [0, 1] {
        let (proxy, store) = store().await;
        granted(store.draw(&draw_of(&levels, 60)).await);
        proxy.asked();
        let mut number = 0;
        proxy.plan(move |_| {
            number += 1;
            match number - 1 {
                place if place == lost => Fault::Lost,
                0 | 1 => Fault::Refused("ThrottlingException"),
                _ => Fault::None,
            }
        });
        let draw = draw_of(&levels, 30);
        assert!(!granted(store.draw(&draw).await).is_repeat);
        let asked = proxy.asked();
        assert!(asked.len() <= 8, "{lost}: {asked:?}");
        for entity in ["child", "parent"] {
            assert_eq!(shows(&store, entity).await, Some((10, 90)), "{lost}: {entity}");
        }
        store.settle(&settle_of(&draw, 20)).await.expect("it is open");
        assert_eq!(shows(&store, "child").await, Some((20, 80)));
    }
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
async fn made_again(store: &tidegate_store::DynamoDb) -> tidegate_store::DynamoDb {
    unswept(ENGINE).of_table(table_of(store)).open().await.expect("the table is there")
}
