//! The outcome table of `outcome.rs`, row by row, and regressions in which an outcome changed too much.

use super::super::tests::{REQUEST, Rig, at, bytes, millis, secs, tokens};
use super::*;
use crate::cost::Cost;
use crate::event::{Change, Why};
use crate::plan::{Brake, Budget, Bytes, Circuit, Controller, Draft, Pace, Pause, Rate, SizeRule, Slots};
use crate::snapshot::CircuitState::{self, Closed, HalfOpen, Open};
use crate::snapshot::Snapshot;
use crate::verdict::Gate;

/// A brake that cuts at `failures` failures.
fn brake(failures: u32) -> Controller {
    Controller::Brake(Brake::default().at(failures, secs(60)))
}

/// Everything that learns from outcomes, configured so that one outcome has a visible effect.
fn listening() -> Draft {
    Draft {
        slots: Some(Slots::adaptive(1..=8)),
        circuit: Some(Circuit::after_failures(1)),
        controller: brake(1),
        pause: Pause::default().sizes(SizeRule::new(10, secs(1), secs(5))),
        budget: Some(Budget::tokens(100, secs(10))),
        total: Some(10),
        ..Draft::default()
    }
}

/// Circuit, slots, end of the pause in milliseconds, completed, tokens used.
type Row = (CircuitState, u32, Option<u64>, u64, u64);

fn row(rig: &Rig) -> Row {
    let seen = rig.snapshot();
    let paused = rig.gates.pause.until(rig.now).map(|until| until.as_nanos() / 1_000_000);
    (seen.circuit.unwrap().state, seen.slots.unwrap(), paused, seen.completed, seen.tokens_used)
}

#[test]
fn outcomes_have_the_effects_of_their_row() {
    let (success, failure) = (Outcome::success(), Outcome::failure());
    let (overload, ignored) = (Outcome::overload(), Outcome::ignored());
    let hint = secs(2);
    // Each request enters with an estimate of 40 tokens.
    let table: [(Outcome, Option<u64>, Row); 20] = [
        (success, None, (Closed, 8, None, 1, 40)),
        (success, Some(30), (Closed, 8, None, 1, 30)),
        (success.spent(tokens(55)), Some(30), (Closed, 8, None, 1, 55)),
        (success.spent(REQUEST), None, (Closed, 8, None, 1, 0)),
        (success.retry_after(hint), None, (Closed, 8, Some(2_000), 1, 40)),
        (success.retried(), None, (Closed, 8, None, 0, 40)),
        (failure, None, (Open, 4, None, 1, 0)),
        (failure, Some(30), (Open, 4, None, 1, 30)),
        (failure.spent(tokens(55)), None, (Open, 4, None, 1, 55)),
        (failure.retry_after(hint), None, (Open, 4, Some(2_000), 1, 0)),
        (failure.retried(), None, (Open, 4, None, 0, 0)),
        (overload, None, (Open, 4, Some(1_000), 1, 0)),
        (overload.spent(tokens(7)), None, (Open, 4, Some(1_000), 1, 7)),
        (overload.retried(), Some(3), (Open, 4, Some(1_000), 0, 3)),
        (overload.retry_after(hint), None, (Closed, 4, Some(2_000), 1, 0)),
        (overload.retry_after(millis(5)), None, (Closed, 4, Some(1_000), 1, 0)),
        (overload.retry_after(hint).retried(), None, (Closed, 4, Some(2_000), 0, 0)),
        (ignored, None, (Closed, 8, None, 0, 0)),
        (ignored, Some(30), (Closed, 8, None, 0, 30)),
        (ignored.spent(tokens(55)).retry_after(hint), None, (Closed, 8, None, 0, 55)),
    ];
    for (outcome, reported, wanted) in table {
        let mut rig = Rig::new(listening());
        let charge = rig.enter(tokens(40).bytes(10));
        rig.settle_reported(charge, reported, outcome);
        assert_eq!(row(&rig), wanted, "{outcome:?}, {reported:?} reported");
        assert_eq!(rig.gates.in_flight(), 0, "{outcome:?}");
    }
}

