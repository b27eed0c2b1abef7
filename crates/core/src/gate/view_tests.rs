//! A snapshot shows the first state that applies, and the next entry if time decides it.

use super::super::tests::{REQUEST, Rig, at, bytes, millis, secs, tokens};
use super::*;
use crate::cause::Cause;
use crate::cost::Charge;
use crate::outcome::Outcome;
use crate::plan::{Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, Pace, Pause, Rate, Slots};
use crate::statistics::Outcomes;
use crate::verdict::Gate;

/// Slots that each overload cuts, a circuit that each failure opens, and a tail of 10 s.
fn draft() -> Draft {
    Draft {
        slots: Some(Slots::adaptive(1..=2)),
        circuit: Some(Circuit::after_failures(1).open_for(secs(2))),
        controller: Controller::Brake(Brake::default()),
        pause: Pause::default().tail(secs(10)),
        recovery_slots: Some(2),
        ..Draft::default()
    }
}

/// Cuts the slots, pauses for 5 s with a tail of 10 s, and opens the circuit.
fn disturb(rig: &mut Rig) {
    rig.record(Outcome::overload().retry_after(secs(5)));
    rig.record(Outcome::failure());
}

fn disturbed() -> Rig {
    let mut rig = Rig::new(draft());
    disturb(&mut rig);
    rig
}

#[test]
fn state_is_the_first_that_applies() {
    let mut rig = disturbed();
    let mut state = |seconds| rig.at(at(seconds)).snapshot().state;
    assert_eq!([state(0), state(2), state(3)], [State::CircuitOpen; 3], "half-open is shown as open");
    rig.at(at(3)).record(Outcome::success());
    let shown = [3, 5, 14, 15].map(|seconds| rig.at(at(seconds)).snapshot().state);
    assert_eq!(shown, [State::Paused, State::Recovering, State::Recovering, State::Cooling]);
    let held = rig.at(at(75)).enter(REQUEST);
    rig.settle(held, Outcome::success());
    assert_eq!(rig.snapshot().state, State::Running);
}

#[test]
fn closing_takes_precedence_over_other_states() {
    for is_disturbed in [false, true] {
        let mut rig = Rig::new(draft());
        let held = rig.enter(REQUEST);
        if is_disturbed {
            disturb(&mut rig);
        }
        rig.close();
        assert_eq!(rig.snapshot().state, State::Draining);
        rig.settle(held, Outcome::ignored());
        assert_eq!(rig.snapshot().state, State::Closed);
    }
}

#[test]
fn next_entry_is_shown_if_time_decides_it() {
    let entered = |draft: Draft| {
        let mut rig = Rig::new(draft);
        let charge = rig.enter(tokens(10).bytes(11));
        assert!(!charge.is_probe());
        rig
    };
    let empty = Draft::default;
    let paused = |mut rig: Rig| {
        rig.pause(secs(5));
        rig
    };
    let table = [
        ("free", entered(empty()), Some(at(0))),
        ("paced", entered(Draft { pace: Some(Pace::every(secs(3))), ..empty() }), Some(at(3))),
        ("rated", entered(Draft { rate: Some(Rate::new(1, secs(4))), ..empty() }), Some(at(4))),
        (
            "spent",
            entered(Draft { budget: Some(Budget::tokens(10, secs(6))), ..empty() }),
            Some(at(6).plus_nanos(1)),
        ),
        ("full", entered(Draft { slots: Some(Slots::fixed(1)), ..empty() }), None),
        ("overdrawn", entered(Draft { bytes: Some(Bytes::in_flight(10)), ..empty() }), None),
        ("paused", paused(entered(empty())), Some(at(5))),
        ("open", disturbed(), Some(at(2))),
    ];
    for (name, rig, wanted) in table {
        assert_eq!(rig.snapshot().next_entry, wanted, "{name}");
    }
    let mut closed = entered(empty());
    closed.close();
    assert_eq!(closed.snapshot().next_entry, None);
}

