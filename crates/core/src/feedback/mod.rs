//! Controllers: they see how requests went, and retune slots and interval, the rate, or rate and slots together.
//!
//! For all of them: one cut per wave (what was admitted before the last cut cannot cause another); grow only
//! what is used; a rejected call's latency is never a sample; what is ignored teaches nothing; and under
//! demand the configured maximum is always reached again on a healthy far side.

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
mod lately;

use aimd::AimdState;
use auto::AutoState;
use brake::BrakeState;

/// What a controller has learned so far.
#[derive(Debug, Clone)]
pub(crate) enum Feedback {
    /// Nothing moves.
    Fixed,
    /// Boxed: a throttle without a controller should not pay for the window.
    Brake(Box<BrakeState>),
    /// Moves the rate.
    Aimd(Box<AimdState>),
    /// Moves rate and slots, and paces requests itself.
    Auto(Box<AutoState>),
}

/// One outcome as a controller sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    /// Whether it was admitted after the last cut and the last change of the circuit.
    pub(crate) is_current: bool,
    /// Requests in flight, this one included.
    pub(crate) in_flight: u64,
    /// Whether what the controller moves holds callers back, or has done so since the last step.
    pub(crate) has_demand: bool,
    /// How long the work took, where that is known.
    pub(crate) latency: Option<Duration>,
    /// Requests admitted since the beginning.
    pub(crate) admitted: u64,
    pub(crate) now: Instant,
}

/// The limits a controller moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) slots: u32,
    pub(crate) interval: Duration,
    /// Where the controller moves it.
    pub(crate) rate: Option<PerSecond>,
}

/// What a controller wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Less. A new generation begins.
    Cut(Tuning, Why),
    /// More.
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

    /// Learns from one outcome; the advice is to be followed.
    pub(crate) fn learn(&mut self, plan: &Plan, tuning: Tuning, sample: Sample) -> Option<Advice> {
        match (self, plan.draft.controller) {
            (Self::Brake(state), Controller::Brake(brake)) => state.learn(plan, &brake, tuning, sample),
            (Self::Aimd(state), _) => state.learn(plan.aimd.as_ref()?, tuning, sample),
            _ => None,
        }
    }

    /// The bucket of the rate as it is now.
    #[inline]
    pub(crate) fn shape<'a>(&'a self, plan: &'a Plan) -> Option<&'a Shape> {
        match self {
            Self::Aimd(state) => Some(state.shape()),
            Self::Fixed | Self::Brake(_) | Self::Auto(_) => plan.rate.as_ref(),
        }
    }

    /// The rate, where it moves.
    pub(crate) fn rate(&self) -> Option<PerSecond> {
        match self {
            Self::Aimd(state) => Some(state.rate()),
            Self::Fixed | Self::Brake(_) | Self::Auto(_) => None,
        }
    }

    /// Takes the rate that was advised, where it moves.
    pub(crate) fn set_rate(&mut self, plan: &Plan, to: Tuning) {
        if let (Self::Aimd(state), Some(limits), Some(rate)) = (self, &plan.aimd, to.rate) {
            state.set(limits, rate);
        }
    }

    /// Whether it moves what `gate` allows: whoever is held there asks for more of it.
    pub(crate) const fn moves(&self, gate: Gate) -> bool {
        match self {
            Self::Fixed | Self::Auto(_) => false,
            Self::Brake(_) => matches!(gate, Gate::Slots | Gate::Pace),
            Self::Aimd(_) => matches!(gate, Gate::Rate),
        }
    }

    /// A pause was set or lengthened: from `from` to `until` nobody enters.
    pub(crate) fn rest(&mut self, from: Instant, until: Instant) {
        if let Self::Aimd(state) = self {
            state.rest(from, until);
        }
    }

    /// The pause that was to last until `until` ends `now`.
    pub(crate) fn wake(&mut self, now: Instant, until: Instant) {
        if let Self::Aimd(state) = self {
            state.wake(now, until);
        }
    }

    /// What slots may grow to for now; `None` when nothing but the plan says.
    pub(crate) fn ceiling(&self) -> Option<u32> {
        match self {
            Self::Fixed | Self::Aimd(_) | Self::Auto(_) => None,
            Self::Brake(state) => Some(state.ceiling()),
        }
    }

    /// Whether a cut has not yet been given back in full.
    pub(crate) fn is_cooling(&self) -> bool {
        match self {
            Self::Fixed | Self::Auto(_) => false,
            Self::Brake(state) => state.is_cooling(),
            Self::Aimd(state) => state.is_cooling(),
        }
    }

    /// Whether it knows anything that a new one would not.
    pub(crate) fn has_learned(&self, plan: &Plan, now: Instant) -> bool {
        match (self, &plan.aimd, &plan.auto) {
            (Self::Aimd(state), Some(limits), _) => state.has_learned(limits, now),
            (Self::Auto(state), _, Some(limits)) => state.has_learned(limits),
            _ => self.is_cooling() || self.failures(plan, now) > 0,
        }
    }

    /// Failures remembered at `now`.
    pub(crate) fn failures(&self, plan: &Plan, now: Instant) -> u64 {
        match (self, plan.draft.controller) {
            (Self::Brake(state), Controller::Brake(brake)) => state.failures(&brake, now),
            _ => 0,
        }
    }

    /// Follows a new plan: the same kind of controller keeps what it knows, within the new bounds.
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
