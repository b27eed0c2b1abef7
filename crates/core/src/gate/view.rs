//! Read-only views of the gates: snapshots and levels.

use std::time::Duration;

use super::gates::Gates;
use crate::control::Control;
use crate::cost::Cost;
use crate::feedback::Feedback;
use crate::latency::Latency;
use crate::per_second::PerSecond;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::snapshot::{CircuitState, Levels, LimitView, Phase, Snapshot, State};
use crate::time::Instant;
use crate::verdict::Verdict;

impl Gates {
    /// A snapshot of all state as of `now`; `ahead` is the length of the queue.
    pub fn snapshot(&self, plan: &Plan, ahead: u32, now: Instant) -> Snapshot {
        let now = now.max(self.latest);
        let phase = self.phase(plan, now);
        let breaker = plan.draft.circuit.as_ref().and(self.circuit.as_ref());
        let circuit = breaker.map(|gate| gate.view(now));
        let statistics = self.statistics.as_deref();
        let latency = statistics.map(|statistics| &statistics.latency);
        let budget = plan.draft.budget.as_ref();
        let tokens_used = budget.map_or(0, |budget| self.budget.used(budget, now));
        let slots = plan.draft.slots.map(|_| self.slots_limit);
        let total = plan.draft.total.unwrap_or(0);
        let no_progress = Progress::default();
        let progress = self.progress.as_deref().unwrap_or(&no_progress);
        Snapshot {
            at: now,
            state: self.state(phase, circuit.map(|view| view.state)),
            phase,
            in_flight: self.in_flight(),
            slots,
            slots_max: plan.draft.slots.map(|slots| slots.max),
            slots_ceiling: plan.draft.slots.map(|slots| self.feedback.ceiling().unwrap_or(slots.max)),
            recovering_in_flight: u32::try_from(self.recovery.held()).unwrap_or(u32::MAX),
            interval: self.pace.as_ref().map_or(Duration::ZERO, |pace| pace.interval()),
            bytes_in_flight: self.bytes.held(),
            rate: self.rate_now(plan),
            rate_level: self.feedback.shape(plan).map(|shape| self.rate_level(shape, now)),
            tokens_used,
            tokens_remaining: budget.map(|budget| budget.tokens.saturating_sub(tokens_used)),
            limits: self.limits_at(plan, now),
            failures: self.feedback.failures(plan, now),
            circuit,
            error_rate: breaker.and_then(|gate| gate.error_rate(now)),
            outcomes: statistics.map(|statistics| statistics.outcomes).unwrap_or_default(),
            latency_mean: latency.and_then(Latency::mean),
            latency_p50: latency.and_then(|latency| latency.quantile(0.5)),
            latency_p95: latency.and_then(|latency| latency.quantile(0.95)),
            completed: progress.completed(),
            total,
            percentage: progress.percentage(total),
            eta: self.eta(plan, progress, slots, now),
            waiting: ahead,
            admitted: self.admitted,
            evaluations: self.admitted + self.not_admitted,
            headers_malformed: u64::from(self.headers_malformed),
            next_entry: self.next_entry(plan, ahead, now),
            control: self.control(plan, now),
            listener_panics: 0,
            events_lost: 0,
        }
    }

    /// The circuit's state; `None` without one.
    pub fn circuit_state(&self, now: Instant) -> Option<CircuitState> {
        self.circuit.as_ref().map(|circuit| circuit.view(now.max(self.latest)).state)
    }

    /// The levels that change often and are cheap to read.
    pub fn levels(&self, plan: &Plan) -> Levels {
        let breaker = plan.draft.circuit.as_ref().and(self.circuit.as_ref());
        Levels {
            in_flight: self.in_flight(),
            slots: plan.draft.slots.map(|_| self.slots_limit),
            rate: self.rate_now(plan),
            quota: match &self.feedback {
                Feedback::Auto(auto) => auto.quota(),
                _ => None,
            },
            circuit: breaker.map(|gate| gate.view(self.latest).state),
        }
    }

    /// The named limits as of the latest clock reading.
    pub fn limits(&self, plan: &Plan) -> Vec<LimitView> {
        self.limits_at(plan, self.latest)
    }

    fn limits_at(&self, plan: &Plan, now: Instant) -> Vec<LimitView> {
        match (&self.named, &plan.named) {
            (Some(named), Some(plan)) => named.view(plan, now),
            _ => Vec::new(),
        }
    }

    fn rate_now(&self, plan: &Plan) -> Option<PerSecond> {
        let planned = plan.rate.map(|shape| PerSecond::of(shape.amount(), shape.period()));
        match &self.feedback {
            Feedback::Auto(auto) => {
                let found = plan.auto.as_ref().map(|limits| auto.rate(limits, self.latest));
                found.into_iter().chain(planned).min()
            }
            feedback => feedback.rate().or(planned),
        }
    }

    fn control(&self, plan: &Plan, now: Instant) -> Option<Control> {
        match (&self.feedback, &plan.auto) {
            (Feedback::Auto(auto), Some(limits)) => Some(auto.control(limits, now)),
            _ => None,
        }
    }

    /// The first state that applies.
    fn state(&self, phase: Phase, circuit: Option<CircuitState>) -> State {
        if self.is_drained() {
            State::Closed
        } else if self.lifecycle.is_closing() {
            State::Draining
        } else if matches!(circuit, Some(CircuitState::Open | CircuitState::HalfOpen)) {
            State::CircuitOpen
        } else if phase == Phase::Paused {
            State::Paused
        } else if phase == Phase::Recovering {
            State::Recovering
        } else if self.feedback.is_cooling() {
            State::Cooling
        } else {
            State::Running
        }
    }

    /// The level of the rate; a suspended bucket keeps the level from which it will continue.
    fn rate_level(&self, shape: &crate::bucket::Shape, now: Instant) -> i64 {
        self.rate.level(shape, now)
    }

    fn next_entry(&self, plan: &Plan, ahead: u32, now: Instant) -> Option<Instant> {
        let after_those_ahead = |from: Instant| {
            self.bound_at(plan, Cost::request(), ahead, now).map_or(from, |(_, at)| at.max(from))
        };
        match self.ask(plan, Cost::request(), now) {
            Verdict::Refuse(refused) => refused.retry_after().map(|span| now + span),
            Verdict::Wait(wait) => wait.until.map(after_those_ahead),
            Verdict::Admit => Some(after_those_ahead(now)),
        }
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
