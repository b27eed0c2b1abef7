//! Bounded debts and lists of buckets: each bucket takes and returns by itself.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{BUCKETS_MAX, Levels};
use tidegate_core::limit::name::{Across, Subject};
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope, Version};
use tidegate_core::limit::resolve::{resolve, scopes};
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::{Usage, Window};

use super::Fixture;
use super::kit::{
    ACTOR, all_of, entity_id, levels, levels_of, millis, on, own, reading, resource, slow, subject,
};
use super::ledger::{usage, used_by};
use crate::{LeaseStatus, Lookup, PolicyChange, StoreError, Terms, UsageOf};

/// One entity whose limit `tpm` holds 100 units and goes no more than 50 into debt.
fn bounded() -> Arc<Levels> {
    Arc::new(Levels::clone(&own("acme", &[slow("tpm", 100)])).with_debt_max(|_, _| Some(50)))
}

/// A settle far above the bound: the ledger has all units, the bucket stops at the bound.
pub async fn settle_stops_debt_at_its_bound(fixture: Fixture) {
    let levels = bounded();
    let mut lease = fixture.takes(&levels, &[("tpm", 60)]).await;
    let moved = lease.settles(&[("tpm", 300_000)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 90);
    assert_eq!(fixture.shows("acme", "tpm").await, (-50, 150));
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (300_000, 300_000, 1));
    fixture.is_refused(&levels, &[("tpm", 1)]).await;
}

/// To the last unit.
pub async fn settle_within_the_bound_is_taken_whole(fixture: Fixture) {
    let levels = bounded();
    let mut lease = fixture.takes(&levels, &[("tpm", 60)]).await;
    lease.settles(&[("tpm", 149)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-49, 149));
    let mut next =
        fixture.takes(&levels_of(0, &[(subject("other"), &[slow("tpm", 1)])]), &[("tpm", 1)]).await;
    next.cancels().await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-49, 149));
}

/// Not the units that the lease was adjusted to.
pub async fn cancel_returns_what_the_bucket_took(fixture: Fixture) {
    let levels = bounded();
    let mut lease = fixture.takes(&levels, &[("tpm", 100)]).await;
    let moved = lease.adjusts(&[("tpm", 200)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, 50);
    let repeated = fixture.store.adjust(&lease.adjustment(1, &[("tpm", 200)])).await.expect("a repeat");
    assert!(repeated.is_repeat);
    assert_eq!(fixture.shows("acme", "tpm").await, (-50, 150));
    let moved = lease.cancels().await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -150);
    assert_eq!(fixture.shows("acme", "tpm").await, (100, 0));
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (0, 0, 0));
}

/// Units that the bucket never took are returned first, without moving it.
pub async fn partial_return_starts_with_the_shortfall(fixture: Fixture) {
    let levels = bounded();
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    for (delta, moved, left) in [(300, 140, -50), (7, 0, -50), (-107, 0, -50), (-100, -40, -10)] {
        let answer = lease.adjusts(&[("tpm", delta)]).await;
        assert_eq!(reading(&answer, &levels, 0, "tpm").moved, moved, "adjusted by {delta}");
        assert_eq!(fixture.shows("acme", "tpm").await.0, left, "adjusted by {delta}");
    }
    match fixture.store.lease(lease.id).await.expect("an open lease is found") {
        LeaseStatus::Open(open) => assert_eq!(open.record.held(), [Some(110)]),
        LeaseStatus::Ended(ended) => panic!("it has ended: {ended:?}"),
    }
    let moved = lease.settles(&[("tpm", 5)]).await;
    assert_eq!(reading(&moved, &levels, 0, "tpm").moved, -105);
    assert_eq!(fixture.shows("acme", "tpm").await, (95, 5));
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (5, 5, 1));
}

