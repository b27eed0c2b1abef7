//! Steps are idempotent and ordered, however often and late they arrive.

use std::time::Duration;

use tidegate_core::limit::lease::Ending;

use super::Fixture;
use super::kit::{granted, is_ended, millis, own, refused, repeated, slow};
use crate::{Cancel, DrawResult, StoreError};

/// After a lost reply.
pub async fn repeated_draw_takes_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let first = granted(fixture.store.draw(&draw).await);
    assert!(!first.is_repeat);
    for _ in 0..3 {
        fixture.time.pass(millis(5)).await;
        let again = granted(fixture.store.draw(&draw).await);
        repeated(&again);
        assert_eq!(again.at, first.at, "it has the time of the first decision");
        assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
    }
}

/// A refused draw does not count as applied: a retry is decided anew.
pub async fn refused_draw_may_be_retried(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut holder = fixture.takes(&levels, &[("rpm", 6)]).await;
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    refused(fixture.store.draw(&draw).await);
    holder.cancels().await;
    let moved = granted(fixture.store.draw(&draw).await);
    assert!(!moved.is_repeat, "it had not been applied");
    assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
}

/// After a lost reply.
pub async fn repeated_extension_takes_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1)]).await;
    let extend = lease.extension(1, &[("rpm", 5)]);
    assert!(!granted(fixture.store.extend(&extend).await).is_repeat);
    for _ in 0..3 {
        repeated(&granted(fixture.store.extend(&extend).await));
        assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
    }
    lease.step = 1;
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (10, 0));
}

/// After a lost reply, up or down.
pub async fn repeated_adjustment_moves_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 5)]).await;
    for (step, delta, left) in [(1, 3, 2), (2, -4, 6), (3, 9, -3)] {
        let adjust = lease.adjustment(step, &[("rpm", delta)]);
        for time in 0..3 {
            let moved = fixture.store.adjust(&adjust).await.expect("an adjustment is never refused");
            assert_eq!(moved.is_repeat, time > 0, "step {step}, time {time}");
            assert_eq!(fixture.shows("acme", "rpm").await, (left, 10 - left), "step {step}, time {time}");
        }
    }
    lease.step = 3;
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (10, 0));
}

/// Any other step fails because the lease has ended.
pub async fn repeated_settle_returns_the_first_result(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 5)]).await;
    let settle = lease.settlement(1, &[("rpm", 3)]);
    let first = fixture.store.settle(&settle).await.expect("an open lease is settled");
    assert!(!first.is_repeat);
    lease.step = 1;
    for _ in 0..2 {
        fixture.time.pass(millis(5)).await;
        let again = fixture.store.settle(&settle).await.expect("the same settle is no error");
        repeated(&again);
        assert_eq!(again.at, first.at, "it has the time of the first decision");
        is_ended(fixture.store.settle(&lease.settlement(1, &[("rpm", 4)])).await, Ending::Settled);
        lease.has_ended(Ending::Settled, &[("rpm", 1)]).await;
        assert_eq!(fixture.shows("acme", "rpm").await, (7, 3));
    }
}

/// A settle after it fails because the lease was cancelled.
pub async fn repeated_cancel_returns_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    fixture.takes(&levels, &[("rpm", 5)]).await;
    let lease = fixture.takes(&levels, &[("rpm", 5)]).await;
    let cancel = lease.cancellation(1);
    assert!(!fixture.store.cancel(&cancel).await.expect("an open lease is cancelled").is_repeat);
    for _ in 0..2 {
        repeated(&fixture.store.cancel(&cancel).await.expect("the same cancel is no error"));
        lease.has_ended(Ending::Cancelled, &[("rpm", 1)]).await;
        assert_eq!(fixture.shows("acme", "rpm").await, (5, 5));
    }
}

/// A redelivered draw.
pub async fn draw_after_the_end_takes_nothing(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    for how in [Ending::Settled, Ending::Cancelled] {
        let draw = fixture.draw_of(&levels, &[("rpm", 5)]);
        granted(fixture.store.draw(&draw).await);
        let lease = fixture.takes(&levels, &[("rpm", 1)]).await;
        if how == Ending::Settled {
            let settle = crate::Settle { lease: draw.lease, ..lease.settlement(1, &[("rpm", 2)]) };
            fixture.store.settle(&settle).await.expect("an open lease is settled");
        } else {
            let cancel = Cancel { lease: draw.lease, ..lease.cancellation(1) };
            fixture.store.cancel(&cancel).await.expect("an open lease is cancelled");
        }
        let before = fixture.shows("acme", "rpm").await;
        is_ended(fixture.store.draw(&draw).await, how);
        assert_eq!(fixture.shows("acme", "rpm").await, before);
    }
}

/// After a lost reply.
pub async fn repeated_spend_takes_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let first = granted(fixture.store.spend(&draw).await);
    assert!(!first.is_repeat);
    for _ in 0..3 {
        let again = granted(fixture.store.spend(&draw).await);
        repeated(&again);
        assert_eq!(again.at, first.at, "it has the time of the first decision");
        assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
    }
}

