//! Idle subjects are evicted from the file.

use std::time::Duration;

use tidegate_store::{Buckets as _, ManualWall, Sqlite, Store as _};

use crate::kit::common::{START, cancel_of, draw_of, granted, own};
use crate::kit::eviction;
use crate::kit::sqlite::TempFile;

async fn open() -> (TempFile, ManualWall, Sqlite) {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = open_at(&place, &clock).await;
    (place, clock, store)
}

/// With a timeout that a slow disk meets.
async fn open_at(place: &TempFile, clock: &ManualWall) -> Sqlite {
    let options = place.options(clock).retention(eviction::SHORT_RETENTION).deadline(Duration::from_secs(60));
    options.open().await.expect("the file is opened")
}

#[tokio::test]
async fn idle_subjects_are_evicted() {
    let (_place, _, store) = open().await;
    eviction::evicts_idle_subjects(&store).await;
}

#[tokio::test]
async fn subjects_in_use_are_kept() {
    let (_place, clock, store) = open().await;
    eviction::keeps_subjects_in_use(&store, &clock).await;
}

#[tokio::test]
async fn new_rules_keep_subjects_for_ten_minutes() {
    let (_place, clock, store) = open().await;
    eviction::keeps_new_rules_for_ten_minutes(&store, &clock).await;
}

/// Without a sweep: a transaction evicts more than the previous one has added.
#[tokio::test]
async fn subjects_that_come_and_go_leave_no_rows() {
    let (place, clock, store) = open().await;
    for number in 0..500 {
        let draw = draw_of(&own(&format!("ip-{number}"), 10), 1);
        granted(store.draw(&draw).await);
        store.cancel(&cancel_of(&draw)).await.unwrap();
        clock.advance(Duration::from_secs(61));
    }
    let count = |table| {
        let sql = format!("SELECT COUNT(*) FROM {table}");
        place.outside().query_row(&sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    let left = (count("subjects"), count("meters"));
    assert!(left.0 <= 4 && left.1 <= 4, "{left:?}");
}

/// Every write of another process used to reset the progress of eviction.
#[tokio::test]
async fn two_processes_leave_no_rows() {
    let (place, clock, store) = open().await;
    let other = open_at(&place, &clock).await;
    // In front of the others, and not full for a day.
    for number in 0..10 {
        granted(store.spend(&draw_of(&own(&format!("in-use-{number}"), 10), 10)).await);
    }
    for number in 0..300 {
        let draw = draw_of(&own(&format!("user-{number}"), 10), 1);
        granted(store.draw(&draw).await);
        store.cancel(&cancel_of(&draw)).await.unwrap();
        let busy = draw_of(&own("busy", 1_000), 1);
        granted(other.draw(&busy).await);
        other.cancel(&cancel_of(&busy)).await.unwrap();
        clock.advance(Duration::from_secs(61));
    }
    let count = "SELECT COUNT(*) FROM subjects";
    let left: i64 = place.outside().query_row(count, [], |row| row.get(0)).unwrap();
    assert!(left <= 30, "{left} subjects");
}

/// A lease that was open during the upgrade has no record of what it holds.
#[tokio::test]
async fn leases_from_before_the_upgrade_keep_all() {
    let (place, clock, store) = open().await;
    let held = draw_of(&own("held", 10), 1);
    granted(store.draw(&held).await);
    store.close().await;
    place.downgrade(3);
    let store = place.options(&clock).retention(eviction::SHORT_RETENTION).open().await.unwrap();
    let full = "UPDATE meters SET full_at = 0";
    place.outside().execute_batch(full).unwrap();
    store.sweep(100).await.unwrap();
    let count = || {
        place.outside().query_row("SELECT COUNT(*) FROM subjects", [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(count(), 1);
    store.cancel(&cancel_of(&held)).await.unwrap();
    store.sweep(100).await.unwrap();
    assert_eq!(count(), 0);
}
