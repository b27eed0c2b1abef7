//! All gates as one: ask every one, then take from every one.
//!
//! Nothing is taken unless everything admits, and what was taken is written on the [`Charge`]. Refusals come
//! before waits, and of the timed gates the latest decides, so that a request is asked again once and not once
//! per gate.

use super::budget::BudgetGate;
use super::circuit::CircuitGate;
use super::lifecycle::Lifecycle;
use super::pace::PaceGate;
use super::pause::PauseGate;
use super::pool::{Overdraw, Pool};
use super::rate::RateGate;
use crate::cost::{Charge, Cost, Holds};
use crate::event::Event;
use crate::feedback::Feedback;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::random::Random;
use crate::refused::Refused;
use crate::snapshot::Phase;
use crate::time::Instant;
use crate::verdict::{Gate, Verdict, Wait};

/// The state of every gate of one throttle: what changes, while the [`Plan`] says what is allowed.
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
pub struct Gates {
    pub(super) lifecycle: Lifecycle,
    pub(super) circuit: Option<CircuitGate>,
    pub(super) pause: PauseGate,
    /// Slots as tuned; `u32::MAX` is unlimited.
    pub(super) slots_limit: u32,
    pub(super) slots: Pool,
    pub(super) recovery: Pool,
    pub(super) bytes: Pool,
    pub(super) pace: Option<PaceGate>,
    pub(super) rate: RateGate,
    pub(super) budget: BudgetGate,
    pub(super) feedback: Feedback,
    /// Allocated with the first completion.
    pub(super) progress: Option<Box<Progress>>,
    /// Bumped by every cut and every change of the circuit; each charge carries the one it entered in.
    pub(super) generation: u32,
    pub(super) random: Random,
    /// The latest time seen: a clock that steps back stands still here.
    pub(super) latest: Instant,
    pub(super) admitted: u64,
    pub(super) evaluations: u64,
}

/// What is asked for by those who came before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ahead {
    /// Requests waiting.
    pub requests: u32,
    /// Tokens they ask for.
    pub tokens: u64,
}

impl Ahead {
    /// Nobody came before.
    pub const fn nobody() -> Self {
        Self { requests: 0, tokens: 0 }
    }
}

impl Gates {
    /// Gates that nobody has passed yet.
    pub fn new(plan: &Plan, random: Random) -> Self {
        Self {
            lifecycle: Lifecycle::Open,
            circuit: plan.draft.circuit.as_ref().map(|circuit| CircuitGate::new(circuit, 0)),
            pause: PauseGate::default(),
            slots_limit: plan.draft.slots.map_or(u32::MAX, |slots| slots.start),
            slots: Pool::default(),
            recovery: Pool::default(),
            bytes: Pool::default(),
            pace: plan.draft.pace.map(|pace| PaceGate::new(pace.interval_min)),
            rate: RateGate::full(),
            budget: BudgetGate::default(),
            feedback: Feedback::new(plan),
            progress: None,
            generation: 0,
            random,
            latest: Instant::ZERO,
            admitted: 0,
            evaluations: 0,
        }
    }

    /// Whether deciding needs the time: a plan without timed gates needs it only around a pause.
    pub const fn needs_time(&self, plan: &Plan) -> bool {
        plan.is_timed() || self.pause.is_set()
    }

    /// The latest time seen.
    pub const fn latest(&self) -> Instant {
        self.latest
    }

    /// Requests in flight.
    #[expect(clippy::cast_possible_truncation, reason = "each takes one of at most u32::MAX slots")]
    pub const fn in_flight(&self) -> u32 {
        self.slots.held() as u32
    }

    /// Asks every gate for a request that nobody is ahead of. Changes nothing.
    #[inline]
    pub fn ask(&self, plan: &Plan, cost: Cost, now: Instant) -> Verdict {
        let now = now.max(self.latest);
        if let Some(refused) = self.refuses(plan, cost, now) {
            return Verdict::Refuse(refused);
        }
        let pool = self.full_pool(plan, now);
        let timed = self.ready_at(plan, cost, Ahead::nobody(), now);
        match (pool, timed) {
            (None, None) => Verdict::Admit,
            (Some((by, until)), timed) => {
                let floor = timed.map_or(now, |(_, until)| until);
                Verdict::Wait(Wait { by, until: until.map(|until| until.max(floor)), floor })
            }
            (None, Some((by, until))) => Verdict::Wait(Wait { by, until: Some(until), floor: until }),
        }
    }

