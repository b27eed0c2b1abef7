//! Events of a throttle, with their numbers.
//!
//! Gates record events while the lock is held; the shell delivers them after releasing it.

use std::time::Duration;

use crate::control::Reason;
use crate::per_second::PerSecond;
use crate::time::Instant;

/// An event and when it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notice {
    /// The throttle's latest reading of its clock.
    pub at: Instant,
    /// What happened.
    pub event: Event,
}

impl Notice {
    /// `event` at `at`.
    pub const fn new(at: Instant, event: Event) -> Self {
        Self { at, event }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The controller cut the limits.
    Slowed {
        /// Slots before and after.
        slots: Change<u32>,
        /// Least gap between entries before and after.
        interval: Change<Duration>,
        /// Entries per second before and after, where the controller moves the rate.
        rate: Option<Change<PerSecond>>,
        /// The cause of the cut.
        why: Why,
    },
    /// The controller raised the limits again.
    SpedUp {
        /// Slots before and after.
        slots: Change<u32>,
        /// Least gap between entries before and after.
        interval: Change<Duration>,
        /// Entries per second before and after, where the controller moves the rate.
        rate: Option<Change<PerSecond>>,
    },
    /// The reason for the limits of [`Auto`](crate::plan::Auto) changed.
    Controlled {
        /// The reason before and after.
        reason: Change<Reason>,
    },
    /// The rate has returned to its value before the cut.
    Recovered {
        /// Entries per second.
        rate: PerSecond,
    },
    /// Slots may grow to the maximum again.
    CeilingLifted {
        /// The ceiling before and after.
        ceiling: Change<u32>,
    },
    /// The circuit opened; all waiters were refused.
    CircuitOpened {
        /// For how long.
        span: Duration,
        /// What tripped it.
        why: Trip,
    },
    /// The circuit admitted its first probe.
    CircuitHalfOpened,
    /// The circuit closed.
    CircuitClosed,
    /// No request is admitted until the end of the pause.
    Paused {
        /// The end of the pause.
        until: Instant,
        /// Its length as of now.
        span: Duration,
    },
    /// A requested pause was longer than the longest allowed.
    PauseCapped {
        /// The requested length.
        asked: Duration,
        /// The length it was cut to.
        capped: Duration,
    },
    /// A pause, or the recovery after it, was ended by hand.
    Resumed,
    /// Limits were changed by hand.
    Retuned,
    /// A caller was refused because the queue was full.
    QueueFull {
        /// The queue's bound.
        waiters_max: u32,
    },
    /// The budget's window was full and merged entries; it stays accurate to 1/2048 of its span.
    BudgetCoarsened,
    /// A granted waiter has not been polled since; it still holds its grant.
    GrantUnseen {
        /// For how long at least.
        span: Duration,
    },
    /// A milestone was reached.
    Progressed {
        /// The milestone.
        percent: u32,
        /// Requests completed.
        completed: u64,
        /// Requests expected in total.
        total: u64,
    },
    /// The throttle was closed; all waiters were refused.
    Closed {
        /// Requests still in flight.
        in_flight: u32,
    },
    /// The last request of a closed throttle ended.
    Drained,
}

/// A value before and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change<T> {
    /// Before.
    pub from: T,
    /// After.
    pub to: T,
}

/// The cause of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Too many failures within a window.
    Failures {
        /// Failures counted.
        count: u64,
        /// The window.
        within: Duration,
    },
    /// The upstream reported overload.
    Overload,
    /// A success took much longer than expected.
    Latency {
        /// How long it took.
        latency: Duration,
        /// The expected latency.
        target: Duration,
    },
}

/// What tripped a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trip {
    /// Too many consecutive failures.
    Consecutive {
        /// Failures in a row.
        failures: u32,
    },
    /// Too high a share of failures.
    ErrorRate {
        /// Failures in the window.
        failures: u64,
        /// Outcomes in the window.
        total: u64,
    },
    /// A probe failed.
    Probe,
}
