//! The throttle: one lock around the gates and the queue, and its public operations.

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
use crate::meter::GaugeHandle;
use crate::observe::Observer;
use crate::queue::Refund;
use crate::state::{Effects, State};
use crate::sync::{Mutex, MutexGuard};
use crate::timer_task::{TimerHost, TimerTask};
use crate::wait_counters::WaitCounters;

/// Protects an upstream: admits requests as fast as it allows, and no faster.
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

/// The state shared by all handles and permits of a throttle.
// Fields in fast-path order: with many throttles every extra cache line is a likely miss.
#[repr(C)]
pub(crate) struct Inner {
    /// Copies of the plan's properties, readable without the lock: whether to read the clock before locking,
    /// and whether to try the fast path.
    timed: AtomicBool,
    settles_timed: AtomicBool,
    plain: AtomicBool,
    /// Flags for state that is farther away or read without the lock: [`QUEUED`] and [`BEGUN`]. Written under
    /// the lock.
    flags: AtomicU8,
    /// The version of the registry's rules it follows.
    epoch: AtomicU32,
    state: Mutex<State>,
    /// Shared by throttles of one kind: it does not count toward a throttle's own memory.
    setup: Arc<Setup>,
    /// For timer owners, which must not keep a throttle alive.
    itself: Weak<Inner>,
    /// Identifies it in its registry.
    number: u64,
    /// Its contribution to the gauges, if it is measured.
    pub(crate) gauge_handle: GaugeHandle,
}

/// A caller has waited at least once. Read under the lock.
const QUEUED: u8 = 1;
/// A pause, an open circuit or a close may hold back admitted requests that were not yet sent.
const BEGUN: u8 = 2;

/// Clock, sinks, counters and observers.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) sinks: Sinks,
    /// Counters of a registry's throttles.
    pub(crate) counters: Option<WaitCounters>,
    /// Notified when the last request completes after a close, and when all waiters, in the queue or
    /// elsewhere, are refused by a close or an open circuit. Throttles of one kind share it, so a notified
    /// task re-checks its condition.
    pub(crate) drained: Notify,
    pub(crate) observer: Observer,
}

impl Throttle {
    /// A throttle that learns how fast the upstream may be called: [`Throttle::auto`] with its defaults.
    #[expect(clippy::missing_panics_doc, reason = "a test checks the draft")]
    pub fn new() -> Self {
        Self::auto().build().expect("the draft is within its bounds")
    }

    /// A builder without gates: nothing is limited until it is configured.
    pub fn builder() -> Builder {
        Builder::new(Draft::default())
    }

    /// A builder for [`Auto`](crate::Auto): learns rate and slots together from what the upstream accepts,
    /// from its quota headers and from its latency. It starts at ten requests per second and 32 slots, and
    /// its only ceiling is 1,024 slots; a lower ceiling can be set, and is reported as the reason when it is
    /// reached.
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

    /// A polite builder with fixed ceilings: five slots and 0.2–30 s between admissions with jitter, so at
    /// most five requests per second even if the upstream allows more. It brakes at three failures in a
    /// minute that are a tenth of the outcomes.
    pub fn gentle() -> Builder {
        Builder::new(Draft::gentle())
    }

    /// A builder for layered dispatch of requests of very different sizes: 400 slots, of which 10 while
    /// recovering from a pause; 5 MiB in flight, at twenty times the price while recovering; a recovering
    /// phase of 10 s; and after an overload a pause of 1 s for requests up to 128 KiB, of 5 s for larger
    /// ones.
    pub fn layered() -> Builder {
        Builder::new(Draft::layered())
    }

    /// A builder for one of many hosts: [`Throttle::auto`]; a circuit that opens for 15 s at five failures in
    /// a row or at 40 % of at least ten outcomes in 30 s, and closes after three probes; and three attempts
    /// for [`run`](Self::run), with jitter.
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

    /// Another throttle with the same current plan, clock and sinks but its own state. It measures the cost
    /// of a throttle beyond its plan.
    #[doc(hidden)]
    #[must_use]
    pub fn twin(&self) -> Self {
        let plan = Arc::clone(&self.inner.lock().plan);
        Self::from_parts(plan, Arc::clone(&self.inner.setup), fresh_random())
    }

