//! A new plan under a living state: levels stay, limits follow, and nothing returns that was not taken.

use super::super::tests::{REQUEST, Rig, at, bytes, millis, secs, tokens};
use super::*;
use crate::cost::Cost;
use crate::outcome::Outcome;
use crate::plan::{Aimd, Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, Pace, Pause, Rate, Slots};
use crate::snapshot::{CircuitState, State};
use crate::verdict::Gate;

fn slots(slots: Slots) -> Draft {
    Draft { slots: Some(slots), controller: Controller::Brake(Brake::default()), ..Draft::default() }
}

fn rate(rate: Rate) -> Draft {
    Draft { rate: Some(rate), ..Draft::default() }
}

fn pace(pace: Pace) -> Draft {
    Draft { pace: Some(pace), controller: Controller::Brake(Brake::default()), ..Draft::default() }
}

/// Every gate, and nobody held back by any.
fn everything() -> Draft {
    Draft {
        slots: Some(Slots::adaptive(1..=50)),
        recovery_slots: Some(20),
        bytes: Some(Bytes::in_flight(10_000).recovering_price(3)),
        pace: Some(Pace::every(millis(1))),
        rate: Some(Rate::per_second(1_000)),
        budget: Some(Budget::tokens(10_000, secs(60))),
        circuit: Some(Circuit::default()),
        pause: Pause::default().tail(secs(60)),
        controller: Controller::Brake(Brake::default()),
        total: Some(100),
        milestone_percent: 10,
        retry: crate::retry::Retry::default(),
        waiters_max: 9,
    }
}

#[test]
fn the_level_of_the_rate_is_kept_and_capped_to_the_new_burst() {
    let table = [
        (Rate::per_minute(100), 4),
        (Rate::per_second(1).burst(40), 4),
        (Rate::per_second(10).burst(3), 3),
        (Rate::per_second(10), 4),
    ];
    for (new, level) in table {
        let mut rig = Rig::new(rate(Rate::per_second(10)));
        rig.enter_all(6);
        rig.retune(rate(new));
        assert_eq!((rig.seen().rate_level, rig.told()), (Some(level), vec![Event::Retuned]), "{new:?}");
    }
}

/// The level of a paused rate is that of the pause's end; resuming left it there.
#[test]
fn a_rate_retuned_while_paused_keeps_its_level_until_resumed() {
    for (taken, level) in [(0, 10), (6, 4)] {
        let mut rig = Rig::new(rate(Rate::per_second(10)));
        rig.enter_all(taken);
        rig.pause(secs(60));
        rig.at(at(20)).retune(rate(Rate::per_second(5).burst(10)));
        assert_eq!(rig.seen().rate_level, Some(level), "paused");
        rig.at(at(30)).resume();
        assert_eq!(rig.seen().rate_level, Some(level), "resumed");
        assert_eq!(rig.later(millis(200)).seen().rate_level, Some(10.min(level + 1)));
    }
}

/// What a removed rate was owed is owed to nobody: one a day, used up and removed, held back ten a second.
#[test]
fn a_rate_that_comes_back_starts_full() {
    let mut rig = Rig::new(rate(Rate::per_day(1)));
    let charge = rig.enter(REQUEST);
    rig.retune(Draft::default());
    rig.at(at(5)).retune(rate(Rate::per_second(10)));
    assert_eq!(rig.seen().rate_level, Some(10));
    rig.undo(charge);
    assert_eq!(rig.seen().rate_level, Some(10), "and a return fills it no further");
}

#[test]
fn slots_at_their_maximum_follow_it_and_tuned_ones_stay_within_the_bounds() {
    let full = Slots::adaptive(1..=8);
    let table = [
        (full, 0, Slots::adaptive(1..=16), 16),
        (full, 0, Slots::fixed(3), 3),
        (full, 1, Slots::adaptive(1..=16), 4),
        (full, 1, Slots::adaptive(6..=16), 6),
        (full, 1, Slots::adaptive(1..=3), 3),
        (full, 1, full, 4),
        (full.start(5), 0, Slots::adaptive(1..=16).start(2), 5),
    ];
    for (old, cuts, new, wanted) in table {
        let mut rig = Rig::new(slots(old));
        for _ in 0..cuts {
            rig.record(Outcome::overload());
        }
        rig.retune(slots(new));
        assert_eq!(rig.seen().slots, Some(wanted), "{old:?} cut {cuts} times, then {new:?}");
    }
}

