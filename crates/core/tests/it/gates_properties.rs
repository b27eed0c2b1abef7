//! Invariants of the gates under any interleaving: nothing leaks, nothing is granted twice, no wait is
//! unnecessary.
//!
//! Requests enter, end and are undone, limits change, pauses start and end, the throttle closes, and the
//! clock runs forward and sometimes back. A model tracks what is held.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use tidegate_core::cost::{Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::gate::{Ending, Gates};
use tidegate_core::outcome::{Kind, Outcome};
use tidegate_core::plan::{Controller, Plan};
use tidegate_core::random::Random;
use tidegate_core::snapshot::{CircuitState, Snapshot};
use tidegate_core::time::{Instant, nanos};
use tidegate_core::verdict::{Gate, Verdict, Wait};

use self::steps::{Limits, Step, any_limits, any_steps, plain_limits, timed_limits};

mod steps;

/// The gates, and a model of what is held.
struct Model {
    limits: Limits,
    plan: Plan,
    gates: Gates,
    events: Vec<Event>,
    now: Instant,
    held: Vec<Charge>,
    paused_until: Instant,
    is_closed: bool,
    /// The largest budget so far, and the tokens used beyond all estimates.
    tokens_max: u64,
    overdraft: u64,
    /// Whether the fast paths of plain plans are tried first.
    uses_fast_path: bool,
}

impl Model {
    fn new(limits: Limits, seed: u64) -> Self {
        let plan = limits.draft.clone().check().expect("within the bounds");
        Self {
            gates: Gates::new(&plan, Random::seeded(seed)),
            plan,
            events: Vec::new(),
            now: Instant::from_nanos(7_000_000_000),
            held: Vec::new(),
            paused_until: Instant::ZERO,
            is_closed: false,
            tokens_max: limits.budget.unwrap_or(0),
            overdraft: 0,
            uses_fast_path: false,
            limits,
        }
    }

