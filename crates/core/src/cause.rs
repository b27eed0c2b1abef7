//! What lies behind an outcome that is no success, for those who count.

/// Where a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The far side said that it is too much: 429.
    Throttled,
    /// The far side failed: 5xx.
    Server,
    /// Nothing came back: timeouts, connections refused or lost.
    Network,
    /// Everything else, such as 408.
    Other,
}
