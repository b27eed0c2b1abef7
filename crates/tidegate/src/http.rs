//! Work that answers with responses of the `http` crate: read by their status and headers, tried again as they say.
//!
//! A response is an `Ok` whatever its status, so [`EveryError`](crate::EveryError) sees only successes in them.
//! [`HttpClasses`] reads them by the table of [`Classes`], and errors by a function of one's own.

use std::time::{SystemTime, UNIX_EPOCH};

use ::http::{HeaderMap, Response, StatusCode};
use tidegate_core::classes::{Classes, Ended};
use tidegate_core::time::Stamp;

use crate::run::{Class, Classify};

mod codec;
mod fields;

pub use codec::{RETRY_INFO_BODY_MAX, RetryInfo, retry_info};
pub use fields::{LimitField, rate_limit_fields, rate_limit_texts, retry_after_field};

/// Says how a request ended that brought an error and no response.
///
/// Any `Fn(&E) -> Ended` does; [`Lost`] is the default.
pub trait ReadError<E> {
    /// How it ended.
    fn ended(&self, error: &E) -> Ended;
}

/// Every error is a lost connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lost;

impl<E> ReadError<E> for Lost {
    fn ended(&self, _: &E) -> Ended {
        Ended::Connection
    }
}

impl<E, F: Fn(&E) -> Ended> ReadError<E> for F {
    fn ended(&self, error: &E) -> Ended {
        self(error)
    }
}

/// Reads responses by a table of classes; for [`Runner::classified_by`](crate::Runner::classified_by).
///
/// When the last attempt brings a response, that response is the answer, whatever its status.
///
/// ```
/// use http::Response;
/// use tidegate::{Classes, Cost, Ended, HttpClasses, Retry, Sort, Throttle};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let classes = HttpClasses::new(Classes::new().status(420, Sort::Overload)?)
///     .errors(|error: &std::io::Error| match error.kind() {
///         std::io::ErrorKind::TimedOut => Ended::Timeout,
///         std::io::ErrorKind::InvalidInput => Ended::Unsent,
///         _ => Ended::Connection,
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
pub struct HttpClasses<F = Lost> {
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
    /// Reads responses by `classes`, and every error as a lost connection.
    pub const fn new(classes: Classes) -> Self {
        Self { classes, errors: Lost, wall: system_time }
    }
}

impl<F> HttpClasses<F> {
    /// The same with another reading of errors.
    pub fn errors<E, G: Fn(&E) -> Ended>(self, errors: G) -> HttpClasses<G> {
        HttpClasses { classes: self.classes, errors, wall: self.wall }
    }

    /// The same with another wall clock, by which dates in headers are read where the far side tells no time.
    #[must_use]
    pub const fn wall(mut self, wall: fn() -> Stamp) -> Self {
        self.wall = wall;
        self
    }

    /// What a response with this status and these headers means.
    pub fn read(&self, status: StatusCode, headers: &HeaderMap) -> Class {
        // Where nothing is said the time does not matter.
        if headers.is_empty() {
            return Class::of(&self.classes, status.into());
        }
        let (sort, outcome) = self.classes.read_parts(status, headers, (self.wall)());
        Class::sorted(sort, outcome)
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
            Err(error) => Class::of(&self.classes, self.errors.ended(error)),
        }
    }
}

/// The system's time; what is before 1970 is 1970.
fn system_time() -> Stamp {
    Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
