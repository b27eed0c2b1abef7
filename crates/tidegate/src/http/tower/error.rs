//! Errors of a call through a throttle: refused, or failed.

use thiserror::Error;
use tidegate_core::authority::InvalidAuthority;
use tidegate_core::refused::Refused;

/// A boxed error, as tower's layers use it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a call failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CallError {
    /// It was not admitted: the circuit is open, the queue is full, or the throttle is closed. Nothing was
    /// sent.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The request names no host, so there is no throttle for it. Nothing was sent.
    #[error("cannot determine the request's host: {0}")]
    NoHost(#[from] InvalidAuthority),
    /// The inner service failed.
    #[error(transparent)]
    Inner(BoxError),
}

impl CallError {
    /// The refusal, if the call was not admitted.
    pub const fn refused(&self) -> Option<&Refused> {
        match self {
            Self::Refused(refused) => Some(refused),
            Self::NoHost(_) | Self::Inner(_) => None,
        }
    }

    /// The inner service's error, if it has this type.
    pub fn inner<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Inner(error) => error.downcast_ref(),
            Self::Refused(_) | Self::NoHost(_) => None,
        }
    }

    pub(super) fn of(error: impl Into<BoxError>) -> Self {
        Self::Inner(error.into())
    }
}
