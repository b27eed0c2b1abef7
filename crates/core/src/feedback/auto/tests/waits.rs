//! How long requests wait, and the bounds that callers with a deadline go by.

use super::*;

fn window(limit: u64, remaining: u64, secs: u64) -> QuotaLevel {
    QuotaLevel { limit, remaining, reset: Reset::More(Duration::from_secs(secs)), window: None }
}

fn to_full(limit: u64, remaining: u64, secs: u64) -> QuotaLevel {
    QuotaLevel { limit, remaining, reset: Reset::Full(Duration::from_secs(secs)), window: None }
}

/// Regression: an empty quota delayed the head of the queue by up to 1,000 s, whenever it is refilled.
#[test]
fn empty_quota_delays_until_its_refill_only() {
    // Headers, and the seconds until the next request at least and at most.
    let table = [
        (window(100, 0, 20), 19.9, 20.5),
        (window(100, 1, 20), 7.0, 20.5),
        (to_full(60, 0, 60), 1.0, 4.0),
        (to_full(60, 59, 2), 0.0, 1.0),
        (to_full(6_000, 0, 6), 0.0, 0.1),
    ];
    for (level, least, most) in table {
        let mut rig = Rig::new();
        let charge = rig.go(Cost::request());
        rig.later(millis(50)).settle(charge, Outcome::success().quota(Metered::Requests, level));
        let start = rig.now;
        let _second = rig.go(Cost::request());
        let third = rig.gates.bound_at(&rig.plan, Cost::request(), 0, rig.now);
        if let Err(Verdict::Wait(wait)) = rig.ask(Cost::request()) {
            assert_eq!(wait.floor, rig.now, "{level:?}: what headers say is not firm");
            assert!(wait.until.is_some_and(|until| until <= rig.now + ASK_AGAIN), "{level:?}");
        }
        let waited = rig.now.since(start).as_secs_f64();
        assert!((least..=most).contains(&waited), "{level:?}: {waited} s");
        let _third = rig.go(Cost::request());
        assert!(third.is_none_or(|(_, at)| at <= rig.now + ASK_AGAIN), "{level:?}: {third:?}");
    }
}

#[test]
fn bound_is_not_after_the_admission() {
    let levels = [0, 1, 2, 5, 50].into_iter().flat_map(|left| {
        [window(100, left, 20), window(100, left, 1), to_full(100, left, 10), to_full(100, left, 500)]
    });
    for level in levels {
        let mut rig = Rig::new();
        let (first, second) = (rig.go(Cost::request()), rig.go(Cost::request()));
        rig.later(millis(50)).settle(first, Outcome::success().quota(Metered::Requests, level));
        for _ in 0..6 {
            let bound = rig.gates.bound_at(&rig.plan, Cost::request(), 0, rig.now).map_or(rig.now, |at| at.1);
            let start = rig.now;
            let _next = rig.go(Cost::request());
            // A rising pace is applied in steps.
            assert!(
                bound <= rig.now + ASK_AGAIN,
                "{level:?}: {:?} after {start:?}, bound {bound:?}",
                rig.now
            );
        }
        rig.settle(second, Outcome::success());
    }
}

/// Regression: callers were refused at once because earlier requests had cost more than those that wait.
#[test]
fn earlier_costs_do_not_lengthen_the_queue() {
    let mut rig = Rig::new();
    for _ in 0..20 {
        let charge = rig.go(Cost::request().tokens(5_000));
        rig.later(millis(50)).settle(charge, Outcome::success());
    }
    for _ in 0..2 {
        let charge = rig.later(Duration::from_secs(30)).go(Cost::request().tokens(5_000));
        rig.later(millis(50)).settle(charge, Outcome::overload().exceeded(Metered::Tokens));
    }
    assert!(rig.control().tokens.quota.is_some());
    rig.later(Duration::from_secs(10));
    let bound = rig.gates.bound_at(&rig.plan, Cost::request().tokens(50), 10, rig.now);
    assert_eq!(bound, None, "ten requests of 50 tokens may be ahead");
}
