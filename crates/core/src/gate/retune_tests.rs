//! A new plan on running gates: levels stay, limits follow, and gates get back only their own units.

use super::super::tests::{REQUEST, Rig, at, bytes, millis, secs, tokens};
use super::*;
use crate::cost::Cost;
use crate::outcome::Outcome;
use crate::plan::{
    Aimd, Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, Named, Pace, Pause, Rate, Slots,
};
use crate::snapshot::{CircuitState, State};
use crate::verdict::Gate;

fn slots(slots: Slots) -> Draft {
    braked(Draft { slots: Some(slots), ..Draft::default() })
}

/// With a brake if it has a range for it to move.
fn braked(draft: Draft) -> Draft {
    let braked = Draft { controller: Controller::Brake(Brake::default()), ..draft.clone() };
    if braked.clone().check().is_ok() { braked } else { draft }
}

fn rate(rate: Rate) -> Draft {
    Draft { rate: Some(rate), ..Draft::default() }
}

fn pace(pace: Pace) -> Draft {
    braked(Draft { pace: Some(pace), ..Draft::default() })
}

/// All gates, none of which limits.
fn everything() -> Draft {
    Draft {
        slots: Some(Slots::adaptive(1..=50)),
        recovery_slots: Some(20),
        bytes: Some(Bytes::in_flight(10_000).recovering_price(3)),
        pace: Some(Pace::every(millis(1))),
        rate: Some(Rate::per_second(1_000)),
        rates: vec![Named::new("rpd", Rate::per_day(10_000))],
        budget: Some(Budget::tokens(10_000, secs(60))),
        budgets: vec![Named::new("tpd", Budget::tokens(100_000, secs(86_400)))],
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
fn retuned_rate_keeps_level_up_to_new_burst() {
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
        assert_eq!(
            (rig.snapshot().rate_level, rig.take_events()),
            (Some(level), vec![Event::Retuned]),
            "{new:?}"
        );
    }
}

/// Regression: the level of a paused rate was computed for the end of the pause, and resuming left it there.
#[test]
fn rate_retuned_while_paused_keeps_its_level() {
    for (taken, level) in [(0, 10), (6, 4)] {
        let mut rig = Rig::new(rate(Rate::per_second(10)));
        rig.enter_all(taken);
        rig.pause(secs(60));
        rig.at(at(20)).retune(rate(Rate::per_second(5).burst(10)));
        assert_eq!(rig.snapshot().rate_level, Some(level), "paused");
        rig.at(at(30)).resume();
        assert_eq!(rig.snapshot().rate_level, Some(level), "resumed");
        assert_eq!(rig.later(millis(200)).snapshot().rate_level, Some(10.min(level + 1)));
    }
}

/// Regression: the debt of a removed rate (one a day, used up) delayed a later rate of ten a second.
#[test]
fn readded_rate_starts_full() {
    let mut rig = Rig::new(rate(Rate::per_day(1)));
    let charge = rig.enter(REQUEST);
    rig.retune(Draft::default());
    rig.at(at(5)).retune(rate(Rate::per_second(10)));
    assert_eq!(rig.snapshot().rate_level, Some(10));
    rig.undo(charge);
    assert_eq!(rig.snapshot().rate_level, Some(10), "an undo does not overfill it");
}

#[test]
fn retuned_slots_follow_maximum_or_stay_in_bounds() {
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
        assert_eq!(rig.snapshot().slots, Some(wanted), "{old:?} cut {cuts} times, then {new:?}");
    }
}

#[test]
fn slot_changes_apply_to_requests_in_flight() {
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
    assert_eq!((rig.snapshot().slots, rig.obtain().len()), (None, 1_000));
}

#[test]
fn added_slots_count_from_their_start() {
    let mut rig = Rig::new(Draft::default());
    let uncounted = rig.enter(REQUEST);
    rig.retune(slots(Slots::adaptive(1..=8).start(3)));
    let held = rig.obtain();
    assert_eq!((held.len(), rig.snapshot().in_flight), (3, 3));
    rig.settle(uncounted, Outcome::success());
    assert_eq!((rig.snapshot().in_flight, rig.obtain().len()), (3, 0));
}

#[test]
fn retuned_interval_follows_minimum_within_bounds() {
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
        assert_eq!(rig.snapshot().interval, wanted, "cut {cuts} times, then {new:?}");
    }
}

#[test]
fn retuned_shorter_interval_applies_at_once() {
    let mut rig = Rig::new(pace(Pace::every(secs(30))));
    let _held = rig.enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(30))));
    rig.retune(pace(Pace::every(secs(2))));
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(2))));
    rig.retune(Draft::default());
    assert_eq!((rig.snapshot().interval, rig.obtain().len()), (secs(0), 1_000));
}