/// Regression: the reports of a stream counted only when it ended, so one above its estimate delayed no other caller.
#[test]
fn tokens_beyond_the_estimate_count_while_it_runs() {
    let budget = Budget::tokens(100, secs(60));
    let mut rig = Rig::new(Draft { budget: Some(budget), ..Draft::default() }.budget_named("tpm", budget));
    let used = |rig: &Rig| {
        let seen = rig.snapshot();
        (seen.tokens_used, 100 - seen.limits[0].available)
    };
    for (outcome, spent, left) in [
        (Outcome::success(), 90_u64, 90_u64),
        (Outcome::ignored(), 90, 90),
        (Outcome::success().spent(tokens(95)), 90, 95),
        (Outcome::success().spent(tokens(15)), 90, 15),
        (Outcome::failure(), 5, 5),
    ] {
        let start = rig.now;
        let charge = rig.enter(tokens(10));
        rig.later(secs(1)).spend(&charge, None, tokens(spent / 3));
        assert_eq!(used(&rig), (10.max(spent / 3), 10.max(spent / 3).cast_signed()));
        rig.later(secs(1)).spend(&charge, Some(tokens(spent / 3)), tokens(spent));
        assert_eq!(used(&rig), (10.max(spent), 10.max(spent).cast_signed()), "before it ends");
        assert_eq!(rig.admit(tokens(20)).is_err(), spent > 80, "others wait for the tokens it has used");
        let ending = Ending { charge, reported: Some(tokens(spent)), outcome: &outcome };
        rig.gates.settle(&rig.plan, ending, 0, rig.now, &mut rig.events);
        let other = if spent > 80 { 0 } else { 20 };
        assert_eq!(used(&rig), (left + other, (left + other).cast_signed()), "{outcome:?}");
        rig.at(start + secs(200));
    }
}

/// A budget that a request has not reserved from counts its tokens once, when it ends.
#[test]
fn budget_added_later_counts_reported_tokens_once() {
    let budget = |tokens| Draft { budget: Some(Budget::tokens(tokens, secs(60))), ..Draft::default() };
    let mut rig = Rig::new(Draft { slots: Some(Slots::fixed(1)), ..Draft::default() });
    let charge = rig.enter(tokens(10));
    rig.retune(budget(100));
    rig.spend(&charge, None, tokens(90));
    assert_eq!(rig.snapshot().tokens_used, 0);
    let ending = Ending { charge, reported: Some(tokens(90)), outcome: &Outcome::success() };
    rig.gates.settle(&rig.plan, ending, 0, rig.now, &mut rig.events);
    assert_eq!(rig.snapshot().tokens_used, 90);
}

#[test]
fn outcome_without_permit_teaches_but_returns_nothing() {
    let table = [
        (Outcome::success(), (Closed, 8, None, 1, 40)),
        (Outcome::failure(), (Open, 4, None, 1, 40)),
        (Outcome::overload(), (Open, 4, Some(1_000), 1, 40)),
        (Outcome::overload().spent(bytes(11)), (Open, 4, Some(5_000), 1, 40)),
        (Outcome::overload().retry_after(secs(30)), (Closed, 4, Some(30_000), 1, 40)),
        (Outcome::ignored().retry_after(secs(30)), (Closed, 8, None, 0, 40)),
    ];
    for (outcome, wanted) in table {
        let mut rig = Rig::new(listening());
        let _held = rig.enter(tokens(40));
        rig.record(outcome);
        assert_eq!((row(&rig), rig.gates.in_flight()), (wanted, 1), "{outcome:?}");
    }
}

#[test]
fn a_batch_under_one_permit_is_recorded_part_by_part() {
    let mut rig = Rig::new(Draft { circuit: Some(Circuit::after_failures(3)), ..listening() });
    let mut charge = rig.enter(tokens(40));
    for outcome in [Outcome::failure(), Outcome::success(), Outcome::failure()] {
        rig.gates.record(&rig.plan, Some(&mut charge), outcome, 0, at(1), &mut rig.events);
    }
    assert_eq!(row(&rig), (Closed, 4, None, 3, 40), "one cut, because the batch entered before it");
    rig.settle(charge, Outcome::success());
    assert_eq!(row(&rig), (Closed, 4, None, 4, 40));
}

