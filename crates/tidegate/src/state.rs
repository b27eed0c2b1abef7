//! The state under the lock: the current plan, the gates, the queue, and the pump that connects them.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::gate::Gates;
use tidegate_core::plan::Plan;
use tidegate_core::refused::Refused;
use tidegate_core::retry::{Retries, RetryBudget};
use tidegate_core::time::Instant;
use tidegate_core::verdict::{Gate, Verdict, Wait};

use crate::fault_injection::{Bug, is_injected};
use crate::queue::{Decision, Queue, Refund, Ticket, Timer};
use crate::timer_task::{TimerHost, TimerStep};

/// Grants per lock acquisition; after these, the lock is released and the granted waiters are woken.
const GRANTS_MAX: usize = 32;
/// Windows over which retries are counted; budgets with further windows share the last.
const WINDOWS_MAX: usize = 8;
/// A grant that stays uncollected this long is reported.
const UNSEEN_TIMEOUT: Duration = Duration::from_secs(1);

/// All mutable state.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct State {
    pub(crate) plan: Arc<Plan>,
    pub(crate) gates: Gates,
    /// Allocated for the first waiter.
    pub(crate) queue: Option<Box<Queue>>,
    /// Work started and retried, per window of a retry budget; unallocated without a budget.
    #[expect(
        clippy::box_collection,
        reason = "few throttles have one, and the others should not pay for three words"
    )]
    pub(crate) retries: Option<Box<Vec<Retries>>>,
    /// The version of the registry's rules it follows; an older version does not replace a newer one.
    pub(crate) version: u32,
    /// The version of the limits it follows.
    pub(crate) plans: u32,
}

/// What to do after unlocking.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    pub(crate) wakers: Vec<Waker>,
    /// Replaced wakers: dropping one may run user code.
    pub(crate) dropped: Vec<Waker>,
    pub(crate) events: Vec<Event>,
    /// The pump reached its bound, and more waiters may be due.
    pub(crate) more: bool,
    /// Time matters to the head, and its host runs no timer.
    pub(crate) timer_missing: bool,
}

/// The result of an admission attempt.
pub(crate) enum Entry {
    Admitted(Charge),
    Refused(Refused),
    /// It has to wait; with the gates' wait if no waiter is ahead.
    Wait(Option<Wait>),
}

