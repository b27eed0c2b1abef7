//! Building a throttle: say what limits, and have it checked.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use tidegate_core::event::Notice;
use tidegate_core::plan::{
    Auto, Budget, Bytes, Circuit, Controller, Draft, InvalidPlan, Pace, Pause, Plan, Rate, Slots,
};
use tidegate_core::random::Random;
use tidegate_core::retry::Retry;
use tidegate_core::snapshot::Snapshot;
use tokio::sync::Notify;

use crate::clock::{Clock, TokioClock};
use crate::events::{Listener, Sinks, Watcher};
use crate::keyed::Limits;
use crate::observe::Observer;
use crate::throttle::{Setup, Throttle};

/// Configures what limits; made by [`Throttle::builder`], [`Throttle::auto`], [`Throttle::gentle`], [`Throttle::layered`] and
/// [`Throttle::host`].
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Budget, Circuit, Pace, Rate, Slots, Throttle};
///
/// let throttle = Throttle::builder()
///     .slots(Slots::adaptive(2..=40))
///     .rate(Rate::per_minute(500).burst(20))
///     .budget(Budget::tokens(100_000, Duration::from_secs(60)))
///     .circuit(Circuit::after_failures(10))
///     .on_state_change(|notice| println!("{:?}", notice.event))
///     .build()?;
/// # Ok::<(), tidegate::InvalidPlan>(())
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    draft: Draft,
    /// Named, or left to the slots.
    controller: Option<Controller>,
    clock: Option<Arc<dyn Clock>>,
    random: Option<Random>,
    listener: Option<Listener>,
    watcher: Option<Watcher>,
    name: String,
    pub(crate) is_measured: bool,
}

impl Builder {
    pub(crate) fn new(draft: Draft) -> Self {
        Self {
            draft,
            controller: None,
            clock: None,
            random: None,
            listener: None,
            watcher: None,
            name: String::new(),
            is_measured: false,
        }
    }

    /// How many requests may be in flight. Slots that can move bring [`Auto`], unless a controller is named.
    pub fn slots(mut self, slots: Slots) -> Self {
        self.draft.slots = Some(slots);
        self
    }

    /// How many requests that entered while recovering may be in flight.
    pub fn recovery_slots(mut self, slots: u32) -> Self {
        self.draft.recovery_slots = Some(slots);
        self
    }

    /// How many bytes may be in flight.
    pub fn bytes(mut self, bytes: Bytes) -> Self {
        self.draft.bytes = Some(bytes);
        self
    }

    /// The least gap between entries.
    pub fn pace(mut self, pace: Pace) -> Self {
        self.draft.pace = Some(pace);
        self
    }

    /// Entries per period.
    pub fn rate(mut self, rate: Rate) -> Self {
        self.draft.rate = Some(rate);
        self
    }

    /// Tokens per window.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.draft.budget = Some(budget);
        self
    }

    /// A circuit breaker.
    pub fn circuit(mut self, circuit: Circuit) -> Self {
        self.draft.circuit = Some(circuit);
        self
    }

    /// How pauses are kept.
    pub fn pause(mut self, pause: Pause) -> Self {
        self.draft.pause = pause;
        self
    }

    /// Learns rate and slots from outcomes, within these limits.
    pub fn auto_within(self, auto: Auto) -> Self {
        self.controller(Controller::Auto(auto))
    }

    /// Who learns from outcomes.
    pub fn controller(mut self, controller: Controller) -> Self {
        self.controller = Some(controller);
        self
    }

    /// When [`run`](Throttle::run) tries again.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.draft.retry = retry;
        self
    }

    /// How many requests there will be in all, for progress; 0 counts without a total.
    pub fn total(mut self, requests: u64) -> Self {
        self.draft.total = Some(requests);
        self
    }

    /// How many callers may wait; the next one is refused.
    pub fn waiters_max(mut self, waiters: u32) -> Self {
        self.draft.waiters_max = waiters;
        self
    }

    /// A clock other than tokio's.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Randomness for jitter and spread other than a fresh seed.
    pub fn random(mut self, random: Random) -> Self {
        self.random = Some(random);
        self
    }

    /// Hears of events in the order in which they happened, outside the lock, one at a time.
    ///
    /// It runs on the thread that caused an event, or on one that is telling already, after everybody was
    /// woken, and may call the throttle. A panic in it is caught, and counted in the snapshot. While it is slow
    /// up to 1,024 events wait for it; more are lost to it, and counted. For slow work read
    /// [`Throttle::events`] instead.
    pub fn on_state_change(mut self, listener: impl Fn(&Notice) + Send + Sync + 'static) -> Self {
        self.listener = Some(Box::new(listener));
        self
    }

    /// Is shown the throttle whenever a milestone of the [`total`](Self::total) is reached: every 10 %, unless
    /// [`milestones`](Self::milestones) says otherwise. Called as [`on_state_change`](Self::on_state_change) is.
    pub fn on_progress(mut self, watcher: impl Fn(&Snapshot) + Send + Sync + 'static) -> Self {
        self.watcher = Some(Box::new(watcher));
        self
    }

    /// How many percent of the total make a milestone.
    pub fn milestones(mut self, percent: u32) -> Self {
        self.draft.milestone_percent = percent;
        self
    }

    /// Checks every number and makes limits for many throttles: see [`Keyed`](crate::Keyed). Clock, randomness and
    /// listeners are not among them.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn limits(self) -> Result<Limits, InvalidPlan> {
        checked(self.draft, self.controller).map(Limits::new)
    }

    /// What the throttle is called in traces and metrics; nothing, unless this says it.
    ///
    /// See [the guide](crate::guide::observability).
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Checks every number and makes the throttle.
    ///
    /// # Errors
    /// [`InvalidPlan`] lists every number that is out of its bounds, with field, value and bound.
    pub fn build(self) -> Result<Throttle, InvalidPlan> {
        let plan = Arc::new(checked(self.draft, self.controller)?);
        let clock = self.clock.unwrap_or_else(|| Arc::new(TokioClock::new()));
        let setup = Arc::new(Setup {
            clock,
            sinks: Sinks::new(self.listener, self.watcher),
            tally: None,
            drained: Notify::new(),
            observer: Observer::new(&self.name, self.is_measured),
        });
        Ok(Throttle::from_parts(plan, setup, self.random.unwrap_or_else(fresh_random)))
    }
}

/// The plan of a draft; slots that can move bring `Auto` where no controller is named.
fn checked(mut draft: Draft, controller: Option<Controller>) -> Result<Plan, InvalidPlan> {
    let is_adaptive = draft.slots.is_some_and(|slots| slots.is_adaptive());
    match controller {
        Some(controller) => draft.controller = controller,
        None if is_adaptive && draft.controller == Controller::Fixed => {
            draft.controller = Controller::Auto(Auto::default());
        }
        None => {}
    }
    draft.check()
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("draft", &self.draft).finish_non_exhaustive()
    }
}

/// A seed nobody knows: the standard library's hash keys are drawn from the operating system.
pub(crate) fn fresh_random() -> Random {
    Random::seeded(RandomState::new().build_hasher().finish())
}
