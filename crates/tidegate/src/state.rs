//! What is under the lock: the plan of the moment, the gates, the queue, and the pump that joins them.

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

use crate::keeper::{Home, Round};
use crate::planted::{Bug, is_planted};
use crate::queue::{Fate, Queue, Returned, Ticket, Timer};

/// Grants under one lock; then the lock is let go, and those granted are woken.
const GRANTS_MAX: usize = 32;
/// Windows over which retries are counted; budgets with still others are counted over the last.
const WINDOWS_MAX: usize = 8;
/// A grant that nobody has come for in this long is told of.
const UNSEEN_PATIENCE: Duration = Duration::from_secs(1);

/// Everything that changes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct State {
    pub(crate) plan: Arc<Plan>,
    pub(crate) gates: Gates,
    /// Made with the first waiter.
    pub(crate) queue: Option<Box<Queue>>,
    /// What was begun and retried, over each window that a retry budget has; without memory where none has.
    #[expect(clippy::box_collection, reason = "few throttles have one, and none should pay for three words")]
    pub(crate) retries: Option<Box<Vec<Retries>>>,
    /// The version of the registry's rules that it follows; later ones are not undone by earlier ones.
    pub(crate) version: u32,
    /// The change of limits that it follows.
    pub(crate) plans: u32,
}

/// What is to be done once the lock is gone.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    pub(crate) wakers: Vec<Waker>,
    /// Wakers that were replaced: dropping one may run anybody's code.
    pub(crate) dropped: Vec<Waker>,
    pub(crate) events: Vec<Event>,
    /// The pump stopped at its bound, and more may be due.
    pub(crate) more: bool,
    /// Time matters to the head, and nobody keeps the timer where it lives.
    pub(crate) timer_missing: bool,
}

/// A newcomer's answer.
pub(crate) enum Entry {
    Admitted(Charge),
    Refused(Refused),
    /// It has to wait its turn; the gates' answer where nobody is ahead.
    Wait(Option<Wait>),
}

