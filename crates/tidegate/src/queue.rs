//! The FIFO queue of a throttle's waiters, and the owner of its timer. It has no runtime, clock or lock of
//! its own.
//!
//! First come, first served: the head is never overtaken, so a costly request cannot starve. Every change
//! pumps the queue: [`State::pump`](crate::state::State::pump) asks the gates for the head and stores its
//! charge here until its owner collects it. The owner need not be polled for that, so a task that is busy elsewhere blocks only its own
//! grant.
//!
//! Waiters live in a slab, linked by index, so leaving from the middle is as cheap as from the front. Wakers
//! are passed by value: cloned before the lock is taken, woken or dropped after it is released.

use std::task::Waker;
use std::time::Duration;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;
use tidegate_core::verdict::{Gate, Wait};

use crate::timer_task::{TimerHost, TimerOwner};

/// No waiter.
const NIL: u32 = u32::MAX;
/// Slots examined for an uncollected grant by each newcomer.
const EXAMINED_MAX: usize = 8;
/// A larger slab is freed when the last waiter has left.
const SLAB_KEPT: usize = 64;

/// A place in the queue, valid until it is collected or left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    index: u32,
    serial: u32,
}

/// The waiters of one throttle.
#[derive(Debug)]
pub(crate) struct Queue {
    slab: Vec<Waiter>,
    free: u32,
    head: u32,
    tail: u32,
    waiting: u32,
    /// Queued waiters that have a deadline.
    pub(crate) with_deadline: u32,
    /// Granted or refused, and not yet collected by their owners.
    unseen: u32,
    /// Why the head waits, as of the last admission attempt.
    blocked: Option<Wait>,
    pub(crate) timer_owner: Option<TimerOwner>,
    /// Timer owners so far; each gets a fresh id.
    timer_owners: u32,
    serial: u32,
    /// Waiters that have joined so far.
    arrived: u64,
    /// Where the search for uncollected grants continues.
    cursor: usize,
}

#[derive(Debug)]
struct Waiter {
    state: WaiterState,
    waker: Option<Waker>,
    host: TimerHost,
    deadline: Option<Instant>,
    /// Arrival number; the queue is ordered by it.
    arrival: u64,
    serial: u32,
    previous: u32,
    next: u32,
}

#[derive(Debug)]
enum WaiterState {
    /// In the queue.
    Waiting(Cost),
    /// Granted; the owner has yet to collect the charge. Stamped when first found uncollected.
    Granted(Charge, Option<Instant>),
    /// Refused; the owner has yet to collect the error.
    Refused(Refused),
    /// On the free list.
    Free,
}

/// How a place in the queue ended.
#[derive(Debug)]
pub(crate) enum Decision {
    Granted(Charge),
    Refused(Refused),
}

