//! A controller's report: its estimates and the reason for the current limits.

use std::fmt;

use crate::per_second::PerSecond;

/// The state of [`Auto`](crate::plan::Auto) at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Control {
    /// The reason for the current limits.
    pub reason: Reason,
    /// Requests.
    pub requests: Estimate,
    /// Tokens of all kinds, once a request has cost any.
    pub tokens: Estimate,
    /// Input tokens, once a request has named any.
    pub input_tokens: Estimate,
    /// Output tokens, once a request has named any.
    pub output_tokens: Estimate,
    /// Slots now.
    pub slots: u32,
}

/// The estimate for one dimension, in units per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimate {
    /// The highest rate that is sent; `None` if nothing was counted in this dimension yet.
    pub pace: Option<PerSecond>,
    /// The estimated rate that the upstream grants; `None` before its first rejection.
    pub quota: Option<PerSecond>,
}

/// The reason for the current limits: the first that applies.
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
    /// The name used in metrics and output.
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
