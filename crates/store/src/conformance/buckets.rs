//! A limit admits exactly the units available, all or nothing, regardless of polling.

use std::time::Duration;

use tidegate_core::limit::rule::Limit;

use super::Fixture;
use super::kit::{balance, entity_id, granted, levels_of, millis, on, own, reading, refilled, slow, subject};
use crate::{DrawResult, Lookup};

/// All units can be drawn, and nothing after them.
pub async fn full_limit_is_taken_to_the_last_unit(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    fixture.takes(&levels, &[("tpm", 100)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (0, 100));
    fixture.is_refused(&levels, &[("tpm", 1)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (0, 100));
}

/// No wait helps, and the refusal shows it.
pub async fn draw_above_the_burst_is_never_possible(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let moved = fixture.is_refused(&levels, &[("tpm", 150)]).await;
    let shown = balance(&moved, &levels, (0, "tpm"), 150);
    assert_eq!((shown.available, shown.retry_after), (100, None));
    fixture.is_untouched("acme", "tpm").await;
    fixture.takes(&levels, &[("tpm", 100)]).await;
}

/// One short limit leaves the others untouched.
pub async fn refused_draw_takes_from_no_limit(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100), slow("tpm", 100)]);
    fixture.takes(&levels, &[("rpm", 1), ("tpm", 50)]).await;
    let moved = fixture.is_refused(&levels, &[("rpm", 1), ("tpm", 80)]).await;
    assert_eq!(moved.readings.len(), 2, "both limits took part");
    assert!(!balance(&moved, &levels, (0, "rpm"), 1).is_short());
    assert!(balance(&moved, &levels, (0, "tpm"), 80).is_short());
    assert_eq!(fixture.shows("acme", "rpm").await, (99, 1));
    assert_eq!(fixture.shows("acme", "tpm").await, (50, 50));
}

/// The reading of a refusal has both.
pub async fn refusal_has_available_units_and_retry_time(fixture: Fixture) {
    let levels = own("acme", &[Limit::per_day("rpm", 10)]);
    fixture.takes(&levels, &[("rpm", 5)]).await;
    let moved = fixture.is_refused(&levels, &[("rpm", 8)]).await;
    let shown = balance(&moved, &levels, (0, "rpm"), 8);
    assert_eq!((shown.available, shown.burst, shown.asked, shown.consumed), (5, 10, 8, 5));
    let wait = shown.retry_after.expect("eight of ten will be available");
    let (day, passed) = (Duration::from_secs(86_400), Duration::from_secs(600));
    assert!(wait <= day * 3 / 10 && wait + passed > day * 3 / 10, "three tenths of a day, not {wait:?}");
}

/// A draw is written before the reply.
pub async fn draw_is_visible_before_it_is_settled(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
    fixture.is_refused(&levels, &[("rpm", 91)]).await;
    lease.settles(&[]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
}

/// A grant returns the state of each limit that took part.
pub async fn grant_reads_each_limit_that_took_part(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10), slow("tpm", 100), slow("usd", 5)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 1), ("tpm", 30)]);
    let moved = granted(fixture.store.draw(&draw).await);
    assert_eq!(moved.readings.len(), 2, "the third took no part");
    for (name, taken, left) in [("rpm", 1, 9), ("tpm", 30, 70)] {
        let reading = reading(&moved, &levels, 0, name);
        assert_eq!((reading.moved, reading.meter(&levels).available(moved.at)), (taken, left), "{name}");
        assert_eq!(reading.meter(&levels).rule().name().as_str(), name);
    }
    fixture.is_untouched("acme", "usd").await;
}

/// The limit may be empty.
pub async fn zero_units_require_only_that_there_is_no_debt(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100), slow("tpm", 10)]);
    let mut lease = fixture.takes(&levels, &[("rpm", 1), ("tpm", 10)]).await;
    fixture.takes(&levels, &[("rpm", 1), ("tpm", 0)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (0, 10));
    lease.adjusts(&[("tpm", 1)]).await;
    let moved = fixture.is_refused(&levels, &[("rpm", 1), ("tpm", 0)]).await;
    assert!(balance(&moved, &levels, (0, "tpm"), 0).is_short());
    assert_eq!(fixture.shows("acme", "rpm").await, (98, 2));
    // A draw that does not name the limit ignores its debt.
    fixture.takes(&levels, &[("rpm", 1)]).await;
}

