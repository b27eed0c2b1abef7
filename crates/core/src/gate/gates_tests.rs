//! Evaluation of all gates together: admission, waiting, refusal, and clocks that step back.

use std::collections::VecDeque;
use std::time::Duration;

use super::super::tests::{REQUEST, Rig, at, bytes, millis, secs, tokens};
use super::*;
use crate::outcome::Outcome;
use crate::plan::{Brake, Budget, Bytes, Circuit, Controller, Draft, Oversize, Pace, Rate, Slots};
use crate::snapshot::State;

fn slots(slots: u32) -> Draft {
    Draft { slots: Some(Slots::fixed(slots)), ..Draft::default() }
}

/// Eight slots that are cut by each overload.
fn braked() -> Draft {
    let controller = Controller::Brake(Brake::default());
    Draft { slots: Some(Slots::adaptive(1..=8)), controller, ..Draft::default() }
}

#[test]
fn empty_plan_admits_everything() {
    let mut rig = Rig::new(Draft::default());
    assert_eq!(rig.obtain().len(), 1_000);
    assert!(!rig.gates.needs_time(&rig.plan));
    assert_eq!(rig.gates.in_flight(), 0, "in-flight requests are not counted without a pool");
}

#[test]
fn asking_changes_nothing() {
    let mut rig = Rig::new(Draft { rate: Some(Rate::per_second(1)), ..Draft::gentle() });
    let before = rig.snapshot();
    for _ in 0..9 {
        assert_eq!(rig.gates.ask(&rig.plan, tokens(5), at(0)), Verdict::Admit);
    }
    assert_eq!(rig.snapshot(), before);
    let _held = rig.enter(REQUEST);
    let after = rig.snapshot();
    assert_eq!((after.admitted, after.evaluations, after.in_flight), (1, 1, 1));
}

#[test]
fn nothing_is_taken_when_one_gate_waits() {
    let mut rig = Rig::new(Draft {
        bytes: Some(Bytes::in_flight(10)),
        rate: Some(Rate::per_second(5)),
        budget: Some(Budget::tokens(100, secs(10))),
        ..slots(1)
    });
    let held = rig.enter(tokens(1).bytes(1));
    let before = rig.snapshot();
    assert_eq!(rig.waits(tokens(50).bytes(1)), (Gate::Slots, None));
    rig.settle(held, Outcome::success());
    assert_eq!(rig.waits(tokens(100)).0, Gate::Budget);
    let after = rig.snapshot();
    assert_eq!((after.rate_level, after.tokens_used), (before.rate_level, before.tokens_used));
    assert_eq!((after.admitted, after.evaluations), (1, 3));
}

#[test]
fn two_cuts_under_load_leave_two_slots() {
    let mut rig = Rig::new(braked());
    let mut held = rig.enter_all(8);
    rig.settle(held.pop().unwrap(), Outcome::overload());
    assert_eq!(rig.waits(REQUEST), (Gate::Slots, None));
    // The first wave cannot cause the second cut; an outcome without a permit is current.
    rig.record(Outcome::overload());
    assert_eq!(rig.snapshot().slots, Some(2));
    for charge in held {
        rig.settle(charge, Outcome::ignored());
    }
    assert_eq!(rig.obtain().len(), 2);
}

#[test]
fn regrown_slots_never_exceed_the_limit() {
    let mut rig = Rig::new(braked());
    let held = rig.obtain();
    rig.record(Outcome::overload());
    rig.record(Outcome::overload());
    for charge in held {
        rig.settle(charge, Outcome::ignored());
    }
    for limit in [3, 4] {
        let held = rig.obtain();
        rig.later(secs(60)).record(Outcome::success());
        assert_eq!(rig.snapshot().slots, Some(limit));
        let more = rig.obtain();
        assert_eq!((held.len(), more.len()), (limit as usize - 1, 1));
        for charge in held.into_iter().chain(more) {
            rig.settle(charge, Outcome::ignored());
        }
    }
}