/// One without debt, one without a bound, and one with a small bound.
pub async fn each_bucket_has_its_own_bound(fixture: Fixture) {
    let limits = [slow("tpm", 100)];
    let wide = levels(0, &[("child", &limits), ("parent", &limits), ("top", &limits)]);
    let bound = |subject: &Subject| match subject.entity.as_str() {
        "child" => Some(0),
        "top" => Some(10),
        _ => None,
    };
    let levels = Arc::new(Levels::clone(&wide).with_debt_max(|subject, _| bound(subject)));
    let mut lease = fixture.takes(&levels, &[("tpm", 100)]).await;
    let moved = lease.adjusts(&[("tpm", 30)]).await;
    let each = [0, 1, 2].map(|level| reading(&moved, &levels, level, "tpm").moved);
    assert_eq!(each, [0, 30, 10]);
    let moved = lease.settles(&[("tpm", 110)]).await;
    let each = [0, 1, 2].map(|level| reading(&moved, &levels, level, "tpm").moved);
    assert_eq!(each, [0, -20, 0]);
    for (entity, shown) in [("child", (0, 100)), ("parent", (-10, 110)), ("top", (-10, 110))] {
        assert_eq!(fixture.shows(entity, "tpm").await, shown, "{entity}");
        let (units, _, leases) = used_by(&fixture, entity, "tpm").await;
        assert_eq!((units, leases), (110, 1), "{entity}");
    }
}

/// For each bucket.
pub async fn expiry_returns_what_the_buckets_took(fixture: Fixture) {
    let (entity, deadline, levels) = fixture
        .in_time(async |entity, deadline| {
            let parent = format!("{entity}-parent");
            let limits = [slow("tpm", 100)];
            let wide = levels(0, &[(entity, &limits), (&parent, &limits)]);
            let levels = Arc::new(
                Levels::clone(&wide)
                    .with_debt_max(|subject, _| (subject.entity.as_str() == entity).then_some(0)),
            );
            let terms = Terms { deadline, on_expiry: OnExpiry::Return };
            let lease = fixture.takes_on(terms, &levels, &[("tpm", 70)]).await;
            fixture.store.adjust(&lease.adjustment(1, &[("tpm", 50)])).await?;
            Ok::<_, StoreError>(levels)
        })
        .await;
    fixture.time.pass(deadline + millis(50)).await;
    fixture.sweep_all().await;
    for level in levels.levels() {
        fixture.is_untouched(level.subject.entity.as_str(), "tpm").await;
    }
    assert_eq!(used_by(&fixture, &entity, "tpm").await, (0, 0, 0));
}

/// A debt beyond the bound, caused by a caller without one: a lease with the bound takes nothing more, and
/// returns its own units.
pub async fn debt_beyond_the_bound_takes_no_more(fixture: Fixture) {
    let loose = own("acme", &[slow("tpm", 100)]);
    let tight = Arc::new(Levels::clone(&loose).with_debt_max(|_, _| Some(10)));
    let mut lease = fixture.takes(&tight, &[("tpm", 10)]).await;
    fixture.takes(&loose, &[("tpm", 90)]).await.settles(&[("tpm", 170)]).await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-80, 180));
    let moved = lease.adjusts(&[("tpm", 5)]).await;
    assert_eq!(reading(&moved, &tight, 0, "tpm").moved, 0);
    lease.cancels().await;
    assert_eq!(fixture.shows("acme", "tpm").await, (-70, 170));
}

/// Like any other debt.
pub async fn bounded_debt_is_paid_by_the_refill(fixture: Fixture) {
    let limit = Limit::per_second("tpm", 10).burst(10);
    let levels = Arc::new(Levels::clone(&own("acme", &[limit])).with_debt_max(|_, _| Some(5)));
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    lease.settles(&[("tpm", 1_000)]).await;
    fixture.time.pass(Duration::from_millis(1_100)).await;
    fixture.takes(&levels, &[("tpm", 1)]).await;
}

