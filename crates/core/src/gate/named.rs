//! Named rates and budgets: further gates of the same kinds, each with its name.
//!
//! The plan lists them; the state here is in the same order. A request takes from all of them or from none, and
//! gives back only to those that existed when it entered: each remembers the generation that it began with.

use super::budget::BudgetGate;
use super::gates::later;
use super::rate::{RateGate, SuspensionKind};
use crate::bucket::Shape;
use crate::cost::{Charge, Cost, DIMENSIONS, Holds};
use crate::event::Event;
use crate::feedback::headers::Dimension;
use crate::outcome::{Kind, Outcome};
use crate::plan::{Budget, NamedPlan};
use crate::refused::Refused;
use crate::snapshot::LimitView;
use crate::time::Instant;
use crate::verdict::{Gate, GateName};

/// The state of the named rates and budgets.
#[derive(Debug)]
pub(super) struct NamedGates {
    rates: Vec<Since<RateGate>>,
    budgets: Vec<Since<BudgetGate>>,
}

/// A gate and the generation of the first request that took from it.
#[derive(Debug)]
struct Since<G> {
    generation: u32,
    gate: G,
}

impl<G> Since<G> {
    /// Whether a charge that holds units of the named gates took some from this one.
    const fn has_lent(&self, charge: &Charge) -> bool {
        charge.generation.get() >= self.generation
    }
}

impl NamedPlan {
    /// Why a request is refused immediately: it costs more than a rate or a budget ever holds.
    pub(super) fn refuses(&self, cost: Cost) -> Option<Refused> {
        let too_many = |(name, shape): &(GateName, Shape)| {
            let (requested, capacity) = (cost.request_count(), shape.burst());
            (requested > capacity).then_some((*name, requested, capacity))
        };
        let too_large = |(name, budget): &(GateName, Budget)| {
            let requested = cost.units(budget.counts);
            BudgetGate::refuses(budget, requested).map(|_| (*name, requested, budget.tokens))
        };
        let refusal =
            self.rates.iter().find_map(too_many).or_else(|| self.budgets.iter().find_map(too_large));
        refusal.map(|(name, requested, capacity)| Refused::AboveCapacity {
            by: Gate::Named(name),
            requested,
            capacity,
        })
    }
}

impl NamedGates {
    pub(super) fn new(plan: &NamedPlan, generation: u32) -> Self {
        let rates = plan.rates.iter().map(|_| Since { generation, gate: RateGate::full() });
        let budgets = plan.budgets.iter().map(|_| Since { generation, gate: BudgetGate::default() });
        Self { rates: rates.collect(), budgets: budgets.collect() }
    }

