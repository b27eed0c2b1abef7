//! Tables of older versions, which kept some open leases in items of their own and marked the items of every level.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::cascade::Levels;
use tidegate_store::{Buckets as _, Draw, DynamoDb, DynamoDbOptions, ManualWall, Standing, Store as _};

use super::ENGINE;
use crate::kit::dynamodb::{START, made, unswept};
use crate::kit::dynamodb_items::{Hand, table_of};
use crate::kit::engine::skip_without;
use crate::kit::words::{cancel_of, draw_of, granted, levels, settle_of, shows, slow, used};

fn text(text: impl Into<String>) -> AttributeValue {
    AttributeValue::S(text.into())
}

fn number(number: u64) -> AttributeValue {
    AttributeValue::N(number.to_string())
}

/// A table with an open lease of five requests as an older version has left it, a handle of it that has seen nothing, and
/// the lease.
struct Older {
    store: DynamoDb,
    hand: Hand,
    clock: ManualWall,
    draw: Draw,
}

/// Where an older version has kept an open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// In an item of its own; its buckets have a horizon.
    Apart,
    /// In the items of every level.
    Marked,
}

fn both() -> Arc<Levels> {
    let limits = [slow(100)];
    levels(&[("child", &limits), ("parent", &limits)])
}

async fn older(layout: Layout) -> Older {
    let clock = ManualWall::new(START);
    let options: DynamoDbOptions = unswept(ENGINE).clock(clock.clone());
    let first = made(options.clone()).await;
    let (hand, draw) = (Hand::on(ENGINE, &first), draw_of(&both(), 5));
    granted(first.draw(&draw).await);
    let item = hand.item("child").await;
    let open = format!("o:{}", draw.lease);
    let mark = item[&open].as_s().expect("a text").clone();
    let (levels_name, levels) = item.iter().find(|(name, _)| name.starts_with("l:")).expect("its levels");
    let [own, due] = ["GSI1PK", "GSI1SK"].map(|name| item[name].clone());
    let parts: Vec<&str> = mark.split(' ').collect();
    match layout {
        Layout::Apart => {
            let mut parts = parts.clone();
            parts[6] = "-";
            hand.put(HashMap::from([
                ("PK".to_owned(), text(format!("LEASE#{}", draw.lease))),
                ("SK".to_owned(), text("#LEASE")),
                ("s".to_owned(), text(parts.join(" "))),
                ("l".to_owned(), levels.clone()),
                ("GSI1PK".to_owned(), own),
                ("GSI1SK".to_owned(), due),
            ]))
            .await;
            for name in [open.as_str(), levels_name, "O", "GSI1PK", "GSI1SK"] {
                hand.remove("child", name).await;
            }
            for entity in ["child", "parent"] {
                hand.set(entity, "h", number(draw.lease.millis())).await;
                hand.set(entity, "a", number(1_800_003_600)).await;
            }
        }
        Layout::Marked => {
            let mut parts = parts.clone();
            parts[0] = "1";
            hand.set("parent", &open, text(parts.join(" "))).await;
            hand.set("parent", levels_name, levels.clone()).await;
            hand.set("parent", "O", number(1)).await;
            hand.set("parent", "GSI1PK", text("DUE#1")).await;
            hand.set("parent", "GSI1SK", due).await;
            hand.set("parent", "x:00000000000000000000000000000007", number(7)).await;
        }
    }
    let store = options.of_table(table_of(&first)).open().await.expect("the table is there");
    Older { store, hand, clock, draw }
}

async fn expect(store: &DynamoDb, shown: (i64, i64), usage: u64, what: &str) {
    for entity in ["child", "parent"] {
        assert_eq!(shows(store, entity).await, Some(shown), "{what}: {entity}");
        assert_eq!(used(store, entity).await, usage, "{what}: usage of {entity}");
    }
}