    /// Asks every gate, and takes from every gate if all admit.
    ///
    /// `waiting` callers stay behind; after a pause they are let in spread.
    ///
    /// # Errors
    /// The verdict that is not "admit"; nothing was taken.
    #[inline]
    pub fn admit(
        &mut self,
        plan: &Plan,
        cost: Cost,
        waiting: u32,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<Charge, Verdict> {
        self.see(plan, now);
        self.evaluations += 1;
        match self.ask(plan, cost, now) {
            Verdict::Admit => Ok(self.take(plan, cost, waiting, events)),
            verdict => Err(verdict),
        }
    }

    /// The latest of the timed gates' lower bounds, where it is after `now`, and whose it is.
    ///
    /// `ahead` is asked for by those who come first: nobody behind them can enter earlier than this.
    #[inline]
    pub fn ready_at(&self, plan: &Plan, cost: Cost, ahead: Ahead, now: Instant) -> Option<(Gate, Instant)> {
        let mut latest = None;
        let mut until = now;
        let mut hold = |by, at| {
            if at > until {
                until = at;
                latest = Some(by);
            }
        };
        hold(Gate::Pause, self.pause.ready_at());
        if let Some(pace) = &self.pace {
            hold(Gate::Pace, pace.ready_at(u64::from(ahead.requests)));
        }
        if let Some(shape) = &plan.rate {
            hold(Gate::Rate, self.rate.ready_at(shape, u64::from(ahead.requests), now));
        }
        if let Some(budget) = &plan.draft.budget {
            hold(Gate::Budget, self.budget.ready_at(budget, ahead.tokens, cost.tokens, now));
        }
        latest.map(|by| (by, until))
    }

    /// Why the request would be turned away at once, however long it were ready to wait.
    #[inline]
    pub fn refuses(&self, plan: &Plan, cost: Cost, now: Instant) -> Option<Refused> {
        if self.lifecycle.is_closing() {
            return Some(Refused::Closed);
        }
        if let Some(budget) = &plan.draft.budget
            && let Some(refused) = BudgetGate::refuses(budget, cost.tokens)
        {
            return Some(refused);
        }
        match (&self.circuit, &plan.draft.circuit) {
            (Some(gate), Some(circuit)) => gate.refuses(circuit, now),
            _ => None,
        }
    }

    /// The pool that has no room, if one has not, and when time would help it.
    #[inline]
    fn full_pool(&self, plan: &Plan, now: Instant) -> Option<(Gate, Option<Instant>)> {
        if !self.slots.admits(1, u64::from(self.slots_limit), Overdraw::Never) {
            return Some((Gate::Slots, None));
        }
        if let Some(slots) = plan.draft.recovery_slots
            && self.phase(plan, now) == Phase::Recovering
            && !self.recovery.admits(1, u64::from(slots), Overdraw::Never)
        {
            // A return helps, and so does the end of the tail.
            return Some((Gate::RecoverySlots, self.pause.tail_end(plan.draft.pause.tail)));
        }
        match &plan.draft.bytes {
            Some(bytes) if !self.bytes.admits(0, bytes.capacity, Overdraw::OnEntry) => {
                Some((Gate::Bytes, None))
            }
            _ => None,
        }
    }

    /// Takes from every gate at the latest time seen. Whether it may was asked before.
    #[inline]
    fn take(&mut self, plan: &Plan, cost: Cost, waiting: u32, events: &mut Vec<Event>) -> Charge {
        let now = self.latest;
        self.admitted += 1;
        let mut charge = Charge {
            cost,
            entered: now,
            generation: self.generation,
            byte_price: 0,
            holds: Holds::default(),
        };
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
        }
        if let Some(shape) = &plan.rate {
            self.rate.take(shape, now);
            charge.holds.add(Holds::RATE);
        }
        if let Some(budget) = &plan.draft.budget {
            self.budget.take(budget, cost.tokens, now, events);
            charge.holds.add(Holds::TOKENS);
        }
        charge
    }

    /// Closes for good; answers whether it was open.
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

    /// Whether it is closed and the last request has ended.
    pub const fn is_drained(&self) -> bool {
        self.lifecycle.is_closing() && self.slots.held() == 0
    }

    pub(super) fn phase(&self, plan: &Plan, now: Instant) -> Phase {
        self.pause.phase(plan.draft.pause.tail, now)
    }

    /// Moves the latest time seen forward, never back.
    #[inline]
    pub(super) fn see(&mut self, plan: &Plan, now: Instant) {
        self.latest = self.latest.max(now);
        if self.pause.is_set() {
            self.pause.expire(plan.draft.pause.tail, self.latest);
        }
    }
}