    /// Pauses all admissions for `span`. A longer pause in effect stays. Hints of the upstream are capped by
    /// the plan; this is not.
    ///
    /// Returns whether the pause was extended.
    pub fn pause(&self, span: Duration) -> bool {
        self.change(|state, now, effects| {
            let waiting = state.waiting();
            state.gates.pause(&state.plan, span, waiting, now, &mut effects.events)
        })
    }

    /// Ends a pause and the cautious phase after it. Returns whether there was a pause.
    pub fn resume(&self) -> bool {
        self.change(|state, now, effects| state.gates.resume(&state.plan, now, &mut effects.events))
    }

    /// Changes limits while requests are waiting and in flight.
    ///
    /// Levels, requests in flight and the circuit are kept; tuned values are clamped to the new bounds. After
    /// a shrink, no request is admitted until enough have completed. `edit` runs outside the lock, and again
    /// if another call changed the limits concurrently.
    ///
    /// # Errors
    /// [`InvalidPlan`] if a number is out of bounds; nothing was changed.
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

    /// A consistent view of the throttle, read under one lock.
    pub fn snapshot(&self) -> Snapshot {
        self.inner.snapshot()
    }

    /// Subscribes to events from now on.
    pub fn events(&self) -> Events {
        self.inner.setup.sinks.subscribe(&self.inner)
    }

    /// Applies a change other than an admission or a settle, and serves the waiters that it admits.
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
    /// Events lost to slow listeners, except listeners of a registry's keys.
    pub(crate) fn events_lost(&self) -> u64 {
        self.sinks.lost() + self.observer.lost()
    }

    /// Events lost to any listener.
    pub(crate) fn all_events_lost(&self) -> u64 {
        self.events_lost() + self.sinks.registry().map_or(0, |registry| registry.lost())
    }
}

impl Inner {
    /// Notified when requests have completed, or all waiters are refused.
    pub(crate) fn drained(&self) -> &Notify {
        &self.setup.drained
    }

    pub(crate) fn setup(&self) -> &Setup {
        &self.setup
    }

    /// A throttle with the number that identifies it in its registry.
    pub(crate) fn new(plan: Arc<Plan>, setup: Arc<Setup>, random: Random, number: u64) -> Arc<Self> {
        let gates = Gates::new(&plan, random);
        Self::with_gates(plan, gates, setup, number)
    }

    /// A throttle that continues from the state of these gates.
    pub(crate) fn with_gates(plan: Arc<Plan>, gates: Gates, setup: Arc<Setup>, number: u64) -> Arc<Self> {
        let gauge_handle = setup.observer.gauge_handle();
        let is_measured = gauge_handle.is_measured();
        let throttle = Arc::new_cyclic(|itself| Self {
            itself: Weak::clone(itself),
            number,
            setup,
            gauge_handle,
            // A measured throttle is always timed and takes the slow path, where it is counted.
            timed: AtomicBool::new(is_measured || plan.is_timed()),
            settles_timed: AtomicBool::new(is_measured || plan.settles_timed()),
            plain: AtomicBool::new(!is_measured && plan.is_plain()),
            flags: AtomicU8::new(0),
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

    /// The key under which a registry holds it, as text, if the key has a text form.
    pub(crate) fn label(self: &Arc<Self>) -> Option<String> {
        self.setup.sinks.registry()?.label(self)
    }

    /// A weak handle, for identity.
    pub(crate) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.itself)
    }

    /// The version of the registry's rules it follows.
    #[inline]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Sets the version of the rules it follows; called under its lock.
    pub(crate) fn follows(&self, epoch: u32) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    /// Applies a change other than an admission or a settle, and serves the waiters that it admits.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State, Instant, &mut Effects) -> T) -> T {
        let mut effects = Effects::default();
        let (mut state, now) = self.lock_timed(Some(self.clock().now()));
        let answer = change(&mut state, now, &mut effects);
        state.pump_changed(now, &mut effects);
        self.release(state, effects);
        answer
    }

