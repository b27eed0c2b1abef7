//! Errors of the middleware itself.

use thiserror::Error;
use tidegate_core::authority::InvalidAuthority;
use tidegate_core::refused::Refused;

/// Why a request, or a redirect of it, was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ThrottleError {
    /// It was not admitted, and never sent: the circuit is open, the queue is full, or the throttle is
    /// closed.
    #[error(transparent)]
    Refused(Refused),
    /// Its host cannot be determined.
    #[error("cannot determine the request's host: {0}")]
    NoHost(InvalidAuthority),
    /// It was redirected too often.
    #[error("redirected more than {redirects_max} times")]
    TooManyRedirects {
        /// The maximum number of redirects.
        redirects_max: u32,
    },
    /// It was redirected to an address that is neither `http` nor `https`.
    #[error("redirected to an address that is neither http nor https")]
    RedirectScheme,
}

impl ThrottleError {
    /// The middleware's error, if it is one.
    ///
    /// ```
    /// use tidegate::reqwest::ThrottleError;
    ///
    /// fn wait(error: &reqwest_middleware::Error) -> Option<std::time::Duration> {
    ///     match ThrottleError::of(error)? {
    ///         ThrottleError::Refused(refused) => refused.retry_after(),
    ///         _ => None,
    ///     }
    /// }
    /// ```
    pub fn of(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }
}

impl From<ThrottleError> for reqwest_middleware::Error {
    fn from(error: ThrottleError) -> Self {
        Self::middleware(error)
    }
}
