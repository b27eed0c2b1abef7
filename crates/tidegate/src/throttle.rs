//! The throttle: one lock around the gates and the queue, and everything a caller can ask of it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::gate::Gates;
use tidegate_core::plan::{Draft, InvalidPlan, Plan};
use tidegate_core::random::Random;
use tidegate_core::snapshot::Snapshot;
use tidegate_core::time::Instant;
use tokio::sync::Notify;

use crate::builder::{Builder, fresh_random};
use crate::clock::Clock;
use crate::events::{Events, Sinks};
use crate::keeper::{Home, Keep};
use crate::meter::Gauged;
use crate::observe::Observer;
use crate::queue::Returned;
use crate::state::{Effects, State};
use crate::sync::{Mutex, MutexGuard};
use crate::tally::Tally;

/// Protects a callee: lets requests through as fast as it allows, and no faster.
///
/// Clones are handles to the same throttle.
///
/// ```
/// use tidegate::{Cost, Outcome, Throttle};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate::Refused> {
/// let throttle = Throttle::new();
/// let permit = throttle.acquire(Cost::request()).await?;
/// // ... the call ...
/// permit.settle(Outcome::success());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Throttle {
    pub(crate) inner: Arc<Inner>,
}

/// What all handles and permits of a throttle share.
// In the order in which the short way meets it: with many throttles each line of memory is a wait.
#[repr(C)]
pub(crate) struct Inner {
    /// Copies of what the plan says, readable without the lock: whether the clock is to be read before it, and
    /// whether the short way may be tried.
    timed: AtomicBool,
    settles_timed: AtomicBool,
    plain: AtomicBool,
    /// What is further away, or asked without the lock: [`QUEUED`] and [`BEGUN`]. Written under the lock.
    marks: AtomicU8,
    /// Which rules of a registry it follows.
    epoch: AtomicU32,
    state: Mutex<State>,
    /// What throttles of a kind share: it is not part of a throttle's own memory.
    setup: Arc<Setup>,
    /// For keepers, which must not keep a throttle alive.
    itself: Weak<Inner>,
    /// By which a registry finds it again.
    number: u64,
    /// What it adds to the gauges, where it is measured.
    pub(crate) gauged: Gauged,
}

/// Anybody has ever waited. Meant for whoever has the lock.
const QUEUED: u8 = 1;
/// Something may have begun that keeps those who were admitted and have not gone out: a pause, an open circuit, the end.
const BEGUN: u8 = 2;

/// Clock, sinks, counts, and who else is told.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) sinks: Sinks,
    /// Of the throttles that a registry holds.
    pub(crate) tally: Option<Tally>,
    /// Told when the last request has ended after a close, and when everybody who waits is turned away, be it in the
    /// queue or elsewhere: by a close, by an open circuit. Throttles of a kind share it, so whoever hears looks again.
    pub(crate) drained: Notify,
    pub(crate) observer: Observer,
}

impl Throttle {
    /// A throttle that finds out how fast the upstream may be called: [`Throttle::auto`] as it is.
    #[expect(clippy::missing_panics_doc, reason = "the draft is checked by a test")]
    pub fn new() -> Self {
        Self::auto().build().expect("the draft is within its bounds")
    }

    /// A builder with no gate at all: what is not asked for does not limit.
    pub fn builder() -> Builder {
        Builder::new(Draft::default())
    }

    /// A builder for [`Auto`](crate::Auto): rate and slots together, learned from what the upstream accepts, from its quota
    /// headers and its latency. It starts at ten requests per second and 32 slots and has no ceiling but 1,024 slots; a lower
    /// one can be set, and is reported as the reason when it is reached.
    ///
    /// ```
    /// use tidegate::{Auto, Slots, Throttle};
    ///
    /// let throttle = Throttle::auto().slots(Slots::adaptive(1..=64)).auto_within(Auto::default().rate_max(200.0)).build()?;
    /// assert_eq!(throttle.snapshot().control.unwrap().reason.to_string(), "probing");
    /// # Ok::<(), tidegate::InvalidPlan>(())
    /// ```
    pub fn auto() -> Builder {
        Builder::new(Draft::auto())
    }