/// Pools are ordinary buckets: drawn together with the subject's own, all or nothing, and shared by all draws
/// that name them.
pub async fn pools_are_shared_by_all_who_name_them(fixture: Fixture) {
    let is_refused = fixture.store.pool_refusal(Across::Both).is_some();
    let (acme, gpt) = (entity_id("acme"), resource("gpt"));
    let all_models = Subject::pool(Some(acme), None);
    let all_entities = Subject::pool(None, Some(gpt));
    let all = Subject::pool(None, None);
    let (own, pool) = ([slow("rpm", 100)], [slow("rpm", 10)]);
    let first = levels_of(
        0,
        &[(on("acme", "gpt"), &own), (all_models.clone(), &pool), (all_entities.clone(), &pool)],
    );
    let second = levels_of(0, &[(on("acme", "o1"), &own), (all_models.clone(), &pool)]);
    let third =
        levels_of(0, &[(on("other", "gpt"), &own), (all_entities.clone(), &pool), (all.clone(), &own)]);
    if is_refused {
        for levels in [&first, &third] {
            let error =
                fixture.store.draw(&fixture.draw_of(levels, &[("rpm", 1)])).await.expect_err("refused");
            assert!(matches!(&error, StoreError::Invalid { .. }), "{error}");
        }
        return;
    }
    let mut lease = fixture.takes(&first, &[("rpm", 6)]).await;
    fixture.takes(&second, &[("rpm", 4)]).await.settles(&[("rpm", 4)]).await;
    fixture.is_refused(&second, &[("rpm", 1)]).await;
    fixture.takes(&third, &[("rpm", 4)]).await.settles(&[("rpm", 3)]).await;
    fixture.is_refused(&third, &[("rpm", 2)]).await;
    for (key, shown) in [(&all_models, 0), (&all_entities, 1), (&all, 97), (&on("acme", "o1"), 96)] {
        let (at, meter) = fixture.meter(key, "rpm").await;
        assert_eq!(meter.expect("it was used").available(at), shown, "{key}");
    }
    lease.settles(&[("rpm", 1)]).await;
    let lookup = Lookup::Subjects(vec![all_models.clone(), on("acme", "gpt")]);
    let snapshot = fixture.store.balances(&lookup).await.expect("balances are read");
    let keys = snapshot
        .buckets
        .iter()
        .map(|bucket| (bucket.subject.clone(), bucket.meters[0].available(snapshot.at)));
    assert_eq!(keys.collect::<Vec<_>>(), [(all_models, 5), (on("acme", "gpt"), 99)]);

    // They are listed with the other buckets of a resource, on any page.
    let (store, gpt) = (&fixture.store, &resource("gpt"));
    let listed = all_of(1, |paging| {
        Box::pin(async move { store.buckets(gpt, &paging).await.expect("buckets are listed") })
    });
    let listed: Vec<_> = listed.await.into_iter().map(|bucket| bucket.subject.entity.to_string()).collect();
    assert_eq!(listed, ["_default_", "acme", "other"]);
}

/// The maximum number of buckets is drawn, refused, settled and cancelled together; one more is an error.
pub async fn longest_list_of_buckets_is_drawn(fixture: Fixture) {
    let limits = [slow("rpm", 10)];
    let keys = |count: usize| (0..count).map(|number| (subject(&format!("e{number:02}")), &limits[..]));
    let levels = levels_of(0, &keys(BUCKETS_MAX).collect::<Vec<_>>());
    fixture.takes(&levels, &[("rpm", 4)]).await.settles(&[("rpm", 7)]).await;
    fixture.is_refused(&levels, &[("rpm", 4)]).await;
    let mut lease = fixture.takes(&levels, &[("rpm", 3)]).await;
    lease.adjusts(&[("rpm", 2)]).await;
    lease.cancels().await;
    for level in levels.levels() {
        let entity = level.subject.entity.as_str();
        assert_eq!(fixture.shows(entity, "rpm").await, (3, 7), "{entity}");
        assert_eq!(used_by(&fixture, entity, "rpm").await.0, 7, "{entity}");
    }
    let longer = levels_of(0, &keys(BUCKETS_MAX + 1).collect::<Vec<_>>());
    let error = fixture.store.draw(&fixture.draw_of(&longer, &[("rpm", 1)])).await.expect_err("too many");
    assert!(matches!(&error, StoreError::Invalid { .. }), "{error}");
}