/// Subjects are pairs: another entity or another resource has its own bucket.
pub async fn each_subject_has_its_own_buckets(fixture: Fixture) {
    let limits = [slow("rpm", 10)];
    let pairs = [("acme", "gpt"), ("acme", "embed"), ("globex", "gpt")];
    for (number, (entity, name)) in (1..).zip(pairs) {
        let subject = on(entity, name);
        let levels = levels_of(0, &[(subject.clone(), &limits)]);
        fixture.takes(&levels, &[("rpm", number)]).await;
        let (at, meter) = fixture.meter(&subject, "rpm").await;
        let left = meter.map(|meter| meter.available(at));
        assert_eq!(left, 10_i64.checked_sub_unsigned(number), "{subject}");
    }
}

/// A limit given with a call has a bucket per subject, name and shape, separate from the stored one.
pub async fn call_limit_has_its_own_bucket(fixture: Fixture) {
    let stored = own("acme", &[slow("rpm", 10)]);
    let with = |burst| {
        let rule = slow("rpm", burst).check().expect("the suite's limits are valid");
        std::sync::Arc::new(stored.with_call_limits([rule]))
    };
    let (five, seven) = (with(5), with(7));
    fixture.takes(&stored, &[("rpm", 10)]).await;
    let mut lease = fixture.takes(&five, &[("rpm", 5)]).await;
    fixture.is_refused(&five, &[("rpm", 1)]).await;
    fixture.takes(&seven, &[("rpm", 1)]).await;
    let row =
        |levels: &tidegate_core::limit::cascade::Levels| levels.levels()[0].limits[0].rule.row().to_owned();
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 10));
    assert_eq!(fixture.shows("acme", &row(&five)).await, (0, 5));
    assert_eq!(fixture.shows("acme", &row(&seven)).await, (6, 1));
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", &row(&five)).await, (5, 0));
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 10));
}

/// Neither the level nor the consumed units change.
pub async fn reading_balances_takes_nothing(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10)]);
    fixture.takes(&levels, &[("rpm", 3)]).await;
    let (_, before) = fixture.meter(&subject("acme"), "rpm").await;
    for _ in 0..3 {
        assert_eq!(fixture.meter(&subject("acme"), "rpm").await.1, before);
    }
    let lookup = Lookup::Subjects(vec![subject("absent")]);
    let snapshot = fixture.store.balances(&lookup).await.expect("balances are read");
    assert!(snapshot.buckets.is_empty(), "an unused subject is not listed");
}

/// Several subjects, or all buckets of several entities, in one reply.
pub async fn balances_are_of_subjects_or_of_entities(fixture: Fixture) {
    let limits = [slow("rpm", 10)];
    for (entity, name) in [("acme", "gpt"), ("acme", "embed"), ("globex", "gpt"), ("initech", "gpt")] {
        let subject = on(entity, name);
        fixture.takes(&levels_of(0, &[(subject, &limits)]), &[("rpm", 1)]).await;
    }
    let table = [
        (Lookup::Subjects(vec![subject("globex"), subject("absent"), subject("acme")]), 2),
        (Lookup::Entities(vec![entity_id("acme")]), 2),
        (Lookup::Entities(vec![entity_id("acme"), entity_id("absent"), entity_id("initech")]), 3),
        (Lookup::Subjects(Vec::new()), 0),
    ];
    for (lookup, expected) in table {
        let snapshot = fixture.store.balances(&lookup).await.expect("balances are read");
        assert_eq!(snapshot.buckets.len(), expected, "{lookup:?}");
        for bucket in snapshot.buckets {
            assert_eq!(bucket.meters.len(), 1, "{}", bucket.subject);
            assert_eq!(bucket.meters[0].consumed(), 1, "{}", bucket.subject);
        }
    }
}

/// To the unit, on every engine.
pub async fn limit_refills_exactly_by_the_stores_clock(fixture: Fixture) {
    let limit = Limit::per_second("tpm", 100).burst(1_000);
    let levels = own("acme", std::slice::from_ref(&limit));
    let drained = fixture.takes(&levels, &[("tpm", 1_000)]).await;
    for _ in 0..4 {
        fixture.time.pass(millis(110)).await;
        let (at, meter) = fixture.meter(&subject("acme"), "tpm").await;
        let available = meter.map(|meter| meter.available(at));
        assert_eq!(available, Some(refilled(&limit, drained.at, at)), "{:?} on", at.since(drained.at));
    }
}

