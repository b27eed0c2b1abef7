//! What is forgotten with gates at rest, and who may pass when the gates are bypassed: tables.

use std::time::Duration;

use super::{Gates, Rest};
use crate::cost::Cost;
use crate::gate::Ending;
use crate::outcome::Outcome;
use crate::plan::{Aimd, Brake, Budget, Circuit, Controller, Draft, Pace, Plan, Rate, Slots};
use crate::random::Random;
use crate::time::Instant;

const fn at(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

fn plan(draft: Draft) -> Plan {
    draft.check().expect("within the bounds")
}

fn gates(plan: &Plan) -> Gates {
    Gates::new(plan, Random::fixed(0.0))
}

/// One request at the beginning that ends with `outcome` after 10 ms.
fn after(plan: &Plan, outcome: Outcome) -> Gates {
    let mut gates = gates(plan);
    let charge = gates.admit(plan, Cost::request().tokens(10), 0, at(0), &mut Vec::new()).expect("admitted");
    gates.settle(plan, Ending { charge, reported: None, outcome }, 0, at(10), &mut Vec::new());
    gates
}

#[test]
fn gates_that_nobody_has_passed_hold_nothing_worth_keeping() {
    for draft in [Draft::default(), Draft::gentle(), Draft::layered()] {
        let plan = plan(draft);
        assert_eq!(gates(&plan).rest(&plan, at(0)), Rest::Fresh);
    }
}

#[test]
fn what_limits_is_busy_until_it_limits_no_more() {
    let second = Duration::from_secs(1);
    let table = [
        ("rate", Draft { rate: Some(Rate::per_second(1)), ..Draft::default() }, 999, 1_000),
        ("pace", Draft { pace: Some(Pace::every(second)), ..Draft::default() }, 999, 1_000),
        ("budget", Draft { budget: Some(Budget::tokens(50, second)), ..Draft::default() }, 1_000, 1_001),
    ];
    for (what, draft, busy, fresh) in table {
        let plan = plan(draft);
        let gates = after(&plan, Outcome::success());
        assert_eq!(gates.rest(&plan, at(busy)), Rest::Busy, "{what}");
        assert_eq!(gates.rest(&plan, at(fresh)), Rest::Fresh, "{what}");
    }
}

#[test]
fn a_request_in_flight_keeps_its_gates_busy_however_long_it_takes() {
    let plan = plan(Draft { slots: Some(Slots::fixed(2)), ..Draft::default() });
    let mut gates = gates(&plan);
    let charge = gates.admit(&plan, Cost::request(), 0, at(0), &mut Vec::new()).expect("admitted");
    assert_eq!(gates.rest(&plan, at(86_400_000)), Rest::Busy);
    let ending = Ending { charge, reported: None, outcome: Outcome::ignored() };
    gates.settle(&plan, ending, 0, at(86_400_000), &mut Vec::new());
    assert_eq!(gates.rest(&plan, at(86_400_000)), Rest::Fresh);
}

#[test]
fn a_pause_and_its_tail_are_busy() {
    let pause = crate::plan::Pause::default().tail(Duration::from_secs(10));
    let plan = plan(Draft { pause, ..Draft::default() });
    let gates = after(&plan, Outcome::overload().retry_after(Duration::from_secs(2)));
    let rests = [2_009, 12_009, 12_010].map(|millis| gates.rest(&plan, at(millis)));
    assert_eq!(rests, [Rest::Busy, Rest::Busy, Rest::Fresh]);
}

#[test]
fn an_open_circuit_is_busy_and_then_learned() {
    let circuit = Circuit::after_failures(1).open_for(Duration::from_secs(5));
    let plan = plan(Draft { circuit: Some(circuit), ..Draft::default() });
    let mut gates = after(&plan, Outcome::failure());
    assert_eq!(gates.rest(&plan, at(5_009)), Rest::Busy);
    assert_eq!(
        gates.rest(&plan, at(5_010)),
        Rest::Learned,
        "the next to ask is a probe, of this state or a new one"
    );
    let probe = gates.admit(&plan, Cost::request(), 0, at(6_000), &mut Vec::new()).expect("a probe");
    assert_eq!(gates.rest(&plan, at(86_400_000)), Rest::Busy, "a probe is out");
    let ending = Ending { charge: probe, reported: None, outcome: Outcome::failure() };
    gates.settle(&plan, ending, 0, at(86_400_000), &mut Vec::new());
    assert_eq!(gates.rest(&plan, at(86_400_000)), Rest::Busy, "open again, for twice as long");
}

#[test]
fn failures_that_a_circuit_counts_are_learned() {
    let plan = plan(Draft { circuit: Some(Circuit::after_failures(3)), ..Draft::default() });
    assert_eq!(after(&plan, Outcome::failure()).rest(&plan, at(10)), Rest::Learned);
    assert_eq!(after(&plan, Outcome::success()).rest(&plan, at(10)), Rest::Fresh);
}

#[test]
fn what_a_controller_knows_is_learned() {
    let brake = Draft {
        slots: Some(Slots::adaptive(1..=8)),
        controller: Controller::Brake(Brake::default().at(1, Duration::from_secs(60))),
        ..Draft::default()
    };
    let aimd =
        Draft { rate: Some(Aimd::RATE), controller: Controller::Aimd(Aimd::default()), ..Draft::default() };
    for draft in [brake, aimd] {
        let plan = plan(draft);
        let hour = at(3_600_000);
        assert_eq!(after(&plan, Outcome::overload()).rest(&plan, hour), Rest::Learned);
        assert_eq!(after(&plan, Outcome::success()).rest(&plan, hour), Rest::Fresh);
    }
}

#[test]
fn a_closed_throttle_is_not_forgotten() {
    let plan = plan(Draft::default());
    let mut gates = gates(&plan);
    gates.close(&mut Vec::new());
    assert_eq!(gates.rest(&plan, at(0)), Rest::Busy);
}

#[test]
fn whoever_bypasses_the_gates_is_counted_and_takes_no_unit_of_any() {
    let plan =
        plan(Draft { rate: Some(Rate::per_hour(1)), slots: Some(Slots::fixed(1)), ..Draft::default() });
    let mut gates = gates(&plan);
    gates.bypass(true);
    let (events, mut charges) = (&mut Vec::new(), Vec::new());
    for _ in 0..10 {
        assert!(gates.admit_plain(&plan, Cost::request(), at(0)).is_none(), "there is no short way around");
        let charge = gates.admit(&plan, Cost::request(), 0, at(0), events).expect("everybody may pass");
        charges.push(charge);
    }
    let snapshot = gates.snapshot(&plan, 0, at(0));
    assert_eq!((snapshot.admitted, snapshot.rate_level, snapshot.in_flight), (10, Some(1), 10));
    assert_eq!(snapshot.next_entry, Some(at(0)));
    gates.bypass(false);
    let full = gates.admit(&plan, Cost::request(), 0, at(0), events);
    assert!(full.is_err(), "those who passed are in flight, and there is one slot");
    for charge in charges {
        let ending = Ending { charge, reported: None, outcome: Outcome::overload() };
        gates.settle(&plan, ending, 0, at(0), events);
    }
    assert!(gates.admit(&plan, Cost::request(), 0, at(0), events).is_ok());
    assert!(
        gates.admit(&plan, Cost::request(), 0, at(0), events).is_err(),
        "the gates count from where they were"
    );
}

#[test]
fn who_bypasses_passes_an_open_circuit_and_a_small_budget_but_no_closed_door() {
    let circuit = Some(Circuit::after_failures(1));
    let budget = Some(Budget::tokens(5, Duration::from_secs(1)));
    let plan = plan(Draft { budget, circuit, ..Draft::default() });
    let mut gates = gates(&plan);
    gates.bypass(true);
    gates.record(&plan, None, Outcome::failure(), 0, at(0), &mut Vec::new());
    let large = Cost::request().tokens(50);
    assert!(gates.admit(&plan, large, 0, at(0), &mut Vec::new()).is_ok());
    gates.close(&mut Vec::new());
    assert!(gates.admit(&plan, large, 0, at(0), &mut Vec::new()).is_err());
}