    /// A polite builder with fixed ceilings: five slots and 0.2–30 s between entries with jitter, so at most five requests per
    /// second whatever the upstream allows, braking at three failures in a minute that are a tenth of the outcomes.
    pub fn gentle() -> Builder {
        Builder::new(Draft::gentle())
    }

    /// A builder for layered dispatch of requests of very different sizes: 400 slots, of which 10 while recovering
    /// from a pause; 5 MiB in flight, at twenty times the price while recovering; a recovering phase of 10 s; and
    /// after an overload a pause of 1 s for requests up to 128 KiB, of 5 s for larger ones.
    pub fn layered() -> Builder {
        Builder::new(Draft::layered())
    }

    /// A builder for one of many hosts: [`Throttle::auto`]; a circuit that opens for 15 s at five failures in a row or at 40 % of
    /// at least ten outcomes in 30 s, and closes with three probes; and three attempts for [`run`](Self::run), with jitter.
    ///
    /// ```
    /// let throttle = tidegate::Throttle::host().build()?;
    /// assert_eq!(throttle.snapshot().rate.unwrap().to_string(), "10/s");
    /// # Ok::<(), tidegate::InvalidPlan>(())
    /// ```
    pub fn host() -> Builder {
        Builder::new(Draft::host())
    }

    pub(crate) fn from_parts(plan: Arc<Plan>, setup: Arc<Setup>, random: Random) -> Self {
        Self { inner: Inner::new(plan, setup, random, 0) }
    }

    /// Another throttle under the same plan of the moment, clock and sinks, with a state of its own: what a
    /// throttle costs beyond its plan is measured with it.
    #[doc(hidden)]
    #[must_use]
    pub fn twin(&self) -> Self {
        let plan = Arc::clone(&self.inner.lock().plan);
        Self::from_parts(plan, Arc::clone(&self.inner.setup), fresh_random())
    }

    /// Pauses for `span`: nobody enters until then. A pause that runs longer already stays as it is. Hints of the
    /// far side are capped by the plan; this is not.
    ///
    /// Answers whether that raised anything.
    pub fn pause(&self, span: Duration) -> bool {
        self.change(|state, now, effects| {
            let waiting = state.waiting();
            state.gates.pause(&state.plan, span, waiting, now, &mut effects.events)
        })
    }

    /// Ends a pause, and the cautious time after it. Answers whether there was one.
    pub fn resume(&self) -> bool {
        self.change(|state, now, effects| state.gates.resume(&state.plan, now, &mut effects.events))
    }

    /// Changes limits while requests are waiting and in flight.
    ///
    /// Levels, requests in flight and the circuit stay; what was tuned stays within the new bounds. After a
    /// shrink nobody enters until enough have left. `edit` runs outside the lock, and again if another call
    /// changed the limits in between.
    ///
    /// # Errors
    /// [`InvalidPlan`] if a number is out of its bounds; nothing was changed.
    ///
    /// ```
    /// use tidegate::{Slots, Throttle};
    ///
    /// let throttle = Throttle::new();
    /// throttle.retune(|limits| limits.slots = Some(Slots::fixed(8)))?;
    /// assert_eq!(throttle.snapshot().slots, Some(8));
    /// # Ok::<(), tidegate::InvalidPlan>(())
    /// ```
    pub fn retune(&self, edit: impl Fn(&mut Draft)) -> Result<(), InvalidPlan> {
        loop {
            let old = Arc::clone(&self.inner.lock().plan);
            let mut draft = old.draft().clone();
            edit(&mut draft);
            let new = Arc::new(draft.check()?);
            let swapped = self.change(|state, now, effects| {
                let is_same = Arc::ptr_eq(&state.plan, &old);
                if is_same {
                    self.inner.put(state, &new, now, effects);
                }
                is_same
            });
            if swapped {
                return Ok(());
            }
        }
    }

    /// Everything there is to see, read under one lock.
    pub fn snapshot(&self) -> Snapshot {
        self.inner.snapshot()
    }

    /// What happens from now on, for reading at leisure.
    pub fn events(&self) -> Events {
        self.inner.setup.sinks.subscribe(&self.inner)
    }

