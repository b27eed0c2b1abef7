//! The future of `acquire` for a queued caller, and its blocking variant.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;
use tidegate_core::verdict::{Gate, Verdict};

use crate::clock::Sleep;
use crate::fault_injection::{Bug, is_injected};
use crate::observe::WaitTimer;
use crate::queue::{Refund, Ticket, Timer};
use crate::state::{Effects, Entry};
use crate::thread_waker::thread_waker;
use crate::throttle::Inner;
use crate::timer_task::{TimerHost, TimerStep, TimerTask};

/// A queued caller. Dropping it leaves the queue.
pub(crate) struct AcquireFuture<'a> {
    inner: &'a Arc<Inner>,
    cost: Cost,
    deadline: Option<Instant>,
    /// Its arrival number, once it has queued; a caller that queued before resumes its former position.
    pub(crate) arrival: Option<u64>,
    /// Its place, from the first poll until it is decided.
    ticket: Option<Ticket>,
    /// The caller's own deadline; a waiter without one has no timer.
    sleep: Option<Sleep>,
    /// The throttle's timer, if no runtime runs it.
    timer_task: Option<TimerTask>,
    /// The id of the throttle's timer, if this thread runs it while parked.
    timer_id: Option<u32>,
    /// Its host if it is not in a runtime.
    own_host: Option<TimerHost>,
    /// Whether a blocked thread drives it: that has no runtime, wherever it runs.
    is_thread: bool,
    /// Since when and for what it has waited, if it is observed.
    wait_timer: Option<WaitTimer>,
}

/// The result of a poll of the queue.
enum PollResult {
    Decided(Result<Charge, Refused>),
    /// Still queued; with an id, this caller must run the throttle's timer.
    Queued(Option<u32>),
}

impl<'a> AcquireFuture<'a> {
    pub(crate) fn new(inner: &'a Arc<Inner>, cost: Cost, deadline: Option<Instant>) -> Self {
        Self {
            inner,
            cost,
            deadline,
            arrival: None,
            ticket: None,
            sleep: None,
            timer_task: None,
            timer_id: None,
            own_host: None,
            is_thread: false,
            wait_timer: None,
        }
    }

    /// Its host: a blocked thread is its own host, a future's host is the runtime that polls it, if any.
    fn host(&mut self) -> TimerHost {
        let runtime = if self.is_thread { None } else { TimerHost::runtime() };
        runtime.unwrap_or_else(|| *self.own_host.get_or_insert_with(TimerHost::own_host))
    }

    /// Joins the queue, unless it is admitted after all.
    ///
    /// `timer` is the waker of a thread that runs the timer itself.
    fn join(&mut self, waker: Waker, timer: Option<Waker>) -> PollResult {
        if let Some(arrival) = self.arrival {
            return self.rejoin(arrival, waker, timer);
        }
        let host = self.host();
        let mut effects = Effects::default();
        let mut by = None;
        let (mut state, now) = self.inner.lock_timed(self.inner.reading());
        self.inner.will_queue();
        let result = match state.enter(self.cost, now, &mut effects) {
            Entry::Admitted(charge) => {
                self.arrival = Some(state.arrived());
                PollResult::Decided(Ok(charge))
            }
            Entry::Refused(refused) => PollResult::Decided(Err(refused)),
            Entry::Wait(wait) => {
                if is_injected(Bug::JoinLate) {
                    drop(state);
                    state = self.inner.lock();
                }
                let joined = match state.deadline_refusal(self.cost, state.waiting(), self.deadline, now) {
                    Some(refused) => Err(refused),
                    None => state.join(self.cost, host, self.deadline, waker, wait, &mut effects),
                };
                match joined {
                    Err(refused) => PollResult::Decided(Err(refused)),
                    Ok(ticket) => {
                        self.ticket = Some(ticket);
                        self.arrival = state.arrival(ticket);
                        by = Some(wait.map_or(Gate::Queue, |wait| wait.by));
                        PollResult::Queued(state.take_timer(ticket, host, timer, &mut effects))
                    }
                }
            }
        };
        // An existing timer may sleep too long for this head.
        if let Some(Timer::Wake(waker)) = state.queue.as_mut().map(|queue| queue.timer()) {
            effects.wakers.extend(waker);
        }
        let has_unseen = state.queue.as_ref().is_some_and(|queue| queue.has_unseen());
        self.inner.release(state, effects);
        self.wait_timer = by.and_then(|by| self.inner.start_wait_timer(by));
        if has_unseen {
            self.look_for_unseen();
        }
        result
    }

