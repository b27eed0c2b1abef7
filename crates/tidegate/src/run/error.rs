//! Why work under a throttle ended without success: its own last error, and why that was the last.

use std::fmt;

use tidegate_core::refused::Refused;

/// Why work under a throttle did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The work never ran.
    Refused(Refused),
    /// The work ran and failed; its own last error, and why there was no further attempt.
    Failed {
        /// The work's last error.
        error: E,
        /// Attempts made.
        attempts: u32,
        /// Why there was no further one.
        why: Stopped,
    },
}

/// Why no further attempt was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// All attempts were made.
    Spent,
    /// The error is not worth another.
    NotRetryable,
    /// Too much of the traffic is retries already.
    Budget,
    /// The next attempt was not admitted: the circuit is open, the throttle is closed.
    Refused(Refused),
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refused) => write!(f, "{refused}"),
            Self::Failed { error, attempts, why } => write!(f, "{error} (attempt {attempts}; {why})"),
        }
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spent => f.write_str("no attempts are left"),
            Self::NotRetryable => f.write_str("trying again would not help"),
            Self::Budget => f.write_str("the retry budget is used up"),
            Self::Refused(refused) => write!(f, "not tried again: {refused}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused(refused) => Some(refused),
            // Its own words are in ours already.
            Self::Failed { error, .. } => error.source(),
        }
    }
}

impl<E> RunError<E> {
    /// The work's own last error, if it ran.
    pub fn into_error(self) -> Option<E> {
        match self {
            Self::Refused(_) => None,
            Self::Failed { error, .. } => Some(error),
        }
    }
}
