//! The way back: what is held returns, what was used is booked, and the outcome is learned from.
//!
//! This file is the outcome table of [`outcome`](crate::outcome), row by row.

use std::time::Duration;

use super::circuit::Change as CircuitChange;
use super::gates::Gates;
use super::rate::RateGate;
use crate::backoff::Backoff;
use crate::bucket::Shape;
use crate::cost::{Charge, Holds};
use crate::event::{Change, Event};
use crate::feedback::{Advice, Feedback, Sample, Tuning};
use crate::outcome::{Kind, Outcome};
use crate::per_second::PerSecond;
use crate::plan::Plan;
use crate::time::Instant;

/// The end of a request.
#[derive(Debug)]
pub struct Ending {
    /// What it took.
    pub charge: Charge,
    /// Tokens that were said to be used while it ran.
    pub reported: Option<u64>,
    /// How it went.
    pub outcome: Outcome,
}

/// Where an outcome comes from.
#[derive(Debug, Clone, Copy)]
struct Origin {
    generation: u32,
    bytes: u64,
    latency: Option<Duration>,
}

impl Gates {
    /// Ends a request: returns what it holds, books what it used, learns from how it went.
    ///
    /// `waiting` callers are queued. Answers whether tokens came back: slots, bytes and places always do.
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
        self.see(plan, now);
        let was_drained = self.is_drained();
        self.count_malformed(outcome);
        if outcome.kind != Kind::Ignored && (plan.settles_timed() || outcome.has_hint()) {
            self.learn(plan, Some(&charge), outcome, waiting, events);
        }
        let has_tokens_back = self.book(plan, &charge, reported, outcome, events);
        self.give_back(&charge);
        if self.is_drained() && !was_drained {
            events.push(Event::Drained);
        }
        has_tokens_back
    }

    /// The short way out for a request from which nothing is learned: its slot returns, if that is all there is to give back
    /// and nobody waits for the last one to end.
    ///
    /// `false` says that nothing was done: [`settle`](Self::settle) is to be asked, and where this does it, it would have done
    /// the same (a property says so).
    #[inline]
    pub fn leave_plain(&mut self, charge: &Charge) -> bool {
        let is_plain = charge.holds_slot_alone() && !self.lifecycle.is_closing();
        if is_plain {
            self.slots.give_back(1);
        }
        is_plain
    }

    /// Learns from an outcome without ending anything: part of a batch, or a request that had no permit.
    ///
    /// Without a charge the outcome counts as one of the current generation.
    pub fn record(
        &mut self,
        plan: &Plan,
        charge: Option<&Charge>,
        outcome: Outcome,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        self.see(plan, now);
        self.count_malformed(outcome);
        if outcome.kind != Kind::Ignored {
            self.learn(plan, charge, outcome, waiting, events);
        }
        // A request without a permit has reserved nothing: what it used is booked as it is told.
        if let (None, Some(spent), Some(budget)) = (charge, outcome.spent, &plan.draft.budget) {
            self.budget.take(budget, spent.tokens, self.latest, events);
        }
    }

    /// Books tokens that were used without having been asked for.
    pub fn record_tokens(&mut self, plan: &Plan, tokens: u64, now: Instant, events: &mut Vec<Event>) {
        self.see(plan, now);
        if let Some(budget) = &plan.draft.budget {
            self.budget.take(budget, tokens, self.latest, events);
        }
    }

    /// Counts a completion for which no attempt was final: the last one was to be tried again, and could not be.
    pub fn complete(&mut self, plan: &Plan, events: &mut Vec<Event>) {
        if plan.draft.total.is_some() {
            self.progress.get_or_insert_default().complete_unmeasured();
            self.tell_milestone(plan, events);
        }
    }

    /// A delay of `backoff` after the attempt numbered `attempt`, by the throttle's own chance.
    pub fn delay(&mut self, backoff: &Backoff, attempt: u32) -> Duration {
        backoff.delay(attempt, &mut self.random)
    }

    /// Takes back an admission that never went out: it returns whole, entry in pace and rate included.
    pub fn undo(&mut self, plan: &Plan, charge: Charge, now: Instant, events: &mut Vec<Event>) {
        if let (true, Some(pace)) = (charge.holds.has(Holds::PACE), &mut self.pace) {
            pace.undo(charge.entered);
        }
        if let (true, Some(shape)) = (charge.holds.has(Holds::RATE), self.feedback.shape(plan)) {
            self.rate.give_back(shape);
        }
        self.admitted -= 1;
        self.asked_in_vain += 1;
        let ending = Ending { charge, reported: None, outcome: Outcome::ignored() };
        self.settle(plan, ending, 0, now, events);
    }

    /// However it went: what a header says badly is no less bad on a mistake.
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
            circuit.give_back(charge.generation);
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
        used < estimate
    }

    /// The circuit, the controller, the pause and the progress hear of it, in this order. It is counted first, of
    /// whatever generation it is.
    fn learn(
        &mut self,
        plan: &Plan,
        charge: Option<&Charge>,
        outcome: Outcome,
        waiting: u32,
        events: &mut Vec<Event>,
    ) {
        let origin = match charge {
            Some(charge) => Origin {
                generation: charge.generation,
                bytes: charge.cost.bytes,
                latency: Some(outcome.latency.unwrap_or_else(|| self.latest.since(charge.entered))),
            },
            None => Origin {
                generation: self.generation,
                bytes: outcome.spent.map_or(0, |spent| spent.bytes),
                latency: outcome.latency,
            },
        };
        if plan.settles_timed() {
            self.observed.get_or_insert_default().note(outcome, origin.latency);
        }
        // Before the circuit speaks: a trip begins a new generation, and this outcome is of the old one.
        let is_past = charge.is_some_and(Charge::is_past);
        let is_current = origin.generation >= self.generation && !is_past;
        let circuit = self.tell_circuit(plan, origin.generation, outcome, events);
        self.tell_controller(plan, is_current, outcome.kind, origin.latency, waiting, events);
        if circuit == CircuitChange::Changed {
            self.rest_while_open(plan);
        }
        self.tell_pause(plan, origin.bytes, outcome, waiting, events);
        self.tell_progress(plan, origin.latency.unwrap_or_default(), outcome, events);
    }

    fn tell_circuit(
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
            // A far side that says when to come back is alive.
            Kind::Overload if outcome.retry_after.is_some() => CircuitChange::None,
            Kind::Failure | Kind::Overload => circuit.failure(limits, generation, self.latest, events),
            Kind::Ignored => CircuitChange::None,
        };
        if change == CircuitChange::Changed {
            self.generation = self.generation.saturating_add(1);
            circuit.begin(self.generation);
        }
        change
    }

    fn tell_controller(
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
        // Those in line may wait for anything: what moves the rate counts those whom the rate itself held back.
        let has_demand = self.held_back || (waiting > 0 && self.feedback.rate().is_none());
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
        // Whoever was held back before this step says nothing of the limits after it.
        self.held_back &= advice.is_none();
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

    fn tell_pause(
        &mut self,
        plan: &Plan,
        bytes: u64,
        outcome: Outcome,
        waiting: u32,
        events: &mut Vec<Event>,
    ) {
        let by_size = match (outcome.kind, &plan.draft.pause.sizes) {
            (Kind::Overload, Some(rule)) if bytes <= rule.small_max => Some(rule.small),
            (Kind::Overload, Some(rule)) => Some(rule.large),
            _ => None,
        };
        if let Some(span) = outcome.retry_after.max(by_size) {
            // Others may say what they like: a hint is capped. A hand is not.
            let max = plan.draft.pause.max;
            if span > max {
                events.push(Event::PauseCapped { asked: span, capped: max });
            }
            self.pause_for(span.min(max), waiting, events);
        }
    }

    fn tell_progress(&mut self, plan: &Plan, latency: Duration, outcome: Outcome, events: &mut Vec<Event>) {
        if plan.draft.total.is_some() && !outcome.retried {
            self.progress.get_or_insert_default().complete(latency);
            self.tell_milestone(plan, events);
        }
    }

    fn tell_milestone(&mut self, plan: &Plan, events: &mut Vec<Event>) {
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

    /// The rate was `from`, and is now what the controller or `plan` says: what is in its bucket stays.
    pub(super) fn reshape_rate(&mut self, plan: &Plan, from: Option<Shape>) {
        match (from, self.feedback.shape(plan)) {
            (Some(from), Some(to)) if from != *to => {
                // While it rests nothing accrues: the level of now is the level at the end of that.
                self.rate.tune(&from, to, self.rests_until(self.latest));
            }
            // What an earlier rate was owed is counted in its own units, and means nothing to this one.
            (None, Some(_)) => self.rate = RateGate::full(),
            _ => {}
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
