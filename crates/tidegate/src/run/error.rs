//! Errors of work under a throttle: its last error, and why it was not retried.

use std::error::Error;
use std::fmt;
use std::ops::Deref;

use tidegate_core::refused::Refused;
use tidegate_core::retry::LastAttempt;

/// Why work under a throttle did not succeed.
///
/// The message does not contain the work's error, which is the [`source`](Error::source); `{:#}` appends it. An error
/// that is no [`Error`] itself, such as `anyhow::Error` or a `Box<dyn Error>`, is converted by [`boxed`](Self::boxed).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError<E, R = Refused> {
    /// The work never ran.
    Refused(R),
    /// The work ran and failed: its last error, and why there was no further attempt.
    Failed {
        /// The work's last error.
        error: E,
        /// Attempts made.
        attempts: u32,
        /// Why there was no further attempt.
        why: StopReason<R>,
    },
}

/// Why no further attempt was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason<R = Refused> {
    /// All attempts were used.
    Spent,
    /// The error is not retryable.
    NotRetryable,
    /// The error is retryable, but [`Retry::off`](crate::Retry::off) allows one attempt only.
    Off,
    /// The retry budget is used up: too much of the traffic is retries.
    Budget,
    /// The next attempt was refused: the circuit is open or the throttle is closed.
    Refused(R),
}

impl<R> From<LastAttempt> for StopReason<R> {
    fn from(last: LastAttempt) -> Self {
        match last {
            LastAttempt::NotRetryable => Self::NotRetryable,
            LastAttempt::Off => Self::Off,
            LastAttempt::Spent | LastAttempt::Deadline => Self::Spent,
            LastAttempt::Budget => Self::Budget,
        }
    }
}

/// An error of any type, made by [`RunError::boxed`].
///
/// Like `anyhow::Error` it derefs to an [`Error`] and is none itself.
#[derive(Debug)]
pub struct BoxedError(Box<dyn Error + Send + Sync>);

impl<E: fmt::Display, R: fmt::Display> fmt::Display for RunError<E, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (error, attempts, why) = match self {
            Self::Refused(refused) => return write!(f, "{refused}"),
            Self::Failed { error, attempts, why } => (error, attempts, why),
        };
        let plural = if *attempts == 1 { "" } else { "s" };
        write!(f, "failed after {attempts} attempt{plural} ({why})")?;
        if f.alternate() { write!(f, ": {error:#}") } else { Ok(()) }
    }
}

impl<R: fmt::Display> fmt::Display for StopReason<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spent => f.write_str("no attempts are left"),
            Self::NotRetryable => f.write_str("not retryable"),
            Self::Off => f.write_str("retry is off"),
            Self::Budget => f.write_str("the retry budget is used up"),
            Self::Refused(refused) => write!(f, "not retried: {refused}"),
        }
    }
}

impl fmt::Display for BoxedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Deref for BoxedError {
    type Target = dyn Error + Send + Sync;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl<E: Error + 'static, R: Error> Error for RunError<E, R> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused(refused) => refused.source(),
            Self::Failed { error, .. } => Some(error),
        }
    }
}

impl<R: Error> Error for RunError<BoxedError, R> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused(refused) => refused.source(),
            Self::Failed { error, .. } => Some(&*error.0),
        }
    }
}

impl<E, R> RunError<E, R> {
    /// The last error of the work, if it ran.
    pub fn into_error(self) -> Option<E> {
        match self {
            Self::Refused(_) => None,
            Self::Failed { error, .. } => Some(error),
        }
    }

    /// Boxes the work's error, so that this is an [`Error`] where that is none: for work that returns `anyhow::Error`,
    /// `Box<dyn Error + Send + Sync>`, `String` or `&str`.
    ///
    /// ```
    /// use std::error::Error;
    /// use tidegate::{Retry, RunError, Throttle};
    ///
    /// async fn fetch() -> Result<u32, Box<dyn Error + Send + Sync>> {
    ///     Ok("not a number".parse()?)
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    /// let throttle = Throttle::auto().retry(Retry::off()).build()?;
    /// let failed = throttle.run((), |_| fetch()).await.map_err(RunError::boxed).unwrap_err();
    /// assert_eq!(failed.to_string(), "failed after 1 attempt (retry is off)");
    /// assert_eq!(failed.source().unwrap().to_string(), "invalid digit found in string");
    /// # Ok(())
    /// # }
    /// ```
    pub fn boxed(self) -> RunError<BoxedError, R>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        match self {
            Self::Refused(refused) => RunError::Refused(refused),
            Self::Failed { error, attempts, why } => {
                RunError::Failed { error: BoxedError(error.into()), attempts, why }
            }
        }
    }
}
