//! All gates of one throttle: evaluates every gate, then takes from every gate.
//!
//! Nothing is taken unless every gate admits; the [`Charge`] records the parts taken. Refusals take
//! precedence over waits, and the latest of the timed gates decides, so that a request is evaluated again
//! once and not once per gate.

use std::num::NonZero;

use super::budget::BudgetGate;
use super::circuit::CircuitGate;
use super::lifecycle::Lifecycle;
use super::named::NamedGates;
use super::pace::PaceGate;
use super::pause::PauseGate;
use super::pool::{Overdraw, Pool};
use super::rate::RateGate;
use crate::cost::{Admission, Charge, Cost, Holds};
use crate::event::Event;
use crate::feedback::Feedback;
use crate::feedback::auto::ASK_AGAIN;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::random::Random;
use crate::refused::Refused;
use crate::snapshot::Phase;
use crate::statistics::Statistics;
use crate::time::Instant;
use crate::verdict::{Gate, Verdict, Wait};

/// The mutable state of all gates of one throttle. The [`Plan`] holds the limits.
///
/// ```
/// use tidegate_core::{cost::Cost, gate::Gates, plan::{Draft, Slots}, random::Random, time::Instant};
///
/// let plan = Draft { slots: Some(Slots::fixed(1)), ..Draft::default() }.check()?;
/// let mut gates = Gates::new(&plan, Random::seeded(1));
/// let mut events = Vec::new();
/// let first = gates.admit(&plan, Cost::request(), 0, Instant::ZERO, &mut events);
/// let second = gates.admit(&plan, Cost::request(), 0, Instant::ZERO, &mut events);
/// assert!(first.is_ok() && second.is_err());
/// # Ok::<(), tidegate_core::plan::InvalidPlan>(())
/// ```
#[derive(Debug)]
// Fields in fast-path order, the fields of a plain rate first, in 40 bytes: every extra cache line is a
// likely miss. Together with the shell's fields before them they span two cache lines at any alignment.
#[repr(C)]
pub struct Gates {
    pub(super) lifecycle: Lifecycle,
    /// Whether all requests bypass the gates.
    pub(super) is_bypassed: bool,
    /// Whether a limit of the controller has delayed a caller since its last step. This also counts a single
    /// caller that retries and never waits in the queue.
    pub(super) has_demand: bool,
    /// Whether a pause or suspension is set; caches `pause` in the first cache line.
    pub(super) has_pause: bool,
    /// Incremented by every cut and every change of the circuit; each charge carries the generation it
    /// entered in.
    pub(super) generation: NonZero<u32>,
    pub(super) rate: RateGate,
    /// The latest clock reading: time never runs backwards here.
    pub(super) latest: Instant,
    pub(super) admitted: u64,
    /// Slots as tuned; `u32::MAX` is unlimited.
    pub(super) slots_limit: u32,
    /// Malformed or implausible header values.
    pub(super) headers_malformed: u32,
    pub(super) slots: Pool,
    pub(super) pause: PauseGate,
    // From here on boxed or optional: most throttles use few of these.
    pub(super) circuit: Option<Box<CircuitGate>>,
    pub(super) recovery: Pool,
    pub(super) bytes: Pool,
    pub(super) pace: Option<Box<PaceGate>>,
    pub(super) budget: BudgetGate,
    pub(super) named: Option<Box<NamedGates>>,
    pub(super) feedback: Feedback,
    /// Allocated with the first completion.
    pub(super) progress: Option<Box<Progress>>,
    /// Allocated with the first outcome learned from.
    pub(super) statistics: Option<Box<Statistics>>,
    pub(super) random: Random,
    /// Evaluations that did not admit, or whose admission was undone.
    pub(super) not_admitted: u64,
}

impl Gates {
    /// Creates gates in their initial state.
    pub fn new(plan: &Plan, random: Random) -> Self {
        Self {
            lifecycle: Lifecycle::Open,
            is_bypassed: false,
            has_pause: false,
            circuit: plan.draft.circuit.as_ref().map(|circuit| Box::new(CircuitGate::new(circuit, 0))),
            pause: PauseGate::default(),
            slots_limit: plan.draft.slots.map_or(u32::MAX, |slots| slots.start),
            slots: Pool::default(),
            recovery: Pool::default(),
            bytes: Pool::default(),
            pace: plan.draft.pace.map(|pace| Box::new(PaceGate::new(pace.interval_min))),
            rate: RateGate::full(),
            budget: BudgetGate::default(),
            named: plan.named.as_ref().map(|named| Box::new(NamedGates::new(named, 1))),
            feedback: Feedback::new(plan),
            progress: None,
            statistics: None,
            generation: NonZero::<u32>::MIN,
            has_demand: false,
            headers_malformed: 0,
            random,
            latest: Instant::ZERO,
            admitted: 0,
            not_admitted: 0,
        }
    }

