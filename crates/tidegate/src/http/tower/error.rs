//! Why a call through a throttle failed: it was not admitted, or it was and failed.

use thiserror::Error;
use tidegate_core::authority::InvalidAuthority;
use tidegate_core::refused::Refused;

/// An error of any type, as tower's layers hand it on.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a call failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CallError {
    /// It was not admitted: the circuit is open, the line is full, the throttle is closed. Nothing was sent.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The request names no host, so there is no throttle for it. Nothing was sent.
    #[error("the request goes to no host that can be told: {0}")]
    NoHost(#[from] InvalidAuthority),
    /// The service behind the throttle failed. Its own error.
    #[error(transparent)]
    Inner(BoxError),
}

impl CallError {
    /// Why it was not admitted, where that is why it failed.
    pub const fn refused(&self) -> Option<&Refused> {
        match self {
            Self::Refused(refused) => Some(refused),
            Self::NoHost(_) | Self::Inner(_) => None,
        }
    }

    /// The inner service's own error, where it is of this type.
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
