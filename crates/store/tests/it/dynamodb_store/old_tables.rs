//! Tables of older versions, which kept some open leases in separate items and marked the items of every
//! level.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::cascade::Levels;
use tidegate_store::{Buckets as _, Draw, DynamoDb, DynamoDbOptions, LeaseStatus, ManualWall, Store as _};

use super::ENGINE;
use crate::kit::common::{balance, cancel_of, draw_of, granted, levels, settle_of, slow, used};
use crate::kit::dynamodb::{START, open_new, unswept};
use crate::kit::dynamodb_items::{RawTable, table_of};
use crate::kit::engine::skip_without;

fn text(text: impl Into<String>) -> AttributeValue {
    AttributeValue::S(text.into())
}

fn number(number: u64) -> AttributeValue {
    AttributeValue::N(number.to_string())
}

/// A table with an open lease of five requests as an older version left it, and a handle with an empty cache.
struct OldTable {
    store: DynamoDb,
    raw: RawTable,
    clock: ManualWall,
    draw: Draw,
}

/// Where an older version kept an open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// In a separate item; its buckets have a horizon.
    Apart,
    /// As marks in the items of every level.
    Marked,
}

fn both() -> Arc<Levels> {
    let limits = [slow(100)];
    levels(&[("child", &limits), ("parent", &limits)])
}

async fn old_table(layout: Layout) -> OldTable {
    let clock = ManualWall::new(START);
    let options: DynamoDbOptions = unswept(ENGINE).clock(clock.clone());
    let first = open_new(options.clone()).await;
    let (raw, draw) = (RawTable::on(ENGINE, &first), draw_of(&both(), 5));
    granted(first.draw(&draw).await);
    let item = raw.item("child").await;
    let open = format!("o:{}", draw.lease);
    let mark = item[&open].as_s().expect("a text").clone();
    let (levels_name, levels) = item.iter().find(|(name, _)| name.starts_with("l:")).expect("its levels");
    let [own, due] = ["GSI1PK", "GSI1SK"].map(|name| item[name].clone());
    let parts: Vec<&str> = mark.split(' ').collect();
    match layout {
        Layout::Apart => {
            let mut parts = parts.clone();
            parts[6] = "-";
            raw.put(HashMap::from([
                ("PK".to_owned(), text(format!("LEASE#{}", draw.lease))),
                ("SK".to_owned(), text("#LEASE")),
                ("s".to_owned(), text(parts.join(" "))),
                ("l".to_owned(), levels.clone()),
                ("GSI1PK".to_owned(), own),
                ("GSI1SK".to_owned(), due),
            ]))
            .await;
            for name in [open.as_str(), levels_name, "O", "GSI1PK", "GSI1SK"] {
                raw.remove("child", name).await;
            }
            for entity in ["child", "parent"] {
                raw.set(entity, "h", number(draw.lease.millis())).await;
                raw.set(entity, "a", number(1_800_003_600)).await;
            }
        }
        Layout::Marked => {
            let mut parts = parts.clone();
            parts[0] = "1";
            raw.set("parent", &open, text(parts.join(" "))).await;
            raw.set("parent", levels_name, levels.clone()).await;
            raw.set("parent", "O", number(1)).await;
            raw.set("parent", "GSI1PK", text("DUE#1")).await;
            raw.set("parent", "GSI1SK", due).await;
            raw.set("parent", "x:00000000000000000000000000000007", number(7)).await;
        }
    }
    let store = options.of_table(table_of(&first)).open().await.expect("the table exists");
    OldTable { store, raw, clock, draw }
}

async fn expect(store: &DynamoDb, shown: (i64, i64), usage: u64, what: &str) {
    for entity in ["child", "parent"] {
        assert_eq!(balance(store, entity).await, Some(shown), "{what}: {entity}");
        assert_eq!(used(store, entity).await, usage, "{what}: usage of {entity}");
    }
}

