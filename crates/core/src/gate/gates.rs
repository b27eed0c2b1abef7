//! All gates as one: ask every one, then take from every one.
//!
//! Nothing is taken unless everything admits, and what was taken is written on the [`Charge`]. Refusals come
//! before waits, and of the timed gates the latest decides, so that a request is asked again once and not once
//! per gate.

use std::num::NonZero;

use super::budget::BudgetGate;
use super::circuit::CircuitGate;
use super::lifecycle::Lifecycle;
use super::pace::PaceGate;
use super::pause::PauseGate;
use super::pool::{Overdraw, Pool};
use super::rate::RateGate;
use crate::cost::{Charge, Cost, Holds, Sent};
use crate::event::Event;
use crate::feedback::Feedback;
use crate::feedback::auto::ASK_AGAIN;
use crate::observed::Observed;
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
// What the short way of a rate reads and writes comes first, in 40 bytes: with many throttles each line of memory that a
// call meets is a wait, and with what the shell has before it this is two lines wherever they begin.
#[repr(C)]
pub struct Gates {
    pub(super) lifecycle: Lifecycle,
    /// Whether everybody may pass.
    pub(super) is_bypassed: bool,
    /// Whether what the controller moves made somebody wait since its last step: demand, also of one caller
    /// that comes back again and again and is never seen waiting.
    pub(super) held_back: bool,
    /// Whether there is a pause, running or just over: `pause` says the same from further away.
    pub(super) has_pause: bool,
    /// Bumped by every cut and every change of the circuit; each charge carries the one it entered in.
    pub(super) generation: NonZero<u32>,
    pub(super) rate: RateGate,
    /// The latest time seen: a clock that steps back stands still here.
    pub(super) latest: Instant,
    pub(super) admitted: u64,
    /// Slots as tuned; `u32::MAX` is unlimited.
    pub(super) slots_limit: u32,
    /// Values of headers that could not be read.
    pub(super) headers_malformed: u32,
    pub(super) slots: Pool,
    pub(super) pause: PauseGate,
    // Boxed, or nothing at all, from here on: most throttles have few of these, and should not pay for the others.
    pub(super) circuit: Option<Box<CircuitGate>>,
    pub(super) recovery: Pool,
    pub(super) bytes: Pool,
    pub(super) pace: Option<Box<PaceGate>>,
    pub(super) budget: BudgetGate,
    pub(super) feedback: Feedback,
    /// Allocated with the first completion.
    pub(super) progress: Option<Box<Progress>>,
    /// Allocated with the first outcome learned from.
    pub(super) observed: Option<Box<Observed>>,
    pub(super) random: Random,
    /// Times the gates were asked and did not admit, or what they admitted never went out.
    pub(super) asked_in_vain: u64,
}

