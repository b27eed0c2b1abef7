//! The items in the table: one per subject, and when each may expire.

use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::{Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{
    Adjust, Buckets as _, Draw, DrawResult, DynamoDb, ManualWall, Settle, Store as _, WallClock as _,
};

use super::ENGINE;
use crate::kit::common::{
    adjust_of, balance, cancel_of, draw_of, granted, levels, levels_of_version, own, settle_of, slow,
    subject, used,
};
use crate::kit::dynamodb::{START, open_new, unswept};
use crate::kit::dynamodb_items::RawTable;
use crate::kit::engine::skip_without;

/// Limits of a resource, not of the entity itself.
fn shared(limit: Limit) -> std::sync::Arc<Levels> {
    all_shared([limit])
}

fn all_shared(limits: impl IntoIterator<Item = Limit>) -> std::sync::Arc<Levels> {
    let (subject, policy) = (subject("acme"), Policy::new(limits).expect("a valid policy"));
    let resolved = resolve(&subject, [None, None, Some(&policy), None], &Policy::default());
    // Debts as large as a test wants.
    std::sync::Arc::new(Levels::new(Version::ZERO, vec![(subject, resolved)]).with_debt_max(|_, _| None))
}

async fn store() -> (DynamoDb, ManualWall) {
    let clock = ManualWall::new(START);
    (open_new(unswept(ENGINE).clock(clock.clone())).await, clock)
}

#[tokio::test]
async fn idle_item_expires_after_seven_refills() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    let expires = async || store.expires_at(&subject("acme")).await.unwrap();
    // A day beyond the deadline of a lease, or seven times the refill time.
    let (fast, slow) = (shared(Limit::per_minute("rpm", 100)), shared(Limit::per_hour("rpm", 10).burst(100)));
    for (levels, lives) in [(fast, 25 * 3_600), (slow, 70 * 3_600)] {
        let begun = 1_800_000_000 + clock.now().since(START).as_secs();
        let draw = draw_of(&levels, 1);
        granted(store.draw(&draw).await);
        assert_eq!(expires().await, Some(begun + lives));
        store.settle(&settle_of(&draw, 1)).await.unwrap();
        clock.advance(Duration::from_secs(7_200));
        store.sweep(100).await.unwrap();
        assert_eq!(expires().await, Some(begun + lives), "no use, no change");
        let item = RawTable::on(ENGINE, &store).item("acme").await;
        assert!(!item.contains_key("GSI1PK"), "the item is no longer due: {item:?}");
    }
    assert_eq!(used(&store, "acme").await, 2);
    granted(store.draw(&draw_of(&own("acme", 500), 1)).await);
    assert_eq!(expires().await, None, "own limits disable expiry");
}

#[tokio::test]
async fn debts_of_two_limits_extend_their_item() {
    skip_without!(ENGINE);
    let (store, _) = store().await;
    let levels = all_shared([Limit::per_minute("rpm", 100), Limit::per_minute("tpm", 1_000)]);
    let hours = |hours: u64| [("rpm", hours * 6_000), ("tpm", 2 * hours * 60_000)];
    let expires = async || store.expires_at(&subject("acme")).await.unwrap().unwrap() - 1_800_000_000;
    for is_adjusted in [true, false] {
        let units = levels.amounts(&[("rpm", 1), ("tpm", 1)]).unwrap();
        let draw = Draw { units, ..draw_of(&levels, 1) };
        let before = balance(&store, "acme").await.map_or(0, |(_, consumed)| consumed);
        if is_adjusted {
            granted(store.draw(&draw).await);
            let deltas = hours(48).map(|(name, units)| (name, i64::try_from(units).unwrap()));
            let deltas = levels.deltas(&deltas).unwrap();
            let adjust = Adjust { lease: draw.lease, step: 1, levels: draw.levels.clone(), deltas };
            store.adjust(&adjust).await.unwrap();
            assert!(expires().await > 96 * 3_600, "as long as the slower one of them takes");
            store.cancel(&cancel_of(&draw)).await.unwrap();
            assert_eq!(balance(&store, "acme").await, Some((100, before)));
        } else {
            granted(store.draw(&draw).await);
            let actual = levels.amounts(&hours(200)).unwrap();
            let settle = Settle { actual, ..settle_of(&draw, 1) };
            store.settle(&settle).await.unwrap();
            assert!(expires().await > 400 * 3_600, "as long as the slower one of them takes");
            assert_eq!(balance(&store, "acme").await.unwrap().1, before + 200 * 6_000);
        }
    }
}

