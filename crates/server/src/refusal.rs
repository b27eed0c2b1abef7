//! Error responses, as problems.
//!
//! Messages of the store may contain file paths: they go to the log, and the caller receives only the kind of
//! error.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate::axum::{problem, store_problem};
use tidegate::{LimitError, LimitField, StoreError, rate_limit_fields, retry_after_field};
use tidegate_client::{LimitState, Problem, Seconds};
use tidegate_core::limit::token::TokenId;

use crate::codec;
use crate::log_throttle::LogThrottle;
use crate::slots::AtCapacity;

/// An error response.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) problem: Box<Problem>,
    /// The `WWW-Authenticate` challenge, if any.
    challenge: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, kind: &str, title: &str, detail: impl Into<String>) -> Self {
        Self { problem: Box::new(Problem::new(status.as_u16(), kind, title, detail)), challenge: None }
    }

    /// A field of the request is invalid.
    pub(crate) fn invalid(field: impl Into<String>, detail: impl Into<String>) -> Self {
        let mut refusal = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", "Invalid request", detail);
        refusal.problem.field = Some(field.into()).filter(|field| !field.is_empty());
        refusal
    }

    pub(crate) fn no_token(detail: &str) -> Self {
        let refusal = Self::new(StatusCode::UNAUTHORIZED, "no-token", "No valid token", detail);
        Self { challenge: Some("Bearer"), ..refusal }
    }

    pub(crate) fn bad_token(detail: &str) -> Self {
        let refusal = Self::new(StatusCode::UNAUTHORIZED, "bad-token", "No valid token", detail);
        Self { challenge: Some("Bearer error=\"invalid_token\""), ..refusal }
    }

    /// Too many requests, or requests of one kind, are in flight, of all callers or of this token.
    pub(crate) fn busy(at: AtCapacity, (max, of): (usize, &str), token: &TokenId) -> Self {
        let detail = match at {
            AtCapacity::Full => format!("too many {of}: {max} are in flight"),
            AtCapacity::Share { held } => format!(
                "too many {of} of the token `{token}`: {held} are in flight, and the rest of {max} is for \
                 other tokens"
            ),
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "Busy", detail)
            .with_retry_after(Duration::from_secs(1))
    }

    pub(crate) fn not_found(kind: &str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, kind, "Not found", detail)
    }

    /// An internal error.
    pub(crate) fn internal() -> Self {
        let detail = "internal error; see the server's log";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "Internal error", detail)
    }

    pub(crate) fn with_retry_after(mut self, span: Duration) -> Self {
        self.problem.retry_after = Some(span.into());
        self
    }
}

impl From<LimitError> for Refusal {
    fn from(error: LimitError) -> Self {
        let problem = Box::new(problem(&error));
        if let LimitError::Unavailable { source, .. } | LimitError::Store(source) = &error {
            log(source, &problem);
        }
        Self { problem, challenge: None }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let problem = Box::new(store_problem(&error));
        log(&error, &problem);
        Self { problem, challenge: None }
    }
}

/// Logs store errors for operators: a few lines, however many requests fail.
fn log(error: &StoreError, problem: &Problem) {
    static UNAVAILABLE: LogThrottle = LogThrottle::new();
    static FULL: LogThrottle = LogThrottle::new();
    static OTHER: LogThrottle = LogThrottle::new();
    if problem.is("store-away") {
        if let Some(left_out) = UNAVAILABLE.allow() {
            tracing::warn!(%error, left_out, "store unavailable");
        }
    } else if problem.is("store-full") {
        if let Some(left_out) = FULL.allow() {
            tracing::error!(%error, left_out, "store full");
        }
    } else if problem.is("internal")
        && let Some(left_out) = OTHER.allow()
    {
        tracing::error!(%error, left_out, "store error");
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = codec::json_response(status, &*self.problem);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(Problem::CONTENT_TYPE));
        if let Some(span) = self.problem.retry_after.map(Seconds::as_duration) {
            retry_after_field(headers, span);
        }
        rate_limit_fields(headers, self.problem.limits.iter().map(field));
        if let Some(challenge) = self.challenge {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        response
    }
}

/// Converts a limit state for the `RateLimit` headers.
fn field(state: &LimitState) -> LimitField<'_> {
    LimitField {
        limit: &state.limit,
        available: state.available,
        amount: state.amount,
        period: state.period.as_duration(),
        retry_after: state.retry_after.map(Seconds::as_duration),
    }
}
