//! Idle subjects are evicted from the tables.

use tidegate_store::{Buckets as _, ManualWall, Postgres, Store as _};

use crate::kit::common::{START, cancel_of, draw_of, granted, own};
use crate::kit::engine::{POSTGRES, skip_without, unique};
use crate::kit::eviction;
use crate::kit::postgres::{open, options_at, outside, url};

async fn store(schema: &str) -> (ManualWall, Postgres) {
    let clock = ManualWall::new(START);
    let options = options_at(url()).schema(schema).connections(4).clock(clock.clone());
    (clock, open(options.retention(eviction::SHORT_RETENTION)).await)
}

#[tokio::test]
async fn idle_subjects_are_evicted() {
    skip_without!(POSTGRES);
    eviction::evicts_idle_subjects(&store(&unique("t")).await.1).await;
}

#[tokio::test]
async fn subjects_in_use_are_kept() {
    skip_without!(POSTGRES);
    let (clock, store) = store(&unique("t")).await;
    eviction::keeps_subjects_in_use(&store, &clock).await;
}

#[tokio::test]
async fn new_rules_keep_subjects_for_ten_minutes() {
    skip_without!(POSTGRES);
    let (clock, store) = store(&unique("t")).await;
    eviction::keeps_new_rules_for_ten_minutes(&store, &clock).await;
}

/// A lease that was open during the upgrade has no record of what it holds.
#[tokio::test]
async fn leases_from_before_the_upgrade_keep_all() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let (_, first) = store(&schema).await;
    let held = draw_of(&own("held", 10), 1);
    granted(first.draw(&held).await);
    first.close();
    let outside = outside(&url()).await;
    let undo = format!(
        "ALTER TABLE {schema}.meters DROP COLUMN kept_until; UPDATE {schema}.meters SET full_at = 0;
         ALTER TABLE {schema}.leases DROP COLUMN shorts;
         DELETE FROM {schema}.versions WHERE version > 2"
    );
    outside.batch_execute(&undo).await.unwrap();
    let (_, store) = store(&schema).await;
    let count = async || {
        let count = format!("SELECT count(*) FROM {schema}.meters");
        outside.query_one(&count, &[]).await.unwrap().get::<_, i64>(0)
    };
    store.sweep(100).await.unwrap();
    assert_eq!(count().await, 1);
    store.cancel(&cancel_of(&held)).await.unwrap();
    store.sweep(100).await.unwrap();
    assert_eq!(count().await, 0);
}
