//! The builder of a throttle: configure limits, then check and build.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use tidegate_core::event::Notice;
use tidegate_core::plan::{
    Auto, Budget, Bytes, Circuit, Controller, Draft, InvalidPlan, Pace, Pause, Rate, Slots,
};
use tidegate_core::random::Random;
use tidegate_core::retry::Retry;
use tidegate_core::snapshot::Snapshot;
use tokio::sync::Notify;

use crate::clock::{Clock, TokioClock};
use crate::events::{Listener, ProgressListener, Sinks};
use crate::keyed::Limits;
use crate::observe::Observer;
use crate::throttle::{Setup, Throttle};

/// Configures a throttle. Created by [`Throttle::builder`], [`Throttle::auto`], [`Throttle::gentle`],
/// [`Throttle::layered`] and [`Throttle::host`].
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
    /// Set by hand, over those of the preset in the draft.
    slots: Option<Slots>,
    pace: Option<Pace>,
    /// `None` lets the slots decide.
    controller: Option<Controller>,
    clock: Option<Arc<dyn Clock>>,
    random: Option<Random>,
    listener: Option<Listener>,
    progress_listener: Option<ProgressListener>,
    name: String,
    pub(crate) is_measured: bool,
}

impl Builder {
    pub(crate) fn new(draft: Draft) -> Self {
        Self {
            draft,
            slots: None,
            pace: None,
            controller: None,
            clock: None,
            random: None,
            listener: None,
            progress_listener: None,
            name: String::new(),
            is_measured: false,
        }
    }

    /// The maximum number of requests in flight. Adaptive slots use [`Auto`] unless a controller is set.
    pub fn slots(mut self, slots: Slots) -> Self {
        self.slots = Some(slots);
        self
    }

    /// The maximum number of in-flight requests that were admitted while recovering.
    pub fn recovery_slots(mut self, slots: u32) -> Self {
        self.draft.recovery_slots = Some(slots);
        self
    }

    /// The maximum number of bytes in flight.
    pub fn bytes(mut self, bytes: Bytes) -> Self {
        self.draft.bytes = Some(bytes);
        self
    }

    /// The minimum gap between admissions.
    pub fn pace(mut self, pace: Pace) -> Self {
        self.pace = Some(pace);
        self
    }

    /// Requests per period.
    pub fn rate(mut self, rate: Rate) -> Self {
        self.draft.rate = Some(rate);
        self
    }

