//! What went wrong, as gRPC says it. Envoy takes every one of these for a service that failed, and does as it was told for that.

use axum::http::StatusCode;
use tonic::{Code, Status};

use crate::refusal::Refusal;

/// The status of what is a problem over HTTP.
pub(super) fn status(refusal: &Refusal) -> Status {
    let problem = &refusal.problem;
    let code = match StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR) {
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        StatusCode::INSUFFICIENT_STORAGE => Code::ResourceExhausted,
        code if code.is_client_error() => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    Status::new(code, problem.detail.clone())
}
