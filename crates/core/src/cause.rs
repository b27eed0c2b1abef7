//! The cause of an unsuccessful outcome, for metrics.

/// Where a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The upstream rejected the request because of a rate limit: 429.
    Throttled,
    /// The upstream failed: 5xx.
    Server,
    /// No response: a timeout, or a connection refused or lost.
    Network,
    /// Everything else, such as 408.
    Other,
}