    /// A further rate with a name, or another for the name. All rates must admit a request.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Budget, Cost, Rate, Throttle};
    ///
    /// let minute = Duration::from_secs(60);
    /// let throttle = Throttle::builder()
    ///     .rate_named("rpm", Rate::per_minute(500))
    ///     .rate_named("rpd", Rate::per_day(10_000))
    ///     .budget_named("itpm", Budget::input_tokens(40_000, minute))
    ///     .budget_named("otpm", Budget::output_tokens(8_000, minute))
    ///     .build()?;
    /// let permit = throttle.try_acquire(Cost::request().input_tokens(800).output_tokens(300))?;
    /// let left: Vec<_> = throttle.snapshot().limits.iter().map(|limit| limit.available).collect();
    /// assert_eq!(left, [499, 9_999, 39_200, 7_700]);
    /// # drop(permit);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rate_named(mut self, name: impl Into<String>, rate: Rate) -> Self {
        self.draft = self.draft.rate_named(name, rate);
        self
    }

    /// Tokens per window.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.draft.budget = Some(budget);
        self
    }

    /// A further budget with a name, or another for the name: of all tokens, of input or of output tokens. Rates and
    /// budgets share their names, and there are at most [`NAMED_MAX`](crate::NAMED_MAX) of them.
    pub fn budget_named(mut self, name: impl Into<String>, budget: Budget) -> Self {
        self.draft = self.draft.budget_named(name, budget);
        self
    }

    /// A circuit breaker.
    pub fn circuit(mut self, circuit: Circuit) -> Self {
        self.draft.circuit = Some(circuit);
        self
    }

    /// How pauses are handled.
    pub fn pause(mut self, pause: Pause) -> Self {
        self.draft.pause = pause;
        self
    }

    /// Learns rate and slots from outcomes, within these bounds.
    pub fn auto_within(self, auto: Auto) -> Self {
        self.controller(Controller::Auto(auto))
    }

    /// Sets the controller that learns from outcomes. Limits of a preset that it does not move are
    /// [fixed](Draft::controlled_by).
    pub fn controller(mut self, controller: Controller) -> Self {
        self.controller = Some(controller);
        self
    }

    /// The retry rule of [`run`](Throttle::run).
    pub fn retry(mut self, retry: Retry) -> Self {
        self.draft.retry = retry;
        self
    }

    /// The expected number of requests, for progress; 0 counts without a total.
    pub fn total(mut self, requests: u64) -> Self {
        self.draft.total = Some(requests);
        self
    }

    /// The maximum number of waiters; further callers are refused.
    pub fn waiters_max(mut self, waiters: u32) -> Self {
        self.draft.waiters_max = waiters;
        self
    }

    /// A clock other than tokio's.
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Sets the random source for jitter and spread, instead of a fresh seed.
    pub fn random(mut self, random: Random) -> Self {
        self.random = Some(random);
        self
    }

    /// Registers a listener that receives events in order, outside the lock, one at a time.
    ///
    /// It runs on the thread that caused an event, or on one that is already delivering, after all waiters
    /// were woken, and may call the throttle. A panic in it is caught and counted in the snapshot. Up to
    /// 1,024 events are buffered for a slow listener; further ones are lost and counted. For slow work read
    /// [`Throttle::events`] instead.
    pub fn on_state_change(mut self, listener: impl Fn(&Notice) + Send + Sync + 'static) -> Self {
        self.listener = Some(Box::new(listener));
        self
    }

    /// Registers a callback that gets a snapshot at each milestone of the [`total`](Self::total): every 10 %,
    /// unless [`milestones`](Self::milestones) changes that. It is called as
    /// [`on_state_change`](Self::on_state_change) is.
    pub fn on_progress(mut self, progress_listener: impl Fn(&Snapshot) + Send + Sync + 'static) -> Self {
        self.progress_listener = Some(Box::new(progress_listener));
        self
    }

    /// The step between milestones, in percent of the total.
    pub fn milestones(mut self, percent: u32) -> Self {
        self.draft.milestone_percent = percent;
        self
    }

    /// Checks every number and creates limits for many throttles: see [`Keyed`](crate::Keyed). They do not
    /// include the clock, randomness and listeners.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn limits(self) -> Result<Limits, InvalidPlan> {
        self.draft().check().map(Limits::new)
    }

    /// The throttle's name in traces and metrics; empty by default.
    ///
    /// See [the guide](crate::guide::observability).
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Checks every number and creates the throttle.
    ///
    /// # Errors
    /// [`InvalidPlan`] lists every number that is out of its bounds, with field, value and bound, and every range
    /// that no controller moves.
    pub fn build(self) -> Result<Throttle, InvalidPlan> {
        let plan = Arc::new(self.draft().check()?);
        let clock = self.clock.unwrap_or_else(|| Arc::new(TokioClock::new()));
        let setup = Arc::new(Setup {
            clock,
            sinks: Sinks::new(self.listener, self.progress_listener),
            counters: None,
            drained: Notify::new(),
            observer: Observer::new(&self.name, self.is_measured),
        });
        Ok(Throttle::from_parts(plan, setup, self.random.unwrap_or_else(fresh_random)))
    }

    /// The preset with everything set by hand; adaptive slots use `Auto` if no controller is set.
    fn draft(&self) -> Draft {
        let mut draft = self.draft.clone();
        if let Some(controller) = self.controller {
            draft = draft.controlled_by(controller);
        }
        draft.slots = self.slots.or(draft.slots);
        draft.pace = self.pace.or(draft.pace);
        let is_adaptive = draft.slots.is_some_and(|slots| slots.is_adaptive());
        if self.controller.is_none() && is_adaptive && draft.controller == Controller::Fixed {
            draft.controller = Controller::Auto(Auto::default());
        }
        draft
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("draft", &self.draft()).finish_non_exhaustive()
    }
}

/// Seeds from the standard library's hash keys, which come from the operating system.
pub(crate) fn fresh_random() -> Random {
    Random::seeded(RandomState::new().build_hasher().finish())
}
