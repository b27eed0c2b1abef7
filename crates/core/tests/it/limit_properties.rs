//! Shared limits against what they promise: within one unit of burst + rate·t, from one a day to a million a second,
//! however they are polled, whatever is beside them, and across changes of policy.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

/// Any time will do; this one is not round.
const START: Stamp = Stamp::from_micros(1_800_000_000_123_457);

fn rule(limit: &Limit) -> Arc<Rule> {
    Arc::new(limit.check().expect("a valid limit"))
}

fn meter(rule: &Arc<Rule>) -> Meter {
    Meter::new(Arc::clone(rule), Version::ZERO)
}

/// From one a day to a million a second, with periods that divide nothing too, and any burst.
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
    // At most one in a microsecond, which is a million in a second.
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

/// What a limit allows from the start until `now`, less what was taken: in parts of a unit, and how many of them
/// a unit has.
fn left(rule: &Rule, taken: u128, now: Stamp) -> (i128, i128) {
    let signed = |number: u128| i128::try_from(number).expect("small");
    let shape = rule.shape();
    let period = signed(shape.period().as_micros());
    let passed = signed(now.since(START).as_micros());
    let allowed = i128::from(shape.burst()) * period + passed * i128::from(shape.amount());
    (allowed - signed(taken) * period, period)
}

/// What a grant of one unit may lose, in the same parts. Nobody can come between two ticks: a bucket that holds but one
/// unit is full for less than a tick before it can be asked, and a full bucket does not refill.
fn lost_per_grant(rule: &Rule) -> i128 {
    let shape = rule.shape();
    let is_between_ticks = shape.span(1).part > 0;
    if shape.burst() == 1 && is_between_ticks { i128::from(shape.amount()) } else { 0 }
}

proptest! {
    /// Whatever the polling and whatever is asked for: never above burst + rate·t.
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

    /// Asked for one whenever one is said to be there, it gives burst + rate·t, less one unit: never more, never less.
    #[test]
    fn saturated_it_is_within_one_unit(rule in any_rule(), grants in 1_u64..400) {
        let (mut meter, mut now) = (meter(&rule), START);
        // What can be had at once is had at once.
        meter.take(rule.shape().burst(), now);
        let mut taken = u128::from(rule.shape().burst());
        let lost_per_grant = lost_per_grant(&rule);
        for grant in 1..=grants {
            let ready = meter.ready_at(1, now);
            if ready > now {
                let before = Stamp::from_micros(ready.as_micros() - 1);
                prop_assert!(meter.available(before) < 1, "a unit was there before {ready}");
                now = ready;
            }
            meter.take(1, now);
            taken += 1;
            let (left, unit) = left(&rule, taken, now);
            let lost = lost_per_grant * i128::from(grant);
            prop_assert!((0..unit + lost).contains(&left), "{left} of {unit} parts left after {taken} at {now}");
        }
    }

    /// Polled at any times that are not so far apart that it is full between them, and asked for all that is there.
    #[test]
    fn whoever_takes_all_there_is_is_within_one_unit_at_every_poll(
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
            let there = u64::try_from(meter.available(now)).expect("no debt");
            prop_assert!(meter.ready_at(there, now) <= now, "what is shown is there");
            prop_assert!(meter.ready_at(there + 1, now) > now, "and no more");
            meter.take(there, now);
            taken += u128::from(there);
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

    /// What one limit is asked moves no other: each refills by its own rate, as if it were alone.
    #[test]
    fn a_slow_limit_beside_a_busy_one_refills(seed in any::<u64>(), per_day in 1_u64..100) {
        let slow = rule(&Limit::per_day("slow", per_day).burst(1));
        let busy = rule(&Limit::per_second("busy", 1_000_000).burst(50));
        let mut random = Random::seeded(seed);
        let (mut meters, mut now) = ([meter(&slow), meter(&busy)], START);
        let (mut taken, mut both) = ([0_u128; 2], 0_u64);
        // About two days in two thousand steps, and a storm of polls at each of them.
        for _ in 0..2_000 {
            now = now + Duration::from_micros(random.below(172_800_000));
            for _ in 0..4 {
                now = now + Duration::from_micros(random.below(3));
                // All or nothing: where the slow one is short, the busy one is asked alone.
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
        // A unit that is there is waited for by the next step, 173 s at most; per day that is at most one in 500.
        let due = u128::from(per_day) * now.since(START).as_micros() / 86_400_000_000;
        prop_assert!(u128::from(both) + 2 + due / 10 >= due, "{both} of {due} came back");
    }
}

#[test]
fn two_an_hour_beside_a_thousand_a_second_come_back_on_time() {
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
