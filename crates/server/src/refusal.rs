//! Everything that can be answered instead of what was asked for, as a problem.
//!
//! What a store says of itself stays here: a sentence of its own may hold the path of a file. It goes to the log, and the
//! caller is told of what kind it is.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate::{LimitError, LimitLine, StoreError};
use tidegate_client::{LimitState, Problem, Seconds};

use crate::codec;
use crate::fields;

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

    fn conflict(kind: &str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, kind, "Not as expected", detail)
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

    fn about(mut self, lines: &[LimitLine]) -> Self {
        let state = |line: &LimitLine| LimitState::new(&line.balance, Some(&line.source));
        self.problem.limits = lines.iter().map(state).collect();
        self
    }
}

impl From<LimitError> for Refusal {
    fn from(error: LimitError) -> Self {
        let invalid = |kind: &str, detail: String| {
            Self::new(StatusCode::UNPROCESSABLE_ENTITY, kind, "Invalid request", detail)
        };
        let detail = error.to_string();
        match error {
            LimitError::Limited(limited) => {
                let refusal = Self::new(StatusCode::TOO_MANY_REQUESTS, "limited", "Limit used up", detail);
                let after = limited.retry_after().unwrap_or_default();
                refusal.about(&limited.lines).after(after)
            }
            LimitError::TooLarge(limited) => invalid("too-large", detail).about(&limited.lines),
            LimitError::Waiting { retry_after, .. } => {
                let refusal =
                    Self::new(StatusCode::TOO_MANY_REQUESTS, "waiting", "Others are waiting", detail);
                refusal.after(retry_after.unwrap_or(Duration::from_secs(1)))
            }
            LimitError::Busy { .. } => {
                let refusal = Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "Busy", detail);
                refusal.after(Duration::from_secs(1))
            }
            LimitError::Closed => {
                let detail = "the server is stopping";
                let refusal = Self::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "Stopping", detail);
                refusal.after(Duration::from_secs(1))
            }
            LimitError::Reused { .. } => {
                let mut refusal = Self::conflict("id-reused", detail);
                refusal.problem.field = Some("id".to_owned());
                refusal
            }
            LimitError::NoLimits { .. } => invalid("no-limits", detail),
            LimitError::Unavailable { source, retry_after } => Self::from(source).after(retry_after),
            LimitError::Store(error) => error.into(),
            LimitError::Cost(_) => Self::invalid("cost", detail),
            LimitError::Policy(_) => Self::invalid("limits", detail),
            LimitError::Deadline { .. } => Self::invalid("deadline", detail),
            // A name, an entity that is too deep, and whatever else cannot be asked for.
            _ => invalid("invalid", detail),
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let detail = error.to_string();
        match error {
            StoreError::Unavailable { .. } | StoreError::TimedOut { .. } => {
                tracing::warn!(error = %detail, "the store is away");
                let refusal = Self::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "store-away",
                    "The store is away",
                    "the store is away, or did not answer in time",
                );
                refusal.after(Duration::from_secs(1))
            }
            StoreError::Stale { current, .. } => {
                let mut refusal = Self::conflict("stale", detail);
                refusal.problem.version = current.map(tidegate::Version::number);
                refusal
            }
            // The ids in these sentences are no secrets without their proofs.
            StoreError::Ended { .. } => {
                Self::new(StatusCode::GONE, "lease-ended", "The lease has ended", detail)
            }
            StoreError::Late { done, .. } => {
                let mut refusal = Self::conflict("late-step", detail);
                refusal.problem.step = Some(done);
                refusal
            }
            StoreError::NoLease { .. } => Self::not_found("no-lease", detail),
            StoreError::NoEntity { .. } => Self::not_found("no-entity", detail),
            StoreError::NoToken { .. } => Self::not_found("unknown-token", detail),
            StoreError::HasChildren { .. } => Self::conflict("has-children", detail),
            StoreError::Entity(_) | StoreError::Token(_) | StoreError::Invalid { .. } => {
                Self::invalid("", detail)
            }
            StoreError::Full { .. } => {
                tracing::error!(error = %detail, "the store is full");
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "store-full", "The store is full", detail)
            }
            _ => {
                tracing::error!(error = %detail, "the store failed");
                Self::internal()
            }
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = codec::answer(status, &*self.problem);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(Problem::CONTENT_TYPE));
        if let Some(span) = self.problem.retry_after.map(Seconds::as_duration) {
            fields::retry_after(headers, span);
        }
        fields::rate_limit(headers, &self.problem.limits);
        if let Some(challenge) = self.challenge {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        response
    }
}
