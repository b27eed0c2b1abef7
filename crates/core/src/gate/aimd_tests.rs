//! The AIMD rate in the gates: effects of outcomes, a scripted upstream, and invariants of rate changes.

use proptest::prelude::*;

use super::tests::{REQUEST, Rig, at, millis, secs};
use crate::event::{Change, Event, Trip, Why};
use crate::outcome::Outcome;
use crate::per_second::PerSecond;
use crate::plan::{Aimd, Circuit, Controller, Draft, Rate, Slots};
use crate::snapshot::{CircuitState, State};
use crate::time::{Instant, nanos};
use crate::verdict::{Gate, Verdict};

/// 2 per second within 0.5 and 8, burst of four, increased by half a unit each second, latency target of 100
/// ms.
fn cases() -> Draft {
    let aimd = Aimd::default().within(0.5..=8.0).increase(0.5).latency_target(millis(100));
    Draft { rate: Some(Aimd::RATE), controller: Controller::Aimd(aimd), ..Draft::default() }
}

fn starting(rate: Rate) -> Draft {
    Draft { rate: Some(rate), ..cases() }
}

const fn per_second(millionths: u64) -> PerSecond {
    PerSecond::from_millionths(millionths)
}

impl Rig {
    /// The rate in millionths per second.
    fn rate(&self) -> u64 {
        self.snapshot().rate.expect("a rate").millionths()
    }

    /// Enters as soon as possible, ends after `latency`, and returns the rate.
    fn goes(&mut self, latency: u64, outcome: Outcome) -> u64 {
        let charge = self.enter_when_ready();
        self.later(millis(latency)).settle(charge, outcome);
        self.rate()
    }
}

/// A `Slowed` event for `why`, with rates in millionths.
fn slowed(from: u64, to: u64, why: Why) -> Event {
    let rate = Some(Change { from: per_second(from), to: per_second(to) });
    let (slots, interval) = (Change { from: u32::MAX, to: u32::MAX }, Change { from: secs(0), to: secs(0) });
    Event::Slowed { slots, interval, rate, why }
}

fn sped_up(from: u64, to: u64) -> Event {
    let rate = Some(Change { from: per_second(from), to: per_second(to) });
    let (slots, interval) = (Change { from: u32::MAX, to: u32::MAX }, Change { from: secs(0), to: secs(0) });
    Event::SpedUp { slots, interval, rate }
}

#[test]
fn outcomes_move_the_rate_of_the_gate() {
    let mut rig = Rig::new(cases());
    let rates: Vec<_> = (0..6).map(|_| rig.goes(50, Outcome::success())).collect();
    assert_eq!(rates, [2_000_000, 2_000_000, 2_000_000, 2_000_000, 2_000_000, 2_500_000]);
    assert_eq!(rig.now, Instant::ZERO + millis(1_050), "a second after the first success");
    assert_eq!(rig.take_events(), [sped_up(2_000_000, 2_500_000)]);

    let mut rig = Rig::new(cases());
    rig.goes(50, Outcome::success());
    assert_eq!(rig.goes(220, Outcome::success()), 1_000_000);
    let why = Why::Latency { latency: millis(220), target: millis(100) };
    assert_eq!(rig.take_events(), [slowed(2_000_000, 1_000_000, why)]);
    assert_eq!(rig.snapshot().state, State::Cooling);

    let mut rig = Rig::new(cases());
    let rates: Vec<_> = (0..3).map(|_| rig.goes(50, Outcome::overload())).collect();
    assert_eq!(rates, [1_000_000, 500_000, 500_000]);
}

#[test]
fn a_wave_of_overloads_is_one_decrease() {
    let mut rig = Rig::new(starting(Rate::per_second(8)));
    let wave = rig.enter_all(8);
    for charge in wave {
        rig.later(millis(10)).settle(charge, Outcome::overload());
    }
    assert_eq!((rig.rate(), rig.cuts()), (4_000_000, 1));
    // The next wave was sent at the lower rate, so it may cut again.
    assert_eq!(rig.goes(10, Outcome::overload()), 2_000_000);
}

