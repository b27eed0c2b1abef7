//! An item lives for as long as a lease is open that drew from it, its own or a child's.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::{Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, DynamoDb, ManualWall, Renew, Store as _, Terms};

use super::ENGINE;
use crate::kit::dynamodb::{START, made, options};
use crate::kit::engine::skip_without;
use crate::kit::words::{OPEN, draw_of, draw_on, granted, own, settle_of, subject};

const DAY: Duration = Duration::from_secs(86_400);

/// Limits that are a resource's, so that what they are kept in expires.
fn shared(entities: &[&str]) -> Arc<Levels> {
    let policy = Policy::new([Limit::per_minute("rpm", 100)]).expect("a valid policy");
    let row = |entity: &&str| {
        let subject = subject(entity);
        let resolved = resolve(&subject, [None, None, Some(&policy), None], &Policy::default());
        (subject, resolved)
    };
    Arc::new(Levels::new(Version::ZERO, entities.iter().map(row).collect()))
}

async fn store() -> (DynamoDb, ManualWall) {
    let clock = ManualWall::new(START);
    (made(options(ENGINE).clock(clock.clone())).await, clock)
}

/// A short lease comes and goes, and its bucket is looked after until there is nothing to look at.
async fn rests(store: &DynamoDb, levels: &Arc<Levels>, clock: &ManualWall) {
    let draw = draw_of(levels, 1);
    granted(store.draw(&draw).await);
    store.settle(&settle_of(&draw, 1)).await.expect("it is open");
    for _ in 0..3 {
        clock.advance(Duration::from_secs(7_200));
        store.sweep(100).await.expect("the engine is there");
    }
}

async fn expires(store: &DynamoDb, entity: &str) -> u64 {
    store.expires_at(&subject(entity)).await.expect("it is read").unwrap_or(u64::MAX)
}

fn long(days: u32) -> Terms {
    Terms { deadline: DAY * days, ..OPEN }
}

fn seconds(days: u64) -> u64 {
    1_800_000_000 + days * 86_400
}

#[tokio::test]
async fn parent_outlives_leases_of_its_children() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    let draw = draw_on(long(10), &shared(&["child", "parent"]), 1);
    granted(store.draw(&draw).await);
    // A short lease of the parent's own.
    rests(&store, &shared(&["parent"]), &clock).await;
    for entity in ["child", "parent"] {
        assert!(expires(&store, entity).await >= seconds(11), "{entity}: {}", expires(&store, entity).await);
    }
    assert!(granted(store.draw(&draw).await).is_repeat);
    store.settle(&settle_of(&draw, 1)).await.expect("it is open");
}

/// Its limits were its entity's own before, so that it did not expire.
#[tokio::test]
async fn bucket_that_begins_to_expire_keeps_its_leases() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    granted(store.draw(&draw_on(long(10), &own("acme", 500), 1)).await);
    rests(&store, &shared(&["acme"]), &clock).await;
    assert!(expires(&store, "acme").await >= seconds(11), "{}", expires(&store, "acme").await);
}

#[tokio::test]
async fn renewal_extends_every_level() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    let levels = shared(&["child", "parent"]);
    let begun = clock.now_secs();
    let draw = draw_of(&levels, 1);
    granted(store.draw(&draw).await);
    for step in 1..=3 {
        clock.advance(Duration::from_secs(1_800));
        let (lease, levels) = (draw.lease, Arc::clone(&levels));
        store.renew(&Renew { lease, step, levels, span: DAY }).await.expect("it is open");
    }
    rests(&store, &levels, &clock).await;
    for entity in ["child", "parent"] {
        let expires = expires(&store, entity).await;
        // The lease ends after 25.5 hours; without its renewals the item would expire after 25.
        assert!(expires >= begun + 40 * 3_600, "{entity}: {} hours", (expires - begun) / 3_600);
    }
}

trait Seconds {
    fn now_secs(&self) -> u64;
}

impl Seconds for ManualWall {
    fn now_secs(&self) -> u64 {
        use tidegate_store::WallClock as _;
        self.now().as_micros() / 1_000_000
    }
}