/// Regression: undoing a request that entered before the pace was added removed the gap of another entry.
#[test]
fn undo_of_entry_before_the_pace_keeps_its_gap() {
    let mut rig = Rig::new(Draft::default());
    let before = rig.at(at(5)).enter(REQUEST);
    rig.retune(pace(Pace::every(secs(1))));
    let _paced = rig.enter(REQUEST);
    rig.undo(before);
    assert_eq!(rig.waits(REQUEST), (Gate::Pace, Some(at(6))));
}

#[test]
fn added_gates_get_back_only_their_own_units() {
    let mut rig = Rig::new(Draft::default());
    let early: Vec<_> = (0..3).map(|_| rig.enter(tokens(50).bytes(70))).collect();
    rig.at(at(1)).retune(everything());
    rig.pause(secs(1));
    let late: Vec<_> = (0..3).map(|_| rig.later(secs(1)).enter(tokens(5).bytes(7))).collect();
    let before = rig.snapshot();
    let held = (before.in_flight, before.bytes_in_flight, before.tokens_used, before.recovering_in_flight);
    assert_eq!(held, (3, 63, 15, 3));
    for (charge, outcome) in
        early.into_iter().zip([Outcome::success(), Outcome::failure(), Outcome::ignored()])
    {
        rig.settle(charge, outcome);
    }
    let after = rig.snapshot();
    assert_eq!((after.in_flight, after.bytes_in_flight, after.tokens_used, after.recovering_in_flight), held);
    assert_eq!(after.rate_level, before.rate_level);
    for charge in late {
        rig.settle(charge, Outcome::ignored());
    }
    let seen = rig.snapshot();
    assert_eq!(
        (seen.in_flight, seen.bytes_in_flight, seen.tokens_used, seen.recovering_in_flight),
        (0, 0, 0, 0)
    );
}

#[test]
fn removed_gates_still_get_back_their_units() {
    let mut rig = Rig::new(everything());
    rig.pause(secs(1));
    let held: Vec<_> = (0..4).map(|_| rig.later(secs(1)).enter(tokens(5).bytes(7))).collect();
    rig.retune(Draft::default());
    let outcomes = [Outcome::success(), Outcome::failure(), Outcome::overload(), Outcome::ignored()];
    for (charge, outcome) in held.into_iter().zip(outcomes) {
        rig.settle(charge, outcome);
    }
    rig.retune(everything());
    let seen = rig.snapshot();
    assert_eq!((seen.in_flight, seen.bytes_in_flight, seen.recovering_in_flight), (0, 0, 0));
    assert_eq!(seen.tokens_used, 0, "a budget that comes back starts empty");
    assert!(
        seen.limits.iter().all(|limit| limit.available == limit.capacity.cast_signed()),
        "{:?}",
        seen.limits
    );
}

#[test]
fn added_budget_records_use_of_earlier_requests() {
    let mut rig = Rig::new(Draft::default());
    let charge = rig.enter(tokens(50));
    rig.retune(Draft { budget: Some(Budget::tokens(100, secs(10))), ..Draft::default() });
    rig.settle(charge, Outcome::success().spent(tokens(80)));
    assert_eq!(rig.snapshot().tokens_remaining, Some(20));
    rig.retune(Draft { budget: Some(Budget::tokens(50, secs(10))), ..Draft::default() });
    assert_eq!((rig.snapshot().tokens_used, rig.snapshot().tokens_remaining), (80, Some(0)));
}