#[test]
fn hint_pauses_and_cuts_once_without_opening_circuit() {
    let mut rig = Rig::new(Draft { circuit: Some(Circuit::after_failures(1)), ..cases() });
    let wave = rig.enter_all(4);
    for charge in wave {
        rig.settle(charge, Outcome::overload().retry_after(secs(3)));
    }
    let seen = rig.snapshot();
    assert_eq!((rig.rate(), rig.cuts(), seen.state), (1_000_000, 1, State::Paused));
    assert_eq!(seen.circuit.unwrap().state, CircuitState::Closed);
    // No refill while paused: the next unit needs one second after the pause.
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(4))));
}

#[test]
fn a_success_with_a_hint_pauses_and_does_not_slow() {
    let mut rig = Rig::new(starting(Rate::per_second(1).burst(1)));
    rig.goes(50, Outcome::success().retry_after(secs(2)));
    assert_eq!((rig.rate(), rig.cuts(), rig.snapshot().state), (1_000_000, 0, State::Paused));
}

#[test]
fn hints_and_manual_pauses_do_not_keep_the_rate_low() {
    let mut rig = Rig::new(cases());
    let outcome = Outcome::success().retry_after(millis(100));
    for _ in 0..200 {
        rig.goes(20, outcome);
        rig.pause(secs(60));
        rig.resume();
    }
    assert_eq!((rig.rate(), rig.cuts()), (8_000_000, 0));
}

#[test]
fn ignored_outcomes_move_nothing() {
    let mut rig = Rig::new(cases());
    for _ in 0..100 {
        assert_eq!(rig.goes(900, Outcome::ignored()), 2_000_000);
    }
    assert!(rig.take_events().is_empty());
}

/// Fast responses, slow ones, a 429, fast ones again, then only 503 until the circuit opens, and the
/// recovery.
#[test]
fn rate_and_circuit_follow_a_scripted_upstream() {
    let circuit = Circuit::after_failures(3).open_for(secs(5));
    let mut rig = Rig::new(Draft { circuit: Some(circuit), ..cases() });
    let fast = (50, Outcome::success());
    let script = [
        (fast, 50, 2_000_000),
        (fast, 100, 2_000_000),
        (fast, 150, 2_000_000),
        (fast, 200, 2_000_000),
        (fast, 550, 2_000_000),
        // A second since the first: +0.5.
        (fast, 1_050, 2_500_000),
        // Between the target and twice that: only the target changes, to 110 ms.
        ((150, Outcome::success()), 1_560, 2_500_000),
        // Twice 110 ms is too slow.
        ((220, Outcome::success()), 2_030, 1_250_000),
        // Retry after two seconds; no refill until then.
        ((50, Outcome::overload().retry_after(secs(2))), 2_440, 625_000),
        // The bad rate is 1.25/s: growth by a quarter in the first second after the pause, and for the next
        // 0.55 s.
        (fast, 5_990, 888_671),
    ];
    for (index, ((latency, outcome), ended, rate)) in script.into_iter().enumerate() {
        let now = rig.goes(latency, outcome);
        assert_eq!((rig.now.as_nanos() / 1_000_000, now), (ended, rate), "step {index}");
    }
    assert_eq!(rig.snapshot().state, State::Cooling);

    // Only 503 from here on: each is a separate wave, and the third opens the circuit.
    rig.take_events();
    let rates: Vec<_> = (0..3).map(|_| rig.goes(50, Outcome::overload())).collect();
    assert_eq!(rates, [500_000, 500_000, 500_000], "never below the floor");
    let opened = Event::CircuitOpened { span: secs(5), why: Trip::Consecutive { failures: 3 } };
    assert_eq!(rig.take_events().iter().filter(|event| **event == opened).count(), 1);
    let opened_at = rig.now;
    rig.at(opened_at + millis(4_999));
    assert!(matches!(rig.admit(REQUEST), Err(Verdict::Refuse(_))));

    // The probe closes the circuit, and the rate returns to its maximum.
    rig.at(opened_at + secs(5)).goes(50, Outcome::success());
    assert_eq!(rig.snapshot().circuit.unwrap().state, CircuitState::Closed);
    rig.take_events();
    let mut before = rig.rate();
    while rig.rate() < 8_000_000 {
        rig.goes(20, Outcome::success());
        assert!(rig.rate() >= before, "a healthy rate only grows");
        before = rig.rate();
        assert!(rig.now < opened_at + secs(240), "the maximum is reached in bounded time");
    }
    let events = rig.take_events();
    assert!(events.iter().any(|event| matches!(event, Event::Recovered { .. })), "{events:?}");
    assert_eq!(rig.snapshot().state, State::Running);
}