/// Both would pass the check for units that only one of them can take.
pub async fn bucket_named_twice_is_refused(fixture: Fixture) {
    let limits = [slow("rpm", 10)];
    fixture.takes(&own("acme", &limits), &[("rpm", 1)]).await;
    let twice = levels(0, &[("acme", &limits), ("other", &limits), ("acme", &limits)]);
    let error = fixture.store.draw(&fixture.draw_of(&twice, &[("rpm", 7)])).await.expect_err("named twice");
    assert!(matches!(&error, StoreError::Invalid { what } if what.ends_with("is named twice")), "{error}");
    assert_eq!(fixture.shows("acme", "rpm").await, (9, 1));
    fixture.is_untouched("other", "rpm").await;
}

/// The levels that these policies give the subject: its own and the resource's.
fn resolved(subject: &Subject, limits: &[&str]) -> Arc<Levels> {
    let limits = limits.iter().map(|text| text.parse::<Limit>().expect("the suite's limits are valid"));
    let policy = Policy::new(limits).expect("the suite's limits are valid");
    let resolved = resolve(subject, [None, None, None, Some(&policy)], &Policy::default());
    Arc::new(Levels::new(Version::ZERO, vec![(subject.clone(), resolved)]))
}

/// At ten times the burst, or at `debt=`.
pub async fn limit_of_a_policy_bounds_its_debt(fixture: Fixture) {
    for (entity, limit, left) in [
        ("default", "tpm:1/day:10", -100),
        ("given", "tpm:1/day:10,debt=7", -7),
        ("none", "tpm:1/day:10,debt=0", 0),
    ] {
        let levels = resolved(&subject(entity), &[limit]);
        fixture.takes(&levels, &[("tpm", 10)]).await.settles(&[("tpm", 1_000)]).await;
        assert_eq!(fixture.shows(entity, "tpm").await.0, left, "{limit}");
        assert_eq!(used_by(&fixture, entity, "tpm").await.0, 1_000, "{limit}");
    }
}

/// Its subjects draw from one bucket, and no other subject does.
pub async fn pooled_limit_counts_all_its_subjects(fixture: Fixture) {
    let subjects = [on("a", "gpt"), on("a", "o1"), on("b", "gpt"), on("b", "o1")];
    // Which of the subjects share a bucket with the first.
    let table = [
        (Across::Resources, [true, true, false, false]),
        (Across::Entities, [true, false, true, false]),
        (Across::Both, [true; 4]),
    ];
    for (across, shared) in table {
        let limits = [format!("{across}:1/day:10,across={across}")];
        let limits = limits.each_ref().map(String::as_str);
        let levels = subjects.each_ref().map(|subject| resolved(subject, &limits));
        if fixture.store.pool_refusal(across).is_some() {
            let draw = fixture.draw_of(&levels[0], &[(across.as_str(), 1)]);
            let error = fixture.store.draw(&draw).await.expect_err("a pool that the engine refuses");
            assert!(matches!(&error, StoreError::Invalid { .. }), "{error}");
            continue;
        }
        fixture.takes(&levels[0], &[(across.as_str(), 8)]).await;
        for (levels, is_shared) in levels.iter().zip(shared) {
            let cost = [(across.as_str(), 3)];
            if is_shared {
                fixture.is_refused(levels, &cost).await;
            } else {
                fixture.takes(levels, &cost).await.cancels().await;
            }
        }
    }
}

