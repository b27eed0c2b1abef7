//! An item does not expire while a lease that drew from it is open, whether its own or a child's.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::{Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Buckets as _, DynamoDb, ManualWall, Renew, Store as _, Terms};

use super::ENGINE;
use crate::kit::common::{OPEN, draw_of, draw_on, granted, own, settle_of, subject};
use crate::kit::dynamodb::{START, open_new, options};
use crate::kit::engine::skip_without;

const DAY: Duration = Duration::from_secs(86_400);

/// Limits of a resource, so that their buckets expire.
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
    (open_new(options(ENGINE).clock(clock.clone())).await, clock)
}

/// Draws and settles a short lease, then sweeps until nothing is due.
async fn use_and_sweep(store: &DynamoDb, levels: &Arc<Levels>, clock: &ManualWall) {
    let draw = draw_of(levels, 1);
    granted(store.draw(&draw).await);
    store.settle(&settle_of(&draw, 1)).await.expect("the lease is open");
    for _ in 0..3 {
        clock.advance(Duration::from_secs(7_200));
        store.sweep(100).await.expect("the engine responds");
    }
}

async fn expires(store: &DynamoDb, entity: &str) -> u64 {
    store.expires_at(&subject(entity)).await.expect("the expiry is read").unwrap_or(u64::MAX)
}

fn long_terms(days: u32) -> Terms {
    Terms { deadline: DAY * days, ..OPEN }
}

fn seconds(days: u64) -> u64 {
    1_800_000_000 + days * 86_400
}

#[tokio::test]
async fn parent_outlives_leases_of_its_children() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    let draw = draw_on(long_terms(10), &shared(&["child", "parent"]), 1);
    granted(store.draw(&draw).await);
    // A short lease of the parent itself.
    use_and_sweep(&store, &shared(&["parent"]), &clock).await;
    for entity in ["child", "parent"] {
        assert!(expires(&store, entity).await >= seconds(11), "{entity}: {}", expires(&store, entity).await);
    }
    assert!(granted(store.draw(&draw).await).is_repeat);
    store.settle(&settle_of(&draw, 1)).await.expect("the lease is open");
}

/// The bucket did not expire before, because its limits were the entity's own.
#[tokio::test]
async fn bucket_that_begins_to_expire_keeps_its_leases() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    granted(store.draw(&draw_on(long_terms(10), &own("acme", 500), 1)).await);
    use_and_sweep(&store, &shared(&["acme"]), &clock).await;
    assert!(expires(&store, "acme").await >= seconds(11), "{}", expires(&store, "acme").await);
}

#[tokio::test]
async fn renewal_extends_every_level() {
    skip_without!(ENGINE);
    let (store, clock) = store().await;
    let levels = shared(&["child", "parent"]);
    let start = clock.now_secs();
    let draw = draw_of(&levels, 1);
    granted(store.draw(&draw).await);
    for step in 1..=3 {
        clock.advance(Duration::from_secs(1_800));
        let (lease, levels) = (draw.lease, Arc::clone(&levels));
        store.renew(&Renew { lease, step, levels, span: DAY }).await.expect("the lease is open");
    }
    use_and_sweep(&store, &levels, &clock).await;
    for entity in ["child", "parent"] {
        let expires = expires(&store, entity).await;
        // The lease ends after 25.5 hours; without renewals the item would expire after 25.
        assert!(expires >= start + 40 * 3_600, "{entity}: {} hours", (expires - start) / 3_600);
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
