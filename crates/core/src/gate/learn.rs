//! Passes an outcome on to the statistics, the circuit, the controller, the pause and the progress, in this order.

use std::time::Duration;

use super::circuit::Change as CircuitChange;
use super::gates::Gates;
use super::settle::Origin;
use crate::bucket::Shape;
use crate::cost::{Charge, Holds};
use crate::event::{Change, Event};
use crate::feedback::auto::Reply;
use crate::feedback::{Advice, Feedback, Sample, Tuning};
use crate::outcome::{Kind, Outcome};
use crate::per_second::PerSecond;
use crate::plan::Plan;
use crate::time::Instant;

impl Gates {
    /// Passes an outcome to the statistics (of any generation), then to the circuit, the controller, the
    /// pause and the progress, in this order.
    pub(super) fn learn(
        &mut self,
        plan: &Plan,
        origin: Origin,
        outcome: &Outcome,
        waiting: u32,
        events: &mut Vec<Event>,
    ) {
        if plan.settles_timed() {
            self.statistics.get_or_insert_default().record(outcome, origin.latency);
        }
        // Computed before the circuit changes: a trip begins a new generation, to which this outcome does not
        // belong.
        let is_current = origin.generation >= self.generation.get() && !origin.is_bypassed;
        let circuit = self.update_circuit(plan, origin.generation, outcome, events);
        let binds_all = if plan.auto.is_some() {
            self.update_auto(plan, origin, outcome, events)
        } else {
            self.update_controller(plan, is_current, outcome.kind, origin.latency, waiting, events);
            true
        };
        if circuit == CircuitChange::Changed {
            self.update_suspension(plan);
        }
        self.update_pause(plan, origin.bytes, outcome, binds_all, waiting, events);
        self.update_progress(plan, origin.latency.unwrap_or_default(), outcome, events);
    }

