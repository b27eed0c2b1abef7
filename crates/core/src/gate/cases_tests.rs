//! The gates of one throttle together: circuit, adaptive rate and refusals. Tests of the rate alone are in
//! `aimd_tests.rs`.

use super::tests::{REQUEST, Rig, at, millis, secs};
use crate::outcome::Outcome;
use crate::plan::{Aimd, Circuit, Controller, Draft, Rate};
use crate::refused::Refused;
use crate::snapshot::CircuitState::{self, Closed, HalfOpen, Open};
use crate::time::Instant;
use crate::verdict::Verdict;

/// 2 per second within 0.5 and 8, burst of four, increased by half a unit each second, target of 100 ms; a
/// circuit at 40 % of at least five outcomes in 10 s, or three consecutive failures, open for 5 s, with one
/// probe.
fn cases() -> Draft {
    let aimd = Aimd::default().within(0.5..=8.0).increase(0.5).latency_target(millis(100));
    Draft {
        rate: Some(Aimd::RATE),
        controller: Controller::Aimd(aimd),
        circuit: Some(circuit(3, 1)),
        ..Draft::default()
    }
}

const fn circuit(consecutive: u32, probes: u32) -> Circuit {
    let circuit = Circuit::at_error_rate(0.4, 5, secs(10)).slices(10).or_after_failures(consecutive);
    circuit.open_for(secs(5)).probes(probes)
}

fn with(circuit: Circuit) -> Rig {
    Rig::new(Draft { circuit: Some(circuit), ..cases() })
}

/// The point `millis` after the origin.
const fn ms(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

impl Rig {
    fn circuit(&self) -> CircuitState {
        self.snapshot().circuit.expect("a circuit").state
    }

    /// The refusal; `None` if the request entered or must wait.
    fn refused(&mut self) -> Option<Refused> {
        match self.admit(REQUEST) {
            Err(Verdict::Refuse(refused)) => Some(refused),
            _ => None,
        }
    }
}

/// A 503 without a hint is an overload.
const fn unavailable() -> Outcome {
    Outcome::overload()
}

#[test]
fn second_consecutive_503_opens_the_circuit() {
    let mut rig = with(circuit(2, 1));
    let table = [(500, Closed), (1_000, Open)];
    for (time, wanted) in table {
        rig.at(ms(time)).call(REQUEST, unavailable());
        assert_eq!(rig.circuit(), wanted, "at {time} ms");
    }
    let retry_after = millis(4_500);
    assert_eq!(rig.at(ms(1_500)).refused(), Some(Refused::CircuitOpen { retry_after }));
}

#[test]
fn two_probes_close_circuit_and_failure_reopens_it() {
    let mut rig = with(circuit(1, 2));
    rig.at(ms(100)).call(REQUEST, unavailable());
    assert_eq!(rig.circuit(), Open);
    let probe = rig.at(ms(5_100)).enter(REQUEST);
    assert_eq!(rig.circuit(), HalfOpen);
    rig.settle(probe, Outcome::success());
    assert_eq!(rig.circuit(), HalfOpen);
    for (outcome, wanted) in [(Outcome::success(), Closed), (unavailable(), Open)] {
        let charge = rig.enter_when_ready();
        rig.settle(charge, outcome);
        assert_eq!(rig.circuit(), wanted);
    }
}

#[test]
fn refusals_count_down_until_the_circuit_admits() {
    let mut rig = with(circuit(1, 1).open_for(secs(2)));
    rig.call(REQUEST, unavailable());
    for (time, left) in [(0, 2_000), (500, 1_500), (1_999, 1)] {
        let refused = rig.at(ms(time)).refused().expect("the circuit is open");
        assert_eq!(refused, Refused::CircuitOpen { retry_after: millis(left) }, "at {time} ms");
        assert_eq!(refused.retry_after(), Some(millis(left)));
    }
    rig.at(at(2)).call(REQUEST, Outcome::success());
    assert_eq!(rig.circuit(), Closed);
}

#[test]
fn a_half_open_circuit_admits_one_of_fifty() {
    let mut rig = with(circuit(1, 1));
    rig.call(REQUEST, unavailable());
    rig.at(at(5));
    let admitted = (0..50).filter_map(|_| rig.admit(REQUEST).ok()).count();
    assert_eq!(admitted, 1);
    // The circuit refuses instead of queueing requests for a place that a success would make unnecessary.
    assert_eq!(rig.refused(), Some(Refused::CircuitOpen { retry_after: millis(500) }));
}

#[test]
fn zero_burst_is_refused_and_slow_rate_admits() {
    let quarter = |burst| {
        let aimd = Aimd::default().within(0.25..=8.0);
        let rate = Rate::new(1, secs(4)).burst(burst);
        Draft { rate: Some(rate), controller: Controller::Aimd(aimd), ..Draft::default() }
    };
    let message = quarter(0).check().expect_err("a burst of zero").to_string();
    assert!(message.starts_with("`rate.burst` is 0, and must be at least 1"), "{message}");
    let mut rig = Rig::new(quarter(1));
    for second in [0, 4, 8] {
        let _entered = rig.enter_when_ready();
        assert_eq!(rig.now, at(second));
    }
}

#[test]
fn a_hundred_404s_move_neither_rate_nor_circuit() {
    let mut rig = with(circuit(3, 1));
    rig.call(REQUEST, unavailable());
    rig.later(secs(2)).call(REQUEST, unavailable());
    let rate = rig.snapshot().rate;
    for _ in 0..100 {
        let charge = rig.enter_when_ready();
        rig.later(millis(900)).settle(charge, Outcome::ignored());
        let view = rig.snapshot().circuit.expect("a circuit");
        assert_eq!((rig.snapshot().rate, view.state, view.consecutive_failures), (rate, Closed, 2));
    }
    // The third consecutive failure still counts as the third, minutes later.
    let charge = rig.enter_when_ready();
    rig.settle(charge, unavailable());
    assert_eq!(rig.circuit(), Open);
}
