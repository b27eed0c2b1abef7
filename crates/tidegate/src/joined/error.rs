//! The error of a joined throttle: the throttle's or the limiter's.

use std::time::Duration;

use thiserror::Error;
use tidegate_core::limit::name::InvalidName;
use tidegate_core::refused::Refused;

use crate::limiter::LimitError;

/// Why no permit was granted. Neither the throttle nor the limiter holds anything for the request.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinedError {
    /// The throttle refused: the upstream must not be called now.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The limiter refused: the subject's budget is short, or the store failed.
    #[error(transparent)]
    Limit(#[from] LimitError),
}

impl JoinedError {
    /// When to retry; `None` if a retry cannot succeed or time does not decide.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refused) => refused.retry_after(),
            Self::Limit(error) => error.retry_after(),
        }
    }

    /// Whether retrying the same request can never succeed.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::Refused(refused) => refused.is_final(),
            Self::Limit(error) => error.is_final(),
        }
    }

    /// The throttle's refusal, if the throttle refused.
    pub const fn refused(&self) -> Option<&Refused> {
        match self {
            Self::Refused(refused) => Some(refused),
            Self::Limit(_) => None,
        }
    }

    /// The limiter's error, if the limiter refused.
    pub const fn limit(&self) -> Option<&LimitError> {
        match self {
            Self::Refused(_) => None,
            Self::Limit(error) => Some(error),
        }
    }
}

impl From<InvalidName> for JoinedError {
    fn from(name: InvalidName) -> Self {
        Self::Limit(LimitError::Name(name))
    }
}