    fn rates<'a>(
        &'a self,
        plan: &'a NamedPlan,
    ) -> impl Iterator<Item = (&'a RateGate, &'a (GateName, Shape))> {
        self.rates.iter().map(|rate| &rate.gate).zip(&plan.rates)
    }

    fn budgets<'a>(
        &'a self,
        plan: &'a NamedPlan,
    ) -> impl Iterator<Item = (&'a BudgetGate, &'a (GateName, Budget))> {
        self.budgets.iter().map(|budget| &budget.gate).zip(&plan.budgets)
    }

    /// The later of `latest` and the rates' bounds, which no return can lower.
    pub(super) fn firm_at(
        &self,
        plan: &NamedPlan,
        (cost, ahead): (Cost, u32),
        now: Instant,
        latest: Option<(Gate, Instant)>,
    ) -> Option<(Gate, Instant)> {
        self.rates(plan).fold(latest, |latest, (gate, (name, shape))| {
            let at = gate.ready_at(shape, u64::from(ahead), cost.request_count(), now);
            later(latest, Gate::Named(*name), at, now)
        })
    }

    /// The later of `latest` and the times at which the budgets admit, if nothing is returned before.
    pub(super) fn ready_at(
        &self,
        plan: &NamedPlan,
        cost: Cost,
        now: Instant,
        latest: Option<(Gate, Instant)>,
    ) -> Option<(Gate, Instant)> {
        self.budgets(plan).fold(latest, |latest, (gate, (name, budget))| {
            later(latest, Gate::Named(*name), gate.ready_at(budget, cost.units(budget.counts), now), now)
        })
    }

    /// The later of `latest` and the budgets' lower bounds: requests in flight may return their reservations.
    pub(super) fn bound_at(
        &self,
        plan: &NamedPlan,
        cost: Cost,
        now: Instant,
        latest: Option<(Gate, Instant)>,
    ) -> Option<(Gate, Instant)> {
        self.budgets(plan).fold(latest, |latest, (gate, (name, budget))| {
            later(latest, Gate::Named(*name), gate.bound_at(budget, cost.units(budget.counts), now), now)
        })
    }

    /// Takes from all of them. The caller has checked that all admit.
    pub(super) fn take(
        &mut self,
        plan: &NamedPlan,
        charge: &mut Charge,
        cost: Cost,
        events: &mut Vec<Event>,
    ) {
        let now = charge.entered;
        for (rate, (_, shape)) in self.rates.iter_mut().zip(&plan.rates) {
            rate.gate.take(shape, cost.request_count(), now);
            charge.holds.add(Holds::NAMED_RATES);
        }
        for (budget, (_, limit)) in self.budgets.iter_mut().zip(&plan.budgets) {
            budget.gate.reserve(limit, cost.units(limit.counts), now, events);
            charge.holds.add(Holds::NAMED_BUDGETS);
        }
    }

    /// Returns the units of a request that was never sent to the rates.
    pub(super) fn undo(&mut self, plan: &NamedPlan, charge: &Charge) {
        if !charge.holds.has(Holds::NAMED_RATES) {
            return;
        }
        for (rate, (_, shape)) in self.rates.iter_mut().zip(&plan.rates) {
            if rate.has_lent(charge) {
                rate.gate.give_back(shape, charge.cost().request_count());
            }
        }
    }

    /// Books what a request in flight reports beyond what it has reserved: `booked` returns it for a kind of token and
    /// the reserved tokens of that kind.
    pub(super) fn spend(
        &mut self,
        plan: &NamedPlan,
        charge: &Charge,
        booked: impl Fn(Dimension, u64) -> u64,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        if !charge.holds.has(Holds::NAMED_BUDGETS) {
            return;
        }
        for (budget, (_, limit)) in self.budgets.iter_mut().zip(&plan.budgets) {
            if budget.has_lent(charge) {
                let more = booked(limit.counts, charge.cost().units(limit.counts));
                budget.gate.take(limit, more, now, events);
            }
        }
    }

    /// Replaces what a request reserved by what it used; returns whether units were returned.
    pub(super) fn settle(
        &mut self,
        plan: &NamedPlan,
        charge: &Charge,
        (outcome, reported): (&Outcome, Option<Cost>),
        now: Instant,
        events: &mut Vec<Event>,
    ) -> bool {
        let used = Used::of(outcome, reported);
        let (cost, holds) = (charge.cost(), charge.holds.has(Holds::NAMED_BUDGETS));
        let mut has_units_back = false;
        for (budget, (_, limit)) in self.budgets.iter_mut().zip(&plan.budgets) {
            let has_lent = holds && budget.has_lent(charge);
            let reserved = if has_lent { cost.units(limit.counts) } else { 0 };
            let booked = Used::booked(reported.filter(|_| has_lent), limit.counts, reserved);
            let used = used.units(limit.counts, reserved);
            budget.gate.unreserve(reserved);
            budget.gate.settle(limit, booked, used, charge.entered, now, events);
            has_units_back |= used < booked;
        }
        has_units_back
    }

    /// Records units that were used without a request for them.
    pub(super) fn record(&mut self, plan: &NamedPlan, spent: Cost, now: Instant, events: &mut Vec<Event>) {
        for (budget, (_, limit)) in self.budgets.iter_mut().zip(&plan.budgets) {
            budget.gate.take(limit, spent.units(limit.counts), now, events);
        }
    }

    /// Removes expired entries, and ends suspensions that are over.
    pub(super) fn advance(&mut self, plan: &NamedPlan, now: Instant) {
        for (rate, (_, shape)) in self.rates.iter_mut().zip(&plan.rates) {
            rate.gate.resume(Some(shape), now);
        }
        for (budget, (_, limit)) in self.budgets.iter_mut().zip(&plan.budgets) {
            budget.gate.prune(limit, now);
        }
    }

    /// Stops the refill of the rates until `until`: they are agreements with the upstream, and keep their level.
    pub(super) fn suspend_until(&mut self, plan: &NamedPlan, until: Instant, now: Instant) {
        for (rate, (_, shape)) in self.rates.iter_mut().zip(&plan.rates) {
            rate.gate.suspend_until(until, SuspensionKind::Frozen, Some(shape), now);
        }
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.rates.iter().any(|rate| rate.gate.is_suspended())
    }

    /// Whether units of any of them are used up or reserved.
    pub(super) fn is_busy(&self, plan: &NamedPlan, now: Instant) -> bool {
        self.rates.iter().any(|rate| !rate.gate.is_full(now))
            || self.budgets(plan).any(|(gate, (_, budget))| gate.used(budget, now) > 0)
    }

    /// The budgets, and how many tokens of each are used or reserved.
    pub(super) fn used<'a>(
        &'a self,
        plan: &'a NamedPlan,
        now: Instant,
    ) -> impl Iterator<Item = (&'a Budget, u64)> {
        self.budgets(plan).map(move |(gate, (_, budget))| (budget, gate.used(budget, now)))
    }

    pub(super) fn view(&self, plan: &NamedPlan, now: Instant) -> Vec<LimitView> {
        let rates = self.rates(plan).map(|(gate, (name, shape))| LimitView {
            name: *name,
            counts: Dimension::Requests,
            capacity: shape.burst(),
            available: gate.level(shape, now),
        });
        let budgets = self.budgets(plan).map(|(gate, (name, budget))| LimitView {
            name: *name,
            counts: budget.counts,
            capacity: budget.tokens,
            available: signed(budget.tokens).saturating_sub(signed(gate.used(budget, now))),
        });
        rates.chain(budgets).collect()
    }

    /// Follows a new plan: gates of the same name and kind keep their level.
    pub(super) fn retune(&mut self, old: &NamedPlan, new: &NamedPlan, generation: u32, now: Instant) {
        let mut rates: Vec<_> = self.rates.drain(..).zip(&old.rates).map(Some).collect();
        self.rates.extend(new.rates.iter().map(|(name, shape)| {
            let known = rates.iter_mut().find(|rate| matches!(rate, Some((_, (known, _))) if known == name));
            match known.and_then(Option::take) {
                Some((mut rate, (_, from))) => {
                    if from != shape {
                        rate.gate.tune(from, shape, now);
                    }
                    rate
                }
                None => Since { generation, gate: RateGate::full() },
            }
        }));
        let mut budgets: Vec<_> = self.budgets.drain(..).zip(&old.budgets).map(Some).collect();
        self.budgets.extend(new.budgets.iter().map(|(name, budget)| {
            let is_same = |(known, from): &(GateName, Budget)| known == name && from.counts == budget.counts;
            let known = budgets.iter_mut().find(|known| matches!(known, Some((_, known)) if is_same(known)));
            match known.and_then(Option::take) {
                Some((budget, _)) => budget,
                None => Since { generation, gate: BudgetGate::default() },
            }
        }));
    }
}