#[test]
fn fewer_slots_let_nobody_in_until_enough_have_left_and_more_do_at_once() {
    let mut rig = Rig::new(slots(Slots::fixed(8)));
    let mut held = rig.enter_all(8);
    rig.retune(slots(Slots::fixed(2)));
    while held.len() >= 2 {
        assert_eq!(rig.waits(REQUEST), (Gate::Slots, None), "{} in flight", held.len());
        rig.settle(held.remove(0), Outcome::success());
    }
    assert_eq!(rig.obtain().len(), 1);
    rig.retune(slots(Slots::fixed(5)));
    assert_eq!(rig.obtain().len(), 3);
    rig.retune(Draft::default());
    assert_eq!((rig.seen().slots, rig.obtain().len()), (None, 1_000));
}

#[test]
fn slots_added_live_start_at_their_start_and_count_from_there() {
    let mut rig = Rig::new(Draft::default());
    let uncounted = rig.enter(REQUEST);
    rig.retune(slots(Slots::adaptive(1..=8).start(3)));
    let held = rig.obtain();
    assert_eq!((held.len(), rig.seen().in_flight), (3, 3));
    rig.settle(uncounted, Outcome::success());
    assert_eq!((rig.seen().in_flight, rig.obtain().len()), (3, 0));
}

#[test]
fn an_interval_at_its_minimum_follows_it_and_a_slowed_one_stays_within_the_bounds() {
    let base = Pace::every(secs(1)).slowest(secs(30));
    let table = [
        (0, Pace::every(millis(100)).slowest(secs(30)), millis(100)),
        (0, Pace::every(secs(5)), secs(5)),
        (2, Pace::every(millis(100)).slowest(secs(30)), secs(4)),
        (2, Pace::every(millis(100)).slowest(secs(2)), secs(2)),
        (2, Pace::every(secs(5)), secs(5)),
    ];
    for (cuts, new, wanted) in table {
        let mut rig = Rig::new(pace(base));
        for _ in 0..cuts {
            rig.record(Outcome::overload());
        }
        rig.retune(pace(new));
        assert_eq!(rig.seen().interval, wanted, "cut {cuts} times, then {new:?}");
    }
}

#[test]
fn a_shorter_interval_acts_at_once_and_none_lets_everyone_in() {
    let mut rig = Rig::new(pace(Pace::every(secs(30))));
    let _held = rig.enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(30))));
    rig.retune(pace(Pace::every(secs(2))));
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(2))));
    rig.retune(Draft::default());
    assert_eq!((rig.seen().interval, rig.obtain().len()), (secs(0), 1_000));
}

/// Entered before there was a pace, undone after: it gave away the gap of another that entered at its time.
#[test]
fn an_entry_from_before_the_pace_gives_no_place_in_it_back() {
    let mut rig = Rig::new(Draft::default());
    let before = rig.at(at(5)).enter(REQUEST);
    rig.retune(pace(Pace::every(secs(1))));
    let _paced = rig.enter(REQUEST);
    rig.undo(before);
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(6))));
}

#[test]
fn nothing_returns_that_was_not_taken_when_gates_are_added_in_between() {
    let mut rig = Rig::new(Draft::default());
    let early: Vec<_> = (0..3).map(|_| rig.enter(tokens(50).bytes(70))).collect();
    rig.at(at(1)).retune(everything());
    rig.pause(secs(1));
    let late: Vec<_> = (0..3).map(|_| rig.later(secs(1)).enter(tokens(5).bytes(7))).collect();
    let before = rig.seen();
    let held = (before.in_flight, before.bytes_in_flight, before.tokens_used, before.recovering_in_flight);
    assert_eq!(held, (3, 63, 15, 3));
    for (charge, outcome) in
        early.into_iter().zip([Outcome::success(), Outcome::failure(), Outcome::ignored()])
    {
        rig.settle(charge, outcome);
    }
    let after = rig.seen();
    assert_eq!((after.in_flight, after.bytes_in_flight, after.tokens_used, after.recovering_in_flight), held);
    assert_eq!(after.rate_level, before.rate_level);
    for charge in late {
        rig.settle(charge, Outcome::ignored());
    }
    let seen = rig.seen();
    assert_eq!(
        (seen.in_flight, seen.bytes_in_flight, seen.tokens_used, seen.recovering_in_flight),
        (0, 0, 0, 0)
    );
}