#[tokio::test]
async fn old_lease_is_settled_and_counted_once() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let OldTable { store, raw, clock, draw } = old_table(layout).await;
        assert!(granted(store.draw(&draw).await).is_repeat, "{layout:?}");
        store.settle(&settle_of(&draw, 3)).await.expect("the lease is open");
        assert!(
            store.settle(&settle_of(&draw, 3)).await.expect("the lease has ended").is_repeat,
            "{layout:?}"
        );
        expect(&store, (97, 3), 3, &format!("{layout:?}")).await;
        let left = raw.items("LEASE#").await;
        assert!(
            left.len() == 1 && !left[0].contains_key("l"),
            "{layout:?}: only a tombstone is left: {left:?}"
        );
        assert!(store.draw(&draw).await.is_err(), "{layout:?}: the lease has ended");
        clock.advance(Duration::from_secs(7_200));
        assert_eq!(store.sweep(100).await.unwrap().settled, 0, "{layout:?}");
        expect(&store, (97, 3), 3, &format!("{layout:?}, swept")).await;
    }
}

#[tokio::test]
async fn old_lease_is_cancelled() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let OldTable { store, draw, .. } = old_table(layout).await;
        store.cancel(&cancel_of(&draw)).await.expect("the lease is open");
        expect(&store, (100, 0), 0, &format!("{layout:?}")).await;
    }
}

#[tokio::test]
async fn old_lease_is_found_by_its_id() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let OldTable { store, raw, draw, .. } = old_table(layout).await;
        let standing = store.lease(draw.lease).await.unwrap();
        assert!(
            matches!(&standing, LeaseStatus::Open(held) if held.levels.subject() == draw.levels.subject())
        );
        assert!(raw.items("LEASE#").await.is_empty(), "the lease is moved into its home item");
        let item = raw.item("child").await;
        assert!(item.contains_key(&format!("o:{}", draw.lease)) && item["O"] == number(1), "{item:?}");
        store.settle(&settle_of(&draw, 5)).await.expect("the lease is open");
        expect(&store, (95, 5), 5, &format!("{layout:?}")).await;
    }
}

#[tokio::test]
async fn old_lease_expires_in_a_sweep() {
    skip_without!(ENGINE);
    for layout in [Layout::Apart, Layout::Marked] {
        let OldTable { store, raw, clock, draw } = old_table(layout).await;
        clock.advance(Duration::from_secs(3_601));
        assert_eq!(store.sweep(100).await.unwrap().settled, 1, "{layout:?}");
        expect(&store, (95, 5), 5, &format!("{layout:?}")).await;
        assert!(matches!(store.lease(draw.lease).await, Ok(LeaseStatus::Ended(_))), "{layout:?}");
        let parent = raw.item("parent").await;
        let is_left = |name: &&String| ["o:", "x:", "e:"].iter().any(|kind| name.starts_with(kind));
        assert_eq!(parent.keys().find(is_left), None, "{layout:?}: {parent:?}");
        if layout == Layout::Marked {
            assert_eq!(parent["O"], number(0));
            assert!(!parent.contains_key("GSI1PK"), "the item is no longer due");
        }
    }
}

/// Each level has the mark of the end, with its own usage.
#[tokio::test]
async fn old_ends_are_counted_at_every_level() {
    skip_without!(ENGINE);
    let OldTable { store, raw, draw, .. } = old_table(Layout::Marked).await;
    store.settle(&settle_of(&draw, 3)).await.expect("the lease is open");
    let end = format!("e:{}", draw.lease);
    let item = raw.item("child").await;
    let mark = item[&end].as_s().unwrap().clone();
    let (own, _) = mark.split_once('#').expect("the mark names the parent");
    let parts: Vec<&str> = own.split(' ').collect();
    assert_eq!(parts[5], "1");
    let above = [&parts[..5], &["0", "rpm=3"]].concat().join(" ");
    raw.set("child", &end, text(own)).await;
    raw.remove("parent", &format!("o:{}", draw.lease)).await;
    raw.set("parent", &end, text(above)).await;
    raw.set("parent", "E", number(1)).await;
    raw.set("parent", "GSI1SK", item["GSI1SK"].clone()).await;
    expect(&store, (97, 3), 3, "both").await;
    assert!(store.settle(&settle_of(&draw, 3)).await.expect("the lease has ended").is_repeat);
    assert_eq!(raw.items("LEASE#").await.len(), 1);
}