impl Decision {
    pub(crate) fn into_result(self) -> Result<Charge, Refused> {
        match self {
            Self::Granted(charge) => Ok(charge),
            Self::Refused(refused) => Err(refused),
        }
    }
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Self {
            slab: Vec::new(),
            free: NIL,
            head: NIL,
            tail: NIL,
            waiting: 0,
            with_deadline: 0,
            unseen: 0,
            blocked: None,
            timer_owner: None,
            timer_owners: 0,
            serial: 0,
            arrived: 0,
            cursor: 0,
        }
    }

    /// The number of waiters.
    pub(crate) const fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The head's cost.
    pub(crate) fn head(&self) -> Option<Cost> {
        match self.slab.get(self.head as usize)?.state {
            WaiterState::Waiting(cost) => Some(cost),
            WaiterState::Granted(..) | WaiterState::Refused(_) | WaiterState::Free => {
                unreachable!("a granted or refused waiter leaves the queue")
            }
        }
    }

    pub(crate) fn is_head(&self, ticket: Ticket) -> bool {
        self.head == ticket.index && self.waiter(ticket).is_some()
    }

    /// Joins the queue: at its end, or in the order of `arrival` for a caller that was queued before.
    pub(crate) fn push(
        &mut self,
        cost: Cost,
        host: TimerHost,
        deadline: Option<Instant>,
        waker: Waker,
        arrival: Option<u64>,
    ) -> Ticket {
        self.serial = self.serial.wrapping_add(1);
        let (previous, next) = match arrival {
            Some(arrival) => self.gap_of(arrival),
            None => (self.tail, NIL),
        };
        let arrival = arrival.unwrap_or_else(|| {
            self.arrived += 1;
            self.arrived
        });
        let waiter = Waiter {
            state: WaiterState::Waiting(cost),
            waker: Some(waker),
            host,
            deadline,
            arrival,
            serial: self.serial,
            previous,
            next,
        };
        let index = self.store(waiter);
        if let Some(waiter) = self.slab.get_mut(previous as usize) {
            waiter.next = index;
        } else {
            self.head = index;
            // The previous head's wait does not apply to the new one.
            self.blocked = None;
        }
        match self.slab.get_mut(next as usize) {
            Some(waiter) => waiter.previous = index,
            None => self.tail = index,
        }
        self.waiting += 1;
        self.with_deadline += u32::from(deadline.is_some());
        Ticket { index, serial: self.serial }
    }

    /// Waiters that have joined so far: a caller admitted now is ordered after them and before later ones.
    pub(crate) const fn arrived(&self) -> u64 {
        self.arrived
    }

    /// The arrival number of the waiter behind `ticket`.
    pub(crate) fn arrival(&self, ticket: Ticket) -> Option<u64> {
        self.waiter(ticket).map(|waiter| waiter.arrival)
    }

    /// The number of waiters that arrived at `arrival` or before.
    pub(crate) fn ahead_of(&self, arrival: u64) -> u32 {
        let mut ahead = 0;
        let mut index = self.head;
        while let Some(waiter) = self.slab.get(index as usize).filter(|waiter| waiter.arrival <= arrival) {
            (ahead, index) = (ahead + 1, waiter.next);
        }
        ahead
    }

    /// The neighbours for a waiter that arrived at `arrival`. It arrived long ago, so its place is near the
    /// front.
    fn gap_of(&self, arrival: u64) -> (u32, u32) {
        let (mut previous, mut next) = (NIL, self.head);
        while let Some(waiter) = self.slab.get(next as usize).filter(|waiter| waiter.arrival <= arrival) {
            (previous, next) = (next, waiter.next);
        }
        (previous, next)
    }

    /// Collects the result of `ticket`. While it waits, swaps `waker` with the stored one.
    pub(crate) fn fetch(
        &mut self,
        ticket: Ticket,
        host: TimerHost,
        waker: &mut Option<Waker>,
    ) -> Option<Decision> {
        let waiter = self.waiter_mut(ticket)?;
        if let WaiterState::Waiting(_) = waiter.state {
            std::mem::swap(&mut waiter.waker, waker);
            // A future may move to another runtime between two polls.
            waiter.host = host;
            return None;
        }
        self.take_decision(ticket)
    }

    /// The result of `ticket`, if it is decided.
    pub(crate) fn take_decision(&mut self, ticket: Ticket) -> Option<Decision> {
        if matches!(self.waiter(ticket)?.state, WaiterState::Waiting(_)) {
            return None;
        }
        // Its waker was taken when it was decided, so no waker is dropped here.
        let (decision, _none) = self.leave(ticket);
        decision
    }

    /// Leaves the queue. Returns an uncollected grant, to be undone or used.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> (Option<Decision>, Option<Waker>) {
        if self.waiter(ticket).is_none() {
            return (None, None);
        }
        if matches!(self.slab[ticket.index as usize].state, WaiterState::Waiting(_)) {
            self.unlink(ticket.index);
        } else {
            self.unseen -= 1;
        }
        let free = self.free;
        let waiter = &mut self.slab[ticket.index as usize];
        let waker = waiter.waker.take();
        waiter.next = free;
        let state = std::mem::replace(&mut waiter.state, WaiterState::Free);
        self.free = ticket.index;
        if self.waiting == 0 && self.unseen == 0 && self.slab.len() > SLAB_KEPT {
            self.slab = Vec::new();
            self.free = NIL;
        }
        let decision = match state {
            WaiterState::Granted(charge, _) => Some(Decision::Granted(charge)),
            WaiterState::Refused(refused) => Some(Decision::Refused(refused)),
            WaiterState::Waiting(_) | WaiterState::Free => None,
        };
        (decision, waker)
    }

    /// Decides the head; the returned waker must be woken after unlocking.
    pub(crate) fn end_head(&mut self, decision: Decision) -> Option<Waker> {
        let index = self.head;
        self.end(index, decision)
    }

    /// Why the head waits, as of the last admission attempt.
    pub(crate) const fn blocked(&self) -> Option<Wait> {
        self.blocked
    }

    /// The head was tried and has to wait.
    pub(crate) fn block(&mut self, wait: Wait) {
        self.blocked = Some(wait);
    }

    /// Something other than time changed: try the head again regardless of its last wait.
    pub(crate) fn unblock(&mut self) {
        self.blocked = None;
    }

    /// Whether to try the head at `now`. A refund helps a head that waits for one, but not before the floor
    /// of its timed gates; time helps a head that waits for time.
    pub(crate) fn is_due(&self, now: Instant, refund: Refund) -> bool {
        match (self.waiting, self.blocked) {
            (0, _) => false,
            (_, None) => true,
            (_, Some(wait)) if wait.until.is_some_and(|until| until <= now) => true,
            (_, Some(wait)) => self.is_helped_by(refund) && wait.floor <= now,
        }
    }

    /// Whether a refund can help the head: slots do not help a head that waits for tokens.
    pub(crate) fn is_helped_by(&self, refund: Refund) -> bool {
        match (refund, self.blocked.map(|wait| wait.by)) {
            (Refund::Nothing, _) | (Refund::Places, Some(Gate::Budget)) => false,
            (Refund::Places | Refund::Tokens, _) => true,
        }
    }

    /// A refund came before pace or rate can admit: the head is tried again when they can.
    pub(crate) fn wait_for_floor(&mut self) {
        if let Some(wait) = &mut self.blocked {
            // A budget or a tail may report a much later time: that estimate did not include this refund.
            wait.until = Some(wait.until.map_or(wait.floor, |until| until.min(wait.floor)));
        }
    }

    /// When to try the head again; `None` if no waiter waits for time.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        if self.waiting == 0 { None } else { self.blocked.and_then(|wait| wait.until) }
    }

    /// What must be done so that the timer is set correctly.
    ///
    /// The timer runs on the head's host: an owner elsewhere may be in a runtime that is not being driven. An
    /// owner on that host is woken if its timer is wrong. Without one, a caller running on that host becomes
    /// the owner; otherwise the head is woken to become it.
    pub(crate) fn timer(&mut self) -> Timer {
        let Some(host) = self.slab.get(self.head as usize).map(|head| head.host) else {
            // The queue is empty: a sleeping owner may exit.
            return Timer::Wake(self.timer_owner.as_mut().and_then(|timer_owner| timer_owner.waker.take()));
        };
        let Some(at) = self.wake_at() else { return Timer::Wake(None) };
        match &mut self.timer_owner {
            Some(timer_owner) if timer_owner.host == host => {
                Timer::Wake(if timer_owner.armed == Some(at) { None } else { timer_owner.waker.take() })
            }
            _ => Timer::Missing,
        }
    }

    /// Registers a new owner on `host`; returns its id, and the previous owner to be woken.
    pub(crate) fn new_timer_owner(
        &mut self,
        host: TimerHost,
        waker: Option<Waker>,
    ) -> (u32, Option<TimerOwner>) {
        self.timer_owners = self.timer_owners.wrapping_add(1);
        let armed = waker.as_ref().and(self.wake_at());
        let timer_owner = TimerOwner { id: self.timer_owners, host, armed, waker };
        (self.timer_owners, self.timer_owner.replace(timer_owner))
    }

    /// The head's host.
    pub(crate) fn head_host(&self) -> Option<TimerHost> {
        self.slab.get(self.head as usize).map(|head| head.host)
    }

    /// Whether the waiter behind `ticket` must run the timer.
    ///
    /// In a runtime, the first waiter that finds no owner there becomes it: time may start to matter under
    /// any plan, and the head may not be polled, or its runtime not driven, by then. Elsewhere only the head
    /// does, and only while time matters.
    pub(crate) fn needs_timer(&self, ticket: Ticket) -> bool {
        let Some(waiter) = self.waiter(ticket) else { return false };
        let is_kept = self.timer_owner.as_ref().is_some_and(|timer_owner| timer_owner.host == waiter.host);
        match waiter.host {
            _ if is_kept => false,
            TimerHost::Runtime(_) => true,
            TimerHost::Own(_) => self.is_head(ticket) && self.wake_at().is_some(),
        }
    }

    /// The head's waker, for an owner that releases the timer.
    pub(crate) fn head_waker(&mut self) -> Option<Waker> {
        self.slab.get_mut(self.head as usize).and_then(|head| head.waker.take())
    }

    /// Refuses every waiter for which `reason` returns an error, given its cost, the number of waiters ahead
    /// and its deadline. Returns their wakers.
    pub(crate) fn refuse_some(
        &mut self,
        reason: impl Fn(Cost, u32, Option<Instant>) -> Option<Refused>,
    ) -> Vec<Waker> {
        let mut wakers = Vec::new();
        let mut ahead = 0;
        let mut index = self.head;
        while let Some(waiter) = self.slab.get(index as usize) {
            let (next, deadline) = (waiter.next, waiter.deadline);
            let WaiterState::Waiting(cost) = waiter.state else {
                unreachable!("only waiting callers are in the queue")
            };
            match reason(cost, ahead, deadline) {
                Some(refused) => wakers.extend(self.end(index, Decision::Refused(refused))),
                None => ahead += 1,
            }
            index = next;
        }
        wakers
    }

    /// Examines a few slots for a grant uncollected for `timeout`. Stamps those found for the first time.
    pub(crate) fn finds_unseen(&mut self, now: Instant, timeout: Duration) -> bool {
        let mut found_one = false;
        for _ in 0..EXAMINED_MAX.min(self.slab.len()) {
            self.cursor = (self.cursor + 1) % self.slab.len();
            if let WaiterState::Granted(_, found) = &mut self.slab[self.cursor].state {
                let since = *found.get_or_insert(now);
                if now.since(since) >= timeout {
                    // Reported once: it is reported again only after another `timeout`.
                    *found = Some(now);
                    found_one = true;
                }
            }
        }
        found_one
    }

    /// Whether there are uncollected grants.
    pub(crate) const fn has_unseen(&self) -> bool {
        self.unseen > 0
    }

    fn end(&mut self, index: u32, decision: Decision) -> Option<Waker> {
        self.unlink(index);
        self.unseen += 1;
        let waiter = &mut self.slab[index as usize];
        waiter.state = match decision {
            Decision::Granted(charge) => WaiterState::Granted(charge, None),
            Decision::Refused(refused) => WaiterState::Refused(refused),
        };
        waiter.waker.take()
    }

    fn unlink(&mut self, index: u32) {
        let waiter = &self.slab[index as usize];
        let (previous, next) = (waiter.previous, waiter.next);
        let has_deadline = waiter.deadline.is_some();
        if let Some(waiter) = self.slab.get_mut(previous as usize) {
            waiter.next = next;
        } else {
            self.head = next;
            // The previous head's wait does not apply to the new one.
            self.blocked = None;
        }
        match self.slab.get_mut(next as usize) {
            Some(waiter) => waiter.previous = previous,
            None => self.tail = previous,
        }
        self.waiting -= 1;
        self.with_deadline -= u32::from(has_deadline);
    }

    fn store(&mut self, waiter: Waiter) -> u32 {
        if let Some(slot) = self.slab.get_mut(self.free as usize) {
            let index = self.free;
            self.free = slot.next;
            *slot = waiter;
            return index;
        }
        self.slab.push(waiter);
        u32::try_from(self.slab.len() - 1).unwrap_or_else(|_| unreachable!("waiters_max fits in u32"))
    }

    fn waiter(&self, ticket: Ticket) -> Option<&Waiter> {
        self.slab.get(ticket.index as usize).filter(|waiter| waiter.is(ticket))
    }

    fn waiter_mut(&mut self, ticket: Ticket) -> Option<&mut Waiter> {
        self.slab.get_mut(ticket.index as usize).filter(|waiter| waiter.is(ticket))
    }
}

impl Waiter {
    fn is(&self, ticket: Ticket) -> bool {
        self.serial == ticket.serial && !matches!(self.state, WaiterState::Free)
    }
}

/// What the timer needs.
#[derive(Debug)]
pub(crate) enum Timer {
    /// At most one waker must be woken.
    Wake(Option<Waker>),
    /// No owner runs on the head's host.
    Missing,
}

/// What the caller has just given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refund {
    Nothing,
    /// Slots, bytes, or a probe.
    Places,
    /// Tokens as well.
    Tokens,
}