    /// Whether decisions need the time: a plan without timed gates needs it only during a pause and its tail.
    pub const fn needs_time(&self, plan: &Plan) -> bool {
        plan.is_timed() || self.has_pause
    }

    /// The latest clock reading.
    pub const fn latest(&self) -> Instant {
        self.latest
    }

    /// Requests admitted since the start.
    pub const fn admitted(&self) -> u64 {
        self.admitted
    }

    /// Requests in flight.
    #[expect(clippy::cast_possible_truncation, reason = "each takes one of at most u32::MAX slots")]
    pub const fn in_flight(&self) -> u32 {
        self.slots.held() as u32
    }

    /// Evaluates every gate for a request at the head of the queue, without changing any state.
    #[inline]
    pub fn ask(&self, plan: &Plan, cost: Cost, now: Instant) -> Verdict {
        if let Some(refused) = self.refuses(plan, cost, now) {
            return Verdict::Refuse(refused);
        }
        let now = now.max(self.latest);
        if self.is_bypassed {
            return Verdict::Admit;
        }
        let pool = self.full_pool(plan, now);
        let timed = self.ready_at(plan, cost, now);
        if pool.is_none() && timed.is_none() {
            return Verdict::Admit;
        }
        self.wait(plan, pool, timed, now)
    }

    /// The verdict for a request that a pool or a timed gate delays.
    #[cold]
    fn wait(
        &self,
        plan: &Plan,
        pool: Option<(Gate, Option<Instant>)>,
        timed: Option<(Gate, Instant)>,
        now: Instant,
    ) -> Verdict {
        let floor = self.firm_at(plan, 0, now).map_or(now, |(_, at)| at);
        // A pace rises while callers wait, so the head of the queue is evaluated again early.
        let timed = timed.map(|(by, at)| match (&self.feedback, by) {
            (Feedback::Auto(_), Gate::Rate | Gate::Budget) => (by, at.min(now + ASK_AGAIN)),
            _ => (by, at),
        });
        Verdict::Wait(match (pool, timed) {
            (Some((by, until)), timed) => {
                let latest = timed.map_or(now, |(_, at)| at);
                Wait { by, until: until.map(|until| until.max(latest)), floor }
            }
            (None, Some((by, until))) => Wait { by, until: Some(until), floor },
            (None, None) => unreachable!("no gate delays the request"),
        })
    }