    /// Resumes its former position. If it is decided at once, it also gets one spurious wake-up.
    fn rejoin(&mut self, arrival: u64, waker: Waker, timer: Option<Waker>) -> PollResult {
        let host = self.host();
        let mut effects = Effects::default();
        let (mut state, now) = self.inner.lock_timed(self.inner.reading());
        self.inner.will_queue();
        let joined = state.rejoin(self.cost, host, self.deadline, waker, (arrival, now), &mut effects);
        let known = joined.map(|ticket| state.take_decision(ticket).ok_or(ticket));
        let result = match known {
            Err(refused) => PollResult::Decided(Err(refused)),
            Ok(Ok(decision)) => PollResult::Decided(decision),
            Ok(Err(ticket)) => {
                self.ticket = Some(ticket);
                PollResult::Queued(state.take_timer(ticket, host, timer, &mut effects))
            }
        };
        self.inner.release(state, effects);
        result
    }

    /// Checks whether it is decided.
    fn check(&mut self, ticket: Ticket, waker: Waker, timer: Option<Waker>) -> PollResult {
        let host = self.host();
        let mut effects = Effects::default();
        let mut waker = Some(waker);
        let mut state = self.inner.lock();
        let decision = state.fetch(ticket, host, &mut waker);
        let result = match &decision {
            Some(_) => PollResult::Queued(None),
            None => PollResult::Queued(state.take_timer(ticket, host, timer.clone(), &mut effects)),
        };
        self.inner.release(state, effects);
        let Some(decision) = decision else { return result };
        self.ticket = None;
        match (decision.map(|charge| self.inner.confirmed(charge)), waker) {
            // Granted while it was not polled, but a pause has begun since: the request must not be sent yet.
            (Ok(Err(None)), Some(waker)) => self.join(waker, timer),
            (Ok(Ok(charge)), _) => PollResult::Decided(Ok(charge)),
            (Ok(Err(Some(refused))) | Err(refused), _) => PollResult::Decided(Err(refused)),
            (Ok(Err(None)), None) => unreachable!("a decided waiter has no stored waker"),
        }
    }

    /// The caller's deadline has passed: leaves, unless it is decided at this very moment.
    fn expire(&mut self, ticket: Ticket) -> Result<Charge, Refused> {
        let mut effects = Effects::default();
        let mut left = None;
        let (mut state, now) = self.inner.lock_timed(Some(self.inner.clock().now()));
        self.ticket = None;
        // A waiter that is due in this tick is admitted in this tick, even if the timer fires a moment later.
        let host = self.host();
        let decision = loop {
            state.pump(now, Refund::Nothing, &mut effects);
            let decision = state.fetch(ticket, host, &mut left);
            if decision.is_some() || !effects.more {
                break decision;
            }
        };
        let decision = decision.unwrap_or_else(|| {
            let wait = state.wait_of(ticket);
            state.leave(ticket, now, &mut effects);
            Err(state.limited(self.cost, wait, now))
        });
        self.inner.release(state, effects);
        self.inner.confirmed(decision?).map_err(|refused| {
            refused.unwrap_or_else(|| {
                let (state, now) = self.inner.lock_timed(Some(self.inner.clock().now()));
                state.limited(self.cost, None, now)
            })
        })
    }

    /// Reports the result, and completes with it.
    fn finish(&mut self, decision: Result<Charge, Refused>) -> Result<Charge, Refused> {
        self.inner.observe_acquire(self.wait_timer.take(), decision.as_ref().map(|_| ()));
        // It may have been granted some time before this task was polled.
        decision.map(|charge| self.inner.mark_sent(charge))
    }

    /// Blocks the thread until it is decided.
    pub(crate) fn block(mut self) -> Result<Charge, Refused> {
        let waker = thread_waker();
        self.is_thread = true;
        let mut result = self.join(waker.clone(), Some(waker.clone()));
        loop {
            let ticket = match (result, self.ticket) {
                (PollResult::Decided(decision), _) => return self.finish(decision),
                (PollResult::Queued(_), None) => unreachable!("a queued waiter has a ticket"),
                (PollResult::Queued(timer_id), Some(ticket)) => {
                    self.timer_id = timer_id.or(self.timer_id);
                    ticket
                }
            };
            let now = self.inner.clock().now();
            if self.deadline.is_some_and(|deadline| deadline <= now) {
                let decision = self.expire(ticket);
                return self.finish(decision);
            }
            let timer = self.round(&waker, now);
            // A decision made in between has already unparked this thread, so `park` returns at once.
            match earliest(timer, self.deadline) {
                Some(at) => self.inner.clock().park_until(at),
                None => thread::park(),
            }
            result = self.check(ticket, waker.clone(), Some(waker.clone()));
        }
    }

