//! Extending, adjusting, settling, cancelling and spending.

use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::rule::Limit;

use super::Fixture;
use super::kit::{balance, granted, is_ended, millis, own, reading, refused, slow};
use super::ledger::used_by;

/// The limits are as before the draw.
pub async fn cancel_returns_all_units(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100), slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10), ("tpm", 60)]).await;
    let moved = lease.cancels().await;
    assert_eq!(reading(&moved, &levels, 0, "rpm").moved, -10);
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -60);
    assert_eq!(fixture.shows("acme", "rpm").await, (100, 0));
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
}

/// Together with the drawn units.
pub async fn cancel_returns_adjusted_and_extended_units(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 40)]).await;
    lease.adjusts(&[("tpm", 10)]).await;
    lease.extends(&[("tpm", 20)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (30, 70));
    let moved = lease.cancels().await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -70);
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
}

/// Of 40 units and 30 more, 55 were used.
pub async fn settle_keeps_the_actual_usage(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 40)]).await;
    lease.adjusts(&[("tpm", 30)]).await;
    let moved = lease.settles(&[("tpm", 55)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -15);
    assert_eq!(fixture.shows("acme", "tpm").await, (45, 55));
}

/// Unnamed limits are settled at the units held.
pub async fn settle_keeps_limits_that_it_does_not_name(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100), slow("usd", 5)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1), ("tpm", 40)]).await;
    // `usd` was not drawn, but used.
    lease.settles(&[("tpm", 10), ("usd", 2)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
    assert_eq!(fixture.shows("acme", "tpm").await, (90, 10));
    assert_eq!(fixture.shows("acme", "usd").await, (3, 2));
}

/// More was used than drawn: missing units become debt, and draws are refused until it is paid.
pub async fn settle_above_available_units_leaves_a_debt(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    let moved = lease.settles(&[("tpm", 130)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 120);
    assert_eq!(fixture.shows("acme", "tpm").await, (-30, 130));
    fixture.is_refused(&levels, &[("tpm", 1)]).await;
}

/// Units that were used before: a lease draws nothing, which no debt refuses, and is settled at its usage.
pub async fn lease_of_nothing_is_settled_at_its_usage(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100)]);
    for (used, left) in [(130, -30), (20, -50)] {
        let mut lease = fixture.takes(&levels, &[]).await;
        lease.settles(&[("tpm", used)]).await;
        assert_eq!(fixture.shows("acme", "tpm").await, (left, 100 - left));
    }
    let mut lease = fixture.takes(&levels, &[]).await;
    lease.adjusts(&[("tpm", 7)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-57, 157));
    lease.adjusts(&[("tpm", -9)]).await;
    lease.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-50, 150));
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (150, 150, 3));
    fixture.is_untouched("acme", "rpm").await;
}

/// Nothing was used.
pub async fn settle_at_zero_returns_all_units(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    lease.settles(&[("tpm", 0)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
    lease.has_ended(Ending::Settled, &[("tpm", 1)]).await;
}

/// The lease continues.
pub async fn refused_extension_leaves_the_lease_unchanged(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 1_000)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 500)]).await;
    let moved = refused(fixture.store.extend(&lease.extension(1, &[("tpm", 600)])).await);
    assert_eq!(balance(&moved, &levels, (0, "tpm"), 600).available, 500);
    assert_eq!(fixture.shows("acme", "tpm").await, (500, 500));
    // A refused step does not count as applied, so its number is free.
    lease.extends(&[("tpm", 400)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 900));
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "tpm").await, (1_000, 0));
}

/// One that the draw did not name.
pub async fn extension_may_name_a_new_limit(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1)]).await;
    let moved = lease.extends(&[("tpm", 30)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 30);
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "rpm").await, (10, 0));
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
}

/// It is never refused; missing units become debt.
pub async fn adjustment_may_leave_a_debt(fixture: Fixture) {
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

/// A negative adjustment is capped.
pub async fn adjustment_returns_no_more_than_is_held(fixture: Fixture) {
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
    assert!(moved.readings.iter().all(|reading| reading.moved == 0), "it holds no units: {moved:?}");
    assert_eq!(fixture.shows("acme", "tpm").await, (900, 100));
}

/// A bucket that has refilled since the draw is not overfilled, on any path.
pub async fn returned_units_fill_a_limit_up_to_its_burst(fixture: Fixture) {
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

/// Two concurrent leases: 10 and 20 more, 5 and 15 more.
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

/// No open lease is left.
pub async fn spend_is_a_draw_and_a_settle(fixture: Fixture) {
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
