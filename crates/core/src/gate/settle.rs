//! Settling: returns what a request holds, records what it used, and learns from its outcome.
//!
//! This file implements the table in [`outcome`](crate::outcome), row by row.

use std::time::Duration;

use super::circuit::Change as CircuitChange;
use super::gates::Gates;
use crate::backoff::Backoff;
use crate::bucket::Shape;
use crate::cost::{Charge, DIMENSIONS, Dispatch, Holds};
use crate::event::{Change, Event};
use crate::feedback::auto::Reply;
use crate::feedback::{Advice, Feedback, Sample, Tuning};
use crate::outcome::{Kind, Outcome};
use crate::per_second::PerSecond;
use crate::plan::Plan;
use crate::time::Instant;

/// The end of a request.
#[derive(Debug)]
pub struct Ending {
    /// What the request took.
    pub charge: Charge,
    /// Tokens reported as used while it ran.
    pub reported: Option<u64>,
    /// Its outcome.
    pub outcome: Outcome,
}

/// The origin of an outcome.
#[derive(Debug, Clone, Copy)]
struct Origin {
    generation: u32,
    bytes: u64,
    latency: Option<Duration>,
    /// Whether the request bypassed the gates.
    is_bypassed: bool,
    /// When the work started.
    sent_at: Instant,
    sent: Dispatch,
    /// Units per dimension that were counted as sent with it.
    units: [u64; DIMENSIONS],
}

impl Origin {
    fn of(charge: &Charge, outcome: Outcome, now: Instant) -> Self {
        // Outcomes after the first response are parts of a batch, which were not counted as sent.
        let is_part = charge.holds.has(Holds::ANSWERED) || !charge.is_counted_by_controller();
        Self {
            generation: charge.generation.get(),
            bytes: charge.cost.bytes,
            latency: Some(outcome.latency.unwrap_or_else(|| now.since(charge.sent_at()))),
            is_bypassed: charge.is_bypassed(),
            sent_at: charge.sent_at(),
            sent: if is_part { Dispatch { cohort: 0, ..charge.sent } } else { charge.sent },
            units: if is_part { [0; DIMENSIONS] } else { charge.cost.units() },
        }
    }

    /// The origin of an outcome without a permit, which counts as current.
    fn without_permit(outcome: Outcome, generation: u32, in_flight: u32, now: Instant) -> Self {
        Self {
            generation,
            bytes: outcome.spent.map_or(0, |spent| spent.bytes),
            latency: outcome.latency,
            is_bypassed: false,
            sent_at: now,
            sent: Dispatch { in_flight: u16::try_from(in_flight).unwrap_or(u16::MAX), ..Dispatch::default() },
            units: [0; DIMENSIONS],
        }
    }
}

impl Gates {
    /// Ends a request: returns what it holds, records what it used, and learns from its outcome.
    ///
    /// `waiting` is the length of the queue. Returns whether tokens were returned; slots, bytes and places
    /// always are.
    #[inline]
    pub fn settle(
        &mut self,
        plan: &Plan,
        ending: Ending,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> bool {
        let Ending { charge, reported, outcome } = ending;
        self.advance_to(plan, now);
        let was_drained = self.is_drained();
        self.count_malformed(outcome);
        if outcome.kind == Kind::Ignored {
            let in_flight = self.in_flight();
            if let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto)
                && charge.is_counted_by_controller()
                && !charge.holds.has(Holds::ANSWERED)
            {
                auto.leave(limits, &charge.sent, in_flight, self.latest);
                self.slots_limit = auto.slots(limits);
            }
        } else if plan.settles_timed() || outcome.has_hint() {
            let from = Origin::of(&charge, outcome, self.latest);
            self.learn(plan, from, outcome, waiting, events);
        }
        let has_tokens_back = self.book(plan, &charge, reported, outcome, events);
        self.give_back(&charge);
        if self.is_drained() && !was_drained {
            events.push(Event::Drained);
        }
        has_tokens_back
    }

    /// Fast path for settling a request that nothing learns from: returns its slot, if it holds nothing else
    /// and the throttle is not draining.
    ///
    /// On `false` nothing was done: call [`settle`](Self::settle). Whenever this returns `true`, `settle`
    /// would have done the same (checked by a property test).
    #[inline]
    pub fn leave_plain(&mut self, charge: &Charge) -> bool {
        let is_plain = charge.holds_slot_alone() && !self.lifecycle.is_closing();
        if is_plain {
            self.slots.give_back(1);
        }
        is_plain
    }

    /// Learns from an outcome without ending a request: a response whose body follows, part of a batch, or a
    /// request without a permit.
    ///
    /// The first outcome of a charge is the response to its request. Without a charge, the outcome belongs to
    /// the current generation.
    pub fn record(
        &mut self,
        plan: &Plan,
        charge: Option<&mut Charge>,
        outcome: Outcome,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        self.advance_to(plan, now);
        self.count_malformed(outcome);
        let has_charge = charge.is_some();
        if outcome.kind != Kind::Ignored {
            let origin = match charge {
                Some(charge) => {
                    let origin = Origin::of(charge, outcome, self.latest);
                    charge.holds.add(Holds::ANSWERED);
                    origin
                }
                None => Origin::without_permit(outcome, self.generation.get(), self.in_flight(), self.latest),
            };
            self.learn(plan, origin, outcome, waiting, events);
        }
        // A request without a permit has reserved nothing, so its reported tokens are recorded.
        if let (false, Some(spent), Some(budget)) = (has_charge, outcome.spent, &plan.draft.budget) {
            self.budget.take(budget, spent.tokens, self.latest, events);
        }
    }