#[test]
fn the_level_stays_when_the_rate_moves() {
    let mut rig = Rig::new(starting(Rate::per_second(8).burst(4)));
    let charges = rig.enter_all(4);
    assert_eq!(rig.snapshot().rate_level, Some(0));
    for charge in charges {
        rig.settle(charge, Outcome::overload());
    }
    assert_eq!((rig.rate(), rig.snapshot().rate_level), (4_000_000, Some(0)), "a cut keeps the level");
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(Instant::ZERO + millis(250))));
    // An entry taken at one rate is returned as a whole entry at another.
    let charge = rig.later(millis(250)).enter(REQUEST);
    rig.record(Outcome::overload());
    assert_eq!((rig.rate(), rig.snapshot().rate_level), (2_000_000, Some(0)));
    rig.undo(charge);
    assert_eq!(rig.snapshot().rate_level, Some(1));
}

#[test]
fn new_plan_keeps_learned_rate_and_level() {
    let mut rig = Rig::new(starting(Rate::per_second(8).burst(4)));
    let wave = rig.enter_all(3);
    for charge in wave {
        rig.settle(charge, Outcome::overload());
    }
    rig.retune(starting(Rate::per_second(2).burst(6)));
    assert_eq!((rig.rate(), rig.snapshot().rate_level), (4_000_000, Some(1)));
    // Another controller starts at the plan's rate.
    rig.retune(Draft { controller: Controller::Fixed, ..starting(Rate::per_second(5).burst(6)) });
    assert_eq!((rig.rate(), rig.snapshot().rate_level), (5_000_000, Some(1)));
    rig.retune(starting(Rate::per_second(1).burst(2)));
    assert_eq!((rig.rate(), rig.snapshot().rate_level), (1_000_000, Some(1)));
    rig.retune(Draft { rate: None, controller: Controller::Fixed, ..cases() });
    assert_eq!((rig.snapshot().rate, rig.snapshot().rate_level), (None, None));
}

#[test]
fn a_clock_that_steps_back_neither_grows_nor_refills() {
    let mut rig = Rig::new(starting(Rate::per_second(2).burst(1)));
    rig.at(at(100)).goes(10, Outcome::success());
    let charge = rig.enter_when_ready();
    for second in [0, 50, 99] {
        rig.at(at(second)).record(Outcome::success());
        assert_eq!((rig.rate(), rig.snapshot().rate_level), (2_000_000, Some(0)));
    }
    rig.at(at(0)).settle(charge, Outcome::overload());
    assert_eq!(rig.rate(), 1_000_000, "a cut does not depend on the clock");
}

#[test]
fn waiting_for_slots_does_not_grow_the_rate() {
    let mut rig = Rig::new(Draft { slots: Some(Slots::fixed(1)), ..starting(Rate::per_second(4)) });
    rig.waiting = 9;
    for _ in 0..20 {
        // One slot allows one request per second.
        let charge = rig.enter(REQUEST);
        assert_eq!(rig.waits(REQUEST).0, Gate::Slots);
        rig.later(secs(1)).settle(charge, Outcome::success().took(millis(10)));
        assert_eq!(rig.rate(), 4_000_000);
    }
}