    /// One timer round by the thread that runs the timer: pumps, and returns when to wake.
    fn round(&mut self, waker: &Waker, now: Instant) -> Option<Instant> {
        let id = self.timer_id?;
        let mut effects = Effects::default();
        let waker = waker.clone();
        let mut state = self.inner.lock();
        let round = state.run_timer(id, waker, now, &mut effects);
        self.inner.release(state, effects);
        match round {
            TimerStep::Sleep(at) => at,
            TimerStep::Done => {
                self.timer_id = None;
                None
            }
        }
    }

    /// Polls the throttle's timer if no runtime runs it.
    fn poll_timer_task(&mut self, context: &mut Context<'_>) {
        if let Some(timer_task) = &mut self.timer_task
            && Pin::new(timer_task).poll(context).is_ready()
        {
            self.timer_task = None;
        }
    }

    #[cold]
    fn look_for_unseen(&self) {
        let now = self.inner.clock().now();
        let mut effects = Effects::default();
        let mut state = self.inner.lock();
        state.look_for_unseen(now, &mut effects);
        self.inner.release(state, effects);
    }
}

impl Future for AcquireFuture<'_> {
    type Output = Result<Charge, Refused>;

    // Apart, so that the fast path before it stays small enough to be inlined.
    #[inline(never)]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        // Before the check: the timer may decide this very waiter.
        this.poll_timer_task(context);
        let waker = context.waker().clone();
        let result = match this.ticket {
            None => this.join(waker, None),
            Some(ticket) => this.check(ticket, waker, None),
        };
        let timer_id = match result {
            PollResult::Decided(decision) => return Poll::Ready(this.finish(decision)),
            PollResult::Queued(timer_id) => timer_id,
        };
        if let Some(id) = timer_id {
            let mut timer_task = TimerTask::new(Arc::downgrade(this.inner), id);
            timer_task.prime(this.inner, this.inner.wake_at());
            this.timer_task = timer_task.spawn();
            this.poll_timer_task(context);
        }
        let (Some(deadline), Some(ticket)) = (this.deadline, this.ticket) else { return Poll::Pending };
        let inner = this.inner;
        let sleep = this.sleep.get_or_insert_with(|| inner.clock().sleep_until(deadline));
        match sleep.as_mut().poll(context) {
            Poll::Ready(()) => {
                let decision = this.expire(ticket);
                Poll::Ready(this.finish(decision))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for AcquireFuture<'_> {
    fn drop(&mut self) {
        let mut effects = Effects::default();
        if let Some(ticket) = self.ticket.take() {
            let (mut state, now) = self.inner.lock_timed(self.inner.reading());
            state.leave(ticket, now, &mut effects);
            self.inner.release(state, effects);
            self.inner.observe_abandoned(self.wait_timer.take());
        }
        if let Some(id) = self.timer_id.take() {
            self.inner.release_timer(id);
        }
    }
}

impl Inner {
    /// Confirms a grant that was made while the caller was not polled. If the request may no longer be sent,
    /// the charge is refunded in full; with an error if it is refused.
    #[inline]
    pub(crate) fn confirmed(&self, charge: Charge) -> Result<Charge, Option<Refused>> {
        // Each such change emits an event, and sets the flag when it does.
        if self.has_begun() { self.confirm(charge) } else { Ok(charge) }
    }

    #[cold]
    fn confirm(&self, charge: Charge) -> Result<Charge, Option<Refused>> {
        let mut effects = Effects::default();
        let (mut state, now) = self.lock_timed(Some(self.clock().now()));
        self.update_begun(&state);
        let verdict = state.gates.confirm(&state.plan, &charge, now);
        if verdict == Verdict::Admit {
            return Ok(charge);
        }
        state.undo(charge, now, &mut effects);
        self.release(state, effects);
        match verdict {
            Verdict::Refuse(refused) => Err(Some(refused)),
            Verdict::Wait(_) | Verdict::Admit => Err(None),
        }
    }
}

fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
