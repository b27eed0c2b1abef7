//! Controllers: they learn from outcomes and retune slots and interval, the rate, or rate and slots together.
//!
//! Common rules: one cut per wave (a request admitted before the last cut cannot cause another); only limits
//! in use grow; a rejected request's latency is never a sample; ignored outcomes change nothing; and under
//! demand, the configured maximum is always reached again once the upstream is healthy.

use std::time::Duration;

use crate::bucket::Shape;
use crate::event::Why;
use crate::outcome::Kind;
use crate::per_second::PerSecond;
use crate::plan::{Controller, Plan};
use crate::time::Instant;
use crate::verdict::Gate;

pub(crate) mod aimd;
pub(crate) mod auto;
pub(crate) mod brake;
pub mod headers;
pub mod rejection;
mod send_rate;

use aimd::AimdState;
use auto::AutoState;
use brake::BrakeState;

/// The state of a controller.
#[derive(Debug, Clone)]
pub(crate) enum Feedback {
    /// Limits do not change.
    Fixed,
    /// Boxed: a throttle without a controller should not pay for the window.
    Brake(Box<BrakeState>),
    /// Adapts the rate.
    Aimd(Box<AimdState>),
    /// Adapts rate and slots, and paces requests itself.
    Auto(Box<AutoState>),
}

/// One outcome, as input to a controller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    /// Whether the request was admitted after the last cut and the last change of the circuit.
    pub(crate) is_current: bool,
    /// Requests in flight, this one included.
    pub(crate) in_flight: u64,
    /// Whether a limit of the controller has delayed callers since its last step.
    pub(crate) has_demand: bool,
    /// How long the request took, if known.
    pub(crate) latency: Option<Duration>,
    /// Requests admitted since the start.
    pub(crate) admitted: u64,
    pub(crate) now: Instant,
}

/// The limits that a controller sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) slots: u32,
    pub(crate) interval: Duration,
    /// `None` if the controller does not set it.
    pub(crate) rate: Option<PerSecond>,
}

/// The advice of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Lower the limits, and begin a new generation.
    Cut(Tuning, Why),
    /// Raise the limits.
    Grow(Tuning),
}

impl Feedback {
    pub(crate) fn new(plan: &Plan) -> Self {
        match (plan.draft.controller, &plan.aimd, &plan.auto) {
            (Controller::Brake(_), ..) => Self::Brake(Box::new(BrakeState::new(plan))),
            (Controller::Aimd(_), Some(limits), _) => Self::Aimd(Box::new(AimdState::new(limits))),
            (Controller::Auto(_), _, Some(limits)) => Self::Auto(Box::new(AutoState::new(limits))),
            (Controller::Fixed | Controller::Aimd(_) | Controller::Auto(_), ..) => Self::Fixed,
        }
    }

    /// Learns from one outcome. The caller must apply the advice.
    pub(crate) fn learn(&mut self, plan: &Plan, tuning: Tuning, sample: Sample) -> Option<Advice> {
        match (self, plan.draft.controller) {
            (Self::Brake(state), Controller::Brake(brake)) => state.learn(plan, &brake, tuning, sample),
            (Self::Aimd(state), _) => state.learn(plan.aimd.as_ref()?, tuning, sample),
            _ => None,
        }
    }

    /// The bucket of the current rate.
    #[inline]
    pub(crate) fn shape<'a>(&'a self, plan: &'a Plan) -> Option<&'a Shape> {
        match self {
            Self::Aimd(state) => Some(state.shape()),
            Self::Fixed | Self::Brake(_) | Self::Auto(_) => plan.rate.as_ref(),
        }
    }

    /// The rate, if the controller sets it.
    pub(crate) fn rate(&self) -> Option<PerSecond> {
        match self {
            Self::Aimd(state) => Some(state.rate()),
            Self::Fixed | Self::Brake(_) | Self::Auto(_) => None,
        }
    }

    /// Sets the advised rate, if the controller sets it.
    pub(crate) fn set_rate(&mut self, plan: &Plan, to: Tuning) {
        if let (Self::Aimd(state), Some(limits), Some(rate)) = (self, &plan.aimd, to.rate) {
            state.set(limits, rate);
        }
    }

    /// Whether the controller sets the limit of `gate`, so that a caller waiting there means demand.
    pub(crate) const fn moves(&self, gate: Gate) -> bool {
        match self {
            Self::Fixed | Self::Auto(_) => false,
            Self::Brake(_) => matches!(gate, Gate::Slots | Gate::Pace),
            Self::Aimd(_) => matches!(gate, Gate::Rate),
        }
    }

    /// A pause was set or extended: nothing is admitted between `from` and `until`.
    pub(crate) fn suspend(&mut self, from: Instant, until: Instant) {
        if let Self::Aimd(state) = self {
            state.suspend(from, until);
        }
    }

    /// A pause until `until` ends early, at `now`.
    pub(crate) fn resume(&mut self, now: Instant, until: Instant) {
        if let Self::Aimd(state) = self {
            state.resume(now, until);
        }
    }

    /// The current ceiling for slots; `None` if only the plan limits them.
    pub(crate) fn ceiling(&self) -> Option<u32> {
        match self {
            Self::Fixed | Self::Aimd(_) | Self::Auto(_) => None,
            Self::Brake(state) => Some(state.ceiling()),
        }
    }

    /// Whether a cut has not been fully reverted.
    pub(crate) fn is_cooling(&self) -> bool {
        match self {
            Self::Fixed | Self::Auto(_) => false,
            Self::Brake(state) => state.is_cooling(),
            Self::Aimd(state) => state.is_cooling(),
        }
    }

    /// Whether the state differs from that of a new controller.
    pub(crate) fn has_learned(&self, plan: &Plan, now: Instant) -> bool {
        match (self, &plan.aimd, &plan.auto) {
            (Self::Aimd(state), Some(limits), _) => state.has_learned(limits, now),
            (Self::Auto(state), _, Some(limits)) => state.has_learned(limits),
            _ => self.is_cooling() || self.failures(plan, now) > 0,
        }
    }

    /// Failures in the window at `now`.
    pub(crate) fn failures(&self, plan: &Plan, now: Instant) -> u64 {
        match (self, plan.draft.controller) {
            (Self::Brake(state), Controller::Brake(brake)) => state.failures(&brake, now),
            _ => 0,
        }
    }

    /// Applies a new plan: a controller of the same kind keeps its state, within the new bounds.
    pub(crate) fn tune(&mut self, old: &Plan, new: &Plan, now: Instant) {
        match (&mut *self, new.draft.controller, &new.aimd, &new.auto) {
            (Self::Fixed, Controller::Fixed, ..) => {}
            (Self::Brake(state), Controller::Brake(_), ..) => state.tune(old, new),
            (Self::Aimd(state), Controller::Aimd(_), Some(limits), _) => {
                state.tune(old.aimd.as_ref(), limits, now);
            }
            (Self::Auto(state), Controller::Auto(_), _, Some(limits)) => {
                state.tune(old.auto.as_ref(), limits);
            }
            _ => *self = Self::new(new),
        }
    }
}
