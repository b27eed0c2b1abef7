//! A caller in line: the future of `acquire`, and the same for a thread that blocks.

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
use crate::keeper::{Home, Keep, Round};
use crate::observe::Watch;
use crate::planted::{Bug, is_planted};
use crate::queue::{Returned, Ticket, Timer};
use crate::state::{Effects, Entry};
use crate::thread_waker::thread_waker;
use crate::throttle::Inner;

/// A caller in line. Dropped, it leaves.
pub(crate) struct Waiting<'a> {
    inner: &'a Arc<Inner>,
    cost: Cost,
    deadline: Option<Instant>,
    /// When it came, once it has been in line; one that was in line before takes its old place.
    pub(crate) arrival: Option<u64>,
    /// Its place, from the first look until its fate is known.
    ticket: Option<Ticket>,
    /// The caller's own deadline; a waiter without one has no timer.
    sleep: Option<Sleep>,
    /// The throttle's timer, where there is no runtime to run it.
    keep: Option<Keep>,
    /// The throttle's timer, where this thread keeps it while it is parked.
    keeper: Option<u32>,
    /// Its home where it has no runtime for one.
    alone: Option<Home>,
    /// Whether a thread blocks on it: that has no runtime, wherever it runs.
    is_thread: bool,
    /// Since when it has waited and for what, where somebody wants to know.
    watch: Option<Watch>,
}

/// What a look at the line says.
enum Look {
    Known(Result<Charge, Refused>),
    /// Still in line; with a number, this caller is to keep the throttle's timer.
    InLine(Option<u32>),
}

impl<'a> Waiting<'a> {
    pub(crate) fn new(inner: &'a Arc<Inner>, cost: Cost, deadline: Option<Instant>) -> Self {
        Self {
            inner,
            cost,
            deadline,
            arrival: None,
            ticket: None,
            sleep: None,
            keep: None,
            keeper: None,
            alone: None,
            is_thread: false,
            watch: None,
        }
    }

    /// Where it lives: a thread that blocks lives alone, a future in the runtime that polls it, if there is one.
    fn home(&mut self) -> Home {
        let runtime = if self.is_thread { None } else { Home::runtime() };
        runtime.unwrap_or_else(|| *self.alone.get_or_insert_with(Home::alone))
    }

    /// Takes a place in line, unless it may enter after all.
    ///
    /// `timer` is the waker of a thread that keeps the timer itself.
    fn join(&mut self, waker: Waker, timer: Option<Waker>) -> Look {
        if let Some(arrival) = self.arrival {
            return self.rejoin(arrival, waker, timer);
        }
        let home = self.home();
        let mut effects = Effects::default();
        let mut by = None;
        let (mut state, now) = self.inner.lock_timed(self.inner.reading());
        self.inner.will_queue();
        let look = match state.enter(self.cost, now, &mut effects) {
            Entry::Admitted(charge) => {
                self.arrival = Some(state.arrived());
                Look::Known(Ok(charge))
            }
            Entry::Refused(refused) => Look::Known(Err(refused)),
            Entry::Wait(wait) => {
                if is_planted(Bug::JoinLate) {
                    drop(state);
                    state = self.inner.lock();
                }
                let joined = match state.hopeless(self.cost, state.waiting(), self.deadline, now) {
                    Some(refused) => Err(refused),
                    None => state.join(self.cost, home, self.deadline, waker, wait, &mut effects),
                };
                match joined {
                    Err(refused) => Look::Known(Err(refused)),
                    Ok(ticket) => {
                        self.ticket = Some(ticket);
                        self.arrival = state.arrival(ticket);
                        by = Some(wait.map_or(Gate::Queue, |wait| wait.by));
                        Look::InLine(state.take_timer(ticket, home, timer, &mut effects))
                    }
                }
            }
        };
        // A keeper that is there already may sleep too long for this head.
        if let Some(Timer::Wake(waker)) = state.queue.as_mut().map(|queue| queue.timer()) {
            effects.wakers.extend(waker);
        }
        let has_unseen = state.queue.as_ref().is_some_and(|queue| queue.has_unseen());
        self.inner.release(state, effects);
        self.watch = by.and_then(|by| self.inner.watch(by));
        if has_unseen {
            self.look_for_unseen();
        }
        look
    }

