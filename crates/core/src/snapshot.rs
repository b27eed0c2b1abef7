//! The state of a throttle at one moment.

use std::fmt;
use std::time::Duration;

use crate::control::Control;
use crate::feedback::headers::Dimension;
use crate::per_second::PerSecond;
use crate::statistics::Outcomes;
use crate::time::Instant;
use crate::verdict::GateName;

/// All observable state of a throttle, read under one lock.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The time of the snapshot, by the throttle's clock.
    pub at: Instant,
    /// The first state that applies, in the order of [`State`].
    pub state: State,
    /// The phase of the pause.
    pub phase: Phase,
    /// Requests in flight. Not counted, and 0, if only pace and rate are configured.
    pub in_flight: u32,
    /// Slots now; `None` is unlimited.
    pub slots: Option<u32>,
    /// The maximum of slots.
    pub slots_max: Option<u32>,
    /// The current ceiling for slots.
    pub slots_ceiling: Option<u32>,
    /// Requests in flight that entered while recovering.
    pub recovering_in_flight: u32,
    /// The least gap between entries now.
    pub interval: Duration,
    /// Bytes in flight, as priced.
    pub bytes_in_flight: u64,
    /// Entries per second now, rounded down to a millionth; `None` without a rate.
    pub rate: Option<PerSecond>,
    /// Entries the rate would admit now; `None` without a rate.
    pub rate_level: Option<i64>,
    /// Tokens used in the window.
    pub tokens_used: u64,
    /// Tokens left in the window, never negative; `None` without a budget.
    pub tokens_remaining: Option<u64>,
    /// The named limits: rates first, then budgets.
    pub limits: Vec<LimitView>,
    /// Failures in the controller's window.
    pub failures: u64,
    /// The circuit; `None` without one.
    pub circuit: Option<CircuitView>,
    /// The share of failures in the circuit's window; `None` without a window, or if it is empty.
    pub error_rate: Option<f64>,
    /// Outcomes since the start. Like latency, counted only if something learns from outcomes: a controller,
    /// a circuit, a budget, a size rule for pauses, progress.
    pub outcomes: Outcomes,
    /// The mean latency of recent successes; `None` before the first.
    pub latency_mean: Option<Duration>,
    /// The median latency of recent successes, within 1/16.
    pub latency_p50: Option<Duration>,
    /// The 95th percentile latency of recent successes, within 1/16.
    pub latency_p95: Option<Duration>,
    /// Requests completed.
    pub completed: u64,
    /// Requests expected in total; 0 is unknown.
    pub total: u64,
    /// Completed in percent of the total; `None` without a total.
    pub percentage: Option<f64>,
    /// Estimated time left; `None` while unknown.
    pub eta: Option<Duration>,
    /// Waiting callers.
    pub waiting: u32,
    /// Requests admitted since the start.
    pub admitted: u64,
    /// Evaluations of the gates since the start.
    pub evaluations: u64,
    /// Malformed or implausible header values of responses; at most 4,294,967,295 are counted.
    pub headers_malformed: u64,
    /// The earliest time at which one more plain request could enter, behind the current waiters; `None` if
    /// that depends on another request's completion, or if the throttle is closed.
    pub next_entry: Option<Instant>,
    /// The estimates of [`Auto`](crate::plan::Auto) and the reason for the current limits; `None` with
    /// another controller.
    pub control: Option<Control>,
    /// Panics in listeners and wakers.
    pub listener_panics: u64,
    /// Events lost because a listener was too slow.
    pub events_lost: u64,
}

/// A named rate or budget at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitView {
    /// Its name.
    pub name: GateName,
    /// What it counts: requests for a rate, a kind of token for a budget.
    pub counts: Dimension,
    /// The rate's burst, or the budget's tokens per window.
    pub capacity: u64,
    /// Units that may be taken now; negative if more was used than is allowed.
    pub available: i64,
}

/// The part of a [`Snapshot`] that is cheap enough to read after every call, as of the latest clock reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Levels {
    /// Requests in flight.
    pub in_flight: u32,
    /// Slots now; `None` is unlimited.
    pub slots: Option<u32>,
    /// Entries per second now; `None` without a rate.
    pub rate: Option<PerSecond>,
    /// Requests per second that the upstream is estimated to grant; `None` if unknown.
    pub quota: Option<PerSecond>,
    /// The circuit; `None` without one.
    pub circuit: Option<CircuitState>,
}

/// The state of a throttle: the first that applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Closed, with nothing in flight.
    Closed,
    /// Closed, with requests still in flight.
    Draining,
    /// The circuit is open or half-open.
    CircuitOpen,
    /// A pause is running; nothing is admitted.
    Paused,
    /// The recovery after a pause.
    Recovering,
    /// The controller has cut the limits and not yet restored them.
    Cooling,
    /// Operating normally.
    Running,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Closed => "closed",
            Self::Draining => "draining",
            Self::CircuitOpen => "circuit open",
            Self::Paused => "paused",
            Self::Recovering => "recovering",
            Self::Cooling => "cooling",
            Self::Running => "running",
        })
    }
}

/// The phase of a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// No pause.
    Normal,
    /// Nothing is admitted.
    Paused,
    /// Requests take recovery slots and pay a higher price for bytes.
    Recovering,
}

/// The state of a circuit at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitView {
    /// Closed, open or half-open.
    pub state: CircuitState,
    /// Consecutive failures while closed.
    pub consecutive_failures: u32,
    /// Successful probes while half-open.
    pub probe_successes: u32,
    /// Probes in flight.
    pub probes_in_flight: u32,
    /// Time until probes are admitted; zero unless open.
    pub retry_after: Duration,
}

/// The three states of a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CircuitState {
    /// Requests pass.
    Closed,
    /// Requests are refused.
    Open,
    /// Probes pass; other requests are refused.
    HalfOpen,
}
