//! Leases that are given more time, and leases that somebody looks up who has nothing but their id.

use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ending, LeaseId, RENEWAL_MAX};
use tidegate_core::limit::policy::OnExpiry;

use super::Fixture;
use super::kit::{OPEN, is_ended, levels, millis, own, slow};
use super::ledger::used_by;
use crate::{Held, Renew, Standing, StoreError, Terms};

const BRIEF: Duration = millis(50);
const HOUR: Duration = Duration::from_secs(3_600);

/// A caller who says that it is still there keeps its lease beyond the deadline that it began with.
pub async fn a_renewed_lease_does_not_expire_at_its_old_deadline(fixture: Fixture) {
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

/// A renewal takes nothing, returns nothing, and writes nothing to the ledger.
pub async fn a_renewal_changes_nothing_of_what_is_held(fixture: Fixture) {
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

/// A renewal for less time than is left leaves the deadline where it is.
pub async fn a_renewal_never_shortens_a_deadline(fixture: Fixture) {
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

/// A renewal whose reply was lost is sent again, and is answered as the first time.
pub async fn the_same_renewal_again_is_answered_the_same(fixture: Fixture) {
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

/// A renewal is a step as others are: overtaken by a later one it is refused, and changes nothing.
pub async fn a_renewal_that_comes_after_a_later_step_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let overtaken = lease.renewal(1, 9 * HOUR);
    lease.step = 1;
    lease.adjusts(&[("rpm", 1)]).await;
    let deadline = is_open(&fixture, lease.id).await.record.deadline();
    match fixture.store.renew(&overtaken).await {
        Err(StoreError::Late { lease: id, step, done }) => assert_eq!((id, step, done), (lease.id, 1, 2)),
        other => panic!("an overtaken renewal answers {other:?}"),
    }
    assert_eq!(is_open(&fixture, lease.id).await.record.deadline(), deadline);
    // And what it overtakes is late in turn.
    lease.step = 4;
    lease.renews(HOUR).await;
    let late = fixture.store.settle(&lease.settlement(5, &[("rpm", 5)])).await;
    assert!(matches!(late, Err(StoreError::Late { .. })), "an overtaken settle answers {late:?}");
}

/// What has ended stays so.
pub async fn a_lease_that_has_ended_is_not_renewed(fixture: Fixture) {
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

/// Whoever comes after the deadline is too late, whether the store has swept or not.
pub async fn a_lease_past_its_deadline_is_not_renewed(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let terms = |on_expiry| Terms { deadline: BRIEF, on_expiry };
    let spent = fixture.takes_on(terms(OnExpiry::Settle), &levels, &[("rpm", 10)]).await;
    let mut leases = vec![spent];
    // More than any store ends in passing.
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

/// A lease that never drew is not known, and leaves no mark.
pub async fn an_unknown_lease_is_not_renewed(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let renew = Renew { lease: draw.lease, step: 1, levels: levels.clone(), span: HOUR };
    match fixture.store.renew(&renew).await {
        Err(StoreError::NoLease { lease }) => assert_eq!(lease, draw.lease),
        other => panic!("an unknown lease answers {other:?}"),
    }
    super::kit::granted(fixture.store.draw(&draw).await);
}

/// A renewal has a bound, and the error names it.
pub async fn a_renewal_for_too_long_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    for span in [RENEWAL_MAX + millis(1), Duration::MAX] {
        match fixture.store.renew(&lease.renewal(1, span)).await {
            Err(StoreError::Invalid { what }) => assert!(what.contains("86400s"), "{what}"),
            other => panic!("a renewal for {span:?} answers {other:?}"),
        }
    }
    let renewed = lease.renews(RENEWAL_MAX).await;
    assert_eq!(renewed.deadline, renewed.at + RENEWAL_MAX);
}

/// Whoever has nothing but a lease's id is told what it takes to go on with it.
pub async fn an_open_lease_is_found_by_its_id(fixture: Fixture) {
    let (own_limits, shared) = ([slow("rpm", 100), slow("tpm", 500)], [slow("tpm", 900)]);
    let levels = levels(7, &[("child", &own_limits), ("parent", &shared)]);
    let terms = Terms { deadline: HOUR, on_expiry: OnExpiry::Return };
    let mut lease = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
    lease.extends(&[("tpm", 50)]).await;
    lease.step = 4;
    let adjusted = lease.adjusts(&[("rpm", -3)]).await;
    fixture.takes(&own("other", &[slow("rpm", 5)]), &[("rpm", 1)]).await;
    let Held { levels: found, record, at } = is_open(&fixture, lease.id).await;
    assert!(at >= adjusted.at, "it is looked at after what was done before");
    assert_eq!((record.step(), record.held()), (5, &[Some(7), Some(50)][..]));
    assert_eq!((record.drawn_at(), record.deadline()), (lease.at, lease.at + HOUR));
    assert_eq!((record.stepped_at(), record.on_expiry()), (adjusted.at, OnExpiry::Return));
    assert_eq!((shape(&found), found.version()), (shape(&levels), levels.version()));
    // With these levels it is ended as by its holder.
    lease.levels = found;
    lease.settles(&[("tpm", 20)]).await;
    let rows = [("child", "rpm", (93, 7)), ("child", "tpm", (480, 20)), ("parent", "tpm", (880, 20))];
    for (entity, row, left) in rows {
        assert_eq!(fixture.shows(entity, row).await, left, "{row} of {entity}");
    }
}

/// Of a lease that has ended it is told how, by which step and at what; and one that is past its deadline has.
pub async fn a_lease_that_has_ended_is_found_by_its_id(fixture: Fixture) {
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
            Ok(Standing::Ended(ended)) => found.push(ended),
            other => panic!("a lease that has ended is found as {other:?}"),
        }
    }
    assert_eq!((found[0].how, found[0].step, found[0].at), (Ending::Settled, 3, at));
    assert_eq!(found[0].digest, tidegate_core::limit::lease::digest([("rpm", 4)]));
    assert_eq!((found[1].how, found[1].step), (Ending::Cancelled, 1));
    assert_eq!((found[2].how, found[2].step), (Ending::Expired, 0));
    assert_eq!(fixture.shows("acme", "rpm").await, (66, 34));
}

/// A lease that never drew is not found.
pub async fn an_unknown_lease_is_not_found(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 101)]);
    super::kit::refused(fixture.store.draw(&draw).await);
    match fixture.store.lease(draw.lease).await {
        Err(StoreError::NoLease { lease }) => assert_eq!(lease, draw.lease),
        other => panic!("an unknown lease is found as {other:?}"),
    }
}

/// A lease lives for as long as it is renewed, and ends by the last deadline it was given.
pub async fn a_lease_lives_for_as_long_as_it_is_renewed(fixture: Fixture) {
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

/// The lease as the store has it, if it is open, or the case fails.
async fn is_open(fixture: &Fixture, lease: LeaseId) -> Held {
    match fixture.store.lease(lease).await {
        Ok(Standing::Open(held)) => held,
        other => panic!("an open lease is found as {other:?}"),
    }
}

/// Whose limits, and which.
fn shape(levels: &Levels) -> Vec<(String, Vec<String>)> {
    let level = |level: &tidegate_core::limit::cascade::Level| {
        let limits = level.limits.iter().map(|line| line.rule.to_string()).collect();
        (level.subject.to_string(), limits)
    };
    levels.levels().iter().map(level).collect()
}
