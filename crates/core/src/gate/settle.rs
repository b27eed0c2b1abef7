//! The way back: what is held returns, what was used is booked, and the outcome is learned from.
//!
//! This file is the outcome table of [`outcome`](crate::outcome), row by row.

use std::time::Duration;

use super::circuit::Change as CircuitChange;
use super::gates::Gates;
use crate::backoff::Backoff;
use crate::bucket::Shape;
use crate::cost::{Charge, DIMENSIONS, Holds, Sent};
use crate::event::{Change, Event};
use crate::feedback::auto::Answer;
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
    /// Whether it went past the gates.
    is_past: bool,
    /// When the work started.
    sent_at: Instant,
    sent: Sent,
    /// Units per dimension that were counted as sent with it.
    units: [u64; DIMENSIONS],
}

impl Origin {
    fn of(charge: &Charge, outcome: Outcome, now: Instant) -> Self {
        // After its answer only parts of it follow, which were not counted as sent.
        let is_part = charge.holds.has(Holds::ANSWERED) || !charge.is_counted_by_controller();
        Self {
            generation: charge.generation.get(),
            bytes: charge.cost.bytes,
            latency: Some(outcome.latency.unwrap_or_else(|| now.since(charge.sent_at()))),
            is_past: charge.is_past(),
            sent_at: charge.sent_at(),
            sent: if is_part { Sent { cohort: 0, ..charge.sent } } else { charge.sent },
            units: if is_part { [0; DIMENSIONS] } else { charge.cost.units() },
        }
    }

    /// Of a request that had no permit: it counts as one of the moment.
    fn apart(outcome: Outcome, generation: u32, in_flight: u32, now: Instant) -> Self {
        Self {
            generation,
            bytes: outcome.spent.map_or(0, |spent| spent.bytes),
            latency: outcome.latency,
            is_past: false,
            sent_at: now,
            sent: Sent { in_flight: u16::try_from(in_flight).unwrap_or(u16::MAX), ..Sent::default() },
            units: [0; DIMENSIONS],
        }
    }
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

    /// Learns from an outcome without ending anything: an answer whose body is still to come, part of a batch, or a request that
    /// had no permit.
    ///
    /// The first outcome of a charge is the answer to its request. Without a charge it counts as one of the current generation.
    pub fn record(
        &mut self,
        plan: &Plan,
        charge: Option<&mut Charge>,
        outcome: Outcome,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        self.see(plan, now);
        self.count_malformed(outcome);
        let has_charge = charge.is_some();
        if outcome.kind != Kind::Ignored {
            let origin = match charge {
                Some(charge) => {
                    let origin = Origin::of(charge, outcome, self.latest);
                    charge.holds.add(Holds::ANSWERED);
                    origin
                }
                None => Origin::apart(outcome, self.generation.get(), self.in_flight(), self.latest),
            };
            self.learn(plan, origin, outcome, waiting, events);
        }
        // A request without a permit has reserved nothing: what it used is booked as it is told.
        if let (false, Some(spent), Some(budget)) = (has_charge, outcome.spent, &plan.draft.budget) {
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
        if let Feedback::Auto(auto) = &mut self.feedback
            && charge.is_counted_by_controller()
        {
            auto.undo(charge.sent_at(), charge.cost);
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
        used < estimate
    }

    /// The circuit, the controller, the pause and the progress learn of it, in this order. It is counted first, of
    /// whatever generation it is.
    fn learn(
        &mut self,
        plan: &Plan,
        origin: Origin,
        outcome: Outcome,
        waiting: u32,
        events: &mut Vec<Event>,
    ) {
        if plan.settles_timed() {
            self.observed.get_or_insert_default().note(outcome, origin.latency);
        }
        // Before the circuit changes: a trip begins a new generation, and this outcome is of the old one.
        let is_current = origin.generation >= self.generation.get() && !origin.is_past;
        let circuit = self.tell_circuit(plan, origin.generation, outcome, events);
        let binds_all = if plan.auto.is_some() {
            self.tell_auto(plan, origin, outcome, events)
        } else {
            self.tell_controller(plan, is_current, outcome.kind, origin.latency, waiting, events);
            true
        };
        if circuit == CircuitChange::Changed {
            self.update_rest(plan);
        }
        self.tell_pause(plan, origin.bytes, outcome, binds_all, waiting, events);
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
            // `Auto` answers rejections itself, and an upstream that names a time to return is alive. One that says "now" again
            // and again is not.
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

    /// `Auto` learns from an outcome; answers whether a hint of it stops all requests.
    fn tell_auto(&mut self, plan: &Plan, origin: Origin, outcome: Outcome, events: &mut Vec<Event>) -> bool {
        let in_flight = self.in_flight();
        let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) else { return true };
        if origin.is_past {
            return false;
        }
        let answer = Answer {
            sent_at: origin.sent_at,
            sent: origin.sent,
            units: origin.units,
            outcome: &outcome,
            latency: origin.latency,
            in_flight: in_flight.max(1),
            now: self.latest,
        };
        let advice = auto.learn(limits, &answer, &mut self.random);
        self.slots_limit = auto.slots(limits);
        auto.report(limits, advice, self.latest, events);
        // A hint on an accepted request is about all of them: the quota is empty, or the upstream asked for a pause.
        advice.stops_all || outcome.kind != Kind::Overload
    }

    fn tell_pause(
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
            // Others may say what they like: a hint is capped. A hand is not.
            let max = plan.draft.pause.max;
            if span > max {
                events.push(Event::PauseCapped { asked: span, capped: max });
            }
            self.pause_for(plan, span.min(max), waiting, events);
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
            (Some(from), Some(to)) if from != *to => self.rate.tune(&from, to, self.latest),
            // What an earlier rate was owed is counted in its own units, and means nothing to this one.
            (None, Some(_)) => self.rate.refill(),
            _ => {}
        }
    }

    /// Slots are where `Auto` has them, if it moves them.
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