    /// Changes something other than by entering or leaving, and lets in whoever that lets in.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State, Instant, &mut Effects) -> T) -> T {
        self.inner.change(change)
    }
}

impl Default for Throttle {
    fn default() -> Self {
        Self::new()
    }
}

impl Setup {
    /// Events lost to those who were told too slowly, without those lost to listeners of a registry's keys.
    pub(crate) fn events_lost(&self) -> u64 {
        self.sinks.lost() + self.observer.lost()
    }

    /// Events lost to anybody.
    pub(crate) fn all_events_lost(&self) -> u64 {
        self.events_lost() + self.sinks.registry().map_or(0, |registry| registry.lost())
    }
}

impl Inner {
    /// What is told when requests have ended, or those who wait are turned away.
    pub(crate) fn drained(&self) -> &Notify {
        &self.setup.drained
    }

    pub(crate) fn setup(&self) -> &Setup {
        &self.setup
    }

    /// A throttle with a number by which a registry finds it again.
    pub(crate) fn new(plan: Arc<Plan>, setup: Arc<Setup>, random: Random, number: u64) -> Arc<Self> {
        let gates = Gates::new(&plan, random);
        let gauged = setup.observer.gauged();
        let is_measured = gauged.is_measured();
        let throttle = Arc::new_cyclic(|itself| Self {
            itself: Weak::clone(itself),
            number,
            setup,
            gauged,
            // Whoever is measured is timed, and takes the long way, where it is counted.
            timed: AtomicBool::new(is_measured || plan.is_timed()),
            settles_timed: AtomicBool::new(is_measured || plan.settles_timed()),
            plain: AtomicBool::new(!is_measured && plan.is_plain()),
            marks: AtomicU8::new(0),
            epoch: AtomicU32::new(0),
            state: Mutex::new(State { plan, gates, queue: None, retries: None, version: 0, plans: 0 }),
        });
        throttle.show();
        throttle
    }

    /// A handle, unless the last one is being dropped.
    pub(crate) fn itself(&self) -> Option<Arc<Self>> {
        self.itself.upgrade()
    }

    /// The key in words under which a registry holds it, where there are words for it.
    pub(crate) fn label(self: &Arc<Self>) -> Option<String> {
        self.setup.sinks.registry()?.label(self)
    }