#[test]
fn request_size_decides_how_long_an_overload_pauses() {
    let sizes = SizeRule::new(100_000, secs(1), secs(5));
    for (size, until) in [(10, 1), (100_000, 1), (100_001, 5), (150_000, 5)] {
        let mut rig = Rig::new(Draft { pause: Pause::default().sizes(sizes), ..Draft::default() });
        rig.call(bytes(size), Outcome::overload());
        assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(at(until))), "{size} bytes");
    }
}

#[test]
fn without_a_size_rule_only_a_hint_pauses() {
    let mut rig = Rig::new(Draft::default());
    rig.call(REQUEST, Outcome::overload());
    assert!(!rig.gates.needs_time(&rig.plan));
    rig.call(REQUEST, Outcome::overload().retry_after(secs(3)));
    assert!(rig.gates.needs_time(&rig.plan), "a pause needs the time");
    assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(at(3))));
}

#[test]
fn expiry_frees_tokens_and_overuse_leaves_zero() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    rig.call(tokens(60), Outcome::success());
    rig.at(at(3)).call(tokens(30), Outcome::success());
    assert_eq!(rig.waits(tokens(50)), (Gate::Budget, Some(at(10).plus_nanos(1))));
    rig.at(at(10).plus_nanos(1)).call(tokens(50), Outcome::success());
    rig.at(at(30)).call(tokens(100), Outcome::success().spent(tokens(150)));
    assert_eq!((rig.snapshot().tokens_used, rig.snapshot().tokens_remaining), (150, Some(0)));
}

#[test]
fn overuse_is_recorded_at_the_time_of_settling() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    let charge = rig.enter(tokens(60));
    rig.at(at(8)).settle(charge, Outcome::success().spent(tokens(90)));
    let used = [8, 10, 11, 18, 19].map(|second| rig.at(at(second)).snapshot().tokens_used);
    assert_eq!(used, [90, 90, 30, 30, 0]);
}

#[test]
fn unrequested_token_use_is_recorded() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    rig.gates.record_tokens(&rig.plan, tokens(70), at(1), &mut rig.events);
    assert_eq!(rig.at(at(1)).snapshot().tokens_remaining, Some(30));
    let mut free = Rig::new(Draft::default());
    free.gates.record_tokens(&free.plan, tokens(70), at(1), &mut free.events);
    assert_eq!((free.snapshot().tokens_used, free.snapshot().tokens_remaining), (0, None));
}

#[test]
fn token_count_saturates_at_its_maximum() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    for second in [0, 5, 9] {
        rig.at(at(second));
        rig.gates.record_tokens(&rig.plan, tokens(u64::MAX - 1), rig.now, &mut rig.events);
    }
    let used = [9, 11, 16, 20].map(|second| rig.at(at(second)).snapshot().tokens_used);
    assert_eq!(used, [u64::MAX, 1, 0, 0], "the first entry filled the count but for one");
    rig.call(tokens(1), Outcome::success());
}

#[test]
fn concurrent_estimates_never_exceed_the_budget() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    let admitted = (0..10).filter_map(|_| rig.admit(tokens(100)).ok()).count();
    assert_eq!((admitted, rig.snapshot().tokens_used), (1, 100));
}

#[test]
fn usage_reported_by_a_dropped_permit_stays_spent() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(1_000, secs(10))), ..Draft::default() });
    for (estimate, used) in [(40, 90), (500, 180)] {
        let charge = rig.enter(tokens(estimate));
        rig.settle_reported(charge, Some(90), Outcome::ignored());
        assert_eq!(rig.snapshot().tokens_used, used);
    }
}

#[test]
fn a_budget_of_one_admits_one_token_at_a_time() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(1, secs(10))), ..Draft::default() });
    rig.call(tokens(1), Outcome::failure());
    rig.call(tokens(1), Outcome::success());
    assert_eq!(rig.waits(REQUEST), (Gate::Budget, Some(at(10).plus_nanos(1))));
}

#[test]
fn only_failures_by_the_predicate_cut() {
    let draft = Draft { slots: Some(Slots::adaptive(1..=10)), controller: brake(1), ..Draft::default() };
    let mut rig = Rig::new(draft.clone());
    for (error, slots) in [("runtime", 10), ("value", 5)] {
        rig.call(REQUEST, Outcome::of(&Err::<(), _>(error), |error| *error == "value"));
        assert_eq!(rig.snapshot().slots, Some(slots), "{error}");
    }
    let mut never = Rig::new(draft);
    for _ in 0..100 {
        never.call(REQUEST, Outcome::of(&Err::<(), _>("value"), |_| false));
    }
    assert_eq!(
        (never.snapshot().slots, never.take_events()),
        (Some(10), vec![]),
        "a predicate that is never true"
    );
}