#[test]
fn concurrent_callers_leave_one_by_one() {
    let mut rig = Rig::new(Draft { pace: Some(Pace::every(millis(500))), ..Draft::default() });
    let dispatched = [(); 10].map(|()| rig.enter_when_ready().entered().as_nanos() / 1_000_000);
    assert_eq!(dispatched, [0, 500, 1_000, 1_500, 2_000, 2_500, 3_000, 3_500, 4_000, 4_500]);
}

#[test]
fn bytes_overdraw_by_one_request_at_most() {
    let mut rig = Rig::new(Draft { bytes: Some(Bytes::in_flight(1_000)), ..Draft::default() });
    let first = rig.enter(bytes(500));
    let _second = rig.enter(bytes(600));
    assert_eq!(rig.snapshot().bytes_in_flight, 1_100);
    assert_eq!(rig.waits(bytes(100)), (Gate::Bytes, None));
    rig.settle(first, Outcome::success());
    let _third = rig.enter(bytes(100));
}

#[test]
fn any_size_is_admitted_at_a_balance_of_zero() {
    let mut rig = Rig::new(Draft { bytes: Some(Bytes::in_flight(1_000)), ..Draft::default() });
    let _all = rig.enter(bytes(1_000));
    let _more = rig.enter(bytes(1_000_000_000));
    assert_eq!(rig.waits(REQUEST), (Gate::Bytes, None));
}

#[test]
fn each_return_admits_as_the_balance_allows() {
    let mut rig = Rig::new(Draft { bytes: Some(Bytes::in_flight(1_000)), ..Draft::default() });
    let large = rig.enter(bytes(1_001));
    assert_eq!(rig.waits(bytes(600)), (Gate::Bytes, None));
    rig.settle(large, Outcome::success());
    let balance = |rig: &Rig| 1_000 - i64::try_from(rig.snapshot().bytes_in_flight).unwrap();
    let mut held = VecDeque::new();
    for wanted in [400, -200] {
        held.push_back(rig.enter(bytes(600)));
        assert_eq!(balance(&rig), wanted);
    }
    for _ in 2..5 {
        assert_eq!(rig.waits(bytes(600)), (Gate::Bytes, None));
        rig.settle(held.pop_front().unwrap(), Outcome::success());
        held.push_back(rig.enter(bytes(600)));
        assert_eq!(balance(&rig), -200);
    }
}

#[test]
fn refusals_come_before_waits() {
    let budget = Budget::tokens(100, secs(10));
    let circuit = Some(Circuit::after_failures(1).open_for(secs(5)));
    let mut rig = Rig::new(Draft { circuit, budget: Some(budget), ..slots(1) });
    let _held = rig.enter(REQUEST);
    let too_large = Refused::TooLarge { tokens: 101, capacity: 100 };
    assert_eq!(rig.waits(tokens(100)), (Gate::Slots, None));
    assert_eq!(rig.admit(tokens(101)), Err(Verdict::Refuse(too_large)));
    rig.record(Outcome::failure());
    assert_eq!(rig.admit(tokens(101)), Err(Verdict::Refuse(too_large)), "waiting would not help");
    let open = Refused::CircuitOpen { retry_after: secs(5) };
    assert_eq!(rig.admit(REQUEST), Err(Verdict::Refuse(open)));
    rig.close();
    assert_eq!(rig.admit(tokens(101)), Err(Verdict::Refuse(Refused::Closed)));
}

#[test]
fn a_request_larger_than_the_budget_may_go_alone() {
    let budget = Budget::tokens(100, secs(10)).oversize(Oversize::Alone);
    let mut rig = Rig::new(Draft { budget: Some(budget), ..Draft::default() });
    rig.call(tokens(1), Outcome::success());
    assert_eq!(rig.waits(tokens(500)), (Gate::Budget, Some(at(10).plus_nanos(1))));
    let _alone = rig.at(at(11)).enter(tokens(500));
    assert_eq!((rig.snapshot().tokens_used, rig.snapshot().tokens_remaining), (500, Some(0)));
    assert_eq!(rig.waits(REQUEST).0, Gate::Budget);
}

