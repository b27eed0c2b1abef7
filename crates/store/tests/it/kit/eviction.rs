//! Eviction of idle subjects, for every store that evicts.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Cancel, ManualWall, Paging, PolicyChange, Renew, Retention, Store, Terms};

use crate::kit::common::{
    OPEN, balance, cancel_of, draw_of, draw_on, granted, is_granted, levels, levels_of_version, own,
    settle_of, subject, used,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// Usage of every window is kept for an hour.
pub(crate) const SHORT_RETENTION: Retention =
    Retention { minutes: Some(HOUR), hours: Some(HOUR), days: Some(HOUR), months: Some(HOUR), audit: None };

/// Draws and cancels: the subject exists without usage.
async fn touch(store: &dyn Store, entity: &str) {
    let draw = draw_of(&own(entity, 10), 1);
    granted(store.draw(&draw).await);
    store.cancel(&cancel_of(&draw)).await.expect("the lease is cancelled");
}

async fn listed(store: &dyn Store) -> Vec<String> {
    let paging = Paging::first(1_000).expect("within the bounds");
    let page = store.buckets(&subject("x").resource, &paging).await.expect("buckets are listed");
    page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect()
}

/// Sweeps often enough to visit every subject of these tests.
async fn sweep(store: &dyn Store) {
    for _ in 0..4 {
        store.sweep(1_000).await.expect("the sweep succeeds");
    }
}

/// Each subject is used once, as with a limit per address. An evicted subject starts full, with no more than
/// its burst.
pub(crate) async fn evicts_idle_subjects(store: &dyn Store) {
    for number in 0..900 {
        touch(store, &format!("ip-{number}")).await;
    }
    sweep(store).await;
    assert_eq!(listed(store).await, [""; 0]);
    granted(store.draw(&draw_of(&own("ip-7", 10), 10)).await);
    assert!(!is_granted(&store.draw(&draw_of(&own("ip-7", 10), 1)).await));
    sweep(store).await;
    assert_eq!(balance(store, "ip-7").await, Some((0, 10)));
}

/// Subjects that are not full, held by an open lease, or with retained usage.
pub(crate) async fn keeps_subjects_in_use(store: &dyn Store, clock: &ManualWall) {
    let fast = |entity: &str| levels(&[(entity, &[Limit::per_second("rpm", 1_000)])]);
    granted(store.spend(&draw_of(&fast("used"), 1)).await);
    let brief = draw_on(Terms { deadline: HOUR / 2, ..OPEN }, &fast("renewed"), 10);
    granted(store.draw(&brief).await);
    let (lease, span) = (brief.lease, 24 * HOUR);
    let renew = Renew { lease, step: 1, levels: Arc::clone(&brief.levels), span };
    store.renew(&renew).await.expect("the lease is renewed");
    let held = draw_on(Terms { deadline: 24 * HOUR, ..OPEN }, &fast("held"), 10);
    granted(store.draw(&held).await);
    // Refills in ten days.
    let debt = draw_of(&own("debt", 10), 10);
    granted(store.draw(&debt).await);
    store.settle(&settle_of(&debt, 10)).await.expect("the lease is settled");
    clock.advance(Duration::from_secs(1));
    sweep(store).await;
    assert_eq!(listed(store).await, ["debt", "held", "renewed", "used"]);
    assert_eq!(balance(store, "held").await, Some((1_000, 10)));
    store.settle(&settle_of(&held, 4)).await.expect("the lease is settled");
    assert_eq!((balance(store, "held").await, used(store, "held").await), (Some((1_000, 4)), 4));
    clock.advance(12 * HOUR);
    sweep(store).await;
    assert_eq!(balance(store, "renewed").await, Some((1_000, 10)));
    store.cancel(&Cancel { step: 2, ..cancel_of(&brief) }).await.expect("the lease is cancelled");
    sweep(store).await;
    assert_eq!(listed(store).await, ["debt", "held", "used"]);
    clock.advance(40 * 24 * HOUR);
    sweep(store).await;
    assert_eq!(listed(store).await, [""; 0]);
}

/// Evicted earlier, a caller with older rules would be decided by rules that no longer hold.
pub(crate) async fn keeps_new_rules_for_ten_minutes(store: &dyn Store, clock: &ManualWall) {
    let policy = Policy::new([Limit::per_minute("rpm", 60)]).expect("a valid policy");
    let change = PolicyChange { scope: Scope::System, policy: Some(policy), expect: Expect::Any };
    let version = store.apply(&[change], "a test").await.expect("the change is applied");
    let draw = draw_of(&levels_of_version(version.number(), &[("acme", &[Limit::per_minute("rpm", 60)])]), 1);
    granted(store.draw(&draw).await);
    store.cancel(&cancel_of(&draw)).await.expect("the lease is cancelled");
    for (minutes, count) in [(0, 1), (9, 1), (1, 0)] {
        clock.advance(Duration::from_secs(minutes * 60));
        sweep(store).await;
        assert_eq!(listed(store).await.len(), count, "after {minutes} more minutes");
    }
}
