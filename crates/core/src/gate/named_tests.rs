//! Named rates and budgets through all gates: admission, settling, retune and views.

use super::super::tests::{REQUEST, Rig, at, secs, tokens};
use super::*;
use crate::cost::Cost;
use crate::gate::Idleness;
use crate::plan::{Budget, Draft, Rate, Slots};

/// The limits of an LLM provider, small.
fn provider() -> Draft {
    Draft { slots: Some(Slots::fixed(8)), ..Draft::default() }
        .rate_named("rpm", Rate::per_minute(3))
        .rate_named("rpd", Rate::per_day(5))
        .budget_named("itpm", Budget::input_tokens(1_000, secs(60)))
        .budget_named("otpm", Budget::output_tokens(200, secs(60)))
}

fn by(name: &str) -> Gate {
    Gate::Named(GateName::new(name).unwrap())
}

fn available(rig: &Rig) -> Vec<i64> {
    rig.snapshot().limits.iter().map(|limit| limit.available).collect()
}

fn call(input: u64, output: u64) -> Cost {
    Cost::request().input_tokens(input).output_tokens(output)
}

#[test]
fn all_named_limits_are_taken_or_none() {
    let mut rig = Rig::new(provider());
    let first = rig.enter(call(600, 150));
    assert_eq!(available(&rig), [2, 4, 400, 50]);
    // Output does not fit: nothing is taken of what does.
    assert_eq!(rig.waits(call(100, 100)), (by("otpm"), Some(at(60).plus_nanos(1))));
    assert_eq!(rig.waits(call(401, 10)), (by("itpm"), Some(at(60).plus_nanos(1))));
    assert_eq!(available(&rig), [2, 4, 400, 50]);
    rig.settle(first, Outcome::success().spent(call(500, 20)));
    assert_eq!(available(&rig), [2, 4, 500, 180], "each kind is settled at its actual use");
    drop((rig.enter(call(1, 1)), rig.enter(call(1, 1))));
    assert_eq!(rig.waits(call(1, 1)), (by("rpm"), Some(at(20))));
}

#[test]
fn latest_named_rate_decides() {
    let mut rig = Rig::new(provider());
    for second in [0, 20, 40, 60, 80] {
        drop(rig.at(at(second)).enter(REQUEST));
    }
    let (gate, until) = rig.waits(REQUEST);
    assert_eq!((gate, until), (by("rpd"), Some(at(86_400 / 5))));
}

#[test]
fn request_takes_several_units_of_every_rate() {
    let draft = Draft { rate: Some(Rate::per_second(10)), ..provider() };
    let mut rig = Rig::new(draft);
    let charge = rig.enter(Cost::requests(3));
    let taken = rig.snapshot();
    assert_eq!((taken.in_flight, taken.rate_level, taken.admitted), (1, Some(7), 1));
    assert_eq!(available(&rig)[..2], [0, 2]);
    assert_eq!(rig.waits(Cost::requests(2)), (by("rpm"), Some(at(40))));
    rig.undo(charge);
    assert_eq!((rig.snapshot().rate_level, &available(&rig)[..2]), (Some(10), &[3, 5][..]));
}

#[test]
fn cost_above_the_capacity_is_refused_at_once() {
    let refused = |rig: &mut Rig, cost| match rig.admit(cost) {
        Err(crate::verdict::Verdict::Refuse(refused)) => refused,
        verdict => panic!("the verdict was {verdict:?}"),
    };
    let above = |by, requested, capacity| Refused::AboveCapacity { by, requested, capacity };
    let mut rig = Rig::new(provider());
    assert_eq!(refused(&mut rig, Cost::requests(4)), above(by("rpm"), 4, 3));
    assert_eq!(refused(&mut rig, call(1_001, 0)), above(by("itpm"), 1_001, 1_000));
    let mut rig = Rig::new(Draft { rate: Some(Rate::per_second(10)), ..Draft::default() });
    assert_eq!(refused(&mut rig, Cost::requests(11)), above(Gate::Rate, 11, 10));
    let alone = Budget::output_tokens(5, secs(1)).oversize(crate::plan::Oversize::Alone);
    let mut rig = Rig::new(Draft::default().budget_named("out", alone));
    drop(rig.enter(call(0, 9)));
    assert_eq!(available(&rig), [-4]);
}

