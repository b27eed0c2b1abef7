//! A throttle as seen at one moment.

use std::fmt;
use std::time::Duration;

use crate::control::Control;
use crate::observed::Outcomes;
use crate::per_second::PerSecond;
use crate::time::Instant;

/// Everything there is to see of a throttle, read under one lock.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Snapshot {
    /// When it was taken, by the throttle's clock.
    pub at: Instant,
    /// The first state that holds, in the order of [`State`].
    pub state: State,
    /// Where a pause stands.
    pub phase: Phase,
    /// Requests in flight. Not counted, and 0, where there is nothing but pace and rate.
    pub in_flight: u32,
    /// Slots now; `None` is unlimited.
    pub slots: Option<u32>,
    /// The most slots there may be.
    pub slots_max: Option<u32>,
    /// What slots may grow to for now.
    pub slots_ceiling: Option<u32>,
    /// Requests in flight that entered while recovering.
    pub recovering_in_flight: u32,
    /// The least gap between entries now.
    pub interval: Duration,
    /// Bytes in flight, as priced.
    pub bytes_in_flight: u64,
    /// Entries per second now, rounded down to a millionth; `None` without a rate.
    pub rate: Option<PerSecond>,
    /// Entries the rate would admit at once; `None` without a rate.
    pub rate_level: Option<i64>,
    /// Tokens used in the window.
    pub tokens_used: u64,
    /// Tokens left in the window, never negative; `None` without a budget.
    pub tokens_remaining: Option<u64>,
    /// Failures the controller remembers.
    pub failures: u64,
    /// The circuit; `None` without one.
    pub circuit: Option<CircuitView>,
    /// The share of failures in the circuit's window; `None` without one, or with nothing in it.
    pub error_rate: Option<f64>,
    /// How requests went since the beginning. Counted, as latency is, where something learns from outcomes: a
    /// controller, a circuit, a budget, a rule for pauses, progress.
    pub outcomes: Outcomes,
    /// How long successes took of late, in the mean; `None` before the first.
    pub latency_mean: Option<Duration>,
    /// What half of them did not exceed, within a sixteenth.
    pub latency_p50: Option<Duration>,
    /// What 95 in 100 of them did not exceed, within a sixteenth.
    pub latency_p95: Option<Duration>,
    /// Requests completed.
    pub completed: u64,
    /// Requests there will be; 0 is unknown.
    pub total: u64,
    /// Completed in percent of the total; `None` without a total.
    pub percentage: Option<f64>,
    /// Time left; `None` while it cannot be told.
    pub eta: Option<Duration>,
    /// Callers waiting.
    pub waiting: u32,
    /// Requests admitted since the beginning.
    pub admitted: u64,
    /// Times the gates were asked since the beginning.
    pub evaluations: u64,
    /// Header values of responses that could not be read, or not be believed; at most 4,294,967,295 are counted.
    pub headers_malformed: u64,
    /// When one more plain request could enter, behind those who wait, as far as time goes; `None` when it waits for a
    /// return, and when it is closed.
    pub next_entry: Option<Instant>,
    /// What [`Auto`](crate::plan::Auto) has found out, and why the limits are where they are; `None` with another controller.
    pub control: Option<Control>,
    /// Panics of listeners and wakers.
    pub listener_panics: u64,
    /// Events lost to a listener that was too slow.
    pub events_lost: u64,
}

/// The part of a [`Snapshot`] that is cheap enough to be read after every call, as of the latest time seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Levels {
    /// Requests in flight.
    pub in_flight: u32,
    /// Slots now; `None` is unlimited.
    pub slots: Option<u32>,
    /// Entries per second now; `None` without a rate.
    pub rate: Option<PerSecond>,
    /// Requests per second that the upstream is estimated to grant; `None` if that is not known.
    pub quota: Option<PerSecond>,
    /// The circuit; `None` without one.
    pub circuit: Option<CircuitState>,
}

/// The state shown: the first that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Closed, and nothing in flight.
    Closed,
    /// Closed, and waiting for what is in flight.
    Draining,
    /// The circuit is open or half-open.
    CircuitOpen,
    /// Nobody enters for now.
    Paused,
    /// The cautious time after a pause.
    Recovering,
    /// The controller has cut and not yet given everything back.
    Cooling,
    /// All is well.
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

/// Where a pause stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// No pause.
    Normal,
    /// Nobody enters.
    Paused,
    /// Entries take recovery slots and pay more for bytes.
    Recovering,
}

/// A circuit as seen at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CircuitView {
    /// Closed, open or half-open.
    pub state: CircuitState,
    /// Failures in a row while closed.
    pub consecutive_failures: u32,
    /// Successful probes while half-open.
    pub probe_successes: u32,
    /// Probes in flight.
    pub probes_in_flight: u32,
    /// Time until probes are let through; zero unless open.
    pub retry_after: Duration,
}

/// The three states of a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CircuitState {
    /// Requests pass.
    Closed,
    /// Requests are refused.
    Open,
    /// Probes pass, others are refused.
    HalfOpen,
}
