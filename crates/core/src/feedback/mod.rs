//! Controllers: they see how requests went, and retune slots and interval.
//!
//! For all of them: one cut per wave (what was admitted before the last cut cannot cause another); grow only
//! what is used; a rejected call's latency is never a sample; what is ignored teaches nothing; and under
//! demand the configured maximum is always reached again on a healthy far side.

use std::time::Duration;

use crate::event::Why;
use crate::outcome::Kind;
use crate::plan::{Controller, Plan};
use crate::time::Instant;

pub(crate) mod brake;
pub mod headers;

use brake::BrakeState;

/// What a controller has learned so far.
#[derive(Debug, Clone)]
pub(crate) enum Feedback {
    /// Nothing moves.
    Fixed,
    /// Boxed: a throttle without a controller should not pay for the window.
    Brake(Box<BrakeState>),
}

/// One outcome as a controller sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) kind: Kind,
    /// Whether it was admitted after the last cut and the last change of the circuit.
    pub(crate) is_current: bool,
    /// Requests in flight, this one included.
    pub(crate) in_flight: u64,
    /// Whether slots or interval hold callers back, or have done so since the last step.
    pub(crate) has_demand: bool,
    pub(crate) now: Instant,
}

/// The limits a controller moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) slots: u32,
    pub(crate) interval: Duration,
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
        match plan.draft.controller {
            Controller::Fixed => Self::Fixed,
            Controller::Brake(_) => Self::Brake(Box::new(BrakeState::new(plan))),
        }
    }

    /// Learns from one outcome; the advice is to be followed.
    pub(crate) fn learn(&mut self, plan: &Plan, tuning: Tuning, sample: Sample) -> Option<Advice> {
        match (self, plan.draft.controller) {
            (Self::Brake(state), Controller::Brake(brake)) => state.learn(plan, &brake, tuning, sample),
            _ => None,
        }
    }

    /// What slots may grow to for now; `None` when nothing but the plan says.
    pub(crate) fn ceiling(&self) -> Option<u32> {
        match self {
            Self::Fixed => None,
            Self::Brake(state) => Some(state.ceiling()),
        }
    }

    /// Whether a cut has not yet been given back in full.
    pub(crate) fn is_cooling(&self) -> bool {
        match self {
            Self::Fixed => false,
            Self::Brake(state) => state.is_cooling(),
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
    pub(crate) fn tune(&mut self, old: &Plan, new: &Plan) {
        match (&mut *self, new.draft.controller) {
            (Self::Fixed, Controller::Fixed) => {}
            (Self::Brake(state), Controller::Brake(_)) => state.tune(old, new),
            _ => *self = Self::new(new),
        }
    }
}