    /// Replaces the plan.
    pub(crate) fn put(&self, state: &mut State, new: &Arc<Plan>, now: Instant, effects: &mut Effects) {
        let State { plan, gates, .. } = state;
        gates.retune(plan, new, now, &mut effects.events);
        *plan = Arc::clone(new);
        let is_measured = self.gauge_handle.is_measured();
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

    /// Whether to try the fast path.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain.load(Ordering::Relaxed)
    }

    /// A caller is about to wait; called under the lock.
    pub(crate) fn will_queue(&self) {
        self.set_flag(QUEUED, true);
    }

    /// Whether a pause, an open circuit or a close may hold back admitted requests that were not yet sent.
    #[inline]
    pub(crate) fn has_begun(&self) -> bool {
        self.flags.load(Ordering::Acquire) & BEGUN > 0
    }

    /// Updates the flag for [`has_begun`](Self::has_begun); called under the lock of `state`.
    pub(crate) fn update_begun(&self, state: &State) {
        self.set_flag(BEGUN, state.gates.has_begun());
    }

    /// Sets or clears a flag; called under the lock, so there is no concurrent writer.
    fn set_flag(&self, flag: u8, is_set: bool) {
        let flags = self.flags.load(Ordering::Relaxed);
        let after = if is_set { flags | flag } else { flags & !flag };
        if after != flags {
            self.flags.store(after, Ordering::Release);
        }
    }

    /// The number of waiters in `state`, which belongs to this throttle.
    #[inline]
    pub(crate) fn waiting(&self, state: &State) -> u32 {
        if self.flags.load(Ordering::Relaxed) & QUEUED > 0 { state.waiting() } else { 0 }
    }

    /// Whether settling reads the clock.
    #[inline]
    pub(crate) fn settles_timed(&self) -> bool {
        self.settles_timed.load(Ordering::Relaxed)
    }

    /// Takes the lock and determines the time.
    #[inline]
    pub(crate) fn lock_timed(&self, reading: Option<Instant>) -> (MutexGuard<'_, State>, Instant) {
        self.time(self.lock(), reading)
    }

    /// The time for a held lock. If it turns out to be needed after all, the lock is released while reading
    /// the clock.
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

    /// When to try the head again.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.lock().queue.as_ref().and_then(|queue| queue.wake_at())
    }

    /// Releases the lock and runs the deferred effects.
    pub(crate) fn release<'a>(&'a self, mut state: MutexGuard<'a, State>, mut effects: Effects) {
        loop {
            let mut timer_owner = None;
            if effects.timer_missing {
                timer_owner = state.find_timer_owner(TimerHost::runtime(), &mut effects);
            }
            self.update_begun(&state);
            let refuses_waiters = state.gates.is_drained() || effects.events.iter().any(refuses_all_waiters);
            let reading = self.gauge_handle.read(&state, &effects.events);
            let is_traced = self.setup.observer.post(self, &effects.events);
            // Under the lock, so that events keep their order.
            let has_events = self.setup.sinks.post(self, state.gates.latest(), effects.events.drain(..));
            drop(state);
            if refuses_waiters {
                self.setup.sinks.guard(|| self.setup.drained.notify_waiters());
            }
            if let Some(id) = timer_owner {
                // It was created for the current runtime, so `spawn` finds one.
                drop(TimerTask::new(Weak::clone(&self.itself), id).spawn());
            }
            // Wakers before events, as a listener may be slow; each guarded, as a waker is user code.
            for waker in effects.wakers.drain(..) {
                self.setup.sinks.guard(|| waker.wake());
            }
            self.setup.sinks.guard(|| effects.dropped.clear());
            self.publish(reading);
            if is_traced {
                self.setup.observer.deliver(&self.setup.sinks);
            }
            if has_events {
                self.setup.sinks.deliver(|| self.snapshot());
            }
            if !effects.more {
                return;
            }
            let now;
            (state, now) = self.lock_timed(self.reading());
            state.pump(now, Refund::Nothing, &mut effects);
        }
    }
}

/// Whether an event refuses all waiters.
fn refuses_all_waiters(event: &Event) -> bool {
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
#[path = "lock_free_flags_tests.rs"]
mod lock_free_flags_tests;
