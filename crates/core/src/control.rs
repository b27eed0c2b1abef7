//! What a controller reports: its estimates, and why the limits are where they are.

use std::fmt;

use crate::per_second::PerSecond;

/// What [`Auto`](crate::plan::Auto) knows at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Control {
    /// Why the limits are where they are.
    pub reason: Reason,
    /// Requests.
    pub requests: Estimate,
    /// Tokens, once a request cost any.
    pub tokens: Estimate,
    /// Slots now.
    pub slots: u32,
}

/// What is known of one dimension, in units per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimate {
    /// What is sent at most; `None` if nothing was counted in this dimension yet.
    pub pace: Option<PerSecond>,
    /// What the upstream is estimated to grant; `None` before its first rejection.
    pub quota: Option<PerSecond>,
}

/// Why the limits are where they are: the first that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The upstream rejects everything: one request at a time tests it.
    Outage,
    /// Quota headers set the pace.
    Headers,
    /// The upstream caps how many requests are in flight.
    Concurrency,
    /// Latency rose with the number in flight, and slots were cut.
    Latency,
    /// A configured ceiling is reached, and callers wait for it.
    Ceiling,
    /// Other clients take from the same quota.
    Shared,
    /// The pace swings around its estimate, or has not met a limit yet.
    Probing,
}

impl Reason {
    /// Its name, as metrics and programs show it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Outage => "outage",
            Self::Headers => "headers",
            Self::Concurrency => "concurrency",
            Self::Latency => "latency",
            Self::Ceiling => "ceiling",
            Self::Shared => "shared",
            Self::Probing => "probing",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
