//! Eviction of idle subjects, as every store does it that evicts them by itself.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Cancel, ManualWall, Paging, PolicyChange, Renew, Retention, Store, Terms};

use crate::kit::words::{
    OPEN, cancel_of, draw_of, draw_on, granted, is_granted, levels, levels_of_version, own, settle_of, shows,
    subject, used,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// Usage of every kind is kept for an hour.
pub(crate) const KEPT: Retention =
    Retention { hours: Some(HOUR), days: Some(HOUR), months: Some(HOUR), audit: None };

/// Draws and gives back: the subject is there, and nothing is used.
async fn touch(store: &dyn Store, entity: &str) {
    let draw = draw_of(&own(entity, 10), 1);
    granted(store.draw(&draw).await);
    store.cancel(&cancel_of(&draw)).await.expect("it is given back");
}

async fn listed(store: &dyn Store) -> Vec<String> {
    let paging = Paging::first(1_000).expect("within the bounds");
    let page = store.buckets(&subject("x").resource, &paging).await.expect("buckets are listed");
    page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect()
}

/// As often as it takes to look at every subject of these tests.
async fn sweep(store: &dyn Store) {
    for _ in 0..4 {
        store.sweep(1_000).await.expect("it is swept");
    }
}

/// Subjects come once each, as with a limit per address. Evicted, one begins full, and has no more than its burst.
pub(crate) async fn evicts_idle_subjects(store: &dyn Store) {
    for number in 0..900 {
        touch(store, &format!("ip-{number}")).await;
    }
    sweep(store).await;
    assert_eq!(listed(store).await, [""; 0]);
    granted(store.draw(&draw_of(&own("ip-7", 10), 10)).await);
    assert!(!is_granted(&store.draw(&draw_of(&own("ip-7", 10), 1)).await));
    sweep(store).await;
    assert_eq!(shows(store, "ip-7").await, Some((0, 10)));
}

/// Not full, held by an open lease, or with usage that is kept.
pub(crate) async fn keeps_subjects_in_use(store: &dyn Store, clock: &ManualWall) {
    let fast = |entity: &str| levels(&[(entity, &[Limit::per_second("rpm", 1_000)])]);
    granted(store.spend(&draw_of(&fast("used"), 1)).await);
    let brief = draw_on(Terms { deadline: HOUR / 2, ..OPEN }, &fast("renewed"), 10);
    granted(store.draw(&brief).await);
    let (lease, span) = (brief.lease, 24 * HOUR);
    let renew = Renew { lease, step: 1, levels: Arc::clone(&brief.levels), span };
    store.renew(&renew).await.expect("it is renewed");
    let held = draw_on(Terms { deadline: 24 * HOUR, ..OPEN }, &fast("held"), 10);
    granted(store.draw(&held).await);
    // It takes ten days to fill up again.
    let debt = draw_of(&own("debt", 10), 10);
    granted(store.draw(&debt).await);
    store.settle(&settle_of(&debt, 10)).await.expect("it is settled");
    clock.advance(Duration::from_secs(1));
    sweep(store).await;
    assert_eq!(listed(store).await, ["debt", "held", "renewed", "used"]);
    assert_eq!(shows(store, "held").await, Some((1_000, 10)));
    store.settle(&settle_of(&held, 4)).await.expect("it is settled");
    assert_eq!((shows(store, "held").await, used(store, "held").await), (Some((1_000, 4)), 4));
    clock.advance(12 * HOUR);
    sweep(store).await;
    assert_eq!(shows(store, "renewed").await, Some((1_000, 10)));
    store.cancel(&Cancel { step: 2, ..cancel_of(&brief) }).await.expect("it is cancelled");
    sweep(store).await;
    assert_eq!(listed(store).await, ["debt", "held", "used"]);
    clock.advance(40 * 24 * HOUR);
    sweep(store).await;
    assert_eq!(listed(store).await, [""; 0]);
}

/// Evicted too early, a caller who is behind would be decided by rules that no longer hold.
pub(crate) async fn keeps_new_rules_for_ten_minutes(store: &dyn Store, clock: &ManualWall) {
    let policy = Policy::new([Limit::per_minute("rpm", 60)]).expect("a valid policy");
    let change = PolicyChange { scope: Scope::System, policy: Some(policy), expect: Expect::Any };
    let version = store.apply(&[change], "a test").await.expect("it is changed");
    let draw = draw_of(&levels_of_version(version.number(), &[("acme", &[Limit::per_minute("rpm", 60)])]), 1);
    granted(store.draw(&draw).await);
    store.cancel(&cancel_of(&draw)).await.expect("it is given back");
    for (minutes, kept) in [(0, 1), (9, 1), (1, 0)] {
        clock.advance(Duration::from_secs(minutes * 60));
        sweep(store).await;
        assert_eq!(listed(store).await.len(), kept, "after {minutes} minutes more");
    }
}
