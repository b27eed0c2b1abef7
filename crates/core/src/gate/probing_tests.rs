//! A far side of two per second that holds no more than two at once failed for a while, and healed. The circuit sent its
//! three probes in one burst, since the bucket had filled while it was open; the far side bore two of them and said 429 to
//! the third; so the circuit opened again, for twice as long, each time and for ever.
//!
//! While the circuit is open a rate that was learned rests, as in a pause, and leaves with one entry in it: probes come at
//! the rate. A rate that nobody moves is an agreement with the far side, and keeps what was saved up.

use super::tests::{REQUEST, Rig, at, millis, secs};
use crate::outcome::Outcome;
use crate::plan::{Aimd, Circuit, Controller, Draft, Rate};
use crate::snapshot::CircuitState;
use crate::time::Instant;
use crate::verdict::{Gate, Verdict};

/// One per second and four at once; opens at the first failure for 10 s, with three probes.
fn learned() -> Draft {
    let aimd = Aimd::default().within(0.5..=8.0);
    Draft { controller: Controller::Aimd(aimd), ..agreed() }
}

fn agreed() -> Draft {
    let circuit = Circuit::after_failures(1).open_for(secs(10)).probes(3);
    Draft { rate: Some(Rate::per_second(1).burst(4)), circuit: Some(circuit), ..Draft::default() }
}

/// Opens the circuit at the origin by a failure that moves no rate.
fn opened(draft: Draft) -> Rig {
    let mut rig = Rig::new(draft);
    rig.call(REQUEST, Outcome::failure());
    assert_eq!(rig.seen().circuit.unwrap().state, CircuitState::Open);
    rig
}

fn level(rig: &Rig) -> i64 {
    rig.seen().rate_level.unwrap()
}

#[test]
fn a_healed_far_side_that_bears_two_at_once_closes_a_circuit_of_three_probes() {
    let mut rig = opened(learned());
    // The far side's own bucket: two per second, two at once.
    let mut arrivals: Vec<Instant> = Vec::new();
    rig.at(at(10));
    while rig.seen().circuit.unwrap().state != CircuitState::Closed {
        let charge = rig.enter_when_told();
        let recent = arrivals.iter().filter(|arrival| rig.now.since(**arrival) < secs(1)).count();
        arrivals.push(rig.now);
        let outcome = if recent < 2 { Outcome::success() } else { Outcome::overload() };
        rig.settle(charge, outcome);
        assert!(rig.now < at(60), "it never closes");
    }
    // The second success was a second after the first: from there on it is a quarter faster.
    assert_eq!(arrivals, [at(10), at(11), at(11) + millis(800)]);
}

#[test]
fn of_probes_that_ask_at_once_the_first_enters_and_the_rest_wait_for_the_rate() {
    let mut rig = opened(learned());
    let _first = rig.at(at(10)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(11))));
    let _second = rig.at(at(11)).enter(REQUEST);
    let _third = rig.at(at(12)).enter(REQUEST);
    assert!(matches!(rig.at(at(13)).admit(REQUEST), Err(Verdict::Refuse(_))), "three are out");
}

#[test]
fn what_an_agreed_rate_saved_up_is_there_after_an_open_circuit() {
    let mut rig = opened(agreed());
    assert_eq!(level(rig.at(at(10))), 4);
    assert_eq!(rig.enter_all(3).len(), 3);
}

#[test]
fn a_bucket_with_less_than_one_entry_is_not_given_one() {
    let circuit = Circuit::after_failures(1).open_for(millis(200));
    let mut rig = Rig::new(Draft { circuit: Some(circuit), ..learned() });
    let mut charges = rig.enter_all(4);
    rig.settle(charges.remove(0), Outcome::failure());
    assert_eq!(rig.at(Instant::ZERO + millis(200)).waits(REQUEST), (Gate::Rate, Some(at(1))));
}

#[test]
fn a_cut_or_another_plan_while_it_is_open_keeps_the_one_entry() {
    let mut rig = Rig::new(learned());
    rig.call(REQUEST, Outcome::overload());
    assert_eq!((rig.seen().rate.unwrap().to_string(), level(&rig)), ("0.5/s".to_owned(), 1));
    let aimd = Aimd::default().within(0.25..=0.25);
    let slower =
        Draft { rate: Some(Rate::new(1, secs(4)).burst(4)), controller: Controller::Aimd(aimd), ..learned() };
    rig.at(at(5)).retune(slower);
    assert_eq!(level(&rig), 1);
    let _probe = rig.at(at(10)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(14))));
}

/// A late answer may bring a hint while the circuit is open: the rate rests until the later of the two, once.
#[test]
fn a_pause_and_an_open_circuit_rest_together_and_not_one_after_the_other() {
    for (span, first, second) in [(2, 10, 11), (30, 35, 36)] {
        let mut rig = opened(learned());
        rig.at(at(5)).pause(secs(span));
        let _probe = rig.at(at(first)).enter(REQUEST);
        assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(second))), "paused for {span} s");
    }
    // Resumed by hand, the circuit is what is left of it.
    for (resumed, first) in [(6, 10), (20, 20)] {
        let mut rig = opened(learned());
        rig.at(at(5)).pause(secs(30));
        rig.at(at(resumed)).resume();
        let _probe = rig.at(at(first)).enter(REQUEST);
        assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(first + 1))), "resumed at {resumed} s");
    }
    // Paused first, and then opened by what was in flight.
    let mut rig = Rig::new(learned());
    let charge = rig.enter(REQUEST);
    rig.pause(secs(20));
    rig.at(at(1)).settle(charge, Outcome::failure());
    let _probe = rig.at(at(20)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(21))));
}

#[test]
fn the_time_for_which_it_was_open_is_neither_healthy_nor_unused() {
    let circuit = Circuit::after_failures(1).open_for(secs(10)).probes(1);
    let mut rig = Rig::new(Draft { circuit: Some(circuit), ..learned() });
    rig.call(REQUEST, Outcome::overload());
    rig.told();
    let rates: Vec<_> = (0..4)
        .map(|_| {
            let charge = if rig.now < at(10) { rig.at(at(10)).enter(REQUEST) } else { rig.enter_when_told() };
            rig.settle(charge, Outcome::success());
            (rig.now.as_nanos() / 1_000_000, rig.seen().rate.unwrap().to_string())
        })
        .collect();
    // One per second was too much: a quarter more for each second below nine tenths of that, a fiftieth above.
    let wanted = [(10_000, "0.5/s"), (12_000, "0.78125/s"), (13_280, "0.98203/s"), (14_298, "1.002036/s")];
    assert_eq!(rates, wanted.map(|(at, rate)| (at, rate.to_owned())));
}
