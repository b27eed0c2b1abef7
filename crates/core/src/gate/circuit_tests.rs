//! The breaker opens on its rules, admits only probes, and ignores requests from earlier generations.

use super::*;
use CallResult::{Dropped, Failure, Success};
use CircuitState::{Closed, HalfOpen, Open};

/// The time of one step in a table.
struct At(Instant);

#[derive(Debug, Clone, Copy)]
struct Step {
    at: Instant,
    act: Action,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    /// A request enters and is held; held requests count from 0.
    Enters,
    /// A held request ends.
    Ends(usize, CallResult),
    /// A request enters and ends at once.
    Calls(CallResult),
    /// An outcome without a permit.
    Records(CallResult),
    Asks(Option<Refused>),
    Shows(CircuitState),
}

#[derive(Debug, Clone, Copy)]
enum CallResult {
    Success,
    Failure,
    Dropped,
}

const fn at(millis: u64) -> At {
    At(Instant::from_nanos(millis * 1_000_000))
}

impl At {
    const fn enters(self) -> Step {
        self.step(Action::Enters)
    }
    const fn ends(self, held: usize, how: CallResult) -> Step {
        self.step(Action::Ends(held, how))
    }
    const fn fails(self) -> Step {
        self.step(Action::Calls(Failure))
    }
    const fn succeeds(self) -> Step {
        self.step(Action::Calls(Success))
    }
    const fn drops(self) -> Step {
        self.step(Action::Calls(Dropped))
    }
    const fn records(self, how: CallResult) -> Step {
        self.step(Action::Records(how))
    }
    const fn admits(self) -> Step {
        self.step(Action::Asks(None))
    }
    const fn refuses_for(self, millis: u64) -> Step {
        self.step(Action::Asks(Some(Refused::CircuitOpen { retry_after: Duration::from_millis(millis) })))
    }
    const fn shows(self, state: CircuitState) -> Step {
        self.step(Action::Shows(state))
    }
    const fn step(self, act: Action) -> Step {
        Step { at: self.0, act }
    }
}

/// A breaker with the state that the gates keep for it: the generation and the requests in flight.
struct Rig {
    plan: Circuit,
    gate: CircuitGate,
    generation: u32,
    held: Vec<(u32, bool)>,
    events: Vec<Event>,
}

impl Rig {
    fn new(plan: Circuit) -> Self {
        Self { plan, gate: CircuitGate::new(&plan, 0), generation: 0, held: Vec::new(), events: Vec::new() }
    }

    fn run(&mut self, steps: &[Step]) -> &mut Self {
        for (number, step) in steps.iter().enumerate() {
            match step.act {
                Action::Enters => self.enter(number, *step),
                Action::Ends(held, how) => self.end(held, how, step.at),
                Action::Calls(how) => {
                    self.enter(number, *step);
                    self.end(self.held.len() - 1, how, step.at);
                }
                Action::Records(how) => self.learn(self.generation, how, step.at),
                Action::Asks(wanted) => {
                    assert_eq!(self.gate.refuses(&self.plan, step.at), wanted, "line {number}: {step:?}");
                }
                Action::Shows(state) => {
                    assert_eq!(self.gate.view(step.at).state, state, "line {number}: {step:?}");
                }
            }
        }
        self
    }

    fn enter(&mut self, number: usize, step: Step) {
        assert_eq!(self.gate.refuses(&self.plan, step.at), None, "line {number}: {step:?}");
        let is_probe = self.gate.take(&mut self.events);
        self.held.push((self.generation, is_probe));
    }

    fn end(&mut self, held: usize, how: CallResult, now: Instant) {
        let (generation, is_probe) = self.held[held];
        self.learn(generation, how, now);
        if is_probe {
            self.gate.give_back(generation);
        }
    }