/// And not beyond.
pub async fn limit_refills_up_to_its_burst(fixture: Fixture) {
    let levels = own("acme", &[Limit::per_second("tpm", 1_000).burst(100)]);
    fixture.spends(&levels, &[("tpm", 100)]).await;
    fixture.time.pass(millis(300)).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 100));
    fixture.takes(&levels, &[("tpm", 100)]).await;
}

/// A refusal has the retry time, and the limit admits then.
pub async fn drained_limit_admits_at_its_retry_time(fixture: Fixture) {
    let levels = own("acme", &[Limit::per_second("rpm", 100)]);
    let drained = fixture.spends(&levels, &[("rpm", 100)]).await;
    match fixture.store.draw(&fixture.draw_of(&levels, &[("rpm", 100)])).await.expect("a draw has a result") {
        DrawResult::Refused(moved) => {
            let wait = balance(&moved, &levels, (0, "rpm"), 100).retry_after;
            let full_at = drained + Duration::from_secs(1);
            assert_eq!(wait, Some(full_at.since(moved.at)), "a second after it was drained");
            assert_ne!(wait, Some(Duration::ZERO), "a refusal has a wait");
        }
        // The store is so slow that the second has passed.
        DrawResult::Granted(moved) => assert!(moved.at.since(drained) >= Duration::from_secs(1)),
    }
    fixture.time.pass(millis(1_100)).await;
    fixture.takes(&own("acme", &[Limit::per_second("rpm", 100)]), &[("rpm", 50)]).await;
}

/// A limit in constant use does not keep another from refilling.
pub async fn slow_limit_refills_beside_a_busy_one(fixture: Fixture) {
    let slow = Limit::per_second("slow", 10).burst(20);
    let levels = own("acme", &[slow.clone(), Limit::per_second("busy", 1_000)]);
    let drained = fixture.spends(&levels, &[("slow", 20), ("busy", 1)]).await;
    for _ in 0..25 {
        fixture.time.pass(millis(20)).await;
        fixture.spends(&levels, &[("busy", 1)]).await;
    }
    let (at, meter) = fixture.meter(&subject("acme"), "slow").await;
    let available = meter.map(|meter| meter.available(at));
    assert_eq!(available, Some(refilled(&slow, drained, at)));
    assert!(available >= Some(5), "half a second refills five units");
}

/// Without background work.
pub async fn many_draws_of_one_subject_are_counted_exactly(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 2_000)]);
    // More than an engine keeps in one place.
    let draws = i64::from(fixture.times(1_300, 260));
    for number in 0..draws {
        let mut lease = fixture.takes(&levels, &[("rpm", 1)]).await;
        if number % 2 == 0 {
            lease.settles(&[]).await;
        }
    }
    assert_eq!(fixture.shows("acme", "rpm").await, (2_000 - draws, draws));
}

/// To the unit.
pub async fn minutes_refill_from_zero_and_from_debt(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets minutes pass");
    // The initial level, and the levels 30 s and 120 s later.
    let table = [(0, 50_000, 100_000), (-50_000, 0, 100_000), (-100_000, -50_000, 100_000)];
    for (number, (level, half, two)) in table.into_iter().enumerate() {
        let entity = format!("acme-{number}");
        let levels = own(&entity, &[Limit::per_minute("tpm", 100_000)]);
        let mut lease = fixture.takes(&levels, &[("tpm", 100_000)]).await;
        lease.adjusts(&[("tpm", -level)]).await;
        assert_eq!(fixture.shows(&entity, "tpm").await.0, level);
        fixture.time.pass(Duration::from_secs(30)).await;
        assert_eq!(fixture.shows(&entity, "tpm").await.0, half);
        fixture.time.pass(Duration::from_secs(90)).await;
        assert_eq!(fixture.shows(&entity, "tpm").await.0, two);
    }
}

/// A rate that is not a whole number per millisecond, polled every millisecond for a minute.
pub async fn polling_neither_gains_nor_loses_a_unit(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets a minute pass, a millisecond at a time");
    let levels = own("acme", &[Limit::per("tpm", 1_000, Duration::from_secs(3))]);
    fixture.spends(&levels, &[("tpm", 1_000)]).await;
    let mut admitted = 0;
    let polls = fixture.times(60_000, 1_500);
    for _ in 0..polls {
        fixture.time.pass(millis(1)).await;
        let answer = fixture.store.spend(&fixture.draw_of(&levels, &[("tpm", 1)])).await;
        admitted += u32::from(matches!(answer.expect("a spend has a result"), DrawResult::Granted(_)));
    }
    assert_eq!(admitted, polls / 3);
}
