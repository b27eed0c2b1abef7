//! Renewing leases, and finding them by their id.

use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ending, LeaseId, RENEWAL_MAX};
use tidegate_core::limit::policy::OnExpiry;

use super::Fixture;
use super::kit::{OPEN, is_ended, levels, millis, own, slow};
use super::ledger::used_by;
use crate::{LeaseSnapshot, LeaseStatus, Renew, StoreError, Terms};

const BRIEF: Duration = millis(50);
const HOUR: Duration = Duration::from_secs(3_600);

/// A caller that renews keeps its lease beyond the first deadline.
pub async fn renewed_lease_outlives_its_old_deadline(fixture: Fixture) {
    let work = async |entity: &str, deadline| {
        let levels = own(entity, &[slow("rpm", 100)]);
        let terms = Terms { deadline, on_expiry: OnExpiry::Return };
        let mut kept = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
        fixture.takes_on(terms, &levels, &[("rpm", 20)]).await;
        let renewed = fixture.store.renew(&kept.renewal(1, HOUR)).await?;
        assert!(!renewed.is_repeat, "a first renewal is no repeat");
        assert_eq!(renewed.deadline, renewed.at + HOUR, "from now on, by the store's clock");
        kept.step = 1;
        Ok(kept)
    };
    let (entity, deadline, mut kept) = fixture.in_time(work).await;
    fixture.time.pass(deadline + BRIEF).await;
    fixture.sweep_all().await;
    assert_eq!(fixture.shows(&entity, "rpm").await, (90, 10));
    kept.settles(&[("rpm", 7)]).await;
    assert_eq!(fixture.shows(&entity, "rpm").await, (93, 7));
}

/// And writes nothing to the ledger.
pub async fn renewal_keeps_the_units_held(fixture: Fixture) {
    let limits = [slow("rpm", 100)];
    let levels = levels(0, &[("child", &limits), ("parent", &limits)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    lease.extends(&[("rpm", 5)]).await;
    lease.renews(HOUR).await;
    for entity in ["child", "parent"] {
        assert_eq!(fixture.shows(entity, "rpm").await, (85, 15), "{entity}");
        assert_eq!(used_by(&fixture, entity, "rpm").await, (0, 0, 0), "{entity}");
    }
    lease.cancels().await;
    for entity in ["child", "parent"] {
        assert_eq!(fixture.shows(entity, "rpm").await, (100, 0), "{entity}");
    }
}

/// A shorter span leaves the deadline unchanged.
pub async fn renewal_never_shortens_a_deadline(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes_on(Terms { deadline: HOUR, ..OPEN }, &levels, &[("rpm", 10)]).await;
    let deadline = lease.at + HOUR;
    for span in [Duration::ZERO, millis(1), BRIEF] {
        assert_eq!(lease.renews(span).await.deadline, deadline, "renewed for {span:?}");
    }
    fixture.time.pass(2 * BRIEF).await;
    fixture.sweep_all().await;
    assert_eq!(is_open(&fixture, lease.id).await.record.deadline(), deadline);
    assert!(lease.renews(2 * HOUR).await.deadline > deadline);
}

/// After a lost reply.
pub async fn repeated_renewal_returns_the_first_result(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let renew = lease.renewal(1, 2 * HOUR);
    let first = fixture.store.renew(&renew).await.expect("an open lease is renewed");
    assert!(!first.is_repeat);
    for _ in 0..3 {
        fixture.time.pass(millis(5)).await;
        let again = fixture.store.renew(&renew).await.expect("the same renewal is no error");
        assert!(again.is_repeat, "the same step again is a repeat: {again:?}");
        assert_eq!((again.at, again.deadline), (first.at, first.deadline));
    }
}

/// It changes nothing.
pub async fn renewal_after_a_later_step_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let overtaken = lease.renewal(1, 9 * HOUR);
    lease.step = 1;
    lease.adjusts(&[("rpm", 1)]).await;
    let deadline = is_open(&fixture, lease.id).await.record.deadline();
    match fixture.store.renew(&overtaken).await {
        Err(StoreError::Late { lease: id, step, done }) => assert_eq!((id, step, done), (lease.id, 1, 2)),
        other => panic!("an overtaken renewal returns {other:?}"),
    }
    assert_eq!(is_open(&fixture, lease.id).await.record.deadline(), deadline);
    // A step that the renewal overtakes is late, too.
    lease.step = 4;
    lease.renews(HOUR).await;
    let late = fixture.store.settle(&lease.settlement(5, &[("rpm", 5)])).await;
    assert!(matches!(late, Err(StoreError::Late { .. })), "an overtaken settle returns {late:?}");
}

/// Neither a settled nor a cancelled one.
pub async fn ended_lease_is_not_renewed(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut settled = fixture.takes(&levels, &[("rpm", 10)]).await;
    settled.settles(&[("rpm", 4)]).await;
    let mut cancelled = fixture.takes(&levels, &[("rpm", 20)]).await;
    cancelled.cancels().await;
    for (lease, how) in [(settled, Ending::Settled), (cancelled, Ending::Cancelled)] {
        for step in [1, 2] {
            is_ended(fixture.store.renew(&lease.renewal(step, HOUR)).await, how);
        }
    }
    assert_eq!(fixture.shows("acme", "rpm").await, (96, 4));
}

/// Whether the store has swept or not.
pub async fn expired_lease_is_not_renewed(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let terms = |on_expiry| Terms { deadline: BRIEF, on_expiry };
    let spent = fixture.takes_on(terms(OnExpiry::Settle), &levels, &[("rpm", 10)]).await;
    let mut leases = vec![spent];
    // More than any store ends before a call.
    for _ in 0..40 {
        leases.push(fixture.takes_on(terms(OnExpiry::Return), &levels, &[("rpm", 1)]).await);
    }
    fixture.time.pass(2 * BRIEF).await;
    for lease in leases.iter().rev() {
        is_ended(fixture.store.renew(&lease.renewal(1, HOUR)).await, Ending::Expired);
    }
    fixture.sweep_all().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (10, 10, 1));
}