    fn learn(&mut self, generation: u32, how: CallResult, now: Instant) {
        let change = match how {
            Success => self.gate.success(&self.plan, generation, now, &mut self.events),
            Failure => self.gate.failure(&self.plan, generation, now, &mut self.events),
            Dropped => Change::None,
        };
        if change == Change::Changed {
            self.generation += 1;
            self.gate.begin(self.generation);
        }
    }

    /// The span of each opening, in seconds.
    fn spans(&self) -> Vec<u64> {
        let opened = |event: &Event| match event {
            Event::CircuitOpened { span, .. } => Some(span.as_secs()),
            _ => None,
        };
        self.events.iter().filter_map(opened).collect()
    }

    fn count(&self, wanted: &Event) -> usize {
        self.events.iter().filter(|event| *event == wanted).count()
    }
}

/// Opens after `failures` consecutive failures, for `open_for` seconds, with `probes` probes.
const fn circuit(failures: u32, open_for: u64, probes: u32) -> Circuit {
    Circuit::after_failures(failures).open_for(Duration::from_secs(open_for)).probes(probes)
}

fn check(plan: Circuit, steps: &[Step]) {
    Rig::new(plan).run(steps);
}

#[test]
fn only_consecutive_failures_open_the_circuit() {
    let mut rig = Rig::new(circuit(3, 10, 1));
    rig.run(&[at(0).fails(), at(0).fails(), at(0).succeeds(), at(0).fails(), at(0).fails()]);
    assert_eq!(rig.gate.view(at(0).0).consecutive_failures, 2);
    rig.run(&[at(0).shows(Closed), at(0).fails(), at(0).shows(Open)]);
    let why = Trip::Consecutive { failures: 3 };
    assert_eq!(rig.events, [Event::CircuitOpened { span: Duration::from_secs(10), why }]);
}

#[test]
fn a_refusal_reports_the_rest_of_the_open_time() {
    check(
        circuit(1, 10, 1),
        &[
            at(0).fails(),
            at(0).refuses_for(10_000),
            at(3_000).refuses_for(7_000),
            at(9_900).shows(Open),
            at(9_900).refuses_for(100),
            at(10_000).shows(HalfOpen),
            at(10_000).admits(),
        ],
    );
}

#[test]
fn failed_probes_double_the_open_time_up_to_fivefold() {
    let mut rig = Rig::new(circuit(1, 10, 1));
    rig.run(&[
        at(0).fails(),
        at(10_000).fails(),
        at(30_000).fails(),
        at(70_000).fails(),
        at(120_000).fails(),
    ]);
    assert_eq!(rig.spans(), [10, 20, 40, 50, 50]);
    rig.run(&[at(170_000).succeeds(), at(170_000).shows(Closed), at(171_000).fails()]);
    assert_eq!(rig.spans().last(), Some(&10), "once closed, it starts over");
}

#[test]
fn enough_probe_successes_close_and_reset_circuit() {
    let mut rig = Rig::new(circuit(2, 10, 3));
    rig.run(&[at(0).fails(), at(0).fails(), at(10_000).succeeds(), at(10_000).succeeds()]);
    let view = rig.gate.view(at(10_000).0);
    assert_eq!((view.state, view.probe_successes, view.probes_in_flight), (HalfOpen, 2, 0));
    rig.run(&[at(10_000).succeeds(), at(10_000).shows(Closed)]);
    assert_eq!(rig.count(&Event::CircuitClosed), 1);
    rig.run(&[at(11_000).fails(), at(11_000).shows(Closed), at(11_000).fails(), at(11_000).shows(Open)]);
}

#[test]
fn probes_in_flight_are_bounded() {
    check(
        circuit(1, 10, 2),
        &[
            at(0).fails(),
            at(10_000).enters(),
            at(10_000).enters(),
            at(10_000).refuses_for(1_000),
            at(11_000).ends(1, Success),
            at(11_000).admits(),
        ],
    );
}

#[test]
fn zero_open_time_is_half_open_immediately() {
    check(circuit(1, 0, 1), &[at(5).fails(), at(5).shows(HalfOpen), at(5).succeeds(), at(5).shows(Closed)]);
}

