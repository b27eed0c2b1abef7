//! Changes of rules while buckets are in use.

use std::time::Duration;

use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::Limit;

use super::Fixture;
use super::kit::{levels, millis, reading, refilled, slow, subject};

/// It applies from the next draw.
pub async fn newer_rule_keeps_the_level_capped_to_its_burst(fixture: Fixture) {
    fixture.takes(&levels(1, &[("acme", &[slow("rpm", 100)])]), &[("rpm", 30)]).await;
    let wider = levels(2, &[("acme", &[slow("rpm", 200)])]);
    fixture.takes(&wider, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (69, 31));
    fixture.is_refused(&wider, &[("rpm", 70)]).await;
    let narrower = levels(3, &[("acme", &[slow("rpm", 2)])]);
    fixture.takes(&narrower, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (1, 32));
    let (_, meter) = fixture.meter(&subject("acme"), "rpm").await;
    let meter = meter.expect("it was drawn from");
    assert_eq!((meter.rule().shape().burst(), meter.version()), (2, Version::new(3)));
}

/// Without a jump of the level.
pub async fn newer_rate_refills_from_the_current_level(fixture: Fixture) {
    fixture.takes(&levels(1, &[("acme", &[slow("rpm", 100)])]), &[("rpm", 100)]).await;
    let fast = Limit::per_second("rpm", 100);
    let newer = levels(2, &[("acme", &[fast.clone(), slow("tpm", 1)])]);
    // Adopted with the draw: time before it refills at the old rate.
    let since = fixture.takes(&newer, &[("rpm", 0), ("tpm", 1)]).await.at;
    fixture.time.pass(millis(300)).await;
    let (at, meter) = fixture.meter(&subject("acme"), "rpm").await;
    let available = meter.map(|meter| meter.available(at));
    assert_eq!(available, Some(refilled(&fast, since, at)));
}

/// Also limits after a short one.
pub async fn refusal_reads_every_limit_by_the_newest_rule(fixture: Fixture) {
    fixture
        .takes(&levels(1, &[("acme", &[slow("rpm", 1), slow("tpm", 100)])]), &[("rpm", 1), ("tpm", 1)])
        .await;
    let wider = levels(2, &[("acme", &[slow("rpm", 1), slow("tpm", 1_000)])]);
    let moved = fixture.is_refused(&wider, &[("rpm", 1), ("tpm", 500)]).await;
    let tpm = reading(&moved, &wider, 0, "tpm").meter(&wider);
    assert_eq!((tpm.rule().shape().burst(), tpm.version()), (1_000, Version::new(2)));
}

/// A stale caller cannot change the rule.
pub async fn stale_rule_is_decided_by_the_current_one(fixture: Fixture) {
    fixture.takes(&levels(5, &[("acme", &[slow("rpm", 10)])]), &[("rpm", 1)]).await;
    // Wider than the current rule.
    let stale = levels(4, &[("acme", &[slow("rpm", 1_000)])]);
    let moved = fixture.is_refused(&stale, &[("rpm", 50)]).await;
    let current = reading(&moved, &stale, 0, "rpm").version();
    assert_eq!(current, Version::new(5), "the refusal shows that the caller is stale");
    // Narrower.
    let stale = levels(3, &[("acme", &[slow("rpm", 1)])]);
    fixture.takes(&stale, &[("rpm", 5)]).await;
    let (at, meter) = fixture.meter(&subject("acme"), "rpm").await;
    let meter = meter.expect("it was drawn from");
    assert_eq!((meter.available(at), meter.rule().shape().burst()), (4, 10));
    assert_eq!(meter.version(), Version::new(5));
}

/// An unchanged rule at a newer version makes all earlier versions stale.
pub async fn same_rule_at_newer_version_outdates_older_ones(fixture: Fixture) {
    let ten = [slow("rpm", 10)];
    fixture.takes(&levels(5, &[("acme", &ten)]), &[("rpm", 1)]).await;
    fixture.takes(&levels(9, &[("acme", &ten)]), &[("rpm", 1)]).await;
    fixture.takes(&levels(7, &[("acme", &[slow("rpm", 1)])]), &[("rpm", 1)]).await;
    let (at, meter) = fixture.meter(&subject("acme"), "rpm").await;
    let meter = meter.expect("it was drawn from");
    assert_eq!((meter.available(at), meter.version()), (7, Version::new(9)));
}

/// It starts full.
pub async fn limit_added_to_a_live_bucket_is_drawn(fixture: Fixture) {
    fixture.takes(&levels(1, &[("acme", &[slow("rpm", 10)])]), &[("rpm", 4)]).await;
    let more = levels(2, &[("acme", &[slow("rpm", 10), slow("tpm", 100)])]);
    fixture.takes(&more, &[("rpm", 1), ("tpm", 100)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (5, 5));
    assert_eq!(fixture.shows("acme", "tpm").await, (0, 100));
}

/// The entity's limits are removed, and the resource's smaller one applies.
pub async fn removed_limit_is_no_longer_enforced(fixture: Fixture) {
    let before = levels(1, &[("acme", &[slow("rpm", 500), slow("tpm", 1)])]);
    fixture.takes(&before, &[("rpm", 1), ("tpm", 1)]).await;
    let after = levels(2, &[("acme", &[slow("rpm", 100)])]);
    fixture.is_refused(&after, &[("rpm", 101)]).await;
    fixture.takes(&after, &[("rpm", 100)]).await;
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 101));
}

/// A lease ends in the buckets it drew from, regardless of later policies.
pub async fn policy_change_strands_no_lease(fixture: Fixture) {
    let before =
        levels(1, &[("child", &[slow("rpm", 10), slow("tpm", 100)]), ("parent", &[slow("rpm", 20)])]);
    let mut cancelled = fixture.takes(&before, &[("rpm", 2), ("tpm", 30)]).await;
    let mut settled = fixture.takes(&before, &[("rpm", 1), ("tpm", 30)]).await;
    // Without the parent and `tpm`, and with a smaller `rpm`.
    let after = levels(2, &[("child", &[slow("rpm", 5)])]);
    fixture.takes(&after, &[("rpm", 1)]).await;
    assert_eq!(fixture.shows("child", "rpm").await, (4, 4));
    cancelled.cancels().await;
    settled.adjusts(&[("tpm", 5)]).await;
    settled.settles(&[("rpm", 1), ("tpm", 25)]).await;
    assert_eq!(fixture.shows("child", "rpm").await, (5, 2), "capped to the current burst");
    assert_eq!(fixture.shows("child", "tpm").await, (75, 25));
    assert_eq!(fixture.shows("parent", "rpm").await, (19, 1));
    let (_, meter) = fixture.meter(&subject("child"), "rpm").await;
    assert_eq!(
        meter.map(|meter| meter.rule().shape().burst()),
        Some(5),
        "an old lease does not change the rule"
    );
}

/// The level at the change is kept.
pub async fn new_rate_counts_from_its_change(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets an hour pass");
    let (slow, fast) = (Limit::per_hour("tpm", 60).burst(200), Limit::per_hour("tpm", 120).burst(200));
    fixture.takes(&levels(1, &[("acme", std::slice::from_ref(&slow))]), &[("tpm", 200)]).await;
    fixture.time.pass(Duration::from_secs(1_800)).await;
    fixture.takes(&levels(2, &[("acme", std::slice::from_ref(&fast))]), &[("tpm", 1)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await.0, 29);
    fixture.time.pass(Duration::from_secs(1_800)).await;
    assert_eq!(fixture.shows("acme", "tpm").await.0, 89);
}