impl State {
    pub(crate) fn waiting(&self) -> u32 {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Work begun and retried, counted for `budget`.
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

    /// Admits a newcomer if nobody waits and all gates admit it. It does not overtake.
    pub(crate) fn enter(&mut self, cost: Cost, now: Instant, effects: &mut Effects) -> Entry {
        if self.waiting() > 0 {
            self.pump(now, Returned::Nothing, effects);
            if self.waiting() > 0 {
                // Behind others only what would be refused at once is known.
                return match self.gates.refuses(&self.plan, cost, now) {
                    Some(refused) => Entry::Refused(refused),
                    None => Entry::Wait(None),
                };
            }
        }
        self.admit(cost, now, &mut effects.events)
    }

    /// Admits a newcomer where nobody waits.
    #[inline]
    pub(crate) fn admit(&mut self, cost: Cost, now: Instant, events: &mut Vec<Event>) -> Entry {
        match self.gates.admit(&self.plan, cost, 0, now, events) {
            Ok(charge) => Entry::Admitted(charge),
            Err(Verdict::Refuse(refused)) => Entry::Refused(refused),
            Err(Verdict::Wait(wait)) => Entry::Wait(Some(wait)),
            Err(Verdict::Admit) => unreachable!("what is admitted is charged"),
        }
    }

    /// Why a caller that waits no longer than `deadline` is turned away at once; `None` if it may queue.
    pub(crate) fn hopeless(
        &self,
        cost: Cost,
        ahead: u32,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Option<Refused> {
        let now = now.max(self.gates.latest());
        let (by, at) = self.gates.bound_at(&self.plan, cost, ahead, now)?;
        (at > deadline?).then(|| Refused::Limited { by, retry_after: Some(at.since(now)) })
    }

    /// The answer to a caller that would have to wait, and what the gates said to it if nobody is ahead.
    pub(crate) fn limited(&self, cost: Cost, wait: Option<Wait>, now: Instant) -> Refused {
        let now = now.max(self.gates.latest());
        let bound = self.gates.bound_at(&self.plan, cost, self.waiting(), now);
        let by = wait.map_or(Gate::Queue, |wait| wait.by);
        // A head may ask again before its time: what the gates say of now is the floor.
        let at = wait.and_then(|wait| Some(wait.until?.max(wait.floor))).or(bound.map(|(_, at)| at));
        Refused::Limited { by, retry_after: at.map(|at| at.since(now)) }
    }

    /// Puts a caller in line.
    ///
    /// # Errors
    /// [`Refused::Busy`] when the line is as long as it may be.
    pub(crate) fn join(
        &mut self,
        cost: Cost,
        home: Home,
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
        let ticket = queue.push(cost, home, deadline, waker, None);
        if let Some(wait) = wait {
            queue.block(wait);
        }
        Ok(ticket)
    }

    /// When the waiter behind `ticket` came.
    pub(crate) fn arrival(&self, ticket: Ticket) -> Option<u64> {
        self.queue.as_ref().and_then(|queue| queue.arrival(ticket))
    }

    /// Those who have queued so far.
    pub(crate) fn arrived(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.arrived())
    }

    /// Puts a caller back in line where it belongs by its arrival, and asks for it if that is the front.
    ///
    /// It was admitted before, so no bound turns it away: those who may come back are bounded where they wait.
    ///
    /// # Errors
    /// What the gates refuse at once, and a deadline that cannot be met.
    pub(crate) fn rejoin(
        &mut self,
        cost: Cost,
        home: Home,
        deadline: Option<Instant>,
        waker: Waker,
        (arrival, now): (u64, Instant),
        effects: &mut Effects,
    ) -> Result<Ticket, Refused> {
        let ahead = self.queue.as_ref().map_or(0, |queue| queue.ahead_of(arrival));
        let refused = self.gates.refuses(&self.plan, cost, now.max(self.gates.latest()));
        if let Some(refused) = refused.or_else(|| self.hopeless(cost, ahead, deadline, now)) {
            effects.dropped.push(waker);
            return Err(refused);
        }
        let queue = self.queue.get_or_insert_with(|| Box::new(Queue::new()));
        let ticket = queue.push(cost, home, deadline, waker, Some(arrival));
        self.pump(now, Returned::Nothing, effects);
        Ok(ticket)
    }

    /// What became of a place in line; while it waits, `waker` is exchanged for the one left before.
    pub(crate) fn fetch(
        &mut self,
        ticket: Ticket,
        home: Home,
        waker: &mut Option<Waker>,
    ) -> Option<Result<Charge, Refused>> {
        self.queue.as_mut()?.fetch(ticket, home, waker).map(Fate::known)
    }

    /// What became of a place in line, if its turn has come.
    pub(crate) fn ended(&mut self, ticket: Ticket) -> Option<Result<Charge, Refused>> {
        self.queue.as_mut()?.ended(ticket).map(Fate::known)
    }

    /// Why the head waits, if it is the head that asks.
    pub(crate) fn wait_of(&self, ticket: Ticket) -> Option<Wait> {
        self.queue.as_ref().filter(|queue| queue.is_head(ticket)).and_then(|queue| queue.blocked())
    }

    /// Tells of grants that nobody comes for. Asked by newcomers that have to wait behind them.
    pub(crate) fn look_for_unseen(&mut self, now: Instant, effects: &mut Effects) {
        if let Some(queue) = &mut self.queue
            && queue.finds_unseen(now, UNSEEN_PATIENCE)
        {
            effects.events.push(Event::GrantUnseen { span: UNSEEN_PATIENCE });
        }
    }

    /// Grants or refuses the head as long as it is worth asking and does not have to wait.
    pub(crate) fn pump(&mut self, now: Instant, returned: Returned, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        let now = now.max(self.gates.latest());
        effects.more = false;
        let mut granted = 0;
        if queue.is_due(now, returned) {
            while let Some(cost) = queue.head() {
                if granted == GRANTS_MAX {
                    effects.more = true;
                    queue.unblock();
                    break;
                }
                let behind = queue.waiting() - 1;
                let fate = match self.gates.admit(&self.plan, cost, behind, now, &mut effects.events) {
                    Ok(charge) => Fate::Granted(charge),
                    Err(Verdict::Refuse(refused)) => Fate::Refused(refused),
                    Err(Verdict::Wait(wait)) => {
                        queue.block(wait);
                        break;
                    }
                    Err(Verdict::Admit) => unreachable!("what is admitted is charged"),
                };
                granted += 1;
                effects.wakers.extend(queue.end_head(fate));
            }
        } else if queue.is_helped_by(returned) {
            queue.settle_for_time();
        }
        match queue.timer() {
            Timer::Wake(waker) => effects.wakers.extend(waker),
            Timer::Missing => effects.timer_missing = true,
        }
    }

    /// Something was given back or changed; a change is worth asking for whatever the head was told.
    pub(crate) fn pump_after(&mut self, now: Instant, returned: Returned, effects: &mut Effects) {
        if effects.events.is_empty() {
            self.pump(now, returned, effects);
        } else {
            self.pump_changed(now, effects);
        }
    }

    /// Limits, pause, circuit or lifecycle changed: whoever can no longer be served hears of it at once.
    pub(crate) fn pump_changed(&mut self, now: Instant, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        let now = now.max(self.gates.latest());
        let (gates, plan) = (&self.gates, &self.plan);
        let is_later = |event: &Event| matches!(event, Event::Paused { .. } | Event::Slowed { .. });
        let is_retuned = effects.events.contains(&Event::Retuned);
        if is_retuned || (queue.hurried > 0 && effects.events.iter().any(is_later)) {
            // Only bounds that cost nothing to know: the walk is as long as the line.
            effects.wakers.extend(queue.refuse_some(|cost, ahead, deadline| {
                let too_late = deadline.and_then(|deadline| {
                    let (by, at) = gates.firm_at(plan, ahead, now)?;
                    (at > deadline).then(|| Refused::Limited { by, retry_after: Some(at.since(now)) })
                });
                too_late.or_else(|| gates.refuses(plan, cost, now).filter(Refused::is_final))
            }));
        }
        queue.unblock();
        self.pump(now, Returned::Tokens, effects);
    }

    /// Gives a place in line up; a grant that was not seen goes back whole, and those behind are promoted.
    pub(crate) fn leave(&mut self, ticket: Ticket, now: Instant, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        let (fate, waker) = queue.leave(ticket);
        effects.dropped.extend(waker);
        if let Some(Fate::Granted(charge)) = fate
            && !is_planted(Bug::ForgetUnseen)
        {
            self.gates.undo(&self.plan, charge, now, &mut effects.events);
            queue.unblock();
        }
        if !is_planted(Bug::ForgetThoseBehind) {
            self.pump(now, Returned::Nothing, effects);
        }
    }

    /// Takes back an admission that never went out, and lets in whoever that lets in.
    pub(crate) fn undo(&mut self, charge: Charge, now: Instant, effects: &mut Effects) {
        self.gates.undo(&self.plan, charge, now, &mut effects.events);
        if let Some(queue) = &mut self.queue {
            queue.unblock();
        }
        self.pump_after(now, Returned::Tokens, effects);
    }

    /// Gives the timer to the waiter behind `ticket`, if it must keep one. Answers the keeper's number.
    pub(crate) fn take_timer(
        &mut self,
        ticket: Ticket,
        home: Home,
        waker: Option<Waker>,
        effects: &mut Effects,
    ) -> Option<u32> {
        let queue = self.queue.as_mut()?;
        if !queue.wants_keeper(ticket) {
            return None;
        }
        let (id, old) = queue.new_keeper(home, waker);
        // A keeper elsewhere is woken, and ends when it finds that it is none.
        effects.wakers.extend(old.and_then(|keeper| keeper.waker));
        Some(id)
    }

    /// The timer is missing where the head lives. Whoever is there, and so runs this, becomes the keeper; else
    /// the head is woken to become it.
    pub(crate) fn find_keeper(&mut self, here: Option<Home>, effects: &mut Effects) -> Option<u32> {
        effects.timer_missing = false;
        let queue = self.queue.as_mut()?;
        if !matches!(queue.timer(), Timer::Missing) {
            return None;
        }
        if let Some(home) = here.filter(|here| queue.head_home() == Some(*here)) {
            let (id, old) = queue.new_keeper(home, None);
            effects.wakers.extend(old.and_then(|keeper| keeper.waker));
            return Some(id);
        }
        if !is_planted(Bug::LoseTimer) {
            effects.wakers.extend(queue.head_waker());
            // Until the head is polled, a keeper elsewhere is better than none.
            effects.wakers.extend(queue.keeper.as_mut().and_then(|keeper| keeper.waker.take()));
        }
        None
    }

    /// A keeper's round.
    pub(crate) fn keep(&mut self, id: u32, waker: Waker, now: Instant, effects: &mut Effects) -> Round {
        let is_keeper = |queue: &Queue| queue.keeper.as_ref().is_some_and(|keeper| keeper.id == id);
        let Some(queue) = self.queue.as_mut().filter(|queue| is_keeper(queue)) else {
            effects.dropped.push(waker);
            return Round::Ended;
        };
        if let Some(keeper) = &mut queue.keeper {
            keeper.armed = None;
            effects.dropped.extend(keeper.waker.take());
        }
        self.pump(now, Returned::Nothing, effects);
        let Some(queue) = &mut self.queue else { return Round::Ended };
        if queue.waiting() == 0 {
            queue.keeper = None;
            effects.dropped.push(waker);
            return Round::Ended;
        }
        let at = queue.wake_at();
        if let Some(keeper) = &mut queue.keeper {
            keeper.armed = at;
            keeper.waker = Some(waker);
        }
        Round::Sleep(at)
    }

    /// A keeper is gone: the head is woken to take the timer over.
    pub(crate) fn give_up_timer(&mut self, id: u32, effects: &mut Effects) {
        let Some(queue) = &mut self.queue else { return };
        if queue.keeper.as_ref().is_none_or(|keeper| keeper.id != id) {
            return;
        }
        effects.dropped.extend(queue.keeper.take().and_then(|keeper| keeper.waker));
        if !is_planted(Bug::LoseTimer) {
            effects.wakers.extend(queue.head_waker());
        }
    }
}
