//! Everything that can be answered instead of what was asked for, as a problem.
//!
//! What a store says of itself stays here: a sentence of its own may hold the path of a file. It goes to the log, and the
//! caller is told of what kind it is.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate::axum::{problem, store_problem};
use tidegate::{LimitError, LimitField, StoreError, rate_limit_fields, retry_after_field};
use tidegate_client::{LimitState, Problem, Seconds};

use crate::codec;

/// A problem on its way out.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) problem: Box<Problem>,
    /// Whether to say what kind of credentials are wanted.
    challenge: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, kind: &str, title: &str, detail: impl Into<String>) -> Self {
        Self { problem: Box::new(Problem::new(status.as_u16(), kind, title, detail)), challenge: None }
    }

    /// A field of the request is wrong.
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

    pub(crate) fn busy(requests_max: usize) -> Self {
        let detail = format!("{requests_max} requests are under way, as many as may");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "Busy", detail).after(Duration::from_secs(1))
    }

    pub(crate) fn not_found(kind: &str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, kind, "Not found", detail)
    }

    /// Something went wrong in here.
    pub(crate) fn internal() -> Self {
        let detail = "the server could not do this; its log says why";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "Internal error", detail)
    }

    pub(crate) fn after(mut self, span: Duration) -> Self {
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

/// What is wrong with the store is for those who run it.
fn log(error: &StoreError, problem: &Problem) {
    if problem.is("store-away") {
        tracing::warn!(%error, "the store is away");
    } else if problem.is("store-full") {
        tracing::error!(%error, "the store is full");
    } else if problem.is("internal") {
        tracing::error!(%error, "the store failed");
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = codec::answer(status, &*self.problem);
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

/// A limit as the fields tell it.
fn field(state: &LimitState) -> LimitField<'_> {
    LimitField {
        limit: &state.limit,
        available: state.available,
        amount: state.amount,
        period: state.period.as_duration(),
        retry_after: state.retry_after.map(Seconds::as_duration),
    }
}