impl State {
    pub(crate) fn waiting(&self) -> u32 {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Work started and retried, counted for `budget`.
    pub(crate) fn retries(&mut self, budget: &RetryBudget) -> &mut Retries {
        let all = self.retries.get_or_insert_default();
        let known = all.iter().position(|retries| retries.window() == budget.window());
        let index = known.unwrap_or_else(|| {
            if all.len() < WINDOWS_MAX {
                all.push(Retries::new(budget));
            }
            all.len() - 1
        });
        &mut all[index]
    }

    /// Admits a newcomer if the queue is empty and all gates admit it. It does not overtake.
    pub(crate) fn enter(&mut self, cost: Cost, now: Instant, effects: &mut Effects) -> Entry {
        if self.waiting() > 0 {
            self.pump(now, Refund::Nothing, effects);
            if self.waiting() > 0 {
                // Behind other waiters only immediate refusals are known.
                return match self.gates.refuses(&self.plan, cost, now) {
                    Some(refused) => Entry::Refused(refused),
                    None => Entry::Wait(None),
                };
            }
        }
        self.admit(cost, now, &mut effects.events)
    }

    /// Admits a newcomer when the queue is empty.
    #[inline]
    pub(crate) fn admit(&mut self, cost: Cost, now: Instant, events: &mut Vec<Event>) -> Entry {
        match self.gates.admit(&self.plan, cost, 0, now, events) {
            Ok(charge) => Entry::Admitted(charge),
            Err(Verdict::Refuse(refused)) => Entry::Refused(refused),
            Err(Verdict::Wait(wait)) => Entry::Wait(Some(wait)),
            Err(Verdict::Admit) => unreachable!("an admitted request is charged"),
        }
    }

    /// The refusal of a caller whose `deadline` cannot be met; `None` if it may queue.
    pub(crate) fn deadline_refusal(
        &self,
        cost: Cost,
        ahead: u32,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Option<Refused> {
        let (by, at) = self.gates.bound_at(&self.plan, cost, ahead, now.max(self.gates.latest()))?;
        (at > deadline?).then(|| Refused::Limited { by, retry_after: Some(at.since(now)) })
    }

    /// The refusal of a caller that will not wait.
    #[cold]
    pub(crate) fn refusal(&self, cost: Cost, verdict: Verdict, now: Instant) -> Refused {
        match verdict {
            Verdict::Refuse(refused) => refused,
            Verdict::Wait(wait) => self.limited(cost, Some(wait), now),
            Verdict::Admit => unreachable!("an admitted request is charged"),
        }
    }

    /// The refusal of a caller that would have to wait. `wait` is the gates' wait if no waiter is ahead.
    pub(crate) fn limited(&self, cost: Cost, wait: Option<Wait>, now: Instant) -> Refused {
        // The wait counts from `now`, even if the clock was set back: it has to catch up first.
        let bound = self.gates.bound_at(&self.plan, cost, self.waiting(), now.max(self.gates.latest()));
        let by = wait.map_or(Gate::Queue, |wait| wait.by);
        // A head may be tried again before its time: the floor and the bound count too.
        let at = wait.and_then(|wait| Some(wait.until?.max(wait.floor))).max(bound.map(|(_, at)| at));
        Refused::Limited { by, retry_after: at.map(|at| at.since(now)) }
    }

    /// Adds a caller to the queue.
    ///
    /// # Errors
    /// [`Refused::Busy`] when the queue is full.
    pub(crate) fn join(
        &mut self,
        cost: Cost,
        host: TimerHost,
        deadline: Option<Instant>,
        waker: Waker,
        wait: Option<Wait>,
        effects: &mut Effects,
    ) -> Result<Ticket, Refused> {
        let waiters_max = self.plan.draft().waiters_max;
        if self.waiting() >= waiters_max {
            effects.events.push(Event::QueueFull { waiters_max });
            effects.dropped.push(waker);
            return Err(Refused::Busy { waiters_max });
        }
        let queue = self.queue.get_or_insert_with(|| Box::new(Queue::new()));
        let ticket = queue.push(cost, host, deadline, waker, None);
        if let Some(wait) = wait {
            queue.block(wait);
        }
        Ok(ticket)
    }

    /// The arrival number of the waiter behind `ticket`.
    pub(crate) fn arrival(&self, ticket: Ticket) -> Option<u64> {
        self.queue.as_ref().and_then(|queue| queue.arrival(ticket))
    }

    /// Waiters that have joined so far.
    pub(crate) fn arrived(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.arrived())
    }

    /// Adds a caller back in the order of its arrival number, and tries it if it is the head.
    ///
    /// It was admitted before, so the queue's bound does not apply: returning callers are bounded where they
    /// wait.
    ///
    /// # Errors
    /// Immediate refusals of the gates, and a deadline that cannot be met.
    pub(crate) fn rejoin(
        &mut self,
        cost: Cost,
        host: TimerHost,
        deadline: Option<Instant>,
        waker: Waker,
        (arrival, now): (u64, Instant),
        effects: &mut Effects,
    ) -> Result<Ticket, Refused> {
        let ahead = self.queue.as_ref().map_or(0, |queue| queue.ahead_of(arrival));
        let refused = self.gates.refuses(&self.plan, cost, now);
        if let Some(refused) = refused.or_else(|| self.deadline_refusal(cost, ahead, deadline, now)) {
            effects.dropped.push(waker);
            return Err(refused);
        }
        let queue = self.queue.get_or_insert_with(|| Box::new(Queue::new()));
        let ticket = queue.push(cost, host, deadline, waker, Some(arrival));
        self.pump(now, Refund::Nothing, effects);
        Ok(ticket)
    }

    /// Collects the result of a queued caller; while it waits, swaps `waker` with the stored one.
    pub(crate) fn fetch(
        &mut self,
        ticket: Ticket,
        host: TimerHost,
        waker: &mut Option<Waker>,
    ) -> Option<Result<Charge, Refused>> {
        self.queue.as_mut()?.fetch(ticket, host, waker).map(Decision::into_result)
    }

    /// The result of a queued caller, if it is decided.
    pub(crate) fn take_decision(&mut self, ticket: Ticket) -> Option<Result<Charge, Refused>> {
        self.queue.as_mut()?.take_decision(ticket).map(Decision::into_result)
    }

    /// Why the head waits, if `ticket` is the head.
    pub(crate) fn wait_of(&self, ticket: Ticket) -> Option<Wait> {
        self.queue.as_ref().filter(|queue| queue.is_head(ticket)).and_then(|queue| queue.blocked())
    }

    /// Reports uncollected grants. Called by newcomers that have to wait behind them.
    pub(crate) fn look_for_unseen(&mut self, now: Instant, effects: &mut Effects) {
        if let Some(queue) = &mut self.queue
            && queue.finds_unseen(now, UNSEEN_TIMEOUT)
        {
            effects.events.push(Event::GrantUnseen { span: UNSEEN_TIMEOUT });
        }
    }

    /// Grants or refuses the head as long as it is due and does not have to wait.
    pub(crate) fn pump(&mut self, now: Instant, refund: Refund, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        let (reading, now) = (now, now.max(self.gates.latest()));
        effects.more = false;
        let mut granted = 0;
        if queue.is_due(now, refund) {
            while let Some(cost) = queue.head() {
                if granted == GRANTS_MAX {
                    effects.more = true;
                    queue.unblock();
                    break;
                }
                let behind = queue.waiting() - 1;
                let decision = match self.gates.admit(&self.plan, cost, behind, reading, &mut effects.events)
                {
                    Ok(charge) => Decision::Granted(charge),
                    Err(Verdict::Refuse(refused)) => Decision::Refused(refused),
                    Err(Verdict::Wait(wait)) => {
                        queue.block(wait);
                        break;
                    }
                    Err(Verdict::Admit) => unreachable!("an admitted request is charged"),
                };
                granted += 1;
                effects.wakers.extend(queue.end_head(decision));
            }
        } else if queue.is_helped_by(refund) {
            queue.wait_for_floor();
        }
        match queue.timer() {
            Timer::Wake(waker) => effects.wakers.extend(waker),
            Timer::Missing => effects.timer_missing = true,
        }
    }

    /// Serves waiters after a refund or a change; after a change the head is tried regardless of its last
    /// wait.
    pub(crate) fn pump_after(&mut self, now: Instant, refund: Refund, effects: &mut Effects) {
        if effects.events.is_empty() {
            self.pump(now, refund, effects);
        } else {
            self.pump_changed(now, effects);
        }
    }

    /// Limits, pause, circuit or lifecycle changed: refuses at once every waiter that can no longer be
    /// served.
    pub(crate) fn pump_changed(&mut self, now: Instant, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        let now = now.max(self.gates.latest());
        let (gates, plan) = (&self.gates, &self.plan);
        let is_later = |event: &Event| matches!(event, Event::Paused { .. } | Event::Slowed { .. });
        let is_retuned = effects.events.contains(&Event::Retuned);
        if is_retuned || (queue.with_deadline > 0 && effects.events.iter().any(is_later)) {
            // Only bounds that are cheap to compute: this walks the whole queue.
            effects.wakers.extend(queue.refuse_some(|cost, ahead, deadline| {
                let too_late = deadline.and_then(|deadline| {
                    let (by, at) = gates.firm_at(plan, ahead, now)?;
                    (at > deadline).then(|| Refused::Limited { by, retry_after: Some(at.since(now)) })
                });
                too_late.or_else(|| gates.refuses(plan, cost, now).filter(Refused::is_final))
            }));
        }
        queue.unblock();
        self.pump(now, Refund::Tokens, effects);
    }

    /// Leaves the queue; an uncollected grant is refunded in full, and the waiters behind move up.
    pub(crate) fn leave(&mut self, ticket: Ticket, now: Instant, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        let (decision, waker) = queue.leave(ticket);
        effects.dropped.extend(waker);
        if let Some(Decision::Granted(charge)) = decision
            && !is_injected(Bug::LoseUnseenGrant)
        {
            self.gates.undo(&self.plan, charge, now, &mut effects.events);
            queue.unblock();
        }
        if !is_injected(Bug::SkipPump) {
            self.pump(now, Refund::Nothing, effects);
        }
    }

    /// Undoes an admission whose request was never sent, and serves the waiters that this admits.
    pub(crate) fn undo(&mut self, charge: Charge, now: Instant, effects: &mut Effects) {
        self.gates.undo(&self.plan, charge, now, &mut effects.events);
        if let Some(queue) = &mut self.queue {
            queue.unblock();
        }
        self.pump_after(now, Refund::Tokens, effects);
    }

    /// Gives the timer to the waiter behind `ticket`, if it must run one. Returns the owner's id.
    pub(crate) fn take_timer(
        &mut self,
        ticket: Ticket,
        host: TimerHost,
        waker: Option<Waker>,
        effects: &mut Effects,
    ) -> Option<u32> {
        let queue = self.queue.as_mut()?;
        if !queue.needs_timer(ticket) {
            return None;
        }
        let (id, old) = queue.new_timer_owner(host, waker);
        // The previous owner is woken, and exits when it finds that it was replaced.
        effects.wakers.extend(old.and_then(|timer_owner| timer_owner.waker));
        Some(id)
    }

    /// The head's host runs no timer. A caller that runs on that host becomes the owner; otherwise the head
    /// is woken to become it.
    pub(crate) fn find_timer_owner(&mut self, here: Option<TimerHost>, effects: &mut Effects) -> Option<u32> {
        effects.timer_missing = false;
        let queue = self.queue.as_mut()?;
        if !matches!(queue.timer(), Timer::Missing) {
            return None;
        }
        if let Some(host) = here.filter(|here| queue.head_host() == Some(*here)) {
            let (id, old) = queue.new_timer_owner(host, None);
            effects.wakers.extend(old.and_then(|timer_owner| timer_owner.waker));
            return Some(id);
        }
        if !is_injected(Bug::LoseTimer) {
            effects.wakers.extend(queue.head_waker());
            // Until the head is polled, a timer on another host is better than none.
            effects
                .wakers
                .extend(queue.timer_owner.as_mut().and_then(|timer_owner| timer_owner.waker.take()));
        }
        None
    }

    /// One round of the timer's owner.
    pub(crate) fn run_timer(
        &mut self,
        id: u32,
        waker: Waker,
        now: Instant,
        effects: &mut Effects,
    ) -> TimerStep {
        let is_owner =
            |queue: &Queue| queue.timer_owner.as_ref().is_some_and(|timer_owner| timer_owner.id == id);
        let Some(queue) = self.queue.as_mut().filter(|queue| is_owner(queue)) else {
            effects.dropped.push(waker);
            return TimerStep::Done;
        };
        if let Some(timer_owner) = &mut queue.timer_owner {
            timer_owner.armed = None;
            effects.dropped.extend(timer_owner.waker.take());
        }
        self.pump(now, Refund::Nothing, effects);
        let Some(queue) = &mut self.queue else { return TimerStep::Done };
        if queue.waiting() == 0 {
            queue.timer_owner = None;
            effects.dropped.push(waker);
            return TimerStep::Done;
        }
        let at = queue.wake_at();
        if let Some(timer_owner) = &mut queue.timer_owner {
            timer_owner.armed = at;
            timer_owner.waker = Some(waker);
        }
        TimerStep::Sleep(at)
    }

    /// The timer's owner is dropped: wakes the head to take the timer over.
    pub(crate) fn release_timer(&mut self, id: u32, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        if queue.timer_owner.as_ref().is_none_or(|timer_owner| timer_owner.id != id) {
            return;
        }
        effects.dropped.extend(queue.timer_owner.take().and_then(|timer_owner| timer_owner.waker));
        if !is_injected(Bug::LoseTimer) {
            effects.wakers.extend(queue.head_waker());
        }
    }
}