/// Nine entries in 1.05 s at ten per second are a little less than nine tenths.
#[test]
fn callers_delayed_by_rate_may_lack_part_of_a_unit() {
    for (asks_too_early, waiting, wanted) in
        [(false, 0, 10_000_000), (true, 0, 10_525_000), (false, 5, 10_000_000)]
    {
        let aimd = Aimd::default().within(1.0..=20.0).increase(0.5);
        let controller = Controller::Aimd(aimd);
        let mut rig = Rig::new(Draft { controller, ..starting(Rate::per_second(10).burst(1)) });
        rig.waiting = waiting;
        let fast = || Outcome::success().took(millis(10));
        rig.call(REQUEST, fast());
        for _ in 0..8 {
            rig.later(millis(100)).call(REQUEST, fast());
        }
        let last = rig.later(millis(100)).enter(REQUEST);
        if asks_too_early {
            assert_eq!(rig.later(millis(50)).waits(REQUEST).0, Gate::Rate);
        }
        rig.at(Instant::ZERO + millis(1_050)).settle(last, fast());
        assert_eq!(rig.rate(), wanted, "delayed: {asks_too_early}, waiting: {waiting}");
    }
}

#[test]
fn plan_with_adaptive_rate_has_no_fast_path() {
    let mut rig = Rig::new(cases());
    assert!(!rig.plan.is_plain());
    assert!(rig.gates.admit_plain(&rig.plan, rig.now).is_none());
}

/// The next action of a caller.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "a few steps of a test")]
enum Step {
    Wait(u64),
    Enter,
    End(usize, Outcome),
}

fn any_step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![
        5 => Just(Outcome::success()),
        1 => Just(Outcome::failure()),
        2 => Just(Outcome::overload()),
        1 => Just(Outcome::ignored()),
    ];
    prop_oneof![
        2 => (0_u64..1_500).prop_map(Step::Wait),
        5 => Just(Step::Enter),
        4 => (0_usize..8, outcome).prop_map(|(which, outcome)| Step::End(which, outcome)),
    ]
}

proptest! {
    /// However the rate changes, admissions never exceed the burst plus the refill at the rates over time.
    #[test]
    fn moving_the_rate_invents_no_refill(
        steps in prop::collection::vec(any_step(), 1..300), slow_start in any::<bool>(),
    ) {
        let aimd = Aimd::default().within(0.25..=50.0).increase(1.0).latency_target(millis(400));
        let aimd = if slow_start { aimd.slow_start() } else { aimd };
        let mut rig = Rig::new(Draft { controller: Controller::Aimd(aimd), ..starting(Rate::per_second(5).burst(4)) });
        let mut held = Vec::new();
        // Millionths of a unit, times nanoseconds per second.
        let unit = 1_000_000 * u128::from(nanos(secs(1)));
        let mut allowed = 4 * unit;
        for step in steps {
            match step {
                Step::Wait(span) => {
                    allowed += u128::from(rig.rate()) * u128::from(nanos(millis(span)));
                    rig.later(millis(span));
                }
                Step::Enter => held.extend(rig.admit(REQUEST)),
                Step::End(which, outcome) if which < held.len() => {
                    let before = rig.rate();
                    let charge = held.swap_remove(which);
                    rig.settle(charge, outcome);
                    prop_assert!((250_000..=50_000_000).contains(&rig.rate()));
                    prop_assert!(rig.rate() <= before * 2);
                }
                Step::End(..) => {}
            }
            prop_assert!(u128::from(rig.snapshot().admitted) * unit <= allowed);
        }
    }

    /// A wave causes one cut, whatever its outcomes and their order.
    #[test]
    fn a_wave_is_one_decrease(
        outcomes in prop::collection::vec(
            prop_oneof![Just(Outcome::overload()), Just(Outcome::success().took(secs(9))), Just(Outcome::failure())],
            1..39,
        ),
        gap in 0_u64..100,
    ) {
        let mut rig = Rig::new(starting(Rate::per_second(8).burst(40)));
        rig.call(REQUEST, Outcome::success());
        let wave = rig.enter_all(u32::try_from(outcomes.len()).unwrap());
        let is_cut = outcomes.iter().any(|outcome| *outcome != Outcome::failure());
        for (charge, outcome) in wave.into_iter().zip(outcomes) {
            rig.later(millis(gap)).settle(charge, outcome);
        }
        prop_assert_eq!(rig.cuts(), usize::from(is_cut));
        prop_assert_eq!(rig.rate(), if is_cut { 4_000_000 } else { 8_000_000 });
    }
}
