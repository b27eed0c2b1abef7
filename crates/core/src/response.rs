//! Outcomes from responses of the `http` crate; nothing here sends or receives.

use http::{HeaderMap, Response, StatusCode};

use crate::classes::{Classes, Completion, CompletionClass};
use crate::feedback::headers::{Signals, read, sent_at};
use crate::outcome::Outcome;
use crate::time::Stamp;

impl From<StatusCode> for Completion {
    fn from(status: StatusCode) -> Self {
        Self::Status(status.as_u16())
    }
}

impl Outcome {
    /// Returns the outcome of a response received at `received_at`, in wall time. See [`Classes`] for the
    /// default table and for overrides.
    ///
    /// Dates in the headers are relative to the upstream's clock if it sent a `Date`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate_core::cause::Cause;
    /// use tidegate_core::outcome::Outcome;
    /// use tidegate_core::time::Stamp;
    ///
    /// let response = http::Response::builder().status(429).header("retry-after", "2").body(())?;
    /// let outcome = Outcome::from_response(&response, Stamp::from_secs(1_800_000_000));
    /// assert_eq!(outcome, Outcome::overload().because(Cause::Throttled).retry_after(Duration::from_secs(2)));
    /// # Ok::<(), http::Error>(())
    /// ```
    pub fn from_response<B>(response: &Response<B>, received_at: Stamp) -> Self {
        const DEFAULT: &Classes = &Classes::new();
        DEFAULT.outcome_of(response, received_at)
    }
}

impl Classes {
    /// Returns the outcome of a response received at `received_at`: [`Outcome::from_response`] with this
    /// table.
    pub fn outcome_of<B>(&self, response: &Response<B>, received_at: Stamp) -> Outcome {
        self.outcome_of_parts(response.status(), response.headers(), received_at)
    }

    /// Like [`outcome_of`](Self::outcome_of), from the status and the headers only.
    pub fn outcome_of_parts(&self, status: StatusCode, headers: &HeaderMap, received_at: Stamp) -> Outcome {
        self.outcome_with(status.into(), &signals(headers, received_at))
    }

    /// Returns the class and the outcome of a response.
    pub fn read_parts(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        received_at: Stamp,
    ) -> (CompletionClass, Outcome) {
        let signals = signals(headers, received_at);
        (self.classify_with(status.into(), &signals), self.outcome_with(status.into(), &signals))
    }
}

/// Reads the limits in these headers, relative to the upstream's clock if it sent a `Date`.
///
/// ```
/// use tidegate_core::{response::signals, time::Stamp};
///
/// let headers = http::HeaderMap::from_iter([(http::header::RETRY_AFTER, "3".parse()?)]);
/// let hint = signals(&headers, Stamp::from_secs(1_800_000_000)).hint();
/// assert_eq!(hint.map(|hint| hint.wait.as_secs()), Some(3));
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
pub fn signals(headers: &HeaderMap, received_at: Stamp) -> Signals {
    read(headers, sent_at(headers, received_at))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cause::Cause;
    use crate::outcome::Kind;

    /// 2026-01-31T09:30:00Z.
    const NOW: Stamp = Stamp::from_secs(1_769_851_800);

    type Headers<'a> = &'a [(&'a str, &'a [u8])];

    fn response(status: u16, headers: Headers<'_>) -> Response<&'static str> {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body("body").unwrap()
    }

    #[test]
    fn a_response_becomes_an_outcome() {
        let table: [(u16, Headers<'_>, Outcome); 6] = [
            (204, &[], Outcome::success()),
            (429, &[], Outcome::overload().because(Cause::Throttled)),
            (404, &[], Outcome::mistake()),
            (700, &[], Outcome::failure().because(Cause::Server)),
            (200, &[("Retry-After", b"2")], Outcome::success().retry_after(Duration::from_secs(2))),
            (
                503,
                &[("retry-after", b"Sat, 31 Jan 2026 09:30:20 GMT")],
                Outcome::overload().because(Cause::Server).retry_after(Duration::from_secs(20)),
            ),
        ];
        for (status, headers, outcome) in table {
            assert_eq!(Outcome::from_response(&response(status, headers), NOW), outcome, "{status}");
        }
    }

    #[test]
    fn dates_are_relative_to_the_upstream_clock() {
        let headers: [(&str, &[u8]); 2] =
            [("date", b"Sat, 31 Jan 2026 09:25:00 GMT"), ("retry-after", b"Sat, 31 Jan 2026 09:25:20 GMT")];
        let outcome = Outcome::from_response(&response(503, &headers), NOW);
        assert_eq!(outcome.retry_after, Some(Duration::from_secs(20)));
    }

    #[test]
    fn custom_table_reads_responses_and_parts() {
        let classes = Classes::new().status(404, CompletionClass::Transient).unwrap();
        let response = response(404, &[("retry-after", b"\xff")]);
        let outcome = classes.outcome_of(&response, NOW);
        assert_eq!((outcome.kind(), outcome.malformed()), (Kind::Failure, 1));
        let (parts, _) = response.into_parts();
        assert_eq!(classes.outcome_of_parts(parts.status, &parts.headers, NOW), outcome);
        assert_eq!(
            classes.read_parts(parts.status, &parts.headers, NOW),
            (CompletionClass::Transient, outcome)
        );
    }
}