/// Regression: with all recovery slots taken, the snapshot reported "now" instead of the end of the tail.
#[test]
fn next_entry_without_recovery_slots_is_end_of_tail() {
    let mut rig = Rig::new(Draft { recovery_slots: Some(1), ..draft() });
    rig.pause(secs(5));
    let _held = rig.at(at(5)).enter(REQUEST);
    assert_eq!(rig.waits(REQUEST), (Gate::RecoverySlots, Some(at(15))));
    assert_eq!(rig.snapshot().next_entry, Some(at(15)));
}

#[test]
fn the_queue_pushes_the_next_entry_back() {
    let mut rig = Rig::new(Draft { pace: Some(Pace::every(secs(2))), ..Draft::default() });
    let _held = rig.enter(REQUEST);
    let seen = rig.gates.snapshot(&rig.plan, 3, at(1));
    assert_eq!((seen.waiting, seen.next_entry), (3, Some(at(8))));
}

#[test]
fn a_snapshot_shows_every_gate() {
    let mut rig = Rig::new(Draft {
        slots: Some(Slots::adaptive(1..=8).start(6)),
        bytes: Some(Bytes::in_flight(100)),
        pace: Some(Pace::every(millis(10)).slowest(secs(1))),
        rate: Some(Rate::per_minute(5)),
        budget: Some(Budget::tokens(50, secs(60))),
        total: Some(4),
        ..draft()
    });
    let charge = rig.enter(tokens(20).bytes(30));
    rig.at(at(4)).settle(charge, Outcome::overload().retry_after(secs(1)).spent(tokens(25)));
    let _held = rig.at(at(5)).enter(bytes(40));
    let seen = rig.at(at(6)).snapshot();
    assert_eq!((seen.at, seen.state, seen.phase), (at(6), State::Recovering, Phase::Recovering));
    assert_eq!((seen.slots, seen.slots_max, seen.slots_ceiling), (Some(3), Some(8), Some(6)));
    assert_eq!((seen.in_flight, seen.recovering_in_flight, seen.bytes_in_flight), (1, 1, 40));
    assert_eq!((seen.interval, seen.rate_level), (millis(20), Some(3)));
    assert_eq!((seen.tokens_used, seen.tokens_remaining, seen.failures), (25, Some(25), 0));
    assert_eq!((seen.completed, seen.total, seen.percentage), (1, 4, Some(25.0)));
    assert_eq!(
        seen.eta,
        Some(secs(34)),
        "two need 25 tokens more than remain, so 30 s, and the last takes 4 s"
    );
    assert_eq!((seen.admitted, seen.evaluations, seen.waiting), (2, 2, 0));
}

#[test]
fn eta_without_slots_uses_requests_in_flight() {
    let mut rig = Rig::new(Draft { total: Some(5), ..Draft::default() });
    let mut held = rig.enter_all(3);
    rig.at(at(2)).settle(held.remove(0), Outcome::success());
    let seen = rig.snapshot();
    assert_eq!((seen.slots, seen.slots_ceiling, seen.eta), (None, None, Some(secs(4))));
    rig.at(at(3)).record(Outcome::overload());
    assert_eq!(
        (rig.snapshot().completed, rig.snapshot().failures),
        (2, 0),
        "without a controller no failures are counted"
    );
}