impl Gates {
    /// Gates that nobody has passed yet.
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
            feedback: Feedback::new(plan),
            progress: None,
            observed: None,
            generation: NonZero::<u32>::MIN,
            held_back: false,
            headers_malformed: 0,
            random,
            latest: Instant::ZERO,
            admitted: 0,
            asked_in_vain: 0,
        }
    }

    /// Whether deciding needs the time: a plan without timed gates needs it only around a pause.
    pub const fn needs_time(&self, plan: &Plan) -> bool {
        plan.is_timed() || self.has_pause
    }

    /// The latest time seen.
    pub const fn latest(&self) -> Instant {
        self.latest
    }

    /// Requests admitted since the beginning.
    pub const fn admitted(&self) -> u64 {
        self.admitted
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

    /// The answer to a request that a pool or time holds.
    #[cold]
    fn wait(
        &self,
        plan: &Plan,
        pool: Option<(Gate, Option<Instant>)>,
        timed: Option<(Gate, Instant)>,
        now: Instant,
    ) -> Verdict {
        let floor = self.firm_at(plan, 0, now).map_or(now, |(_, at)| at);
        // A pace rises while it holds callers back: the head asks again before its time.
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
            (None, None) => unreachable!("nothing holds it"),
        })
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
        if self.is_bypassed && !self.lifecycle.is_closing() {
            return Ok(self.let_past(plan, cost));
        }
        let verdict = self.ask(plan, cost, now);
        match verdict {
            Verdict::Admit => return Ok(self.take(plan, cost, waiting, events)),
            Verdict::Wait(Wait { by, .. }) => self.hold(plan, by, cost),
            Verdict::Refuse(_) => {}
        }
        self.asked_in_vain += 1;
        Err(verdict)
    }

    /// A caller waits at a gate: that is demand for what the controller moves.
    fn hold(&mut self, plan: &Plan, by: Gate, cost: Cost) {
        match &mut self.feedback {
            Feedback::Auto(auto) => {
                if let Some(limits) = &plan.auto {
                    auto.hold(limits, by, cost, self.latest);
                }
            }
            feedback => self.held_back |= feedback.moves(by),
        }
    }

    /// The short way for what is limited by slots and a rate alone, with no pause running and room in both.
    ///
    /// `None` says nothing about the request: [`admit`](Self::admit) is to be asked, and where this admits it
    /// would have admitted the same (a property says so).
    #[inline]
    pub fn admit_plain(&mut self, plan: &Plan, cost: Cost, now: Instant) -> Option<Charge> {
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
        let sent = Sent::default();
        Some(Charge { cost, entered: now, sent, generation: self.generation, byte_price: 0, holds })
    }

    /// The latest of the timed gates' lower bounds, where it is after `now`, and whose it is.
    ///
    /// Nobody with `ahead` others before it can enter earlier than this, whatever comes back. Tokens asked for
    /// by those ahead do not count: they are estimates, and may be returned as soon as they were reserved.
    pub fn bound_at(&self, plan: &Plan, cost: Cost, ahead: u32, now: Instant) -> Option<(Gate, Instant)> {
        let firm = self.paced_at(plan, cost, ahead, now);
        let Some(budget) = &plan.draft.budget else { return firm };
        later(firm, Gate::Budget, self.budget.bound_at(budget, cost.tokens, now), now)
    }

    /// When time lets a request in that nobody is ahead of, if nothing is returned before.
    #[inline]
    fn ready_at(&self, plan: &Plan, cost: Cost, now: Instant) -> Option<(Gate, Instant)> {
        let firm = self.paced_at(plan, cost, 0, now);
        let Some(budget) = &plan.draft.budget else { return firm };
        later(firm, Gate::Budget, self.budget.ready_at(budget, cost.tokens, now), now)
    }

    /// Bounds that no return of others can lower at the limits of the moment: pause, pace and rate.
    #[inline]
    pub fn firm_at(&self, plan: &Plan, ahead: u32, now: Instant) -> Option<(Gate, Instant)> {
        self.paced_at(plan, Cost::request(), ahead, now)
    }

    /// The same for a request of this cost: a learned pace counts tokens too.
    #[inline]
    fn paced_at(&self, plan: &Plan, cost: Cost, ahead: u32, now: Instant) -> Option<(Gate, Instant)> {
        let mut latest = later(None, Gate::Pause, self.pause.ready_at(), now);
        if let Some(pace) = &self.pace {
            latest = later(latest, Gate::Pace, pace.ready_at(u64::from(ahead)), now);
        }
        if let Some(shape) = self.feedback.shape(plan) {
            latest = later(latest, Gate::Rate, self.rate.ready_at(shape, u64::from(ahead), now), now);
        }
        if let (Feedback::Auto(auto), Some(limits)) = (&self.feedback, &plan.auto) {
            let (by, at) = auto.ready_at(limits, cost, ahead, now);
            latest = later(latest, by, at, now);
        }
        latest
    }

    /// Why the request would be turned away at once, however long it were ready to wait.
    #[inline]
    pub fn refuses(&self, plan: &Plan, cost: Cost, now: Instant) -> Option<Refused> {
        if self.lifecycle.is_closing() {
            return Some(Refused::Closed);
        }
        if self.is_bypassed {
            return None;
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

    /// Whether a request that was admitted, and has not gone out yet, may still go. Changes nothing.
    ///
    /// What it took is its own, so only what may have begun since then is asked: the end, an open circuit, a pause. Told
    /// to wait, it is to be [undone](Self::undo) and to ask anew.
    pub fn confirm(&self, plan: &Plan, charge: &Charge, now: Instant) -> Verdict {
        let now = now.max(self.latest);
        if self.lifecycle.is_closing() {
            return Verdict::Refuse(Refused::Closed);
        }
        if self.is_bypassed {
            return Verdict::Admit;
        }
        if let (Some(gate), Some(circuit)) = (&self.circuit, &plan.draft.circuit)
            && !gate.is_of_now(charge.generation.get(), charge.is_probe())
        {
            // It entered before the circuit opened. Where a probe's place is free, it may ask for that.
            let wait = Wait { by: Gate::Queue, until: Some(now), floor: now };
            return gate.refuses(circuit, now).map_or(Verdict::Wait(wait), Verdict::Refuse);
        }
        match self.pause.until(now) {
            Some(until) => Verdict::Wait(Wait { by: Gate::Pause, until: Some(until), floor: until }),
            None => Verdict::Admit,
        }
    }

    /// Whether anything has begun that [`confirm`](Self::confirm) would hear of: mostly not, and that needs no time.
    pub fn has_begun(&self) -> bool {
        self.has_pause
            || self.lifecycle.is_closing()
            || self.circuit.as_ref().is_some_and(|circuit| !circuit.is_closed())
    }

    /// The pool that has no room, if one has not, and when time would help it.
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
        // Last of the pools, for here a return helps, and so does the end of the tail.
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

    /// Takes from every gate at the latest time seen. Whether it may was asked before.
    #[inline]
    fn take(&mut self, plan: &Plan, cost: Cost, waiting: u32, events: &mut Vec<Event>) -> Charge {
        let now = self.latest;
        let mut charge = self.pass(cost);
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
            self.rate.take(shape, now);
            charge.holds.add(Holds::RATE);
        }
        if let Some(budget) = &plan.draft.budget {
            self.budget.reserve(budget, cost.tokens, now, events);
            charge.holds.add(Holds::TOKENS);
        }
        let in_flight = self.in_flight();
        if let (Feedback::Auto(auto), Some(limits)) = (&mut self.feedback, &plan.auto) {
            charge.sent = auto.take(limits, cost, in_flight, now);
        }
        charge
    }

    /// Lets everybody pass from now on, or nobody but whom the gates admit.
    ///
    /// Who passes is counted, among those in flight too, and takes nothing else. Circuit and counts go on learning; the
    /// controller does not, for what is sent past the limits says nothing of them.
    pub const fn bypass(&mut self, is_bypassed: bool) {
        self.is_bypassed = is_bypassed;
    }

    fn let_past(&mut self, plan: &Plan, cost: Cost) -> Charge {
        let mut charge = self.pass(cost);
        charge.holds.add(Holds::PAST);
        if plan.counts_in_flight() {
            self.slots.take(1);
            charge.holds.add(Holds::SLOT);
        }
        charge
    }

    fn pass(&mut self, cost: Cost) -> Charge {
        self.admitted += 1;
        let (holds, sent) = (Holds::default(), Sent::default());
        Charge { cost, entered: self.latest, sent, generation: self.generation, byte_price: 0, holds }
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
        if self.has_pause {
            self.pause.expire(plan.draft.pause.tail, self.latest);
            self.rate.wake(self.feedback.shape(plan), self.latest);
            self.has_pause = self.pause.is_set() || self.rate.is_resting();
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

/// The later of a bound and another one, where that is after `now`.
#[inline]
fn later(bound: Option<(Gate, Instant)>, by: Gate, at: Instant, now: Instant) -> Option<(Gate, Instant)> {
    let latest = bound.map_or(now, |(_, latest)| latest);
    if at > latest { Some((by, at)) } else { bound }
}

#[cfg(test)]
#[path = "gates_tests.rs"]
mod tests;