#[test]
fn full_budget_window_merges_and_emits_event() {
    let mut rig = Rig::new(Draft { budget: Some(Budget::tokens(10_000, secs(60))), ..Draft::default() });
    for micros in 0..=4_096 {
        rig.at(Instant::from_nanos(micros * 1_000)).call(tokens(1), Outcome::success());
    }
    assert_eq!((rig.take_events(), rig.snapshot().tokens_used), (vec![Event::BudgetCoarsened], 4_097));
}

#[test]
fn of_the_timed_gates_the_latest_decides() {
    let mut rig = Rig::new(Draft {
        pace: Some(Pace::every(secs(1))),
        rate: Some(Rate::new(1, secs(3))),
        budget: Some(Budget::tokens(10, secs(5))),
        ..slots(1)
    });
    let held = rig.enter(tokens(10));
    let wait =
        |by, until: Option<u64>, floor: Instant| Err(Verdict::Wait(Wait { by, until: until.map(at), floor }));
    let freed = at(5).plus_nanos(1);
    assert_eq!(
        rig.admit(tokens(1)),
        wait(Gate::Slots, None, at(3)),
        "the floor is the rate's, because tokens may return"
    );
    rig.settle(held, Outcome::success());
    assert_eq!(rig.waits(tokens(1)), (Gate::Budget, Some(freed)));
    rig.pause(secs(9));
    assert_eq!(rig.waits(tokens(1)), (Gate::Rate, Some(at(12))), "the rate does not refill during the pause");
    rig.resume();
    rig.at(freed).call(tokens(1), Outcome::success());
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(freed + secs(3))));
}

#[test]
fn requests_ahead_raise_bound_of_timed_gates() {
    let pace = |draft| Draft { pace: Some(Pace::every(secs(1))), ..draft };
    let rate = |draft| Draft { rate: Some(Rate::per_second(2)), ..draft };
    let table = [
        (pace(Draft::default()), 3, Some((Gate::Pace, at(4)))),
        (rate(Draft::default()), 4, Some((Gate::Rate, at(2)))),
        (slots(1), 9, None),
    ];
    for (draft, ahead, wanted) in table {
        let mut rig = Rig::new(draft);
        let _held = rig.enter(REQUEST);
        assert_eq!(rig.gates.bound_at(&rig.plan, REQUEST, ahead, at(0)), wanted);
    }
}

/// A bound that is too late would refuse a caller that could still be admitted in time.
#[test]
fn reserved_tokens_do_not_raise_the_bound() {
    let budget = Budget::tokens(100, secs(10)).oversize(Oversize::Alone);
    let mut rig = Rig::new(Draft { budget: Some(budget), ..Draft::default() });
    let held = rig.enter(tokens(100));
    assert_eq!(rig.waits(tokens(50)), (Gate::Budget, Some(at(10).plus_nanos(1))));
    assert_eq!(
        rig.gates.bound_at(&rig.plan, tokens(50), 7, at(0)),
        None,
        "everything is reserved, nothing is used"
    );
    rig.settle(held, Outcome::success().spent(tokens(60)));
    let bound = rig.gates.bound_at(&rig.plan, tokens(50), 0, at(0));
    assert_eq!(bound, Some((Gate::Budget, at(10).plus_nanos(1))), "used tokens stay until they expire");
}

/// Invariant 7: when the clock steps back, time stands still.
#[test]
fn no_step_back_refills_or_panics() {
    let mut rig = Rig::new(Draft {
        pace: Some(Pace::every(secs(1))),
        rate: Some(Rate::new(2, secs(10))),
        budget: Some(Budget::tokens(10, secs(100))),
        circuit: Some(Circuit::after_failures(1).open_for(secs(5))),
        total: Some(9),
        ..Draft::gentle()
    });
    let (first, second) = (rig.at(at(100)).enter(tokens(4)), rig.later(secs(1)).enter(tokens(4)));
    rig.at(at(1)).settle(first, Outcome::success());
    let seen = rig.snapshot();
    assert_eq!(
        (seen.at, seen.rate_level, seen.tokens_used, seen.eta),
        (at(101), Some(0), 8, Some(secs(261))),
        "7 more need 26 tokens more than remain"
    );
    assert_eq!(rig.waits(REQUEST), (Gate::Rate, Some(at(105))), "the pace waits until 102 only");
    assert!(rig.pause(secs(2)));
    assert_eq!(rig.gates.latest(), at(101));
    assert_eq!(rig.at(Instant::ZERO).waits(REQUEST).1, Some(at(107)), "a pause runs from the latest time");
    assert!(rig.resume());
    rig.settle(second, Outcome::failure());
    assert_eq!(rig.snapshot().circuit.unwrap().retry_after, secs(5));
    assert_eq!((rig.snapshot().in_flight, rig.snapshot().state), (0, State::CircuitOpen));
}

