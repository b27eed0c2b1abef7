//! Shared test rig for the gates: gates with their plan, a clock and the events so far.

use std::time::Duration;

use super::{Ending, Gates};
use crate::cost::{Charge, Cost};
use crate::event::Event;
use crate::outcome::Outcome;
use crate::plan::{Draft, Plan};
use crate::random::Random;
use crate::snapshot::Snapshot;
use crate::time::Instant;
use crate::verdict::{Gate, Verdict, Wait};

/// One request, with neither tokens nor bytes.
pub(super) const REQUEST: Cost = Cost::request();

pub(super) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The point `seconds` after the origin.
pub(super) const fn at(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

pub(super) const fn tokens(tokens: u64) -> Cost {
    REQUEST.tokens(tokens)
}

pub(super) const fn bytes(bytes: u64) -> Cost {
    REQUEST.bytes(bytes)
}

/// Gates as a throttle uses them, with jitter fixed at zero.
pub(super) struct Rig {
    pub(super) plan: Plan,
    pub(super) gates: Gates,
    pub(super) events: Vec<Event>,
    pub(super) now: Instant,
    pub(super) waiting: u32,
}

impl Rig {
    pub(super) fn new(draft: Draft) -> Self {
        let plan = draft.check().unwrap();
        let gates = Gates::new(&plan, Random::fixed(0.0));
        Self { plan, gates, events: Vec::new(), now: Instant::ZERO, waiting: 0 }
    }

    /// Sets the clock, forward or back.
    pub(super) fn at(&mut self, now: Instant) -> &mut Self {
        self.now = now;
        self
    }

    pub(super) fn later(&mut self, span: Duration) -> &mut Self {
        self.at(self.now + span)
    }

    pub(super) fn admit(&mut self, cost: Cost) -> Result<Charge, Verdict> {
        self.gates.admit(&self.plan, cost, self.waiting, self.now, &mut self.events)
    }

    /// Enters, or fails the test.
    #[track_caller]
    pub(super) fn enter(&mut self, cost: Cost) -> Charge {
        let now = self.now;
        self.admit(cost).unwrap_or_else(|verdict| panic!("at {now:?} the verdict was {verdict:?}"))
    }

    /// `count` plain requests at once.
    #[track_caller]
    pub(super) fn enter_all(&mut self, count: u32) -> Vec<Charge> {
        (0..count).map(|_| self.enter(REQUEST)).collect()
    }

    /// Enters as many plain requests as are admitted now, at most 1,000.
    pub(super) fn obtain(&mut self) -> Vec<Charge> {
        std::iter::from_fn(|| self.admit(REQUEST).ok()).take(1_000).collect()
    }

    /// Enters a plain request, now or at the time the verdict returns.
    #[track_caller]
    pub(super) fn enter_when_ready(&mut self) -> Charge {
        self.admit(REQUEST).unwrap_or_else(|verdict| match verdict {
            Verdict::Wait(Wait { until: Some(until), .. }) => self.at(until).enter(REQUEST),
            verdict => panic!("the verdict was {verdict:?}"),
        })
    }

    /// The gate that delays the request, and until when; fails the test if the request is not delayed.
    #[track_caller]
    pub(super) fn waits(&mut self, cost: Cost) -> (Gate, Option<Instant>) {
        match self.admit(cost) {
            Err(Verdict::Wait(wait)) => (wait.by, wait.until),
            verdict => panic!("the verdict was {verdict:?}"),
        }
    }

    pub(super) fn settle(&mut self, charge: Charge, outcome: Outcome) {
        self.settle_reported(charge, None, outcome);
    }

    pub(super) fn settle_reported(&mut self, charge: Charge, reported: Option<u64>, outcome: Outcome) {
        let reported = reported.map(Cost::from);
        if let Some(reported) = reported {
            self.spend(&charge, None, reported);
        }
        let (plan, events) = (&self.plan, &mut self.events);
        let ending = Ending { charge, reported, outcome: &outcome };
        self.gates.settle(plan, ending, self.waiting, self.now, events);
    }

    pub(super) fn spend(&mut self, charge: &Charge, before: Option<Cost>, reported: Cost) {
        self.gates.spend(&self.plan, charge, (before, reported), self.now, &mut self.events);
    }

    /// Enters and ends at once.
    #[track_caller]
    pub(super) fn call(&mut self, cost: Cost, outcome: Outcome) {
        let charge = self.enter(cost);
        self.settle(charge, outcome);
    }

    /// An outcome without a permit.
    pub(super) fn record(&mut self, outcome: Outcome) {
        self.gates.record(&self.plan, None, outcome, self.waiting, self.now, &mut self.events);
    }

    pub(super) fn undo(&mut self, charge: Charge) {
        self.gates.undo(&self.plan, charge, self.now, &mut self.events);
    }

    pub(super) fn pause(&mut self, span: Duration) -> bool {
        self.gates.pause(&self.plan, span, self.waiting, self.now, &mut self.events)
    }

    pub(super) fn resume(&mut self) -> bool {
        self.gates.resume(&self.plan, self.now, &mut self.events)
    }

    pub(super) fn retune(&mut self, draft: Draft) {
        let new = draft.check().unwrap();
        self.gates.retune(&self.plan, &new, self.now, &mut self.events);
        self.plan = new;
    }

    pub(super) fn close(&mut self) -> bool {
        self.gates.close(&mut self.events)
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        self.gates.snapshot(&self.plan, 0, self.now)
    }

    /// The events since the last call.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The number of cuts since the events were last taken.
    pub(super) fn cuts(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Slowed { .. })).count()
    }
}
