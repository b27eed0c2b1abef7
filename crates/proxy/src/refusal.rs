//! Refusals of the proxy itself, in the format that the caller's SDK expects.

use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use tidegate::{LimitError, Refused};
use tidegate_server::LogThrottle;

use crate::codec::{ErrorText, error_body};
use crate::listener::{ResponseBody, full};
use crate::profile::Format;

/// SDKs ignore a longer `retry-after`, and would retry too early.
const SDK_WAIT_MAX: Duration = Duration::from_mins(1);

/// The store may be unavailable for every call.
static FAILURES: LogThrottle = LogThrottle::new();

/// Why a call was not forwarded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    message: String,
    retry_after: Option<Duration>,
    /// A retry can never succeed.
    is_final: bool,
}

impl Refusal {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code: None, message: message.into(), retry_after: None, is_final: true }
    }

    /// A malformed request.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message)
        }
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    /// The upstream cannot be reached or understood, or does not respond.
    pub(crate) fn upstream(status: StatusCode, message: impl Into<String>) -> Self {
        Self { is_final: false, ..Self::new(status, "api_error", message) }
    }

    /// A limit is exceeded for now.
    fn limited(message: impl Into<String>, retry_after: Option<Duration>) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            retry_after,
            is_final: false,
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// Too many calls of this caller: it may try again soon.
    pub(crate) fn busy(message: impl Into<String>) -> Self {
        Self::limited(message, Some(Duration::from_secs(1)))
    }

    /// Whether it says that something of the proxy's own is unavailable.
    pub(crate) fn is_unavailable(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
    }

    fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self {
            retry_after: Some(retry_after),
            is_final: false,
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "api_error", message)
        }
    }

    fn text(&self) -> ErrorText<'_> {
        let Self { status, kind, code, message, retry_after, .. } = self;
        let seconds = retry_after.map(|wait| wait.max(Duration::from_millis(1)).as_secs_f64());
        ErrorText { status: status.as_u16(), kind, code: *code, message, retry_after: seconds }
    }

    /// The response, in the provider's format.
    pub(crate) fn into_response(self, format: Format) -> Response<ResponseBody> {
        let text = self.text();
        let seconds = text.retry_after;
        let mut response = Response::new(full(error_body(format, text)));
        let Self { status, retry_after, is_final, .. } = self;
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = seconds {
            let whole = HeaderValue::from_str(&format!("{:.0}", seconds.ceil()));
            let millis = HeaderValue::from_str(&format!("{:.0}", (seconds * 1_000.0).ceil()));
            if let (Ok(whole), Ok(millis)) = (whole, millis) {
                headers.insert(RETRY_AFTER, whole);
                headers.insert("retry-after-ms", millis);
            }
        }
        if is_final || retry_after.is_some_and(|wait| wait > SDK_WAIT_MAX) {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        response
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let message = format!("the upstream's limits: {refused}");
        match refused {
            Refused::Closed => Self::unavailable("the proxy is stopping", Duration::from_secs(1)),
            Refused::TooLarge { .. } => Self { is_final: true, ..Self::limited(message, None) },
            Refused::Busy { .. } => Self::limited(message, Some(Duration::from_secs(1))),
            Refused::CircuitOpen { retry_after } => {
                Self::unavailable(format!("the upstream fails: {refused}"), retry_after)
            }
            refused => Self::limited(message, Some(refused.retry_after().unwrap_or(Duration::from_secs(1)))),
        }
    }
}

impl From<LimitError> for Refusal {
    fn from(error: LimitError) -> Self {
        let retry_after = error.retry_after();
        match &error {
            LimitError::Limited(_) | LimitError::Waiting { .. } => {
                Self::limited(error.to_string(), retry_after)
            }
            LimitError::TooLarge(_) => Self { is_final: true, ..Self::limited(error.to_string(), None) },
            LimitError::Busy { .. } => {
                Self::unavailable("too many calls wait", retry_after.unwrap_or(Duration::from_secs(1)))
            }
            LimitError::Closed => Self::unavailable("the proxy is stopping", Duration::from_secs(1)),
            LimitError::Disabled { .. } => Self::forbidden(error.to_string()),
            LimitError::Name(_) | LimitError::Cost(_) => Self::invalid(error.to_string()),
            // Messages of the store may contain addresses and paths: they go to the log.
            _ => {
                if let Some(left_out) = FAILURES.allow() {
                    tracing::warn!(%error, left_out, "the limits of a tenant cannot be drawn");
                }
                let wait = retry_after.unwrap_or(Duration::from_secs(1));
                Self::unavailable("the store of the limits is unavailable", wait)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate::Gate;

    use super::*;

    fn header<'a>(response: &'a Response<ResponseBody>, name: &str) -> &'a str {
        response.headers().get(name).map_or("-", |value| value.to_str().unwrap())
    }

    #[test]
    fn busy_limiter_is_no_rate_limit() {
        let retry_after = Some(Duration::from_millis(1_500));
        for (format, kind) in [
            (Format::OpenAi, "\"type\":\"api_error\""),
            (Format::Anthropic, "\"type\":\"api_error\""),
            (Format::Google, "\"status\":\"UNAVAILABLE\""),
        ] {
            let busy = Refusal::from(LimitError::Busy { waiters_max: 9, retry_after });
            assert!(error_body(format, busy.text()).contains(kind), "{format:?}");
            let response = busy.into_response(format);
            assert_eq!((response.status().as_u16(), header(&response, "retry-after")), (503, "2"));
            assert_eq!(header(&response, "x-should-retry"), "-");
        }
    }

    #[test]
    fn refusal_says_when_sdks_may_retry() {
        let refused = |retry_after| Refusal::from(Refused::Limited { by: Gate::Rate, retry_after });
        let response = refused(Some(Duration::from_millis(1_500))).into_response(Format::OpenAi);
        assert_eq!(response.status(), 429);
        assert_eq!((header(&response, "retry-after"), header(&response, "retry-after-ms")), ("2", "1500"));
        assert_eq!(header(&response, "x-should-retry"), "-");
        let response = refused(Some(Duration::from_secs(61))).into_response(Format::OpenAi);
        assert_eq!(header(&response, "x-should-retry"), "false", "longer than SDKs wait");
        let open = Refusal::from(Refused::CircuitOpen { retry_after: Duration::from_secs(9) });
        let open = open.into_response(Format::OpenAi);
        assert_eq!((open.status().as_u16(), header(&open, "retry-after")), (503, "9"));
        let large = Refusal::from(Refused::TooLarge { tokens: 9, capacity: 5 });
        assert_eq!(header(&large.into_response(Format::Anthropic), "x-should-retry"), "false");
        let missing = Refusal::unauthorized("no key").into_response(Format::OpenAi);
        assert_eq!((missing.status().as_u16(), header(&missing, "x-should-retry")), (401, "false"));
    }
}