#[test]
fn at_the_end_of_time_nothing_overflows() {
    let mut rig = Rig::new(Draft {
        rate: Some(Rate::per_second(1)),
        budget: Some(Budget::tokens(10, secs(100))),
        pace: Some(Pace::every(secs(1)).jitter(1.0)),
        ..Draft::gentle()
    });
    let charge = rig.at(Instant::MAX).enter(tokens(10));
    rig.pause(Duration::MAX);
    rig.settle(charge, Outcome::failure().retry_after(Duration::MAX));
    assert_eq!(rig.snapshot().in_flight, 0);
}

#[test]
fn closing_an_idle_throttle_drains_it_at_once() {
    let mut rig = Rig::new(slots(2));
    rig.call(REQUEST, Outcome::success());
    assert!(rig.close());
    assert_eq!(rig.take_events(), [Event::Closed { in_flight: 0 }, Event::Drained]);
    assert_eq!(rig.admit(REQUEST), Err(Verdict::Refuse(Refused::Closed)));
}

#[test]
fn the_last_request_of_a_closed_throttle_drains_it() {
    let mut rig = Rig::new(Draft { slots: Some(Slots::fixed(2)), ..Draft::default() });
    let (first, second) = (rig.enter(REQUEST), rig.enter(REQUEST));
    assert!(rig.close() && !rig.close(), "it closes once");
    rig.settle(first, Outcome::failure());
    assert!(!rig.gates.is_drained());
    rig.undo(second);
    assert!(rig.gates.is_drained());
    assert_eq!(rig.take_events(), [Event::Closed { in_flight: 2 }, Event::Drained]);
}

#[test]
fn unsent_request_is_confirmed_against_new_state() {
    let circuit = Circuit::after_failures(1).open_for(secs(10)).probes(1);
    let mut rig = Rig::new(Draft { circuit: Some(circuit), ..slots(4) });
    let confirm = |rig: &Rig, charge: &Charge| rig.gates.confirm(&rig.plan, charge, rig.now);
    let early = rig.enter(REQUEST);
    assert_eq!(confirm(&rig, &early), Verdict::Admit);
    // A pause means waiting, not a refusal.
    rig.pause(secs(5));
    let wait = Wait { by: Gate::Pause, until: Some(at(5)), floor: at(5) };
    assert_eq!(confirm(&rig, &early), Verdict::Wait(wait));
    rig.at(at(5));
    assert_eq!(confirm(&rig, &early), Verdict::Admit, "it keeps its slot");
    // An open circuit refuses; half-open, the request needs a probe's place, which it does not have.
    rig.record(Outcome::failure());
    let refused = Refused::CircuitOpen { retry_after: secs(10) };
    assert_eq!(confirm(&rig, &early), Verdict::Refuse(refused));
    rig.at(at(15));
    assert!(matches!(confirm(&rig, &early), Verdict::Wait(_)), "a probe's place is free");
    let probe = rig.enter(REQUEST);
    assert_eq!(confirm(&rig, &probe), Verdict::Admit);
    assert!(matches!(confirm(&rig, &early), Verdict::Refuse(Refused::CircuitOpen { .. })));
    // A probe of an earlier opening does not count for this one.
    rig.record(Outcome::failure());
    assert!(matches!(confirm(&rig, &probe), Verdict::Refuse(Refused::CircuitOpen { .. })));
    rig.close();
    assert_eq!(confirm(&rig, &early), Verdict::Refuse(Refused::Closed));
    rig.undo(early);
    rig.undo(probe);
    assert_eq!(rig.snapshot().in_flight, 0);
}
