//! Settling: returns what a request holds, records what it used, and passes its outcome on to `learn.rs`.
//!
//! This file implements the table in [`outcome`](crate::outcome), row by row.

use std::time::Duration;

use super::gates::Gates;
use super::named::Used;
use crate::backoff::Backoff;
use crate::cost::{Charge, Cost, DIMENSIONS, Dispatch, Holds};
use crate::event::Event;
use crate::feedback::Feedback;
use crate::feedback::headers::Dimension;
use crate::outcome::{Kind, Outcome};
use crate::plan::Plan;
use crate::time::Instant;

/// The end of a request.
#[derive(Debug)]
pub struct Ending<'a> {
    /// What the request took.
    pub charge: Charge,
    /// Tokens reported as used while it ran, each time to [`Gates::spend`].
    pub reported: Option<Cost>,
    /// Its outcome, which is large to copy.
    pub outcome: &'a Outcome,
}

/// The origin of an outcome.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin {
    pub(super) generation: u32,
    pub(super) bytes: u64,
    pub(super) latency: Option<Duration>,
    /// Whether the request bypassed the gates.
    pub(super) is_bypassed: bool,
    /// When the work started.
    pub(super) sent_at: Instant,
    pub(super) sent: Dispatch,
    /// Units sent before it, per dimension: the low 32 bits.
    pub(super) before: [u32; DIMENSIONS],
    /// Units per dimension that were counted as sent with it.
    pub(super) units: [u64; DIMENSIONS],
}

impl Origin {
    pub(super) fn of(charge: &Charge, outcome: &Outcome, now: Instant) -> Self {
        // Outcomes after the first response are parts of a batch, which were not counted as sent.
        let is_part = charge.holds.has(Holds::ANSWERED) || !charge.is_counted_by_controller();
        Self {
            generation: charge.generation.get(),
            bytes: charge.bytes(),
            latency: Some(outcome.latency.unwrap_or_else(|| now.since(charge.sent_at()))),
            is_bypassed: charge.is_bypassed(),
            sent_at: charge.sent_at(),
            sent: if is_part { Dispatch { cohort: 0, ..charge.sent } } else { charge.sent },
            before: charge.sent_before(),
            units: if is_part { [0; DIMENSIONS] } else { charge.cost().estimated() },
        }
    }