    /// `Auto` learns from an ignored outcome whether the upstream answered; nothing else does.
    pub(super) fn learn_ignored(
        &mut self,
        plan: &Plan,
        charge: &Charge,
        outcome: &Outcome,
        events: &mut Vec<Event>,
    ) {
        let in_flight = self.in_flight();
        let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) else { return };
        if !charge.is_counted_by_controller() || charge.holds.has(Holds::ANSWERED) {
            return;
        }
        if outcome.is_answer {
            self.update_auto(plan, Origin::of(charge, outcome, self.latest), outcome, events);
        } else {
            auto.leave(limits, charge, in_flight, self.latest);
            self.slots_limit = auto.slots(limits);
        }
    }

    fn update_circuit(
        &mut self,
        plan: &Plan,
        generation: u32,
        outcome: &Outcome,
        events: &mut Vec<Event>,
    ) -> CircuitChange {
        let (Some(circuit), Some(limits)) = (&mut self.circuit, &plan.draft.circuit) else {
            return CircuitChange::None;
        };
        let change = match outcome.kind {
            Kind::Success => circuit.success(limits, generation, self.latest, events),
            // `Auto` handles rejections itself, and an upstream that sends a retry delay is alive. One that
            // keeps sending a delay of zero is not.
            Kind::Overload if plan.auto.is_some() => CircuitChange::None,
            Kind::Overload if outcome.retry_after.is_some_and(|hint| !hint.is_zero()) => CircuitChange::None,
            Kind::Failure | Kind::Overload => circuit.failure(limits, generation, self.latest, events),
            Kind::Ignored => CircuitChange::None,
        };
        if change == CircuitChange::Changed {
            self.generation = self.generation.saturating_add(1);
            circuit.begin(self.generation.get());
        }
        change
    }

    fn update_controller(
        &mut self,
        plan: &Plan,
        is_current: bool,
        kind: Kind,
        latency: Option<Duration>,
        waiting: u32,
        events: &mut Vec<Event>,
    ) {
        if matches!(self.feedback, Feedback::Fixed) {
            return;
        }
        // Queued callers may wait for any gate, so a controller of the rate counts only callers that the rate
        // delayed.
        let has_demand = self.has_demand || (waiting > 0 && self.feedback.rate().is_none());
        let sample = Sample {
            kind,
            is_current,
            in_flight: self.slots.held(),
            has_demand,
            latency,
            admitted: self.admitted,
            now: self.latest,
        };
        let before = self.tuning();
        let ceiling = self.feedback.ceiling();
        let advice = self.feedback.learn(plan, before, sample);
        // Callers delayed before this step carry no information about the limits after it.
        self.has_demand &= advice.is_none();
        match advice {
            Some(Advice::Cut(to, why)) => {
                self.generation = self.generation.saturating_add(1);
                self.tune(plan, to);
                let (slots, interval, rate) = changes(before, to);
                events.push(Event::Slowed { slots, interval, rate, why });
            }
            grow => {
                if let (Some(from), Some(to)) = (ceiling, self.feedback.ceiling())
                    && from < to
                {
                    events.push(Event::CeilingLifted { ceiling: Change { from, to } });
                }
                if let Some(Advice::Grow(to)) = grow {
                    let was_cooling = self.feedback.is_cooling();
                    self.tune(plan, to);
                    let (slots, interval, rate) = changes(before, to);
                    events.push(Event::SpedUp { slots, interval, rate });
                    if let (Some(rate), true) = (to.rate, was_cooling && !self.feedback.is_cooling()) {
                        events.push(Event::Recovered { rate });
                    }
                }
            }
        }
    }

    /// `Auto` learns from an outcome; returns whether its hint stops all requests.
    fn update_auto(
        &mut self,
        plan: &Plan,
        origin: Origin,
        outcome: &Outcome,
        events: &mut Vec<Event>,
    ) -> bool {
        let reply = self.reply(origin, outcome);
        let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) else { return true };
        if origin.is_bypassed {
            return false;
        }
        let advice = auto.learn(limits, &reply, &mut self.random);
        self.slots_limit = auto.slots(limits);
        auto.report(limits, advice, self.latest, events);
        // A hint on an accepted request applies to all: the quota is empty, or the upstream requests a pause.
        advice.stops_all || outcome.kind != Kind::Overload
    }

    fn reply<'a>(&self, origin: Origin, outcome: &'a Outcome) -> Reply<'a> {
        Reply {
            sent_at: origin.sent_at,
            sent: origin.sent,
            before: origin.before,
            units: origin.units,
            outcome,
            latency: origin.latency,
            in_flight: self.in_flight().max(1),
            now: self.latest,
        }
    }

    /// Begins the pause of a rejection that is learned from later, when its body has named the quota that was exceeded,
    /// if its retry time stops all requests as far as is known now. Returns how much of the retry time counts.
    pub fn pause_early(
        &mut self,
        plan: &Plan,
        charge: &Charge,
        outcome: &Outcome,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Option<Duration> {
        self.advance_to(plan, now);
        let hint = outcome.retry_after?;
        let origin = Origin::of(charge, outcome, self.latest);
        let (Feedback::Auto(auto), Some(limits)) = (&self.feedback, &plan.auto) else { return None };
        // Tried on a copy: rejections are rare, and no rule is written twice.
        let mut random = self.random;
        let advice = auto.clone().learn(limits, &self.reply(origin, outcome), &mut random);
        let stops_all = advice.stops_all && !origin.is_bypassed;
        stops_all.then(|| self.pause_as_hinted(plan, hint, waiting, events))
    }

    fn update_pause(
        &mut self,
        plan: &Plan,
        bytes: u64,
        outcome: &Outcome,
        binds_all: bool,
        waiting: u32,
        events: &mut Vec<Event>,
    ) {
        let by_size = match (outcome.kind, &plan.draft.pause.sizes) {
            (Kind::Overload, Some(rule)) if bytes <= rule.small_max => Some(rule.small),
            (Kind::Overload, Some(rule)) => Some(rule.large),
            _ => None,
        };
        if let Some(span) = outcome.retry_after.filter(|_| binds_all).max(by_size) {
            self.pause_as_hinted(plan, span, waiting, events);
        }
    }

    /// Pauses for a hint from the upstream, which is capped; pauses by hand are not. Returns how much of it counts.
    fn pause_as_hinted(
        &mut self,
        plan: &Plan,
        span: Duration,
        waiting: u32,
        events: &mut Vec<Event>,
    ) -> Duration {
        let max = plan.draft.pause.max;
        if span > max {
            events.push(Event::PauseCapped { asked: span, capped: max });
        }
        self.pause_for(plan, span.min(max), waiting, events);
        span.min(max)
    }

    fn update_progress(
        &mut self,
        plan: &Plan,
        latency: Duration,
        outcome: &Outcome,
        events: &mut Vec<Event>,
    ) {
        if plan.draft.total.is_some() && !outcome.retried {
            self.progress.get_or_insert_default().complete(latency);
            self.report_milestone(plan, events);
        }
    }

    pub(super) fn report_milestone(&mut self, plan: &Plan, events: &mut Vec<Event>) {
        let total = plan.draft.total.unwrap_or(0);
        let Some(progress) = &mut self.progress else { return };
        if let Some(percent) = progress.milestone(total, plan.draft.milestone_percent) {
            events.push(Event::Progressed { percent, completed: progress.completed(), total });
        }
    }

    fn tuning(&self) -> Tuning {
        let interval = self.pace.as_ref().map_or(Duration::ZERO, |pace| pace.interval());
        Tuning { slots: self.slots_limit, interval, rate: self.feedback.rate() }
    }

    fn tune(&mut self, plan: &Plan, to: Tuning) {
        self.slots_limit = to.slots;
        if let (Some(gate), Some(pace)) = (&mut self.pace, &plan.draft.pace) {
            gate.tune(to.interval, pace.jitter, &mut self.random);
        }
        let from = self.feedback.shape(plan).copied();
        self.feedback.set_rate(plan, to);
        self.reshape_rate(plan, from);
    }

    /// Changes the shape of the rate from `from` to the controller's or the plan's, and keeps the level.
    pub(super) fn reshape_rate(&mut self, plan: &Plan, from: Option<Shape>) {
        match (from, self.feedback.shape(plan)) {
            (Some(from), Some(to)) if from != *to => self.rate.tune(&from, to, self.latest),
            // The debt of an earlier rate is in its own units and does not carry over.
            (None, Some(_)) => self.rate.refill(),
            _ => {}
        }
    }

    /// Applies the slots of `Auto`, if it is the controller.
    pub(super) fn follow_auto(&mut self, plan: &Plan) {
        if let (Feedback::Auto(auto), Some(limits)) = (&self.feedback, &plan.auto) {
            self.slots_limit = auto.slots(limits);
        }
    }
}

type Changes = (Change<u32>, Change<Duration>, Option<Change<PerSecond>>);

fn changes(from: Tuning, to: Tuning) -> Changes {
    let rate = from.rate.zip(to.rate).map(|(from, to)| Change { from, to });
    (Change { from: from.slots, to: to.slots }, Change { from: from.interval, to: to.interval }, rate)
}