    /// Takes its old place in line. Its turn may come at once; it is then woken for nothing, once.
    fn rejoin(&mut self, arrival: u64, waker: Waker, timer: Option<Waker>) -> Look {
        let home = self.home();
        let mut effects = Effects::default();
        let (mut state, now) = self.inner.lock_timed(self.inner.reading());
        self.inner.will_queue();
        let joined = state.rejoin(self.cost, home, self.deadline, waker, (arrival, now), &mut effects);
        let known = joined.map(|ticket| state.ended(ticket).ok_or(ticket));
        let look = match known {
            Err(refused) => Look::Known(Err(refused)),
            Ok(Ok(fate)) => Look::Known(fate),
            Ok(Err(ticket)) => {
                self.ticket = Some(ticket);
                Look::InLine(state.take_timer(ticket, home, timer, &mut effects))
            }
        };
        self.inner.release(state, effects);
        look
    }

    /// Looks whether its turn has come.
    fn look(&mut self, ticket: Ticket, waker: Waker, timer: Option<Waker>) -> Look {
        let home = self.home();
        let mut effects = Effects::default();
        let mut waker = Some(waker);
        let mut state = self.inner.lock();
        let fate = state.fetch(ticket, home, &mut waker);
        let look = match &fate {
            Some(_) => Look::InLine(None),
            None => Look::InLine(state.take_timer(ticket, home, timer.clone(), &mut effects)),
        };
        self.inner.release(state, effects);
        let Some(fate) = fate else { return look };
        self.ticket = None;
        match (fate.map(|charge| self.inner.confirmed(charge)), waker) {
            // It was let in while nobody looked, and does not go out yet: a pause has begun meanwhile.
            (Ok(Err(None)), Some(waker)) => self.join(waker, timer),
            (Ok(Ok(charge)), _) => Look::Known(Ok(charge)),
            (Ok(Err(Some(refused))) | Err(refused), _) => Look::Known(Err(refused)),
            (Ok(Err(None)), None) => unreachable!("whose fate is known leaves no waker behind"),
        }
    }

    /// The caller's own deadline has passed: leaves, unless its turn has come in this very moment.
    fn expire(&mut self, ticket: Ticket) -> Result<Charge, Refused> {
        let mut effects = Effects::default();
        let mut left = None;
        let (mut state, now) = self.inner.lock_timed(Some(self.inner.clock().now()));
        self.ticket = None;
        // What is due in this tick enters in this tick, though the timer may fire a moment later.
        let home = self.home();
        let fate = loop {
            state.pump(now, Returned::Nothing, &mut effects);
            let fate = state.fetch(ticket, home, &mut left);
            if fate.is_some() || !effects.more {
                break fate;
            }
        };
        let fate = fate.unwrap_or_else(|| {
            let wait = state.wait_of(ticket);
            state.leave(ticket, now, &mut effects);
            Err(state.limited(self.cost, wait, now))
        });
        self.inner.release(state, effects);
        self.inner.confirmed(fate?).map_err(|refused| {
            refused.unwrap_or_else(|| {
                let (state, now) = self.inner.lock_timed(Some(self.inner.clock().now()));
                state.limited(self.cost, None, now)
            })
        })
    }

    /// Its fate is known, and whoever looks is told.
    fn answer(&mut self, fate: Result<Charge, Refused>) -> Result<Charge, Refused> {
        self.inner.answered(self.watch.take(), fate.as_ref().map(|_| ()));
        // It may have been granted some time before this task was polled.
        fate.map(|charge| self.inner.goes_out(charge))
    }