    fn snapshot(&self) -> Snapshot {
        self.gates.snapshot(&self.plan, 0, self.now)
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Admit { tokens, bytes, waiting } => {
                self.admit(Cost::request().tokens(tokens).bytes(bytes), waiting);
            }
            Step::Settle { which, outcome, reported } => self.settle(which, outcome, reported),
            Step::Record(outcome) => {
                if let (true, Some(spent)) = (self.held.is_empty(), outcome.spent_cost()) {
                    self.overdraft += spent.tokens;
                }
                self.gates.record(&self.plan, self.held.first_mut(), outcome, 0, self.now, &mut self.events);
            }
            Step::Undo(which) if !self.held.is_empty() => {
                let charge = self.held.swap_remove(which.index(self.held.len()));
                self.gates.undo(&self.plan, charge, self.now, &mut self.events);
            }
            Step::Undo(_) => {}
            Step::Pause(span) => {
                self.gates.pause(&self.plan, span, 1, self.now, &mut self.events);
            }
            Step::Resume => {
                self.gates.resume(&self.plan, self.now, &mut self.events);
            }
            Step::Retune(ref limits) => {
                let plan = limits.draft.clone().check().expect("within the bounds");
                self.gates.retune(&self.plan, &plan, self.now, &mut self.events);
                self.plan = plan;
                self.limits = (**limits).clone();
                self.tokens_max = self.tokens_max.max(self.limits.budget.unwrap_or(0));
            }
            Step::Close => {
                assert!(self.gates.close(&mut self.events));
                self.is_closed = true;
            }
            Step::Forward(span) => self.now = self.now + span,
            Step::Back(span) => self.now = self.now.minus_nanos(nanos(span)),
        }
    }

    const fn is_auto(&self) -> bool {
        matches!(self.limits.draft.controller, Controller::Auto(_))
    }

    fn admit(&mut self, cost: Cost, waiting: u32) {
        if self.is_auto() {
            // `Auto` moves its limits as time passes: this evaluates no request.
            self.gates.record_tokens(&self.plan, Cost::request(), self.now, &mut self.events);
        }
        let before = self.snapshot();
        match self.ask_for(cost, waiting) {
            Ok(charge) => {
                self.check_admission(&before, &charge);
                if let Some(budget) = self.limits.budget {
                    self.overdraft += cost.tokens.saturating_sub(budget);
                }
                self.held.push(charge);
            }
            Err(verdict) => {
                let mut after = self.snapshot();
                after.evaluations = before.evaluations;
                // A delayed caller is demand, which is a reason for limits of `Auto`.
                after.control = before.control;
                assert_eq!(after, before, "a denial takes nothing");
                match verdict {
                    Verdict::Wait(wait) => self.check_wait(cost, wait),
                    Verdict::Refuse(refused) => assert_ne!(refused.retry_after(), Some(Duration::ZERO)),
                    Verdict::Admit => panic!("an admission is not an error"),
                }
            }
        }
    }

    fn ask_for(&mut self, cost: Cost, waiting: u32) -> Result<Charge, Verdict> {
        let plain = if self.uses_fast_path && cost.is_plain() {
            self.gates.admit_plain(&self.plan, self.now).map(|admission| admission.charge(cost))
        } else {
            None
        };
        plain.map_or_else(|| self.gates.admit(&self.plan, cost, waiting, self.now, &mut self.events), Ok)
    }

    fn settle(&mut self, which: Index, outcome: Outcome, reported: Option<u64>) {
        if self.held.is_empty() {
            return;
        }
        let charge = self.held.swap_remove(which.index(self.held.len()));
        let spent = outcome.spent_cost().map(|spent| spent.tokens).or(reported);
        let used = match outcome.kind() {
            Kind::Success => spent.unwrap_or(charge.tokens_held()),
            _ => spent.unwrap_or(0),
        };
        // What it reported counts at once, and may stay booked after what it reserved has left the window.
        self.overdraft += used.max(reported.unwrap_or(0)).saturating_sub(charge.tokens_held());
        let is_idle = !self.plan.settles_timed() && !outcome.has_hint() && outcome.malformed() == 0;
        if self.uses_fast_path && is_idle && self.gates.leave_plain(&charge) {
            return;
        }
        // Like the shell, which reads no clock if the time is not needed.
        let now = if is_idle { self.gates.latest() } else { self.now };
        let reported = reported.map(Cost::from);
        if let Some(reported) = reported {
            let part = Cost::from(reported.tokens / 2);
            for reports in [(None, part), (Some(part), reported)] {
                self.gates.spend(&self.plan, &charge, reports, now, &mut self.events);
            }
        }
        let ending = Ending { charge, reported, outcome: &outcome };
        self.gates.settle(&self.plan, ending, 2, now, &mut self.events);
    }

    fn check_admission(&self, before: &Snapshot, charge: &Charge) {
        assert!(!self.is_closed);
        assert_eq!(charge.entered(), before.at);
        assert!(charge.entered() >= self.paused_until, "{:?} is within the pause", charge.entered());
        assert!(before.slots.is_none_or(|slots| before.in_flight < slots));
        assert!(self.limits.bytes.is_none_or(|capacity| before.bytes_in_flight <= capacity));
        if charge.is_recovering() {
            assert!(self.limits.recovery_slots.is_none_or(|slots| before.recovering_in_flight < slots));
        }
        assert!(before.rate_level.is_none_or(|level| level >= 1));
        if let Some(left) = before.tokens_remaining {
            assert!(charge.cost().tokens <= left || before.tokens_used == 0);
        }
        if let (Some(circuit), Some(probes)) = (before.circuit, self.limits.probes) {
            assert_ne!(circuit.state, CircuitState::Open);
            assert!(!charge.is_probe() || circuit.probes_in_flight < probes);
        }
    }

    /// With nothing else changed, the request is admitted at the returned time, and not a nanosecond earlier.
    fn check_wait(&self, cost: Cost, wait: Wait) {
        let now = self.now.max(self.gates.latest());
        assert!(wait.floor >= now);
        let is_pool = matches!(wait.by, Gate::Slots | Gate::Bytes);
        assert_eq!(wait.until.is_none(), is_pool, "only timed gates return a time");
        let Some(until) = wait.until else { return };
        assert!(until > now, "a wait is never zero");
        match self.gates.ask(&self.plan, cost, until) {
            // A pace may rise while callers wait, so that they are evaluated before it admits.
            Verdict::Admit | Verdict::Wait(_) if self.is_auto() => return,
            Verdict::Admit => {}
            Verdict::Wait(wait) if wait.by == Gate::RecoverySlots && self.limits.recovery_slots.is_some() => {
            }
            verdict => panic!("told to wait until {until:?}, but the verdict then is {verdict:?}"),
        }
        assert_ne!(self.gates.ask(&self.plan, cost, until.minus_nanos(1)), Verdict::Admit);
    }

    /// The invariants after every step.
    fn check(&mut self) {
        for event in &self.events {
            match event {
                Event::Paused { until, .. } => self.paused_until = *until,
                Event::Resumed => self.paused_until = Instant::ZERO,
                _ => {}
            }
        }
        let seen = self.snapshot();
        let counted = self.held.iter().filter(|charge| charge.is_counted()).count();
        let recovering = self.held.iter().filter(|charge| charge.is_recovering()).count();
        assert_eq!(seen.in_flight as usize, counted);
        assert_eq!(seen.recovering_in_flight as usize, recovering);
        assert_eq!(seen.bytes_in_flight, self.held.iter().map(Charge::bytes_held).sum::<u64>());
        assert!(seen.tokens_used <= self.tokens_max + self.overdraft);
        assert!(seen.rate_level <= self.limits.burst, "a bucket holds no more than its burst");
        assert_eq!(self.gates.is_drained(), self.is_closed && counted == 0);
        let drained = self.events.iter().filter(|event| **event == Event::Drained).count();
        assert_eq!(drained, usize::from(self.gates.is_drained()), "one event, when it happens");
    }
}