/// Regression: the estimate divided by the slots alone, which showed 6 s where the limits need 75 s.
#[test]
fn eta_is_bounded_by_pace_rate_and_budget() {
    // One of 100 has completed, in 1 s and with 5 tokens; by the slots alone the others need 2 s.
    let base = Draft { slots: Some(Slots::fixed(50)), total: Some(100), ..Draft::default() };
    let table = [
        (Draft { pace: Some(Pace::every(secs(2))), ..base.clone() }, secs(198)),
        (Draft { rate: Some(Rate::per_second(1).burst(9)), ..base.clone() }, secs(91)),
        (Draft { budget: Some(Budget::tokens(50, secs(10))), ..base.clone() }, secs(91)),
        (Draft { slots: Some(Slots::fixed(9)), ..base }, secs(11)),
    ];
    for (draft, wanted) in table {
        let mut rig = Rig::new(draft);
        let first = rig.enter(tokens(5));
        rig.later(secs(1)).settle(first, Outcome::success());
        assert_eq!(rig.snapshot().eta, Some(wanted), "{:?}", rig.plan.draft());
    }
}

/// Regression: a request that was answered before it ended used nothing, as far as the time left was concerned.
#[test]
fn eta_counts_use_of_answered_requests() {
    let draft = Draft { budget: Some(Budget::tokens(50, secs(10))), total: Some(100), ..Draft::default() };
    let ends: [fn(&mut Rig, Charge); 3] = [
        |rig, mut charge| {
            let (plan, events) = (&rig.plan, &mut rig.events);
            rig.gates.record(plan, Some(&mut charge), Outcome::success(), 0, rig.now, events);
            rig.settle(charge, Outcome::ignored().spent(tokens(5)));
        },
        |rig, charge| {
            rig.settle(charge, Outcome::ignored());
            rig.record(Outcome::success().spent(tokens(5)));
        },
        |rig, charge| rig.settle(charge, Outcome::success().spent(tokens(5))),
    ];
    for (index, end) in ends.into_iter().enumerate() {
        let mut rig = Rig::new(draft.clone());
        let first = rig.enter(tokens(9));
        end(rig.later(secs(1)), first);
        // 99 requests need 495 tokens, 45 remain, and the last one takes no longer than the first.
        let eta = rig.snapshot().eta.expect("one has completed");
        assert!((secs(90)..=secs(99)).contains(&eta), "{index}: {eta:?}");
    }
}

/// Regression: named limits, requests that count as several, and what `Auto` has learned did not count.
#[test]
fn eta_is_bounded_by_named_limits_and_auto() {
    // One of 100 has completed, in 1 s: as 2 requests, which have refilled, with 30 input and 20 output tokens.
    let base = Draft { slots: Some(Slots::fixed(50)), total: Some(100), ..Draft::default() };
    let cost = Cost::requests(2).input_tokens(30).output_tokens(20);
    let budget = |budget: Budget| base.clone().budget_named("b", budget);
    let window = secs(10);
    let table = [
        (base.clone().rate_named("r", Rate::per_second(2).burst(20)), secs(90)),
        (Draft { rate: Some(Rate::per_second(2).burst(20)), ..base.clone() }, secs(90)),
        (budget(Budget::tokens(500, window)), secs(91)),
        (budget(Budget::input_tokens(300, window)), secs(91)),
        (budget(Budget::output_tokens(200, window)), secs(91)),
        (
            budget(Budget::output_tokens(200, window)).budget_named("c", Budget::tokens(250, window)),
            secs(191),
        ),
    ];
    for (draft, wanted) in table {
        let mut rig = Rig::new(draft);
        let first = rig.enter(cost);
        rig.later(secs(1)).settle(first, Outcome::success());
        assert_eq!(rig.snapshot().eta, Some(wanted), "{:?}", rig.plan.draft());
    }
}

