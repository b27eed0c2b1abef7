//! Old entries are deleted in small batches, and no others.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Expect;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{
    AuditQuery, Buckets, Entities, Ledger, ManualWall, Paging, Retention, Sqlite, Store, UsageOf, UsageQuery,
};

use crate::kit::common::{START, draw_of, granted, own};
use crate::kit::sqlite::TempFile;

const HOUR: Duration = Duration::from_secs(3_600);
const ALWAYS: std::ops::Range<Stamp> = Stamp::ZERO..Stamp::MAX;

async fn spend(store: &Sqlite, levels: &Arc<Levels>, requests: u64) {
    granted(store.spend(&draw_of(levels, requests)).await);
}

async fn lines(store: &Sqlite, entity: &str, window: Window) -> Vec<u64> {
    let of = UsageOf::Entity(EntityId::new(entity).expect("a valid name"));
    let query = UsageQuery { of, window, range: ALWAYS };
    let page = store.usage(&query, &Paging::default()).await.expect("usage is listed");
    page.items.iter().map(|line| line.tally.units).collect()
}

async fn audited(store: &Sqlite) -> usize {
    let query = AuditQuery { filed: None, range: ALWAYS };
    store.audit(&query, &Paging::default()).await.expect("the audit is listed").items.len()
}

#[tokio::test]
async fn each_window_has_its_own_retention() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let kept = Retention {
        minutes: Some(HOUR),
        hours: Some(2 * HOUR),
        days: Some(36 * HOUR),
        months: None,
        audit: Some(3 * HOUR),
    };
    let store = place.options(&clock).retention(kept).open().await.unwrap();
    let acme = own("acme", 1_000);
    for hour in 0..6 {
        spend(&store, &acme, 1 + hour).await;
        let entity = Entity::new(EntityId::new(&format!("at-{hour}")).unwrap());
        store.put(&entity, Expect::Any, "tests").await.unwrap();
        clock.advance(HOUR);
    }
    // At 14:00 the hourly limit deletes usage until 12:00, and the audit limit entries before 11:00.
    store.sweep(100).await.unwrap();
    assert_eq!(lines(&store, "acme", Window::Minute).await, [6]);
    assert_eq!(lines(&store, "acme", Window::Hour).await, [5, 6]);
    assert_eq!(lines(&store, "acme", Window::Day).await, [21]);
    assert_eq!(audited(&store).await, 3);
    clock.advance(30 * HOUR);
    store.sweep(100).await.unwrap();
    assert!(lines(&store, "acme", Window::Hour).await.is_empty());
    assert_eq!(lines(&store, "acme", Window::Day).await, [21], "the day ended twenty hours ago");
    clock.advance(16 * HOUR);
    store.sweep(100).await.unwrap();
    assert!(lines(&store, "acme", Window::Day).await.is_empty());
    assert_eq!((lines(&store, "acme", Window::Month).await, audited(&store).await), (vec![21], 0));
    assert!(store.get(&EntityId::new("at-0").unwrap()).await.unwrap().is_some(), "records stay");
}

#[tokio::test]
async fn old_lines_are_pruned_in_small_batches() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let kept = Retention { hours: Some(HOUR), ..Retention::default() };
    let store = place.options(&clock).retention(kept).open().await.unwrap();
    for number in 0..1_200 {
        spend(&store, &own(&format!("user-{number}"), 10), 1).await;
    }
    let count = || {
        let sql = "SELECT COUNT(*) FROM usage WHERE span = 0";
        place.outside().query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(count(), 1_200);
    clock.advance(3 * HOUR);
    let mut before = 1_200;
    while before > 0 {
        store.sweep(1).await.unwrap();
        let left = count();
        // The writer may also prune by itself between two sweeps.
        assert!(left < before && before - left <= 1_000, "{before} lines became {left}");
        before = left;
    }
}

/// Lines used to be deleted 500 at a time, once a second: with more new subjects than that the file grew.
#[tokio::test]
async fn every_call_prunes_while_lines_are_too_old() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let kept = Retention { hours: Some(HOUR), ..Retention::default() };
    let store = place.options(&clock).retention(kept).open().await.unwrap();
    spend(&store, &own("acme", 100), 1).await;
    let fill = "
        WITH RECURSIVE numbers (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < 20000)
        INSERT INTO usage (subject, name, span, start, units, own, leases)
        SELECT subject, name || i, span, start, 1, 1, 1 FROM usage, numbers WHERE span = 0";
    place.outside().execute_batch(fill).unwrap();
    clock.advance(3 * HOUR);
    store.sweep(1).await.unwrap();
    for _ in 0..40 {
        spend(&store, &own("acme", 100), 1).await;
    }
    let sql = "SELECT COUNT(*) FROM usage WHERE span = 0";
    let left = place.outside().query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(left, 1, "current usage is kept");
}

/// A transaction evicts more ended leases than it can add, so that they do not pile up.
#[tokio::test]
async fn every_call_forgets_leases_that_ended_long_ago() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let levels = own("acme", 10_000);
    for _ in 0..1_500 {
        spend(&store, &levels, 1).await;
    }
    clock.advance(Duration::from_secs(601));
    for _ in 0..30 {
        spend(&store, &levels, 1).await;
    }
    let left =
        place.outside().query_row("SELECT COUNT(*) FROM leases", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(left, 30);
}

#[tokio::test]
async fn default_retention_keeps_months_for_ever() {
    let default = Retention::default();
    assert_eq!((default.hours, default.days), (Some(62 * 24 * HOUR), Some(800 * 24 * HOUR)));
    assert_eq!((default.months, default.audit), (None, None));
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    spend(&store, &own("acme", 10), 4).await;
    clock.advance(61 * 24 * HOUR);
    store.sweep(100).await.unwrap();
    assert_eq!(lines(&store, "acme", Window::Hour).await, [4]);
    clock.advance(2 * 24 * HOUR);
    store.sweep(100).await.unwrap();
    assert!(lines(&store, "acme", Window::Hour).await.is_empty());
    assert_eq!(
        (lines(&store, "acme", Window::Day).await, lines(&store, "acme", Window::Month).await),
        (vec![4], vec![4])
    );
}
