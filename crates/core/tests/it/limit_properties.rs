//! Shared limits grant within one unit of burst + rate·t, from one a day to a million a second, with any
//! polling, beside any other limit, and across changes of policy.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

/// An arbitrary time that is not round.
const START: Stamp = Stamp::from_micros(1_800_000_000_123_457);

fn rule(limit: &Limit) -> Arc<Rule> {
    Arc::new(limit.check().expect("a valid limit"))
}

fn meter(rule: &Arc<Rule>) -> Meter {
    Meter::new(Arc::clone(rule), Version::ZERO)
}

/// From one a day to a million a second, also with periods that divide nothing, and any burst.
fn any_rule() -> impl Strategy<Value = Arc<Rule>> {
    let micros = prop_oneof![
        Just(1_u64),
        Just(1_000_000),
        Just(3_000_000),
        Just(60_000_000),
        Just(86_399_999_999),
        Just(86_400_000_000),
        1_u64..86_400_000_000,
    ];
    // At most one per microsecond, a million per second.
    let amount = micros.prop_flat_map(|micros| {
        let amount = prop_oneof![Just(1), Just(micros), 1..=micros, 1..=micros.min(1_000)];
        (amount, Just(micros))
    });
    let burst = prop_oneof![Just(1_u64), 1_u64..10, 1_u64..5_000, 1_u64..1_000_000];
    (amount, burst).prop_filter_map("a century to fill", |((amount, micros), burst)| {
        let limit = Limit::per("tpm", amount, Duration::from_micros(micros)).burst(burst);
        limit.check().ok().map(Arc::new)
    })
}

/// What a limit allows from the start until `now`, minus the units taken, in parts of a unit; and the number
/// of parts per unit.
fn left(rule: &Rule, taken: u128, now: Stamp) -> (i128, i128) {
    let signed = |number: u128| i128::try_from(number).expect("small");
    let shape = rule.shape();
    let period = signed(shape.period().as_micros());
    let passed = signed(now.since(START).as_micros());
    let allowed = i128::from(shape.burst()) * period + passed * i128::from(shape.amount());
    (allowed - signed(taken) * period, period)
}

/// What a grant of one unit may lose, in the same parts. Time has whole ticks: a bucket of one unit may
/// become full up to a tick before it can be polled, and a full bucket does not refill.
fn lost_per_grant(rule: &Rule) -> i128 {
    let shape = rule.shape();
    let is_between_ticks = shape.span(1).part > 0;
    if shape.burst() == 1 && is_between_ticks { i128::from(shape.amount()) } else { 0 }
}

