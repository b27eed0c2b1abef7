//! Every reason why a joined throttle turns a caller away: the throttle's, or the limiter's.

use std::time::Duration;

use thiserror::Error;
use tidegate_core::limit::name::InvalidName;
use tidegate_core::refused::Refused;

use crate::limiter::LimitError;

/// Why there is no permit. Nothing is held: not by the throttle, and not by the limiter.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinedError {
    /// The throttle refused: the callee is not to be called now.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The limiter refused: the subject's budget, or the store that keeps it.
    #[error(transparent)]
    Limit(#[from] LimitError),
}

impl JoinedError {
    /// When it is worth asking again; `None` if never, or if time does not decide.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refused) => refused.retry_after(),
            Self::Limit(error) => error.retry_after(),
        }
    }

    /// Whether asking again for the same can never help.
    pub const fn is_final(&self) -> bool {
        match self {
            Self::Refused(refused) => refused.is_final(),
            Self::Limit(error) => error.is_final(),
        }
    }

    /// What the throttle said, if it was the throttle.
    pub const fn refused(&self) -> Option<&Refused> {
        match self {
            Self::Refused(refused) => Some(refused),
            Self::Limit(_) => None,
        }
    }

    /// What the limiter said, if it was the limiter.
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