/// And no tombstone is left.
pub async fn unknown_lease_is_not_renewed(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let renew = Renew { lease: draw.lease, step: 1, levels: levels.clone(), span: HOUR };
    match fixture.store.renew(&renew).await {
        Err(StoreError::NoLease { lease }) => assert_eq!(lease, draw.lease),
        other => panic!("an unknown lease returns {other:?}"),
    }
    super::kit::granted(fixture.store.draw(&draw).await);
}

/// The error has the bound.
pub async fn renewal_for_too_long_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    for span in [RENEWAL_MAX + millis(1), Duration::MAX] {
        match fixture.store.renew(&lease.renewal(1, span)).await {
            Err(StoreError::Invalid { what }) => assert!(what.contains("86400s"), "{what}"),
            other => panic!("a renewal for {span:?} returns {other:?}"),
        }
    }
    let renewed = lease.renews(RENEWAL_MAX).await;
    assert_eq!(renewed.deadline, renewed.at + RENEWAL_MAX);
}

/// With everything needed to continue it.
pub async fn open_lease_is_found_by_its_id(fixture: Fixture) {
    let (own_limits, shared) = ([slow("rpm", 100), slow("tpm", 500)], [slow("tpm", 900)]);
    let levels = levels(7, &[("child", &own_limits), ("parent", &shared)]);
    let terms = Terms { deadline: HOUR, on_expiry: OnExpiry::Return };
    let mut lease = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    lease.extends(&[("tpm", 50)]).await;
    lease.step = 4;
    let adjusted = lease.adjusts(&[("rpm", -3)]).await;
    fixture.takes(&own("other", &[slow("rpm", 5)]), &[("rpm", 1)]).await;
    let LeaseSnapshot { levels: found, record, at } = is_open(&fixture, lease.id).await;
    assert!(at >= adjusted.at, "it is read after the adjustment");
    assert_eq!((record.step(), record.held()), (5, &[Some(7), Some(50)][..]));
    assert_eq!((record.drawn_at(), record.deadline()), (lease.at, lease.at + HOUR));
    assert_eq!((record.stepped_at(), record.on_expiry()), (adjusted.at, OnExpiry::Return));
    assert_eq!((shape(&found), found.version()), (shape(&levels), levels.version()));
    // These levels are sufficient to settle it.
    lease.levels = found;
    lease.settles(&[("tpm", 20)]).await;
    let rows = [("child", "rpm", (93, 7)), ("child", "tpm", (480, 20)), ("parent", "tpm", (880, 20))];
    for (entity, row, left) in rows {
        assert_eq!(fixture.shows(entity, row).await, left, "{row} of {entity}");
    }
}