#[test]
fn a_dropped_probe_returns_its_place() {
    check(
        circuit(2, 5, 1),
        &[
            at(1_000).fails(),
            at(1_000).fails(),
            at(2_000).refuses_for(4_000),
            at(6_000).drops(),
            at(6_000).shows(HalfOpen),
            at(6_000).enters(),
            at(6_000).refuses_for(500),
            at(7_000).ends(3, Dropped),
            at(7_000).admits(),
        ],
    );
}

#[test]
fn retry_after_is_never_zero_with_all_probes_out() {
    for (open_for, later, millis) in [(0, 0, 1), (10, 10_000, 1_000), (30, 30_000, 3_000)] {
        check(circuit(1, open_for, 1), &[at(0).fails(), at(later).enters(), at(later).refuses_for(millis)]);
    }
}

#[test]
fn requests_from_before_opening_do_not_affect_circuit() {
    let late = [
        at(4_000).ends(0, Failure),
        at(4_000).refuses_for(6_000),
        at(10_000).enters(),
        at(10_000).ends(1, Success),
        at(10_000).shows(HalfOpen),
        at(10_000).ends(2, Failure),
        at(10_000).shows(HalfOpen),
        at(10_000).refuses_for(1_000),
        at(10_000).ends(4, Success),
        at(10_000).shows(Closed),
    ];
    let mut rig = Rig::new(circuit(1, 10, 1));
    rig.run(&[at(0).enters(), at(0).enters(), at(0).enters(), at(0).fails(), at(0).shows(Open)]).run(&late);
    assert_eq!(rig.spans(), [10]);
}

#[test]
fn requests_from_before_closing_do_not_reopen_circuit() {
    check(
        circuit(1, 10, 2),
        &[
            at(0).fails(),
            at(10_000).succeeds(),
            at(10_000).enters(),
            at(10_000).succeeds(),
            at(10_000).shows(Closed),
            at(11_000).ends(2, Failure),
            at(11_000).shows(Closed),
        ],
    );
}

#[test]
fn stale_probe_releases_no_place_of_a_later_opening() {
    check(
        circuit(1, 10, 2),
        &[
            at(0).fails(),
            at(10_000).enters(),
            at(10_000).enters(),
            at(11_000).ends(1, Failure),
            at(31_000).enters(),
            at(31_000).enters(),
            at(31_000).ends(2, Dropped),
            at(31_000).refuses_for(2_000),
            at(31_000).ends(3, Dropped),
            at(31_000).admits(),
        ],
    );
}

#[test]
fn outcomes_without_permit_do_not_affect_open_circuit() {
    let mut rig = Rig::new(circuit(1, 10, 1));
    rig.run(&[at(0).fails(), at(5_000).records(Failure), at(5_000).records(Success), at(5_000).shows(Open)]);
    assert_eq!(rig.spans(), [10]);
    rig.run(&[at(5_000).refuses_for(5_000), at(10_000).records(Success), at(10_000).shows(Closed)]);
}

#[test]
fn half_open_event_is_emitted_once_per_opening() {
    let mut rig = Rig::new(circuit(1, 10, 2));
    rig.run(&[at(0).fails(), at(10_000).drops(), at(10_000).succeeds(), at(10_000).drops()]);
    assert_eq!(rig.count(&Event::CircuitHalfOpened), 1);
    rig.run(&[at(10_000).fails(), at(30_000).succeeds(), at(30_000).succeeds()]);
    assert_eq!(rig.count(&Event::CircuitHalfOpened), 2);
    assert_eq!(rig.events.last(), Some(&Event::CircuitClosed));
}

/// Opens at half of at least four outcomes within 15 s, in slices of one second.
const fn by_rate() -> Circuit {
    Circuit::at_error_rate(0.5, 4, Duration::from_secs(15)).open_for(Duration::from_secs(10))
}