#[test]
fn used_tokens_follow_the_outcome() {
    let estimate = call(600, 150);
    let total = Outcome::success().spent(tokens(40));
    let table = [
        (None, Outcome::success(), [400, 50]),
        (None, Outcome::failure(), [1_000, 200]),
        (None, Outcome::ignored(), [1_000, 200]),
        (None, Outcome::failure().spent(call(600, 0)), [400, 200]),
        (Some(call(600, 30)), Outcome::ignored(), [400, 170]),
        (Some(call(600, 30)), Outcome::success(), [400, 170]),
        // A total does not say of which kind it was.
        (None, total, [400, 50]),
        (Some(tokens(40)), Outcome::ignored(), [400, 50]),
        (Some(call(600, 0).tokens(640)), Outcome::ignored(), [400, 50]),
        // More than estimated.
        (None, Outcome::success().spent(call(900, 300)), [100, -100]),
    ];
    for (reported, outcome, left) in table {
        let mut rig = Rig::new(provider());
        let charge = rig.enter(estimate);
        if let Some(reported) = reported {
            rig.spend(&charge, None, reported);
        }
        let ending = crate::gate::Ending { charge, reported, outcome: &outcome };
        let has_units_back = rig.gates.settle(&rig.plan, ending, 0, rig.now, &mut rig.events);
        assert_eq!(available(&rig)[2..], left, "{reported:?} {outcome:?}");
        assert_eq!(
            has_units_back,
            left.iter().zip([400, 50]).any(|(left, held)| *left > held),
            "{outcome:?}"
        );
    }
}

#[test]
fn unused_tokens_return_to_their_window() {
    let mut rig = Rig::new(provider());
    let early = rig.enter(call(600, 0));
    let late = rig.at(at(50)).enter(call(300, 0));
    rig.at(at(61)).settle(early, Outcome::failure());
    assert_eq!(available(&rig)[2], 700, "the first has expired, and nothing of it returns to the second");
    rig.settle(late, Outcome::failure());
    assert_eq!(available(&rig)[2], 1_000);
}

#[test]
fn unnamed_budget_counts_all_kinds_of_tokens() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(60))), ..Draft::default() });
    let charge = rig.enter(call(30, 20));
    assert_eq!(rig.snapshot().tokens_used, 50);
    rig.settle(charge, Outcome::success().spent(call(30, 5)));
    assert_eq!(rig.snapshot().tokens_used, 35);
}

#[test]
fn retune_keeps_levels_and_new_limits_start_unused() {
    let mut rig = Rig::new(provider());
    let charge = rig.enter(call(600, 150));
    let wider = provider()
        .rate_named("rpm", Rate::per_minute(6))
        .budget_named("itpm", Budget::input_tokens(2_000, secs(60)))
        .budget_named("tpd", Budget::tokens(5_000, secs(86_400)));
    rig.retune(wider.clone());
    assert_eq!(available(&rig), [2, 4, 1_400, 50, 5_000], "a rate keeps its level, a budget its use");
    rig.settle(charge, Outcome::success().spent(call(100, 50)));
    assert_eq!(available(&rig), [2, 4, 1_900, 150, 4_850], "used since it was added, never reserved there");
    let mut fewer = wider;
    fewer.rates.remove(0);
    fewer.budgets.truncate(1);
    rig.retune(fewer);
    assert_eq!(available(&rig), [4, 1_900]);
    rig.retune(Draft::default());
    assert_eq!(available(&rig), []);
}

#[test]
fn removed_limit_gets_nothing_back_when_it_returns() {
    let mut rig = Rig::new(provider());
    let charge = rig.enter(Cost::requests(2).input_tokens(600));
    rig.retune(Draft::default());
    rig.retune(provider());
    let after = rig.enter(call(100, 0));
    assert_eq!(available(&rig), [2, 4, 900, 200]);
    rig.undo(charge);
    assert_eq!(available(&rig), [2, 4, 900, 200], "it took nothing from these");
    rig.undo(after);
    assert_eq!(available(&rig), [3, 5, 1_000, 200]);
}

#[test]
fn named_rates_rest_during_a_pause() {
    let mut rig = Rig::new(provider());
    drop(rig.enter_all(3));
    rig.pause(secs(100));
    assert_eq!(rig.at(at(100)).snapshot().limits[0].available, 0);
    assert_eq!(rig.at(at(121)).snapshot().limits[0].available, 1);
    drop(rig.enter(REQUEST));
}

#[test]
fn used_named_limit_keeps_a_key_busy() {
    let mut rig = Rig::new(provider());
    assert_eq!(rig.gates.idleness(&rig.plan, at(0)), Idleness::Fresh);
    rig.call(REQUEST, Outcome::success());
    assert_eq!(rig.gates.idleness(&rig.plan, at(86_400 / 5 - 1)), Idleness::Busy);
    assert_eq!(rig.gates.idleness(&rig.plan, at(86_400 / 5)), Idleness::Fresh);
}