/// And moves nothing.
pub async fn step_after_a_later_one_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let overtaken = lease.extension(1, &[("rpm", 5)]);
    lease.step = 1;
    lease.adjusts(&[("rpm", 10)]).await;
    match fixture.store.extend(&overtaken).await {
        Err(StoreError::Late { lease: id, step, done }) => assert_eq!((id, step, done), (lease.id, 1, 2)),
        other => panic!("an overtaken extension returns {other:?}"),
    }
    let late = fixture.store.adjust(&lease.adjustment(1, &[("rpm", 5)])).await;
    assert!(matches!(late, Err(StoreError::Late { .. })), "an overtaken adjustment returns {late:?}");
    let late = fixture.store.settle(&lease.settlement(1, &[("rpm", 5)])).await;
    assert!(matches!(late, Err(StoreError::Late { .. })), "an overtaken settle returns {late:?}");
    assert_eq!(fixture.shows("acme", "rpm").await, (80, 20));
    // The lease is still open.
    lease.settles(&[("rpm", 12)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (88, 12));
}

/// Whether it is a repeat or late.
pub async fn draw_after_later_steps_takes_nothing(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 10)]);
    granted(fixture.store.draw(&draw).await);
    let other = fixture.takes(&levels, &[("rpm", 1)]).await;
    let extend = crate::Extend { lease: draw.lease, ..other.extension(1, &[("rpm", 4)]) };
    granted(fixture.store.extend(&extend).await);
    match fixture.store.draw(&draw).await {
        Ok(DrawResult::Granted(moved)) => repeated(&moved),
        Err(StoreError::Late { step, done, .. }) => assert_eq!((step, done), (0, 1)),
        other => panic!("a repeated draw returns {other:?}"),
    }
    assert_eq!(fixture.shows("acme", "rpm").await, (85, 15));
    let cancel = Cancel { lease: draw.lease, ..other.cancellation(2) };
    fixture.store.cancel(&cancel).await.expect("an open lease is cancelled");
    assert_eq!(fixture.shows("acme", "rpm").await, (99, 1));
}

/// For example, after a refused or abandoned one.
pub async fn steps_may_be_skipped(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    lease.step = 6;
    lease.extends(&[("rpm", 1)]).await;
    lease.step = 40;
    lease.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (89, 11));
}

/// A cancel that overtakes its draw leaves a tombstone.
pub async fn cancel_before_the_draw_refuses_the_draw(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let cancel = Cancel { lease: draw.lease, step: 1, levels: levels.clone(), is_watched: true };
    let moved = fixture.store.cancel(&cancel).await.expect("cancelling an unknown lease is no error");
    assert!(moved.readings.iter().all(|reading| reading.moved == 0), "nothing was held");
    fixture.store.cancel(&cancel).await.expect("repeating it is no error");
    is_ended(fixture.store.draw(&draw).await, Ending::Cancelled);
    is_ended(fixture.store.spend(&draw).await, Ending::Cancelled);
    fixture.is_untouched("acme", "rpm").await;
}

/// Its steps fail.
pub async fn lease_that_never_drew_is_unknown(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1)]).await;
    lease.id = fixture.next_lease();
    let unknown = |error: Option<StoreError>| match error {
        Some(StoreError::NoLease { lease: id }) => assert_eq!(id, lease.id),
        other => panic!("an unknown lease returns {other:?}"),
    };
    unknown(fixture.store.extend(&lease.extension(1, &[("rpm", 1)])).await.err());
    unknown(fixture.store.adjust(&lease.adjustment(1, &[("rpm", 1)])).await.err());
    unknown(fixture.store.settle(&lease.settlement(1, &[("rpm", 1)])).await.err());
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
}

/// And is unknown after that.
pub async fn ended_lease_is_kept_for_ten_minutes(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets minutes pass");
    let levels = own("acme", &[slow("rpm", 10)]);
    let lease = fixture.takes(&levels, &[("rpm", 5)]).await;
    let settle = lease.settlement(1, &[("rpm", 3)]);
    fixture.store.settle(&settle).await.expect("an open lease is settled");
    fixture.time.pass(Duration::from_secs(599)).await;
    fixture.sweep_all().await;
    repeated(&fixture.store.settle(&settle).await.expect("its record is still kept"));
    fixture.time.pass(Duration::from_secs(2)).await;
    fixture.sweep_all().await;
    let dropped = fixture.store.settle(&settle).await;
    assert!(matches!(dropped, Err(StoreError::NoLease { .. })), "after ten minutes it returns {dropped:?}");
    assert_eq!(fixture.shows("acme", "rpm").await, (7, 3));
}

/// Draws are never later than that.
pub async fn cancel_tombstone_is_kept_for_ten_minutes(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets minutes pass");
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 5)]);
    let cancel = Cancel { lease: draw.lease, step: 1, levels: levels.clone(), is_watched: true };
    fixture.store.cancel(&cancel).await.expect("cancelling an unknown lease is no error");
    fixture.time.pass(Duration::from_secs(599)).await;
    fixture.sweep_all().await;
    is_ended(fixture.store.draw(&draw).await, Ending::Cancelled);
    fixture.is_untouched("acme", "rpm").await;
}
