//! Errors of work under a throttle: its last error, and why it was not retried.

use std::fmt;

use tidegate_core::refused::Refused;

/// Why work under a throttle did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The work never ran.
    Refused(Refused),
    /// The work ran and failed: its last error, and why there was no further attempt.
    Failed {
        /// The work's last error.
        error: E,
        /// Attempts made.
        attempts: u32,
        /// Why there was no further attempt.
        why: StopReason,
    },
}

/// Why no further attempt was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// All attempts were used.
    Spent,
    /// The error is not retryable.
    NotRetryable,
    /// The retry budget is used up: too much of the traffic is retries.
    Budget,
    /// The next attempt was refused: the circuit is open or the throttle is closed.
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

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spent => f.write_str("no attempts are left"),
            Self::NotRetryable => f.write_str("not retryable"),
            Self::Budget => f.write_str("the retry budget is used up"),
            Self::Refused(refused) => write!(f, "not retried: {refused}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused(refused) => Some(refused),
            // The error's own message is already part of ours.
            Self::Failed { error, .. } => error.source(),
        }
    }
}

impl<E> RunError<E> {
    /// The last error of the work, if it ran.
    pub fn into_error(self) -> Option<E> {
        match self {
            Self::Refused(_) => None,
            Self::Failed { error, .. } => Some(error),
        }
    }
}
