//! Probes of a half-open circuit are paced by a learned rate.
//!
//! Regression: an upstream of two per second with a burst of two failed and recovered. The circuit sent its
//! three probes in one burst, because the bucket had filled while the circuit was open. The upstream rejected
//! the third with 429, so the circuit opened again for twice as long, forever. Now an open circuit suspends a
//! learned rate, which then holds one entry, so that probes are sent at the rate. A fixed rate is an
//! agreement with the upstream and keeps its saved units.

use super::tests::{REQUEST, Rig, at, millis, secs};
use crate::outcome::Outcome;
use crate::plan::{Aimd, Circuit, Controller, Draft, Rate};
use crate::snapshot::CircuitState;
use crate::time::Instant;
use crate::verdict::{Gate, Verdict};

/// One per second with a burst of four; the circuit opens at the first failure for 10 s, with three probes.
fn learned() -> Draft {
    let aimd = Aimd::default().within(0.5..=8.0);
    Draft { controller: Controller::Aimd(aimd), ..agreed() }
}

fn agreed() -> Draft {
    let circuit = Circuit::after_failures(1).open_for(secs(10)).probes(3);
    Draft { rate: Some(Rate::per_second(1).burst(4)), circuit: Some(circuit), ..Draft::default() }
}

/// Opens the circuit at the origin by a failure that does not change the rate.
fn opened(draft: Draft) -> Rig {
    let mut rig = Rig::new(draft);
    rig.call(REQUEST, Outcome::failure());
    assert_eq!(rig.snapshot().circuit.unwrap().state, CircuitState::Open);
    rig
}

fn level(rig: &Rig) -> i64 {
    rig.snapshot().rate_level.unwrap()
}

#[test]
fn paced_probes_close_circuit_of_small_upstream() {
    let mut rig = opened(learned());
    // The upstream's own limit: two per second, two at once.
    let mut arrivals: Vec<Instant> = Vec::new();
    rig.at(at(10));
    while rig.snapshot().circuit.unwrap().state != CircuitState::Closed {
        let charge = rig.enter_when_ready();
        let recent = arrivals.iter().filter(|arrival| rig.now.since(**arrival) < secs(1)).count();
        arrivals.push(rig.now);
        let outcome = if recent < 2 { Outcome::success() } else { Outcome::overload() };
        rig.settle(charge, outcome);
        assert!(rig.now < at(60), "it never closes");
    }
    // The second success came a second after the first, so the rate has grown by a quarter.
    assert_eq!(arrivals, [at(10), at(11), at(11) + millis(800)]);
}

#[test]
fn simultaneous_probes_wait_for_the_rate() {
    let mut rig = opened(learned());
    let _first = rig.at(at(10)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(11))));
    let _second = rig.at(at(11)).enter(REQUEST);
    let _third = rig.at(at(12)).enter(REQUEST);
    assert!(matches!(rig.at(at(13)).admit(REQUEST), Err(Verdict::Refuse(_))), "three probes are in flight");
}

#[test]
fn fixed_rate_keeps_saved_units_after_open_circuit() {
    let mut rig = opened(agreed());
    assert_eq!(level(rig.at(at(10))), 4);
    assert_eq!(rig.enter_all(3).len(), 3);
}

#[test]
fn bucket_below_one_entry_gains_none() {
    let circuit = Circuit::after_failures(1).open_for(millis(200));
    let mut rig = Rig::new(Draft { circuit: Some(circuit), ..learned() });
    let mut charges = rig.enter_all(4);
    rig.settle(charges.remove(0), Outcome::failure());
    assert_eq!(rig.at(Instant::ZERO + millis(200)).waits(REQUEST), (Gate::Rate, Some(at(1))));
}

#[test]
fn cut_or_new_plan_while_open_keeps_one_entry() {
    let mut rig = Rig::new(learned());
    rig.call(REQUEST, Outcome::overload());
    assert_eq!((rig.snapshot().rate.unwrap().to_string(), level(&rig)), ("0.5/s".to_owned(), 1));
    let aimd = Aimd::default().within(0.25..=0.25);
    let slower =
        Draft { rate: Some(Rate::new(1, secs(4)).burst(4)), controller: Controller::Aimd(aimd), ..learned() };
    rig.at(at(5)).retune(slower);
    assert_eq!(level(&rig), 1);
    let _probe = rig.at(at(10)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(14))));
}

/// A late response may carry a hint while the circuit is open: the rate is suspended until the later of the
/// two.
#[test]
fn pause_and_open_circuit_suspend_concurrently() {
    for (span, first, second) in [(2, 10, 11), (30, 35, 36)] {
        let mut rig = opened(learned());
        rig.at(at(5)).pause(secs(span));
        let _probe = rig.at(at(first)).enter(REQUEST);
        assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(second))), "paused for {span} s");
    }
    // Resumed by hand, only the circuit suspends the rate.
    for (resumed, first) in [(6, 10), (20, 20)] {
        let mut rig = opened(learned());
        rig.at(at(5)).pause(secs(30));
        rig.at(at(resumed)).resume();
        let _probe = rig.at(at(first)).enter(REQUEST);
        assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(first + 1))), "resumed at {resumed} s");
    }
    // Paused first, then opened by a request in flight.
    let mut rig = Rig::new(learned());
    let charge = rig.enter(REQUEST);
    rig.pause(secs(20));
    rig.at(at(1)).settle(charge, Outcome::failure());
    let _probe = rig.at(at(20)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(21))));
}

#[test]
fn open_time_is_neither_healthy_nor_unused() {
    let circuit = Circuit::after_failures(1).open_for(secs(10)).probes(1);
    let mut rig = Rig::new(Draft { circuit: Some(circuit), ..learned() });
    rig.call(REQUEST, Outcome::overload());
    rig.take_events();
    let rates: Vec<_> = (0..4)
        .map(|_| {
            let charge =
                if rig.now < at(10) { rig.at(at(10)).enter(REQUEST) } else { rig.enter_when_ready() };
            rig.settle(charge, Outcome::success());
            (rig.now.as_nanos() / 1_000_000, rig.snapshot().rate.unwrap().to_string())
        })
        .collect();
    // The bad rate is one per second: growth by 1/4 per second below nine tenths of it, by 1/50 above.
    let wanted = [(10_000, "0.5/s"), (12_000, "0.78125/s"), (13_280, "0.98203/s"), (14_298, "1.002036/s")];
    assert_eq!(rates, wanted.map(|(at, rate)| (at, rate.to_owned())));
}