#[tokio::test]
async fn old_lease_is_settled_and_counted_once() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let Older { store, hand, clock, draw } = older(layout).await;
        assert!(granted(store.draw(&draw).await).is_repeat, "{layout:?}");
        store.settle(&settle_of(&draw, 3)).await.expect("it is open");
        assert!(store.settle(&settle_of(&draw, 3)).await.expect("it has ended").is_repeat, "{layout:?}");
        expect(&store, (97, 3), 3, &format!("{layout:?}")).await;
        let left = hand.items("LEASE#").await;
        assert!(left.len() == 1 && !left[0].contains_key("l"), "{layout:?}: only a tombstone: {left:?}");
        assert!(store.draw(&draw).await.is_err(), "{layout:?}: it has ended");
        clock.advance(Duration::from_secs(7_200));
        assert_eq!(store.sweep(100).await.unwrap().settled, 0, "{layout:?}");
        expect(&store, (97, 3), 3, &format!("{layout:?}, swept")).await;
    }
}

#[tokio::test]
async fn old_lease_is_cancelled() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let Older { store, draw, .. } = older(layout).await;
        store.cancel(&cancel_of(&draw)).await.expect("it is open");
        expect(&store, (100, 0), 0, &format!("{layout:?}")).await;
    }
}

#[tokio::test]
async fn old_lease_is_found_by_its_id() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let Older { store, hand, draw, .. } = older(layout).await;
        let standing = store.lease(draw.lease).await.unwrap();
        assert!(matches!(&standing, Standing::Open(held) if held.levels.subject() == draw.levels.subject()));
        assert!(hand.items("LEASE#").await.is_empty(), "it is moved into its home");
        let item = hand.item("child").await;
        assert!(item.contains_key(&format!("o:{}", draw.lease)) && item["O"] == number(1), "{item:?}");
        store.settle(&settle_of(&draw, 5)).await.expect("it is open");
        expect(&store, (95, 5), 5, &format!("{layout:?}")).await;
    }
}

#[tokio::test]
async fn old_lease_expires_in_a_sweep() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let Older { store, hand, clock, draw } = older(layout).await;
        clock.advance(Duration::from_secs(3_601));
        assert_eq!(store.sweep(100).await.unwrap().settled, 1, "{layout:?}");
        expect(&store, (95, 5), 5, &format!("{layout:?}")).await;
        assert!(matches!(store.lease(draw.lease).await, Ok(Standing::Ended(_))), "{layout:?}");
        let parent = hand.item("parent").await;
        let is_left = |name: &&String| ["o:", "x:", "e:"].iter().any(|kind| name.starts_with(kind));
        assert_eq!(parent.keys().find(is_left), None, "{layout:?}: {parent:?}");
        if layout == Layout::Marked {
            assert_eq!(parent["O"], number(0));
            assert!(!parent.contains_key("GSI1PK"), "it is not due any more");
        }
    }
}

/// Each level had the mark of the end, with its own usage.
#[tokio::test]
async fn old_ends_are_counted_at_every_level() {
    skip_without!(ENGINE);
    let Older { store, hand, draw, .. } = older(Layout::Marked).await;
    store.settle(&settle_of(&draw, 3)).await.expect("it is open");
    let end = format!("e:{}", draw.lease);
    let item = hand.item("child").await;
    let mark = item[&end].as_s().unwrap().clone();
    let (own, _) = mark.split_once('#').expect("it names the parent");
    let parts: Vec<&str> = own.split(' ').collect();
    assert_eq!(parts[5], "1");
    let above = [&parts[..5], &["0", "rpm=3"]].concat().join(" ");
    hand.set("child", &end, text(own)).await;
    hand.remove("parent", &format!("o:{}", draw.lease)).await;
    hand.set("parent", &end, text(above)).await;
    hand.set("parent", "E", number(1)).await;
    hand.set("parent", "GSI1SK", item["GSI1SK"].clone()).await;
    expect(&store, (97, 3), 3, "both").await;
    assert!(store.settle(&settle_of(&draw, 3)).await.expect("it has ended").is_repeat);
    assert_eq!(hand.items("LEASE#").await.len(), 1);
}
