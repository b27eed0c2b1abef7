//! An item is there for as long as a lease of it is open, wherever the lease itself is kept.
//!
//! A lease in an item of its own leaves no mark in its buckets, only their horizon. A bucket that rested while such a lease was
//! open was given seven times the time it takes to be full, and no more. Once the engine had removed it the horizon was gone:
//! the lease's draw, made again, was charged to a new bucket.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::{Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, Draw, DynamoDb, ManualWall, Renew, Store as _, Terms};

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

/// One who keeps leases in the buckets, and one who keeps them apart, on one table.
async fn both_kinds() -> (DynamoDb, DynamoDb, ManualWall) {
    let (clock, options) = (ManualWall::new(START), options(ENGINE));
    let options = options.clock(clock.clone());
    let marking = made(options.clone()).await;
    let apart = options.speculative(false).open().await.expect("the table is there");
    (marking, apart, clock)
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
async fn a_bucket_that_rests_outlives_the_leases_that_are_kept_apart_from_it() {
    skip_without!(ENGINE);
    let (marking, apart, clock) = both_kinds().await;
    let levels = shared(&["acme"]);
    let draw = draw_on(long(10), &levels, 1);
    granted(apart.draw(&draw).await);
    rests(&marking, &levels, &clock).await;
    assert!(expires(&marking, "acme").await >= seconds(11), "{}", expires(&marking, "acme").await);
    assert!(granted(apart.draw(&draw).await).is_repeat);
    // Once they are over it is forgotten as any other.
    clock.advance(DAY * 12);
    rests(&marking, &levels, &clock).await;
    let now = seconds(12) + 12 * 3_600;
    assert!(expires(&marking, "acme").await <= now + 86_400, "{}", expires(&marking, "acme").await);
}

#[tokio::test]
async fn a_bucket_that_begins_to_expire_outlives_them_too() {
    skip_without!(ENGINE);
    let (marking, apart, clock) = both_kinds().await;
    let draw: Draw = draw_on(long(10), &own("acme", 500), 1);
    granted(apart.draw(&draw).await);
    // Its limits are a resource's from now on.
    rests(&marking, &shared(&["acme"]), &clock).await;
    assert!(expires(&marking, "acme").await >= seconds(11), "{}", expires(&marking, "acme").await);
}

#[tokio::test]
async fn a_lease_that_is_renewed_takes_its_buckets_with_it_at_every_level_and_wherever_it_is_kept() {
    skip_without!(ENGINE);
    let (marking, apart, clock) = both_kinds().await;
    for (store, entities) in [(&apart, ["child-a", "parent-a"]), (&marking, ["child-b", "parent-b"])] {
        let begun = clock.now_secs();
        let levels = shared(&entities);
        let draw = draw_of(&levels, 1);
        granted(store.draw(&draw).await);
        for step in 1..=3 {
            clock.advance(Duration::from_secs(1_800));
            let (lease, levels) = (draw.lease, Arc::clone(&levels));
            let span = DAY;
            store.renew(&Renew { lease, step, levels, span }).await.expect("it is open");
        }
        rests(&marking, &levels, &clock).await;
        for entity in entities {
            let expires = expires(&marking, entity).await;
            assert!(expires >= begun + 49 * 3_600, "{entity}: {} hours", (expires - begun) / 3_600);
        }
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