#[test]
fn a_cancelled_request_cuts_nothing() {
    let mut rig = Rig::new(listening());
    for _ in 0..50 {
        rig.call(tokens(40), Outcome::ignored());
    }
    assert_eq!((row(&rig), rig.take_events()), ((Closed, 8, None, 0, 0), vec![]));
}

#[test]
fn an_inconclusive_probe_returns_its_place() {
    let hinted = Outcome::overload().retry_after(millis(1));
    for outcome in [Outcome::ignored(), hinted] {
        let circuit = Some(Circuit::after_failures(1).open_for(secs(5)));
        let mut rig = Rig::new(Draft { circuit, ..Draft::default() });
        rig.call(REQUEST, Outcome::failure());
        let probe = rig.at(at(5)).enter(REQUEST);
        assert!(probe.is_probe() && rig.admit(REQUEST).is_err());
        rig.settle(probe, outcome);
        assert_eq!(rig.snapshot().circuit.map(|circuit| circuit.state), Some(HalfOpen), "{outcome:?}");
        rig.later(millis(1)).call(REQUEST, Outcome::success());
        assert_eq!(rig.snapshot().circuit.map(|circuit| circuit.state), Some(Closed));
    }
}

/// Regression: three failures a minute cut at any volume, so 1 % of random errors held 64 slots at 3 % of
/// their capacity.
#[test]
fn few_failures_among_many_outcomes_cut_nothing() {
    let slots = Some(Slots::adaptive(1..=64));
    let mut rig =
        Rig::new(Draft { slots, controller: Controller::Brake(Brake::default()), ..Draft::default() });
    for number in 0..1_000 {
        let outcome = if number % 100 == 99 { Outcome::failure() } else { Outcome::success() };
        rig.later(millis(100)).call(REQUEST, outcome);
    }
    assert_eq!((rig.cuts(), rig.snapshot().slots), (0, Some(64)));
    for _ in 0..100 {
        rig.later(millis(100)).call(REQUEST, Outcome::failure());
    }
    assert_eq!(rig.cuts() > 0, rig.snapshot().slots < Some(64), "a tenth is enough");
    assert!(rig.cuts() > 0);
}

/// Regression: `Retry-After: 0` counted as a sign of life, and 10,000 × 503 left the circuit closed.
#[test]
fn hint_of_zero_does_not_prevent_opening() {
    let circuit = Some(Circuit::after_failures(10).open_for(secs(5)));
    let mut rig = Rig::new(Draft { circuit, ..Draft::default() });
    for _ in 0..10 {
        rig.call(REQUEST, Outcome::overload().retry_after(Duration::ZERO));
    }
    assert_eq!(rig.snapshot().circuit.map(|circuit| circuit.state), Some(Open));
}

#[test]
fn one_wave_of_failures_is_one_cut() {
    let slots = Some(Slots::adaptive(1..=64));
    for outcome in [Outcome::failure(), Outcome::overload()] {
        let mut rig = Rig::new(Draft { slots, controller: brake(3), ..Draft::default() });
        for charge in rig.enter_all(30) {
            rig.later(millis(1)).settle(charge, outcome);
        }
        assert_eq!((rig.cuts(), rig.snapshot().slots), (1, Some(32)), "{outcome:?}");
        for charge in rig.enter_all(3) {
            rig.settle(charge, outcome);
        }
        assert_eq!(
            (rig.cuts(), rig.snapshot().slots),
            (2, Some(16)),
            "the next wave cuts again: {outcome:?}"
        );
    }
}