#[test]
fn eta_is_bounded_by_the_learned_rate() {
    let draft = Draft { total: Some(100), slots: Some(Slots::adaptive(50..=50)), ..Draft::auto() };
    let seconds = |draft: Draft, then: Outcome| {
        let mut rig = Rig::new(draft);
        let first = rig.enter(REQUEST);
        rig.later(secs(1)).settle(first, Outcome::success());
        let second = rig.enter(REQUEST);
        rig.later(secs(1)).settle(second, then);
        let seen = rig.snapshot();
        (seen.eta.unwrap().as_secs_f64(), seen.rate.unwrap().as_f64())
    };
    let (eta, rate) = seconds(draft.clone(), Outcome::overload());
    assert!((eta * rate).round() >= 98.0, "{eta} s at {rate}/s");
    let (eta, rate) = seconds(draft.clone(), Outcome::success());
    assert!(eta < 3.0, "no rejection yet: the rate of {rate}/s is only a start, not {eta} s");
    let capped = Auto { rate_max: 2.0, rate_start: 1.0, ..Auto::default() };
    let (eta, _) = seconds(Draft { controller: Controller::Auto(capped), ..draft }, Outcome::success());
    assert!((48.0..51.0).contains(&eta), "{eta} s");
}

#[test]
fn statistics_count_outcomes_of_all_generations() {
    let error_rate = Circuit::at_error_rate(0.9, 10, secs(10));
    let mut rig = Rig::new(Draft { circuit: Some(error_rate), ..draft() });
    assert_eq!((rig.snapshot().outcomes, rig.snapshot().latency_mean), (Outcomes::default(), None));
    let [early, late] = <[_; 2]>::try_from(rig.enter_all(2)).unwrap();
    rig.at(at(1)).settle(late, Outcome::overload().because(Cause::Server));
    assert_eq!(rig.cuts(), 1, "a new generation");
    rig.at(at(2)).settle(early, Outcome::success());
    rig.record(Outcome::success().took(secs(4)));
    rig.record(Outcome::success());
    rig.record(Outcome::failure().took(secs(9)));
    rig.record(Outcome::ignored().took(secs(9)));
    let seen = rig.snapshot();
    let counts = seen.outcomes;
    assert_eq!((counts.successes, counts.server, counts.other, counts.total()), (3, 1, 1, 5));
    assert_eq!(
        seen.latency_mean,
        Some(secs(3)),
        "of 2 s and 4 s: the others have no latency, or are not successes"
    );
    let near = |shown: Option<Duration>, wanted: Duration| {
        shown.is_some_and(|shown| shown.abs_diff(wanted) <= wanted / 16)
    };
    assert!(near(seen.latency_p50, secs(2)) && near(seen.latency_p95, secs(4)), "{seen:?}");
    assert_eq!(seen.error_rate, Some(0.4), "two of five: while closed, the window counts all generations");
    assert_eq!(rig.at(at(30)).snapshot().error_rate, None, "the window is empty");
    assert_eq!(rig.snapshot().outcomes, counts, "the totals stay");
}

#[test]
fn without_a_window_there_is_no_error_rate() {
    let consecutive = Some(Circuit::after_failures(9));
    for circuit in [None, consecutive] {
        let mut rig = Rig::new(Draft { circuit, ..draft() });
        rig.record(Outcome::failure());
        assert_eq!((rig.snapshot().error_rate, rig.snapshot().outcomes.other), (None, 1));
    }
}

#[test]
fn statistics_are_not_allocated_if_nothing_learns() {
    let limited = Draft { slots: Some(Slots::fixed(3)), rate: Some(Rate::per_second(9)), ..Draft::default() };
    let mut rig = Rig::new(limited);
    rig.call(REQUEST, Outcome::success());
    rig.call(REQUEST, Outcome::overload().retry_after(secs(1)));
    rig.record(Outcome::failure());
    assert!(rig.gates.statistics.is_none());
    assert_eq!((rig.snapshot().outcomes, rig.snapshot().latency_p95), (Outcomes::default(), None));
}

#[test]
fn statistics_survive_a_change_of_limits() {
    let mut rig = Rig::new(draft());
    rig.record(Outcome::success().took(secs(1)));
    rig.retune(Draft { slots: Some(Slots::fixed(2)), ..Draft::default() });
    rig.record(Outcome::success().took(secs(5)));
    assert_eq!((rig.snapshot().outcomes.successes, rig.snapshot().latency_mean), (1, Some(secs(1))));
}
