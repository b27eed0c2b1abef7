//! What happened, in the past tense, with the numbers.
//!
//! Gates write events while the lock is held; the shell tells them after it is gone.

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
    /// The controller cut.
    Slowed {
        /// Slots before and after.
        slots: Change<u32>,
        /// Least gap between entries before and after.
        interval: Change<Duration>,
        /// Entries per second before and after, where the controller moves the rate.
        rate: Option<Change<PerSecond>>,
        /// What made it cut.
        why: Why,
    },
    /// The controller gave something back.
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
    /// The rate is back where it was before it was cut.
    Recovered {
        /// Entries per second.
        rate: PerSecond,
    },
    /// Slots may grow to the maximum again.
    CeilingLifted {
        /// The ceiling before and after.
        ceiling: Change<u32>,
    },
    /// The circuit opened; whoever waited was refused.
    CircuitOpened {
        /// For how long.
        span: Duration,
        /// What tripped it.
        why: Trip,
    },
    /// The circuit let its first probe through.
    CircuitHalfOpened,
    /// The circuit closed.
    CircuitClosed,
    /// Nobody enters until then.
    Paused {
        /// The end of the pause.
        until: Instant,
        /// Its length as of now.
        span: Duration,
    },
    /// A pause was asked for that is longer than the longest allowed.
    PauseCapped {
        /// What was asked for.
        asked: Duration,
        /// What it was cut to.
        capped: Duration,
    },
    /// A pause, or the cautious time after it, was ended by hand.
    Resumed,
    /// Limits were changed by hand.
    Retuned,
    /// A caller was refused because the queue was full.
    QueueFull {
        /// The queue's bound.
        waiters_max: u32,
    },
    /// The budget's window was full and merged entries; it stays exact to a 2,048th of its span.
    BudgetCoarsened,
    /// A waiter was granted its turn and has not been polled since: it holds what it was granted.
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
        /// Requests there will be.
        total: u64,
    },
    /// The throttle was closed; whoever waited was refused.
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

/// What made a controller cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// So many failures within so long.
    Failures {
        /// Failures counted.
        count: u64,
        /// The window.
        within: Duration,
    },
    /// The far side said it is too much.
    Overload,
    /// A success took much longer than it should.
    Latency {
        /// How long it took.
        latency: Duration,
        /// What was to be expected.
        target: Duration,
    },
}

/// What tripped a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trip {
    /// So many failures in a row.
    Consecutive {
        /// Failures in a row.
        failures: u32,
    },
    /// So many failures of so many.
    ErrorRate {
        /// Failures in the window.
        failures: u64,
        /// Outcomes in the window.
        total: u64,
    },
    /// A probe failed.
    Probe,
}