fn run(limits: Limits, seed: u64, steps: &[Step]) {
    let mut model = Model::new(limits, seed);
    for step in steps {
        model.run(step);
        model.check();
    }
    while let Some(charge) = model.held.pop() {
        let ending = Ending { charge, reported: None, outcome: &Outcome::ignored() };
        model.gates.settle(&model.plan, ending, 0, model.now, &mut model.events);
        model.check();
    }
    let end = model.snapshot();
    assert_eq!((end.in_flight, end.bytes_in_flight, end.recovering_in_flight), (0, 0, 0));
}

proptest! {
    /// Invariants 1, 2, 5 and 7: conservation, no grant above a limit, all or nothing, no refill by a clock
    /// step back.
    #[test]
    fn nothing_leaks_and_nothing_is_granted_twice(
        limits in any_limits(), seed in any::<u64>(), steps in any_steps(any_limits()),
    ) {
        run(limits, seed, &steps);
    }

    /// A request that waits only for time is admitted at the returned time.
    #[test]
    fn a_wait_for_time_alone_is_exact(
        limits in timed_limits(), seed in any::<u64>(), steps in any_steps(timed_limits()),
    ) {
        run(limits, seed, &steps);
    }

    /// Whenever the fast path admits, the slow path would have returned the same charge.
    #[test]
    fn fast_path_agrees_with_slow_path(
        limits in plain_limits(),
        seed in any::<u64>(),
        steps in any_steps(prop_oneof![4 => plain_limits(), 1 => any_limits()]),
    ) {
        let mut slow = Model::new(limits.clone(), seed);
        let mut fast = Model { uses_fast_path: true, ..Model::new(limits, seed) };
        for step in &steps {
            slow.run(step);
            fast.run(step);
            prop_assert_eq!(&fast.held, &slow.held);
            prop_assert_eq!(&fast.events, &slow.events);
            prop_assert_eq!(fast.snapshot(), slow.snapshot());
        }
    }
}
