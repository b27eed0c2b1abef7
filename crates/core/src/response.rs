//! Outcomes from responses of the `http` crate: its types, and nothing that sends or receives.

use http::{HeaderMap, Response, StatusCode};

use crate::classes::{Classes, Ended, Sort};
use crate::feedback::headers::{Signals, read, sent_at};
use crate::outcome::Outcome;
use crate::time::Stamp;

impl From<StatusCode> for Ended {
    fn from(status: StatusCode) -> Self {
        Self::Status(status.as_u16())
    }
}

impl Outcome {
    /// How a request went whose response came at `received_at`, by the wall's time; see [`Classes`] for what means
    /// what, and for a table of one's own.
    ///
    /// Dates in the headers are read by the far side's clock where its `Date` tells that.
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
        const USUAL: &Classes = &Classes::new();
        USUAL.outcome_of(response, received_at)
    }
}

impl Classes {
    /// How a request went whose response came at `received_at`: [`Outcome::from_response`] by this table.
    pub fn outcome_of<B>(&self, response: &Response<B>, received_at: Stamp) -> Outcome {
        self.outcome_of_parts(response.status(), response.headers(), received_at)
    }

    /// The same where only the status and the headers are at hand.
    pub fn outcome_of_parts(&self, status: StatusCode, headers: &HeaderMap, received_at: Stamp) -> Outcome {
        self.outcome_with(status.into(), &signals(headers, received_at))
    }

    /// What sort of ending it is, and how it went.
    pub fn read_parts(&self, status: StatusCode, headers: &HeaderMap, received_at: Stamp) -> (Sort, Outcome) {
        let signals = signals(headers, received_at);
        (self.sort_with(status.into(), &signals), self.outcome_with(status.into(), &signals))
    }
}

/// What these headers say of limits, by the far side's clock where it tells the time.
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
            (404, &[], Outcome::ignored()),
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
    fn dates_are_read_by_the_far_sides_clock() {
        let headers: [(&str, &[u8]); 2] =
            [("date", b"Sat, 31 Jan 2026 09:25:00 GMT"), ("retry-after", b"Sat, 31 Jan 2026 09:25:20 GMT")];
        let outcome = Outcome::from_response(&response(503, &headers), NOW);
        assert_eq!(outcome.retry_after, Some(Duration::from_secs(20)));
    }

    #[test]
    fn a_table_of_ones_own_reads_responses_and_their_parts() {
        let classes = Classes::new().status(404, Sort::Transient).unwrap();
        let response = response(404, &[("retry-after", b"\xff")]);
        let outcome = classes.outcome_of(&response, NOW);
        assert_eq!((outcome.kind(), outcome.malformed()), (Kind::Failure, 1));
        let (parts, _) = response.into_parts();
        assert_eq!(classes.outcome_of_parts(parts.status, &parts.headers, NOW), outcome);
        assert_eq!(classes.read_parts(parts.status, &parts.headers, NOW), (Sort::Transient, outcome));
    }
}
