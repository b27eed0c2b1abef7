//! Each step counts once, in order, however often and however late it arrives.

use std::time::Duration;

use tidegate_core::limit::lease::Ending;

use super::Fixture;
use super::kit::{granted, is_ended, millis, own, refused, repeated, slow};
use crate::{Cancel, Drawn, StoreError};

/// A draw whose reply was lost is sent again.
pub async fn the_same_draw_again_takes_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let first = granted(fixture.store.draw(&draw).await);
    assert!(!first.is_repeat);
    for _ in 0..3 {
        fixture.time.pass(millis(5)).await;
        let again = granted(fixture.store.draw(&draw).await);
        repeated(&again);
        assert_eq!(again.at, first.at, "it tells when it was decided first");
        assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
    }
}

/// A draw that was refused was not done: asked again, it is decided anew.
pub async fn a_refused_draw_may_be_asked_again(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut holder = fixture.takes(&levels, &[("rpm", 6)]).await;
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    refused(fixture.store.draw(&draw).await);
    holder.cancels().await;
    let moved = granted(fixture.store.draw(&draw).await);
    assert!(!moved.is_repeat, "it had not been done");
    assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
}

/// An extension whose reply was lost is sent again.
pub async fn the_same_extension_again_takes_nothing_more(fixture: Fixture) {
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

/// An adjustment whose reply was lost is sent again, up or down.
pub async fn the_same_adjustment_again_moves_nothing_more(fixture: Fixture) {
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

/// The same settle again is answered as the first time, and anything else is told that it has ended.
pub async fn the_same_settle_again_is_answered_as_the_first_time(fixture: Fixture) {
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
        assert_eq!(again.at, first.at, "it tells when it was decided first");
        is_ended(fixture.store.settle(&lease.settlement(1, &[("rpm", 4)])).await, Ending::Settled);
        lease.has_ended(Ending::Settled, &[("rpm", 1)]).await;
        assert_eq!(fixture.shows("acme", "rpm").await, (7, 3));
    }
}

/// So is the same cancel, and a settle after it is told that the lease was cancelled.
pub async fn the_same_cancel_again_returns_nothing_more(fixture: Fixture) {
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

/// A draw that arrives again after the end takes nothing.
pub async fn a_draw_that_arrives_after_the_end_takes_nothing(fixture: Fixture) {
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

/// A spend whose reply was lost is sent again.
pub async fn the_same_spend_again_takes_nothing_more(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let first = granted(fixture.store.spend(&draw).await);
    assert!(!first.is_repeat);
    for _ in 0..3 {
        let again = granted(fixture.store.spend(&draw).await);
        repeated(&again);
        assert_eq!(again.at, first.at, "it tells when it was decided first");
        assert_eq!(fixture.shows("acme", "rpm").await, (4, 6));
    }
}

/// A step that comes after a later one is refused, and moves nothing.
pub async fn a_step_that_comes_after_a_later_one_is_refused(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let overtaken = lease.extension(1, &[("rpm", 5)]);
    lease.step = 1;
    lease.adjusts(&[("rpm", 10)]).await;
    match fixture.store.extend(&overtaken).await {
        Err(StoreError::Late { lease: id, step, done }) => assert_eq!((id, step, done), (lease.id, 1, 2)),
        other => panic!("an overtaken extension answers {other:?}"),
    }
    let late = fixture.store.adjust(&lease.adjustment(1, &[("rpm", 5)])).await;
    assert!(matches!(late, Err(StoreError::Late { .. })), "an overtaken adjustment answers {late:?}");
    let late = fixture.store.settle(&lease.settlement(1, &[("rpm", 5)])).await;
    assert!(matches!(late, Err(StoreError::Late { .. })), "an overtaken settle answers {late:?}");
    assert_eq!(fixture.shows("acme", "rpm").await, (80, 20));
    // It is as open as before.
    lease.settles(&[("rpm", 12)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (88, 12));
}

/// A draw that arrives again after later steps moves nothing, whichever way it is answered.
pub async fn a_draw_that_arrives_after_later_steps_takes_nothing(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 10)]);
    granted(fixture.store.draw(&draw).await);
    let other = fixture.takes(&levels, &[("rpm", 1)]).await;
    let extend = crate::Extend { lease: draw.lease, ..other.extension(1, &[("rpm", 4)]) };
    granted(fixture.store.extend(&extend).await);
    match fixture.store.draw(&draw).await {
        Ok(Drawn::Granted(moved)) => repeated(&moved),
        Err(StoreError::Late { step, done, .. }) => assert_eq!((step, done), (0, 1)),
        other => panic!("a draw that was done answers {other:?}"),
    }
    assert_eq!(fixture.shows("acme", "rpm").await, (85, 15));
    let cancel = Cancel { lease: draw.lease, ..other.cancellation(2) };
    fixture.store.cancel(&cancel).await.expect("an open lease is cancelled");
    assert_eq!(fixture.shows("acme", "rpm").await, (99, 1));
}

/// Steps may be left out: a refused or abandoned one is never sent again.
pub async fn steps_may_be_left_out(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    lease.step = 6;
    lease.extends(&[("rpm", 1)]).await;
    lease.step = 40;
    lease.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (89, 11));
}