/// With its ending, step and digest; a lease past its deadline counts as ended.
pub async fn ended_lease_is_found_by_its_id(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut settled = fixture.takes(&levels, &[("rpm", 10)]).await;
    let mut cancelled = fixture.takes(&levels, &[("rpm", 20)]).await;
    let expired = fixture.takes_on(Terms { deadline: BRIEF, ..OPEN }, &levels, &[("rpm", 30)]).await;
    settled.step = 2;
    let at = settled.settles(&[("rpm", 4)]).await.at;
    cancelled.cancels().await;
    fixture.time.pass(2 * BRIEF).await;
    let mut found = Vec::new();
    for lease in [settled.id, cancelled.id, expired.id] {
        match fixture.store.lease(lease).await {
            Ok(LeaseStatus::Ended(ended)) => found.push(ended),
            other => panic!("a lease that has ended is found as {other:?}"),
        }
    }
    assert_eq!((found[0].how, found[0].step, found[0].at), (Ending::Settled, 3, at));
    assert_eq!(found[0].digest, tidegate_core::limit::lease::digest([("rpm", 4)]));
    assert_eq!((found[1].how, found[1].step), (Ending::Cancelled, 1));
    assert_eq!((found[2].how, found[2].step), (Ending::Expired, 0));
    assert_eq!(fixture.shows("acme", "rpm").await, (66, 34));
}

/// One that never drew.
pub async fn unknown_lease_is_not_found(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 101)]);
    super::kit::refused(fixture.store.draw(&draw).await);
    match fixture.store.lease(draw.lease).await {
        Err(StoreError::NoLease { lease }) => assert_eq!(lease, draw.lease),
        other => panic!("an unknown lease is found as {other:?}"),
    }
}

/// And expires at its last deadline.
pub async fn lease_lives_as_long_as_it_is_renewed(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets hours pass");
    let levels = own("acme", &[slow("rpm", 100)]);
    let terms = Terms { deadline: HOUR, on_expiry: OnExpiry::Settle };
    let mut lease = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    for _ in 0..5 {
        fixture.time.pass(millis(3_599_999)).await;
        fixture.sweep_all().await;
        lease.renews(HOUR).await;
    }
    fixture.time.pass(millis(3_599_999)).await;
    fixture.sweep_all().await;
    assert_eq!(is_open(&fixture, lease.id).await.record.step(), 5);
    fixture.time.pass(millis(1)).await;
    fixture.sweep_all().await;
    lease.has_ended(Ending::Expired, &[("rpm", 1)]).await;
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (10, 10, 1));
}

/// Asserts that the lease is open, and returns it.
async fn is_open(fixture: &Fixture, lease: LeaseId) -> LeaseSnapshot {
    match fixture.store.lease(lease).await {
        Ok(LeaseStatus::Open(held)) => held,
        other => panic!("an open lease is found as {other:?}"),
    }
}

/// The subjects of levels and their limits.
fn shape(levels: &Levels) -> Vec<(String, Vec<String>)> {
    let level = |level: &tidegate_core::limit::cascade::Level| {
        let limits = level.limits.iter().map(|line| line.rule.to_string()).collect();
        (level.subject.to_string(), limits)
    };
    levels.levels().iter().map(level).collect()
}