    /// Blocks the thread until its turn has come.
    pub(crate) fn block(mut self) -> Result<Charge, Refused> {
        let waker = thread_waker();
        self.is_thread = true;
        let mut look = self.join(waker.clone(), Some(waker.clone()));
        loop {
            let ticket = match (look, self.ticket) {
                (Look::Known(fate), _) => return self.answer(fate),
                (Look::InLine(_), None) => unreachable!("whoever is in line has a ticket"),
                (Look::InLine(keeper), Some(ticket)) => {
                    self.keeper = keeper.or(self.keeper);
                    ticket
                }
            };
            let now = self.inner.clock().now();
            if self.deadline.is_some_and(|deadline| deadline <= now) {
                let fate = self.expire(ticket);
                return self.answer(fate);
            }
            let timer = self.round(&waker, now);
            // A turn that came in between has unparked this thread already, and it does not sleep.
            match earliest(timer, self.deadline) {
                Some(at) => self.inner.clock().park_until(at),
                None => thread::park(),
            }
            look = self.look(ticket, waker.clone(), Some(waker.clone()));
        }
    }

    /// What the throttle's timer asks of a thread that keeps it: to pump, and when to wake.
    fn round(&mut self, waker: &Waker, now: Instant) -> Option<Instant> {
        let id = self.keeper?;
        let mut effects = Effects::default();
        let waker = waker.clone();
        let mut state = self.inner.lock();
        let round = state.keep(id, waker, now, &mut effects);
        self.inner.release(state, effects);
        match round {
            Round::Sleep(at) => at,
            Round::Ended => {
                self.keeper = None;
                None
            }
        }
    }

    /// Runs the throttle's timer where there is no runtime to run it.
    fn poll_keep(&mut self, context: &mut Context<'_>) {
        if let Some(keep) = &mut self.keep
            && Pin::new(keep).poll(context).is_ready()
        {
            self.keep = None;
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

impl Future for Waiting<'_> {
    type Output = Result<Charge, Refused>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        // Before the look: a timer that fires may bring this very turn.
        this.poll_keep(context);
        let waker = context.waker().clone();
        let look = match this.ticket {
            None => this.join(waker, None),
            Some(ticket) => this.look(ticket, waker, None),
        };
        let keeper = match look {
            Look::Known(fate) => return Poll::Ready(this.answer(fate)),
            Look::InLine(keeper) => keeper,
        };
        if let Some(id) = keeper {
            let mut keep = Keep::new(Arc::downgrade(this.inner), id);
            keep.prime(this.inner, this.inner.wake_at());
            this.keep = keep.spawn();
            this.poll_keep(context);
        }
        let (Some(deadline), Some(ticket)) = (this.deadline, this.ticket) else { return Poll::Pending };
        let inner = this.inner;
        let sleep = this.sleep.get_or_insert_with(|| inner.clock().sleep_until(deadline));
        match sleep.as_mut().poll(context) {
            Poll::Ready(()) => {
                let fate = this.expire(ticket);
                Poll::Ready(this.answer(fate))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut effects = Effects::default();
        if let Some(ticket) = self.ticket.take() {
            let (mut state, now) = self.inner.lock_timed(self.inner.reading());
            state.leave(ticket, now, &mut effects);
            self.inner.release(state, effects);
            self.inner.gave_up(self.watch.take());
        }
        if let Some(id) = self.keeper.take() {
            self.inner.give_up_timer(id);
        }
    }
}

impl Inner {
    /// What was granted while nobody looked, if it may still go out. If not it goes back whole, and with a refusal where
    /// it is one.
    #[inline]
    pub(crate) fn confirmed(&self, charge: Charge) -> Result<Charge, Option<Refused>> {
        // Whatever begins is told, and marked when it is.
        if self.has_begun() { self.confirm(charge) } else { Ok(charge) }
    }

    #[cold]
    fn confirm(&self, charge: Charge) -> Result<Charge, Option<Refused>> {
        let mut effects = Effects::default();
        let (mut state, now) = self.lock_timed(Some(self.clock().now()));
        self.mark_begun(&state);
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