    /// Records tokens that were used without a request for them.
    pub fn record_tokens(&mut self, plan: &Plan, tokens: u64, now: Instant, events: &mut Vec<Event>) {
        self.advance_to(plan, now);
        if let Some(budget) = &plan.draft.budget {
            self.budget.take(budget, tokens, self.latest, events);
        }
    }

    /// Counts a completion without a final attempt: the last attempt should have been retried, but could not
    /// be.
    pub fn complete(&mut self, plan: &Plan, events: &mut Vec<Event>) {
        if plan.draft.total.is_some() {
            self.progress.get_or_insert_default().complete_unmeasured();
            self.report_milestone(plan, events);
        }
    }

    /// The delay of `backoff` after attempt `attempt`, with the throttle's own randomness.
    pub fn delay(&mut self, backoff: &Backoff, attempt: u32) -> Duration {
        backoff.delay(attempt, &mut self.random)
    }

    /// Undoes an admission that was never sent, including its entries in pace and rate.
    pub fn undo(&mut self, plan: &Plan, charge: Charge, now: Instant, events: &mut Vec<Event>) {
        if let (true, Some(pace)) = (charge.holds.has(Holds::PACE), &mut self.pace) {
            pace.undo(charge.entered);
        }
        if let (true, Some(shape)) = (charge.holds.has(Holds::RATE), self.feedback.shape(plan)) {
            self.rate.give_back(shape);
        }
        if let Feedback::Auto(auto) = &mut self.feedback
            && charge.is_counted_by_controller()
        {
            auto.undo(charge.sent_at(), charge.cost);
        }
        self.admitted -= 1;
        self.not_admitted += 1;
        let ending = Ending { charge, reported: None, outcome: Outcome::ignored() };
        self.settle(plan, ending, 0, now, events);
    }

    /// Counts malformed headers for every outcome, including ignored ones.
    #[inline]
    fn count_malformed(&mut self, outcome: Outcome) {
        self.headers_malformed = self.headers_malformed.saturating_add(u32::from(outcome.malformed));
    }

    #[inline]
    fn give_back(&mut self, charge: &Charge) {
        if charge.is_counted() {
            self.slots.give_back(1);
        }
        if charge.is_recovering() {
            self.recovery.give_back(1);
        }
        if charge.byte_price > 0 {
            self.bytes.give_back(charge.bytes_held());
        }
        if charge.is_probe()
            && let Some(circuit) = &mut self.circuit
        {
            circuit.give_back(charge.generation.get());
        }
    }

    #[inline]
    fn book(
        &mut self,
        plan: &Plan,
        charge: &Charge,
        reported: Option<u64>,
        outcome: Outcome,
        events: &mut Vec<Event>,
    ) -> bool {
        let estimate = charge.tokens_held();
        self.budget.unreserve(estimate);
        let Some(budget) = &plan.draft.budget else { return false };
        let used = match (outcome.kind, outcome.spent, reported) {
            (_, Some(spent), _) => spent.tokens,
            (Kind::Ignored, None, reported) => reported.unwrap_or(0),
            (_, None, Some(reported)) => reported,
            (Kind::Success, None, None) => estimate,
            (Kind::Failure | Kind::Overload, None, None) => 0,
        };
        self.budget.settle(budget, estimate, used, charge.entered, self.latest, events);
        if let Some(progress) = &mut self.progress {
            progress.add_tokens(used);
        }
        used < estimate
    }

    /// Passes an outcome to the statistics (of any generation), then to the circuit, the controller, the
    /// pause and the progress, in this order.
    fn learn(
        &mut self,
        plan: &Plan,
        origin: Origin,
        outcome: Outcome,
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

    fn update_circuit(
        &mut self,
        plan: &Plan,
        generation: u32,
        outcome: Outcome,
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
        outcome: Outcome,
        events: &mut Vec<Event>,
    ) -> bool {
        let in_flight = self.in_flight();
        let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) else { return true };
        if origin.is_bypassed {
            return false;
        }
        let reply = Reply {
            sent_at: origin.sent_at,
            sent: origin.sent,
            units: origin.units,
            outcome: &outcome,
            latency: origin.latency,
            in_flight: in_flight.max(1),
            now: self.latest,
        };
        let advice = auto.learn(limits, &reply, &mut self.random);
        self.slots_limit = auto.slots(limits);
        auto.report(limits, advice, self.latest, events);
        // A hint on an accepted request applies to all: the quota is empty, or the upstream requests a pause.
        advice.stops_all || outcome.kind != Kind::Overload
    }

    fn update_pause(
        &mut self,
        plan: &Plan,
        bytes: u64,
        outcome: Outcome,
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
            // Hints from the upstream are capped; pauses by hand are not.
            let max = plan.draft.pause.max;
            if span > max {
                events.push(Event::PauseCapped { asked: span, capped: max });
            }
            self.pause_for(plan, span.min(max), waiting, events);
        }
    }

    fn update_progress(&mut self, plan: &Plan, latency: Duration, outcome: Outcome, events: &mut Vec<Event>) {
        if plan.draft.total.is_some() && !outcome.retried {
            self.progress.get_or_insert_default().complete(latency);
            self.report_milestone(plan, events);
        }
    }

    fn report_milestone(&mut self, plan: &Plan, events: &mut Vec<Event>) {
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

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