#[test]
fn error_rate_opens_at_threshold_with_enough_samples() {
    let table: [(&[CallResult], CircuitState); 6] = [
        (&[Failure, Failure, Failure], Closed),
        (&[Failure, Failure, Failure, Failure], Open),
        (&[Success, Success, Failure, Failure], Open),
        (&[Success, Success, Success, Failure], Closed),
        (&[Failure, Failure, Success, Success], Closed),
        (&[Failure, Failure, Success, Success, Failure], Open),
    ];
    for (outcomes, state) in table {
        let mut rig = Rig::new(by_rate());
        for how in outcomes {
            rig.run(&[at(0).records(*how)]);
        }
        assert_eq!(rig.gate.view(at(0).0).state, state, "{outcomes:?}");
    }
}

#[test]
fn error_rate_counts_only_its_window() {
    let mut rig = Rig::new(by_rate());
    rig.run(&[at(0).fails(), at(0).fails(), at(0).fails(), at(20_000).fails(), at(20_000).shows(Closed)]);
    rig.run(&[at(21_000).fails(), at(21_000).succeeds(), at(21_000).fails(), at(21_000).shows(Open)]);
    let why = Trip::ErrorRate { failures: 3, total: 4 };
    assert_eq!(rig.events, [Event::CircuitOpened { span: Duration::from_secs(10), why }]);
}

#[test]
fn the_error_window_is_cleared_on_close() {
    let mut rig = Rig::new(by_rate());
    for _ in 0..4 {
        rig.run(&[at(0).fails()]);
    }
    // All of this is within the window, so without the reset the four failures would still count.
    rig.run(&[at(10_000).succeeds(), at(10_000).shows(Closed)]);
    rig.run(&[at(11_000).fails(), at(11_000).fails(), at(11_000).fails(), at(11_000).shows(Closed)]);
}

#[test]
fn either_rule_opens_the_circuit() {
    let plan = by_rate().or_after_failures(2);
    check(plan, &[at(0).fails(), at(0).fails(), at(0).shows(Open)]);
    let rate = [at(0).fails(), at(0).succeeds(), at(0).fails(), at(0).succeeds(), at(0).fails()];
    let mut rig = Rig::new(plan);
    rig.run(&rate).run(&[at(0).shows(Open)]);
    let why = Trip::ErrorRate { failures: 3, total: 5 };
    assert_eq!(rig.events, [Event::CircuitOpened { span: Duration::from_secs(10), why }]);
}

#[test]
fn tuning_swaps_the_tally_only_for_another_error_rate() {
    let wider = Circuit::at_error_rate(0.5, 4, Duration::from_secs(60));
    let table = [
        (Some(by_rate()), by_rate().probes(3), Open),
        (Some(by_rate()), wider, Closed),
        (Some(by_rate()), circuit(9, 10, 1), Closed),
        (None, by_rate(), Closed),
    ];
    for (old, new, state) in table {
        let mut rig = Rig::new(by_rate());
        rig.run(&[at(0).fails(), at(0).fails(), at(0).fails()]);
        rig.gate.tune(old.as_ref(), &new);
        rig.plan = new;
        rig.run(&[at(0).fails(), at(0).shows(state)]);
    }
}

#[test]
fn exact_threshold_trips_despite_rounding() {
    for (threshold, bad, total) in [(0.07, 7, 100), (0.14, 7, 50), (0.28, 7, 25), (0.55, 55, 100)] {
        let plan = Circuit::at_error_rate(threshold, total, Duration::from_secs(60));
        let mut gate = CircuitGate::new(&plan, 0);
        let now = Instant::from_nanos(1);
        for _ in 0..total - bad {
            gate.success(&plan, 0, now, &mut Vec::new());
        }
        let changes = (0..bad).map(|_| gate.failure(&plan, 0, now, &mut Vec::new()));
        assert_eq!(changes.last(), Some(Change::Changed), "{bad} of {total} at {threshold}");
    }
}