impl NamedPlan {
    /// Whether this plan has a gate that `old` has not: requests in flight hold nothing of it.
    pub(super) fn adds_to(&self, old: Option<&Self>) -> bool {
        let Some(old) = old else { return true };
        let has_rate = |name: &GateName| old.rates.iter().any(|(known, _)| known == name);
        let has_budget = |(name, budget): &(GateName, Budget)| {
            old.budgets.iter().any(|(known, from)| known == name && from.counts == budget.counts)
        };
        !self.rates.iter().all(|(name, _)| has_rate(name)) || !self.budgets.iter().all(has_budget)
    }
}

/// What a request used of its estimate.
#[derive(Debug, Clone, Copy)]
pub(super) enum Used {
    /// As much as estimated.
    Estimate,
    /// This much.
    Spent(Cost),
}

impl Used {
    /// What an outcome and the tokens reported before it say.
    pub(super) const fn of(outcome: &Outcome, reported: Option<Cost>) -> Self {
        match (outcome.kind, outcome.spent, reported) {
            (_, Some(spent), _) | (_, None, Some(spent)) => Self::Spent(spent),
            (Kind::Success, None, None) => Self::Estimate,
            (Kind::Failure | Kind::Overload | Kind::Ignored, None, None) => Self::Spent(Cost::request()),
        }
    }

    /// Units booked in a dimension for a request in flight: what it reserved, or what it has reported if that is more.
    pub(super) fn booked(reported: Option<Cost>, counts: Dimension, reserved: u64) -> u64 {
        reported.map_or(reserved, |reported| Self::Spent(reported).units(counts, reserved).max(reserved))
    }

    /// Units used per dimension. A rate keeps what a request counted as, whatever it reports.
    pub(super) fn estimated(self, cost: Cost) -> [u64; DIMENSIONS] {
        let units = |counts| self.units(counts, cost.units(counts));
        let [tokens, input, output] =
            [Dimension::Tokens, Dimension::InputTokens, Dimension::OutputTokens].map(units);
        [cost.request_count(), tokens, input, output]
    }

    /// Units used in a dimension, of which `reserved` were estimated. Tokens of no kind say nothing about kinds: the
    /// estimate of a kind that was not reported stands.
    pub(super) const fn units(self, counts: Dimension, reserved: u64) -> u64 {
        match (self, counts) {
            (Self::Estimate, _) => reserved,
            (Self::Spent(spent), Dimension::InputTokens | Dimension::OutputTokens)
                if spent.may_have_more(counts) =>
            {
                reserved
            }
            (Self::Spent(spent), _) => spent.units(counts),
        }
    }
}

fn signed(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[path = "named_tests.rs"]
mod tests;
