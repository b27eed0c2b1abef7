//! What becomes of what was drawn: more, less, settled, cancelled, spent.

use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::rule::Limit;

use super::Fixture;
use super::kit::{balance, granted, is_ended, millis, own, reading, refused, slow};

/// As if it had never been.
pub async fn a_cancel_returns_all_of_it(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100), slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10), ("tpm", 60)]).await;
    let moved = lease.cancels().await;
    assert_eq!(reading(&moved, &levels, 0, "rpm").moved, -10);
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -60);
    assert_eq!(fixture.shows("acme", "rpm").await, (100, 0));
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
}

/// What was adjusted and extended returns with the rest.
pub async fn a_cancel_returns_what_was_adjusted_and_extended(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 40)]).await;
    lease.adjusts(&[("tpm", 10)]).await;
    lease.extends(&[("tpm", 20)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (30, 70));
    let moved = lease.cancels().await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -70);
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
}

/// Of 40 and 30 more, 55 were used.
pub async fn a_settle_says_what_stays_spent(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 40)]).await;
    lease.adjusts(&[("tpm", 30)]).await;
    let moved = lease.settles(&[("tpm", 55)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -15);
    assert_eq!(fixture.shows("acme", "tpm").await, (45, 55));
}

/// A settle that does not name a limit leaves it at what is held.
pub async fn a_settle_leaves_what_it_does_not_name(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100), slow("usd", 5)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1), ("tpm", 40)]).await;
    // One is named that was not drawn: it was used all the same.
    lease.settles(&[("tpm", 10), ("usd", 2)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
    assert_eq!(fixture.shows("acme", "tpm").await, (90, 10));
    assert_eq!(fixture.shows("acme", "usd").await, (3, 2));
}

/// More was used than drawn: what is missing is debt, and nobody enters until it is paid.
pub async fn a_settle_above_what_is_there_leaves_a_debt(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    let moved = lease.settles(&[("tpm", 130)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 120);
    assert_eq!(fixture.shows("acme", "tpm").await, (-30, 130));
    fixture.is_refused(&levels, &[("tpm", 1)]).await;
}

/// Nothing was used after all.
pub async fn a_settle_at_nothing_returns_all_of_it(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    lease.settles(&[("tpm", 0)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
    lease.has_ended(Ending::Settled, &[("tpm", 1)]).await;
}

/// The lease is as it was, and goes on.
pub async fn a_refused_extension_leaves_the_lease_as_it_was(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 1_000)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 500)]).await;
    let moved = refused(fixture.store.extend(&lease.extension(1, &[("tpm", 600)])).await);
    assert_eq!(balance(&moved, &levels, (0, "tpm"), 600).available, 500);
    assert_eq!(fixture.shows("acme", "tpm").await, (500, 500));
    // What was refused was not done, so its step is free.
    lease.extends(&[("tpm", 400)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 900));
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "tpm").await, (1_000, 0));
}

/// An extension may name limits that the draw did not.
pub async fn an_extension_may_draw_a_limit_for_the_first_time(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1)]).await;
    let moved = lease.extends(&[("tpm", 30)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 30);
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (10, 0));
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
}

/// An adjustment is never refused; what is missing is debt.
pub async fn an_adjustment_may_leave_a_debt(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 1_000)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 500)]).await;
    let moved = lease.adjusts(&[("tpm", 1_000)]).await;
    let adjusted = reading(&moved, &levels, 0, "tpm");
    assert_eq!((adjusted.moved, adjusted.meter(&levels).available(moved.at)), (1_000, -500));
    assert_eq!(fixture.shows("acme", "tpm").await, (-500, 1_500));
    fixture.is_refused(&levels, &[("tpm", 1)]).await;
    lease.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-500, 1_500));
}

/// Less was used, and no more returns than was held.
pub async fn an_adjustment_returns_no_more_than_is_held(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 1_000)]);
    fixture.takes(&levels, &[("tpm", 100)]).await;
    let mut lease = fixture.takes(&levels, &[("tpm", 500)]).await;
    let moved = lease.adjusts(&[("tpm", -200)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -200);
    assert_eq!(fixture.shows("acme", "tpm").await, (600, 400));
    let moved = lease.adjusts(&[("tpm", -900)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -300);
    assert_eq!(fixture.shows("acme", "tpm").await, (900, 100));
    let moved = lease.cancels().await;
    assert!(moved.readings.iter().all(|reading| reading.moved == 0), "it holds nothing: {moved:?}");
    assert_eq!(fixture.shows("acme", "tpm").await, (900, 100));
}

/// A bucket that has refilled meanwhile gets no fuller by what returns, on any path.
pub async fn what_returns_fills_a_limit_to_its_burst_and_no_further(fixture: Fixture) {
    let levels = own("acme", &[Limit::per_second("tpm", 1_000).burst(100)]);
    for path in 0..3 {
        let mut lease = fixture.takes(&levels, &[("tpm", 50)]).await;
        fixture.time.pass(millis(200)).await;
        match path {
            0 => lease.cancels().await,
            1 => lease.adjusts(&[("tpm", -50)]).await,
            _ => lease.settles(&[("tpm", 0)]).await,
        };
        assert_eq!(fixture.shows("acme", "tpm").await, (100, 0), "path {path}");
        fixture.is_refused(&levels, &[("tpm", 101)]).await;
    }
}

/// Two leases at once, 10 and 20 more, 5 and 15 more.
pub async fn leases_of_one_subject_add_up(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 1_000)]);
    let mut one = fixture.takes(&levels, &[("rpm", 10)]).await;
    let mut two = fixture.takes(&levels, &[("rpm", 5)]).await;
    one.extends(&[("rpm", 20)]).await;
    two.adjusts(&[("rpm", 15)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (950, 50));
    one.settles(&[]).await;
    two.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (950, 50));
}

/// A spend draws and settles at once: nothing is left to end.
pub async fn a_spend_is_a_draw_and_its_settle(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 1), ("tpm", 60)]);
    let moved = granted(fixture.store.spend(&draw).await);
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 60);
    assert_eq!(fixture.shows("acme", "tpm").await, (40, 60));
    refused(fixture.store.spend(&fixture.draw_of(&levels, &[("rpm", 1), ("tpm", 60)])).await);
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
    let lease = fixture.takes(&levels, &[("rpm", 1)]).await;
    let settle = crate::Settle { lease: draw.lease, ..lease.settlement(1, &[("tpm", 1)]) };
    is_ended(fixture.store.settle(&settle).await, Ending::Settled);
    let cancel = crate::Cancel { lease: draw.lease, ..lease.cancellation(1) };
    is_ended(fixture.store.cancel(&cancel).await, Ending::Settled);
    assert_eq!(fixture.shows("acme", "tpm").await, (40, 60));
}