    /// Evaluates every gate, and takes from every gate if all admit.
    ///
    /// `waiting` callers remain in the queue; after a pause they are admitted spread out.
    ///
    /// # Errors
    /// The verdict, if it is not `Admit`; nothing was taken.
    #[inline]
    pub fn admit(
        &mut self,
        plan: &Plan,
        cost: Cost,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<Charge, Verdict> {
        self.advance_to(plan, now);
        if self.is_bypassed && !self.lifecycle.is_closing() {
            return Ok(self.admit_bypassed(plan, cost));
        }
        let verdict = self.ask(plan, cost, now);
        match verdict {
            Verdict::Admit => return Ok(self.take(plan, cost, waiting, events)),
            Verdict::Wait(Wait { by, .. }) => self.hold(plan, by, cost),
            Verdict::Refuse(_) => {}
        }
        self.not_admitted += 1;
        Err(verdict)
    }

    /// Records that a caller waits at a gate, which is demand for the controller's limits.
    fn hold(&mut self, plan: &Plan, by: Gate, cost: Cost) {
        match &mut self.feedback {
            Feedback::Auto(auto) => {
                if let Some(limits) = &plan.auto {
                    auto.hold(limits, by, cost, self.latest);
                }
            }
            feedback => self.has_demand |= feedback.moves(by),
        }
    }

    /// Fast path for a [plain](Cost::is_plain) cost under plans with only slots and a rate, without a pause, if both
    /// have capacity.
    ///
    /// On `None` call [`admit`](Self::admit). Whenever this admits, `admit` would have returned the same
    /// charge (checked by a property test).
    #[inline]
    pub fn admit_plain(&mut self, plan: &Plan, now: Instant) -> Option<Admission> {
        let now = now.max(self.latest);
        if !plan.is_plain()
            || self.has_pause
            || self.lifecycle.is_closing()
            || self.is_bypassed
            || (plan.counts_in_flight() && self.slots.held() >= u64::from(self.slots_limit))
        {
            return None;
        }
        let mut holds = Holds::default();
        if let Some(shape) = &plan.rate {
            if !self.rate.try_take(shape, now) {
                return None;
            }
            holds.add(Holds::RATE);
        }
        if plan.counts_in_flight() {
            self.slots.take(1);
            holds.add(Holds::SLOT);
        }
        self.latest = now;
        self.admitted += 1;
        Some(Admission::new(now, self.generation, holds))
    }

    /// The latest of the timed gates' lower bounds, if it is after `now`, with its gate.
    ///
    /// A request behind `ahead` others cannot enter earlier than this, whatever is returned. Tokens requested
    /// by those ahead do not count: they are estimates, and may be returned as soon as they are reserved. `Auto` adds
    /// the earliest time that it expects, by headers or a quota that it has measured.
    pub fn bound_at(&self, plan: &Plan, cost: Cost, ahead: u32, now: Instant) -> Option<(Gate, Instant)> {
        let mut latest = self.paced_at(plan, cost, ahead, now);
        if let (Feedback::Auto(auto), Some(limits)) = (&self.feedback, &plan.auto) {
            let (by, at) = auto.bound_at(limits, cost, ahead, now);
            latest = later(latest, by, at, now);
        }
        if let Some(budget) = &plan.draft.budget {
            let at = self.budget.bound_at(budget, cost.total_tokens(), now);
            latest = later(latest, Gate::Budget, at, now);
        }
        match (&self.named, &plan.named) {
            (Some(named), Some(plan)) => named.bound_at(plan, cost, now, latest),
            _ => latest,
        }
    }

    /// When the timed gates admit a request at the head of the queue, if nothing is returned before.
    #[inline]
    fn ready_at(&self, plan: &Plan, cost: Cost, now: Instant) -> Option<(Gate, Instant)> {
        let mut latest = self.paced_at(plan, cost, 0, now);
        if let (Feedback::Auto(auto), Some(limits)) = (&self.feedback, &plan.auto) {
            let (by, at) = auto.ready_at(limits, cost, now);
            latest = later(latest, by, at, now);
        }
        if let Some(budget) = &plan.draft.budget {
            let at = self.budget.ready_at(budget, cost.total_tokens(), now);
            latest = later(latest, Gate::Budget, at, now);
        }
        match (&self.named, &plan.named) {
            (Some(named), Some(plan)) => named.ready_at(plan, cost, now, latest),
            _ => latest,
        }
    }

    /// The bound from pause, pace and rate, which no return can lower at the current limits. A pace that `Auto` has
    /// learned is no such bound: only its rests are.
    #[inline]
    pub fn firm_at(&self, plan: &Plan, ahead: u32, now: Instant) -> Option<(Gate, Instant)> {
        self.paced_at(plan, Cost::request(), ahead, now)
    }

    /// Like [`firm_at`](Self::firm_at) for a request of this cost.
    #[inline]
    pub(super) fn paced_at(
        &self,
        plan: &Plan,
        cost: Cost,
        ahead: u32,
        now: Instant,
    ) -> Option<(Gate, Instant)> {
        let mut latest = later(None, Gate::Pause, self.pause.ready_at(), now);
        if let Some(pace) = &self.pace {
            latest = later(latest, Gate::Pace, pace.ready_at(u64::from(ahead)), now);
        }
        if let Some(shape) = self.feedback.shape(plan) {
            let at = self.rate.ready_at(shape, u64::from(ahead), cost.request_count(), now);
            latest = later(latest, Gate::Rate, at, now);
        }
        if let (Some(named), Some(plan)) = (&self.named, &plan.named) {
            latest = named.firm_at(plan, (cost, ahead), now, latest);
        }
        if let Feedback::Auto(auto) = &self.feedback {
            latest = later(latest, Gate::Rate, auto.rests_until(now), now);
        }
        latest
    }

    /// Why the request is refused immediately, whatever its deadline.
    #[inline]
    pub fn refuses(&self, plan: &Plan, cost: Cost, now: Instant) -> Option<Refused> {
        let latest = now.max(self.latest);
        // A clock that was set back has to catch up first.
        self.refusal(plan, cost, latest).map(|refused| refused.later(latest.since(now)))
    }

    #[inline]
    fn refusal(&self, plan: &Plan, cost: Cost, now: Instant) -> Option<Refused> {
        if self.lifecycle.is_closing() {
            return Some(Refused::Closed);
        }
        if self.is_bypassed {
            return None;
        }
        if let Some(budget) = &plan.draft.budget
            && let Some(refused) = BudgetGate::refuses(budget, cost.total_tokens())
        {
            return Some(refused);
        }
        if let Some(shape) = self.feedback.shape(plan)
            && cost.request_count() > shape.burst()
        {
            let (requested, capacity) = (cost.request_count(), shape.burst());
            return Some(Refused::AboveCapacity { by: Gate::Rate, requested, capacity });
        }
        if let Some(refused) = plan.named.as_ref().and_then(|named| named.refuses(cost)) {
            return Some(refused);
        }
        match (&self.circuit, &plan.draft.circuit) {
            (Some(gate), Some(circuit)) => gate.refuses(circuit, now),
            _ => None,
        }
    }

    /// Whether a request that was admitted but not sent yet may still be sent. Changes no state.
    ///
    /// The request keeps what it took, so this checks only what may have begun since: closing, an open
    /// circuit, a pause. On `Wait`, [undo](Self::undo) the charge and ask again.
    pub fn confirm(&self, plan: &Plan, charge: &Charge, now: Instant) -> Verdict {
        let reading = now;
        let now = now.max(self.latest);
        if self.lifecycle.is_closing() {
            return Verdict::Refuse(Refused::Closed);
        }
        if self.is_bypassed {
            return Verdict::Admit;
        }
        if let (Some(gate), Some(circuit)) = (&self.circuit, &plan.draft.circuit)
            && !gate.is_current(charge.generation.get(), charge.is_probe())
        {
            // The request entered before the circuit opened. If a probe's place is free, it may ask for that.
            let wait = Wait { by: Gate::Queue, until: Some(now), floor: now };
            let refused = gate.refuses(circuit, now).map(|refused| refused.later(now.since(reading)));
            return refused.map_or(Verdict::Wait(wait), Verdict::Refuse);
        }
        match self.pause.until(now) {
            Some(until) => Verdict::Wait(Wait { by: Gate::Pause, until: Some(until), floor: until }),
            None => Verdict::Admit,
        }
    }

    /// Whether [`confirm`](Self::confirm) could return anything but `Admit`; cheap, and needs no time.
    pub fn has_begun(&self) -> bool {
        self.has_pause
            || self.lifecycle.is_closing()
            || self.circuit.as_ref().is_some_and(|circuit| !circuit.is_closed())
    }

    /// The pool without capacity, if any, and when time would help.
    #[inline]
    fn full_pool(&self, plan: &Plan, now: Instant) -> Option<(Gate, Option<Instant>)> {
        if !self.slots.admits(1, u64::from(self.slots_limit), Overdraw::Never) {
            return Some((Gate::Slots, None));
        }
        if let Some(bytes) = &plan.draft.bytes
            && !self.bytes.admits(0, bytes.capacity, Overdraw::OnEntry)
        {
            return Some((Gate::Bytes, None));
        }
        // Checked last, because here the end of the tail helps as well as a return.
        match plan.draft.recovery_slots {
            Some(slots)
                if self.phase(plan, now) == Phase::Recovering
                    && !self.recovery.admits(1, u64::from(slots), Overdraw::Never) =>
            {
                Some((Gate::RecoverySlots, self.pause.tail_end(plan.draft.pause.tail)))
            }
            _ => None,
        }
    }

    /// Takes from every gate at the latest clock reading. The caller has checked that all gates admit.
    #[inline]
    fn take(&mut self, plan: &Plan, cost: Cost, waiting: u32, events: &mut Vec<Event>) -> Charge {
        let now = self.latest;
        let mut charge = self.new_charge(cost);
        if plan.counts_in_flight() {
            self.slots.take(1);
            charge.holds.add(Holds::SLOT);
        }
        if let (Some(circuit), true) = (&mut self.circuit, plan.draft.circuit.is_some())
            && circuit.take(events)
        {
            charge.holds.add(Holds::PROBE);
        }
        if self.pause.is_set() {
            if self.phase(plan, now) == Phase::Recovering {
                self.recovery.take(1);
                charge.holds.add(Holds::RECOVERY_SLOT);
            }
            self.pause.take(waiting, now, &mut self.random);
        }
        if let Some(bytes) = &plan.draft.bytes {
            charge.byte_price = if charge.is_recovering() { bytes.recovering_price } else { 1 };
            self.bytes.take(charge.bytes_held());
        }
        if let (Some(gate), Some(pace)) = (&mut self.pace, &plan.draft.pace) {
            gate.take(pace.jitter, now, &mut self.random);
            charge.holds.add(Holds::PACE);
        }
        if let Some(shape) = self.feedback.shape(plan) {
            self.rate.take(shape, cost.request_count(), now);
            charge.holds.add(Holds::RATE);
        }
        if let Some(budget) = &plan.draft.budget {
            self.budget.reserve(budget, cost.total_tokens(), now, events);
            charge.holds.add(Holds::TOKENS);
        }
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            named.take(plan, &mut charge, cost, events);
        }
        let in_flight = self.in_flight();
        if let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) {
            let (sent, before) = auto.take(limits, cost, in_flight, now);
            charge.count(sent, before);
        }
        charge
    }

    /// Turns the bypass on or off.
    ///
    /// Requests that bypass the gates are counted, also as in flight, and take nothing else. The circuit and
    /// the statistics still learn from them; the controller does not, because requests past the limits carry
    /// no information about the limits.
    pub const fn bypass(&mut self, is_bypassed: bool) {
        self.is_bypassed = is_bypassed;
    }

    fn admit_bypassed(&mut self, plan: &Plan, cost: Cost) -> Charge {
        let mut charge = self.new_charge(cost);
        charge.holds.add(Holds::BYPASSED);
        if plan.counts_in_flight() {
            self.slots.take(1);
            charge.holds.add(Holds::SLOT);
        }
        charge
    }

    fn new_charge(&mut self, cost: Cost) -> Charge {
        self.admitted += 1;
        Charge::new(cost, self.latest, self.generation)
    }

    /// Closes the gates permanently; returns whether they were open.
    pub fn close(&mut self, events: &mut Vec<Event>) -> bool {
        if self.lifecycle.is_closing() {
            return false;
        }
        self.lifecycle = Lifecycle::Closing;
        events.push(Event::Closed { in_flight: self.in_flight() });
        if self.in_flight() == 0 {
            events.push(Event::Drained);
        }
        true
    }

    /// Whether the gates are closed and the last request has ended.
    pub const fn is_drained(&self) -> bool {
        self.lifecycle.is_closing() && self.slots.held() == 0
    }

    /// Whether a rate is suspended.
    pub(super) fn is_suspended(&self) -> bool {
        self.rate.is_suspended() || self.named.as_ref().is_some_and(|named| named.is_suspended())
    }

    pub(super) fn phase(&self, plan: &Plan, now: Instant) -> Phase {
        self.pause.phase(plan.draft.pause.tail, now)
    }

    /// Advances the latest clock reading, which never moves back.
    #[inline]
    pub(super) fn advance_to(&mut self, plan: &Plan, now: Instant) {
        self.latest = self.latest.max(now);
        if self.has_pause {
            self.pause.expire(plan.draft.pause.tail, self.latest);
            self.rate.resume(self.feedback.shape(plan), self.latest);
            self.has_pause = self.pause.is_set() || self.is_suspended();
        }
        if let (Some(named), Some(plan)) = (&mut self.named, &plan.named) {
            named.advance(plan, self.latest);
        }
        if let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) {
            auto.advance(limits, self.pause.until(self.latest).is_some(), self.latest);
            self.slots_limit = auto.slots(limits);
        }
        if let Some(budget) = &plan.draft.budget {
            self.budget.prune(budget, self.latest);
        }
    }
}

/// The later of two bounds, if it is after `now`.
#[inline]
pub(super) fn later(
    bound: Option<(Gate, Instant)>,
    by: Gate,
    at: Instant,
    now: Instant,
) -> Option<(Gate, Instant)> {
    let latest = bound.map_or(now, |(_, latest)| latest);
    if at > latest { Some((by, at)) } else { bound }
}

#[cfg(test)]
#[path = "gates_tests.rs"]
mod tests;