/// A cancel that overtakes its draw leaves a mark, and the draw is refused when it arrives.
pub async fn a_cancel_that_comes_first_refuses_the_draw(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 6)]);
    let cancel = Cancel { lease: draw.lease, step: 1, levels: levels.clone(), is_watched: true };
    let moved = fixture.store.cancel(&cancel).await.expect("cancelling an unknown lease is no error");
    assert!(moved.readings.iter().all(|reading| reading.moved == 0), "nothing was held");
    fixture.store.cancel(&cancel).await.expect("nor is it the second time");
    is_ended(fixture.store.draw(&draw).await, Ending::Cancelled);
    is_ended(fixture.store.spend(&draw).await, Ending::Cancelled);
    fixture.is_untouched("acme", "rpm").await;
}

/// A lease that never drew is not known.
pub async fn a_lease_that_never_drew_is_not_known(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1)]).await;
    lease.id = fixture.next_lease();
    let unknown = |error: Option<StoreError>| match error {
        Some(StoreError::NoLease { lease: id }) => assert_eq!(id, lease.id),
        other => panic!("an unknown lease answers {other:?}"),
    };
    unknown(fixture.store.extend(&lease.extension(1, &[("rpm", 1)])).await.err());
    unknown(fixture.store.adjust(&lease.adjustment(1, &[("rpm", 1)])).await.err());
    unknown(fixture.store.settle(&lease.settlement(1, &[("rpm", 1)])).await.err());
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
}

/// An ended lease is remembered for ten minutes, and then it never was.
pub async fn an_ended_lease_is_remembered_for_ten_minutes(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets minutes pass");
    let levels = own("acme", &[slow("rpm", 10)]);
    let lease = fixture.takes(&levels, &[("rpm", 5)]).await;
    let settle = lease.settlement(1, &[("rpm", 3)]);
    fixture.store.settle(&settle).await.expect("an open lease is settled");
    fixture.time.pass(Duration::from_secs(599)).await;
    fixture.sweep_all().await;
    repeated(&fixture.store.settle(&settle).await.expect("it is still remembered"));
    fixture.time.pass(Duration::from_secs(2)).await;
    fixture.sweep_all().await;
    let forgotten = fixture.store.settle(&settle).await;
    assert!(matches!(forgotten, Err(StoreError::NoLease { .. })), "ten minutes on it answers {forgotten:?}");
    assert_eq!(fixture.shows("acme", "rpm").await, (7, 3));
}

/// A mark left by a cancel is remembered as long: a draw ten minutes late is the oldest there is.
pub async fn the_mark_of_a_cancel_is_remembered_for_ten_minutes(fixture: Fixture) {
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