#[tokio::test]
async fn debt_up_to_the_last_second_is_written() {
    skip_without!(ENGINE);
    let (store, _) = store().await;
    let draw = draw_of(&shared(Limit::per_second("rpm", 10)), 1);
    granted(store.draw(&draw).await);
    assert_eq!(store.expires_at(&subject("acme")).await.unwrap(), Some(1_800_000_000 + 25 * 3_600));
    // Debt up to half a second and an hour before the expiry.
    store.adjust(&adjust_of(&draw, 1, 24 * 36_000 + 4)).await.unwrap();
    assert_eq!(balance(&store, "acme").await.unwrap().1, 24 * 36_000 + 5);
}

#[tokio::test]
async fn return_under_a_slower_rule_fills_the_bucket() {
    skip_without!(ENGINE);
    let (store, _) = store().await;
    let of = |version, limit| levels_of_version(version, &[("acme", &[limit])]);
    let large = draw_of(&of(1, Limit::per_minute("rpm", 30_000)), 30_000);
    granted(store.draw(&large).await);
    let slow = of(2, Limit::per_day("rpm", 1));
    assert!(
        matches!(store.draw(&draw_of(&slow, 1)).await, Ok(DrawResult::Refused(_))),
        "the slower rule is written"
    );
    // A return that takes eighty years to refill.
    store.cancel(&cancel_of(&large)).await.unwrap();
    assert_eq!(balance(&store, "acme").await, Some((1, 0)));
    let text = RawTable::on(ENGINE, &store).item("acme").await["f:rpm"].as_n().cloned().unwrap();
    assert!(text.starts_with('-'), "the test needs a negative part: {text}");
    // A changed rule is written conditionally on the state that was read.
    let other = of(3, Limit::per_day("rpm", 2));
    let draw = draw_of(&other, 1);
    granted(store.draw(&draw).await);
    assert_eq!(balance(&store, "acme").await.unwrap().1, 1);
    store.settle(&settle_of(&draw, 1)).await.unwrap();
}

/// Each process has cached the bucket from before the other one settled.
#[tokio::test]
async fn bound_of_debt_holds_for_two_processes() {
    skip_without!(ENGINE);
    let options = unswept(ENGINE);
    let stores = [open_new(options.clone()).await, options.open().await.expect("the table exists")];
    let limits = [slow(100)];
    let two = levels(&[("child", &limits), ("parent", &limits)]);
    for levels in [own("acme", 100), two] {
        let bounded = std::sync::Arc::new(Levels::clone(&levels).with_debt_max(|_, _| Some(50)));
        let draws = [0, 1].map(|_| draw_of(&bounded, 10));
        for (store, draw) in stores.iter().zip(&draws) {
            granted(store.draw(draw).await);
        }
        for (store, draw) in stores.iter().zip(&draws) {
            store.settle(&settle_of(draw, 120)).await.expect("the lease is open");
        }
        for level in levels.levels() {
            let entity = level.subject.entity.as_str();
            assert_eq!(balance(&stores[0], entity).await, Some((-50, 150)), "{entity}");
            assert_eq!(used(&stores[0], entity).await, 240, "{entity}");
        }
    }
}

#[tokio::test]
async fn item_with_own_limits_does_not_expire() {
    skip_without!(ENGINE);
    let (store, _) = store().await;
    granted(store.draw(&draw_of(&own("acme", 500), 1)).await);
    assert_eq!(store.expires_at(&subject("acme")).await.unwrap(), None);
    granted(store.draw(&draw_of(&shared(Limit::per_minute("rpm", 100)), 1)).await);
    assert!(store.expires_at(&subject("acme")).await.unwrap().is_some(), "expiry is enabled");
    granted(store.draw(&draw_of(&own("acme", 500), 1)).await);
    assert_eq!(store.expires_at(&subject("acme")).await.unwrap(), None);
}

#[tokio::test]
async fn hundred_open_leases_are_known_by_their_marks() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    let levels = own("acme", 1_000);
    let draws: Vec<_> = (0..100).map(|_| draw_of(&levels, 1)).collect();
    for draw in &draws {
        granted(store.draw(draw).await);
    }
    assert_eq!(balance(&store, "acme").await, Some((900, 100)));
    for draw in &draws {
        assert!(granted(store.draw(draw).await).is_repeat, "a repeated draw is recognized");
        store.settle(&settle_of(draw, 2)).await.unwrap();
        assert!(
            store.settle(&settle_of(draw, 2)).await.unwrap().is_repeat,
            "a repeated settle is recognized"
        );
    }
    assert_eq!(balance(&store, "acme").await, Some((800, 200)));
    assert_eq!(used(&store, "acme").await, 200);
    clock.advance(Duration::from_secs(60));
    for draw in &draws {
        assert!(store.draw(draw).await.is_err(), "a late draw is refused");
    }
    assert_eq!(balance(&store, "acme").await, Some((800, 200)));
}