#[test]
fn retuned_circuit_keeps_state_and_new_one_is_closed() {
    let circuit = |probes| Draft {
        circuit: Some(Circuit::after_failures(1).open_for(secs(10)).probes(probes)),
        ..Draft::default()
    };
    let state = |rig: &Rig| rig.snapshot().circuit.map(|circuit| circuit.state);
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
fn readded_circuit_is_closed_and_without_history() {
    let circuit = Draft { circuit: Some(Circuit::after_failures(2).open_for(secs(10))), ..Draft::default() };
    let mut rig = Rig::new(circuit.clone());
    rig.call(REQUEST, Outcome::failure());
    rig.call(REQUEST, Outcome::failure());
    let probe = rig.at(at(10)).enter(REQUEST);
    rig.retune(Draft::default());
    rig.retune(circuit);
    assert_eq!(rig.snapshot().circuit.map(|circuit| circuit.state), Some(CircuitState::Closed));
    rig.settle(probe, Outcome::failure());
    rig.call(REQUEST, Outcome::failure());
    let failures = rig.snapshot().circuit.map(|circuit| circuit.consecutive_failures);
    assert_eq!(failures, Some(1), "requests from before the circuit do not count");
}

#[test]
fn new_kind_of_controller_starts_without_history() {
    let mut rig = Rig::new(slots(Slots::adaptive(1..=8)));
    rig.record(Outcome::overload());
    assert_eq!((rig.snapshot().state, rig.snapshot().slots_ceiling), (State::Cooling, Some(8)));
    rig.retune(slots(Slots::adaptive(1..=8)).controlled_by(Controller::Fixed));
    assert_eq!((rig.snapshot().state, rig.snapshot().slots), (State::Running, Some(8)));
    rig.record(Outcome::overload());
    rig.retune(slots(Slots::adaptive(1..=8)));
    rig.record(Outcome::failure());
    assert_eq!((rig.snapshot().failures, rig.snapshot().state), (1, State::Running));
}

/// Regression: after cuts a fixed controller kept 1 of 16 slots, and the slowed pace, for good.
#[test]
fn fixed_controller_restores_cut_slots() {
    let pace = Some(Pace::every(millis(200)).slowest(secs(30)));
    let cut = Draft { pace, ..slots(Slots::adaptive(1..=16)) };
    let mut rig = Rig::new(cut.clone());
    for _ in 0..4 {
        rig.record(Outcome::overload());
    }
    assert_eq!((rig.snapshot().slots, rig.snapshot().interval), (Some(1), millis(3_200)));
    rig.retune(cut.controlled_by(Controller::Fixed));
    assert_eq!((rig.snapshot().slots, rig.snapshot().interval), (Some(16), millis(200)));
}

#[test]
fn new_plan_keeps_the_cut() {
    let mut rig = Rig::new(slots(Slots::adaptive(1..=8)));
    rig.record(Outcome::overload());
    rig.record(Outcome::failure());
    rig.retune(slots(Slots::adaptive(1..=100)));
    let seen = rig.snapshot();
    assert_eq!((seen.state, seen.slots, seen.failures), (State::Cooling, Some(4), 1));
}

#[test]
fn bytes_keep_price_of_entry_under_any_plan() {
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
    assert_eq!((dear.bytes_held(), cheap.bytes_held(), rig.snapshot().bytes_in_flight), (200, 20, 220));
    rig.settle(dear, Outcome::success());
    assert_eq!(rig.snapshot().bytes_in_flight, 20);
    rig.retune(Draft::default());
    assert_eq!(rig.enter(Cost::request().bytes(9)).bytes_held(), 0);
    rig.settle(cheap, Outcome::success());
    assert_eq!(rig.snapshot().bytes_in_flight, 0);
}

/// Regression: a new controller while the circuit was open delayed callers for minutes although nothing had
/// been sent.
#[test]
fn controller_change_with_open_circuit_leaves_no_debt() {
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
        let level = rig.snapshot().rate_level;
        for draft in path {
            rig.later(secs(5)).retune(draft);
        }
        rig.retune(open.clone());
        assert!(rig.snapshot().rate_level >= level.min(Some(1)), "{:?}", rig.snapshot().rate_level);
        assert!(rig.snapshot().rate_level <= Some(4));
        let _next = rig.enter(REQUEST);
    }
}

/// Regression: ending an endless pause by hand refilled a used-up rate.
#[test]
fn endless_pause_ended_by_hand_refills_nothing() {
    for controller in [Controller::Fixed, Controller::Aimd(Aimd::default().within(0.25..=1.0))] {
        let mut rig = Rig::new(Draft { controller, ..rate(Rate::per_second(1).burst(4)) });
        let _charges = rig.at(at(100)).enter_all(4);
        rig.pause(std::time::Duration::MAX);
        rig.resume();
        assert_eq!(rig.snapshot().rate_level, Some(0), "{controller:?}");
        rig.pause(std::time::Duration::MAX);
        rig.later(secs(50)).resume();
        assert_eq!(rig.snapshot().rate_level, Some(0), "{controller:?}");
        assert_eq!(rig.later(secs(2)).snapshot().rate_level, Some(2), "{controller:?}");
    }
}

/// Regression: after a pause, waiters left in a burst although the learned rate was one per second.
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

/// Regression: a request that was sent late moved its tokens to a later window, where they stayed used.
#[test]
fn late_start_leaves_tokens_in_their_window() {
    let budget = Some(Budget::tokens(1_000, secs(60)));
    let mut rig = Rig::new(Draft { budget, ..Draft::default() });
    let charge = rig.enter(tokens(800)).goes_out(at(30));
    rig.at(at(40)).settle(charge, Outcome::success().spent(tokens(100)));
    assert_eq!(rig.snapshot().tokens_used, 100);
    assert_eq!(rig.at(at(61)).snapshot().tokens_used, 0, "they were reserved at 0 s");
}
