//! When gates may be evicted, and which requests pass when the gates are bypassed.

use std::time::Duration;

use super::{Gates, Idleness};
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
    gates.settle(plan, Ending { charge, reported: None, outcome: &outcome }, 0, at(10), &mut Vec::new());
    gates
}

#[test]
fn new_gates_are_fresh() {
    for draft in [Draft::default(), Draft::gentle(), Draft::layered()] {
        let plan = plan(draft);
        assert_eq!(gates(&plan).idleness(&plan, at(0)), Idleness::Fresh);
    }
}

#[test]
fn gates_are_busy_while_they_limit() {
    let second = Duration::from_secs(1);
    let table = [
        ("rate", Draft { rate: Some(Rate::per_second(1)), ..Draft::default() }, 999, 1_000),
        ("pace", Draft { pace: Some(Pace::every(second)), ..Draft::default() }, 999, 1_000),
        ("budget", Draft { budget: Some(Budget::tokens(50, second)), ..Draft::default() }, 1_000, 1_001),
    ];
    for (what, draft, busy, fresh) in table {
        let plan = plan(draft);
        let gates = after(&plan, Outcome::success());
        assert_eq!(gates.idleness(&plan, at(busy)), Idleness::Busy, "{what}");
        assert_eq!(gates.idleness(&plan, at(fresh)), Idleness::Fresh, "{what}");
    }
}

#[test]
fn request_in_flight_keeps_gates_busy() {
    let plan = plan(Draft { slots: Some(Slots::fixed(2)), ..Draft::default() });
    let mut gates = gates(&plan);
    let charge = gates.admit(&plan, Cost::request(), 0, at(0), &mut Vec::new()).expect("admitted");
    assert_eq!(gates.idleness(&plan, at(86_400_000)), Idleness::Busy);
    let ending = Ending { charge, reported: None, outcome: &Outcome::ignored() };
    gates.settle(&plan, ending, 0, at(86_400_000), &mut Vec::new());
    assert_eq!(gates.idleness(&plan, at(86_400_000)), Idleness::Fresh);
}

#[test]
fn a_pause_and_its_tail_are_busy() {
    let pause = crate::plan::Pause::default().tail(Duration::from_secs(10));
    let plan = plan(Draft { pause, recovery_slots: Some(1), ..Draft::default() });
    let gates = after(&plan, Outcome::overload().retry_after(Duration::from_secs(2)));
    let rests = [2_009, 12_009, 12_010].map(|millis| gates.idleness(&plan, at(millis)));
    assert_eq!(rests, [Idleness::Busy, Idleness::Busy, Idleness::Fresh]);
}

#[test]
fn an_open_circuit_is_busy_and_then_learned() {
    let circuit = Circuit::after_failures(1).open_for(Duration::from_secs(5));
    let plan = plan(Draft { circuit: Some(circuit), ..Draft::default() });
    let mut gates = after(&plan, Outcome::failure());
    assert_eq!(gates.idleness(&plan, at(5_009)), Idleness::Busy);
    assert_eq!(
        gates.idleness(&plan, at(5_010)),
        Idleness::Learned,
        "the next request is a probe, with this state or a new one"
    );
    let probe = gates.admit(&plan, Cost::request(), 0, at(6_000), &mut Vec::new()).expect("a probe");
    assert_eq!(gates.idleness(&plan, at(86_400_000)), Idleness::Busy, "a probe is out");
    let ending = Ending { charge: probe, reported: None, outcome: &Outcome::failure() };
    gates.settle(&plan, ending, 0, at(86_400_000), &mut Vec::new());
    assert_eq!(gates.idleness(&plan, at(86_400_000)), Idleness::Busy, "open again, for twice as long");
}

#[test]
fn counted_circuit_failures_are_learned() {
    let plan = plan(Draft { circuit: Some(Circuit::after_failures(3)), ..Draft::default() });
    assert_eq!(after(&plan, Outcome::failure()).idleness(&plan, at(10)), Idleness::Learned);
    assert_eq!(after(&plan, Outcome::success()).idleness(&plan, at(10)), Idleness::Fresh);
}

#[test]
fn controller_state_is_learned() {
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
        assert_eq!(after(&plan, Outcome::overload()).idleness(&plan, hour), Idleness::Learned);
        assert_eq!(after(&plan, Outcome::success()).idleness(&plan, hour), Idleness::Fresh);
    }
}

#[test]
fn closed_throttle_is_busy() {
    let plan = plan(Draft::default());
    let mut gates = gates(&plan);
    gates.close(&mut Vec::new());
    assert_eq!(gates.idleness(&plan, at(0)), Idleness::Busy);
}

#[test]
fn bypassing_requests_are_counted_but_take_nothing() {
    let plan =
        plan(Draft { rate: Some(Rate::per_hour(1)), slots: Some(Slots::fixed(1)), ..Draft::default() });
    let mut gates = gates(&plan);
    gates.bypass(true);
    let (events, mut charges) = (&mut Vec::new(), Vec::new());
    for _ in 0..10 {
        assert!(gates.admit_plain(&plan, at(0)).is_none(), "no fast path while bypassed");
        let charge = gates.admit(&plan, Cost::request(), 0, at(0), events).expect("the gates are bypassed");
        charges.push(charge);
    }
    let snapshot = gates.snapshot(&plan, 0, at(0));
    assert_eq!((snapshot.admitted, snapshot.rate_level, snapshot.in_flight), (10, Some(1), 10));
    assert_eq!(snapshot.next_entry, Some(at(0)));
    gates.bypass(false);
    let full = gates.admit(&plan, Cost::request(), 0, at(0), events);
    assert!(full.is_err(), "the bypassing requests are in flight, and there is one slot");
    for charge in charges {
        let ending = Ending { charge, reported: None, outcome: &Outcome::overload() };
        gates.settle(&plan, ending, 0, at(0), events);
    }
    assert!(gates.admit(&plan, Cost::request(), 0, at(0), events).is_ok());
    assert!(
        gates.admit(&plan, Cost::request(), 0, at(0), events).is_err(),
        "the gates continue with their earlier state"
    );
}

#[test]
fn bypass_ignores_circuit_and_budget_but_not_close() {
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