#[test]
fn controller_events_contain_their_numbers() {
    let pace = Some(Pace::every(secs(1)).slowest(secs(9)));
    let draft = Draft { slots: Some(Slots::adaptive(1..=4)), pace, ..Draft::default() };
    let mut rig = Rig::new(Draft { controller: brake(1), ..draft });
    let change = |from, to| Change { from, to };
    let time = |from, to| Change { from: secs(from), to: secs(to) };
    rig.record(Outcome::overload());
    let why = Why::Overload;
    assert_eq!(
        rig.take_events(),
        [Event::Slowed { slots: change(4, 2), interval: time(1, 2), rate: None, why }]
    );
    rig.record(Outcome::failure());
    let why = Why::Failures { count: 1, within: secs(60) };
    assert_eq!(
        rig.take_events(),
        [Event::Slowed { slots: change(2, 1), interval: time(2, 4), rate: None, why }]
    );
    let _held = rig.at(at(60)).enter(REQUEST);
    rig.record(Outcome::success());
    assert_eq!(rig.take_events(), [Event::SpedUp { slots: change(1, 2), interval: time(4, 2), rate: None }]);
    rig.at(at(300)).record(Outcome::success());
    let lifted = Event::CeilingLifted { ceiling: change(2, 4) };
    assert_eq!(
        rig.take_events(),
        [lifted, Event::SpedUp { slots: change(2, 3), interval: time(2, 1), rate: None }]
    );
}

#[test]
fn the_circuit_counts_failures_after_a_brake_cut() {
    let circuit = Some(Circuit::after_failures(20));
    for controller in [Controller::Fixed, brake(3)] {
        let slots = Some(Slots::adaptive(20..=40));
        let mut rig = Rig::new(Draft { slots, circuit, ..Draft::default() }.controlled_by(controller));
        let wave = rig.enter_all(20);
        for (index, charge) in wave.into_iter().enumerate() {
            assert_eq!(rig.snapshot().circuit.unwrap().state, Closed, "after {index} failures");
            rig.settle(charge, Outcome::failure());
        }
        assert_eq!(rig.snapshot().circuit.unwrap().state, Open);
    }
}

#[test]
fn failure_that_opens_circuit_counts_for_brake() {
    let circuit = Some(Circuit::after_failures(1));
    let slots = Some(Slots::adaptive(1..=8));
    let mut rig = Rig::new(Draft { slots, circuit, controller: brake(1), ..Draft::default() });
    rig.call(REQUEST, Outcome::failure());
    assert_eq!((rig.cuts(), rig.snapshot().slots), (1, Some(4)));
}

#[test]
fn the_first_request_may_fail() {
    let mut rig = Rig::new(Draft { total: Some(4), ..Draft::gentle() });
    rig.call(REQUEST, Outcome::failure());
    let seen = rig.snapshot();
    assert_eq!((seen.in_flight, seen.slots, seen.failures, seen.completed), (0, Some(5), 1, 1));
    assert_eq!((seen.percentage, seen.eta), (Some(25.0), Some(millis(600))), "three gaps of 200 ms");
}

#[test]
fn zero_total_has_no_percentage_or_eta() {
    let mut rig = Rig::new(Draft { total: Some(0), ..Draft::default() });
    rig.call(REQUEST, Outcome::success());
    let seen = rig.snapshot();
    assert_eq!((seen.completed, seen.total, seen.percentage, seen.eta), (1, 0, None, None));
}

#[test]
fn latency_is_time_since_entry_or_as_reported() {
    for (outcome, eta) in [(Outcome::success(), 6), (Outcome::success().took(secs(1)), 3)] {
        let mut rig = Rig::new(Draft { slots: Some(Slots::fixed(1)), total: Some(4), ..Draft::default() });
        let charge = rig.enter(REQUEST);
        rig.at(at(2)).settle(charge, outcome);
        assert_eq!(rig.snapshot().eta, Some(secs(eta)));
    }
}

/// All gates at once, recovering from a pause and with a half-open circuit at 20 s.
fn everything() -> Rig {
    let mut rig = Rig::new(Draft {
        slots: Some(Slots::fixed(5)),
        recovery_slots: Some(2),
        bytes: Some(Bytes::in_flight(1_000).recovering_price(20)),
        pace: Some(Pace::every(secs(1))),
        rate: Some(Rate::per_minute(3)),
        budget: Some(Budget::tokens(100, secs(60))),
        circuit: Some(Circuit::after_failures(1).open_for(secs(1))),
        pause: Pause::default().tail(secs(60)),
        ..Draft::default()
    });
    rig.call(tokens(10), Outcome::failure());
    rig.pause(secs(5));
    rig.at(at(20));
    rig
}

