//! Classifies responses of the `http` crate by status and headers, for retries and for the throttle.
//!
//! A response is an `Ok` whatever its status, so [`EveryError`](crate::EveryError) treats them all as
//! successes. [`HttpClasses`] classifies responses by the table of [`Classes`], and errors by a function.

use std::time::{SystemTime, UNIX_EPOCH};

use ::http::{HeaderMap, Response, StatusCode};
use tidegate_core::classes::{Classes, Completion};
use tidegate_core::time::Stamp;

use crate::run::{Class, Classify};

mod codec;
mod fields;

pub use codec::{RETRY_INFO_BODY_MAX, RetryInfo, retry_info};
pub use fields::{LimitField, rate_limit_fields, rate_limit_texts, retry_after_field};

/// Classifies the error of a request without a response.
///
/// Implemented by any `Fn(&E) -> Completion`; [`LostConnection`] is the default.
pub trait ReadError<E> {
    /// How the request completed.
    fn completion(&self, error: &E) -> Completion;
}

/// Classifies every error as a lost connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LostConnection;

impl<E> ReadError<E> for LostConnection {
    fn completion(&self, _: &E) -> Completion {
        Completion::Connection
    }
}

impl<E, F: Fn(&E) -> Completion> ReadError<E> for F {
    fn completion(&self, error: &E) -> Completion {
        self(error)
    }
}

/// Classifies responses by a table of classes; for [`Runner::classified_by`](crate::Runner::classified_by).
///
/// If the last attempt gets a response, that response is the result, whatever its status.
///
/// ```
/// use http::Response;
/// use tidegate::{Classes, Completion, CompletionClass, Cost, HttpClasses, Retry, Throttle};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let classes = HttpClasses::new(Classes::new().status(420, CompletionClass::Overload)?)
///     .errors(|error: &std::io::Error| match error.kind() {
///         std::io::ErrorKind::TimedOut => Completion::Timeout,
///         std::io::ErrorKind::InvalidInput => Completion::Unsent,
///         _ => Completion::Connection,
///     });
/// let response = Throttle::new()
///     .runner()
///     .retry(Retry::attempts(3))
///     .classified_by(classes)
///     .run(Cost::request(), |attempt| async move {
///         let status = if attempt.number == 0 { 420 } else { 200 };
///         Ok(Response::builder().status(status).body("hello").expect("a status"))
///     })
///     .await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct HttpClasses<F = LostConnection> {
    classes: Classes,
    errors: F,
    wall: fn() -> Stamp,
}

impl Default for HttpClasses {
    fn default() -> Self {
        Self::new(Classes::new())
    }
}

impl HttpClasses {
    /// Classifies responses by `classes`, and every error as a lost connection.
    pub const fn new(classes: Classes) -> Self {
        Self { classes, errors: LostConnection, wall: system_time }
    }
}

impl<F> HttpClasses<F> {
    /// Replaces the classification of errors.
    pub fn errors<E, G: Fn(&E) -> Completion>(self, errors: G) -> HttpClasses<G> {
        HttpClasses { classes: self.classes, errors, wall: self.wall }
    }

    /// Replaces the wall clock, which resolves dates in headers if the upstream sends no time.
    #[must_use]
    pub const fn wall(mut self, wall: fn() -> Stamp) -> Self {
        self.wall = wall;
        self
    }

    /// Classifies a response by status and headers.
    pub fn read(&self, status: StatusCode, headers: &HeaderMap) -> Class {
        // Without headers the time does not matter.
        if headers.is_empty() {
            return Class::of(&self.classes, status.into());
        }
        let (class, outcome) = self.classes.read_parts(status, headers, (self.wall)());
        Class::new(class, outcome)
    }

    /// The table.
    pub const fn classes(&self) -> &Classes {
        &self.classes
    }
}

impl<B, E, F: ReadError<E>> Classify<Response<B>, E> for HttpClasses<F> {
    fn classify(&self, result: &Result<Response<B>, E>) -> Class {
        match result {
            Ok(response) => self.read(response.status(), response.headers()),
            Err(error) => Class::of(&self.classes, self.errors.completion(error)),
        }
    }
}

/// The system's time; times before 1970 count as 1970.
fn system_time() -> Stamp {
    Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