    /// What tells it from others, and does not keep it.
    pub(crate) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.itself)
    }

    /// Which rules of a registry it follows.
    #[inline]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// It follows the rules of `epoch`; called under its lock.
    pub(crate) fn follows(&self, epoch: u32) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    /// Changes something other than by entering or leaving, and lets in whoever that lets in.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State, Instant, &mut Effects) -> T) -> T {
        let mut effects = Effects::default();
        let (mut state, now) = self.lock_timed(Some(self.clock().now()));
        let answer = change(&mut state, now, &mut effects);
        state.pump_changed(now, &mut effects);
        self.release(state, effects);
        answer
    }

    /// Puts another plan under the state.
    pub(crate) fn put(&self, state: &mut State, new: &Arc<Plan>, now: Instant, effects: &mut Effects) {
        let State { plan, gates, .. } = state;
        gates.retune(plan, new, now, &mut effects.events);
        *plan = Arc::clone(new);
        let is_measured = self.gauged.is_measured();
        self.timed.store(is_measured || new.is_timed(), Ordering::Relaxed);
        self.settles_timed.store(is_measured || new.settles_timed(), Ordering::Relaxed);
        self.plain.store(!is_measured && new.is_plain(), Ordering::Relaxed);
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.setup.clock
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let now = self.clock().now();
        let state = self.lock();
        let mut snapshot = state.gates.snapshot(&state.plan, state.waiting(), now);
        drop(state);
        snapshot.listener_panics = self.setup.sinks.panics();
        snapshot.events_lost = self.setup.all_events_lost();
        snapshot
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The clock's reading for a decision, if the plan needs one.
    #[inline]
    pub(crate) fn reading(&self) -> Option<Instant> {
        self.timed.load(Ordering::Relaxed).then(|| self.clock().now())
    }

    /// Whether the short way may be tried.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain.load(Ordering::Relaxed)
    }

    /// Somebody is about to wait; called under the lock.
    pub(crate) fn will_queue(&self) {
        self.mark(QUEUED, true);
    }

    /// Whether something may have begun that keeps those who were admitted and have not gone out.
    #[inline]
    pub(crate) fn has_begun(&self) -> bool {
        self.marks.load(Ordering::Acquire) & BEGUN > 0
    }

    /// Writes down whether something has begun; called under the lock of `state`.
    pub(crate) fn mark_begun(&self, state: &State) {
        self.mark(BEGUN, state.gates.has_begun());
    }

    /// Sets or clears a mark; under the lock, so nobody else does at the same time.
    fn mark(&self, mark: u8, is_set: bool) {
        let marks = self.marks.load(Ordering::Relaxed);
        let after = if is_set { marks | mark } else { marks & !mark };
        if after != marks {
            self.marks.store(after, Ordering::Release);
        }
    }

    /// Callers waiting in `state`, which is this throttle's.
    #[inline]
    pub(crate) fn waiting(&self, state: &State) -> u32 {
        if self.marks.load(Ordering::Relaxed) & QUEUED > 0 { state.waiting() } else { 0 }
    }

    /// Whether settling reads the clock.
    #[inline]
    pub(crate) fn settles_timed(&self) -> bool {
        self.settles_timed.load(Ordering::Relaxed)
    }

    /// The lock and the time.
    #[inline]
    pub(crate) fn lock_timed(&self, reading: Option<Instant>) -> (MutexGuard<'_, State>, Instant) {
        self.time(self.lock(), reading)
    }

    /// The time beside a lock that is held. Where it turns out to be needed after all, it is read without the lock.
    #[inline]
    pub(crate) fn time<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        reading: Option<Instant>,
    ) -> (MutexGuard<'a, State>, Instant) {
        match reading {
            Some(now) => (state, now),
            None if !state.gates.needs_time(&state.plan) => {
                let latest = state.gates.latest();
                (state, latest)
            }
            None => {
                drop(state);
                let now = self.clock().now();
                (self.lock(), now)
            }
        }
    }

    /// When the head is to be asked again.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.lock().queue.as_ref().and_then(|queue| queue.wake_at())
    }

    /// Lets the lock go and does what was put off until then.
    pub(crate) fn release<'a>(&'a self, mut state: MutexGuard<'a, State>, mut effects: Effects) {
        loop {
            let mut keeper = None;
            if effects.timer_missing {
                keeper = state.find_keeper(Home::runtime(), &mut effects);
            }
            self.mark_begun(&state);
            let is_turned = state.gates.is_drained() || effects.events.iter().any(turns_away);
            let reading = self.gauged.read(&state, &effects.events);
            let is_traced = self.setup.observer.post(self, &effects.events);
            // Under the lock, so that events are told in the order in which they happened.
            let told = self.setup.sinks.post(self, state.gates.latest(), effects.events.drain(..));
            drop(state);
            if is_turned {
                self.setup.sinks.guard(|| self.setup.drained.notify_waiters());
            }
            if let Some(id) = keeper {
                // It was made for the runtime that runs this, so there is one to run it.
                drop(Keep::new(Weak::clone(&self.itself), id).spawn());
            }
            // Wakes before events: a listener may be slow. And each for itself: a waker is somebody's code.
            for waker in effects.wakers.drain(..) {
                self.setup.sinks.guard(|| waker.wake());
            }
            self.setup.sinks.guard(|| effects.dropped.clear());
            self.publish(reading);
            if is_traced {
                self.setup.observer.tell(&self.setup.sinks);
            }
            if told {
                self.setup.sinks.tell(|| self.snapshot());
            }
            if !effects.more {
                return;
            }
            let now;
            (state, now) = self.lock_timed(self.reading());
            state.pump(now, Returned::Nothing, &mut effects);
        }
    }
}

/// Whether an event turns away whoever waits.
fn turns_away(event: &Event) -> bool {
    matches!(event, Event::Closed { .. } | Event::CircuitOpened { .. })
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("key", &self.inner.label()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "marks_tests.rs"]
mod marks_tests;