#[test]
fn undone_request_is_returned_completely() {
    let mut rig = everything();
    let before = rig.snapshot();
    let charge = rig.enter(tokens(30).bytes(10));
    let taken = rig.snapshot();
    assert!(charge.is_counted() && charge.is_probe() && charge.is_recovering());
    assert_eq!((charge.bytes_held(), charge.tokens_held(), taken.admitted), (200, 30, before.admitted + 1));
    assert_eq!(taken.next_entry, Some(at(20) + millis(100)), "the probe is out");
    rig.undo(charge);
    assert_eq!(Snapshot { evaluations: before.evaluations, ..rig.snapshot() }, before);
    let again = rig.enter(tokens(30).bytes(10));
    assert!(again.is_probe(), "the place in the pace is free again");
}

#[test]
fn dropped_permit_keeps_rate_and_pace_spent() {
    let mut rig = everything();
    let before = rig.snapshot();
    rig.call(tokens(30).bytes(10), Outcome::ignored());
    let after = rig.snapshot();
    assert_eq!((after.in_flight, after.bytes_in_flight, after.tokens_used), (0, 0, before.tokens_used));
    assert_eq!(after.rate_level, before.rate_level.map(|level| level - 1));
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(21))));
}

#[test]
fn only_the_last_pace_entry_can_be_undone() {
    let mut rig = Rig::new(Draft { pace: Some(Pace::every(secs(1))), ..Draft::default() });
    let first = rig.enter(REQUEST);
    let second = rig.at(at(1)).enter(REQUEST);
    rig.undo(first);
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(2))));
    rig.undo(second);
    let _third = rig.enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(2))));
}

#[test]
fn huge_costs_are_taken_and_returned_alike() {
    let mut rig = Rig::new(Draft { bytes: Some(Bytes::in_flight(1)), ..Draft::default() });
    let huge = rig.enter(Cost::request().bytes(u64::MAX).tokens(u64::MAX));
    assert_eq!(rig.waits(REQUEST), (Gate::Bytes, None));
    rig.settle(huge, Outcome::success());
    assert_eq!(rig.snapshot().bytes_in_flight, 0);
}

#[test]
fn tokens_without_a_permit_are_recorded() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    rig.record(Outcome::success().spent(tokens(30)));
    rig.record(Outcome::ignored().spent(tokens(5)));
    assert_eq!(rig.snapshot().tokens_used, 35);
}

#[test]
fn malformed_headers_are_counted_for_all_outcomes() {
    let mut rig = Rig::new(Draft { slots: Some(Slots::fixed(4)), ..Draft::default() });
    let outcomes = [Outcome::success(), Outcome::failure(), Outcome::overload(), Outcome::ignored()];
    for (outcome, count) in outcomes.into_iter().zip(1..) {
        rig.call(REQUEST, outcome.with_malformed(2));
        assert_eq!(rig.snapshot().headers_malformed, 2 * count, "{outcome:?}");
    }
    rig.record(Outcome::ignored().with_malformed(u32::MAX));
    assert_eq!(rig.snapshot().headers_malformed, 8 + u64::from(u16::MAX));
    rig.gates.headers_malformed = u32::MAX;
    rig.record(Outcome::success().with_malformed(1));
    assert_eq!(rig.snapshot().headers_malformed, u64::from(u32::MAX), "the count saturates");
}

#[test]
fn client_errors_keep_the_consecutive_failures() {
    use crate::classes::{Classes, Completion};
    let classes = Classes::new();
    let mut rig = Rig::new(Draft { circuit: Some(Circuit::after_failures(3)), ..listening() });
    let failures = |rig: &Rig| rig.snapshot().circuit.unwrap().consecutive_failures;
    rig.record(classes.outcome(Completion::Status(500)));
    rig.record(classes.outcome(Completion::Timeout));
    assert_eq!(failures(&rig), 2);
    let before = row(&rig);
    (0..100).for_each(|_| rig.record(classes.outcome(Completion::Status(404))));
    assert_eq!((row(&rig), failures(&rig)), (before, 2));
    rig.record(classes.outcome(Completion::Status(501)));
    assert_eq!(row(&rig).0, Open, "the third in a row");
}