/// A refusal by the pool leaves the subject's own bucket as it is, and the reverse.
pub async fn pool_and_own_limit_are_drawn_or_neither(fixture: Fixture) {
    let limits = ["tpm:1/day:6", "tpm:1/day:10,across=resources", "rpm:1/day:2,across=resources"];
    let [gpt, o1] = ["gpt", "o1"].map(|resource| resolved(&on("acme", resource), &limits));
    let pool = Subject::pool(Some(entity_id("acme")), None);
    fixture.takes(&gpt, &[("tpm", 6)]).await.settles(&[("tpm", 6)]).await;
    fixture.is_refused(&gpt, &[("tpm", 1)]).await;
    let moved = fixture.is_refused(&o1, &[("tpm", 5), ("rpm", 1)]).await;
    assert_eq!(moved.readings.len(), 3, "each limit that takes part is read: {moved:?}");
    let mut lease = fixture.takes(&o1, &[("tpm", 4), ("rpm", 2)]).await;
    let available = async |key: &Subject, limit: &str| {
        let (at, meter) = fixture.meter(key, limit).await;
        meter.expect("it was used").available(at)
    };
    assert_eq!((available(&on("acme", "o1"), "tpm").await, available(&pool, "tpm").await), (2, 0));
    lease.cancels().await;
    assert_eq!((available(&pool, "tpm").await, available(&pool, "rpm").await), (4, 2));
}

/// Once for the pool, and once for the subject that used it.
pub async fn usage_of_a_pool_is_listed_with_its_scope(fixture: Fixture) {
    let limits = ["tpm:1/day:50", "tpm:1/day:50,across=resources"];
    for (resource, units) in [("gpt", 3), ("o1", 4)] {
        let levels = resolved(&on("acme", resource), &limits);
        fixture.takes(&levels, &[("tpm", 9)]).await.settles(&[("tpm", units)]).await;
    }
    let pool = Subject::pool(Some(entity_id("acme")), None);
    let listed = |lines: Vec<Usage>| -> Vec<(Subject, u64, u64)> {
        lines.into_iter().map(|line| (line.subject, line.tally.units, line.tally.own)).collect()
    };
    let lines = usage(&fixture, UsageOf::Entity(entity_id("acme")), Window::Month).await;
    let own = [(on("acme", "gpt"), 3, 3), (on("acme", "o1"), 4, 4)];
    let expected: Vec<_> = [(pool.clone(), 7, 0)].into_iter().chain(own).collect();
    assert_eq!(listed(lines), expected);
    let lines = usage(&fixture, UsageOf::all_resources(), Window::Month).await;
    assert_eq!(listed(lines), [(pool, 7, 0)]);
}

/// A scope that does not cover the pool, or an engine that cannot draw from it with the rest.
pub async fn policy_with_an_impossible_pool_is_refused(fixture: Fixture) {
    let scopes = scopes(&on("acme", "gpt"));
    let is_covered = |scope: &Scope, across: Across| match scope {
        Scope::System => true,
        Scope::Resource(_) => across == Across::Entities,
        Scope::Entity(_) => across == Across::Resources,
        Scope::Subject(_) => false,
    };
    for (scope, across) in scopes.iter().flat_map(|scope| Across::ALL.map(|across| (scope, across))) {
        let policy = Policy::new([slow("tpm", 10).across(across)]).expect("the suite's limits are valid");
        let change = PolicyChange { scope: scope.clone(), expect: Expect::Any, policy: Some(policy) };
        let answer = fixture.store.apply(&[change], ACTOR).await;
        if is_covered(scope, across) && fixture.store.pool_refusal(across).is_none() {
            answer.expect("the scope covers the pool");
        } else {
            let error = answer.expect_err("the scope does not cover the pool");
            assert!(error.to_string().contains("`tpm`"), "{error}");
            assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
        }
    }
}