    /// The origin of an outcome without a permit, which counts as current.
    fn without_permit(outcome: &Outcome, generation: u32, in_flight: u32, now: Instant) -> Self {
        Self {
            generation,
            bytes: outcome.spent.map_or(0, |spent| spent.bytes),
            latency: outcome.latency,
            is_bypassed: false,
            sent_at: now,
            sent: Dispatch { in_flight: u16::try_from(in_flight).unwrap_or(u16::MAX), ..Dispatch::default() },
            before: [0; DIMENSIONS],
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
        ending: Ending<'_>,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> bool {
        let Ending { charge, reported, outcome } = ending;
        self.advance_to(plan, now);
        let was_drained = self.is_drained();
        self.count_malformed(outcome.malformed);
        if outcome.kind == Kind::Ignored {
            self.learn_ignored(plan, &charge, outcome, events);
        } else if plan.settles_timed() || outcome.has_hint() {
            let from = Origin::of(&charge, outcome, self.latest);
            self.learn(plan, from, outcome, waiting, events);
        }
        // The last outcome of a request that was answered before reports only its use.
        if outcome.kind != Kind::Ignored || charge.holds.has(Holds::ANSWERED) {
            self.add_used(plan, Used::of(outcome, reported), charge.cost());
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

    /// Books what a request in flight reports beyond what it has reserved, so that it counts at once. In total it had
    /// reported `before`, and now `reported`. Budgets added since it entered count all of it when it ends.
    pub fn spend(
        &mut self,
        plan: &Plan,
        charge: &Charge,
        (before, reported): (Option<Cost>, Cost),
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        self.advance_to(plan, now);
        let booked = |counts, reserved| {
            let total = Used::booked(Some(reported), counts, reserved);
            total.saturating_sub(Used::booked(before, counts, reserved))
        };
        if let (Some(budget), true) = (&plan.draft.budget, charge.holds.has(Holds::TOKENS)) {
            let more = booked(Dimension::Tokens, charge.tokens_held());
            self.budget.take(budget, more, self.latest, events);
        }
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            named.spend(plan, charge, booked, self.latest, events);
        }
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
        self.count_malformed(outcome.malformed);
        let has_charge = charge.is_some();
        if outcome.kind == Kind::Ignored {
            if let Some(charge) = charge.filter(|_| outcome.is_answer) {
                self.learn_ignored(plan, charge, &outcome, events);
                // It has left its cohort.
                charge.sent.cohort = 0;
            }
        } else {
            let origin = match charge {
                Some(charge) => {
                    let origin = Origin::of(charge, &outcome, self.latest);
                    charge.holds.add(Holds::ANSWERED);
                    origin
                }
                None => {
                    Origin::without_permit(&outcome, self.generation.get(), self.in_flight(), self.latest)
                }
            };
            self.learn(plan, origin, &outcome, waiting, events);
            if !has_charge {
                self.add_used(plan, Used::of(&outcome, None), Cost::request());
            }
        }
        // A request without a permit has reserved nothing, so its reported tokens are recorded.
        if let (false, Some(spent)) = (has_charge, outcome.spent) {
            self.take_tokens(plan, spent, events);
        }
    }

    /// Records tokens that were used without a request for them.
    pub fn record_tokens(&mut self, plan: &Plan, spent: Cost, now: Instant, events: &mut Vec<Event>) {
        self.advance_to(plan, now);
        self.take_tokens(plan, spent, events);
    }

    fn take_tokens(&mut self, plan: &Plan, spent: Cost, events: &mut Vec<Event>) {
        if let Some(budget) = &plan.draft.budget {
            self.budget.take(budget, spent.total_tokens(), self.latest, events);
        }
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            named.record(plan, spent, self.latest, events);
        }
    }

    /// Counts what a request of this cost has used, for the estimate of the time left.
    #[inline]
    fn add_used(&mut self, plan: &Plan, used: Used, cost: Cost) {
        if plan.draft.total.is_some() {
            self.progress.get_or_insert_default().add_used(used.estimated(cost));
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
            self.rate.give_back(shape, charge.cost().request_count());
        }
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            named.undo(plan, &charge);
        }
        if let Feedback::Auto(auto) = &mut self.feedback
            && charge.is_counted_by_controller()
        {
            auto.undo(charge.sent_at(), charge.cost());
        }
        self.admitted -= 1;
        self.not_admitted += 1;
        let ending = Ending { charge, reported: None, outcome: &Outcome::ignored() };
        self.settle(plan, ending, 0, now, events);
    }

    /// Counts malformed headers for every outcome, including ignored ones.
    #[inline]
    fn count_malformed(&mut self, values: u16) {
        self.headers_malformed = self.headers_malformed.saturating_add(u32::from(values));
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
        reported: Option<Cost>,
        outcome: &Outcome,
        events: &mut Vec<Event>,
    ) -> bool {
        let estimate = charge.tokens_held();
        self.budget.unreserve(estimate);
        let mut has_units_back = false;
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            has_units_back = named.settle(plan, charge, (outcome, reported), self.latest, events);
        }
        let Some(budget) = &plan.draft.budget else { return has_units_back };
        let used = Used::of(outcome, reported).units(Dimension::Tokens, estimate);
        let reported = reported.filter(|_| charge.holds.has(Holds::TOKENS));
        let booked = Used::booked(reported, Dimension::Tokens, estimate);
        self.budget.settle(budget, booked, used, charge.entered, self.latest, events);
        has_units_back || used < booked
    }
}

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