#[test]
fn what_was_taken_returns_when_its_gate_is_removed_in_between() {
    let mut rig = Rig::new(everything());
    rig.pause(secs(1));
    let held: Vec<_> = (0..4).map(|_| rig.later(secs(1)).enter(tokens(5).bytes(7))).collect();
    rig.retune(Draft::default());
    let outcomes = [Outcome::success(), Outcome::failure(), Outcome::overload(), Outcome::ignored()];
    for (charge, outcome) in held.into_iter().zip(outcomes) {
        rig.settle(charge, outcome);
    }
    rig.retune(everything());
    let seen = rig.seen();
    assert_eq!((seen.in_flight, seen.bytes_in_flight, seen.recovering_in_flight), (0, 0, 0));
    assert_eq!(seen.tokens_used, 0, "a budget that comes back starts empty");
}

#[test]
fn what_was_used_is_booked_in_a_budget_added_in_between() {
    let mut rig = Rig::new(Draft::default());
    let charge = rig.enter(tokens(50));
    rig.retune(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    rig.settle(charge, Outcome::success().spent(tokens(80)));
    assert_eq!(rig.seen().tokens_remaining, Some(20));
    rig.retune(Draft { budget: Some(Budget::tokens(50, secs(10))), ..Draft::default() });
    assert_eq!((rig.seen().tokens_used, rig.seen().tokens_remaining), (80, Some(0)));
}

#[test]
fn a_circuit_stays_as_it_is_and_one_added_live_is_closed() {
    let circuit = |probes| Draft {
        circuit: Some(Circuit::after_failures(1).open_for(secs(10)).probes(probes)),
        ..Draft::default()
    };
    let state = |rig: &Rig| rig.seen().circuit.map(|circuit| circuit.state);
    let mut rig = Rig::new(Draft::default());
    rig.record(Outcome::failure());
    assert_eq!(state(&rig), None);
    rig.retune(circuit(1));
    assert_eq!(state(&rig), Some(CircuitState::Closed));
    rig.record(Outcome::failure());
    rig.retune(circuit(2));
    assert_eq!(state(&rig), Some(CircuitState::Open));
    assert_eq!(rig.at(at(10)).obtain().len(), 2);
    rig.retune(Draft::default());
    assert_eq!((state(&rig), rig.obtain().len()), (None, 1_000));
}

#[test]
fn a_circuit_that_comes_back_is_closed_and_knows_nothing() {
    let circuit = Draft { circuit: Some(Circuit::after_failures(2).open_for(secs(10))), ..Draft::default() };
    let mut rig = Rig::new(circuit.clone());
    rig.call(REQUEST, Outcome::failure());
    rig.call(REQUEST, Outcome::failure());
    let probe = rig.at(at(10)).enter(REQUEST);
    rig.retune(Draft::default());
    rig.retune(circuit);
    assert_eq!(rig.seen().circuit.map(|circuit| circuit.state), Some(CircuitState::Closed));
    rig.settle(probe, Outcome::failure());
    rig.call(REQUEST, Outcome::failure());
    let failures = rig.seen().circuit.map(|circuit| circuit.consecutive_failures);
    assert_eq!(failures, Some(1), "what entered before it came says nothing to it");
}

#[test]
fn another_kind_of_controller_starts_knowing_nothing() {
    let fixed = Draft { slots: Some(Slots::adaptive(1..=8)), ..Draft::default() };
    let mut rig = Rig::new(slots(Slots::adaptive(1..=8)));
    rig.record(Outcome::overload());
    assert_eq!((rig.seen().state, rig.seen().slots_ceiling), (State::Cooling, Some(8)));
    rig.retune(fixed.clone());
    assert_eq!((rig.seen().state, rig.seen().slots), (State::Running, Some(4)), "by hand, and as it stands");
    rig.record(Outcome::overload());
    rig.retune(fixed);
    assert_eq!(rig.seen().slots, Some(4));
    rig.retune(slots(Slots::adaptive(1..=8)));
    rig.record(Outcome::failure());
    assert_eq!((rig.seen().failures, rig.seen().state), (1, State::Running));
}

#[test]
fn a_cut_is_remembered_under_a_new_plan() {
    let mut rig = Rig::new(slots(Slots::adaptive(1..=8)));
    rig.record(Outcome::overload());
    rig.record(Outcome::failure());
    rig.retune(slots(Slots::adaptive(1..=100)));
    let seen = rig.seen();
    assert_eq!((seen.state, seen.slots, seen.failures), (State::Cooling, Some(4), 1));
}

#[test]
fn bytes_are_counted_at_the_price_of_entry_under_any_plan() {
    let priced = |price| Draft {
        bytes: Some(Bytes::in_flight(1_000).recovering_price(price)),
        pause: Pause::default().tail(secs(60)),
        ..Draft::default()
    };
    let mut rig = Rig::new(priced(20));
    rig.pause(secs(1));
    let dear = rig.at(at(1)).enter(bytes(10));
    rig.retune(priced(2));
    let cheap = rig.enter(bytes(10));
    assert_eq!((dear.bytes_held(), cheap.bytes_held(), rig.seen().bytes_in_flight), (200, 20, 220));
    rig.settle(dear, Outcome::success());
    assert_eq!(rig.seen().bytes_in_flight, 20);
    rig.retune(Draft::default());
    assert_eq!(rig.enter(Cost::request().bytes(9)).bytes_held(), 0);
    rig.settle(cheap, Outcome::success());
    assert_eq!(rig.seen().bytes_in_flight, 0);
}

/// A new controller while the circuit was open left callers waiting for minutes though nothing had been sent.
#[test]
fn controller_change_behind_an_open_circuit_leaves_no_debt() {
    let circuit = Some(Circuit::after_failures(1).open_for(secs(300)));
    let aimd = || Draft {
        rate: Some(Rate::per_second(1).burst(4)),
        controller: Controller::Aimd(Aimd::default()),
        circuit,
        ..Draft::default()
    };
    let agreed = || Draft { controller: Controller::Fixed, ..aimd() };
    let auto = || Draft { controller: Controller::Auto(Auto::default()), ..aimd() };
    let open = Draft { circuit: None, ..agreed() };
    for path in [vec![agreed()], vec![auto(), agreed()], vec![agreed(), aimd(), agreed()]] {
        let mut rig = Rig::new(aimd());
        rig.call(REQUEST, Outcome::failure());
        let level = rig.seen().rate_level;
        for draft in path {
            rig.later(secs(5)).retune(draft);
        }
        rig.retune(open.clone());
        assert!(rig.seen().rate_level >= level.min(Some(1)), "{:?}", rig.seen().rate_level);
        assert!(rig.seen().rate_level <= Some(4));
        let _next = rig.enter(REQUEST);
    }
}

/// A pause without end that is ended by hand refilled a spent rate.
#[test]
fn endless_pause_ended_by_hand_refills_nothing() {
    for controller in [Controller::Fixed, Controller::Aimd(Aimd::default().within(0.25..=1.0))] {
        let mut rig = Rig::new(Draft { controller, ..rate(Rate::per_second(1).burst(4)) });
        let _charges = rig.at(at(100)).enter_all(4);
        rig.pause(std::time::Duration::MAX);
        rig.resume();
        assert_eq!(rig.seen().rate_level, Some(0), "{controller:?}");
        rig.pause(std::time::Duration::MAX);
        rig.later(secs(50)).resume();
        assert_eq!(rig.seen().rate_level, Some(0), "{controller:?}");
        assert_eq!(rig.later(secs(2)).seen().rate_level, Some(2), "{controller:?}");
    }
}

/// After a pause waiters left in a burst where the rate was learned to be one per second.
#[test]
fn learned_rate_has_one_entry_after_a_pause() {
    let controller = Controller::Aimd(Aimd::default().within(0.25..=1.0));
    let mut rig = Rig::new(Draft { controller, ..rate(Rate::per_second(1).burst(4)) });
    rig.at(at(100)).pause(secs(10));
    let _first = rig.at(at(110)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(111))));
    // A fixed rate keeps its burst.
    let mut rig = Rig::new(rate(Rate::per_second(1).burst(4)));
    rig.at(at(100)).pause(secs(10));
    assert_eq!(rig.at(at(110)).enter_all(4).len(), 4);
}

/// A request that went out late moved its tokens to another window, where they stayed used.
#[test]
fn late_start_leaves_tokens_in_their_window() {
    let budget = Some(Budget::tokens(1_000, secs(60)));
    let mut rig = Rig::new(Draft { budget, ..Draft::default() });
    let charge = rig.enter(tokens(800)).goes_out(at(30));
    rig.at(at(40)).settle(charge, Outcome::success().spent(tokens(100)));
    assert_eq!(rig.seen().tokens_used, 100);
    assert_eq!(rig.at(at(61)).seen().tokens_used, 0, "they were reserved at 0");
}