proptest! {
    /// Never grants more than burst + rate·t, with any polling and any amounts.
    #[test]
    fn never_more_than_burst_and_rate(
        rule in any_rule(),
        polls in prop::collection::vec((prop_oneof![0_u64..5, 0_u64..50_000, 0_u64..100_000_000_000], 1_u64..2_000), 1..300),
    ) {
        let (mut meter, mut now, mut taken) = (meter(&rule), START, 0_u128);
        for (gap, units) in polls {
            now = now + Duration::from_micros(gap);
            if meter.ready_at(units, now) <= now {
                meter.take(units, now);
                taken += u128::from(units);
            }
            prop_assert!(left(&rule, taken, now).0 >= 0, "{taken} taken at {now}");
        }
    }

    /// Polled for one unit at each returned time, it grants burst + rate·t minus at most one unit.
    #[test]
    fn saturated_limit_stays_within_one_unit(rule in any_rule(), grants in 1_u64..400) {
        let (mut meter, mut now) = (meter(&rule), START);
        // Take the whole burst first.
        meter.take(rule.shape().burst(), now);
        let mut taken = u128::from(rule.shape().burst());
        let lost_per_grant = lost_per_grant(&rule);
        for grant in 1..=grants {
            let ready = meter.ready_at(1, now);
            if ready > now {
                let before = Stamp::from_micros(ready.as_micros() - 1);
                prop_assert!(meter.available(before) < 1, "a unit was available before {ready}");
                now = ready;
            }
            meter.take(1, now);
            taken += 1;
            let (left, unit) = left(&rule, taken, now);
            let lost = lost_per_grant * i128::from(grant);
            prop_assert!((0..unit + lost).contains(&left), "{left} of {unit} parts left after {taken} at {now}");
        }
    }

    /// Polled at any times, close enough that it is not full in between, for everything available.
    #[test]
    fn taking_all_available_stays_within_one_unit(
        rule in any_rule(), polls in 1_usize..300, seed in any::<u64>(),
    ) {
        let (mut meter, mut now) = (meter(&rule), START);
        let mut random = Random::seeded(seed);
        meter.take(rule.shape().burst(), now);
        let mut taken = u128::from(rule.shape().burst());
        for _ in 0..polls {
            let until_full = meter.bucket().full_at().whole - now.as_micros();
            let most = if random.below(2) == 0 { until_full } else { until_full.min(3) };
            now = now + Duration::from_micros(random.below(most + 1));
            let available = u64::try_from(meter.available(now)).expect("no debt");
            prop_assert!(meter.ready_at(available, now) <= now, "the available units are ready");
            prop_assert!(meter.ready_at(available + 1, now) > now, "and not one more");
            meter.take(available, now);
            taken += u128::from(available);
            let (left, unit) = left(&rule, taken, now);
            prop_assert!((0..unit).contains(&left), "{left} of {unit} parts left after {taken} at {now}");
        }
    }

    /// A new rule keeps the level, capped to its burst: to within one unit, and never above.
    #[test]
    fn a_new_rule_keeps_the_level_capped(
        first in any_rule(),
        rules in prop::collection::vec((any_rule(), 0_u64..10_000_000, -1_000_i64..3_000), 1..20),
    ) {
        let (mut meter, mut now, mut version) = (meter(&first), START, Version::ZERO);
        for (rule, gap, delta) in rules {
            now = now + Duration::from_micros(gap);
            meter.adjust(delta, now);
            let before = meter.available(now);
            version = version.next();
            meter.follow(&rule, version, now);
            let wanted = before.min(i64::try_from(rule.shape().burst()).expect("small"));
            let after = meter.available(now);
            prop_assert!(after == wanted || after == wanted - 1, "{before} became {after}, {wanted} wanted");
            prop_assert_eq!(meter.rule().shape(), rule.shape());
        }
    }

    /// Limits do not affect each other: each refills at its own rate.
    #[test]
    fn slow_limit_refills_beside_a_busy_one(seed in any::<u64>(), per_day in 1_u64..100) {
        let slow = rule(&Limit::per_day("slow", per_day).burst(1));
        let busy = rule(&Limit::per_second("busy", 1_000_000).burst(50));
        let mut random = Random::seeded(seed);
        let (mut meters, mut now) = ([meter(&slow), meter(&busy)], START);
        let (mut taken, mut both) = ([0_u128; 2], 0_u64);
        // About two days in two thousand steps, with several polls at each.
        for _ in 0..2_000 {
            now = now + Duration::from_micros(random.below(172_800_000));
            for _ in 0..4 {
                now = now + Duration::from_micros(random.below(3));
                // All or nothing: if the slow limit is short, only the busy one is polled.
                let is_ready = |meter: &Meter| meter.ready_at(1, now) <= now;
                let asked = if is_ready(&meters[0]) && is_ready(&meters[1]) { 0..2 } else { 1..2 };
                both += u64::from(asked.start == 0);
                for place in asked {
                    if is_ready(&meters[place]) {
                        meters[place].take(1, now);
                        taken[place] += 1;
                    }
                }
            }
        }
        prop_assert!(left(&slow, taken[0], now).0 >= 0 && left(&busy, taken[1], now).0 >= 0);
        // An available unit is taken by the next step, after 173 s at most: at most one in 500 per day.
        let due = u128::from(per_day) * now.since(START).as_micros() / 86_400_000_000;
        prop_assert!(u128::from(both) + 2 + due / 10 >= due, "{both} of {due} refilled");
    }
}

#[test]
fn slow_limit_refills_on_time_beside_a_busy_one() {
    let (slow, busy) = (rule(&Limit::per_hour("slow", 2)), rule(&Limit::per_second("busy", 1_000)));
    let (mut slow, mut busy) = (meter(&slow), meter(&busy));
    let (mut granted, mut now) = (Vec::new(), START);
    // Two hours, polled every tenth of a second.
    for poll in 0..=72_000_u64 {
        now = START + Duration::from_millis(100 * poll);
        assert!(busy.ready_at(1, now) <= now);
        busy.take(1, now);
        if slow.ready_at(1, now) <= now {
            slow.take(1, now);
            granted.push(now.since(START).as_secs());
        }
    }
    assert_eq!(granted, [0, 0, 1_800, 3_600, 5_400, 7_200]);
    assert_eq!((slow.consumed(), busy.consumed(), slow.available(now)), (6, 72_001, 0));
}
